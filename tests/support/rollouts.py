"""Rollouts of the tiny target, written without the rollout pipeline."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tierspec.models import Step, Target
from tierspec.sampling import greedy_choice


def write_tiny_rollouts(directory: Path, target: Target, *, count: int, seed: int, tokens: int = 24) -> None:
    """Greedy answers of `tokens` tokens to random prompts of 8 tokens, as one shard."""
    decoder = target.decoder
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, decoder.config.vocab_size, (count, 8), generator=generator).tolist()
    cache = decoder.new_cache(64 * count)
    sequences, pending = [cache.sequence() for _ in prompts], prompts
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(tokens):
        steps = [Step(sequence, ids) for sequence, ids in zip(sequences, pending, strict=True)]
        hidden = decoder.forward(steps, cache)
        ends = torch.tensor([len(ids) for ids in pending]).cumsum(0) - 1
        pending = [[token] for token in greedy_choice(decoder.logits(hidden.last[ends])).tolist()]
        for answer, (token,) in zip(answers, pending, strict=True):
            answer.append(token)
    ids = pa.list_(pa.int32())
    table = pa.table(
        {
            "sample_id": [f"{directory.name}-{i}" for i in range(count)],
            "prompt_ids": pa.array(prompts, ids),
            "response_ids": pa.array(answers, ids),
            "temperature": [0.0] * count,
            "target": [target.source] * count,
            "template_hash": [target.template_hash] * count,
        }
    )
    directory.mkdir(parents=True)
    pq.write_table(table, directory / "shard-00000.parquet")
