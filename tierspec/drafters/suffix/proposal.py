"""What a suffix cache proposes."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SuffixProposal:
    """Draft tokens: a chain, or a tree in the order in which its nodes were taken.

    `probabilities[i]` is the estimated probability that token i and all above it hold, `score` their sum (the accepted
    length to expect), `match_len` how many of the text's last tokens were matched. It may be positive where there is no
    draft: test `tokens`. `parents[i]` is the index of the token before token i, -1 for the text itself; in a chain it
    is i - 1, and left empty.
    """

    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0
    parents: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SuffixLimits:
    """How long a draft may be: at most `max_tokens`, at most `factor` * matched length + `offset`, and no token whose
    estimated probability is below `min_probability`. `tree`: the likeliest tokens of all branches, not one chain."""

    max_tokens: int
    min_probability: float = 0.1
    factor: float = 1.0
    offset: float = 0.0
    tree: bool = False
