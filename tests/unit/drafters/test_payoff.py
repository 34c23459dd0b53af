"""Features and artifact of the payoff predictor."""

import numpy as np
import pytest
import torch

from tests.support.payoff import random_predictor
from tierspec.drafters.payoff import FEATURES, History, feature_row, load_payoff, token_classes
from tierspec.drafters.suffix import SuffixProposal
from tierspec.errors import ArtifactError

TEXTS = ["word", " a", "f(x)", "\n", "x=", "don't", ""]
SUFFIX = {"max_depth": 64, "factor": 1.0}


def test_flags_are_those_of_the_characters():
    flags = {
        text: [int(bits) >> i & 1 for i in range(4)] for text, bits in zip(TEXTS, token_classes(TEXTS), strict=True)
    }
    assert flags == {
        "word": [0, 0, 0, 0],
        " a": [1, 0, 0, 0],
        "f(x)": [0, 0, 1, 0],
        "\n": [1, 0, 0, 1],
        "x=": [0, 0, 0, 1],
        "don't": [0, 1, 0, 0],
        "": [0, 0, 0, 0],
    }


def test_a_row_by_hand():
    history = History()
    for cached, accepted in [(True, 4), (False, 1), (True, 0), (False, 3)]:
        history.record(cached, accepted)
    proposal = SuffixProposal([1, 2], [0.5, 0.25], 0.75, 7)
    row = dict(zip(FEATURES, feature_row(proposal, 10, 5, 20, history.features(), token_classes(TEXTS)), strict=True))
    assert row == pytest.approx(
        {
            "score": 0.75,
            "match_length": 7,
            "draft_length": 2,
            "log_prompt_length": np.log(11),
            "log_generated": np.log(6),
            "generated_share": 0.25,
            "cache_share": 0.5,
            "mean_accepted": 2.0,
            "last_accepted": 3.0,
            "mean_cache_accepted": 2.0,
            "whitespace": 1,
            "punctuation": 0,
            "brackets": 1,
            "delimiters": 0,
        }
    )


def test_the_history_forgets():
    history = History()
    assert history.features() == (0.0, 0.0, 0.0, 0.0)
    for accepted in range(40):
        history.record(accepted < 30, accepted)
    assert history.features() == (6 / 16, sum(range(24, 40)) / 16, 39.0, sum(range(26, 30)) / 4)


def test_a_prediction_is_the_mlp_cut_to_the_drafts_length():
    found, rows = (
        random_predictor(token_classes(TEXTS), SUFFIX),
        np.abs(np.random.default_rng(1).normal(size=(64, 14)) * 8).astype(np.float32),
    )
    p = {name: torch.from_numpy(value) for name, value in found.parameters.items()}
    x = (torch.from_numpy(rows) - p["mean"]) / p["std"]
    for layer in ("hidden1", "hidden2"):
        x = torch.relu(x @ p[f"{layer}.weight"].T + p[f"{layer}.bias"])
    raw = (x @ p["output.weight"].T + p["output.bias"])[:, 0].numpy()
    expected = np.clip(raw, 0, rows[:, 2])
    np.testing.assert_allclose(found.predict(rows), expected, rtol=1e-4, atol=1e-4)
    assert 0 < (expected == raw).sum() < 64


def test_saved_and_loaded_it_predicts_the_same(tmp_path):
    made, rows = random_predictor(token_classes(TEXTS), SUFFIX), np.ones((3, 14), dtype=np.float32) * 5
    made.save(tmp_path)
    loaded = load_payoff(tmp_path, vocab_size=len(TEXTS), suffix=SUFFIX)
    assert loaded.predict(rows).tolist() == made.predict(rows).tolist()
    assert loaded.classes.tolist() == made.classes.tolist() and loaded.target == "here"


def damage_weights(path):
    (path / "model.safetensors").write_bytes(b"{" * 50)


def damage_config(path):
    (path / "config.json").write_text('{"kind": "payoff"}')


def forget(path):
    (path / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "vocab", "suffix", "line"),
    [
        (forget, 7, SUFFIX, "holds no payoff predictor"),
        (damage_config, 7, SUFFIX, "is not that of a payoff predictor"),
        (damage_weights, 7, SUFFIX, "cannot be read"),
        (None, 8, SUFFIX, r"classes is \(7,\), expected \(8,\)"),
        (None, 7, {"factor": 4.0}, r"draft\.suffix\.factor is 4\.0, but .* trained with 1\.0"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, damage, vocab, suffix, line):
    random_predictor(token_classes(TEXTS), SUFFIX).save(tmp_path)
    if damage is not None:
        damage(tmp_path)
    with pytest.raises(ArtifactError, match=line) as raised:
        load_payoff(tmp_path, vocab_size=vocab, suffix=suffix)
    assert "\n" not in str(raised.value)
