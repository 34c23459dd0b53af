"""Every setting of tierspec: one pydantic class per group, one description per field.

A preset (YAML) holds only what differs from the defaults below. `load_settings` reads it, applies dotted overrides such
as `training.depth=5`, and answers every mistake with a `SettingError` of one line that names the setting.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tierspec.settings_file import Tree, apply_override, read_yaml, validate

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Threads = Annotated[int, Field(ge=0, description="torch threads; 0: an equal share of the usable cores")]
Cpus = Annotated[float, Field(ge=0.0, description="logical CPUs that Ray sets aside for this process")]
Gpus = Annotated[float, Field(ge=0.0, description="GPUs that Ray sets aside for this process, on cuda")]

NodeResource = Annotated[
    str, Field(description="custom resource (one unit) that marks the nodes for this process, as in ray_cluster.yaml")
]


class Group(BaseModel):
    """Base of every group: unknown names refused, values immutable, no NaN, no bool where a number is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError("expected a number")
        return value


class RunSettings(Group):
    name: str = Field(
        "smollm2-135m",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="folder of this run: letters, digits, '.', '_' and '-'; the first a letter or digit",
    )
    root: str = Field("runs", min_length=1, description="folder that holds all runs")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of everything random in the run")


class TargetSettings(Group):
    source: str = Field(
        "embedded:smollm2-135m",
        min_length=1,
        description="Hugging Face id, local directory, embedded:smollm2-135m or embedded:tiny",
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype of the target's weights")
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    numerics: Literal["auto", "invariant", "fast"] = Field(
        "auto",
        description="invariant: a row's logits do not depend, bitwise, on what else shares the call; "
        "auto: invariant where it can be had (CPU), else fast",
    )
    threads: Threads = 0
    max_context: CountOrZero = Field(0, description="longest sequence in tokens; 0 takes the model's own limit")


class PromptSettings(Group):
    train: tuple[str, ...] = Field(
        ("builtin:train",), description="prompt sets to roll out: builtin:train, JSONL or Parquet files"
    )
    heldout: tuple[str, ...] = Field(
        ("builtin:heldout",),
        min_length=1,
        description="prompt sets that never train: builtin:heldout, builtin:new_kinds (other kinds of prompts), files",
    )
    self_written: CountOrZero = Field(0, description="user turns the target writes itself, added to the training set")
    limit: CountOrZero = Field(0, description="use at most this many training prompts; 0 takes all")


class RolloutSettings(Group):
    max_new_tokens: Count = Field(256, description="longest answer in tokens")
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus mass")
    top_k: CountOrZero = Field(0, description="keep the k most likely tokens; 0 keeps all")
    slots: Count = Field(64, description="sequences decoded at once per worker")
    shard_size: Count = Field(64, description="prompts per Parquet shard, the unit of resuming")
    token_budget: CountOrZero = Field(0, description="stop after this many response tokens; 0 answers every prompt")
    heldout_prompts: CountOrZero = Field(
        0, description="held-out prompts to answer, spread evenly over them; 0 answers all"
    )
    workers: Count = Field(1, description="rollout actors")
    threads: Threads = 0
    overwrite: bool = Field(
        False, description="make rollouts anew if those in the run folder come from other settings, not refuse"
    )


class DrafterSettings(Group):
    family: Literal["eagle3"] = Field("eagle3", description="architecture of the neural drafter")
    feature_layers: tuple[int, ...] = Field(
        (), description="target layers the drafter sees (index into Hugging Face hidden_states); empty: three by depth"
    )
    draft_vocab_size: Count = Field(8192, description="most frequent target tokens the drafter can propose")


class ObjectiveSettings(Group):
    """The verification-aware objective; the defaults are the paper's (arXiv 2608.30135, section 4.4)."""

    soft: bool = Field(True, description="cross-entropy against the target's distribution")
    hard: bool = Field(True, description="cross-entropy against the target's token")
    weighting: Literal["adaptive", "geometric", "uniform"] = Field(
        "adaptive", description="position weights: decay from the first rejection, from position 1, or none"
    )
    decay: float = Field(0.8, gt=0.0, le=1.0, description="base of the position weights")
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
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="learning rate after the warm-up")
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
    feature_cache_mb: CountOrZero = Field(
        1024, description="memory per worker for target features kept from one epoch to the next"
    )
    max_failures: CountOrZero = Field(0, description="restarts of the worker group from the last checkpoint")
    node: NodeResource = ""
    overwrite: bool = Field(
        False, description="train anew if the state in the run folder comes from other settings, not refuse"
    )
    objective: ObjectiveSettings = Field(ObjectiveSettings(), description="loss of the drafter")


class SuffixSettings(Group):
    """Suffix cache draft, chain mode (SuffixDecoding, arXiv 2411.04975)."""

    max_depth: Count = Field(64, description="longest context matched, in tokens")
    min_probability: Fraction = Field(0.1, description="a draft ends where its probability falls below this")
    factor: float = Field(1.0, ge=0.0, description="draft tokens per matched token")
    offset: float = Field(0.0, description="draft tokens on top of factor times the matched length")
    max_tokens: Count = Field(10, description="longest suffix draft in tokens")


class DraftSettings(Group):
    source: Literal["auto", "suffix", "neural", "none"] = Field(
        "auto", description="auto: the suffix cache where its match is long enough, else the neural drafter"
    )
    max_tokens: Count = Field(3, description="tokens the neural drafter proposes per round")
    match_length: Count = Field(4, description="shortest suffix match that auto prefers to the neural drafter")
    suffix: SuffixSettings = Field(SuffixSettings(), description="suffix cache")

    @model_validator(mode="after")
    def _match_is_reachable(self) -> Self:
        if self.match_length > self.suffix.max_depth:
            raise ValueError(
                f"draft.match_length is {self.match_length}, but no match is longer than draft.suffix.max_depth "
                f"({self.suffix.max_depth}): lower the first or raise the second"
            )
        return self


class DecodingSettings(Group):
    max_running: Count = Field(64, description="sequences decoded at once")
    token_budget: int = Field(32768, ge=128, description="tokens the KV cache holds over all sequences")
    prefill_tokens: int = Field(512, ge=2, description="prompt rows forwarded per tick")
    groups: int = Field(1, ge=1, le=2, description="2: draft for one half while the other half is verified")

    @model_validator(mode="after")
    def _every_sequence_fits(self) -> Self:
        if self.token_budget < 64 * self.max_running:
            raise ValueError(
                f"decoding.token_budget is {self.token_budget}, less than a page of 64 tokens for each of "
                f"decoding.max_running = {self.max_running} sequences: raise it to {64 * self.max_running} or more"
            )
        return self


Method = Literal["autoregressive", "suffix", "eagle3", "auto", "transformers", "transformers_prompt_lookup"]


class EvaluationSettings(Group):
    max_new_tokens: Count = Field(128, description="longest answer in tokens")
    prompts: CountOrZero = Field(0, description="prompts per held-out set; 0 takes all")
    repeats: Count = Field(3, description="timed runs per prompt and method; the median counts")
    methods: tuple[Method, ...] = Field(
        ("autoregressive", "suffix", "eagle3", "auto", "transformers", "transformers_prompt_lookup"),
        description="methods measured side by side",
    )
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy")

    @model_validator(mode="after")
    def _baseline_is_measured(self) -> Self:
        if "autoregressive" not in self.methods:
            raise ValueError(
                "evaluation.methods lacks 'autoregressive', against which every speed-up is measured: add it"
            )
        return self


class ServeSettings(Group):
    host: str = Field("127.0.0.1", min_length=1, description="address the endpoint listens on")
    port: int = Field(8000, ge=1, le=65535, description="port of the endpoint")
    placement: Literal["colocated", "separate"] = Field(
        "colocated", description="tiers in the cell's process, or one actor each"
    )
    replicas: Count = Field(1, description="cells")
    max_queue: Count = Field(256, description="waiting requests per cell; more are answered 429")
    api_key_env: str = Field("", description="environment variable with the API key; empty asks for none")
    drafter: str | None = Field(
        "auto", description="folder of the neural drafter; auto: the run's own where it exists; null: no neural drafter"
    )
    request_timeout_s: float = Field(600.0, gt=0.0, description="longest life of a request in seconds")
    tier_timeout_s: float = Field(120.0, gt=0.0, description="a tier that has not answered a message by then is lost")
    start_timeout_s: float = Field(600.0, gt=0.0, description="longest start of a tier: weights loaded, first answer")
    drain_s: float = Field(60.0, ge=0.0, description="time that running requests get when the endpoint stops")
    drafter_threads: Threads = 0
    verifier_threads: Threads = 0
    drafter_cpus: Cpus = 0.25
    verifier_cpus: Cpus = 0.5
    cell_cpus: Cpus = 0.25
    ingress_cpus: Cpus = 0.25
    drafter_gpus: Gpus = 1.0
    verifier_gpus: Gpus = 1.0
    drafter_node: NodeResource = ""
    verifier_node: NodeResource = ""


class RaySettings(Group):
    address: str = Field("", description="cluster to join: 'auto' or host:port; empty starts a local Ray")
    num_cpus: Count = Field(4, description="logical CPUs of a local Ray; keep one more than the workers reserve")
    object_store_mb: int = Field(200, ge=80, description="object store of a local Ray in MB")
    temp_dir: str = Field("", description="folder for a local Ray's sessions; empty takes Ray's default")
    namespace: str = Field("tierspec", min_length=1, description="Ray namespace of named actors")


class Settings(Group):
    """All settings of a run."""

    run: RunSettings = Field(RunSettings(), description="name and place of the run")
    target: TargetSettings = Field(TargetSettings(), description="the model to speed up")
    prompts: PromptSettings = Field(PromptSettings(), description="where prompts come from")
    rollout: RolloutSettings = Field(RolloutSettings(), description="the target's answers")
    drafter: DrafterSettings = Field(DrafterSettings(), description="the neural drafter")
    training: TrainingSettings = Field(TrainingSettings(), description="drafter training")
    draft: DraftSettings = Field(DraftSettings(), description="drafting while decoding")
    decoding: DecodingSettings = Field(DecodingSettings(), description="continuous batching")
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="measuring")
    serve: ServeSettings = Field(ServeSettings(), description="the endpoint")
    ray: RaySettings = Field(RaySettings(), description="the Ray cluster")

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        if not self.prompts.train and not self.prompts.self_written:
            raise ValueError(
                "prompts.train is empty and prompts.self_written is 0, so there is nothing to roll out: "
                "name a prompt set (builtin:train) or raise prompts.self_written"
            )
        limit = self.target.max_context
        for name, value in (
            ("rollout.max_new_tokens", self.rollout.max_new_tokens + 1),
            ("evaluation.max_new_tokens", self.evaluation.max_new_tokens + 1),
            ("training.max_length", self.training.max_length),
        ):
            if limit and value > limit:
                raise ValueError(f"{name} does not fit target.max_context = {limit}: lower it or raise the context")
        return self

    def to_yaml(self) -> str:
        """All settings as YAML that `load_settings` reads back."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)

    def override(self, *overrides: str) -> "Settings":
        """A validated copy with each `group.key=value` applied; errors as in `load_settings`."""
        return _build(self.model_dump(mode="json"), overrides)


def load_settings(path: str | Path | None, overrides: Iterable[str] = ()) -> Settings:
    """Settings from a YAML preset (None: the defaults) and `group.key=value` overrides, in order.

    Raises SettingError, one line: unreadable file, malformed YAML (file and line), unknown setting (with the nearest
    known name), a value of the wrong type or out of range, settings that contradict each other (with the fix).
    """
    return _build(read_yaml(path) if path is not None else {}, overrides)


def _build(tree: Tree, overrides: Iterable[str]) -> Settings:
    for override in overrides:
        apply_override(tree, override)
    return validate(Settings, tree)
