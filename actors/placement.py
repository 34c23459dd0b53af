"""Where the tiers of a cell run, as a pure function of the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierspec.config import Settings
from tierspec.decoding import TierName

Resources = dict[str, float]


@dataclass(frozen=True)
class TierPlacement:
    """One tier: what Ray sets aside for it, and its torch threads (0: every core its process may use).

    `bundle` is its place in the cell's placement group; None: the tier lives in the cell's own process.
    """

    bundle: int | None
    cpus: float
    gpus: float
    threads: int


@dataclass(frozen=True)
class CellPlacement:
    """One cell: its own resources, the bundles of its placement group (none: it needs no group) and its tiers.

    The cell itself sits in bundle 0, beside the verifier.
    """

    cell: Resources
    tiers: dict[TierName, TierPlacement]
    bundles: list[Resources] = field(default_factory=list)


def place_cell(settings: Settings, *, has_drafter: bool) -> CellPlacement:
    """Colocated: one process that holds the resources of all tiers. Separate: one bundle and one actor per tier."""
    serve = settings.serve
    on_gpu = settings.target.device.startswith("cuda")
    separate = serve.placement == "separate"
    sizes: dict[TierName, tuple[float, float, int]] = {
        "verifier": (serve.verifier_cpus, serve.verifier_gpus, serve.verifier_threads)
    }
    nodes: dict[TierName, str] = {"verifier": serve.verifier_node, "drafter": serve.drafter_node}
    if has_drafter:
        sizes["drafter"] = (serve.drafter_cpus, serve.drafter_gpus, serve.drafter_threads)
    tiers = {
        tier: TierPlacement(
            bundle=bundle if separate else None,
            cpus=cpus,
            gpus=gpus if on_gpu else 0.0,
            threads=threads,
        )
        for bundle, (tier, (cpus, gpus, threads)) in enumerate(sizes.items())
    }
    if not separate:
        cpus = serve.cell_cpus + sum(tier.cpus for tier in tiers.values())
        return CellPlacement(_resources(cpus, tiers["verifier"].gpus, nodes["verifier"]), tiers)
    bundles = [
        _resources(tier.cpus + (serve.cell_cpus if tier.bundle == 0 else 0.0), tier.gpus, nodes[name])
        for name, tier in tiers.items()
    ]
    return CellPlacement(_resources(serve.cell_cpus, 0.0), tiers, bundles)


def _resources(cpus: float, gpus: float, node: str = "") -> Resources:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {}) | ({node: 1.0} if node else {})
