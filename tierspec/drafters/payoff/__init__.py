"""How much of a suffix draft will be accepted: features, history and the predictor (HVD, arXiv 2606.01019)."""

from tierspec.drafters.payoff.features import FEATURES, History, TokenClasses, feature_row, token_classes, true_payoff
from tierspec.drafters.payoff.predictor import CONFIG_FILE, WEIGHTS_FILE, PayoffPredictor, load_payoff

__all__ = [
    "CONFIG_FILE",
    "FEATURES",
    "WEIGHTS_FILE",
    "History",
    "PayoffPredictor",
    "TokenClasses",
    "feature_row",
    "load_payoff",
    "token_classes",
    "true_payoff",
]
