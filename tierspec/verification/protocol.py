"""What a verification policy is, and how one is found by name."""

from typing import Protocol

from torch import Tensor

from tierspec.errors import SettingError
from tierspec.verification.strict import StrictPolicy

_POLICIES = {"strict": StrictPolicy}


class VerificationPolicy(Protocol):
    """Decides how much of a scored block is kept."""

    @property
    def name(self) -> str: ...

    def accept(self, draft_ids: Tensor, choices: Tensor, logits: Tensor) -> int:
        """The number of leading draft tokens to keep, 0 .. K.

        `draft_ids` `[K]`; `choices` `[K + 1]` is the target's choice after each prefix of the draft, the last one after
        the whole draft; `logits` `[K + 1, V]` are the rows the choices came from. The choice after the kept tokens follows them.
        """
        ...


def load_policy(name: str) -> VerificationPolicy:
    """The policy called `name`. Raises `SettingError` listing the known names."""
    if name not in _POLICIES:
        raise SettingError(f"verification.policy: no policy {name!r}; known: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]()
