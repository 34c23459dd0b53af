"""Settings of the payoff predictor's training."""

from pydantic import Field

from tierspec.settings.group import Count, Group


class PayoffSettings(Group):
    threshold: float = Field(6.0, ge=0.0, description="accepted length from which a suffix draft counts as paying")
    epochs: Count = Field(20, description="passes over the rows")
    batch_size: Count = Field(
        65536, description="rows per step; fewer where the rows would not give 32 steps per epoch"
    )
    learning_rate: float = Field(1e-3, gt=0.0, description="of Adam, constant")
    test_share: float = Field(0.2, gt=0.0, lt=1.0, description="share of the requests that only test")
    leave_one_out: bool = Field(False, description="also train without each source of prompts, and test on it")
