"""Trace replay against a naive one, and that no row knows what is written later."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierspec.config import PayoffSettings, SuffixSettings
from tierspec.drafters.payoff import FEATURES, token_classes
from tierspec.drafters.suffix import SuffixCache
from tierspec.training.payoff import fit_payoff, payoff_metrics
from tierspec.training.replay import ReplayRows, neural_lengths, oracle, replay

CLASSES = token_classes(["a", " b", "(c", "d="])
SUFFIX = SuffixSettings(max_depth=8, max_tokens=6, factor=2.0)
ONE = neural_lengths([1.0, 0.0])  # the neural drafter always has one token accepted


def replayed(prompt, response, **changes):
    options = {
        "suffix": SUFFIX,
        "classes": CLASSES,
        "max_new_tokens": 64,
        "neural": ONE,
        "policy": oracle(2),
        "seed": 0,
    }
    return replay(prompt, response, **{"seed": 0, **options, **changes})


TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None)
@given(TEXT, TEXT)
def test_payoffs_are_what_the_text_confirms(prompt, response):
    rows = replayed(prompt, response)
    index = 0
    for generated in range(1, len(response)):
        cache = SuffixCache(8)
        cache.extend([*prompt, *response[:generated]])
        draft = cache.propose(6, 0.1, 2.0).tokens
        if draft:
            accepted = 0
            while (
                accepted < min(len(draft), len(response) - generated)
                and draft[accepted] == response[generated + accepted]
            ):
                accepted += 1
            assert rows.payoff[index] == accepted
            assert rows.features[index][FEATURES.index("draft_length")] == len(draft)
            index += 1
    assert index == len(rows)


@settings(deadline=None)
@given(TEXT, TEXT, st.integers(0, 39), TEXT)
def test_rows_do_not_know_what_is_written_after_their_draft(prompt, response, at, other):
    at = min(at, len(response))
    changed = [*response[:at], *other]
    mine, theirs = replayed(prompt, response), replayed(prompt, changed)
    horizon = at - SUFFIX.max_tokens
    generated = np.expm1(mine.features[:, FEATURES.index("log_generated")]).round()
    known = int((generated < horizon).sum())
    np.testing.assert_array_equal(mine.features[:known], theirs.features[:known])
    np.testing.assert_array_equal(mine.payoff[:known], theirs.payoff[:known])


def test_rounds_follow_the_policy():
    response = [0, 1, 2, 3] * 10
    rows = replayed([0, 1, 2, 3], response)
    never = replayed([0, 1, 2, 3], response, policy=lambda row, payoff: False)
    generated = np.expm1(rows.features[:, FEATURES.index("log_generated")]).round().astype(int)
    boundary, expected = 1, []
    for place, payoff in zip(generated, rows.payoff, strict=True):
        if place == boundary:
            expected.append(place)
            boundary += (payoff if payoff >= 2 else 1) + 1
    assert generated[rows.visited].tolist() == expected
    assert never.visited.sum() > rows.visited.sum()
    assert rows.features[-1][FEATURES.index("cache_share")] > 0.5
    assert (never.features[:, FEATURES.index("cache_share")] == 0).all()


def test_lengths_of_the_neural_drafter():
    assert neural_lengths([0.5, 0.5]).tolist() == [0.5, 0.25, 0.25]


def test_a_predictor_learns_what_can_be_learned():
    random = np.random.default_rng(0)
    features = random.normal(size=(4000, len(FEATURES))).astype(np.float32)
    payoff = np.where(features[:, 1] + features[:, 0] > 1, 12, 0)
    rows = ReplayRows(features, payoff, np.ones(4000, np.bool_))
    first, second = (fit_payoff(rows, PayoffSettings(), seed=3) for _ in range(2))
    assert all((first[name] == second[name]).all() for name in first)
    x = (features - first["mean"]) / first["std"]
    x = np.maximum(x @ first["hidden1.weight"].T + first["hidden1.bias"], 0)
    x = np.maximum(x @ first["hidden2.weight"].T + first["hidden2.bias"], 0)
    predicted = (x @ first["output.weight"].T + first["output.bias"])[:, 0]
    found = payoff_metrics(predicted, payoff, 6.0)
    assert found["precision"] > 0.9 and found["recall"] > 0.9
    assert [p for p, _ in found["calibration"]] == sorted(p for p, _ in found["calibration"])


def test_metrics_by_hand():
    found = payoff_metrics(np.array([7.0, 8.0, 1.0, 0.0], np.float32), np.array([9, 2, 6, 0]), 6.0)
    assert (found["precision"], found["recall"], found["chosen"], found["pays"]) == (0.5, 0.5, 0.5, 0.5)
    assert found["mean_absolute_error"] == pytest.approx((2 + 6 + 5 + 0) / 4)
    empty = payoff_metrics(np.zeros(0, np.float32), np.zeros(0, np.int64), 6.0)
    assert empty["precision"] is None and empty["rows"] == 0
