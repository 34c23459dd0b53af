"""What a rollout asks for, and the identity that its answers depend on."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pipelines.prompts.prompt import Prompt
from pipelines.prompts.self_written import MAX_TURN_TOKENS
from tierspec.config import Settings
from tierspec.errors import ArtifactError
from tierspec.models.chat import template_hash
from tierspec.models.loading import load_tokenizer, resolve_source

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
_HASHED_BYTES = 2**20


@dataclass(frozen=True)
class RolloutJob:
    """How prompts are answered. `seed` is the run's; each answer has its own, `seed_of`.

    With `opens_user_turn` the prompts are only numbers: the target writes what a user might say. After the last turn of
    a prompt it writes `follow_ups` more, and answers them.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    opens_user_turn: bool = False
    follow_ups: int = 0

    def asks(self, prompts: Iterable[Prompt]) -> int:
        """How many answers `prompts` want."""
        return sum(len(prompt.turns) + self.follow_ups for prompt in prompts)


def answering_job(settings: Settings, split: Split) -> RolloutJob:
    """Training prompts are answered as `rollout` says, held-out prompts greedily."""
    rollout, seed = settings.rollout, settings.run.seed
    if split == "heldout":
        return RolloutJob(rollout.max_new_tokens, 0.0, 1.0, 0, seed)
    return RolloutJob(
        rollout.max_new_tokens,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        seed,
        follow_ups=settings.prompts.follow_ups,
    )


def writing_job(settings: Settings) -> RolloutJob:
    """Self-written user turns are sampled for variety, whatever the answers are; top-k keeps most of them sensible."""
    return RolloutJob(MAX_TURN_TOKENS, 1.0, 1.0, 64, settings.run.seed, opens_user_turn=True)


@dataclass(frozen=True)
class TargetCard:
    """What the driver must know of the target, without its weights."""

    source: str
    tokenizer: Any
    template_hash: str
    files_hash: str


def describe_target(source: str) -> TargetCard:
    """Fetch the target if need be. SettingError or ArtifactError as in `load_target`."""
    path = resolve_source(source)
    tokenizer = load_tokenizer(path)
    return TargetCard(source, tokenizer, template_hash(tokenizer), _files_hash(path))


def _files_hash(path: Path) -> str:
    """Name, size, beginning and end of the files that make the model; whole weights would take too long."""
    digest = hashlib.sha256()
    try:
        for file in sorted((*path.glob("*.safetensors"), path / "config.json")):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                digest.update(content.read(_HASHED_BYTES))
                content.seek(max(size - _HASHED_BYTES, 0))
                digest.update(content.read(_HASHED_BYTES))
    except OSError as error:
        raise ArtifactError(f"target.source: cannot read {error.filename} ({error.strerror})") from error
    return digest.hexdigest()


def identity(settings: Settings, job: RolloutJob, card: TargetCard) -> dict[str, Any]:
    """What the shards of a directory depend on beside the prompts, under the names of the settings that hold it.

    Slots, workers and threads are left out: an answer does not depend on them (but for ties, with fast numerics).
    """
    return {
        "target.source": settings.target.source,
        "target.source (its files)": card.files_hash,
        "target.source (its chat template)": card.template_hash,
        "target.dtype": settings.target.dtype,
        "target.device": settings.target.device.partition(":")[0],
        "target.numerics": settings.target.numerics,
        "target.max_context": settings.target.max_context,
        "run.seed": settings.run.seed,
        "rollout.shard_size": settings.rollout.shard_size,
        "prompts.follow_ups": job.follow_ups,
        **{f"rollout.{name}": value for name, value in asdict(job).items() if name not in ("seed", "follow_ups")},
    }


def split_identity(settings: Settings, split: Split, card: TargetCard) -> dict[str, Any]:
    """`identity` of the answers of a split, as far as it is known before prompts are read."""
    known = identity(settings, answering_job(settings, split), card)
    return known | ({"rollout.heldout_prompts": settings.rollout.heldout_prompts} if split == "heldout" else {})


def digest_of(prompts: Iterable[Prompt]) -> str:
    """A hash of prompts in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.to_json(), sort_keys=True).encode())
    return digest.hexdigest()


def seed_of(run_seed: int, sample_id: str) -> int:
    """The seed of one answer: 63 bits that depend on nothing but the run's seed and the sample."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{sample_id}".encode(), digest_size=8).digest(), "big") >> 1


def shuffled(prompts: Iterable[Prompt], run_seed: int) -> list[Prompt]:
    """Mixed kinds in an order that adding or removing other prompts does not change."""
    return sorted(prompts, key=lambda prompt: (seed_of(run_seed, prompt.sample_id), prompt.sample_id))


def turn_id(sample_id: str, turn: int) -> str:
    """The id of the answer to a prompt's turn, counted from 0."""
    return sample_id if turn == 0 else f"{sample_id}#{turn + 1}"


def in_shards(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
