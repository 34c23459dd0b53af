"""The suffix automaton in plain Python: the oracle of automaton.cpp, and what is left where no compiler is.

SuffixDecoding's tree (arXiv 2411.04975; ArcticInference's rules as written down for HVD, arXiv 2606.01019 section 3.1)
is a trie of all substrings of at most `max_depth` tokens, with the number of times each occurs. We keep it as a suffix
automaton cut at `max_depth` (our choice): one state stands for all substrings that end at the same places, so n tokens
need fewer than 2n states, and appending one visits the states of the text's suffixes, a handful in prose and at most
`max_depth` in a text that repeats one token.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

from tierspec.drafters.suffix.proposal import SuffixLimits, SuffixProposal

_ROOT = 0
_NONE = -1


class ReferenceAutomaton:
    """All substrings of some sequences. Among children of equal count the one seen last is followed in a chain, the
    lowest token id first in a tree (our choice)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]  # the state of the longest suffix that ends at more places
        self._length = [0]  # of the longest substring in a state
        self._count = [0]  # places at which a state's substrings end
        self._likeliest = [_NONE]  # most frequent next token
        self._tail = _ROOT  # state of the last max_depth - 1 tokens of the sequence
        self._context = 0  # how many those are

    @property
    def nbytes(self) -> int:
        """A rough size."""
        return 400 * len(self._link)

    def begin(self) -> None:
        """What is appended next belongs to another sequence."""
        self._tail, self._context = _ROOT, 0

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends to the sequence."""
        for token in tokens:
            self._append(int(token))

    def propose(self, limits: SuffixLimits, longest_match: int, context: Sequence[int] | None = None) -> SuffixProposal:
        """The best-scoring continuation of `context` (None: of the sequence) over all lengths p <= `longest_match` of
        its matched tail, the longer p on ties."""
        state, matched = (self._tail, self._context) if context is None else self._match(context)
        top = min(matched, longest_match)
        best = SuffixProposal(match_len=max(top, 0))
        while top > 0:
            bottom = self._length[self._link[state]]
            lengths = range(top, bottom, -1)
            best = (
                self._best_tree(state, lengths, limits, best)
                if limits.tree
                else (self._best_chain(state, lengths, limits, best))
            )
            state, top = self._link[state], bottom
        return best

    def _best_chain(self, state: int, lengths: range, limits: SuffixLimits, best: SuffixProposal) -> SuffixProposal:
        budgets = {p: min(_budget(p, limits), self.max_depth - p) for p in lengths}
        longest = max(budgets.values(), default=0)
        if longest <= best.score:
            return best
        tokens, probabilities = self._follow(state, longest, limits.min_probability)
        scores = [0.0, *accumulate(probabilities)]
        for p, budget in budgets.items():
            size = min(budget, len(tokens))
            if scores[size] > best.score:
                best = SuffixProposal(tokens[:size], probabilities[:size], scores[size], p)
        return best

    def _best_tree(self, state: int, lengths: range, limits: SuffixLimits, best: SuffixProposal) -> SuffixProposal:
        for p in lengths:
            size = _budget(p, limits)
            if size > best.score:
                found = self._expand(state, size, p, limits.min_probability)
                best = found if found.score > best.score else best
        return best

    def _match(self, context: Sequence[int]) -> tuple[int, int]:
        """The state of the longest suffix of `context` that occurs, at most max_depth - 1 long, and its length."""
        state, length = _ROOT, 0
        for token in context[max(0, len(context) - self.max_depth + 1) :]:
            while token not in self._next[state] and state != _ROOT:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return state, length

    def _expand(self, state: int, size: int, match_len: int, floor: float) -> SuffixProposal:
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        waiting: list[tuple[float, int, int, int, int]] = []

        def offer(at: int, reached: float, parent: int, depth: int) -> None:
            if match_len + depth > self.max_depth:
                return
            for token, child in self._next[at].items():
                probability = reached * (self._count[child] / self._count[at])
                if probability >= floor:
                    heapq.heappush(waiting, (-probability, parent, token, child, depth))

        offer(state, 1.0, -1, 1)
        score = 0.0
        while len(tokens) < size and waiting:
            negative, parent, token, child, depth = heapq.heappop(waiting)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(-negative)
            score += -negative
            offer(child, -negative, len(tokens) - 1, depth + 1)
        return SuffixProposal(tokens, probabilities, score, match_len, parents)

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
        length = self._context + 1
        tail = self._tail
        last = self._next[tail].get(token, _NONE)
        if last == _NONE:
            last = self._grow(token, length)
        elif self._length[last] > length:
            last = self._split(tail, token, last, length)
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
        full = length == self.max_depth
        self._tail = shorter if full and self._length[shorter] == self.max_depth - 1 else last
        self._context = length - 1 if full else length

    def _grow(self, token: int, length: int) -> int:
        """Make the state of the tail with `token` appended, `length` tokens in all.

        The usual online construction of a suffix automaton (Blumer et al., 1985) with lengths cut at `max_depth`; every
        suffix it extends but the whole tail is shorter than that, so the cut touches no comparison of lengths.
        """
        grown = self._add(length, {}, _ROOT, 0, _NONE)
        state = self._tail
        while state != _NONE and token not in self._next[state]:
            self._next[state][token] = grown
            state = self._link[state]
        if state != _NONE:
            child, wanted = self._next[state][token], self._length[state] + 1
            self._link[grown] = child if self._length[child] == wanted else self._split(state, token, child, wanted)
        return grown

    def _split(self, state: int, token: int, child: int, length: int) -> int:
        """Split off the substrings of `child` of up to `length` tokens, which `state` and its suffixes reach."""
        made = self._add(length, dict(self._next[child]), self._link[child], self._count[child], self._likeliest[child])
        self._link[child] = made
        while state != _NONE and self._next[state].get(token) == child:
            self._next[state][token] = made
            state = self._link[state]
        return made

    def _add(self, length: int, children: dict[int, int], link: int, count: int, likeliest: int) -> int:
        self._next.append(children)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._likeliest.append(likeliest)
        return len(self._link) - 1


def _budget(match_len: int, limits: SuffixLimits) -> int:
    return max(0, min(limits.max_tokens, math.floor(limits.factor * match_len + limits.offset + 1e-6)))
