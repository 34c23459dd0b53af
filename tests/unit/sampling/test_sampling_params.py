import dataclasses

import pytest

from tierspec.errors import SettingError
from tierspec.sampling import RowSampling, SamplingParams, draw_seed


def test_defaults_are_valid_and_greedy():
    params = SamplingParams()
    params.validate()
    assert params.row() == RowSampling(0.0, 0, 1.0, 0, 0)
    assert params.row().greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", "abc"),
        ("stop", ("",)),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", [1]),
        ("ignore_eos", 1),
        ("stream", 2**32),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(SettingError, match=f"^{field}: ") as refusal:
        SamplingParams(**{field: value}).validate()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 2, "top_p": 1, "top_k": -1, "seed": -(2**63)},
        {"stop": ("a", "b", "c", "d"), "stop_token_ids": (0, 7), "stream": 2**32 - 1, "ignore_eos": True},
    ],
)
def test_the_edges_are_in_range(changes):
    SamplingParams(**changes).validate()


def test_row_takes_what_the_tiers_need():
    params = SamplingParams(temperature=0.8, top_k=-1, top_p=0.9, seed=5, stream=2)
    assert params.row() == RowSampling(0.8, 0, 0.9, 5, 2)


def test_a_sampled_row_needs_its_seed():
    params = SamplingParams(temperature=0.8)
    with pytest.raises(SettingError, match="^seed: "):
        params.row()
    seeded = dataclasses.replace(params, seed=draw_seed())
    seeded.validate()
    assert not seeded.row().greedy


def test_drawn_seeds_differ_and_fit_int64():
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds)
