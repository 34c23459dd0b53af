"""Random drafters for a tiny random target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_models import write_random_llama
from tierspec.config import ObjectiveSettings
from tierspec.drafters import Drafter, DraftVocabulary, embedding_sha256
from tierspec.drafters.dflash import DFlashConfig
from tierspec.drafters.eagle3 import Eagle3Config
from tierspec.drafters.layers import initialize_normal
from tierspec.models import Decoder
from tierspec.training.dflash import DFlashTrainee
from tierspec.training.eagle3 import Eagle3Trainee
from tierspec.training.trainee import AnchorBatch, Trainee

DEPTH = 4
FAMILIES = ("eagle3", "dflash")


def tiny_decoder(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random four-layer target without a tokenizer."""
    write_random_llama(directory)
    return Decoder.from_directory(directory, dtype=dtype)


def random_trainee(
    decoder: Decoder,
    *,
    family: str = "eagle3",
    precision: str = "fp32",
    std: float = 0.2,
    counts: torch.Tensor | None = None,
) -> Any:
    """A trainee whose weights are large enough for its drafts to differ; 40 draft tokens by `counts`."""
    common: dict[str, Any] = {
        "feature_layers": (),
        "draft_vocab_size": 40,
        "max_draft_tokens": DEPTH,
        "source": "tiny",
        "embedding_sha256": embedding_sha256(decoder.embedding),
    }
    if counts is None:
        counts = torch.arange(decoder.config.vocab_size).flip(0) % 7
    vocabulary = DraftVocabulary.most_frequent(counts, 40)
    trainee: Trainee
    if family == "eagle3":
        config = Eagle3Config.for_target(decoder.config, **common)
        objective = ObjectiveSettings()
        trainee = Eagle3Trainee(config, vocabulary, decoder, objective, depth=DEPTH, precision=precision, seed=1)
    else:
        shape = DFlashConfig.for_target(decoder.config, num_layers=2, mask_token_id=1, **common)
        trainee = DFlashTrainee(shape, vocabulary, decoder, ObjectiveSettings(), precision=precision, seed=1)
    initialize_normal(trainee.drafter, torch.Generator().manual_seed(2), std)
    with torch.no_grad():
        for name, parameter in trainee.drafter.named_parameters():
            if parameter.dim() == 1 and "post_attention" not in name:
                parameter.mul_(torch.linspace(0.5, 1.5, parameter.numel()))
    return trainee


def drafter_of(trainee: Trainee, decoder: Decoder) -> Drafter:
    """The trainee's weights, packed for inference, its verification head too."""
    kind = type(trainee.pack(trainee.drafter.state_dict(), decoder))
    weights, head = trainee.drafter.state_dict(), trainee.verification_head.state_dict()
    return kind(trainee.drafter.config, weights, trainee.vocabulary, decoder, head)


def lone_anchor(captured: torch.Tensor, ids: Sequence[int] | torch.Tensor, row: int) -> Any:
    """A batch of one anchor with no more than what `unroll` reads: features of rows 0 .. `row` or more, and `ids`, the
    tokens behind each row."""
    padded = torch.cat((captured, torch.zeros(DEPTH, captured.shape[1])))
    tokens = torch.as_tensor(ids)
    nothing: Any = None
    return AnchorBatch(padded[None], tokens[None], torch.tensor([[row]]), nothing, nothing, nothing)
