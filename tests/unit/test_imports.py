"""Imports go one way: the picture of the house in docs/architecture.md, checked on the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSE = ("tierspec", "pipelines", "actors", "jobs")

BOTTOM = {"tierspec", "tierspec.errors", "tierspec.config", "tierspec.settings", "tierspec.paths"}
BOTTOM |= {"tierspec.artifacts", "tierspec.compiled", "tierspec.threads", "tierspec.wheels"}
MODELS = {*BOTTOM, "tierspec.models"}
SAMPLING = {*BOTTOM, "tierspec.sampling"}
DRAWN = {*MODELS, *SAMPLING}  # what drafters and verification stand on
MIDDLE = {*DRAWN, "tierspec.drafters", "tierspec.verification"}

# part of the house -> the parts it may import besides itself
ALLOWED = {
    "tierspec": set(),
    "tierspec.errors": set(),
    "tierspec.paths": {"tierspec.errors"},
    "tierspec.threads": set(),
    "tierspec.wheels": {"tierspec.artifacts", "tierspec.errors", "tierspec.paths"},
    "tierspec.compiled": {"tierspec.errors", "tierspec.paths"},
    "tierspec.settings": {"tierspec.errors"},
    "tierspec.config": {"tierspec.errors", "tierspec.settings"},
    "tierspec.artifacts": BOTTOM,
    "tierspec.models": BOTTOM,
    "tierspec.sampling": BOTTOM,
    "tierspec.drafters": DRAWN,
    "tierspec.verification": DRAWN,
    "tierspec.decoding": MIDDLE,
    "tierspec.training": MIDDLE,
    "tierspec.evaluation": {*MIDDLE, "tierspec.decoding", "tierspec.training"},
    "tierspec.interop": {*MIDDLE, "tierspec.decoding", "tierspec.training"},
    "pipelines": {"tierspec.*"},
    "actors": {"tierspec.*"},
    "jobs": {"tierspec.*", "pipelines", "actors"},
}
FOREIGN = {"tierspec": ("ray", "deepspeed", "fastapi", "starlette", "uvicorn")}  # a bare GPU box has none of these


def part_of(module: str) -> str:
    """The part of the house that `module` belongs to."""
    return ".".join(module.split(".")[:2]) if module.startswith("tierspec.") else module.split(".")[0]


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of everything `path` imports, at any depth of its code."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            submodules = [name for name in (f"{module}.{alias.name}" for alias in node.names) if is_module(name)]
            yield from submodules or [module]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.split(".")[0] in HOUSE and (path.is_dir() or path.with_suffix(".py").is_file())


def violations(path: Path) -> list[str]:
    """Imports of `path` that the picture does not have."""
    part = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    found = []
    for module in imported_modules(path):
        top = module.split(".")[0]
        if top in HOUSE:
            target = part_of(module)
            allowed = ALLOWED[part] | {part}
            if target not in allowed and not (top == "tierspec" and "tierspec.*" in allowed):
                found.append(f"{path.relative_to(ROOT)}: {part} must not import {target}")
        elif top in FOREIGN.get(part.split(".")[0], ()):
            found.append(f"{path.relative_to(ROOT)}: {part} must not import {top}")
    return found


def source_files() -> list[Path]:
    return sorted(path for package in HOUSE for path in (ROOT / package).rglob("*.py"))


def test_every_import_follows_the_picture():
    assert [violation for path in source_files() for violation in violations(path)] == []


def test_every_part_is_in_the_picture():
    parts = {part_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in source_files()}
    assert parts - {"tierspec.__init__"} <= set(ALLOWED)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("tierspec/models", "from tierspec.drafters import load_drafter"),
        ("tierspec/drafters", "import tierspec.verification.strict"),
        ("tierspec/verification", "from ..drafters import suffix"),
        ("tierspec/sampling", "from tierspec import models"),
        ("tierspec/decoding", "def late():\n    import ray"),
        ("tierspec", "import jobs.command"),
        ("pipelines/rollouts", "from actors import cell"),
        ("actors", "from jobs.command import run_job"),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, monkeypatch, place, line):
    for part in ALLOWED:
        (tmp_path / part.replace(".", "/")).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    file = tmp_path / place / ("config.py" if place == "tierspec" else "some_file.py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    assert len(violations(file)) == 1
