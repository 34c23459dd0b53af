"""A payoff predictor that knows nothing."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tierspec.drafters.payoff import PayoffPredictor, TokenClasses
from tierspec.drafters.payoff.predictor import parameter_shapes


def random_predictor(classes: TokenClasses, suffix: Mapping[str, Any]) -> PayoffPredictor:
    random = np.random.default_rng(0)
    parameters = {n: random.normal(scale=0.2, size=s).astype(np.float32) for n, s in parameter_shapes().items()}
    parameters["std"] = np.abs(parameters["std"]) + 0.5
    return PayoffPredictor(parameters, classes, "here", suffix)
