"""Bugs that raise nothing and cost the drafter its accept length. One check finds them all: decoding with the exported
drafter takes the rounds that the simulated verification of training foresees. Each bug, put in, must break it."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.drafters import FAMILIES
from tierspec.config import Settings, TrainingSettings, load_settings
from tierspec.decoding import DraftOptions, LocalCell, SamplingParams
from tierspec.drafters import load_drafter
from tierspec.errors import ArtifactError
from tierspec.models import Target
from tierspec.training.data import Sample, sample_anchors
from tierspec.training.families import build_trainee
from tierspec.training.features import FeatureRequest, TargetFeatures
from tierspec.training.optimizer import GroupClippedAdamW
from tierspec.training.token_view import token_view, walked_blocks
from tierspec.training.trainee import Trainee

PRESET = Path(__file__).parents[3] / "configs" / "tiny.yaml"
QUESTIONS = ("Why is the sky blue?", "Name three rivers.", "2 + 2", "Write a line about snow.")
TOKENS, DEPTH = 40, 3


@dataclass
class Line:
    """A drafter trained on a few answers of the tiny target, and its export."""

    settings: Settings
    target: Target
    samples: list[Sample]
    trainee: Trainee
    export: Path

    def foreseen(self, trainee: Trainee | None = None, samples: list[Sample] | None = None) -> list[int]:
        """Rounds per answer, as training sees them."""
        trainee = trainee or self.trainee
        features = TargetFeatures(self.target.decoder, trainee.feature_layers, max_length=256)
        rounds = []
        for number, sample in enumerate(samples or self.samples):
            (found,) = features([FeatureRequest(number, sample.token_ids, sample.first_anchor)])
            rounds.append(len(walked_blocks(token_view(trainee, found, sample))))
        return rounds

    def served(self, export: Path | None = None) -> list[int]:
        """Rounds per answer, as decoding takes them."""
        cell = LocalCell(self.target, drafter=load_drafter(export or self.export, self.target), max_running=1)
        sampling, draft = SamplingParams(TOKENS, ignore_eos=True), DraftOptions(source="neural", max_tokens=DEPTH)
        return [cell.generate([chat(self.target, q)], sampling, draft=draft)[0].stats.rounds for q in QUESTIONS]

    def features(self, trainee: Trainee) -> Iterator[tuple[list[Sample], list, list[torch.Tensor]]]:
        features = TargetFeatures(self.target.decoder, trainee.feature_layers, max_length=256, cache_bytes=2**24)
        requests = [FeatureRequest(i, s.token_ids, s.first_anchor) for i, s in enumerate(self.samples)]
        for step in range(60):
            yield self.samples, features(requests), [sample_anchors(s, 100, (step, 0)) for s in self.samples]

    def train(self, trainee: Trainee) -> None:
        optimizer = GroupClippedAdamW(trainee.parameter_groups(), TrainingSettings(learning_rate=3e-3))
        for samples, features, anchors in self.features(trainee):
            optimizer.zero_grad()
            trainee(trainee.collate(samples, features, anchors))[0].backward()
            optimizer.step()


def chat(target: Target, question: str) -> list[int]:
    return target.encode_chat([{"role": "user", "content": question}])


@pytest.fixture(scope="module", params=FAMILIES)
def line(request: pytest.FixtureRequest, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Line:
    return trained_line(request.param, tiny_target, tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def dflash_line(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Line:
    return trained_line("dflash", tiny_target, tmp_path_factory.mktemp("dflash"))


def trained_line(family: str, tiny_target: Target, export: Path) -> Line:
    shape = [f"drafter.family={family}", "drafter.layers=2", "drafter.draft_vocab_size=512"]
    settings = load_settings(PRESET, [f"training.depth={DEPTH}", *shape])
    prompts = [chat(tiny_target, question) for question in QUESTIONS]
    answers = LocalCell(tiny_target).generate(prompts, SamplingParams(TOKENS, ignore_eos=True))
    samples = [
        Sample(str(i), tuple(prompt), tuple(answer.token_ids))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    trainee, _ = build_trainee(settings, tiny_target, samples)
    made = Line(settings, tiny_target, samples, trainee, export)
    made.train(trainee)
    trainee.save(export, trainee.drafter.state_dict(), trainee.verification_head.state_dict())
    with torch.no_grad():  # what an export in bf16 keeps
        for parameter in trainee.parameters():
            parameter.copy_(parameter.bfloat16())
    return made


def test_decoding_takes_the_rounds_that_training_foresees(line: Line) -> None:
    assert line.foreseen() == line.served()
    assert sum(line.served()) < 0.8 * len(QUESTIONS) * (TOKENS - 1)


def test_killer_layer_index_off_by_one(line: Line) -> None:
    shifted = copy.copy(line.trainee)
    shifted.feature_layers = tuple(layer - 1 or layer + 1 for layer in line.trainee.feature_layers)
    assert line.foreseen(shifted) != line.served()


@pytest.mark.parametrize("bug", [lambda norm, x: x, lambda norm, x: norm(norm(x))], ids=["missing", "doubled"])
def test_killer_final_norm(line: Line, bug: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bent = copy.deepcopy(line.trainee)
    norm = bent.drafter.norm
    with torch.no_grad():
        norm.weight.mul_(torch.linspace(0.3, 1.7, norm.weight.numel()))  # a norm that is not nearly the identity
        norm.weight.copy_(norm.weight.bfloat16())
    bent.save(tmp_path, bent.drafter.state_dict(), {})
    assert line.foreseen(bent) == line.served(tmp_path)
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: bug(forward, x))
    assert line.foreseen(bent) != line.served(tmp_path)


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.mlp.down_proj.weight", "layers.0.self_attn.o_proj.weight"])
def test_killer_random_or_missing_weights_in_the_export(line: Line, name: str, tmp_path: Path) -> None:
    for file in line.export.glob("*.*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {name: torch.randn(tensors[name].shape).bfloat16()}, tmp_path / "model.safetensors")
    assert line.foreseen() != line.served(tmp_path)
    save_file({other: t for other, t in tensors.items() if other != name}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match=f"tensor {name} is missing"):
        line.served(tmp_path)


@pytest.mark.parametrize(
    "bug",
    [
        lambda unroll, features, block, anchors: unroll(features, block, anchors + 1),
        lambda unroll, features, block, anchors: unroll(features, block, (anchors - 1).clamp_min(0)),
        lambda unroll, features, block, anchors: unroll(features, block.roll(1, 2), anchors),
        lambda unroll, features, block, anchors: unroll(features, block, anchors).roll(1, 2),
    ],
    ids=["context of the future", "context too short", "anchor in another slot", "labels of another slot"],
)
def test_killer_block_alignment(dflash_line: Line, bug: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dflash_line.foreseen() == dflash_line.served()
    drafter = dflash_line.trainee.drafter
    monkeypatch.setattr(drafter, "unroll", partial(bug, drafter.unroll))
    assert dflash_line.foreseen() != dflash_line.served()


def test_killer_chat_template_that_serving_does_not_use(line: Line) -> None:
    plain = [
        replace(sample, prompt_ids=tuple(line.target.tokenizer(question)["input_ids"]))
        for sample, question in zip(line.samples, QUESTIONS, strict=True)
    ]
    assert line.foreseen(samples=plain) != line.served()


def test_killer_loss_mask_that_begins_elsewhere(line: Line) -> None:
    late = [replace(s, prompt_ids=s.token_ids[:-30], response_ids=s.token_ids[-30:]) for s in line.samples]
    assert line.foreseen(samples=late) != line.served()
    batch = line.trainee.collate(*next(line.features(line.trainee)))
    for sample, anchors, valid in zip(line.samples, batch.anchors_BA, batch.valid_BAK, strict=True):
        drafted = {int(a) + 2 + k for a, row in zip(anchors, valid, strict=True) for k in range(DEPTH) if row[k]}
        assert drafted == set(range(len(sample.prompt_ids) + 1, len(sample.token_ids)))
