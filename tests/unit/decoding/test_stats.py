"""The glossary, on a made-up sequence of rounds."""

import pytest

from tierspec.decoding.stats import DecodingStats


def rounds(*entries):
    stats = DecodingStats()
    for source, drafted, accepted, tokens, cut in entries:
        stats.record_round(source, drafted, accepted, tokens, cut)
    return stats


def test_terms():
    stats = rounds(
        ("neural", 3, 3, 4, False), ("neural", 3, 1, 2, False), ("none", 0, 0, 1, False), ("suffix", 4, 0, 1, False)
    )
    assert (stats.rounds, stats.drafted, stats.accepted) == (4, 10, 4)
    assert stats.accepted_draft_len == 1.0 and stats.accept_len == 2.0
    assert stats.acceptance_rate == pytest.approx(0.4)
    assert stats.per_position_acceptance == [2 / 3, 1 / 2, 1.0]
    assert stats.rounds_by_source == {"neural": 2, "none": 1, "suffix": 1}
    assert stats.tokens_by_source == {"neural": 4, "target": 4}


def test_a_block_that_is_cut_counts_up_to_the_cut_and_rejects_nothing():
    stats = rounds(("neural", 4, 2, 2, True))
    assert stats.per_position_acceptance == [1.0, 1.0]
    assert stats.tokens_by_source == {"neural": 2}


def test_an_accepted_end_token_is_accepted_but_not_a_token():
    stats = rounds(("neural", 4, 2, 1, True))
    assert stats.accepted == 2 and stats.tokens_by_source == {"neural": 1}


def test_nothing_yet():
    stats = DecodingStats()
    assert (stats.accept_len, stats.acceptance_rate, stats.per_position_acceptance) == (1.0, 0.0, [])


def test_merging_is_adding():
    first = rounds(("neural", 3, 3, 4, False))
    second = rounds(("suffix", 5, 1, 2, False), ("none", 0, 0, 1, False))
    both = rounds(("neural", 3, 3, 4, False), ("suffix", 5, 1, 2, False), ("none", 0, 0, 1, False))
    first.drafter_seconds, second.drafter_seconds, both.drafter_seconds = 1.0, 0.5, 1.5
    first.merge(second)
    assert first == both
    assert first.as_dict()["accept_len"] == both.accept_len
