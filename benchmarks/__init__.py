"""Benchmarks that stay in the project: each prints medians beside a baseline of the same run, and writes JSON."""
