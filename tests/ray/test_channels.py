"""One suite for every kind of channel."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from actors.channels import ActorChannel, InprocChannel
from pipelines.cluster import ray_session
from tierspec.config import Settings
from tierspec.decoding import ChannelLost, Prefill, Prefilled, TierMessage, TierReply

Opener = Callable[..., InprocChannel | ActorChannel]


class EchoTier:
    """Answers with twice the features. Token 1 makes it slow, token 2 fail, token 3 die."""

    def handle(self, message: TierMessage) -> TierReply:
        item = message.items[0]
        assert isinstance(item, Prefill)
        if item.token_ids == [1]:
            time.sleep(0.5)
        if item.token_ids == [2]:
            raise ValueError("two\nlines")
        if item.token_ids == [3]:
            os._exit(1)
        features = None if message.features is None else message.features * 2
        held = [Prefilled(item.sequence_id, item.round_id, item.base + len(item.token_ids), 1)]
        return TierReply(message.tier, message.tick, list(held), 0.0, features)


def message(tick: int, token: int = 9, features: torch.Tensor | None = None) -> TierMessage:
    return TierMessage("verifier", tick, [Prefill("s", tick, 0, 0, [token], True)], ["gone"], features)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with ray_session(Settings()):
        yield


@pytest.fixture(params=["inproc", "actor"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opener]:
    channels: list[InprocChannel | ActorChannel] = []
    if request.param == "actor":
        request.getfixturevalue("ray_cluster")

    def make(timeout_s: float = 60.0) -> InprocChannel | ActorChannel:
        if request.param == "inproc":
            channels.append(InprocChannel("verifier", EchoTier(), threads=1))
        else:
            actor = ray.remote(EchoTier).options(num_cpus=0.1).remote()
            channels.append(ActorChannel("verifier", actor, timeout_s))
        return channels[-1]

    yield make
    for channel in channels:
        channel.close()


def test_replies_come_in_order_with_their_tensors(opened: Opener) -> None:
    channel = opened()
    features = torch.randn(3, 4).to(torch.bfloat16)

    async def go() -> list[TierReply]:
        return await asyncio.gather(
            *(channel.call(message(tick, 1 if tick == 0 else 9, features)) for tick in range(4))
        )

    replies = asyncio.run(go())
    assert [reply.tick for reply in replies] == [0, 1, 2, 3]
    assert replies[0].items == [Prefilled("s", 0, 1, 1)]
    for reply in replies:
        assert reply.features is not None and torch.equal(reply.features, features * 2)
        reply.features.zero_()  # the receiver's own memory


def test_cancelled_call_leaves_the_channel_usable(opened: Opener) -> None:
    channel = opened()

    async def go() -> int:
        slow = asyncio.create_task(channel.call(message(1, 1)))
        await asyncio.sleep(0.05)
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return (await channel.call(message(2))).tick

    assert asyncio.run(go()) == 2


def test_tier_that_fails_is_lost(opened: Opener) -> None:
    with pytest.raises(ChannelLost, match=r"^verifier: .*ValueError"):
        asyncio.run(opened().call(message(1, 2)))


def test_channel_serves_one_event_loop_after_another(opened: Opener) -> None:
    channel = opened()
    assert [asyncio.run(channel.call(message(tick))).tick for tick in (1, 2)] == [1, 2]


@pytest.mark.parametrize("opened", ["actor"], indirect=True)
def test_dead_actor_and_silent_actor_are_lost(opened: Opener) -> None:
    channel = opened()
    with pytest.raises(ChannelLost, match="verifier"):
        asyncio.run(channel.call(message(1, 3)))
    with pytest.raises(ChannelLost, match="verifier"):
        asyncio.run(channel.call(message(2)))
    channel.close()
    silent = opened(timeout_s=0.2)
    asyncio.run(opened().call(message(3)))
    with pytest.raises(ChannelLost, match=r"no answer within 0\.2 s"):
        asyncio.run(silent.call(message(4, 1)))
