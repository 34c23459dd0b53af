"""Settings of the neural drafter and its training."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from tierspec.settings.group import Count, CountOrZero, Decay, Fraction, Group, NodeResource, Threads


class DrafterSettings(Group):
    family: Literal["eagle3", "dflash"] = Field("eagle3", description="architecture of the neural drafter")
    feature_layers: tuple[int, ...] = Field(
        (), description="target layers the drafter sees (index into Hugging Face hidden_states); empty: by depth"
    )
    layers: int = Field(5, ge=1, le=64, description="dflash: decoder layers of the drafter")
    mask_token_id: int = Field(
        -1,
        ge=-1,
        description="dflash: token whose embedding stands for one to be filled in; -1: the first embedding that the "
        "tokenizer does not use, else its padding or end token",
    )
    draft_vocab_size: Count = Field(8192, description="most frequent target tokens the drafter can propose")


OBJECTIVES: dict[str, dict[str, Any]] = {
    "vat": {},
    "eagle3": {"hard": False, "head": False, "weighting": "fixed"},
    "dflash": {"soft": False, "head": False, "weighting": "fixed", "schedule": "exponential"},
}


class ObjectiveSettings(Group):
    """The drafter's loss. The defaults are verification-aware training as published (arXiv 2608.30135, section 4.4);
    instead of a group, a name stands for a published objective: vat, eagle3 (arXiv 2503.01840) or dflash (2602.06036).
    """

    soft: bool = Field(True, description="cross-entropy against the target's distribution")
    hard: bool = Field(True, description="cross-entropy against the target's token")
    schedule: Literal["geometric", "exponential", "uniform"] = Field(
        "geometric", description="position weights: decay^(k-1), exp(-(k-1) / gamma), or all 1"
    )
    decay: float = Field(0.8, gt=0.0, le=1.0, description="base of the geometric schedule")
    gamma: float = Field(7.0, gt=0.0, description="length of the exponential schedule, in positions")
    weighting: Literal["adaptive", "fixed", "cutoff", "d-pace"] = Field(
        "adaptive",
        description="adaptive: the schedule begins at the first rejection; fixed: at position 1; cutoff: ends with the "
        "first rejection (arXiv 2607.01893); d-pace: the drafter's own confidence (arXiv 2605.18810), where the "
        "schedule only sets what the loss is divided by",
    )
    verification: Literal["greedy", "rejection", "keyed"] = Field(
        "greedy",
        description="acceptance rule of the simulated verification: likeliest tokens, speculative sampling "
        "(arXiv 2211.17192), or the noise with which the rollouts were sampled, as in serving",
    )
    head: bool = Field(True, description="train the verification head as well")
    head_beta: float = Field(1.0, ge=0.0, description="coefficient of the verification head's loss")
    state: float = Field(
        0.0,
        ge=0.0,
        description="coefficient of the relative squared error between the drafter's last states and the target's; "
        "helps when there are few rollouts (after arXiv 2401.15077)",
    )

    @model_validator(mode="after")
    def _something_trains(self) -> Self:
        if not (self.soft or self.hard):
            raise ValueError(
                "training.objective.soft and training.objective.hard are both false, so no token is "
                "learned: set one of them to true"
            )
        return self


class TrainingSettings(Group):
    depth: int = Field(5, ge=1, le=32, description="draft positions unrolled per anchor (K)")
    anchors: Count = Field(64, description="anchors sampled per sequence")
    learning_rate: float = Field(1e-3, gt=0.0, description="peak learning rate of AdamW")
    lm_head_rate: Fraction = Field(
        0.1, description="learning rate of a token head that starts from the target's, as a share of the others'"
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW betas")
    weight_decay: float = Field(0.0, ge=0.0, description="AdamW weight decay")
    warmup_ratio: Fraction = Field(0.04, description="share of the steps with a rising learning rate")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="learning rate after the warm-up; wsd: constant, then falling to 0 (arXiv 2404.06395)"
    )
    decay_ratio: Fraction = Field(0.2, description="share of the steps with a falling learning rate, for wsd")
    epochs: Count = Field(1, description="passes over the rollouts")
    max_steps: CountOrZero = Field(0, description="stop after this many optimizer steps; 0 runs all epochs")
    max_minutes: float = Field(0.0, ge=0.0, description="stop after this many minutes; 0 sets no limit")
    batch_sequences: Count = Field(4, description="sequences per forward and worker")
    accumulation: Count = Field(1, description="forwards per optimizer step")
    max_length: int = Field(512, ge=2, description="longest training sequence (prompt and response) in tokens")
    gradient_clip: float = Field(0.5, gt=0.0, description="gradient norm limit")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="matrix products; the master weights are fp32")
    zero_stage: int = Field(1, ge=0, le=3, description="DeepSpeed ZeRO stage of the drafter")
    workers: Count = Field(1, description="training workers")
    threads: Threads = 0
    checkpoint_every: CountOrZero = Field(200, description="steps between checkpoints; 0 saves at the end only")
    keep_last: Count = Field(2, description="checkpoints kept")
    evaluate_every: CountOrZero = Field(
        0, description="steps between held-out accept lengths, besides those at checkpoints and at the end; 0: none"
    )
    heldout_prompts: CountOrZero = Field(8, description="held-out prompts per such evaluation")
    initialize_from_target: bool = Field(
        True, description="start the draft layer from the target's last layer and its head from the target's head"
    )
    warm_start: str = Field(
        "", description="folder of a drafter of the same shape to start from; empty: as initialize_from_target says"
    )
    features: Literal["inline", "cached", "streamed"] = Field(
        "inline",
        description="where the target's features come from: the training worker's own target, a folder that is filled "
        "before the first step, or a pool of actors that compute ahead of the steps",
    )
    feature_cache_mb: CountOrZero = Field(
        1024, description="inline: memory per worker for target features kept from one epoch to the next"
    )
    feature_disk_gb: float = Field(
        20.0, gt=0.0, description="cached: a larger folder is refused; raise this to have it made"
    )
    feature_workers: Count = Field(1, description="streamed: actors per training worker, one GPU each on cuda")
    feature_threads: Threads = 0
    feature_node: NodeResource = ""
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = Field(
        ("tensorboard",), description="where scalars go besides metrics.jsonl; the last two need their extras"
    )
    max_failures: CountOrZero = Field(0, description="restarts of the worker group from the last checkpoint")
    node: NodeResource = ""
    overwrite: bool = Field(
        False, description="train anew if the state in the run folder comes from other settings, not refuse"
    )
    objective: ObjectiveSettings = Field(ObjectiveSettings(), description="loss of the drafter")
