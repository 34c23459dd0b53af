import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.errors import SettingError
from tierspec.verification import StrictPolicy, greedy_prefix, load_policy
from tierspec.verification.strict import rejection_sample, target_choice


def prefix_by_loop(draft: list[int], top: list[int]) -> int:
    accepted = 0
    for mine, theirs in zip(draft, top, strict=True):
        if mine != theirs:
            break
        accepted += 1
    return accepted


@settings(max_examples=100, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 3), st.integers(0, 6)),
    seed=st.integers(0, 2**31),
)
def test_prefix_equals_a_loop_over_any_leading_dimensions(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    draft, top = (torch.randint(0, 2, shape, generator=generator) for _ in range(2))
    accepted = greedy_prefix(draft, top)
    assert accepted.shape == shape[:-1] and accepted.dtype == torch.int64
    expected = [
        prefix_by_loop(*pair) for pair in zip(draft.flatten(0, 1).tolist(), top.flatten(0, 1).tolist(), strict=True)
    ]
    assert accepted.flatten().tolist() == expected


@pytest.mark.parametrize(
    ("draft", "choices", "accepted"),
    [([], [4], 0), ([1, 2], [1, 2, 3], 2), ([1, 2], [1, 7, 2], 1), ([5, 2], [1, 2, 3], 0)],
)
def test_policy_keeps_what_equals_the_choices(draft, choices, accepted):
    kept = StrictPolicy().accept(
        torch.tensor(draft, dtype=torch.int64), torch.tensor(choices), torch.empty(len(choices), 9)
    )
    assert kept == accepted and isinstance(kept, int)


def test_policies_are_found_by_name():
    assert load_policy("strict") == StrictPolicy()
    assert load_policy("strict").name == "strict"
    with pytest.raises(SettingError, match=r"no policy 'loose'; known: strict"):
        load_policy("loose")


def test_the_library_functions_are_found_in_one_place():
    assert callable(rejection_sample) and callable(target_choice)
