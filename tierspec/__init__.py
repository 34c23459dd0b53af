"""Speculative decoding with trained drafters, several tiers of verification, and an honest account of both."""

import os

__version__ = "0.1.0"

# OpenMP threads that wait by spinning hold each other up wherever cores are shared: a decode step of the default model
# beside other load took 30 times as long. Read once, when PyTorch loads the OpenMP runtime.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
