"""What every group of settings shares."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

_MOST = 2**31 - 1
Count = Annotated[int, Field(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=_MOST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Threads = Annotated[int, Field(ge=0, le=1024, description="torch threads; 0: an equal share of the usable cores")]
Cpus = Annotated[float, Field(ge=0.0, description="logical CPUs that Ray sets aside for this process")]
Gpus = Annotated[float, Field(ge=0.0, description="GPUs that Ray sets aside for this process, on cuda")]

NodeResource = Annotated[
    str, Field(description="custom resource (one unit) that marks the nodes for this process, as in ray_cluster.yaml")
]


class Group(BaseModel):
    """Base of every group: unknown names refused, values immutable, no NaN, no bool where a number is meant."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_numbers(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and annotation in (int, float):
            raise ValueError("expected a number")
        return value
