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

        `draft_ids` `[K]`; `choices` `[K + 1]`: the target's choice after 0 .. K draft tokens; `logits` `[K + 1, V]`:
        the rows those came from. Of the choices, the one after the kept tokens is committed with them.
        """
        ...


def load_policy(name: str) -> VerificationPolicy:
    """The policy called `name`. Raises `SettingError` listing the known names."""
    if name not in _POLICIES:
        raise SettingError(f"verification.policy: no policy {name!r}; known: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]()
