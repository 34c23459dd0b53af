import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.training import plan_training
from pipelines.training.checkpoints import drop_unregistered, is_damaged
from pipelines.training.identity import claim_state, refuse_changes
from pipelines.training.records import ProgressBar, RunLog, read_records
from tests.support.rollouts import write_tiny_rollouts
from tierspec.config import Settings
from tierspec.errors import ArtifactError, SettingError
from tierspec.models import Target
from tierspec.training.families import build_trainee


@pytest.fixture
def settings(tiny_settings: Settings, tiny_target: Target) -> Settings:
    rollouts = Path(tiny_settings.run.root) / tiny_settings.run.name / "rollouts"
    write_tiny_rollouts(rollouts / "train", tiny_target, count=12, seed=0, tokens=4)
    return tiny_settings


def output_of(settings: Settings) -> Path:
    return Path(settings.run.root) / settings.run.name / "drafter"


def test_without_heldout_rollouts_some_training_rollouts_are_held_out(settings: Settings, tiny_target: Target) -> None:
    plan = plan_training(settings, output=output_of(settings))
    assert (len(plan.samples), len(plan.heldout)) == (10, 2)
    assert not {s.sample_id for s in plan.samples} & {s.sample_id for s in plan.heldout}
    assert plan.heldout_source == "split of the training rollouts"
    none = plan_training(settings.override("training.heldout_prompts=0"), output=output_of(settings))
    assert (len(none.samples), len(none.heldout), none.heldout_source) == (12, 0, "")

    write_tiny_rollouts(output_of(settings).parent / "rollouts" / "heldout", tiny_target, count=5, seed=1, tokens=4)
    plan = plan_training(settings, output=output_of(settings))
    assert len(plan.samples) == 12
    assert [sample.sample_id for sample in plan.heldout] == ["heldout-0", "heldout-2"]
    assert not output_of(settings).exists() and not plan.state.exists()


@pytest.mark.parametrize(
    ("made_with", "greedy"),
    [
        (("float32", "cpu", "auto"), True),
        (("float32", "cpu", "invariant"), True),
        (("bfloat16", "cpu", "auto"), False),
        (("float32", "cuda", "auto"), False),
        (("float32", "cpu", "fast"), False),
        (None, False),
    ],
)
def test_greedy_rollouts_are_the_targets_choices_only_if_it_made_them(
    settings: Settings, made_with: tuple[str, str, str] | None, greedy: bool
) -> None:
    rollouts = output_of(settings).parent / "rollouts" / "train"
    if made_with:
        names = ("target.dtype", "target.device", "target.numerics")
        (rollouts / "manifest.json").write_text(json.dumps({"identity": dict(zip(names, made_with, strict=True))}))
    samples = plan_training(settings.override("target.dtype=float32"), output=output_of(settings)).samples
    assert {sample.greedy for sample in samples} == {greedy}


def test_the_token_head_has_a_rate_of_its_own(settings: Settings, tiny_target: Target) -> None:
    samples = plan_training(settings, output=output_of(settings)).samples

    def rates(*overrides: str) -> dict[str, float]:
        changed = settings.override("training.lm_head_rate=0.25", *overrides)
        groups = build_trainee(changed, tiny_target, samples)[0].parameter_groups()
        return {group["name"]: group["rate"] for group in groups}

    assert rates() == {"drafter": 1.0, "lm_head": 0.25, "verification_head": 1.0}
    assert rates("training.initialize_from_target=false")["lm_head"] == 1.0


def test_a_warm_start_has_the_weights_and_the_vocabulary_of_the_drafter_it_names(
    settings: Settings, tiny_target: Target, tmp_path: Path
) -> None:
    samples = plan_training(settings, output=output_of(settings)).samples
    first, _ = build_trainee(settings, tiny_target, samples)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.copy_(torch.randn(parameter.shape).bfloat16())
    first.save(tmp_path, first.drafter.state_dict(), first.verification_head.state_dict())
    warm = settings.override(f"training.warm_start={tmp_path}", "training.depth=2", "run.seed=9")
    second, coverage = build_trainee(warm, tiny_target, samples[:1])
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(first.vocabulary.target_ids, second.vocabulary.target_ids) and coverage > 0.9

    with pytest.raises(SettingError, match=r"^training\.warm_start: .* draft_vocab_size 256, but these"):
        build_trainee(warm.override("drafter.draft_vocab_size=64"), tiny_target, samples)
    with pytest.raises(SettingError, match=r"^training\.warm_start is .*: no model\.safetensors there"):
        plan_training(settings.override("training.warm_start=nowhere"), output=output_of(settings))
    identity = plan_training(warm, output=output_of(settings)).identity
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert plan_training(warm, output=output_of(settings)).identity != identity


def test_a_state_is_gone_on_from_only_with_what_shaped_it(settings: Settings) -> None:
    output = output_of(settings)
    plan = plan_training(settings, output=output)
    claim_state(plan.state, plan.identity)
    (plan.state / "checkpoints").mkdir()

    more = plan_training(settings.override("training.max_steps=99", "training.keep_last=5"), output=output)
    claim_state(more.state, more.identity)
    assert (plan.state / "checkpoints").exists()

    with pytest.raises(SettingError, match=r"training\.lm_head_rate is 0\.5 now"):
        plan_training(settings.override("training.lm_head_rate=0.5"), output=output)
    with pytest.raises(SettingError, match=r"another version, which had no training\.new"):
        refuse_changes(plan.state, plan.identity | {"training.new": 1})
    changed = settings.override("training.objective.decay=0.7")
    with pytest.raises(
        SettingError, match=r"training\.objective\.decay is 0\.7 now, but was 0\.8 .*training\.overwrite=true"
    ):
        plan_training(changed, output=output)
    anew = plan_training(changed.override("training.overwrite=true"), output=output)
    claim_state(anew.state, anew.identity)
    assert not (plan.state / "checkpoints").exists()
    refuse_changes(anew.state, anew.identity)
    with pytest.raises(SettingError, match="the rollouts are not those"):
        refuse_changes(anew.state, anew.identity | {"rollouts": "others"})

    (anew.state / "identity.json").unlink()
    refuse_changes(anew.state, anew.identity)
    (anew.state / "checkpoints").mkdir()
    with pytest.raises(SettingError, match=r"does not say what it was made with \(no identity\.json\)"):
        refuse_changes(anew.state, anew.identity)


def test_checkpoints_that_are_not_registered_go_unless_the_register_is_damaged(tmp_path: Path) -> None:
    snapshot = tmp_path / "checkpoint_manager_snapshot.json"
    (tmp_path / "checkpoint_a").mkdir()
    drop_unregistered(tmp_path)
    assert not list(tmp_path.iterdir())
    _make_checkpoint(tmp_path / "checkpoint_uploaded")
    (tmp_path / "checkpoint_half_uploaded").mkdir()
    drop_unregistered(tmp_path)
    assert not list(tmp_path.iterdir())
    for name in "abc":
        _make_checkpoint(tmp_path / f"checkpoint_{name}")
    for text in (None, "", "[]", "{}"):
        if text is not None:
            snapshot.write_text(text)
        with pytest.raises(ArtifactError, match=r"does not list the checkpoints .*training\.overwrite=true"):
            drop_unregistered(tmp_path)
    snapshot.write_text(json.dumps({"checkpoint_results": [{"checkpoint_dir_name": "checkpoint_b"}]}))
    drop_unregistered(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("checkpoint_?")) == ["checkpoint_b"]
    shutil.rmtree(tmp_path / "checkpoint_b")
    with pytest.raises(ArtifactError, match="checkpoint_b is missing"):
        drop_unregistered(tmp_path)
    assert is_damaged(tmp_path)


def _make_checkpoint(directory: Path) -> None:
    directory.mkdir()
    for name in ("state.safetensors", "progress.json", "metrics.json"):
        (directory / name).touch()


def test_heldout_rollouts_are_answers_of_the_same_target(settings: Settings, tiny_target: Target) -> None:
    heldout = output_of(settings).parent / "rollouts" / "heldout"
    write_tiny_rollouts(heldout, tiny_target, count=2, seed=1, tokens=4)
    (file,) = heldout.glob("*.parquet")
    table = pq.read_table(file)
    for column, line in (("target", r"target\.source is embedded:tiny, but .*heldout"), ("template_hash", "template")):
        other = table.set_column(table.column_names.index(column), column, pa.array(["other"] * 2))
        pq.write_table(other, file)
        with pytest.raises(SettingError, match=line):
            plan_training(settings, output=output_of(settings))


def test_heldout_rollouts_without_a_whole_round_measure_nothing(settings: Settings, tiny_target: Target) -> None:
    write_tiny_rollouts(output_of(settings).parent / "rollouts" / "heldout", tiny_target, count=2, seed=1, tokens=3)
    with pytest.raises(
        SettingError, match=r"^training\.heldout_prompts: no answer in .* more than training\.depth = 3"
    ):
        plan_training(settings, output=output_of(settings))


def test_keyed_verification_needs_to_know_the_sampling(settings: Settings) -> None:
    keyed = settings.override("training.objective.verification=keyed")
    with pytest.raises(SettingError, match=r"^training\.objective\.verification is keyed, but the rollout"):
        plan_training(keyed, output=output_of(settings))


def test_a_resumed_log_forgets_the_steps_that_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, 0)
    log.write("start", 0, {"total_steps": 4})
    for step in (1, 2, 3):
        log.write("step", step, {"loss": 1.0 / step})
    log.close()
    path.write_text(path.read_text() + '{"kind": "step", "st')

    log = RunLog(path, 2)
    log.write("start", 2, {"total_steps": 4})
    log.write("step", 3, {"loss": 9.0})
    log.close()
    assert [(r["kind"], r["step"]) for r in read_records(path)] == [("step", 1), ("step", 2), ("start", 2), ("step", 3)]
    assert list(read_records(tmp_path / "none")) == []


def test_the_progress_bar_follows_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    bar = ProgressBar(path)
    bar.poll()
    log = RunLog(path, 0)
    log.write("start", 0, {"total_steps": 4})
    scalars = {"loss": 3.25, "accept_len": 1.5, "tokens_per_s": 900.0, "budget_share": 0.5, "seconds_left": 75.0}
    log.write("step", 2, scalars)
    log.write("heldout", 2, {"accept_len": 1.75})
    bar.poll()
    bar.close()
    log.close()
    shown = capsys.readouterr().err
    for part in ("50%", "step=2", "loss=3.25", "accept=1.50", "tok/s=900", "left=1:15", "held-out=1.75"):
        assert part in shown
