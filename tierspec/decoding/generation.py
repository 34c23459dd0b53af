"""Decoding in this process: tiers, engine and driver put together, for one call or for many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from itertools import count

from tierspec.decoding.detokenizer import text_decoder
from tierspec.decoding.draft_sources import DraftSources
from tierspec.decoding.drafter_tier import DrafterTier
from tierspec.decoding.drivers import SynchronousDriver
from tierspec.decoding.engine import Engine
from tierspec.decoding.limits import DrafterInfo, EngineLimits
from tierspec.decoding.messages import Tier, TierName
from tierspec.decoding.sequence import DraftOptions, Sequence
from tierspec.decoding.stats import DecodingStats
from tierspec.decoding.verifier_tier import VerifierTier
from tierspec.drafters.protocol import Drafter
from tierspec.errors import SettingError
from tierspec.models import PAGE_TOKENS, Target
from tierspec.sampling import SamplingParams
from tierspec.verification import STRICT, VerificationPolicy

_GREEDY = SamplingParams()
_PREFILL_TOKENS = 512
_MAX_DRAFT_TOKENS = 64
_CELL_TOKENS = 1024  # room per running sequence in a cell that was told no budget

_Live = dict[str, tuple[int, Sequence]]  # sequence id -> index of its prompt, sequence


@dataclass(frozen=True)
class Generation:
    """One answer.

    An end-of-sequence token is not part of `token_ids`; `text` ends before a stop string, `token_ids` with it.
    `seed` is the request's own, or the one drawn for it: sent again with the same prompt and sampling it gives the same
    answer.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: DecodingStats
    seed: int


class LocalCell:
    """The tiers of a target in this process. They and their caches are kept from call to call. Not thread-safe."""

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None = None,
        sources: DraftSources | None = None,
        max_running: int = 64,
        token_budget: int | None = None,
        prefill_tokens: int = _PREFILL_TOKENS,
        max_context: int | None = None,
    ) -> None:
        """`max_running` sequences at once; `token_budget` tokens of KV cache, by default 1,024 per running sequence
        and one whole context at least; `prefill_tokens` rows per tick; `max_context` if less than the model's;
        `sources`: a payoff predictor or a cache of past outputs for the router.

        Raises SettingError if a size is out of range.
        """
        context = min(max_context or target.config.max_context, target.config.max_context)
        budget = max(max_running * min(context, _CELL_TOKENS), context) if token_budget is None else token_budget
        least = (("max_running", max_running, 1), ("prefill_tokens", prefill_tokens, 1), ("token_budget", budget, 1))
        for name, value, minimum in least:
            if value < minimum:
                raise SettingError(f"decoding.{name}: must be at least {minimum}, not {value}")
        self._decode = text_decoder(target.tokenizer)
        self._default_draft = DraftOptions(source="neural" if drafter else "none")
        self._engine = Engine(
            EngineLimits(
                max_running, budget, prefill_tokens, _MAX_DRAFT_TOKENS, context, vocab_size=target.config.vocab_size
            ),
            drafter=DrafterInfo.of(drafter) if drafter else None,
            sources=sources,
            decode=self._decode,
            eos_ids=target.eos_ids,
        )
        tiers: dict[TierName, Tier] = {
            "verifier": VerifierTier(
                target,
                token_budget=budget,
                projection=drafter.projection if drafter else None,
                feature_layers=drafter.feature_layers if drafter else (),
            )
        }
        if drafter is not None:
            tiers["drafter"] = DrafterTier(drafter, token_budget=budget)
        self._driver = SynchronousDriver(self._engine, tiers)
        self._live: _Live = {}  # the sequences of the present call
        self._ids = count()

    @property
    def stats(self) -> DecodingStats:
        """Of all that this cell has decoded; `verifier_calls` counts forwards."""
        return self._engine.stats

    def generate(
        self,
        prompts: Ids[Ids[int]],
        sampling: SamplingParams | Ids[SamplingParams] = _GREEDY,
        *,
        policy: VerificationPolicy = STRICT,
        draft: DraftOptions | None = None,
    ) -> list[Generation]:
        """One answer per prompt, in their order; see `generations`."""
        answers = dict(self.generations(prompts, sampling, policy=policy, draft=draft))
        return [answers[index] for index in range(len(prompts))]

    def generations(
        self,
        prompts: Ids[Ids[int]],
        sampling: SamplingParams | Ids[SamplingParams] = _GREEDY,
        *,
        policy: VerificationPolicy = STRICT,
        draft: DraftOptions | None = None,
    ) -> Iterator[tuple[int, Generation]]:
        """(index of the prompt, answer) as answers get ready. Closing the iterator, or the next call, ends the rest.

        `sampling`: for all prompts, or one per prompt; `draft`: by default the neural drafter if there is one, or none.

        Raises:
            SettingError: a field is out of range, or a prompt does not fit; nothing is decoded then.
        """
        per_prompt = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(per_prompt) != len(prompts):
            raise SettingError(f"sampling: {len(per_prompt)} for {len(prompts)} prompts")
        self._end(self._live)
        live: _Live = {}
        self._live = live
        for index, (prompt_ids, params) in enumerate(zip(prompts, per_prompt, strict=True)):
            params.validate()
            try:
                sequence = Sequence(
                    str(next(self._ids)), prompt_ids, params, draft or self._default_draft, policy, wants_text=False
                )
                self._engine.add(sequence)
            except SettingError as error:
                self._end(live)
                raise SettingError(f"prompts[{index}]: {str(error).removeprefix('prompt: ')}") from error
            live[sequence.id] = (index, sequence)
        return self._collect(live)

    def _collect(self, live: _Live) -> Iterator[tuple[int, Generation]]:
        texts: dict[str, str] = defaultdict(str)
        try:
            while live:
                for event in self._driver.step():
                    if event.text_delta:
                        texts[event.sequence_id] += event.text_delta
                    if event.finish_reason is not None and event.sequence_id in live:
                        index, sequence = live.pop(event.sequence_id)
                        yield index, self._answer(sequence, texts.pop(event.sequence_id, ""))
        finally:
            self._end(live)

    def _answer(self, sequence: Sequence, text: str) -> Generation:
        output, reason = sequence.output_ids, sequence.finish_reason or ""
        if not sequence.wants_text:
            text = self._decode(output)
        return Generation(output, text, reason, sequence.stats, sequence.row_sampling.seed)

    def _end(self, live: _Live) -> None:
        """Ends what a call has left, unless a later call has begun."""
        if live is self._live:
            for sequence_id in live:
                self._engine.abort(sequence_id)
            live.clear()
            for _ in self._driver.run():
                pass


def generate(
    target: Target,
    prompts: Ids[Ids[int]],
    *,
    drafter: Drafter | None = None,
    policy: VerificationPolicy = STRICT,
    sampling: SamplingParams | Ids[SamplingParams] = _GREEDY,
    slim: object | None = None,
    draft: DraftOptions | None = None,
    max_running: int = 64,
    token_budget: int | None = None,
) -> list[Generation]:
    """Decodes prompts (token ids), continuously batched, and returns one answer per prompt, in their order.

    `draft`: by default the neural drafter if one is given, else none. `token_budget` (tokens of KV cache): by default
    what `max_running` of the prompts can need at most. `slim` is for tiered policies, which the strict one is not.

    Raises:
        SettingError: a field is out of range or asks for what is not here, or a prompt does not fit the context.
    """
    if slim is not None:
        raise SettingError(f"slim: policy {policy.name!r} does not use a slim verifier")
    if not prompts:
        return []
    if token_budget is None:
        longest = max(s.max_new_tokens for s in ([sampling] if isinstance(sampling, SamplingParams) else sampling))
        most = sorted((min(len(ids) + longest, target.config.max_context) for ids in prompts), reverse=True)
        token_budget = sum(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS for tokens in most[:max_running])
    cell = LocalCell(target, drafter=drafter, max_running=max_running, token_budget=token_budget)
    return cell.generate(prompts, sampling, policy=policy, draft=draft)
