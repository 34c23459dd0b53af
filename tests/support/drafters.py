"""A random drafter for a tiny random target."""

from pathlib import Path

import torch

from tests.support.tiny_models import write_random_llama
from tierspec.config import ObjectiveSettings
from tierspec.drafters.eagle3 import DraftVocabulary, Eagle3Config, Eagle3Drafter, embedding_sha256
from tierspec.models import Decoder
from tierspec.training.eagle3 import Eagle3Trainee

DEPTH = 4


def tiny_decoder(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """A random four-layer target without a tokenizer."""
    write_random_llama(directory)
    return Decoder.from_directory(directory, dtype=dtype)


def random_trainee(
    decoder: Decoder, *, precision: str = "fp32", std: float = 0.2, counts: torch.Tensor | None = None
) -> Eagle3Trainee:
    """A trainee whose weights are large enough for its drafts to differ; 40 draft tokens by `counts`."""
    config = Eagle3Config.for_target(
        decoder.config,
        feature_layers=(),
        draft_vocab_size=40,
        max_draft_tokens=DEPTH,
        source="tiny",
        embedding_sha256=embedding_sha256(decoder.embedding),
    )
    if counts is None:
        counts = torch.arange(decoder.config.vocab_size).flip(0) % 7
    vocabulary = DraftVocabulary.most_frequent(counts, config.draft_vocab_size)
    trainee = Eagle3Trainee(config, vocabulary, decoder, ObjectiveSettings(), depth=DEPTH, precision=precision, seed=1)
    trainee.drafter.initialize(torch.Generator().manual_seed(2), std)
    with torch.no_grad():
        for norm in (trainee.drafter.norm, trainee.drafter.layer.input_layernorm, trainee.drafter.layer.hidden_norm):
            norm.weight.mul_(torch.linspace(0.5, 1.5, config.hidden_size))
    return trainee


def drafter_of(trainee: Eagle3Trainee, decoder: Decoder) -> Eagle3Drafter:
    """The trainee's weights, packed for inference."""
    return Eagle3Drafter(trainee.drafter.config, trainee.drafter.state_dict(), trainee.vocabulary, decoder)
