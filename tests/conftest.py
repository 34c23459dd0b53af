"""What every test stands on: a quiet, offline, unauthenticated environment, and marks by folder."""

import os
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tierspec.config import Settings, load_settings

ROOT = Path(__file__).parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parts = item.path.relative_to(ROOT / "tests").parts
        for folder in ("ray", "e2e"):
            if folder in parts:
                item.add_marker(folder)


@pytest.fixture
def tiny_settings(tmp_path: Path) -> Settings:
    """The tiny preset, with its runs in the test's own folder."""
    return load_settings(ROOT / "configs" / "tiny.yaml", [f"run.root={tmp_path / 'runs'}"])


@pytest.fixture(scope="session")
def tiny_target():
    """`embedded:tiny` in float32."""
    from tierspec.models.loading import load_target

    return load_target("embedded:tiny", dtype="float32")
