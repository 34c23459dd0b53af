"""DFlash (arXiv 2602.06036): a drafter of a few layers that fills a whole block in one pass."""

from tierspec.drafters.dflash.config import FAMILY, DFlashConfig
from tierspec.drafters.dflash.inference import DFlashDrafter, DFlashState
from tierspec.drafters.dflash.module import DFlash

__all__ = ["FAMILY", "DFlash", "DFlashConfig", "DFlashDrafter", "DFlashState"]
