"""Suffix cache: drafts by copying what followed earlier occurrences of the end of the text, with no model.

SuffixDecoding's per-request tree in chain mode (arXiv 2411.04975; ArcticInference's rules as written down for HVD,
arXiv 2606.01019 section 3.1): a trie of all substrings of at most `max_depth` tokens, with the number of times each
occurs. We keep it as a suffix automaton cut at `max_depth` (our choice): one state stands for all substrings that end
at the same places, so n tokens need fewer than 2n states, and appending one visits the states of the text's suffixes,
a handful in prose and at most `max_depth` in a text that repeats one token.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from tierspec.errors import SettingError

_ROOT = 0
_NONE = -1


@dataclass(frozen=True)
class SuffixProposal:
    """One chain of draft tokens.

    `probabilities[i]` is the estimated probability that `tokens[: i + 1]` all hold, `score` their sum (the accepted
    length to expect), `match_len` how many of the text's last tokens were matched. It may be positive where there is no
    draft: test `tokens`.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class SuffixCache:
    """The suffixes of one sequence, prompt and output together.

    Counts include the end of the text itself, which nothing follows yet: what was seen c times before gets a first-step
    probability of at most c / (c + 1). Among children of equal count the one seen last is followed (our choice).
    """

    def __init__(self, max_depth: int = 64) -> None:
        if max_depth < 2:
            raise SettingError(f"max_depth: must be at least 2 (one token matched, one drafted), not {max_depth}")
        self.max_depth = max_depth
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]  # the state of the longest suffix that ends at more places
        self._length = [0]  # of the longest substring in a state
        self._count = [0]  # places at which a state's substrings end
        self._likeliest = [_NONE]  # most frequent next token
        self._tail = _ROOT  # state of the last max_depth - 1 tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            self._append(int(token))

    def propose(
        self, max_tokens: int, min_probability: float = 0.1, factor: float = 1.0, offset: float = 0.0
    ) -> SuffixProposal:
        """The best-scoring continuation over all lengths p of the matched tail, the longer p on ties.

        p runs from 1 to the context's length - 1, the context being the last `max_depth` tokens. A match of p tokens
        drafts at most min(`max_tokens`, floor(`factor` * p + `offset`), `max_depth` - p) tokens: it follows the most
        frequent next token, multiplies the ratios of counts, and ends before the product falls below `min_probability`.
        """
        top = min(self.num_tokens, self.max_depth) - 1
        best = SuffixProposal(match_len=max(top, 0))
        state = self._tail
        while top > 0:
            bottom = self._length[self._link[state]]
            budgets = {
                p: max(0, min(max_tokens, math.floor(factor * p + offset + 1e-6), self.max_depth - p))
                for p in range(top, bottom, -1)
            }
            longest = max(budgets.values(), default=0)
            if longest > best.score:
                tokens, probabilities = self._follow(state, longest, min_probability)
                scores = [0.0, *accumulate(probabilities)]
                for p, budget in budgets.items():
                    size = min(budget, len(tokens))
                    if scores[size] > best.score:
                        best = SuffixProposal(tokens[:size], probabilities[:size], scores[size], p)
            state, top = self._link[state], bottom
        return best

    def _follow(self, state: int, longest: int, min_probability: float) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(tokens) < longest and (token := self._likeliest[state]) != _NONE:
            child = self._next[state][token]
            probability *= self._count[child] / self._count[state]
            if probability < min_probability:
                break
            tokens.append(token)
            probabilities.append(probability)
            state = child
        return tokens, probabilities

    def _append(self, token: int) -> None:
        self.num_tokens += 1
        tail = self._tail
        last = self._next[tail].get(token, _NONE)
        if last == _NONE:
            last = self._grow(token)
        state, child = tail, _NONE
        while state != _NONE:
            children = self._next[state]
            if children[token] != child:
                child = children[token]
                self._count[child] += 1
            likeliest = self._likeliest[state]
            if likeliest == _NONE or self._count[child] >= self._count[children[likeliest]]:
                self._likeliest[state] = token
            state = self._link[state]
        shorter = self._link[last]
        self._tail = shorter if self._length[shorter] == self.max_depth - 1 else last

    def _grow(self, token: int) -> int:
        """Make the state of the text with `token` appended; split one whose shorter substrings alone end here again.

        The usual online construction of a suffix automaton (Blumer et al., 1985) with lengths cut at `max_depth`; every
        suffix it extends but the whole tail is shorter than that, so the cut touches no comparison of lengths.
        """
        grown = self._add(min(self.num_tokens, self.max_depth), {}, _ROOT, 0, _NONE)
        state = self._tail
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = grown
            state = self._link[state]
        if state == _NONE:
            return grown
        child, length = self._next[state][token], self._length[state] + 1
        if self._length[child] == length:
            self._link[grown] = child
            return grown
        split = self._add(
            length, dict(self._next[child]), self._link[child], self._count[child], self._likeliest[child]
        )
        self._link[child] = self._link[grown] = split
        while state != _NONE and self._next[state][token] == child:
            self._next[state][token] = split
            state = self._link[state]
        return grown

    def _add(self, length: int, children: dict[int, int], link: int, count: int, likeliest: int) -> int:
        self._next.append(children)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._likeliest.append(likeliest)
        return len(self._link) - 1
