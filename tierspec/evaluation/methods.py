"""Decoding methods as one shape, so that they can be timed side by side: prompt ids in, tokens and seconds out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tierspec.config import DraftSettings
from tierspec.decoding import DecodingStats, DraftOptions, DraftSources, LocalCell, SamplingParams
from tierspec.drafters import Drafter
from tierspec.drafters.payoff import PayoffPredictor, true_payoff
from tierspec.drafters.routing import LEARNED, Candidate
from tierspec.errors import SettingError
from tierspec.models import PAGE_TOKENS, Target
from tierspec.sampling import RowSampling

PROMPT_LOOKUP_TOKENS = 10
OURS: dict[str, dict[str, str]] = {
    "autoregressive": {"source": "none"},
    "suffix": {"source": "suffix"},
    "neural": {"source": "neural"},
    "auto": {"source": "auto"},
    "hybrid_match": {"source": "auto", "router": "match"},
    "hybrid_score": {"source": "auto", "router": "score"},
    "hybrid_first": {"source": "auto", "router": "first"},
    "hvd_fixed": {"source": "auto", "router": "fixed"},
    "hvd_cost": {"source": "auto", "router": "cost"},
    "oracle": {"source": "auto", "router": "cost"},
}
"""Our methods, by what they change of the settings of drafting."""
NEURAL = frozenset(OURS) - {"autoregressive", "suffix"}
PAYOFF = frozenset({"hvd_fixed", "hvd_cost"})


@dataclass(frozen=True)
class Answer:
    """One answer. `seconds` is wall clock of the whole call, the prompt's prefill included. `stats` is None for a
    runtime that is not ours. An end-of-sequence token is not part of `token_ids`."""

    token_ids: list[int]
    seconds: float
    stats: DecodingStats | None = None


@dataclass(frozen=True)
class Method:
    """A name and what it does with prompt ids."""

    name: str
    run: Callable[[Sequence[int], SamplingParams], Answer]


def build_methods(
    names: Sequence[str],
    target: Target,
    drafter: Drafter | None,
    draft: DraftSettings,
    *,
    max_tokens: int,
    payoff: PayoffPredictor | None = None,
) -> list[Method]:
    """The named methods over one target, for sequences of up to `max_tokens` tokens, prompt included.

    transformers' model is loaded when it is first used, once for all methods. `neural` is reported by the family of
    the drafter, `auto` as suffix_or_neural. `oracle` is hvd_cost with the true payoff of every suffix draft in place of
    the predicted one; it looks the answer up before its time is taken.

    Raises:
        SettingError: an unknown method, or one that needs a neural drafter or a payoff predictor where there is none.
    """
    reference = ReferenceModel(target)
    methods = []
    for name in names:
        if name in NEURAL and drafter is None:
            raise SettingError(f"evaluation.methods: {name} needs a trained drafter, and there is none")
        if needs_payoff(name, draft) and payoff is None:
            raise SettingError(f"evaluation.methods: {name} needs a payoff predictor, and there is none")
        if name in OURS:
            kind = _OracleRun if name == "oracle" else _Run
            chosen = draft.model_copy(update=OURS[name])
            reported = {"auto": "suffix_or_neural", "neural": drafter.family if drafter else name}
            run = kind(target, drafter if name in NEURAL else None, chosen, max_tokens, payoff)
            methods.append(Method(reported.get(name, name), run))
        elif name == "transformers":
            methods.append(Method(name, reference.generate))
        elif name == "transformers_prompt_lookup":
            methods.append(Method(name, reference.generate_with_prompt_lookup))
        else:
            raise SettingError(f"evaluation.methods: unknown method {name!r}")
    return methods


def needs_payoff(name: str, draft: DraftSettings) -> bool:
    """Whether the method asks a payoff predictor."""
    return name in PAYOFF or (name == "auto" and draft.router in LEARNED)


class _Run:
    """A cell of our own runtime with one way to draft."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        draft: DraftSettings,
        max_tokens: int,
        payoff: PayoffPredictor | None,
    ) -> None:
        self._options = DraftOptions.from_settings(draft)
        self._sources = DraftSources.from_settings(draft, payoff)
        budget = max_tokens + self._options.max_tokens + self._options.suffix.max_tokens + PAGE_TOKENS
        self._cell = LocalCell(target, drafter=drafter, sources=self._sources, max_running=1, token_budget=budget)

    def __call__(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Answer:
        start = time.perf_counter()
        (answer,) = self._cell.generate([prompt_ids], sampling, draft=self._options)
        return Answer(answer.token_ids, time.perf_counter() - start, answer.stats)


class _OracleRun(_Run):
    """The same, told beforehand what will be written."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._truth: list[int] = []
        self._known: tuple[Any, ...] = ()
        self._sources.payoff = self

    def __call__(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Answer:
        if (key := (tuple(prompt_ids), sampling)) != self._known:
            (plain,) = self._cell.generate([prompt_ids], sampling, draft=DraftOptions("none"))
            self._truth, self._known = [*prompt_ids, *plain.token_ids], key
        return super().__call__(prompt_ids, sampling)

    def estimate(self, candidates: Sequence[Candidate]) -> Sequence[float]:
        """The true payoffs."""
        return [true_payoff(c.proposal.tokens, self._truth[len(c.token_ids) :]) for c in candidates]


class ReferenceModel:
    """transformers' own model of the same target: same files, dtype and device, its default attention."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM  # takes seconds to import
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        decoder = self._target.decoder
        model: Any = AutoModelForCausalLM.from_pretrained(self._target.path, dtype=decoder.dtype, local_files_only=True)
        return model.to(decoder.device).eval()

    def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Answer:
        """Plain `generate`."""
        start = time.perf_counter()
        (ids,) = self.generate_batch([prompt_ids], sampling)
        return Answer(ids, time.perf_counter() - start)

    def generate_with_prompt_lookup(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Answer:
        """`generate` with drafts copied from the prompt and the output (prompt-lookup decoding)."""
        start = time.perf_counter()
        (ids,) = self.generate_batch([prompt_ids], sampling, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
        return Answer(ids, time.perf_counter() - start)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: Any
    ) -> list[list[int]]:
        """Output ids of one call over left-padded prompts, each cut before its end of sequence."""
        model, row, ends = self.model, sampling.row(), self._target.eos_ids
        longest = max(len(prompt) for prompt in prompts)
        padding = ends[0] if ends else 0
        padded = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        # An id that no row can choose: `None` would fall back to the model's own end of sequence.
        never = [self._target.config.vocab_size]
        options |= _sampling_options(row) | {
            "max_new_tokens": sampling.max_new_tokens,
            "eos_token_id": never if sampling.ignore_eos or not ends else list(ends),
            "pad_token_id": padding,
        }
        if not row.greedy:
            torch.manual_seed(row.seed)
        with torch.inference_mode():
            outputs = model.generate(
                torch.tensor(padded, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                **options,
            )
        rows = outputs[:, longest:].tolist()
        return rows if sampling.ignore_eos else [_before_end(ids, ends) for ids in rows]


def _sampling_options(row: RowSampling) -> dict[str, Any]:
    if row.greedy:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": row.temperature, "top_p": row.top_p, "top_k": row.top_k}


def _before_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    return next((ids[:position] for position, token in enumerate(ids) if token in ends), ids)
