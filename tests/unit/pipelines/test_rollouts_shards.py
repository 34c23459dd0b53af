from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts import Prompt
from pipelines.rollouts.directory import RolloutDirectory
from pipelines.rollouts.plan import digest_of, in_shards, seed_of, shuffled
from pipelines.rollouts.schema import DONE, FAILED, OUTCOME_SCHEMA, SCHEMA, SKIPPED, read_rollouts, write_shard
from tierspec.errors import ArtifactError, SettingError

IDENTITY = {"target.source": "tiny", "rollout.temperature": 0.0}


def outcomes(*rows: tuple[str, str, list[int]]) -> pa.Table:
    blank: dict[str, Any] = {name: None for name in OUTCOME_SCHEMA.names}
    return pa.Table.from_pylist(
        [
            blank | {"sample_id": name, "outcome": outcome, "reason": "why", "response_ids": ids, "prompt_ids": [1]}
            for name, outcome, ids in rows
        ],
        schema=OUTCOME_SCHEMA,
    )


def open_with_a_shard(path: Path) -> RolloutDirectory:
    directory = RolloutDirectory(path, IDENTITY)
    table = outcomes(("a", DONE, [1, 2]), ("b", FAILED, []), ("c", SKIPPED, []), ("d", DONE, [3]))
    directory.finished[1] = write_shard(path, directory.fingerprint, 1, table)
    return directory


def test_a_shard_holds_what_is_done_and_reports_the_rest(tmp_path: Path) -> None:
    written = open_with_a_shard(tmp_path).finished
    report = written[1]
    assert (report.asked, report.done, report.tokens) == (4, 2, 3)
    assert (report.failed, report.skipped) == ((("b", "why"),), (("c", "why"),))
    rows = read_rollouts(tmp_path)
    assert rows.schema == SCHEMA
    assert rows.column("sample_id").to_pylist() == ["a", "d"]
    assert RolloutDirectory(tmp_path, IDENTITY).finished == written


def test_an_empty_shard_is_a_finished_one(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path, IDENTITY)
    write_shard(tmp_path, directory.fingerprint, 0, outcomes(("a", SKIPPED, [])))
    assert RolloutDirectory(tmp_path, IDENTITY).finished[0].asked == 1
    assert read_rollouts(tmp_path).num_rows == 0


def test_a_changed_setting_is_refused_by_name_and_nothing_is_touched(tmp_path: Path) -> None:
    open_with_a_shard(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(
        SettingError, match=r"^rollout\.temperature is 1\.0 now, but was 0\.0 .*rollout\.overwrite=true"
    ):
        RolloutDirectory(tmp_path, IDENTITY | {"rollout.temperature": 1.0})
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwrite_drops_only_rollouts_of_other_settings(tmp_path: Path) -> None:
    open_with_a_shard(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert set(RolloutDirectory(tmp_path, IDENTITY, overwrite=True).finished) == {1}
    assert RolloutDirectory(tmp_path, IDENTITY | {"rollout.temperature": 1.0}, overwrite=True).finished == {}
    assert (tmp_path / "notes.txt").exists()
    assert not list(tmp_path.glob("*.parquet"))


def test_a_half_written_shard_is_swept_and_made_again(tmp_path: Path) -> None:
    open_with_a_shard(tmp_path)
    whole = (tmp_path / "shard-00001.parquet").read_bytes()
    (tmp_path / "shard-00002.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / ".shard-00003.parquet.tmp-999999999-0123abcd").write_bytes(b"killed here")
    assert set(RolloutDirectory(tmp_path, IDENTITY).finished) == {1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00001.parquet"]


def test_a_strangers_shard_is_refused(tmp_path: Path) -> None:
    open_with_a_shard(tmp_path)
    (tmp_path / "shard-00001.parquet").rename(tmp_path / "shard-00007.parquet")
    with pytest.raises(ArtifactError, match="shard-00007"):
        RolloutDirectory(tmp_path, IDENTITY)


def test_shards_without_a_manifest_are_refused(tmp_path: Path) -> None:
    open_with_a_shard(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(SettingError, match=r"shards without manifest\.json"):
        RolloutDirectory(tmp_path, IDENTITY)


def test_no_rollouts_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no rollouts: run jobs\.rollout first"):
        read_rollouts(tmp_path)


prompts = st.lists(st.integers(0, 999).map(lambda n: Prompt(f"p{n}", "s", (f"turn {n}",))), unique=True, max_size=30)


@given(prompts, st.integers(0, 2**63 - 1), st.data())
def test_the_mixed_order_depends_on_nothing_but_seed_and_id(some: list[Prompt], seed: int, data: st.DataObject) -> None:
    mixed = shuffled(some, seed)
    assert shuffled(data.draw(st.permutations(some)), seed) == mixed
    kept = data.draw(st.sets(st.sampled_from(some))) if some else set()
    assert shuffled([p for p in some if p in kept], seed) == [p for p in mixed if p in kept]


@given(prompts, st.integers(1, 8))
def test_shards_are_the_prompts_in_order(some: list[Prompt], size: int) -> None:
    shards = in_shards(some, size)
    assert [prompt for shard in shards for prompt in shard] == some
    assert all(len(shard) == size for shard in shards[:-1])


@given(st.integers(0, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_seeds_fit_the_column(seed: int, sample_id: str) -> None:
    assert 0 <= seed_of(seed, sample_id) < 2**63


def test_any_change_to_the_prompts_changes_their_digest() -> None:
    a, b = Prompt("a", "s", ("x",)), Prompt("b", "s", ("y",))
    variants = [[a, b], [b, a], [a], [a, Prompt("b", "s", ("z",))], [a, Prompt("c", "s", ("y",))]]
    assert len({digest_of(variant) for variant in variants}) == len(variants)
