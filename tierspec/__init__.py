"""Speculative decoding with trained drafters, several tiers of verification, and an honest account of both."""

import os

__version__ = "0.1.0"

# OpenMP threads that spin for long while they wait hold each other up wherever cores are shared: beside other load a
# decode step of the default model took 30 times as long. Ten thousand turns bridge the gaps between kernels and no more
# (sleeping at once costs 60 % at batch 1). Read once, when PyTorch loads the OpenMP runtime.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
