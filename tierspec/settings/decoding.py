"""Settings of drafting and decoding."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tierspec.settings.group import Count, CountOrZero, Fraction, Group


class SuffixSettings(Group):
    """Suffix cache draft, chain mode (SuffixDecoding, arXiv 2411.04975)."""

    max_depth: int = Field(64, ge=1, le=4096, description="longest context matched, in tokens")
    min_probability: Fraction = Field(0.1, description="a draft ends where its probability falls below this")
    factor: float = Field(1.0, ge=0.0, le=1e6, description="draft tokens per matched token")
    offset: float = Field(0.0, ge=-1e6, le=1e6, description="draft tokens on top of factor times the matched length")
    max_tokens: int = Field(10, ge=1, le=1024, description="longest suffix draft in tokens")


class DraftSettings(Group):
    source: Literal["auto", "suffix", "neural", "none"] = Field(
        "auto", description="auto: the suffix cache or the neural drafter, as the router chooses"
    )
    router: Literal["match", "score", "first", "fixed", "cost"] = Field(
        "match",
        description="auto takes the suffix cache: match: where match_length tokens matched; score: where its score "
        "reaches min_score; first: wherever it has a draft; fixed: where the predicted payoff reaches min_payoff; "
        "cost: where that promises most tokens per second here",
    )
    max_tokens: int = Field(3, ge=1, le=64, description="tokens the neural drafter proposes per round")
    min_survival: Fraction = Field(
        0.0,
        description="the neural drafter stops before a token that its verification head gives a lower probability to "
        "survive; 0: never",
    )
    match_length: Count = Field(4, description="shortest suffix match that the router match takes")
    min_score: float = Field(3.0, ge=0.0, description="lowest score of a suffix draft that the router score takes")
    min_payoff: float = Field(6.0, ge=0.0, description="lowest predicted accepted length that the router fixed takes")
    shared_tokens: CountOrZero = Field(
        0, description="tokens of past outputs that suffix drafts may copy from, the oldest forgotten first; 0: none"
    )
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
