"""Methods side by side: batch 1, one process, alternated per prompt, the median of several runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierspec.decoding import DecodingStats, SamplingParams
from tierspec.evaluation.methods import Answer, Method
from tierspec.evaluation.metrics import loops, ratio
from tierspec.evaluation.top2_gap import Top2Gap

BASELINE = "autoregressive"
GAP_OF_A_TIE = 1e-3
"""Outside invariant numerics, a difference that begins where the top-2 gap is smaller counts as a tie (our choice)."""
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Trial:
    """One prompt answered by every method: of each, the run with the median time."""

    prompt_id: str
    prompt_ids: list[int]
    answers: dict[str, Answer]

    @property
    def looping(self) -> bool:
        """Whether the baseline's answer loops; it decides for all methods, so that splits compare the same prompts."""
        return loops(self.answers[BASELINE].token_ids)


@dataclass(frozen=True)
class Difference:
    """Where a method's answer leaves the baseline's: `position` counts output tokens from 0."""

    method: str
    prompt_id: str
    position: int
    top2_gap: float


def compare(
    methods: Sequence[Method],
    prompts: Sequence[tuple[str, list[int]]],
    sampling: SamplingParams,
    *,
    repeats: int,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Trial]:
    """Answers every (id, token ids) of `prompts` with every method, `repeats` times; fewer if `stop` says so.

    The order of the methods rotates from run to run, so that none always follows the same one. Prompt i samples with
    the seed of `sampling` + i in every method.
    """
    trials: list[Trial] = []
    if prompts:
        for method in methods:
            method.run(prompts[0][1], replace(sampling, max_new_tokens=min(_WARM_UP_TOKENS, sampling.max_new_tokens)))
    for index, (prompt_id, prompt_ids) in enumerate(prompts):
        if stop():
            break
        seeded = replace(sampling, seed=(sampling.seed or 0) + index)
        runs: dict[str, list[Answer]] = {method.name: [] for method in methods}
        for repeat in range(repeats):
            first = (index + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                runs[method.name].append(method.run(prompt_ids, seeded))
        trial = Trial(prompt_id, prompt_ids, {name: _median_run(name, answers) for name, answers in runs.items()})
        trials.append(trial)
        on_trial(trial)
    return trials


def differences(trials: Sequence[Trial], gap: Top2Gap) -> list[Difference]:
    """Every answer that is not the baseline's, token for token."""
    found = []
    for trial in trials:
        expected = trial.answers[BASELINE].token_ids
        for name, answer in trial.answers.items():
            position = first_difference(expected, answer.token_ids)
            if position is not None:
                found.append(Difference(name, trial.prompt_id, position, gap(trial.prompt_ids + expected[:position])))
    return found


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, their ends included; None if they are equal."""
    for position, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(found) else min(len(expected), len(found))


def summarise(
    trials: Sequence[Trial], differing: Sequence[Difference], *, invariant: bool
) -> dict[str, dict[str, Any]]:
    """The report's entry of one prompt set: {method: numbers}, with `looping` and `non_looping` splits."""
    if not trials:
        return {}
    split = {
        "looping": [trial for trial in trials if trial.looping],
        "non_looping": [trial for trial in trials if not trial.looping],
    }
    entries = {}
    for name in trials[0].answers:
        own = [difference for difference in differing if difference.method == name]
        entry = _numbers(trials, name)
        entry["identical"] = len(trials) - len(own)
        entry["lossless"] = not own or (not invariant and all(d.top2_gap < GAP_OF_A_TIE for d in own))
        entries[name] = entry | {part: _numbers(members, name) for part, members in split.items()}
    return entries


def _numbers(trials: Sequence[Trial], name: str) -> dict[str, Any]:
    answers = [trial.answers[name] for trial in trials]
    baseline = [trial.answers[BASELINE] for trial in trials]
    speed, base_speed = _tokens_per_s(answers), _tokens_per_s(baseline)
    stats = [answer.stats for answer in answers if answer.stats is not None]
    total = DecodingStats()
    for part in stats:
        total.merge(part)
    ours = bool(stats)
    return {
        "prompts": len(trials),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "seconds": sum(answer.seconds for answer in answers),
        "tokens_per_s": speed,
        "speedup": ratio(speed, base_speed) if speed is not None and base_speed is not None else None,
        "accept_len": total.accept_len if total.rounds else None,
        "acceptance_rate": total.acceptance_rate if total.drafted else None,
        "per_position_acceptance": total.per_position_acceptance,
        "rounds": total.rounds if ours else None,
        "verifier_calls": total.verifier_calls if ours else None,
        "drafter_seconds": total.drafter_seconds if ours else None,
        "verifier_seconds": total.verifier_seconds if ours else None,
        "rounds_by_source": dict(total.rounds_by_source),
        "tokens_by_source": dict(total.tokens_by_source),
    }


def _tokens_per_s(answers: Sequence[Answer]) -> float | None:
    return ratio(sum(len(answer.token_ids) for answer in answers), sum(answer.seconds for answer in answers))


def _median_run(name: str, runs: Sequence[Answer]) -> Answer:
    for run in runs[1:]:
        if run.stats is not None and run.token_ids != runs[0].token_ids:
            raise RuntimeError(f"{name} answered the same prompt with the same seed in two ways")
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
