"""ray_cluster.yaml, checked as `ray up` would before it talks to a cloud, and for what Ray does not check."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())


def test_ray_accepts_it(cluster):
    validate_config(prepare_config(copy.deepcopy(cluster)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("available_node_types", "drafter", "resources", "GPU"), 0.5),
        (("head_node_type",), "nowhere"),
        (("idle_timeout",), 3),
        (("available_node_types", "trainer", "min_workers"), 99),
    ],
)
def test_the_validation_has_teeth(cluster, path, value):
    branch = cluster
    for key in path[:-1]:
        branch = branch[key]
    branch[path[-1]] = value
    with pytest.raises(Exception):  # noqa: B017 - jsonschema, ValueError or click, by the kind of mistake
        validate_config(prepare_config(cluster))


def test_workers_scale_from_zero_and_fit_the_limit(cluster):
    workers = {name: kind for name, kind in cluster["available_node_types"].items() if name != "head"}
    assert all(kind["min_workers"] == 0 < kind["max_workers"] for kind in workers.values())
    assert sum(kind["max_workers"] for kind in workers.values()) == cluster["max_workers"]


def test_each_kind_of_work_has_its_node_type(cluster):
    kinds = cluster["available_node_types"]
    assert "GPU" not in kinds["head"]["resources"]
    for name in ("trainer", "drafter", "verifier"):
        resources = kinds[name]["resources"]
        assert resources[name] == resources["GPU"] >= 1  # one unit of the custom resource per GPU
    assert all(type(amount) is int for kind in kinds.values() for amount in kind["resources"].values())


def test_versions_are_the_tested_ones(cluster):
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    for image in (cluster["docker"]["head_image"], cluster["docker"]["worker_image"]):
        assert image.split(":")[1].startswith(f"{pins['ray']}-py311")
    assert any(f"torch=={pins['torch']}" in command for command in cluster["setup_commands"])


def test_every_ray_start_asks_for_the_token(cluster):
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    assert "/home/ray/.ray/auth_token" in cluster["file_mounts"]
