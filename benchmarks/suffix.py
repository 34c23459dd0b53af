"""`python -m benchmarks.suffix`: what the suffix cache costs beside a decode step of the default model.

The context is real text, the built-in prompts one after the other. Tokens are appended one by one with a proposal
after each, as in decoding; in between the model takes steps, so that both are measured in one run. `build` is the time
to take in a whole prompt, `reference` the same in Python.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

from benchmarks.timing import write_result
from pipelines.prompts import read_prompts
from tierspec.drafters.suffix import SuffixCache, SuffixLimits
from tierspec.drafters.suffix.reference import ReferenceAutomaton
from tierspec.evaluation.environment import describe_environment
from tierspec.models import Step, Target, load_target

DEPTH, FACTOR, MAX_TOKENS = 64, 4.0, 64
STEPS, PER_STEP = 60, 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suffix", description=__doc__)
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--context", type=int, default=16384, help="tokens in the cache")
    parser.add_argument("--output", help="file for the result as JSON")
    options = parser.parse_args()
    target = load_target(options.target)
    tokens = _text(target, options.context + STEPS * PER_STEP)
    context, coming = tokens[: options.context], tokens[options.context :]

    cache = SuffixCache(DEPTH)
    build_s = _seconds(lambda: cache.extend(context))
    step, release = _step(target, tokens)
    cached, steps = [], []
    for start in range(0, len(coming), PER_STEP):
        steps.append(_seconds(step))
        release()
        for token in coming[start : start + PER_STEP]:
            cached.append(_seconds(lambda: (cache.extend([token]), cache.propose(MAX_TOKENS, factor=FACTOR))))  # noqa: B023
    reference = ReferenceAutomaton(DEPTH)
    reference_build_s = _seconds(lambda: reference.extend(context))
    limits = SuffixLimits(MAX_TOKENS, factor=FACTOR)
    python = [
        _seconds(lambda: (reference.extend([token]), reference.propose(limits, DEPTH - 1)))  # noqa: B023
        for token in coming
    ]
    round_s, step_s = statistics.median(cached), statistics.median(steps)
    result: dict[str, Any] = describe_environment() | {
        "context": options.context,
        "build_s": build_s,
        "round_us": 1e6 * round_s,
        "decode_step_ms": 1e3 * step_s,
        "share_of_a_step": round_s / step_s,
        "cache_mb": cache.nbytes / 1e6,
        "reference": {"build_s": reference_build_s, "round_us": 1e6 * statistics.median(python)},
    }
    print(
        f"{options.context} tokens: built in {1e3 * build_s:.1f} ms; extending and proposing {1e6 * round_s:.1f} us, "
        f"{100 * round_s / step_s:.2f} % of a step of {1e3 * step_s:.1f} ms; {cache.nbytes / 1e6:.1f} MB"
    )
    write_result(options.output, result)


def _text(target: Target, count: int) -> list[int]:
    prompts = read_prompts(["builtin:train", "builtin:edits"], "prompts")
    ids = [token for prompt in prompts for token in target.tokenizer(prompt.turns[0])["input_ids"]]
    return list(islice(cycle(ids), count))


def _step(target: Target, tokens: list[int]) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A decode step behind 256 tokens, and what undoes it."""
    cache = target.decoder.new_cache(512)
    sequence = cache.sequence()
    target.decoder.forward([Step(sequence, tokens[:256])], cache)

    def step() -> None:
        hidden = target.decoder.forward([Step(sequence, tokens[256:257])], cache)
        target.decoder.logits(hidden.last)

    return step, lambda: sequence.truncate(256)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
