"""A machine that was cut off from its run, and when it gives the run up: real sockets, and no components."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tailrace.launch import machines
from tailrace.launch.machines import Attendance, Patience
from tailrace.runtime.agent import Agent, Room, SilentError
from tailrace.wire.keys import JoinKey, Keyring
from tailrace.wire.messages import Offer
from tailrace.wire.server import ControlServer
from tailrace.wire.tls import Identity

KEYS = Keyring(bytes(range(32)), "ab" * 32)
IDENTITY = Identity(KEYS.identity)
KEY = JoinKey(IDENTITY.fingerprint, KEYS.token)
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers come quickly, and last words may take their time on a busy machine."""
    monkeypatch.setattr("tailrace.runtime.agent.OFFER_S", 0.02)
    monkeypatch.setattr("tailrace.wire.client.LINGER_S", DEADLINE_S)


async def joining(server: ControlServer) -> Agent:
    return await asyncio.to_thread(Agent, server.endpoint, KEY, Room(1), lambda _: None)


async def offers(server: ControlServer, enough: Callable[[list[Offer]], bool]) -> list[Offer]:
    found: list[Offer] = []
    async with asyncio.timeout(DEADLINE_S):
        while not enough(found):
            found += [one.message for one in await server.receive() if isinstance(one.message, Offer)]
    return found


def gives_up(agent: Agent) -> str:
    with pytest.raises(SilentError) as error:
        asyncio.run(agent.run())
    return str(error.value)


def test_a_machine_that_gives_the_run_up_says_so_and_nothing_of_what_it_offered_while_it_was_cut_off():
    """Or the run would take it in, and lose it again at once."""

    async def scene() -> None:
        server = ControlServer(KEYS, identity=IDENTITY)
        agent = await joining(server)
        working = asyncio.create_task(asyncio.to_thread(gives_up, agent))
        await offers(server, bool)
        agent._silence_s = 0.3
        await server.close()
        async with asyncio.timeout(DEADLINE_S):
            while not agent._trouble:
                await asyncio.sleep(0.01)
        back = ControlServer(KEYS, server.port, identity=IDENTITY)
        heard = await offers(back, bool)
        assert [one.leaving for one in heard] == [True]
        assert heard[0].reason == await working
        await back.close()

    asyncio.run(scene())


def test_a_machine_that_the_run_lets_in_again_waits_for_the_answer_however_long_it_was_cut_off():
    async def scene() -> None:
        server = ControlServer(KEYS, identity=IDENTITY)
        agent = await joining(server)
        working = asyncio.create_task(asyncio.to_thread(gives_up, agent))
        await offers(server, bool)
        agent._heard_at = float("-inf")
        assert not any(one.leaving for one in await offers(server, lambda found: len(found) > 3))
        agent._silence_s = 0.0
        assert "nothing was heard of the run" in await working
        await server.close()

    asyncio.run(scene())


def test_who_stays_waits_as_long_after_every_cut_as_for_the_beginning(monkeypatch: pytest.MonkeyPatch):
    """However long it has worked before."""
    hours = itertools.count(step=3600.0)
    clock = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda _: None, now=0.0)
    monkeypatch.setattr(machines, "time", clock)
    endings = iter([SilentError("cut off"), SilentError("cut off"), Attendance(0, resumable=False)])

    def attend() -> Attendance:
        clock.now = next(hours)
        ending = next(endings)
        if isinstance(ending, SilentError):
            raise ending
        return ending

    assert machines._patiently(attend, Patience(wait_s=600.0, stay=True)) == 0
