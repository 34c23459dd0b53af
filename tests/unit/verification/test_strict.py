import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.verification import greedy_prefix
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


def test_the_library_functions_are_found_in_one_place():
    assert callable(rejection_sample) and callable(target_choice)
