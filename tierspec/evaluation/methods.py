"""Decoding methods as one shape, so that they can be timed side by side: prompt ids in, tokens and seconds out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tierspec.config import DraftSettings
from tierspec.decoding import DecodingStats, DraftOptions, LocalCell, SamplingParams
from tierspec.drafters import Drafter
from tierspec.errors import SettingError
from tierspec.models import PAGE_TOKENS, Target
from tierspec.sampling import RowSampling

PROMPT_LOOKUP_TOKENS = 10
DRAFT_SOURCES = {"autoregressive": "none", "suffix": "suffix", "neural": "neural", "auto": "auto"}
NEURAL = frozenset({"neural", "auto"})


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
    names: Sequence[str], target: Target, drafter: Drafter | None, draft: DraftSettings, *, max_tokens: int
) -> list[Method]:
    """The named methods over one target, for sequences of up to `max_tokens` tokens, prompt included.

    transformers' model is loaded when it is first used, once for all methods. `neural` is reported by the family of
    the drafter, `auto` as suffix_or_neural.

    Raises:
        SettingError: an unknown method, or one that needs a neural drafter where there is none.
    """
    reference = ReferenceModel(target)
    methods = []
    for name in names:
        if name in NEURAL and drafter is None:
            raise SettingError(f"evaluation.methods: {name} needs a trained drafter, and there is none")
        if name in DRAFT_SOURCES:
            methods.append(_ours(name, target, drafter if name in NEURAL else None, draft, max_tokens))
        elif name == "transformers":
            methods.append(Method(name, reference.generate))
        elif name == "transformers_prompt_lookup":
            methods.append(Method(name, reference.generate_with_prompt_lookup))
        else:
            raise SettingError(f"evaluation.methods: unknown method {name!r}")
    return methods


def _ours(name: str, target: Target, drafter: Drafter | None, draft: DraftSettings, max_tokens: int) -> Method:
    options = DraftOptions.from_settings(draft.model_copy(update={"source": DRAFT_SOURCES[name]}))
    budget = max_tokens + options.max_tokens + options.suffix.max_tokens + PAGE_TOKENS
    cell = LocalCell(target, drafter=drafter, max_running=1, token_budget=budget)

    def run(prompt_ids: Sequence[int], sampling: SamplingParams) -> Answer:
        start = time.perf_counter()
        (answer,) = cell.generate([prompt_ids], sampling, draft=options)
        return Answer(answer.token_ids, time.perf_counter() - start, answer.stats)

    reported = {"auto": "suffix_or_neural", "neural": drafter.family if drafter else name}
    return Method(reported.get(name, name), run)


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
