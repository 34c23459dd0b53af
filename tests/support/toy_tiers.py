"""A language model of a dozen tokens and tiers that obey the protocol by brute force: the oracle of the engine.

`ToyModel.decode_plainly` is autoregressive decoding written as naively as possible. The tiers keep plain token lists
and check everything a real tier would silently rely on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from tierspec.decoding import (
    OutOfPages,
    Prefill,
    Prefilled,
    Propose,
    Proposed,
    TierMessage,
    TierReply,
    UnknownPrefix,
    Verified,
    Verify,
)
from tierspec.decoding import Sequence as DecodedSequence
from tierspec.decoding.prefix_hash import PrefixHash
from tierspec.sampling import RowSampling, SamplingParams

PIECES = [b"", b"a", b"b", b"ab", b" ", b"ba", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"b\xc3"]
EOS = 0


def decode(token_ids: Sequence[int]) -> str:
    """Text of toy tokens; some are parts of a UTF-8 code point."""
    return b"".join(PIECES[token] for token in token_ids).decode("utf-8", errors="replace")


def number(*parts: object) -> int:
    """A pseudo-random number of its arguments."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


class ToyModel:
    """The next token is a function of the last two tokens and, when sampling, of seed, stream and position."""

    def choose(self, token_ids: Sequence[int], sampling: RowSampling) -> int:
        """The target's choice behind `token_ids`."""
        noise = None if sampling.greedy else (sampling.seed, sampling.stream, len(token_ids))
        value = number(tuple(token_ids[-2:]), noise)
        return EOS if value % 41 == 0 else 1 + value % (len(PIECES) - 1)

    def decode_plainly(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, max_context: int
    ) -> tuple[list[int], str, str]:
        """Token ids, text and finish reason, one token at a time."""
        output: list[int] = []
        while True:
            token = self.choose([*prompt_ids, *output], sampling.row())
            if token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos):
                return output, decode(output), "stop"
            output.append(token)
            text = decode(output)
            found = [text.find(stop) for stop in sampling.stop if stop in text]
            if found and not text.endswith("\ufffd"):
                return output, text[: min(found)], "stop"
            if len(output) == sampling.max_new_tokens or len(prompt_ids) + len(output) == max_context:
                return output, text, "length"


def feature(position: int, token: int) -> list[int]:
    """The feature row of a position: it says where it is from (bf16 holds integers up to 256)."""
    return [position // 128, position % 128, token]


class ToyVerifier:
    """Keeps every sequence's tokens, and never more pages than it has."""

    def __init__(self, model: ToyModel, *, pages: int, page_tokens: int) -> None:
        self.held: dict[str, list[int]] = {}
        self.calls = 0
        self.rows = 0
        self._model = model
        self._pages = pages
        self._page_tokens = page_tokens

    def handle(self, message: TierMessage) -> TierReply:
        assert message.tier == "verifier" and message.features is None
        assert len({item.sequence_id for item in message.items}) == len(message.items)
        self.calls += bool(message.items)
        self.rows += sum(len(item.token_ids) for item in message.items)
        for sequence_id in message.releases:
            self.held.pop(sequence_id, None)
        rows: list[list[int]] = []
        replies = [self._answer(item, rows) for item in message.items]
        features = torch.tensor(rows, dtype=torch.bfloat16) if rows else None
        return TierReply("verifier", message.tick, replies, 0.25, features)

    def _answer(self, item, rows):
        assert isinstance(item, Prefill | Verify) and item.token_ids
        held = self.held.get(item.sequence_id, [])
        if len(held) < item.base or hash_of(held[: item.base]) != item.prefix_hash:
            self.held.pop(item.sequence_id, None)
            return UnknownPrefix(item.sequence_id, item.round_id, 0)
        tokens = held[: item.base] + list(item.token_ids)
        self.held[item.sequence_id] = tokens
        if sum(-(-len(tokens) // self._page_tokens) for tokens in self.held.values()) > self._pages:
            self.held[item.sequence_id] = held[: item.base]
            return OutOfPages(item.sequence_id, item.round_id)
        drafts = item.num_drafts if isinstance(item, Verify) else 0
        start, accepted, choice = len(tokens) - drafts, 0, -1
        if isinstance(item, Verify):
            assert start > item.base and item.allowance is None
            while True:
                choice = self._model.choose(tokens[: start + accepted], item.sampling)
                if accepted == drafts or tokens[start + accepted] != choice:
                    break
                accepted += 1
        del tokens[start + accepted :]
        stays = len(tokens) - item.base if item.want_features else 0
        rows.extend(feature(p, tokens[p]) for p in range(item.base, item.base + stays))
        if isinstance(item, Prefill):
            return Prefilled(item.sequence_id, item.round_id, len(tokens), stays)
        return Verified(item.sequence_id, item.round_id, accepted, choice, stays)


class ToyDrafter:
    """Drafts a right beginning of pseudo-random length, then wrong tokens; checks that its rows are the committed ones.

    `sequences` are the sequences themselves, which a drafter that cannot go wrong may look into.
    """

    def __init__(self, model: ToyModel, sequences: Mapping[str, DecodedSequence], *, max_draft_tokens: int) -> None:
        self.held: dict[str, tuple[int, int]] = {}  # first row, and the first that is not held
        self.rows_taken = 0
        self._model = model
        self._sequences = sequences
        self._max_draft_tokens = max_draft_tokens

    def handle(self, message: TierMessage) -> TierReply:
        assert message.tier == "drafter"
        for sequence_id in message.releases:
            self.held.pop(sequence_id, None)
        features = [] if message.features is None else message.features.tolist()
        assert sum(len(item.token_ids) for item in message.items) == len(features)
        replies = []
        for item in message.items:
            rows, features = features[: len(item.token_ids)], features[len(item.token_ids) :]
            replies.append(self._answer(item, rows))
        return TierReply("drafter", message.tick, replies, 0.125)

    def _answer(self, item, rows):
        assert isinstance(item, Propose) and rows and 1 <= item.max_tokens <= self._max_draft_tokens
        committed = self._sequences[item.sequence_id].token_ids
        origin, end = self.held.get(item.sequence_id, (0, 0))
        if item.base == item.origin:
            origin = end = item.base
        if origin != item.origin or end < item.base:
            return UnknownPrefix(item.sequence_id, item.round_id, 0)
        assert item.prefix_hash == hash_of(committed[: item.base + 1])
        assert item.base + len(rows) == len(committed) - 1
        assert list(item.token_ids) == committed[item.base + 1 :]
        assert rows == [feature(p, committed[p]) for p in range(item.base, len(committed) - 1)]
        self.rows_taken += len(rows)
        self.held[item.sequence_id] = origin, len(committed) - 1
        count = number("count", committed) % (item.max_tokens + 2)
        right = number("right", committed) % (count + 1)
        drafts: list[int] = []
        while len(drafts) < min(count, item.max_tokens):
            token = self._model.choose([*committed, *drafts], item.sampling)
            drafts.append(token if len(drafts) < right else (token + 1) % len(PIECES))
        return Proposed(item.sequence_id, item.round_id, drafts)


def hash_of(token_ids: Sequence[int]) -> int | None:
    """`PrefixHash` of a whole prefix."""
    hashes = PrefixHash()
    hashes.extend(token_ids)
    return hashes.at(len(token_ids))
