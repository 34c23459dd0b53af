"""Settings to bundles."""

import pytest

from actors.placement import place_cell
from tierspec.config import Settings


def settings(*overrides: str) -> Settings:
    return Settings().override(
        "serve.cell_cpus=0.25", "serve.verifier_cpus=1", "serve.drafter_cpus=0.5", "serve.drafter_threads=3", *overrides
    )


def test_colocated_is_one_process_with_the_resources_of_all() -> None:
    placed = place_cell(settings(), has_drafter=True)
    assert (placed.cell, placed.bundles) == ({"CPU": 1.75}, [])
    assert {name: (tier.bundle, tier.threads) for name, tier in placed.tiers.items()} == {
        "verifier": (None, 0),
        "drafter": (None, 3),
    }


def test_separate_is_one_bundle_per_tier_with_the_cell_beside_the_verifier() -> None:
    placed = place_cell(settings("serve.placement=separate"), has_drafter=True)
    assert placed.bundles == [{"CPU": 1.25}, {"CPU": 0.5}]
    assert placed.cell == {"CPU": 0.25}
    assert {name: (tier.bundle, tier.cpus) for name, tier in placed.tiers.items()} == {
        "verifier": (0, 1.0),
        "drafter": (1, 0.5),
    }


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_without_drafter_there_is_one_tier(placement: str) -> None:
    placed = place_cell(settings(f"serve.placement={placement}"), has_drafter=False)
    assert list(placed.tiers) == ["verifier"]
    assert len(placed.bundles) <= 1


def test_gpus_count_on_cuda_only() -> None:
    on_gpu = settings("target.device=cuda", "serve.verifier_gpus=2", "serve.drafter_gpus=1")
    assert place_cell(on_gpu, has_drafter=True).cell == {"CPU": 1.75, "GPU": 2.0}
    separate = place_cell(on_gpu.override("serve.placement=separate"), has_drafter=True)
    assert [bundle["GPU"] for bundle in separate.bundles] == [2.0, 1.0]
    assert separate.cell == {"CPU": 0.25}


def test_tiers_go_to_the_nodes_that_their_resource_marks() -> None:
    marked = settings("serve.verifier_node=verifier", "serve.drafter_node=drafter")
    assert place_cell(marked, has_drafter=True).cell == {"CPU": 1.75, "verifier": 1.0}
    separate = place_cell(marked.override("serve.placement=separate"), has_drafter=True)
    assert separate.bundles == [{"CPU": 1.25, "verifier": 1.0}, {"CPU": 0.5, "drafter": 1.0}]
