"""Evaluation: methods side by side on the held-out prompts, in this process, and the report of it."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.prompts import Prompt, read_prompts, spread
from tierspec.artifacts import atomic_write_json, read_object, run_directory, sha256_of
from tierspec.config import Settings
from tierspec.decoding import LocalCell, SamplingParams
from tierspec.drafters import load_drafter
from tierspec.drafters.payoff import WEIGHTS_FILE, PayoffPredictor, load_payoff
from tierspec.errors import ArtifactError, SettingError
from tierspec.evaluation.comparison import Trial, compare, differences, summarise
from tierspec.evaluation.environment import describe_environment
from tierspec.evaluation.methods import NEURAL, build_methods, needs_payoff
from tierspec.evaluation.metrics import geomean
from tierspec.evaluation.report import write_report
from tierspec.evaluation.top2_gap import Top2Gap
from tierspec.models import Target, load_target
from tierspec.paths import user_path
from tierspec.threads import use_threads

RESULT, REPORT, METRICS = "result.json", "report.json", "metrics.json"
_WITHOUT = ", or leave neural and auto out of evaluation.methods"
Encoded = tuple[str, list[int]]
"""A prompt's id and its token ids."""


def evaluate(
    settings: Settings,
    output: Path,
    stop: Callable[[], bool] = lambda: False,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Measures `evaluation.methods` on `prompts.heldout` and writes report.json, report.html and result.json.

    A prompt set is what shares a `source`: a file, unless its rows say otherwise. Of a conversation one turn is asked
    (`evaluation.turn`). Prompts by which the drafter's checkpoint was chosen are left out if others remain. When `stop`
    says so, the report covers the prompts so far and there is no result.json.

    Returns:
        The report (the content of report.json).

    Raises:
        SettingError: prompts that cannot be read or are too long for the context, or no drafter where one is needed.
    """
    (output / RESULT).unlink(missing_ok=True)
    use_threads(settings.target.threads)
    chosen = settings.evaluation
    directory = drafter_directory(settings, _WITHOUT) if _needs_drafter(settings) else None
    read = read_prompts(settings.prompts.heldout, "prompts.heldout")
    chose = checkpoint_prompts(directory)
    prompts = [prompt for prompt in read if prompt.sample_id not in chose] or read
    wanted = settings.target
    target = load_target(wanted.source, dtype=wanted.dtype, device=wanted.device, numerics=wanted.numerics)
    length = ("evaluation.max_new_tokens", chosen.max_new_tokens)
    encode = encode_first_turns if chosen.turn == "first" else encode_last_turns
    sets = {
        name: encode(part, target, settings, *length) for name, part in prompt_sets(prompts, chosen.prompts).items()
    }
    drafter = load_drafter(directory, target) if directory else None
    longest = max(len(ids) for encoded in sets.values() for _, ids in encoded) + chosen.max_new_tokens
    payoff = _load_payoff(settings, target)
    methods = build_methods(chosen.methods, target, drafter, settings.draft, max_tokens=longest, payoff=payoff)
    sampling = SamplingParams(chosen.max_new_tokens, temperature=chosen.temperature, seed=settings.run.seed)

    trials: dict[str, list[Trial]] = {}
    for name, encoded in sets.items():
        progress = _Progress(name, len(encoded), log)
        done = compare(methods, encoded, sampling, repeats=chosen.repeats, on_trial=progress, stop=stop)
        if done:
            trials[name] = done
    report = _report(settings, target, directory, trials)
    report["checkpoint_prompts"] = {
        "left_out": len(read) - len(prompts),
        "measured": sum(trial.prompt_id in chose for done in trials.values() for trial in done),
    }
    report["complete"] = not stop()
    page = write_report(output, report)
    if report["complete"]:
        summary = {"report": str(output / REPORT), "page": str(page), "geomean": report["geomean"]}
        atomic_write_json(output / RESULT, summary | {"identity": _identity(settings)})
    return report


def checkpoint_prompts(drafter: Path | None) -> set[str]:
    """Ids of the held-out prompts by which the drafter's checkpoint was chosen: measuring on them would flatter it."""
    if drafter is None or not (drafter / METRICS).is_file():
        return set()
    heldout = read_object(drafter / METRICS).get("heldout") or {}
    samples = heldout.get("samples", []) if isinstance(heldout, dict) else None
    if not isinstance(samples, list):
        raise ArtifactError(f"{drafter / METRICS} does not say by which samples the drafter was chosen")
    return set(samples)


def check_evaluation(settings: Settings) -> None:
    """What can be found wrong before anything is loaded or written: see `evaluate`."""
    _identity(settings)


def finished_report(settings: Settings, output: Path) -> dict[str, Any] | None:
    """The report in `output`, if it is complete and `evaluate` would measure the same again; else None."""
    try:
        if read_object(output / RESULT).get("identity") == _identity(settings):
            return read_object(output / REPORT)
    except SettingError:
        pass
    return None


def _identity(settings: Settings) -> dict[str, Any]:
    """What the report depends on, apart from the machine."""
    prompts = read_prompts(settings.prompts.heldout, "prompts.heldout")
    content = "".join(f"{prompt.sample_id} {prompt.content_hash}\n" for prompt in prompts)
    drafter = drafter_directory(settings, _WITHOUT) / "model.safetensors" if _needs_drafter(settings) else None
    payoff = payoff_directory(settings) / WEIGHTS_FILE if _needs_payoff(settings) else None
    if payoff is not None and not payoff.is_file():
        raise SettingError(f"{payoff.parent} holds no payoff predictor; run jobs.payoff first")
    groups = settings.model_dump(mode="json", include={"target", "draft", "evaluation"})
    return groups | {
        "run.seed": settings.run.seed,
        "prompts_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "drafter_sha256": sha256_of(drafter) if drafter else None,
        "payoff_sha256": sha256_of(payoff) if payoff else None,
    }


def payoff_directory(settings: Settings) -> Path:
    """Where the payoff predictor is: `serve.payoff` if it names a folder, else the run's own."""
    named = settings.serve.payoff
    return run_directory(settings, "payoff") if named in (None, "auto") else user_path(named, "serve.payoff")


def _load_payoff(settings: Settings, target: Target) -> PayoffPredictor | None:
    """None where no method asks it."""
    if not _needs_payoff(settings):
        return None
    suffix = settings.draft.suffix.model_dump(mode="json")
    return load_payoff(payoff_directory(settings), vocab_size=target.config.vocab_size, suffix=suffix)


def _needs_payoff(settings: Settings) -> bool:
    return any(needs_payoff(name, settings.draft) for name in settings.evaluation.methods)


def _needs_drafter(settings: Settings) -> bool:
    return bool(NEURAL & set(settings.evaluation.methods))


def prompt_sets(prompts: list[Prompt], limit: int) -> dict[str, list[Prompt]]:
    """Prompts by source, of each at most `limit` (see `spread`)."""
    sets: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.source, []).append(prompt)
    return {name: spread(members, limit) for name, members in sets.items()}


def drafter_directory(settings: Settings, otherwise: str = "") -> Path:
    """The neural drafter to measure: `serve.drafter` if it names one, else the run's own.

    Raises:
        SettingError: it is not there; the message ends with `otherwise`.
    """
    named = settings.serve.drafter
    path = run_directory(settings, "drafter") if named in (None, "auto") else user_path(named, "serve.drafter")
    if not (path / "config.json").is_file():
        raise SettingError(
            f"{path} holds no neural drafter; run jobs.train first, or name another in serve.drafter{otherwise}"
        )
    return path


def encode_first_turns(
    prompts: list[Prompt], target: Target, settings: Settings, limit: str, max_new_tokens: int
) -> list[Encoded]:
    """The first turns of `prompts`, opened for answers of up to `max_new_tokens`, a setting of the name `limit`.

    Raises:
        SettingError: a prompt that does not fit the context with its answer.
    """
    return [
        (prompt.sample_id, _encode(prompt, _opening(prompt), target, settings, limit, max_new_tokens))
        for prompt in prompts
    ]


def encode_last_turns(
    prompts: list[Prompt], target: Target, settings: Settings, limit: str, max_new_tokens: int
) -> list[Encoded]:
    """The same of the last turns, after the target's own answers to the turns before, each of up to `max_new_tokens`.

    Raises:
        SettingError: see `encode_first_turns`.
    """
    cell = LocalCell(target, max_running=8)
    sampling = SamplingParams(max_new_tokens, temperature=settings.evaluation.temperature, seed=settings.run.seed)
    talks = {prompt.sample_id: _opening(prompt) for prompt in prompts}
    for turn in range(1, max((len(prompt.turns) for prompt in prompts), default=0)):
        going = [prompt for prompt in prompts if len(prompt.turns) > turn]
        asked = [_encode(p, talks[p.sample_id], target, settings, limit, max_new_tokens) for p in going]
        for prompt, answer in zip(going, cell.generate(asked, sampling), strict=True):
            said = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": prompt.turns[turn]}]
            talks[prompt.sample_id] += said
    return [
        (prompt.sample_id, _encode(prompt, talks[prompt.sample_id], target, settings, limit, max_new_tokens))
        for prompt in prompts
    ]


def _opening(prompt: Prompt) -> list[dict[str, str]]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return [*system, {"role": "user", "content": prompt.turns[0]}]


def _encode(
    prompt: Prompt,
    messages: list[dict[str, str]],
    target: Target,
    settings: Settings,
    limit: str,
    max_new_tokens: int,
) -> list[int]:
    context = min(settings.target.max_context or target.config.max_context, target.config.max_context)
    ids = target.encode_chat(messages)
    if len(ids) + max_new_tokens > context:
        raise SettingError(
            f"prompts.heldout: {prompt.sample_id} of {prompt.source} has {len(ids)} tokens, more than the context "
            f"of {context} holds together with {limit} = {max_new_tokens}"
        )
    return ids


def _report(
    settings: Settings, target: Target, drafter: Path | None, trials_by_set: dict[str, list[Trial]]
) -> dict[str, Any]:
    gap = Top2Gap(target.decoder)
    invariant = target.decoder.numerics == "invariant"
    sets: dict[str, dict[str, Any]] = {}
    listed: list[dict[str, Any]] = []
    for name, trials in trials_by_set.items():
        differing = differences(trials, gap)
        sets[name] = summarise(trials, differing, invariant=invariant)
        listed += [{"set": name} | asdict(difference) for difference in differing]
    chosen = settings.evaluation
    return {
        "target": settings.target.source,
        "device": settings.target.device,
        "dtype": settings.target.dtype,
        "numerics": target.decoder.numerics,
        "drafter": str(drafter) if drafter else None,
        **describe_environment(),
        "sets": sets,
        "geomean": _geomeans(sets, lambda entry: entry["speedup"]),
        "geomean_non_looping": _geomeans(sets, lambda entry: entry["non_looping"]["speedup"]),
        "looping": {name: sum(trial.looping for trial in trials) for name, trials in trials_by_set.items()},
        "differences": listed,
        "protocol": {
            "batch": 1,
            "repeats": chosen.repeats,
            "max_new_tokens": chosen.max_new_tokens,
            "temperature": chosen.temperature,
            "draft": settings.draft.model_dump(mode="json"),
        },
    }


class _Progress:
    """Logs one line per finished prompt."""

    def __init__(self, name: str, total: int, log: Callable[[str], None]) -> None:
        self._name, self._total, self._log, self._done = name, total, log, 0

    def __call__(self, trial: Trial) -> None:
        self._done += 1
        speeds = ", ".join(f"{name} {len(run.token_ids) / run.seconds:.0f}" for name, run in trial.answers.items())
        self._log(f"{self._name} {self._done}/{self._total}, tokens/s: {speeds}")


def _geomeans(sets: dict[str, dict[str, Any]], speedup: Callable[[dict[str, Any]], float | None]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for entries in sets.values():
        for method, entry in entries.items():
            if value := speedup(entry):
                values.setdefault(method, []).append(value)
    return {method: mean for method, found in values.items() if (mean := geomean(found)) is not None}
