import re

from tierspec.evaluation.training_page import readable_sample, render_training_page

VIEW = {
    "sample_id": "s<1>",
    "token_ids": [10, 11, 12, 13, 14, 15, 16],
    "supervised_from": 3,
    "blocks": [
        {"anchor": 2, "drafted": [13, 14, 9], "survived": 2, "belief": [0.9, 0.8, 0.1]},
        {"anchor": 3, "drafted": [1, 2, 3], "survived": 0, "belief": [0.2, 0.1, 0.1]},
        {"anchor": 4, "drafted": [1, 2], "survived": 0, "belief": [0.2, 0.1]},
        {"anchor": 5, "drafted": [16], "survived": 1, "belief": [0.7]},
    ],
}


def decode(ids: list[int]) -> str:
    return " ".join(f"<{token}>" for token in ids)


def test_a_sample_is_told_round_by_round() -> None:
    sample = readable_sample(VIEW, decode)
    assert (sample["prompt"], sample["all_rounds"]) == ("<10> <11> <12>", 2)
    first, last = sample["rounds"]
    assert first["known"] == "<10> <11> <12>" and first["target"] == "<15>"
    assert [draft["state"] for draft in first["drafts"]] == ["kept", "kept", "missed"]
    assert [draft["state"] for draft in last["drafts"]] == ["kept"] and last["target"] == ""


def test_the_page_loads_nothing_and_escapes_what_it_shows() -> None:
    records = [{"kind": "start", "step": 0}]
    records += [{"kind": "step", "step": n, "loss": 5.0 / n, "accept_len": 1 + n / 1000} for n in range(1, 901)]
    records += [{"kind": "heldout", "step": 900, "accept_len": 1.7}]
    result = {"accept_len": 1.7, "per_position_acceptance": [0.4], "finished": True}
    page = render_training_page(result, records, readable_sample(VIEW, decode))
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|<script|<link""", page)
    assert "s&lt;1&gt;" in page and "<10>" not in page
    assert page.count("<svg") == 2 and page.count("<polyline") == 3
    assert page.count('class="token missed"') == 2  # one in the legend
    assert "One held-out sample" not in render_training_page(result, records, None)
