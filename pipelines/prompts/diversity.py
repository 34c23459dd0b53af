"""How varied a set of prompts is, in figures that can be compared between sets of the same size (our choice)."""

import random
import statistics
import zlib
from collections.abc import Sequence

from pipelines.prompts.overlap import OverlapIndex, word_grams
from pipelines.prompts.prompt import Prompt

_SAMPLE = 2000
_GRAM = 3


def diversity(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Of at most 2,000 prompts, chosen evenly by a fixed seed.

    distinct_3grams: distinct runs of three words by all of them; compressed: bytes after zlib by bytes before, which
    repeats of any kind make small; alike: share of prompts that overlap an earlier one (see `overlap`); median_words.
    """
    texts = [" ".join(prompt.turns) for prompt in prompts]
    if len(texts) > _SAMPLE:
        texts = random.Random(0).sample(texts, _SAMPLE)
    index, alike = OverlapIndex(), 0
    distinct: set[tuple[str, ...]] = set()
    grams = 0
    for text in texts:
        alike += index.overlaps(text)
        index.add(text)
        found = word_grams(text, _GRAM)
        distinct |= found
        grams += len(found)
    data = "\n".join(texts).encode()
    return {
        "prompts": len(texts),
        "distinct_3grams": round(len(distinct) / max(1, grams), 4),
        "compressed": round(len(zlib.compress(data, 9)) / max(1, len(data)), 4),
        "alike": round(alike / max(1, len(texts)), 4),
        "median_words": statistics.median([len(text.split()) for text in texts] or [0]),
    }
