"""A shard of rollouts: one Parquet file that holds the answers to a group of prompts and says what became of the rest.

One row is one answered user turn: `prompt_ids` is all the target saw (chat template, earlier turns and its own answers
to them), `response_ids` what it wrote, without the end-of-sequence token; `finish_reason` is `stop` if it ended its
turn and `length` if it was cut. The later turns of a prompt are rows of their own, `<sample id>#2` and so on.
"""

import json
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tierspec.artifacts import atomic_write_bytes
from tierspec.errors import ArtifactError

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("response_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("seed", pa.int64()),
        ("target", pa.string()),
        ("template_hash", pa.string()),
    ]
)
DONE, FAILED, SKIPPED = "done", "failed", "skipped"
OUTCOME_SCHEMA = SCHEMA.append(pa.field("outcome", pa.string())).append(pa.field("reason", pa.string()))
_REPORT = b"tierspec.shard"


@dataclass(frozen=True)
class ShardReport:
    """What became of the answers asked of a shard; `failed` and `skipped` are (sample id, reason)."""

    fingerprint: str
    shard: int
    done: int
    tokens: int
    failed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def asked(self) -> int:
        return self.done + len(self.failed) + len(self.skipped)


def shard_path(directory: Path, shard: int) -> Path:
    return directory / f"shard-{shard:05d}.parquet"


def write_shard(directory: Path, fingerprint: str, shard: int, outcomes: pa.Table) -> ShardReport:
    """Write the rows of `outcomes` (OUTCOME_SCHEMA) that are done, atomically, with a report on the others."""
    rows = outcomes.to_pylist()

    def others(outcome: str) -> tuple[tuple[str, str], ...]:
        return tuple((row["sample_id"], row["reason"]) for row in rows if row["outcome"] == outcome)

    done = pa.Table.from_pylist([row for row in rows if row["outcome"] == DONE], schema=SCHEMA)
    tokens = sum(map(len, done.column("response_ids").to_pylist()))
    report = ShardReport(fingerprint, shard, done.num_rows, tokens, others(FAILED), others(SKIPPED))
    buffer = BytesIO()
    pq.write_table(done.replace_schema_metadata({_REPORT: json.dumps(asdict(report))}), buffer, compression="zstd")
    atomic_write_bytes(shard_path(directory, shard), buffer.getvalue())
    return report


def read_report(path: Path) -> ShardReport:
    """The report inside a shard. ArtifactError if the file is not a whole shard."""
    try:
        metadata = pq.read_schema(path).metadata or {}
        fields: dict[str, Any] = json.loads(metadata[_REPORT])
        for name in ("failed", "skipped"):
            fields[name] = tuple((sample_id, reason) for sample_id, reason in fields[name])
        return ShardReport(**fields)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"{path} is not a finished shard of rollouts ({type(error).__name__})") from error


def read_rollouts(directory: Path) -> pa.Table:
    """All rows of the finished shards in a directory, in order. ArtifactError if there are none."""
    paths = sorted(directory.glob("shard-*.parquet"))
    if not paths:
        raise ArtifactError(f"{directory} holds no rollouts: run jobs.rollout first")
    try:
        return pa.concat_tables([pq.read_table(path, schema=SCHEMA).replace_schema_metadata() for path in paths])
    except (pa.ArrowException, OSError) as error:
        raise ArtifactError(f"{directory}: unreadable rollouts ({str(error).splitlines()[0]})") from error
