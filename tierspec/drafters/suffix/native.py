"""The suffix automaton in C++, called through ctypes."""

import ctypes
import functools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from tierspec.compiled import CompilationFailed, compiled_library
from tierspec.drafters.suffix.proposal import SuffixLimits, SuffixProposal

_P, _I64, _I32, _F64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_double
_log = logging.getLogger(__name__)


@functools.cache
def suffix_library() -> ctypes.CDLL | None:
    """The compiled automaton, or None (with one warning) where there is no working C++ compiler."""
    try:
        library = compiled_library(Path(__file__).with_name("automaton.cpp"), ["-ffp-contract=off"])
    except CompilationFailed as error:
        _log.warning("%s: suffix caches are kept in Python, to a smaller depth", error)
        return None
    for name, arguments, result in (
        ("new", (_I32,), _P),
        ("free", (_P,), None),
        ("begin", (_P,), None),
        ("extend", (_P, _P, _I64), None),
        ("bytes", (_P,), _I64),
        ("propose", (_P, _P, _I64, _I32, _I32, _F64, _F64, _F64, _I32, _P, _P, _P, _P, _P), _I32),
    ):
        function = getattr(library, f"tierspec_suffix_{name}")
        function.argtypes, function.restype = arguments, result
    return library


class NativeAutomaton:
    """As `ReferenceAutomaton`, to the bit."""

    def __init__(self, library: ctypes.CDLL, max_depth: int) -> None:
        self.max_depth = max_depth
        self._library = library
        self._automaton = library.tierspec_suffix_new(max_depth)
        self._room = 0

    def __del__(self) -> None:
        if automaton := self.__dict__.pop("_automaton", None):
            self._library.tierspec_suffix_free(automaton)

    @property
    def nbytes(self) -> int:
        return int(self._library.tierspec_suffix_bytes(self._automaton))

    def begin(self) -> None:
        self._library.tierspec_suffix_begin(self._automaton)

    def extend(self, tokens: Iterable[int]) -> None:
        ids = list(tokens)
        self._library.tierspec_suffix_extend(self._automaton, (_I32 * len(ids))(*ids), len(ids))

    def propose(self, limits: SuffixLimits, longest_match: int, context: Sequence[int] | None = None) -> SuffixProposal:
        size = max(limits.max_tokens, 1)
        if size > self._room:
            self._room = size
            self._tokens, self._parents = (_I32 * size)(), (_I32 * size)()
            self._probabilities = (_F64 * size)()
        ids = None if context is None else (_I32 * len(context))(*context)
        score, match_len = _F64(), _I32()
        count = self._library.tierspec_suffix_propose(
            self._automaton,
            ids,
            -1 if context is None else len(context),
            longest_match,
            limits.max_tokens,
            limits.min_probability,
            limits.factor,
            limits.offset,
            int(limits.tree),
            self._tokens,
            self._parents,
            self._probabilities,
            ctypes.byref(score),
            ctypes.byref(match_len),
        )
        parents = self._parents[:count] if limits.tree else []
        return SuffixProposal(self._tokens[:count], self._probabilities[:count], score.value, match_len.value, parents)
