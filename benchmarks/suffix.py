"""`python -m benchmarks.suffix`: what the suffix cache costs beside a decode step of the default model.

A context is built up to its length, then tokens are appended one by one with a proposal after each, as in decoding; in
between, the model takes a step, so that both are measured in one run.
"""

DEPTH = 64
ROUNDS = 200
