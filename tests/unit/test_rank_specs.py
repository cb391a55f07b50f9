"""What the controller tells the ranks of a trainer on other machines, with everybody else played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from played import Played
from tailrace import __version__
from tailrace.config import load
from tailrace.config.tree import Config
from tailrace.protocol import Publish, TrainerLost, TrainerWaits
from tailrace.store.journal import Journal
from tailrace.wire.messages import ComponentSpec, Dismissed, Hello, Offer, Ordered, Wanted, is_marked, shares_folder

INTERFACES = {"lo": "127.0.0.1", "eth1": "10.0.0.9"}


def config(*more: str) -> Config:
    words = {
        "model.preset": "smollm2-135m",
        "rollout.engine": "emulated",
        "rollout.kv_tokens": "4000",
        "costs.decode_step": "0.001",
        "workload.prompts_per_step": "2",
        "workload.group_size": "2",
        "workload.max_completion_tokens": "64",
        "local.listen": "127.0.0.1",
        "trainer.interface": "lo",
        "trainer.ranks": "3",
        "local.ranks": "1",
    }
    return load([], [*[word for name, value in words.items() for word in (f"--{name}", value)], *more])


def play(folder: Path, scene: Callable[[Played], Awaitable[None]], *more: str) -> None:
    async def whole() -> None:
        played = Played(folder, config(*more))
        try:
            await played.start()
            await scene(played)
        finally:
            await played.close()

    asyncio.run(whole())


async def offer(played: Played, name: str, ranks: int, **more: Any) -> Wanted:
    """What is answered; asked three times, as what is started now is wanted with the next answer."""
    played.say(name, Hello())
    for _ in range(3):
        played.say(name, Offer(__version__, 0, ranks=ranks, interfaces=INTERFACES, **more))
        await played.turn()
        await asyncio.sleep(0)
    return [message for to, message in played.orders if to == name and isinstance(message, Wanted)][-1]


def trainers(wanted: Wanted) -> list[ComponentSpec]:
    return [spec for spec in wanted.specs if spec.role == "trainer"]


async def bring_up(played: Played) -> list[ComponentSpec]:
    """Two ranks on another machine, beside the one here; returns what that machine is told of them."""
    told = trainers(await offer(played, "host-1/1", 2))
    await played.join(played.process("relay", 1))
    await played.join(played.process("trainer", 0))
    return told


def test_each_rank_is_told_its_host_those_of_the_others_and_where_they_meet(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        here = played.controller.components.get("trainer", 0)
        assert here is None
        told = await bring_up(played)
        assert [(spec.rank, spec.host, spec.rank_hosts) for spec in told] == [(1, 1, (0, 1, 1)), (2, 1, (0, 1, 1))]
        first = played.process("trainer", 0).spec
        assert (first.rank, first.host, first.rank_hosts) == (0, 0, (0, 1, 1))
        assert {spec.meeting for spec in (first, *told)} == {first.meeting}
        assert first.meeting.startswith("tcp://127.0.0.1:")
        assert {spec.interface for spec in (first, *told)} == {"lo"}
        assert len({spec.key for spec in (first, *told)}) == 3, "nobody can speak for another rank"
        assert len({spec.rank_key for spec in (first, *told)}) == 1
        assert is_marked(first)

    play(tmp_path / "run", scene)


def test_a_version_goes_to_the_master_and_the_relays_of_all_ranks(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        await bring_up(played)
        orders = [message for _, message in played.orders if isinstance(message, Ordered)]
        [published] = [one for one in orders if isinstance(one.command, Publish)]
        assert published.addresses.keys() == {0, 1}

    play(tmp_path / "run", scene)


def test_the_trainer_waits_until_there_is_room_and_again_when_a_machine_leaves(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        assert played.controller.components.get("trainer", 0) is None
        assert not trainers(await offer(played, "host-1/1", 1)), "one is still missing"
        assert trainers(await offer(played, "host-2/1", 1))
        await played.join(played.process("trainer", 0))
        first = played.process("trainer", 0).spec
        await offer(played, "host-1/1", 1, leaving=True, reason="it has no torch")
        await played.turn()
        assert not played.controller.state.training.live
        played.controller.components._start("trainer", 0)
        await played.turn()
        await played.turn()
        await offer(played, "host-3/1", 1)
        again = played.process("trainer", 0).spec
        assert (again.incarnation, again.rank_hosts) == (first.incarnation + 1, (0, 2, 3))
        assert again.meeting != first.meeting
        assert is_marked(again)
        assert not is_marked(first), "what the first one was told to write is not its to write any more"
        assert shares_folder(first), "it is the same folder all the same"
        assert not shares_folder(replace(first, folder=str(tmp_path)))

    play(tmp_path / "run", scene)
    events = [entry.event for entry in Journal(tmp_path / "run").entries()]
    waits = [event.reason for event in events if isinstance(event, TrainerWaits)]
    assert [reason.partition(":")[0] for reason in waits] == [
        "the trainer waits for 2 more ranks",
        "the trainer waits for 1 more rank",
        "the trainer waits for 1 more rank",
    ]
    [lost] = [event.reason for event in events if isinstance(event, TrainerLost)]
    assert lost == "lost its rank 1, on host 1, which its host left: it has no torch"


def test_a_machine_outside_the_trusted_network_is_sent_away(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        played.say("host-1/1", Hello())
        played.say("host-1/1", Offer(__version__, 1, ranks=1, interfaces={"eth0": "192.0.2.1"}))
        await played.turn()
        [reason] = [message.reason for _, message in played.orders if isinstance(message, Dismissed)]
        assert 'trainer.interface is "lo", where this machine has no address' in reason
        assert not played.controller.components._hosts.present

    play(tmp_path / "run", scene)
