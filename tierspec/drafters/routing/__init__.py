"""The router: which source drafts in a round, and what rounds cost."""

from tierspec.drafters.routing.costs import AcceptedEstimate, CostCurve, RoundCosts
from tierspec.drafters.routing.rules import (
    LEARNED,
    Candidate,
    Choice,
    LearnedPayoff,
    PayoffEstimator,
    RouterName,
    RouterRule,
    route,
)

__all__ = [
    "LEARNED",
    "AcceptedEstimate",
    "Candidate",
    "Choice",
    "CostCurve",
    "LearnedPayoff",
    "PayoffEstimator",
    "RoundCosts",
    "RouterName",
    "RouterRule",
    "route",
]
