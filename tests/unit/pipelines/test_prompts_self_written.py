import pytest

from pipelines.prompts.self_written import TurnSelection, rejection

GOOD = "Could you explain how a bicycle stays upright while it moves?"
IDS = list(range(16))


@pytest.mark.parametrize(
    ("text", "ids", "finish_reason", "reason"),
    [
        (GOOD, IDS, "stop", None),
        (GOOD, IDS, "length", "unfinished"),
        ("Hi there", IDS, "stop", "length"),
        ("word " * 300, IDS, "stop", "length"),
        ("Tell me a \ufffd\ufffd story about rain", IDS, "stop", "unprintable"),
        ("go on and on and on and on and on and on and on", IDS, "stop", "repetitive"),
        (GOOD, [1, 2, 3] * 12, "stop", "repetitive"),
    ],
)
def test_what_is_rejected_and_why(text: str, ids: list[int], finish_reason: str, reason: str | None) -> None:
    assert rejection(text, ids, finish_reason) == reason


def test_selection_counts_every_attempt_and_numbers_by_attempt() -> None:
    selection = TurnSelection(wanted=2)
    other = "What should I cook tonight with rice and two eggs?"
    turns = [
        ("Hi", IDS, "stop"),
        (GOOD, IDS, "stop"),
        (GOOD.upper(), IDS, "stop"),
        (f" {other}\n", IDS, "stop"),
        (GOOD, IDS, "stop"),
    ]
    selection.offer(turns[:2])
    selection.offer(turns[2:])
    assert [prompt.sample_id for prompt in selection.prompts] == ["self_written-000001", "self_written-000003"]
    assert selection.prompts[1].turns == (other,)
    assert selection.counts() == {"tried": 4, "kept": 2, "rejected": {"length": 1, "repeated": 1}}


def test_how_attempts_are_split_into_waves_does_not_matter() -> None:
    turns = [(f"Question number {n} about topic {n * 7} and city {n * 3}?", IDS, "stop") for n in range(20)]
    whole, parts = TurnSelection(5), TurnSelection(5)
    whole.offer(turns)
    for turn in turns:
        parts.offer([turn])
    assert (whole.prompts, whole.counts()) == (parts.prompts, parts.counts())
