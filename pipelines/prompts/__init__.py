"""Prompts: what the target is asked, where it comes from and what is kept out of training."""

from pipelines.prompts.prompt import Prompt
from pipelines.prompts.reading import read_prompts, spread

__all__ = ["Prompt", "read_prompts", "spread"]
