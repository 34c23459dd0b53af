"""The end of an output, wherever blocks happen to be cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy_tiers import PIECES, decode
from tierspec.decoding.detokenizer import Detokenizer
from tierspec.decoding.stopping import OutputEnd
from tierspec.errors import SettingError
from tierspec.sampling import SamplingParams

EOS = 0
A, B, AB, SPACE, BA = 1, 2, 3, 4, 5
E_FIRST, E_SECOND = 6, 7  # the two bytes of an e with an acute accent


def output(blocks, room=100, **sampling):
    """Kept tokens, text and finish reason, the text in the pieces it came in."""
    end = OutputEnd(SamplingParams(max_new_tokens=room, **sampling), [EOS], decode)
    tokens, texts = [], []
    for block in blocks:
        cut = end.take(block, room - len(tokens))
        tokens += block[: cut.num_tokens]
        texts.append(cut.text)
        if cut.finish_reason:
            return tokens, texts, cut.finish_reason
    return tokens, texts, None


def test_an_end_token_inside_a_block_is_not_kept():
    assert output([[A, B], [A, EOS, B]]) == ([A, B, A], ["ab", "a"], "stop")
    assert output([[A, SPACE, B]], stop_token_ids=(SPACE,)) == ([A], ["a"], "stop")


def test_ignored_end_tokens_are_tokens():
    assert output([[A, EOS, B]], ignore_eos=True) == ([A, EOS, B], ["ab"], None)
    assert output([[A, EOS]], ignore_eos=True, stop_token_ids=(EOS,)) == ([A], ["a"], "stop")


def test_the_limit_cuts_a_block_and_comes_before_a_later_end_token():
    assert output([[A, A, A, A]], room=3) == ([A, A, A], ["aaa"], "length")
    assert output([[A, A, EOS]], room=2) == ([A, A], ["aa"], "length")
    assert output([[A, EOS, A]], room=2) == ([A], ["a"], "stop")


def test_a_stop_string_inside_a_block_cuts_text_before_it_and_tokens_behind_it():
    assert output([[A, AB, SPACE, A, B]], stop=("b ",)) == ([A, AB, SPACE], ["aa"], "stop")
    assert output([[A], [AB], [SPACE]], stop=("b ",)) == ([A, AB, SPACE], ["a", "a", ""], "stop")


def test_the_earliest_of_the_stop_strings_that_a_token_completes():
    assert output([[SPACE, AB]], stop=("b", "ab")) == ([SPACE, AB], [" "], "stop")


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_does_not():
    assert output([[A, B], [A], [SPACE]], stop=("baa",)) == ([A, B, A, SPACE], ["a", "", "ba "], None)
    assert output([[A, B], [EOS]], stop=("baa",)) == ([A, B], ["a", "b"], "stop")


def test_half_a_code_point_waits():
    assert output([[A, E_FIRST], [E_SECOND, B]]) == ([A, E_FIRST, E_SECOND, B], ["", "aéb"], None)
    assert output([[A, E_FIRST], [EOS]]) == ([A, E_FIRST], ["", "a\ufffd"], "stop")


def test_a_stop_string_of_two_tokens_that_share_a_code_point():
    assert output([[A, E_FIRST, E_SECOND, B]], stop=("é",)) == ([A, E_FIRST, E_SECOND], ["a"], "stop")


def test_without_a_tokenizer_there_is_no_text():
    end = OutputEnd(SamplingParams(), [EOS], None)
    assert end.take([A, EOS], 5).text is None
    with pytest.raises(SettingError, match="stop"):
        OutputEnd(SamplingParams(stop=("a",)), [EOS], None)


tokens = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=60)


@given(tokens, st.lists(st.integers(1, 6), min_size=60, max_size=60), st.lists(st.text("ab é", min_size=1), max_size=3))
def test_blocks_do_not_matter(token_ids, sizes, stops):
    blocks, rest = [], token_ids
    for size in sizes:
        blocks, rest = [*blocks, rest[:size]], rest[size:]
    blocks = [block for block in blocks if block]
    options = {"stop": tuple(stops), "ignore_eos": True, "room": len(token_ids)}
    kept, texts, reason = output(blocks, **options)
    plain_kept, plain_texts, plain_reason = output([[token] for token in token_ids], **options)
    assert (kept, "".join(texts), reason) == (plain_kept, "".join(plain_texts), plain_reason)


@given(tokens)
def test_pieces_add_up_to_the_whole(token_ids):
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push([token]) for token in token_ids]
    assert "".join(pieces) + detokenizer.flush() == decode(token_ids)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
