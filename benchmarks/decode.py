"""`python -m benchmarks.decode`: the decoder runtime beside transformers, in one process, on the same weights.

Three parts: `step` (tokens/s at batch 1), `verify` (a block of 8 tokens against a single one) and `batch` (prompts of
mixed length through 64 slots against `generate` at the same batch size). Runs alternate; every figure is a median.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.timing import write_result
from pipelines.prompts import read_prompts
from tierspec.config import DraftSettings
from tierspec.decoding import LocalCell, SamplingParams
from tierspec.evaluation.environment import describe_environment
from tierspec.evaluation.methods import Answer, ReferenceModel, build_methods
from tierspec.models import PAGE_TOKENS, Step, Target, load_target

PARTS = ("step", "verify", "batch")
VERIFY_TOKENS = (2, 4, 8, 16, 32)
VERIFY_CONTEXT = 256
VERIFY_REPEATS = 30


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--step-prompts", type=int, default=4, help="prompts of the batch-1 part")
    parser.add_argument("--batch-prompts", type=int, default=256, help="prompts of the batch part (bfloat16 only)")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves the choice to torch")
    parser.add_argument("--output", help="file for the result as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    result: dict[str, Any] = describe_environment() | {"target": options.target, "repeats": options.repeats}
    for dtype in options.dtypes:
        target = load_target(options.target, dtype=dtype)
        reference = ReferenceModel(target)
        prompts = _prompts(target, options.batch_prompts)
        entry: dict[str, Any] = {"numerics": target.decoder.numerics}
        if "step" in options.parts:
            few = prompts[: options.step_prompts]
            entry["step"] = step(target, reference, few, options.new_tokens, options.repeats)
        if "verify" in options.parts:
            entry["verify"] = verify(target)
        if "batch" in options.parts and dtype == options.dtypes[0]:
            entry["batch"] = batch(target, reference, prompts, options.new_tokens, options.slots, options.repeats)
        result[dtype] = entry
        print(json.dumps({dtype: entry}, indent=2), flush=True)
    print(f"{result['machine']}, {result['threads']} threads, {result['versions']}")
    write_result(options.output, result)


def step(
    target: Target, reference: ReferenceModel, prompts: Sequence[list[int]], new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Tokens/s at batch 1, the prompt's prefill included, exactly `new_tokens` tokens each."""
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    (ours,) = build_methods(["autoregressive"], target, None, DraftSettings(), max_tokens=longest)
    sampling = SamplingParams(new_tokens, ignore_eos=True, seed=0)
    methods = {"tierspec": ours.run, "transformers": reference.generate}
    for run in methods.values():
        run(prompts[0], sampling)
    seconds = dict.fromkeys(methods, 0.0)
    for prompt in prompts:
        medians = _alternate(
            {name: partial(_seconds_of, run, prompt, sampling) for name, run in methods.items()}, repeats
        )
        for name, median in medians.items():
            seconds[name] += median
    speed = {name: len(prompts) * new_tokens / total for name, total in seconds.items()}
    return {"tokens_per_s": speed, "speedup": speed["tierspec"] / speed["transformers"], "new_tokens": new_tokens}


def verify(target: Target) -> dict[str, Any]:
    """Milliseconds of one forward with logits and choices, by block size, and their ratio to that of one token."""
    decoder = target.decoder
    cache = decoder.new_cache(VERIFY_CONTEXT + max(VERIFY_TOKENS))
    sequence = cache.sequence()
    decoder.forward([Step(sequence, [5] * VERIFY_CONTEXT)], cache)

    def block(tokens: int) -> float:
        start = time.perf_counter()
        decoder.logits(decoder.forward([Step(sequence, [7] * tokens)], cache).last).argmax(-1).tolist()
        seconds = time.perf_counter() - start
        sequence.truncate(VERIFY_CONTEXT)
        return seconds

    medians = _alternate({str(n): partial(block, n) for n in (1, *VERIFY_TOKENS)}, VERIFY_REPEATS)
    return {
        "ms": {name: seconds * 1e3 for name, seconds in medians.items()},
        "in_steps": {name: seconds / medians["1"] for name, seconds in medians.items()},
    }


def batch(
    target: Target, reference: ReferenceModel, prompts: list[list[int]], new_tokens: int, slots: int, repeats: int
) -> dict[str, Any]:
    """All prompts, up to `new_tokens` each, in the order given; and the speed while all slots decode.

    The second is measured on the first `slots` prompts without end of sequence, as the time between one new token and
    `new_tokens` of them, so prefill drops out.
    """
    sampling = SamplingParams(new_tokens, seed=0)
    counts: dict[str, int] = {}
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    cell = LocalCell(target, max_running=slots, token_budget=slots * (longest + PAGE_TOKENS))

    def ours(some: list[list[int]], params: SamplingParams) -> float:
        start = time.perf_counter()
        answers = cell.generate(some, params)
        counts["tierspec"] = sum(len(answer.token_ids) for answer in answers)
        return time.perf_counter() - start

    def theirs(some: list[list[int]], params: SamplingParams) -> float:
        start = time.perf_counter()
        batches = [some[first : first + slots] for first in range(0, len(some), slots)]
        counts["transformers"] = sum(len(ids) for part in batches for ids in reference.generate_batch(part, params))
        return time.perf_counter() - start

    runs = {"tierspec": ours, "transformers": theirs}
    few = SamplingParams(8, seed=0)
    for run in runs.values():
        run(prompts[:4], few)
    seconds = _alternate({name: partial(run, prompts, sampling) for name, run in runs.items()}, repeats)
    throughput = {name: counts[name] / seconds[name] for name in runs}

    full = prompts[:slots]
    one, many = (SamplingParams(n, ignore_eos=True, seed=0) for n in (1, new_tokens))
    first_token = _alternate({name: partial(run, full, one) for name, run in runs.items()}, repeats)
    all_tokens = _alternate({name: partial(run, full, many) for name, run in runs.items()}, repeats)
    decoding = {name: len(full) * (new_tokens - 1) / (all_tokens[name] - first_token[name]) for name in runs}
    lengths = sorted(len(prompt) for prompt in prompts)
    return {
        "prompts": len(prompts),
        "prompt_tokens": {"least": lengths[0], "median": statistics.median(lengths), "most": lengths[-1]},
        "slots": slots,
        "tokens_per_s": throughput,
        "speedup": throughput["tierspec"] / throughput["transformers"],
        "tokens_per_s_while_decoding": decoding,
    }


def _seconds_of(run: Callable[..., Answer], prompt: list[int], sampling: SamplingParams) -> float:
    return run(prompt, sampling).seconds


def _alternate(runs: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of what each of `runs` returns, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(run())
    return {name: statistics.median(values) for name, values in seconds.items()}


def _prompts(target: Target, count: int) -> list[list[int]]:
    """`count` prompts of the project's own training set, a mixture of kinds and lengths, as chats."""
    prompts = read_prompts(["builtin:train"], "prompts.train")
    spread = [prompts[i * len(prompts) // count] for i in range(count)]
    return [target.encode_chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in spread]


if __name__ == "__main__":
    main()
