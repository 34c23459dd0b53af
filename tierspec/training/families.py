"""From the name of a drafter family to what is trained."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from tierspec.config import Settings
from tierspec.drafters import DrafterCheckpoint, DraftVocabulary, embedding_sha256, read_drafter
from tierspec.drafters.config import DrafterConfig
from tierspec.drafters.dflash import FAMILY as DFLASH
from tierspec.drafters.dflash import DFlashConfig
from tierspec.drafters.eagle3 import FAMILY as EAGLE3
from tierspec.drafters.eagle3 import Eagle3Config
from tierspec.errors import ArtifactError, SettingError
from tierspec.models import ModelConfig, Target
from tierspec.paths import user_path
from tierspec.training.data import Sample, token_counts
from tierspec.training.dflash import DFlashTrainee
from tierspec.training.eagle3 import Eagle3Trainee
from tierspec.training.trainee import Trainee


def build_trainee(settings: Settings, target: Target, samples: Sequence[Sample]) -> tuple[Trainee, float]:
    """A fresh drafter of `drafter.family` for the target, and the share of the supervised tokens of `samples` that its
    vocabulary covers.

    Raises:
        SettingError: the settings do not fit the target, or not the drafter of `training.warm_start`.
    """
    training, decoder = settings.training, target.decoder
    counts = token_counts(samples, target.config.vocab_size)
    config = drafter_config(settings, target.config, target.tokenizer, embedding_sha256(decoder.embedding))
    start = _warm_start(training.warm_start, config) if training.warm_start else None
    vocabulary = start.vocabulary if start else DraftVocabulary.most_frequent(counts, config.draft_vocab_size)
    trainee = _TRAINEES[settings.drafter.family](config, vocabulary, target, settings)
    if start is not None:
        trainee.drafter.load_state_dict(start.weights)
        if start.verification_head:
            trainee.verification_head.load_state_dict(start.verification_head)
    elif training.initialize_from_target:
        trainee.initialize_from_target(decoder)
    return trainee, vocabulary.coverage(counts)


def drafter_config(settings: Settings, target: ModelConfig, tokenizer: Any, embedding_sha256: str) -> DrafterConfig:
    """The shape of the drafter that the settings ask for.

    Raises:
        SettingError: the settings do not fit the target.
    """
    common: dict[str, Any] = {
        "feature_layers": settings.drafter.feature_layers,
        "draft_vocab_size": settings.drafter.draft_vocab_size,
        "max_draft_tokens": settings.training.depth,
        "source": settings.target.source,
        "embedding_sha256": embedding_sha256,
    }
    if settings.drafter.family == EAGLE3:
        return Eagle3Config.for_target(target, **common)
    mask = settings.drafter.mask_token_id
    mask = _spare_token(tokenizer, target.vocab_size) if mask < 0 else mask
    return DFlashConfig.for_target(target, num_layers=settings.drafter.layers, mask_token_id=mask, **common)


def _spare_token(tokenizer: Any, vocab_size: int) -> int:
    """A token that answers do not hold."""
    if len(tokenizer) < vocab_size:
        return len(tokenizer)
    for token in (tokenizer.mask_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise SettingError("drafter.mask_token_id: the tokenizer has no spare token; name one")


def _eagle3(config: Eagle3Config, vocabulary: DraftVocabulary, target: Target, settings: Settings) -> Trainee:
    training = settings.training
    knows_target = training.warm_start or training.initialize_from_target
    return Eagle3Trainee(
        config,
        vocabulary,
        target.decoder,
        training.objective,
        depth=training.depth,
        precision=training.precision,
        seed=settings.run.seed,
        lm_head_rate=training.lm_head_rate if knows_target else 1.0,
    )


def _dflash(config: DFlashConfig, vocabulary: DraftVocabulary, target: Target, settings: Settings) -> Trainee:
    training = settings.training
    return DFlashTrainee(
        config,
        vocabulary,
        target.decoder,
        training.objective,
        precision=training.precision,
        seed=settings.run.seed,
    )


def _warm_start(path: str, wanted: DrafterConfig) -> DrafterCheckpoint:
    """The drafter to start from; only its depth may differ, and where its target came from."""
    try:
        start = read_drafter(user_path(path, "training.warm_start"))
    except ArtifactError as error:
        raise SettingError(f"training.warm_start: {error}") from error
    if start.config.family != wanted.family:
        raise SettingError(
            f"training.warm_start: the drafter there is of family {start.config.family}, not {wanted.family}"
        )
    found = replace(start.config, max_draft_tokens=wanted.max_draft_tokens, target=wanted.target)
    for field in fields(wanted):
        if getattr(found, field.name) != getattr(wanted, field.name):
            raise SettingError(
                f"training.warm_start: the drafter there has {field.name} {getattr(found, field.name)!r}, "
                f"but these settings ask for {getattr(wanted, field.name)!r}"
            )
    return start


_TRAINEES: dict[str, Callable[[Any, DraftVocabulary, Target, Settings], Trainee]] = {EAGLE3: _eagle3, DFLASH: _dflash}
