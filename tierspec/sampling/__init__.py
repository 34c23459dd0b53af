"""Sampling: what a request asks for, the noise that keys it, and the choice of a token from logits."""

from tierspec.sampling.choice import greedy_choice, target_choice
from tierspec.sampling.noise import gumbel, gumbel_all, philox4x32
from tierspec.sampling.params import GREEDY_TEMPERATURE, RowSampling, SamplingParams, draw_seed

__all__ = [
    "GREEDY_TEMPERATURE",
    "RowSampling",
    "SamplingParams",
    "draw_seed",
    "greedy_choice",
    "gumbel",
    "gumbel_all",
    "philox4x32",
    "target_choice",
]
