"""Suffix caches: drafts by copying what followed earlier occurrences of the end of the text, with no model."""

from collections import deque
from collections.abc import Iterable, Sequence

from tierspec.drafters.suffix.native import NativeAutomaton, suffix_library
from tierspec.drafters.suffix.proposal import SuffixLimits, SuffixProposal
from tierspec.drafters.suffix.reference import ReferenceAutomaton
from tierspec.errors import SettingError

REFERENCE_MAX_DEPTH = 16
"""Depth of caches kept in Python, where a token costs about as many dictionary look-ups (our choice)."""


def _automaton(max_depth: int) -> NativeAutomaton | ReferenceAutomaton:
    if max_depth < 2:
        raise SettingError(f"max_depth: must be at least 2 (one token matched, one drafted), not {max_depth}")
    library = suffix_library()
    if library is None:
        return ReferenceAutomaton(min(max_depth, REFERENCE_MAX_DEPTH))
    return NativeAutomaton(library, max_depth)


class SuffixCache:
    """The suffixes of one sequence, prompt and output together (SuffixDecoding's local tree, arXiv 2411.04975).

    Counts include the end of the text itself, which nothing follows yet: what was seen c times before gets a first-step
    probability of at most c / (c + 1).
    """

    def __init__(self, max_depth: int = 64) -> None:
        self._automaton = _automaton(max_depth)
        self.max_depth = self._automaton.max_depth
        self.num_tokens = 0

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._automaton.nbytes

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        ids = list(tokens)
        self.num_tokens += len(ids)
        self._automaton.extend(ids)

    def propose(
        self,
        max_tokens: int,
        min_probability: float = 0.1,
        factor: float = 1.0,
        offset: float = 0.0,
        *,
        tree: bool = False,
    ) -> SuffixProposal:
        """The best-scoring continuation over all lengths p of the matched tail, the longer p on ties.

        p runs from 1 to the context's length - 1, the context being the last `max_depth` tokens. A match of p tokens
        drafts at most min(`max_tokens`, floor(`factor` * p + `offset`)) tokens, none deeper than `max_depth` - p: it
        follows the most frequent next token, multiplies the ratios of counts, and ends before the product falls below
        `min_probability`. With `tree` it takes the likeliest tokens of all branches instead.
        """
        limits = SuffixLimits(max_tokens, min_probability, factor, offset, tree)
        return self._automaton.propose(limits, min(self.num_tokens, self.max_depth) - 1)


class SharedSuffixCache:
    """The suffixes of past outputs, each a sequence of its own (SuffixDecoding's global tree).

    It holds at most `max_tokens` tokens: the oldest outputs go first, and a quarter at a time, because what is gone can
    only be forgotten by building anew (about 10 ms per thousand tokens; our choice).
    """

    def __init__(self, max_tokens: int, max_depth: int = 64) -> None:
        if max_tokens < 1:
            raise SettingError(f"max_tokens: must be at least 1, not {max_tokens}")
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._depth = max_depth
        self._automaton = _automaton(max_depth)
        self._outputs: deque[tuple[str, list[int]]] = deque()

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._automaton.nbytes + 8 * self.num_tokens

    @property
    def ids(self) -> tuple[str, ...]:
        """The outputs that are held, the oldest first."""
        return tuple(name for name, _ in self._outputs)

    def add(self, output_id: str, tokens: Sequence[int]) -> None:
        """Takes in a whole output. Of one longer than the cap its end stays."""
        kept = list(tokens[-self.max_tokens :])
        self._outputs.append((output_id, kept))
        self.num_tokens += len(kept)
        if self.num_tokens > self.max_tokens:
            floor = max(self.max_tokens * 3 // 4, len(kept))
            while self.num_tokens > floor:
                self.num_tokens -= len(self._outputs.popleft()[1])
            self._rebuild()
        else:
            self._automaton.begin()
            self._automaton.extend(kept)

    def remove(self, output_id: str) -> None:
        """Forgets an output; unknown ones are ignored."""
        left = deque(entry for entry in self._outputs if entry[0] != output_id)
        if len(left) < len(self._outputs):
            self._outputs = left
            self.num_tokens = sum(len(tokens) for _, tokens in left)
            self._rebuild()

    def propose(self, context: Sequence[int], limits: SuffixLimits) -> SuffixProposal:
        """The best-scoring continuation of `context`, as in `SuffixCache.propose`; its own tokens are not counted."""
        tail = context[-self._automaton.max_depth :]
        return self._automaton.propose(limits, len(tail) - 1, tail)

    def _rebuild(self) -> None:
        self._automaton = _automaton(self._depth)
        for _, tokens in self._outputs:
            self._automaton.begin()
            self._automaton.extend(tokens)
