"""HTML pages from the templates of this package; they load nothing from elsewhere."""

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(template: str, filters: Mapping[str, Callable[..., str]] | None = None, **values: Any) -> str:
    """The template `<template>.html.j2` filled with `values`, everything in them escaped."""
    environment = Environment(
        loader=PackageLoader("tierspec.evaluation", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(f"{template}.html.j2").render(**values)
