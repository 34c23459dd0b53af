"""Prometheus metrics: each cell counts, the ingress adds the cells up and prints the text.

The stems of the speculative counters are vLLM's, so dashboards carry over: mean accept length is
1 + num_accepted_tokens / num_drafts, the acceptance rate is num_accepted_tokens / num_draft_tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from tierspec.decoding import DecodingStats

ROUND_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CellMetrics:
    """The metrics of one cell, in a registry of its own. Every name starts with `tierspec_`."""

    def __init__(self) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._counted = DecodingStats()
        self.drafts = self._counter("spec_decode_num_drafts", "rounds in which a draft was verified")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "draft tokens verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "draft tokens accepted")
        self.accepted_per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "draft tokens accepted at each draft position", "position"
        )
        self.source_rounds = self._counter("draft_source_rounds", "rounds drafted by each source", "source")
        self.tier_seconds = self._histogram("tier_seconds", "work of one message at a tier", ROUND_SECONDS, "tier")
        self.tier_tokens = self._counter("tier_tokens", "token rows forwarded by each tier", "tier")
        self.tier_restarts = self._counter("tier_restarts", "times a lost tier was started again", "tier")
        self.tiers_given_up = self._counter("tiers_given_up", "tiers lost too often to be started again", "tier")
        self.channel_seconds = self._histogram(
            "channel_seconds", "round trip of one message less the tier's work", ROUND_SECONDS, "channel", "edge"
        )
        self.exceptions = self._counter(
            "verification_exceptions", "accepted draft tokens that were not the target's choice"
        )
        self.deviation_spent = Gauge("tierspec_deviation_spent", "nats charged for these", registry=self.registry)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "from arrival to the first committed token", WAIT_SECONDS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "time of a block divided by its tokens", ROUND_SECONDS
        )
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of admitted sequences")
        self.generation_tokens = self._counter("generation_tokens", "committed tokens")
        self.requests = self._counter("requests", "sequences ended, by how they ended", "finish_reason")
        self.rejected = self._counter("requests_rejected", "sequences answered 429")
        self.running = Gauge("tierspec_num_requests_running", "sequences being decoded", registry=self.registry)
        self.waiting = Gauge("tierspec_num_requests_waiting", "sequences in the queue", registry=self.registry)

    def count_decoding(self, total: DecodingStats) -> None:
        """Bring the speculative counters up to `total`, the counts of all sequences so far."""
        last, self._counted = self._counted, total
        self.draft_tokens.inc(total.drafted - last.drafted)
        self.accepted_tokens.inc(total.accepted - last.accepted)
        self.exceptions.inc(total.exceptions - last.exceptions)
        self.deviation_spent.set(total.deviation)
        for source, rounds in total.rounds_by_source.items():
            new = rounds - last.rounds_by_source[source]
            self.source_rounds.labels(source=source).inc(new)
            self.drafts.inc(new if source != "none" else 0)
        for position, accepted in enumerate(total.accepted_at):
            known = last.accepted_at[position] if position < len(last.accepted_at) else 0
            self.accepted_per_position.labels(position=str(position)).inc(accepted - known)

    def snapshot(self) -> list[Metric]:
        """Every family with its present samples; plain values that can be sent to the ingress."""
        return list(self.registry.collect())

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"tierspec_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"tierspec_{name}", help_text, labels, registry=self.registry, buckets=buckets)


class _Families:
    """What `generate_latest` needs of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def render(snapshots: Iterable[list[Metric]]) -> str:
    """Prometheus text of all cells together: samples of the same name and labels are summed."""
    families: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            totals = sums.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                totals[key] = totals.get(key, 0.0) + sample.value
    for name, family in families.items():
        family.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in sums[name].items()]
    registry: Any = _Families(list(families.values()))
    return generate_latest(registry).decode()
