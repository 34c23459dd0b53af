"""The cell without Serve: colocated tiers of the tiny model, driven by its own engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.application import payoff_directory
from actors.cell import Cell
from actors.cell_protocol import Admitted, Block, CellEvent, CellRequest, Failed, Finished
from actors.cell_tiers import MAX_LOSSES
from actors.metrics import render
from actors.placement import place_cell
from tests.support.payoff import random_predictor
from tests.support.target_drafters import write_untrained_drafter
from tierspec.config import Settings, load_settings
from tierspec.decoding import DraftOptions, SamplingParams, TierMessage, TierReply, VerifierTier, generate
from tierspec.drafters import load_drafter
from tierspec.errors import SettingError
from tierspec.models.target import Target
from tierspec.verification import STRICT, VerificationPolicy

MESSAGES = [{"role": "user", "content": "How many legs does a spider have?"}]
GREEDY = CellRequest(MESSAGES, SamplingParams(max_new_tokens=40, ignore_eos=True), True, STRICT, "auto")


@pytest.fixture(scope="module")
def settings() -> Settings:
    path = Path(__file__).parents[3] / "configs" / "tiny.yaml"
    return load_settings(path, ["decoding.max_running=2", "serve.max_queue=1", "serve.verifier_threads=1"])


@pytest.fixture(scope="module")
def cell(settings: Settings, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    drafter = write_untrained_drafter(tmp_path_factory.mktemp("d") / "drafter", tiny_target, draft_vocab_size=256)
    made = Cell(settings, str(drafter), place_cell(settings, has_drafter=True))
    yield made
    made.__del__()


async def collect(cell: Cell, request: CellRequest) -> list[CellEvent]:
    return [event async for event in cell.generate(request)]


def failure(cell: Cell, request: CellRequest) -> Failed:
    (event,) = asyncio.run(collect(cell, request))
    assert isinstance(event, Failed)
    return event


def token_ids(events: list[CellEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Block) for token in event.token_ids]


@pytest.mark.parametrize("source", ["auto", "neural", "suffix", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_librarys(cell: Cell, tiny_target: Target, source: str, temperature: float) -> None:
    sampling = replace(GREEDY.sampling, temperature=temperature, seed=5)
    request = replace(GREEDY, sampling=sampling, draft_source=source)  # type: ignore[arg-type]
    events = asyncio.run(collect(cell, request))
    ids = tiny_target.encode_chat(MESSAGES)
    want = generate(tiny_target, [ids], sampling=sampling)[0]
    assert events[0] == Admitted(len(ids))
    assert token_ids(events) == want.token_ids
    assert "".join(event.text for event in events if isinstance(event, Block)) == want.text
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.finish_reason, last.completion_tokens) == (want.finish_reason, len(want.token_ids))


def test_a_budgeted_request_is_answered_and_charged_as_by_the_library(
    cell: Cell, settings: Settings, tiny_target: Target
) -> None:
    policy = VerificationPolicy("budgeted", budget=20.0, gate=4.0)
    draft = replace(DraftOptions.from_settings(settings.draft), source="neural")
    asyncio.run(collect(cell, GREEDY))
    before = totals(cell)
    events = asyncio.run(collect(cell, replace(GREEDY, policy=policy, draft_source="neural")))
    drafter = load_drafter(Path(cell._drafter_path or ""), tiny_target)
    ids = tiny_target.encode_chat(MESSAGES)
    arguments = {"drafter": drafter, "policy": policy, "sampling": GREEDY.sampling, "draft": draft}
    want = generate(tiny_target, [ids], **arguments)[0]
    assert token_ids(events) == want.token_ids
    last = events[-1]
    assert isinstance(last, Finished) and last.stats.exceptions == want.stats.exceptions > 0
    assert last.budget_left == pytest.approx(20.0 - want.stats.deviation)
    after = totals(cell)
    assert after["tierspec_deviation_spent"] - before["tierspec_deviation_spent"] == pytest.approx(want.stats.deviation)
    name = "tierspec_verification_exceptions_total"
    assert after[name] - before[name] == want.stats.exceptions
    sampled = replace(GREEDY.sampling, temperature=1.0)
    assert failure(cell, replace(GREEDY, policy=policy, sampling=sampled)).error.status == 400


def totals(cell: Cell) -> dict[str, float]:
    """Every metric without labels."""
    lines = render([asyncio.run(cell.metrics())]).splitlines()
    plain = (line.split() for line in lines if line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in plain}


def test_place_of_a_client_that_leaves_is_free_again(cell: Cell) -> None:
    async def leave() -> None:
        async with aclosing(cell.generate(GREEDY)) as events:
            async for event in events:
                if isinstance(event, Block):
                    break

    async def go() -> str:
        for _ in range(6):
            await asyncio.gather(leave(), leave(), leave())
        return render([await cell.metrics()])

    text = asyncio.run(go())
    assert "tierspec_num_requests_running 0.0" in text
    assert "tierspec_num_requests_waiting 0.0" in text
    assert 'tierspec_requests_total{finish_reason="abort"} 18.0' in text


def test_a_request_that_nobody_ends_ends_by_itself(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "_timeout_s", 0.0)
    *_, last = asyncio.run(collect(cell, GREEDY))
    assert isinstance(last, Failed) and last.error.status == 504


def test_more_than_running_and_queue_is_refused(cell: Cell) -> None:
    async def go() -> list[list[CellEvent]]:
        return await asyncio.gather(*(collect(cell, GREEDY) for _ in range(5)))

    ends = [events[-1] for events in asyncio.run(go())]
    assert sum(isinstance(end, Finished) for end in ends) == 3
    assert {end.error.status for end in ends if isinstance(end, Failed)} == {429}


def test_context(cell: Cell, tiny_target: Target) -> None:
    ids = [7] * (tiny_target.config.max_context - 3)
    open_end = replace(GREEDY, prompt=ids, limit_is_hard=False)
    assert len(token_ids(asyncio.run(collect(cell, open_end)))) == 3
    asked = failure(cell, replace(open_end, limit_is_hard=True)).error
    assert (asked.status, asked.param, asked.code) == (400, "max_tokens", "context_length_exceeded")
    full = failure(cell, replace(open_end, prompt=[*ids, 7, 7, 7])).error
    assert (full.status, full.param) == (400, "prompt")
    assert failure(cell, replace(GREEDY, prompt=[])).error.status == 400
    assert failure(cell, replace(GREEDY, prompt=[10**6])).error.status == 400


class Fragile:
    """Stands before a tier's `handle` and breaks it where told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, breaks: int) -> None:
        self.breaks = breaks
        self.calls = 0
        whole = VerifierTier.handle

        def handle(tier: VerifierTier, message: TierMessage) -> TierReply:
            self.calls += 1
            if self.calls % 3 == 0 and self.breaks:
                self.breaks -= 1
                raise RuntimeError("broken on purpose")
            return whole(tier, message)

        monkeypatch.setattr(VerifierTier, "handle", handle)


def test_lost_verifier_is_replayed_to(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    want = token_ids(asyncio.run(collect(cell, GREEDY)))
    fragile = Fragile(monkeypatch, breaks=2)
    assert token_ids(asyncio.run(collect(cell, GREEDY))) == want
    assert fragile.breaks == 0


def test_verifier_that_breaks_again_and_again_ends_the_cell(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = Cell(settings, None, place_cell(settings, has_drafter=False))
    doomed.check_health()
    fragile = Fragile(monkeypatch, breaks=1000)
    last = asyncio.run(collect(doomed, GREEDY))[-1]
    assert isinstance(last, Failed) and last.error.status == 503
    assert fragile.breaks == 1000 - MAX_LOSSES - 1
    assert failure(doomed, GREEDY).error.status == 503
    wait([doomed._driving], timeout=10)
    with pytest.raises(RuntimeError, match="given up"):
        doomed.check_health()
    doomed.__del__()


def test_neural_source_without_drafter_is_a_bad_request(settings: Settings) -> None:
    plain = Cell(settings, None, place_cell(settings, has_drafter=False))
    assert failure(plain, replace(GREEDY, draft_source="neural")).error.status == 400
    assert asyncio.run(plain.describe()).drafter is None
    plain.__del__()


def test_a_learned_router_reads_its_predictor(settings: Settings, tiny_target: Target, tmp_path: Path) -> None:
    routed = settings.override("draft.router=cost", "draft.shared_tokens=500")
    classes = np.zeros(tiny_target.config.vocab_size, np.uint8)
    random_predictor(classes, routed.draft.suffix.model_dump(mode="json")).save(tmp_path / "payoff")
    drafter = write_untrained_drafter(tmp_path / "drafter", tiny_target, draft_vocab_size=256)
    made = Cell(routed, str(drafter), place_cell(routed, has_drafter=True), str(tmp_path / "payoff"))
    want = generate(tiny_target, [tiny_target.encode_chat(MESSAGES)], sampling=GREEDY.sampling)[0]
    for _ in range(2):
        assert token_ids(asyncio.run(collect(made, GREEDY))) == want.token_ids
    made.__del__()


def test_a_learned_router_without_predictor_is_found_before_the_start(settings: Settings, tmp_path: Path) -> None:
    routed = settings.override("draft.router=fixed", f"run.root={tmp_path}")
    for named in ("auto", str(tmp_path / "nowhere"), "null"):
        with pytest.raises(SettingError, match=r"draft\.router: 'fixed' needs a payoff predictor, and .* holds none"):
            payoff_directory(routed.override(f"serve.payoff={named}"))
    assert payoff_directory(settings) is None
