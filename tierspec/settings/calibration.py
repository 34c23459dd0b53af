"""Settings of a calibration."""

from typing import Annotated

from pydantic import Field

from tierspec.settings.group import Count, Fraction, Group


class CalibrationSettings(Group):
    max_tokens: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(
        (2, 3, 4, 6), min_length=1, description="values of draft.max_tokens to try"
    )
    min_survival: tuple[Fraction, ...] = Field(
        (0.0, 0.2, 0.35, 0.5), min_length=1, description="values of draft.min_survival to try with each"
    )
    prompts: Count = Field(12, description="held-out prompts answered with each")
    max_new_tokens: Count = Field(64, description="longest answer in tokens")
    repeats: Count = Field(3, description="timed runs per prompt and setting; the median counts")
