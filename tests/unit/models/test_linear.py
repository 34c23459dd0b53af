"""Packed linear layers: a row's product does not depend on the rows beside it."""

import pytest
import torch

from tierspec.models.ops import ANY_ROWS, PackedLinear, invariant_rows, packing_available

pytestmark = pytest.mark.skipif(not packing_available(), reason="needs oneDNN")

# Width pairs of the default model and of its EAGLE-3 drafter, where narrow products hide a difference by chance.
WIDTHS = [(576, 960), (576, 3072), (1536, 576), (576, 49152), (1728, 576), (576, 8192), (2048, 4096)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("in_features", "out_features"), WIDTHS)
def test_a_row_has_one_product_in_any_number_of_rows(dtype: torch.dtype, in_features: int, out_features: int) -> None:
    if invariant_rows(dtype) is None:
        pytest.skip("no invariant product on this processor")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    x = torch.randn(400, in_features, generator=generator).to(dtype)
    linear = PackedLinear(weight)
    expected = linear(x)
    for rows in (1, 2, 3, 8, 16, 31, 32, 33, 34, 48, 63, 64, 65, 100, 128, 130, 300):
        for some, same in ((x[:rows], expected[:rows]), (x[-rows:], expected[-rows:])):
            assert torch.equal(linear(some), same), rows


def test_no_rows_and_a_bias() -> None:
    linear = PackedLinear(torch.eye(8), torch.ones(8))
    assert linear(torch.zeros(0, 8)).shape == (0, 8)
    assert torch.equal(linear(torch.zeros(1, 8)), torch.ones(1, 8))
    assert torch.equal(PackedLinear(torch.eye(8), torch.ones(8), rule=ANY_ROWS)(torch.zeros(1, 8)), torch.ones(1, 8))
