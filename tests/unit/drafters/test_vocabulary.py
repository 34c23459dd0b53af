import pytest
import torch

from tierspec.drafters import DraftVocabulary


def test_most_frequent_tokens_with_ties_and_padding_by_lowest_id() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 0, 1])
    assert DraftVocabulary.most_frequent(counts, 2).target_ids.tolist() == [1, 3]
    assert DraftVocabulary.most_frequent(counts, 6).target_ids.tolist() == [0, 1, 2, 3, 4, 6]
    assert DraftVocabulary.most_frequent(counts, 100).size == 7


def test_maps_follow_the_offset_rule_and_round_trip() -> None:
    vocabulary = DraftVocabulary(torch.tensor([1, 3, 6]), 8)
    assert vocabulary.d2t.tolist() == [1, 2, 4]
    assert vocabulary.t2d.nonzero()[:, 0].tolist() == [1, 3, 6]
    assert vocabulary.columns.tolist() == [-1, 0, -1, 1, -1, -1, 2, -1]
    again = DraftVocabulary.from_maps(vocabulary.d2t, vocabulary.t2d)
    assert torch.equal(again.target_ids, vocabulary.target_ids) and again.vocab_size == 8


def test_coverage() -> None:
    counts = torch.tensor([0, 5, 0, 9, 5, 0, 1])
    assert DraftVocabulary.most_frequent(counts, 3).coverage(counts) == pytest.approx(19 / 20)
    assert DraftVocabulary.most_frequent(counts, 3).coverage(torch.zeros(7)) == 1


def test_inconsistent_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="disagree"):
        DraftVocabulary.from_maps(torch.tensor([1, 2]), torch.tensor([True, False, False, True]))
    for ids in ([3, 1], [1, 1], [-1, 2], [2, 9], []):
        with pytest.raises(ValueError, match="draft vocabulary"):
            DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 8)
