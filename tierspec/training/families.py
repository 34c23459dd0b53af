"""From the name of a drafter family to what is trained."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path

from torch import Tensor

from tierspec.config import Settings
from tierspec.drafters.eagle3 import FAMILY as EAGLE3
from tierspec.drafters.eagle3 import DraftVocabulary, Eagle3Config, embedding_sha256, read_eagle3
from tierspec.errors import SettingError
from tierspec.models import Target
from tierspec.training.data import Sample, token_counts
from tierspec.training.eagle3 import Eagle3Trainee
from tierspec.training.trainee import Trainee


def build_trainee(settings: Settings, target: Target, samples: Sequence[Sample]) -> tuple[Trainee, float]:
    """A fresh drafter of `drafter.family` for the target, and the share of the supervised tokens of `samples` that its
    vocabulary covers.

    Raises:
        SettingError: the settings do not fit the target, or not the drafter of `training.warm_start`.
    """
    counts = token_counts(samples, target.config.vocab_size)
    trainee = _BUILDERS[settings.drafter.family](settings, target, counts)
    return trainee, trainee.vocabulary.coverage(counts)


def _eagle3(settings: Settings, target: Target, counts: Tensor) -> Trainee:
    training, decoder = settings.training, target.decoder
    config = Eagle3Config.for_target(
        decoder.config,
        feature_layers=settings.drafter.feature_layers,
        draft_vocab_size=settings.drafter.draft_vocab_size,
        max_draft_tokens=training.depth,
        source=target.source,
        embedding_sha256=embedding_sha256(decoder.embedding),
    )
    vocabulary = DraftVocabulary.most_frequent(counts, config.draft_vocab_size)
    start = None
    if training.warm_start:
        start = read_eagle3(Path(training.warm_start).expanduser())
        _refuse_other_shape(start[0], config)
        vocabulary = start[2]
    knows_target = start is not None or training.initialize_from_target
    trainee = Eagle3Trainee(
        config,
        vocabulary,
        decoder,
        training.objective,
        depth=training.depth,
        precision=training.precision,
        seed=settings.run.seed,
        lm_head_rate=training.lm_head_rate if knows_target else 1.0,
    )
    if start is not None:
        trainee.drafter.load_state_dict(start[1])
        if start[3]:
            trainee.verification_head.load_state_dict(start[3])
    elif training.initialize_from_target:
        trainee.initialize_from_target(decoder)
    return trainee


def _refuse_other_shape(found: Eagle3Config, wanted: Eagle3Config) -> None:
    """Only the depth may differ, and where the target came from."""
    found = replace(found, max_draft_tokens=wanted.max_draft_tokens, target=wanted.target)
    if found != wanted:
        name = next(f.name for f in fields(wanted) if getattr(found, f.name) != getattr(wanted, f.name))
        raise SettingError(
            f"training.warm_start: the drafter there has {name} {getattr(found, name)!r}, "
            f"but these settings ask for {getattr(wanted, name)!r}"
        )


_BUILDERS: dict[str, Callable[[Settings, Target, Tensor], Trainee]] = {EAGLE3: _eagle3}
