"""The law of the keyed choice at a size fit for every run; `tests/evidence/keyed_rule.py` has the large one."""

import pytest

from tests.evidence.keyed_rule import LAWS, NEIGHBOURS, of_law, of_pairs

LEAST_P_VALUE = 1e-3


@pytest.mark.parametrize("name", LAWS)
def test_choices_follow_the_targets_law(name):
    assert of_law(100_000 if LAWS[name]["top_k"] == 0 else 5_000, name)["p_value"] > LEAST_P_VALUE


@pytest.mark.parametrize("changed", NEIGHBOURS)
def test_neighbouring_keys_are_independent(changed):
    assert of_pairs(100_000, **NEIGHBOURS[changed])["p_value"] > LEAST_P_VALUE
