"""tierspec: draft models trained for the way they are verified, served behind several tiers of verification."""

__version__ = "0.1.0"
