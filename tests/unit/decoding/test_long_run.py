"""Many sequences, one after the other, through one engine: nothing grows and acceptance does not wear off."""

import gc
import random
import tracemalloc

from tests.support.toy_tiers import PIECES, ToyDrafter, ToyModel, ToyVerifier, decode
from tierspec.config import SuffixSettings
from tierspec.decoding import (
    DrafterInfo,
    DraftOptions,
    DraftSources,
    Engine,
    EngineLimits,
    SamplingParams,
    Sequence,
    SynchronousDriver,
)
from tierspec.drafters.routing import RouterRule
from tierspec.drafters.suffix import SharedSuffixCache

PAGE, PAGES, TOKENS = 4, 64, 10_000


class Scores:
    def estimate(self, candidates):
        return [candidate.proposal.score for candidate in candidates]


def test_memory_and_acceptance_stay_flat_over_ten_thousand_tokens():
    rng, model = random.Random(7), ToyModel()
    limits = EngineLimits(4, PAGE * PAGES, 16, 8, 200, groups=2, vocab_size=len(PIECES), page_tokens=PAGE)
    shared = SharedSuffixCache(300, max_depth=8)
    engine = Engine(
        limits, drafter=DrafterInfo("toy", 4), sources=DraftSources(Scores(), shared), decode=decode, eos_ids=[0]
    )
    sequences: dict[str, Sequence] = {}
    verifier = ToyVerifier(model, pages=PAGES, page_tokens=PAGE)
    drafter = ToyDrafter(model, sequences, max_draft_tokens=4)
    driver = SynchronousDriver(engine, {"verifier": verifier, "drafter": drafter})
    tracemalloc.start()
    done, count, marks = 0, 0, []
    while done < TOKENS:
        while len(sequences) < 6:
            prompt = [rng.randrange(1, len(PIECES)) for _ in range(rng.randint(2, 12))]
            draft = DraftOptions(rule=RouterRule("cost"), suffix=SuffixSettings(max_depth=8, max_tokens=6, factor=2.0))
            sampling = SamplingParams(rng.randint(10, 40), ignore_eos=True)
            sequences[f"s{count}"] = Sequence(f"s{count}", prompt, sampling, draft)
            engine.add(sequences[f"s{count}"])
            count += 1
        for event in driver.step():
            done += len(event.token_ids)
            if event.finish_reason is not None:
                del sequences[event.sequence_id]
        if done >= (len(marks) + 1) * TOKENS // 4:
            gc.collect()
            marks.append((tracemalloc.get_traced_memory()[0], engine.stats.accepted, engine.stats.rounds))
    tracemalloc.stop()

    assert count > 200 and engine.stats.rounds_by_source["suffix"] and engine.stats.rounds_by_source["neural"]
    assert marks[3][0] < 1.1 * marks[1][0] + 50_000
    assert shared.num_tokens <= 300 and len(verifier.held) <= 6 and len(drafter.held) <= 6
    since = zip([(0, 0, 0), *marks[:-1]], marks, strict=True)
    accepted = [(later[1] - sooner[1]) / (later[2] - sooner[2]) for sooner, later in since]
    assert max(accepted) < 1.2 * min(accepted)
