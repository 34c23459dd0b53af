"""The real 135M model, loaded once per dtype, a few held-out prompts, and an untrained drafter."""

from pathlib import Path

import pytest

from pipelines.prompts import read_prompts
from tests.support.target_drafters import write_untrained_drafter
from tierspec.models import Target
from tierspec.models.loading import load_target

SOURCE = "embedded:smollm2-135m"


@pytest.fixture(scope="session")
def target() -> Target:
    """In bf16, with invariant numerics."""
    return load_target(SOURCE, dtype="bfloat16", numerics="invariant")


@pytest.fixture(scope="session")
def exact_target() -> Target:
    return load_target(SOURCE, dtype="float32")


@pytest.fixture(scope="session")
def drafter_path(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_untrained_drafter(tmp_path_factory.mktemp("drafter"), target)


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[list[int]]:
    """Four short held-out prompts of different kinds."""
    read = read_prompts(["builtin:heldout"], "prompts.heldout")
    encoded = [target.encode_chat([{"role": "user", "content": prompt.turns[0]}]) for prompt in read[::10]]
    return sorted(encoded, key=len)[:4]
