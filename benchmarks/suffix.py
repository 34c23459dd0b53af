"""`python -m benchmarks.suffix`: what the suffix cache costs beside a decode step of the default model.

A context is built up to its length, then tokens are appended one by one with a proposal after each, as in decoding; in
between, the model takes a step, so that both are measured in one run.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from benchmarks.timing import describe
from tierspec.artifacts import atomic_write_json
from tierspec.drafters.suffix import SuffixCache
from tierspec.drafters.suffix.proposal import SuffixLimits
from tierspec.drafters.suffix.reference import ReferenceAutomaton
from tierspec.models import Step
from tierspec.models.loading import load_target

DEPTH = 64
ROUNDS = 200
