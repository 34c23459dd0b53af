"""Decoding methods as one shape, so that they can be timed side by side: prompt ids in, tokens and seconds out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tierspec.config import DraftSettings
from tierspec.decoding import DecodingStats, DraftOptions, SamplingParams, generate
from tierspec.drafters import Drafter
from tierspec.errors import SettingError
from tierspec.models import Target
from tierspec.sampling import RowSampling

PROMPT_LOOKUP_TOKENS = 10
OUR_SOURCES = {"autoregressive": "none", "suffix": "suffix", "eagle3": "neural", "auto": "auto"}
NEURAL = frozenset({"eagle3", "auto"})
REPORT_NAMES = {"auto": "suffix_or_neural"}


@dataclass(frozen=True)
class Generation:
    """One answer. `seconds` is wall clock of the whole call, the prompt's prefill included. `stats` is None for a
    runtime that is not ours. An end-of-sequence token is not part of `token_ids`."""

    token_ids: list[int]
    seconds: float
    stats: DecodingStats | None = None


@dataclass(frozen=True)
class Method:
    """A name and what it does with (prompt ids, sampling)."""

    name: str
    run: Callable[[Sequence[int], SamplingParams], Generation]
    details: dict[str, Any] = field(default_factory=dict)


def build_methods(names: Sequence[str], target: Target, drafter: Drafter | None, draft: DraftSettings) -> list[Method]:
    """The named methods over one target; transformers' model is loaded once, when first used.

    Raises:
        SettingError: a method needs a neural drafter and there is none.
    """
    reference = ReferenceModel(target)
    methods = []
    for name in names:
        if name in NEURAL and drafter is None:
            raise SettingError(f"evaluation.methods: {name} needs a trained drafter; run jobs.train first or leave it out")
        if name in OUR_SOURCES:
            methods.append(_ours(name, target, drafter if name in NEURAL else None, draft))
        elif name == "transformers":
            methods.append(Method(name, reference.generate))
        elif name == "transformers_prompt_lookup":
            methods.append(Method(name, reference.generate_with_prompt_lookup))
        else:
            raise SettingError(f"evaluation.methods: unknown method {name!r}")
    return methods


def _ours(name: str, target: Target, drafter: Drafter | None, draft: DraftSettings) -> Method:
    options = DraftOptions.from_settings(draft.model_copy(update={"source": OUR_SOURCES[name]}))

    def run(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        start = time.perf_counter()
        (answer,) = generate(target, [list(prompt_ids)], drafter=drafter, sampling=sampling, draft=options)
        _synchronize(target.decoder.device)
        return Generation(answer.token_ids, time.perf_counter() - start, answer.stats)

    return Method(REPORT_NAMES.get(name, name), run)


class ReferenceModel:
    """transformers' own model of the same target: same files, dtype and device, its default attention."""

    def __init__(self, target: Target) -> None:
        self._target = target

    @cached_property
    def model(self) -> Any:
        decoder = self._target.decoder
        model = AutoModelForCausalLM.from_pretrained(self._target.path, dtype=decoder.dtype, local_files_only=True)
        return model.to(decoder.device).eval()

    def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """Plain `generate`."""
        return self._timed(prompt_ids, sampling)

    def generate_with_prompt_lookup(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generation:
        """`generate` with drafts copied from the prompt and the output (prompt-lookup decoding)."""
        return self._timed(prompt_ids, sampling, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)

    def _timed(self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        model, row = self.model, sampling.row()
        input_ids = torch.tensor([list(prompt_ids)], device=model.device)
        options |= _sampling_options(row) | {"max_new_tokens": sampling.max_new_tokens}
        eos_ids = list(self._target.eos_ids)
        if eos_ids:
            options |= {"eos_token_id": eos_ids, "pad_token_id": eos_ids[0]}
        torch.manual_seed(row.seed % 2**63)
        start = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **options)
        ids = output[0, len(prompt_ids) :].tolist()
        seconds = time.perf_counter() - start
        return Generation(ids[:-1] if ids and ids[-1] in eos_ids else ids, seconds)


def _sampling_options(row: RowSampling) -> dict[str, Any]:
    if row.greedy:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": row.temperature, "top_p": row.top_p, "top_k": row.top_k}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
