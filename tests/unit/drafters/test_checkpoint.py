import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.drafters import FAMILIES, random_trainee, tiny_decoder
from tierspec.drafters import load_drafter, read_drafter, save_checkpoint
from tierspec.drafters.config import check_feature_layers
from tierspec.drafters.dflash.config import default_feature_layers as dflash_layers
from tierspec.drafters.eagle3 import Eagle3Drafter
from tierspec.drafters.eagle3.config import default_feature_layers
from tierspec.errors import ArtifactError, SettingError


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    return SimpleNamespace(decoder=tiny_decoder(tmp_path_factory.mktemp("target")), source="tiny")


@pytest.fixture
def checkpoint(target: SimpleNamespace, tmp_path: Path) -> Path:
    trainee = random_trainee(target.decoder)
    weights, head = trainee.drafter.state_dict(), trainee.verification_head.state_dict()
    save_checkpoint(tmp_path, trainee.drafter.config, weights, trainee.vocabulary, head, torch.float32)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(target: SimpleNamespace, tmp_path: Path, family: str) -> None:
    trainee = random_trainee(target.decoder, family=family)
    trainee.save(tmp_path, trainee.drafter.state_dict(), trainee.verification_head.state_dict())
    found = read_drafter(tmp_path)
    assert found.config == trainee.drafter.config
    assert found.weights.keys() == trainee.drafter.state_dict().keys()
    for name, tensor in trainee.drafter.state_dict().items():
        assert torch.equal(found.weights[name], tensor.bfloat16())
    assert torch.equal(found.vocabulary.target_ids, trainee.vocabulary.target_ids)
    assert found.verification_head.keys() == {"weight", "bias"}
    drafter = load_drafter(tmp_path, target)  # type: ignore[arg-type]
    assert isinstance(drafter, Eagle3Drafter) == (family == "eagle3") and drafter.family == family


def test_files_are_what_engines_expect(checkpoint: Path) -> None:
    tensors = load_file(str(checkpoint / "model.safetensors"))
    assert {n for n in tensors if not n.startswith(("layers.0.", "verification_head."))} == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (16, 96)
    assert json.loads((checkpoint / "config.json").read_text())["feature_layers"] == [1, 2]


def rewrite(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(str(checkpoint / "model.safetensors"))
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, str(checkpoint / "model.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc__weight": None}, "fc.weight is missing"),
        ({"d2t": None}, "d2t is missing"),
        ({"embed": torch.zeros(2)}, "embed is unknown"),
        ({"norm__weight": torch.ones(3)}, "norm.weight has shape"),
        ({"norm__weight": torch.full((48,), float("nan"))}, "norm.weight is not finite"),
        ({"d2t": torch.arange(40)}, "disagree"),
    ],
)
def test_bad_tensors_are_named(
    target: SimpleNamespace, checkpoint: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(checkpoint, **changes)
    with pytest.raises(ArtifactError, match=message):
        load_drafter(checkpoint, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "medusa"}, "'medusa' is unknown"),
        ({"num_heads": None}, "num_heads is missing"),
        ({"hidden_size": "48"}, "hidden_size should be a int"),
        ({"extra": 1}, "extra is unknown"),
        ({"rope": {"base": 1}}, "rope has unknown entries"),
        ({"embedding_sha256": "0" * 64}, "trained for tiny"),
    ],
)
def test_bad_config_is_named(target: SimpleNamespace, checkpoint: Path, change: dict, message: str) -> None:
    path = checkpoint / "config.json"
    values = json.loads(path.read_text()) | change
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(ArtifactError, match=message):
        load_drafter(checkpoint, target)  # type: ignore[arg-type]


def test_missing_and_broken_files(target: SimpleNamespace, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no drafter in"):
        load_drafter(tmp_path / "nowhere", target)  # type: ignore[arg-type]
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match="corrupt or truncated"):
        load_drafter(checkpoint, target)  # type: ignore[arg-type]
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match="not valid JSON"):
        load_drafter(checkpoint, target)  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "expected"), [(30, (2, 15, 27)), (36, (2, 18, 33)), (4, (1, 2)), (2, (1,))])
def test_default_feature_layers(layers: int, expected: tuple[int, ...]) -> None:
    assert default_feature_layers(layers) == expected
    assert check_feature_layers(expected, layers) == expected


@pytest.mark.parametrize(
    ("layers", "expected"), [(36, (2, 10, 18, 26, 34)), (32, (2, 9, 16, 23, 30)), (30, (2, 8, 15, 22, 28)), (4, (2,))]
)
def test_default_feature_layers_of_dflash(layers: int, expected: tuple[int, ...]) -> None:
    assert dflash_layers(layers, 5) == expected


@pytest.mark.parametrize("layers", [[0], [30], [15, 2], [2, 2], []])
def test_the_last_and_unordered_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(SettingError, match="drafter.feature_layers"):
        check_feature_layers(layers, 30)
