"""Settings of an ablation."""

import re
from typing import Annotated, Self

from pydantic import Field, model_validator

from tierspec.settings.group import Group

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class AblationSettings(Group):
    variants: dict[str, tuple[str, ...]] = Field(
        {"eagle3": ("training.objective=eagle3",), "vat": ("training.objective=vat",)},
        description="ways to train, by name: overrides of settings under training and drafter",
    )
    baseline: str = Field("eagle3", description="the variant that the others are compared with")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2), min_length=1, description="each variant is trained once with each"
    )
    folder: str = Field(
        "ablation",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="folder of this ablation in the run's; several may share the run's rollouts and features",
    )
    results: str = Field("", description="folder of the result files; empty: `results` in the ablation's folder")

    @model_validator(mode="after")
    def _variants_are_named(self) -> Self:
        for name in self.variants:
            if not _NAME.match(name):
                raise ValueError(f"ablation.variants: {name!r} must be letters, digits, '.', '_' and '-'")
        if self.baseline not in self.variants:
            raise ValueError(f"ablation.baseline is {self.baseline}, which is not one of ablation.variants")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"ablation.seeds: {list(self.seeds)} holds a seed twice")
        return self
