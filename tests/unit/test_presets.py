"""The presets of large targets: at reduced size along the whole code path, and their sizes as they are."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipelines.training.forecast import forecast, render_forecast
from pipelines.training.sizes import run_sizes
from tests.conftest import ROOT
from tests.support.tiny_models import write_random_model
from tierspec.config import Settings, load_settings
from tierspec.decoding import DraftOptions, LocalCell, SamplingParams
from tierspec.drafters import load_drafter
from tierspec.models import ModelConfig, Target
from tierspec.models.loading import load_target
from tierspec.training.data import Sample, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.optimizer import GroupClippedAdamW

QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000, "max_position_embeddings": 40960}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-4b": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    "llama-3.1-8b": {
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_scaling": LLAMA3},
        **{"rope_theta": 500000.0, "max_position_embeddings": 131072},
    },
}
DFLASH = ["drafter.family=dflash", "training.depth=15", "training.gradient_clip=1"]
DFLASH += ["training.objective.schedule=exponential"]
SMALL = ["target.device=cpu", "target.dtype=float32", "target.threads=1", "training.workers=1"]
SMALL += ["training.precision=fp32", "drafter.draft_vocab_size=128", "drafter.layers=2", "training.anchors=8"]
PROMPTS = ([5, 6, 7], [9, 8, 30, 31])


def preset(name: str, *overrides: str) -> Settings:
    return load_settings(ROOT / "configs" / f"{name}.yaml", list(overrides))


@pytest.mark.parametrize("family", [[], DFLASH], ids=["eagle3", "dflash"])
@pytest.mark.parametrize("name", TARGETS)
def test_a_small_model_of_the_architecture_trains_and_drafts(
    name: str, family: list[str], tiny_target: Target, tmp_path: Path
) -> None:
    source, export = tmp_path / "target", tmp_path / "drafter"
    shutil.copytree(tiny_target.path, source, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "gen*"))
    shape = {"vocab_size": tiny_target.config.vocab_size, "tie_word_embeddings": name == "qwen3-4b"}
    write_random_model(source, TARGETS[name]["model_type"], head_dim=16, shard_size="100KB", **shape)
    settings = preset(name, *family, *SMALL, f"target.source={source}")
    target = load_target(str(source), dtype="float32")
    sampling = SamplingParams(24, ignore_eos=True)
    answers = LocalCell(target).generate(PROMPTS, sampling)
    texts = enumerate(zip(PROMPTS, answers, strict=True))
    samples = [Sample(str(i), tuple(prompt), tuple(answer.token_ids)) for i, (prompt, answer) in texts]

    trainee, coverage = build_trainee(settings, target, samples)
    assert coverage == 1.0
    features = TargetFeatures(target.decoder, trainee.feature_layers, max_length=64)
    found = features([FeatureRequest(i, s.token_ids, s.first_anchor) for i, s in enumerate(samples)])
    optimizer = GroupClippedAdamW(trainee.parameter_groups(), settings.training)
    losses = []
    for _ in range(3):
        anchors = [sample_anchors(sample, settings.training.anchors, (0, i)) for i, sample in enumerate(samples)]
        loss, _ = trainee(trainee.collate(samples, found, anchors))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    export.mkdir()
    trainee.save(export, trainee.drafter.state_dict(), trainee.verification_head.state_dict())
    cell = LocalCell(target, drafter=load_drafter(export, target))
    drafted = cell.generate(PROMPTS, sampling, draft=DraftOptions("neural", max_tokens=settings.draft.max_tokens))
    assert [a.token_ids for a in drafted] == [a.token_ids for a in answers]
    assert all(answer.stats.drafted for answer in drafted)


@pytest.mark.parametrize(
    ("name", "family", "target", "drafter"),
    [
        ("qwen3-4b", [], 4.02e9, 218e6),
        ("qwen3-4b", DFLASH, 4.02e9, 537e6),
        ("qwen3-8b", [], 8.19e9, 400e6),
        ("qwen3-8b", DFLASH, 8.19e9, 1.05e9),
        ("llama-3.1-8b", [], 8.03e9, 425e6),
    ],
)
def test_sizes_are_those_that_are_published(
    name: str, family: list[str], target: float, drafter: float, tiny_target: Target
) -> None:
    settings = preset(name, *family)
    samples = [Sample(str(i), (1,) * 100, (2,) * 900) for i in range(1000)]
    config = ModelConfig.from_hf(json.loads(json.dumps(TARGETS[name])))
    found = run_sizes(settings, config, tiny_target.tokenizer, samples)
    assert found.target_parameters == pytest.approx(target, rel=0.01)
    assert found.drafter_parameters == pytest.approx(drafter, rel=0.05)
    assert (found.steps_per_epoch, found.steps) == (63, 189)
    assert found.memory_bytes["target"] == 2 * found.target_parameters
    assert found.memory_bytes["optimizer"] == found.drafter_parameters  # eight bytes each, shared by eight workers


def test_a_target_without_weights_is_planned_for_and_not_measured(tiny_target: Target, tmp_path: Path) -> None:
    source = tmp_path / "target"
    shutil.copytree(tiny_target.path, source, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (source / "config.json").write_text(json.dumps(TARGETS["qwen3-4b"]))
    samples = [Sample(str(i), (1,) * 100, (2,) * 900) for i in range(1000)]
    found = forecast(preset("qwen3-4b", f"target.source={source}"), samples)
    assert found["measured"] is None and found["steps"] == 189
    printed = render_forecast(found)
    assert "(4,022M)" in printed and "not measured: the target's directory holds no weights" in printed
