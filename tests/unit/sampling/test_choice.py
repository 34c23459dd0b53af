"""The keyed choice against a plain recomputation, and what it must not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.errors import SettingError
from tierspec.sampling import greedy_choice, gumbel, target_choice
from tierspec.sampling.choice import _survivors


def choose(logits, temperature=1.0, top_k=0, top_p=1.0, first_seed=0, position=3, ids=None):
    rows = len(logits)
    seeds = list(range(first_seed, first_seed + rows))
    return target_choice(
        logits, [temperature] * rows, [top_k] * rows, [top_p] * rows, seeds, [0] * rows, [position] * rows, ids
    )


def kept_by_full_sort(scaled: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    """Top-k, then top-p, by sorting everything; ties by lowest column."""
    ranked = sorted(range(len(scaled)), key=lambda column: (-float(scaled[column]), column))
    ranked = ranked[: top_k or None]
    mass = (scaled - scaled.max()).exp()
    total = sum(float(mass[column]) for column in ranked)
    kept, held = [], 0.0
    for column in ranked:
        kept.append(column)
        held += float(mass[column])
        if top_p < 1.0 and held >= top_p * total:
            break
    return sorted(kept)


def logits_of(seed: int, rows: int, columns: int, spread: float = 3.0, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


@pytest.mark.parametrize("columns", [1, 7, 64, 640])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_on_ties(columns, dtype):
    logits = torch.randint(0, 3, (50, columns), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[7] = float("-inf")
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert greedy_choice(logits).tolist() == expected
    assert choose(logits, temperature=0.0).tolist() == expected
    assert choose(logits, temperature=1e-6).tolist() == expected


def test_greedy_reads_a_slice_of_a_head():
    logits = logits_of(1, 3, 200)[:, :128]
    assert torch.equal(greedy_choice(logits), logits.argmax(-1))


def test_no_rows_no_choices():
    assert choose(torch.empty(0, 64)).tolist() == []


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    columns=st.sampled_from([5, 64, 65, 200, 1500, 2500]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    top_k=st.sampled_from([0, 1, 3, 64, 70, 1100]),
    top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_survivors_equal_a_full_sort(seed, columns, spread, top_k, top_p, dtype):
    scaled = logits_of(seed, 1, columns, spread, dtype)[0].float()
    assert _survivors(scaled, top_k, top_p).tolist() == kept_by_full_sort(scaled, top_k, top_p)


def test_top_k_keeps_the_lowest_ids_of_a_tie_and_top_p_follows_it():
    scaled = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    assert _survivors(scaled, 3, 1.0).tolist() == [1, 2, 4]
    assert _survivors(scaled, 4, 0.5).tolist() == [1, 2]
    assert _survivors(scaled, 4, 0.51).tolist() == [1, 2, 4]


def test_masked_tokens_are_never_chosen():
    logits = torch.full((200, 300), float("-inf"))
    logits[:, [4, 250]] = torch.tensor([0.0, 0.5])
    for truncation in ({}, {"top_k": 50}, {"top_p": 0.99}, {"temperature": 1e35}):
        assert set(choose(logits, **truncation).tolist()) == {4, 250}


@pytest.mark.parametrize("truncation", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.8}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(truncation, dtype):
    logits = logits_of(2, 20, 320, dtype=dtype)
    chosen = choose(logits, temperature=0.7, **truncation).tolist()
    for row, token in enumerate(chosen):
        scaled = logits[row].float() * (1 / 0.7)
        kept = torch.tensor(kept_by_full_sort(scaled, truncation.get("top_k", 0), truncation.get("top_p", 1.0)))
        noisy = scaled[kept] + gumbel([row], [0], [3], kept)[0]
        assert token == int(kept[noisy.argmax()])


def mixed_rows(rows: int) -> dict[str, list]:
    """Greedy, plain, top-k and top-p rows in turn."""
    return {
        "temperature": [(0.0, 1.0, 0.6, 1.3)[row % 4] for row in range(rows)],
        "top_k": [(0, 0, 40, -1)[row % 4] for row in range(rows)],
        "top_p": [(1.0, 1.0, 1.0, 0.9)[row % 4] for row in range(rows)],
        "seed": [row * 977 for row in range(rows)],
        "stream": [row % 3 for row in range(rows)],
        "position": [100 + row for row in range(rows)],
    }


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations(range(24)),
    size=st.integers(1, 24),
    columns=st.sampled_from([9, 1088, 5001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_does_not_depend_on_its_batch(order, size, columns, dtype):
    logits = logits_of(4, 24, columns, dtype=dtype)
    values = mixed_rows(24)
    together = target_choice(logits, **values)
    part = order[:size]
    apart = target_choice(logits[part], **{name: [given_[row] for row in part] for name, given_ in values.items()})
    assert torch.equal(together[part], apart)


def test_lists_and_tensors_are_the_same():
    logits, values = logits_of(5, 8, 64), mixed_rows(8)
    as_tensors = {name: torch.tensor(given_) for name, given_ in values.items()}
    assert torch.equal(target_choice(logits, **values), target_choice(logits, **as_tensors))


@pytest.mark.parametrize("truncation", [{"temperature": 0.0}, {}, {"top_k": 30}, {"top_p": 0.9}])
def test_a_drafters_columns_share_the_targets_noise(truncation):
    logits = torch.full((40, 512), float("-inf"))
    ids = torch.arange(3, 512, 4)
    logits[:, ids] = logits_of(6, 40, len(ids))
    assert torch.equal(choose(logits[:, ids], ids=ids, **truncation), choose(logits, **truncation))


def test_greedy_rows_need_no_seed():
    assert target_choice(torch.eye(2), [0.0, 0.0], [0, 0], [1.0, 1.0], [None, None], [0, 0], [0, 0]).tolist() == [0, 1]


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed", "stream", "position"])
def test_a_wrong_number_of_values_is_refused_by_name(name):
    values = mixed_rows(4) | {name: [1]}
    with pytest.raises(SettingError, match=f"^{name}: 1 values for 4 rows"):
        target_choice(logits_of(7, 4, 8), **values)
