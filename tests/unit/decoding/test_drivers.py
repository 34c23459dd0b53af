"""The asyncio driver: streams, leaving, losses and restarts, with toy tiers behind channels of every temper."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.support.toy_tiers import ToyDrafter, ToyModel, ToyVerifier, decode
from tierspec.decoding import (
    AsyncDriver,
    ChannelLost,
    DrafterInfo,
    DraftOptions,
    Engine,
    EngineLimits,
    SamplingParams,
    Sequence,
)
from tierspec.errors import SettingError

MODEL = ToyModel()
LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


class ToyChannel:
    """Answers after `delay` seconds; breaks at call number `breaks_at`; counts its calls."""

    def __init__(self, tier, delay=0.0, breaks_at=None):
        self.tier, self.delay, self.breaks_at = tier, delay, breaks_at
        self.calls = 0

    async def call(self, message):
        self.calls += 1
        if self.calls == self.breaks_at:
            raise ChannelLost("toy: gone")
        await asyncio.sleep(self.delay)
        return self.tier.handle(message)


class Cell:
    """A running driver over toy tiers."""

    def __init__(self, restart=None, **broken):
        self.sequences = {}
        limits = EngineLimits(4, 64 * 64, 32, 4, 200, groups=2)
        self.engine = Engine(limits, drafter=DrafterInfo("toy", 4), decode=decode, eos_ids=[0])
        self.channels = {name: ToyChannel(self.tier(name), **broken.get(name, {})) for name in ("verifier", "drafter")}
        self.restarted = []

        async def again(name):
            self.restarted.append(name)
            await asyncio.sleep(0.001)
            if restart == "fails":
                raise RuntimeError("no machine left")
            self.channels[name] = ToyChannel(self.tier(name))
            return self.channels[name]

        self.driver = AsyncDriver(self.engine, self.channels, restart=again if restart else None)

    def tier(self, name):
        if name == "drafter":
            return ToyDrafter(MODEL, self.sequences, max_draft_tokens=4)
        return ToyVerifier(MODEL, pages=64, page_tokens=64)

    def sequence(self, name, sampling=LONG, prompt=(1, 2, 3)):
        sequence = self.sequences[name] = Sequence(name, list(prompt), sampling, DraftOptions())
        return sequence

    async def idle(self):
        while self.engine.has_work:
            await asyncio.sleep(0.001)

    async def answer(self, name, sampling=LONG, prompt=(1, 2, 3)):
        sequence = self.sequence(name, sampling, prompt)
        tokens, text, reason = [], "", None
        async with await self.driver.submit(sequence) as stream:
            async for event in stream:
                tokens += event.token_ids
                text += event.text_delta or ""
                reason = event.finish_reason
        assert (tokens, text, reason) == MODEL.decode_plainly(list(prompt), sampling, 200)


def run(cell, *work):
    """Runs the driver beside `work`, then closes it."""

    async def main():
        running = asyncio.ensure_future(cell.driver.run())
        try:
            await asyncio.wait_for(asyncio.gather(*work), 20)
        finally:
            cell.driver.close()
        await asyncio.wait_for(running, 20)

    asyncio.run(main())


def prompts(count):
    return [[1 + i % 9, 2, 3 + i % 5] for i in range(count)]


@pytest.mark.parametrize("delay", [0.0, 0.0005])
def test_many_at_once(delay):
    cell = Cell(verifier={"delay": delay}, drafter={"delay": delay})

    async def work():
        await asyncio.gather(*(cell.answer(f"s{i}", prompt=prompt) for i, prompt in enumerate(prompts(9))))
        await cell.idle()

    run(cell, work())
    assert not cell.channels["verifier"].tier.held and not cell.channels["drafter"].tier.held


def test_a_wrong_sequence_is_refused_and_the_rest_goes_on():
    cell = Cell()

    async def wrong():
        with pytest.raises(SettingError, match="prompt: 200 tokens"):
            await cell.driver.submit(cell.sequence("wrong", prompt=[1] * 200))

    run(cell, cell.answer("s"), wrong())


def test_who_leaves_frees_the_place():
    cell = Cell(verifier={"delay": 0.0005})

    async def leave(name):
        stream = await cell.driver.submit(cell.sequence(name, SamplingParams(max_new_tokens=150, ignore_eos=True)))
        async with stream:
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    async def cancelled(name):
        task = asyncio.ensure_future(cell.answer(name, SamplingParams(max_new_tokens=150, ignore_eos=True)))
        await asyncio.sleep(0.003)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def all_gone():
        await asyncio.gather(*(leave(f"a{i}") for i in range(6)), *(cancelled(f"b{i}") for i in range(6)))
        await cell.answer("last")
        await cell.idle()

    run(cell, all_gone())
    assert {s.finish_reason for s in cell.sequences.values()} == {"abort", "length"}
    assert not cell.channels["verifier"].tier.held


def test_somebody_else_may_abort():
    cell = Cell(verifier={"delay": 0.001})

    async def read():
        stream = await cell.driver.submit(cell.sequence("s", SamplingParams(max_new_tokens=150, ignore_eos=True)))
        await anext(stream)
        cell.driver.abort("s")
        reasons = [event.finish_reason async for event in stream]
        assert reasons[-1] == "abort"

    run(cell, read())


@pytest.mark.parametrize("tier", ["verifier", "drafter"])
@pytest.mark.parametrize("breaks_at", [1, 2, 7])
def test_a_lost_tier_is_restarted_and_nothing_is_seen_of_it(tier, breaks_at):
    cell = Cell(restart="works", **{tier: {"breaks_at": breaks_at}})
    run(cell, *(cell.answer(f"s{i}", prompt=prompt) for i, prompt in enumerate(prompts(6))))
    assert cell.restarted == [tier]


@pytest.mark.parametrize("restart", [None, "fails"])
def test_without_its_drafter_a_cell_decodes_plainly(restart):
    cell = Cell(restart=restart, drafter={"breaks_at": 3})
    run(cell, *(cell.answer(f"s{i}", prompt=prompt) for i, prompt in enumerate(prompts(6))))
    assert cell.channels["drafter"].calls == 3


@pytest.mark.parametrize("restart", [None, "fails"])
def test_without_its_verifier_every_stream_ends_with_the_error(restart):
    cell = Cell(restart=restart, verifier={"breaks_at": 3})
    error = ChannelLost if restart is None else RuntimeError

    async def lost(name):
        with pytest.raises(error):
            await cell.answer(name)

    async def main():
        running = asyncio.ensure_future(cell.driver.run())
        await asyncio.wait_for(asyncio.gather(*(lost(f"s{i}") for i in range(3))), 20)
        with pytest.raises(error):
            await running
        with pytest.raises(error):
            await cell.driver.submit(cell.sequence("late"))

    asyncio.run(main())


def test_closing_ends_what_still_runs():
    cell = Cell(verifier={"delay": 0.001})

    async def main():
        running = asyncio.ensure_future(cell.driver.run())
        stream = await cell.driver.submit(cell.sequence("s", SamplingParams(max_new_tokens=150, ignore_eos=True)))
        await anext(stream)
        cell.driver.close()
        with pytest.raises(ChannelLost, match="closed"):
            async for _ in stream:
                pass
        await asyncio.wait_for(running, 20)
        with pytest.raises(ChannelLost, match="closed"):
            await cell.driver.submit(cell.sequence("late"))

    asyncio.run(main())
    assert cell.sequences["s"].finish_reason == "abort"


def test_the_driver_may_run_on_a_thread_of_its_own():
    cell = Cell()
    thread = threading.Thread(target=lambda: asyncio.run(cell.driver.run()))
    thread.start()

    async def main():
        await asyncio.gather(*(cell.answer(f"s{i}", prompt=prompt) for i, prompt in enumerate(prompts(6))))

    try:
        asyncio.run(asyncio.wait_for(main(), 20))
    finally:
        cell.driver.close()
        thread.join(20)
    assert not thread.is_alive()
