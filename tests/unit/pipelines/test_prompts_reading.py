import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.prompts import Prompt, read_prompts, spread
from pipelines.prompts.overlap import split_contaminated
from pipelines.prompts.prompt import parse_row
from pipelines.prompts.reading import FILES
from tierspec.errors import SettingError


def write(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


LAYOUTS = [
    {"turns": ["one", "two"]},
    {
        "messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "two"},
        ]
    },
    {
        "conversations": [
            {"from": "human", "value": "one"},
            {"from": "gpt", "value": "x"},
            {"from": "human", "value": "two"},
        ]
    },
    {"conversations": [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "one"}]}, {"role": "user", "content": "two"}]},
]


@pytest.mark.parametrize("row", LAYOUTS)
def test_every_layout_gives_the_users_turns(tmp_path: Path, row: dict[str, object]) -> None:
    (prompt,) = read_prompts([write(tmp_path / "set.jsonl", {"id": "a", **row})], "prompts.train")
    assert prompt == Prompt("a", "set", ("one", "two"))


def test_plain_prompt_system_message_source_and_kind(tmp_path: Path) -> None:
    path = write(
        tmp_path / "set.jsonl",
        {"prompt": "hello", "kind": "chat", "source": "mine"},
        "",
        {"id": 7, "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]},
    )
    first, second = read_prompts([path], "prompts.train")
    assert (first.turns, first.kind, first.source, len(first.sample_id)) == (("hello",), "chat", "mine", 16)
    assert (second.sample_id, second.system) == ("7", "be brief")


def test_parquet_reads_like_json_lines(tmp_path: Path) -> None:
    pq.write_table(pa.table({"turns": [["one", "two"]], "id": ["a"]}), tmp_path / "set.parquet")
    assert read_prompts([str(tmp_path / "*.parquet")], "prompts.train") == [Prompt("a", "set", ("one", "two"))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "not one JSON object per line"),
        ("[1]", "expected a JSON object, got list"),
        ('{"question": "?"}', "no field of turns, messages, conversations, prompt; found question"),
        ('{"turns": "one"}', "turns: expected a list, got str"),
        ('{"turns": []}', "turns: no user turn"),
        ('{"turns": ["a", " "]}', "turns: empty user turn"),
        ('{"turns": [1]}', "turns: expected text, got int"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "messages: unknown role 'tool'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "messages: no user turn"),
        ('{"prompt": "\\ud800"}', "prompt: text with a lone surrogate"),
        ('{"prompt": "x", "id": [1]}', "id: expected text or a whole number, got list"),
        ("[" * 100_000, "not one JSON object per line"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "set.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(SettingError) as caught:
        read_prompts([path], "prompts.train")
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_malformed_parquet_row_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["fine", None]}), tmp_path / "set.parquet")
    with pytest.raises(SettingError, match=r"set\.parquet row 2: no field of"):
        read_prompts([str(tmp_path / "set.parquet")], "prompts.train")


def test_not_utf8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(SettingError, match=r"set\.jsonl:2: not UTF-8"):
        read_prompts([str(tmp_path / "set.jsonl")], "prompts.train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "holds no prompts"),
        ("blank.jsonl", b"\n \n", "holds no prompts"),
        ("set.parquet", b"not parquet", "not a readable Parquet file"),
        ("set.csv", b"a,b", "neither JSON lines nor Parquet"),
    ],
)
def test_an_unusable_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message):
        read_prompts([str(tmp_path / name)], "prompts.train")


@pytest.mark.parametrize("entry", ["missing.jsonl", "org/dataset", "*.nothing", "builtin:other", "."])
def test_an_entry_without_a_file_names_the_setting(entry: str) -> None:
    with pytest.raises(SettingError, match=r"^prompts\.heldout: "):
        read_prompts([entry], "prompts.heldout")


def test_ids_stay_unique_and_stable(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", {"id": 0, "prompt": "x"}, {"id": 1, "prompt": "y"})
    second = write(tmp_path / "b.jsonl", {"id": 0, "prompt": "z"}, {"id": 0, "prompt": "z"}, {"prompt": "z"})
    prompts = read_prompts([first, second], "prompts.train")
    ids = [prompt.sample_id for prompt in prompts]
    assert ids[:2] == ["0", "1"]
    assert len(set(ids)) == 5
    assert ids == [prompt.sample_id for prompt in read_prompts([first, second], "prompts.train")]


turn = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(st.lists(turn, min_size=1, max_size=4), turn, st.sampled_from(["", "be brief"]))
def test_a_prompt_survives_its_own_json(turns: list[str], source: str, system: str) -> None:
    prompt = Prompt("id", source, tuple(turns), system, "kind")
    assert parse_row(json.loads(json.dumps(prompt.to_json())), "elsewhere") == prompt


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda v: (
            st.lists(v) | st.dictionaries(st.sampled_from(["turns", "messages", "role", "content", "prompt", "id"]), v)
        ),
    )
)
def test_any_json_is_read_or_refused_with_a_reason(row: object) -> None:
    try:
        assert parse_row(row, "source").turns
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(("total", "limit", "chosen"), [(7, 3, [0, 2, 4]), (4, 4, [0, 1, 2, 3]), (4, 9, [0, 1, 2, 3])])
def test_a_limit_spreads_over_the_whole_set(total: int, limit: int, chosen: list[int]) -> None:
    prompts = [Prompt(str(i), "set", (f"question {i}",)) for i in range(total)]
    assert [prompt.sample_id for prompt in spread(prompts, limit)] == [str(i) for i in chosen]
    assert spread(prompts, 0) == prompts


def test_the_built_in_sets_are_disjoint() -> None:
    train, heldout, new_kinds = (read_prompts([f"builtin:{name}"], "prompts") for name in FILES)
    assert not split_contaminated([*train, *new_kinds], heldout)[1]
    assert not split_contaminated(train, new_kinds)[1]
    kinds = {prompt.kind for prompt in train}
    assert {prompt.kind for prompt in heldout} == kinds
    assert not kinds & {prompt.kind for prompt in new_kinds}
