"""Drafter training on plain PyTorch: simulated verification, the objective, one adapter per drafter family."""
