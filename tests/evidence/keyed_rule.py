"""The keyed choice draws from the target's distribution: chi-square over many seeds on a toy vocabulary."""

import json

import torch
from scipy.stats import chi2

from tierspec.sampling import target_choice

LOGITS = torch.tensor([1.2, -0.4, 0.3, 2.0, -2.5, 0.3, 0.9])

LAWS = {
    "plain": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "cold": {"temperature": 0.6, "top_k": 0, "top_p": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 4, "top_p": 1.0},
    "top_k_top_p": {"temperature": 1.3, "top_k": 6, "top_p": 0.8},
}


def law(temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution to expect, float64, by sorting."""
    probabilities = (LOGITS.double() / temperature).softmax(-1)
    order = probabilities.argsort(descending=True, stable=True)[: top_k or None]
    ranked = probabilities[order] / probabilities[order].sum()
    ranked[ranked.cumsum(0) - ranked >= top_p] = 0.0
    return torch.zeros_like(probabilities).scatter(0, order, ranked / ranked.sum())


def draws(rows: int, *, stream: int = 0, position: int = 11, seed_step: int = 1, first_seed: int = 0, **truncation):
    """One choice for each of `rows` seeds, in one call."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "stream": stream, "position": position} | truncation
    seeds = range(first_seed, first_seed + rows * seed_step, seed_step)
    return target_choice(
        LOGITS.expand(rows, -1), seed=list(seeds), **{name: [value] * rows for name, value in values.items()}
    )


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Pearson's statistic of counts against a law; a draw outside the law's support is a statistic of infinity."""
    allowed = expected > 0
    counts, means = observed[allowed].double(), expected[allowed] * observed.sum()
    outside = observed[~allowed].sum() > 0
    statistic = float("inf") if outside else float(((counts - means) ** 2 / means).sum())
    degrees = int(allowed.sum()) - 1
    return {
        "rows": int(observed.sum()),
        "chi_square": statistic,
        "degrees": degrees,
        "p_value": float(chi2.sf(statistic, degrees)),
    }


def of_law(rows: int, name: str) -> dict[str, float]:
    counts = torch.bincount(draws(rows, **LAWS[name]), minlength=len(LOGITS))
    return chi_square(counts, law(**LAWS[name]))


def of_pairs(rows: int, **changes: int) -> dict[str, float]:
    """Choices under a key and under a neighbouring one, as a table of pairs, against the product of their laws."""
    pairs = draws(rows, seed_step=2) * len(LOGITS) + draws(rows, seed_step=2, **changes)
    expected = law(**LAWS["plain"])
    return chi_square(torch.bincount(pairs, minlength=len(LOGITS) ** 2), (expected[:, None] * expected).flatten())


NEIGHBOURS = {"positions": {"position": 12}, "streams": {"stream": 1}, "seeds": {"first_seed": 1}}


def main(rows: int = 1_000_000) -> dict[str, dict[str, float]]:
    """Every test by name: rows, statistic, degrees of freedom and p-value."""
    laws = {f"law/{name}": of_law(rows, name) for name in LAWS}
    return laws | {f"independent/{name}": of_pairs(rows, **changes) for name, changes in NEIGHBOURS.items()}


if __name__ == "__main__":
    print(json.dumps(main()))
