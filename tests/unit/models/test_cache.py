"""The page pool under random use."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tierspec.models import PAGE_TOKENS, CacheFull, KVCache, Step

ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["grow", "truncate", "release"]), st.integers(0, 200)))


@given(actions=ACTIONS)
def test_pages_have_one_owner_and_none_is_lost(actions: list[tuple[int, str, int]]) -> None:
    cache = KVCache(layers=[0], kv_heads=1, head_dim=2, token_budget=640, dtype=torch.float32)
    sequences = [cache.sequence() for _ in range(4)]
    lengths = [0] * 4
    for which, action, amount in actions:
        sequence = sequences[which]
        if action == "grow" and amount:
            before = [list(s.pages) for s in sequences]
            try:
                layout = cache.layout([Step(sequence, [0] * amount)])
                lengths[which] += amount
                assert len(set(layout.slots.tolist())) == amount
            except CacheFull:
                assert [s.pages for s in sequences] == before
        elif action == "truncate":
            lengths[which] = min(lengths[which], amount)
            sequence.truncate(lengths[which])
        elif action == "release":
            lengths[which] = 0
            sequence.release()
        held = [page for s in sequences for page in s.pages]
        assert [s.length for s in sequences] == lengths
        assert len(held) == len(set(held)) == sum(-(-n // PAGE_TOKENS) for n in lengths)
        assert 0 not in held
        assert cache.free_tokens == 640 - PAGE_TOKENS * len(held)
