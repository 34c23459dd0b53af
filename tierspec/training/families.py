"""From the name of a drafter family to what is trained."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tierspec.config import Settings
from tierspec.drafters.eagle3 import FAMILY as EAGLE3
from tierspec.drafters.eagle3 import DraftVocabulary, Eagle3Config, embedding_sha256
from tierspec.models import Target
from tierspec.training.data import Sample, token_counts
from tierspec.training.eagle3 import Eagle3Trainee
from tierspec.training.trainee import Trainee


def build_trainee(settings: Settings, target: Target, samples: Sequence[Sample]) -> tuple[Trainee, float]:
    """A fresh drafter of `drafter.family` for the target, and the share of the supervised tokens of `samples` that its
    vocabulary covers.

    Raises:
        SettingError: the settings do not fit the target.
    """
    counts = token_counts(samples, target.config.vocab_size)
    trainee = _BUILDERS[settings.drafter.family](settings, target, counts)
    if settings.training.initialize_from_target:
        trainee.initialize_from_target(target.decoder)
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
    return Eagle3Trainee(
        config,
        DraftVocabulary.most_frequent(counts, config.draft_vocab_size),
        decoder,
        training.objective,
        depth=training.depth,
        precision=training.precision,
        seed=settings.run.seed,
        lm_head_rate=training.lm_head_rate if training.initialize_from_target else 1.0,
    )


_BUILDERS: dict[str, Callable[[Settings, Target, Tensor], Trainee]] = {EAGLE3: _eagle3}
