"""EAGLE-3 (arXiv 2503.01840): a one-layer drafter over three target features, with a pruned draft vocabulary."""

from tierspec.drafters.eagle3.config import FAMILY, Eagle3Config
from tierspec.drafters.eagle3.inference import Eagle3Drafter, Eagle3State
from tierspec.drafters.eagle3.module import Eagle3

__all__ = ["FAMILY", "Eagle3", "Eagle3Config", "Eagle3Drafter", "Eagle3State"]
