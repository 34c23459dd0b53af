"""Every setting of tierspec: one pydantic class per group, one description per field.

A preset (YAML) holds only what differs from the defaults below. `load_settings` reads it, applies dotted overrides such
as `training.depth=5`, and answers every mistake with a `SettingError` of one line that names the setting.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, model_validator

from tierspec.errors import SettingError
from tierspec.settings.ablation import AblationSettings
from tierspec.settings.calibration import CalibrationSettings
from tierspec.settings.decoding import DecodingSettings, DraftSettings, SuffixSettings
from tierspec.settings.file import Tree, apply_override, read_yaml, validate
from tierspec.settings.group import Count, CountOrZero, Cpus, Gpus, Group, NodeResource, Threads
from tierspec.settings.payoff import PayoffSettings
from tierspec.settings.training import OBJECTIVES, DrafterSettings, ObjectiveSettings, TrainingSettings
from tierspec.settings.verification import VerificationSettings

__all__ = [
    "OBJECTIVES",
    "AblationSettings",
    "CalibrationSettings",
    "DecodingSettings",
    "DraftSettings",
    "DrafterSettings",
    "ObjectiveSettings",
    "PayoffSettings",
    "Settings",
    "SuffixSettings",
    "TrainingSettings",
    "VerificationSettings",
    "load_settings",
]


class RunSettings(Group):
    name: str = Field(
        "smollm2-135m",
        max_length=100,
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
        ("builtin:train",),
        description="prompt sets to roll out: builtin:train, JSONL or Parquet files, hub:owner/name[:split]",
    )
    weights: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(
        (), description="wanted shares of the sets in train, in their order; empty: all prompts of all"
    )
    heldout: tuple[str, ...] = Field(
        ("builtin:heldout",),
        min_length=1,
        description="prompt sets that never train: builtin:heldout, builtin:new_kinds (other kinds of prompts), files; "
        "with structure to copy: builtin:edits, edits_in_turns, function_calls, function_calls_in_turns, human_eval",
    )
    self_written: CountOrZero = Field(0, description="user turns the target writes itself, added to the training set")
    follow_ups: CountOrZero = Field(
        0, description="user turns the target writes and answers after the last turn of each training prompt"
    )
    limit: CountOrZero = Field(0, description="use at most this many training prompts; 0 takes all")

    @model_validator(mode="after")
    def _weights_belong_to_sets(self) -> Self:
        if self.weights and (len(self.weights) != len(self.train) or not sum(self.weights)):
            raise ValueError(
                f"prompts.weights is {list(self.weights)}: one is needed for each of the {len(self.train)} sets in "
                "prompts.train, and one above 0"
            )
        return self


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


Method = Literal[
    "autoregressive",
    "suffix",
    "neural",
    "auto",
    "hybrid_match",
    "hybrid_score",
    "hybrid_first",
    "hvd_fixed",
    "hvd_cost",
    "oracle",
    "transformers",
    "transformers_prompt_lookup",
]


class EvaluationSettings(Group):
    max_new_tokens: Count = Field(128, description="longest answer in tokens")
    prompts: CountOrZero = Field(0, description="prompts per held-out set; 0 takes all")
    repeats: Count = Field(3, description="timed runs per prompt and method; the median counts")
    turn: Literal["first", "last"] = Field(
        "first", description="turn of a conversation that is asked; before the last the target answers the others"
    )
    methods: tuple[Method, ...] = Field(
        ("autoregressive", "suffix", "neural", "auto", "transformers", "transformers_prompt_lookup"),
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
    max_body_kb: Count = Field(2048, description="longest request body in kB; longer ones are answered 413")
    api_key_env: str = Field("", description="environment variable with the API key; empty asks for none")
    drafter: str | None = Field(
        "auto", description="folder of the neural drafter; auto: the run's own where it exists; null: no neural drafter"
    )
    payoff: str | None = Field(
        "auto",
        description="folder of the payoff predictor, for the routers fixed and cost; auto: the run's own where it "
        "exists; null: none",
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
    ablation: AblationSettings = Field(AblationSettings(), description="ways to train, compared")
    payoff: PayoffSettings = Field(PayoffSettings(), description="training of the payoff predictor")
    draft: DraftSettings = Field(DraftSettings(), description="drafting while decoding")
    verification: VerificationSettings = Field(VerificationSettings(), description="how drafts are verified")
    decoding: DecodingSettings = Field(DecodingSettings(), description="continuous batching")
    evaluation: EvaluationSettings = Field(EvaluationSettings(), description="measuring")
    calibration: CalibrationSettings = Field(CalibrationSettings(), description="settings of the drafter, compared")
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
    _expand_objective(tree)
    for override in overrides:
        apply_override(tree, override)
        _expand_objective(tree)
    return validate(Settings, tree)


def _expand_objective(tree: Tree) -> None:
    """Puts the settings of a named objective in place of its name, so that later overrides can refine it."""
    training = tree.get("training")
    if isinstance(training, dict) and isinstance(name := training.get("objective"), str):
        if name not in OBJECTIVES:
            known = ", ".join(OBJECTIVES)
            raise SettingError(
                f"setting 'training.objective' is {name!r}: expected a group of settings or one of {known}"
            )
        training["objective"] = dict(OBJECTIVES[name])
