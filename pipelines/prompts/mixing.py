"""Several prompt sets mixed in wanted shares."""

from collections.abc import Callable, Sequence

from pipelines.prompts.prompt import Prompt

Shuffle = Callable[[list[Prompt]], list[Prompt]]


def mixed(sets: Sequence[list[Prompt]], weights: Sequence[float], limit: int, shuffle: Shuffle) -> list[Prompt]:
    """As many prompts as the sets allow in the shares `weights`, at most `limit` (0: no limit), in mixed order.

    Without weights: all prompts of all sets. `shuffle` decides the order, and which prompts of a set are taken.
    """
    if not weights:
        return shuffle([prompt for members in sets for prompt in members])[: limit or None]
    shares = [weight / sum(weights) for weight in weights]
    total = min(len(members) / share for members, share in zip(sets, shares, strict=True) if share)
    total = min(total, limit) if limit else total
    taken = [shuffle(members)[: round(share * total)] for members, share in zip(sets, shares, strict=True)]
    return shuffle([prompt for members in taken for prompt in members])
