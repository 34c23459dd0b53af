from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tierspec.errors import ArtifactError, SettingError
from tierspec.training.data import (
    DataOrder,
    Sample,
    check_token_ids,
    read_rollouts,
    sample_anchors,
    token_counts,
)


def write(path: Path, rows: list[tuple[list[int], list[int]]], target: str = "tiny", first: int = 0) -> None:
    table = pa.table(
        {
            "sample_id": [f"s{first + i}" for i in range(len(rows))],
            "prompt_ids": pa.array([prompt for prompt, _ in rows], pa.list_(pa.int32())),
            "response_ids": pa.array([response for _, response in rows], pa.list_(pa.int32())),
            "target": [target] * len(rows),
            "template_hash": ["h"] * len(rows),
            "temperature": [0.0] * len(rows),
        }
    )
    pq.write_table(table, path)


def test_rollouts_are_read_in_order_cut_and_dropped(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", [([1, 2], [3, 4, 5, 6, 7])], first=9)
    write(tmp_path / "a.parquet", [([1], [2, 3]), ([1], [2]), ([], [2, 3]), ([1, 2, 3, 4], [5, 6])])
    rollouts = read_rollouts(tmp_path, max_length=5)
    assert [s.sample_id for s in rollouts.samples] == ["s0", "s9"]
    assert rollouts.samples[1].token_ids == (1, 2, 3, 4, 5)
    assert (rollouts.cut, rollouts.dropped, rollouts.response_tokens) == (1, 3, 5)
    assert (rollouts.target, rollouts.template_hash) == ("tiny", "h")
    assert read_rollouts(tmp_path / "b.parquet", 100).samples[0].response_ids == (3, 4, 5, 6, 7)
    assert rollouts.samples[0].greedy


def test_bad_rollouts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no rollouts in"):
        read_rollouts(tmp_path, 10)
    (tmp_path / "x.parquet").write_bytes(b"nonsense")
    with pytest.raises(ArtifactError, match="x.parquet is not a rollout file"):
        read_rollouts(tmp_path, 10)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(ArtifactError, match=r"x.parquet is not a rollout file: no column sample_id"):
        read_rollouts(tmp_path, 10)
    write(tmp_path / "x.parquet", [([1], [2, 3])])
    for name, bad, says in (
        ("response_ids", [[2, None]], "response_ids has a null"),
        ("prompt_ids", [None], "prompt_ids has a null"),
        ("target", pa.array([None], pa.string()), "target has a null"),
        ("prompt_ids", ["one"], ""),
    ):
        table = pq.read_table(tmp_path / "x.parquet")
        at = table.column_names.index(name)
        pq.write_table(table.set_column(at, name, pa.array(bad)), tmp_path / "z.parquet")
        with pytest.raises(ArtifactError, match=f"z.parquet is not a rollout file: .*{says}"):
            read_rollouts(tmp_path / "z.parquet", 10)
    (tmp_path / "z.parquet").unlink()
    write(tmp_path / "y.parquet", [([1], [2, 3])], target="other")
    with pytest.raises(ArtifactError, match="several targets"):
        read_rollouts(tmp_path, 10)
    (tmp_path / "y.parquet").unlink()
    with pytest.raises(SettingError, match=r"training\.max_length is 2"):
        read_rollouts(tmp_path, 2)


@pytest.mark.parametrize("stray", [-1, 6])
def test_token_ids_of_another_vocabulary_are_named(stray: int) -> None:
    check_token_ids([Sample("a", (0,), (5,))], 6)
    with pytest.raises(ArtifactError, match=f"rollout b holds token id {stray}, but the target has 6 tokens"):
        check_token_ids([Sample("a", (0,), (5,)), Sample("b", (0, stray), (5,))], 6)


def test_supervised_tokens_are_counted() -> None:
    samples = [Sample("a", (1, 1), (2, 3, 3)), Sample("b", (5,), (0, 3))]
    assert token_counts(samples, 6).tolist() == [1, 0, 1, 3, 0, 0]


def test_order_covers_every_epoch_and_depends_on_seed_and_step_alone() -> None:
    lengths = torch.randint(5, 90, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    order = DataOrder(lengths, 8, seed=3)
    assert order.steps_per_epoch == 7
    epochs = [[order.samples(step) for step in range(e * 7, e * 7 + 7)] for e in range(2)]
    for epoch in epochs:
        flat = [i for step in epoch for i in step]
        assert len(flat) == 56 and set(flat) == set(range(50))
    assert epochs[0] != epochs[1]
    assert DataOrder(lengths, 8, seed=3).samples(9) == epochs[1][2]
    assert DataOrder(lengths, 8, seed=4).samples(0) != epochs[0][0]


def test_a_step_holds_similar_lengths() -> None:
    lengths = torch.randint(5, 500, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    order = DataOrder(lengths, 8, seed=0)
    spreads = [max(group) - min(group) for group in ([lengths[i] for i in order.samples(s)] for s in range(32))]
    assert sum(spreads) / len(spreads) < 80


def test_fewer_samples_than_a_step_repeat() -> None:
    assert sorted(DataOrder([4, 5], 5, seed=0).samples(3))[0] == 0
    assert len(DataOrder([4, 5], 5, seed=0).samples(3)) == 5


def test_anchors_are_rows_with_a_supervised_draft() -> None:
    sample = Sample("a", tuple(range(10)), tuple(range(6)))
    everything = sample_anchors(sample, 100, (0, 1))
    assert everything.tolist() == [9, 10, 11, 12, 13]
    few = sample_anchors(sample, 3, (0, 1))
    assert len(set(few.tolist())) == 3 and few.tolist() == sorted(few.tolist())
    assert torch.equal(few, sample_anchors(sample, 3, (0, 1)))
    drawn = {tuple(sample_anchors(sample, 3, (0, i)).tolist()) for i in range(50)}
    assert len(drawn) > 5
