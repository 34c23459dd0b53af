import pytest
import torch

from tierspec.training.simulation import first_rejection, survival


def accepted(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.bool)


def test_survival_ends_at_the_first_miss() -> None:
    m = accepted(1, 1, 0, 1, 1)
    assert survival(m).int().tolist() == [1, 1, 0, 0, 0]
    assert first_rejection(m).item() == 3


@pytest.mark.parametrize(("bits", "expected"), [((0, 1, 1), 1), ((1, 1, 1), 4), ((1, 1, 0), 3)])
def test_first_rejection_is_one_based(bits: tuple[int, ...], expected: int) -> None:
    assert first_rejection(accepted(*bits)).item() == expected


def test_invalid_positions_are_neither_accepted_nor_rejected() -> None:
    valid = accepted(1, 1, 0, 0)
    for tail in (accepted(1, 1, 1, 1), accepted(1, 1, 0, 0)):
        assert survival(tail, valid).int().tolist() == [1, 1, 0, 0]
        assert first_rejection(tail, valid).item() == 3
    assert first_rejection(accepted(1, 0, 1, 1), valid).item() == 2
    assert first_rejection(accepted(1, 1), accepted(0, 0)).item() == 1


def test_leading_dimensions_are_batch_dimensions() -> None:
    m = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    stars = first_rejection(m)
    assert stars.shape == (3, 4) and stars.dtype == torch.int64
    assert survival(m).shape == m.shape
    assert stars[1, 2] == first_rejection(m[1, 2])
