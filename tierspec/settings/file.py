"""From a YAML file and dotted overrides to a plain tree, and from pydantic's complaints to one clear line."""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from tierspec.errors import SettingError

Tree = dict[str, Any]
Model = TypeVar("Model", bound=BaseModel)

_PLAIN = {  # pydantic error type -> our words
    "model_type": "expected a group of settings",
    "tuple_type": "expected a list",
    "missing": "too few values",
    "int_parsing": "expected an integer",
    "int_type": "expected an integer",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
}


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice; plain YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a name must be plain text", key_node.start_mark)
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"setting '{key_node.value}' is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file. SettingError names file and line of what cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingError(f"cannot read settings file {path}: {reason}") from error
    try:
        tree = yaml.load(text, Loader=_UniqueKeyLoader)  # a SafeLoader: builds plain values only
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as a day that does not exist
        raise SettingError(f"{path}{_yaml_problem(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingError(f"{path}, line 1: expected groups such as 'run:', found {_shown(tree)}")
    return tree


def apply_override(tree: Tree, override: str) -> None:
    """Put `group.key=value` into `tree`, the value parsed as YAML. Unknown names are left to validation."""
    name, equals, text = override.partition("=")
    *groups, key = name.strip().split(".")
    if not equals or not groups or not all((*groups, key)):
        raise SettingError(f"override {_shown(override)}: expected group.key=value, for example training.depth=5")
    try:
        value = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: such as a day that does not exist
        raise SettingError(f"override {_shown(override)}: the value is not YAML{_yaml_problem(error)}") from error
    for group in groups:
        branch = tree.setdefault(group, {})
        if branch is None:
            branch = tree[group] = {}
        if not isinstance(branch, dict):
            raise SettingError(f"override {_shown(override)}: '{group}' is not a group but {_shown(branch)}")
        tree = branch
    tree[key] = "" if value is None and not text.strip() else value


def validate(model: type[Model], tree: Tree) -> Model:
    """`model` built from `tree`; every mistake in one SettingError line."""
    if name := _not_text(tree):
        raise SettingError(f"setting '{name}' holds bytes that are not text")
    try:
        return model.model_validate({group: {} if branch is None else branch for group, branch in tree.items()})
    except ValidationError as error:
        names = sorted(setting_names(model))
        raise SettingError("; ".join(_describe(item, names) for item in error.errors())) from error


def _not_text(value: Any, name: str = "") -> str | None:
    """Name of the first setting whose text, or a key of it, no file name or UTF-8 file can hold."""
    if isinstance(value, str):
        return name if any(letter == "\0" or 0xD800 <= ord(letter) <= 0xDFFF for letter in value) else None
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
        if any(isinstance(key, str) and _not_text(key, "x") for key in value):
            return name or "(a group)"
    elif isinstance(value, list | tuple):
        parts = ((None, item) for item in value)
    for key, item in parts:
        if found := _not_text(item, ".".join(filter(None, (name, key and str(key))))):
            return found
    return None


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all groups and settings under `model`."""
    for key, field in model.model_fields.items():
        yield prefix + key
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{key}.")


def _describe(item: Any, names: Iterable[str]) -> str:
    name = ".".join(str(part) for part in item["loc"])
    reason = str(item["msg"])
    if item["type"] == "extra_forbidden":
        nearest = _nearest(name, list(names))
        return f"unknown setting '{name}'" + (f" (did you mean '{nearest}'?)" if nearest else "")
    if item["type"] == "value_error":
        reason = str(item["ctx"]["error"])
        if isinstance(item["input"], dict | BaseModel):
            return reason
    if item["type"] == "string_pattern_mismatch":
        reason = f"expected text of the form {item['ctx']['pattern']}"
    reason = _PLAIN.get(item["type"], reason)
    if item["type"] == "missing":
        name = name.rpartition(".")[0]
    return f"setting '{name}' is {_shown(item['input'])}: {reason.replace('Input should be', 'expected', 1)}"


def _nearest(name: str, names: list[str]) -> str | None:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    elsewhere = [known for known in names if known.rpartition(".")[2] == name.rpartition(".")[2]]
    loose = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return next(iter(close + elsewhere + loose), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
    return f", line {mark.line + 1}: {problem}" if mark else f": {problem}"
