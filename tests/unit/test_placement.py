"""Which machine runs which rank, what is refused, and what is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.config import load
from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.runtime.placement import Machine, meeting, missing, own_machine, place, refusal, refuse_lacking_interface
from tailrace.runtime.provision import Provision
from tailrace.trainer.announcements import Announcements
from tailrace.wire.interfaces import find, interfaces
from tailrace.wire.messages import MOST_RANKS

NETWORK = "10.0.0.0/24"


def machine(host: int, ranks: int, address: str = "") -> Machine:
    return Machine((host,) * ranks, {"lo": "127.0.0.1", "eth1": address or f"10.0.0.{host + 1}"})


def settings(**options: Any) -> Config:
    words = {"model.preset": "smollm2-135m", "local.listen": "127.0.0.1", **options}
    return load([], [word for name, value in words.items() for word in (f"--{name.replace('__', '.')}", str(value))])


@pytest.mark.parametrize(
    ("wanted", "ranks", "hosts"),
    [
        (1, [1], (0,)),
        (2, [2, 2], (0, 0)),
        (4, [1, 2, 2], (0, 1, 1, 2)),
        (4, [0, 1, 0, 3], (1, 3, 3, 3)),
        (3, [0, 1, 1], None),
    ],
)
def test_ranks_fill_one_machine_after_the_other(wanted: int, ranks: list[int], hosts: tuple[int, ...] | None):
    machines = [machine(host, count) for host, count in enumerate(ranks) if count]
    found = place(wanted, machines, NETWORK)
    assert (found and found.hosts) == hosts
    assert missing(wanted, machines, NETWORK) == max(0, wanted - sum(ranks)) or hosts


def test_ranks_on_one_machine_meet_on_its_loopback_and_those_on_several_in_the_trusted_network():
    together, apart = place(2, [machine(3, 2)], NETWORK), place(2, [machine(3, 1), machine(4, 1)], "eth1")
    assert together is not None
    assert {one.address for one in together.endpoints} == {"127.0.0.1"}
    assert apart is not None
    assert [tuple(one) for one in apart.endpoints] == [("eth1", "10.0.0.4"), ("eth1", "10.0.0.5")]
    host, _, port = meeting(apart, is_here=False).removeprefix("tcp://").rpartition(":")
    assert (host, 20_000 <= int(port) < 30_000) == ("10.0.0.4", True)


def test_without_a_trusted_network_all_ranks_are_on_one_machine_or_wait():
    machines = [machine(1, 1), machine(2, 2)]
    found = place(2, machines, "")
    assert found is not None
    assert found.hosts == (2, 2)
    assert place(3, machines, "") is None
    assert missing(3, machines, "") == 3


def test_the_ranks_of_this_machine_are_dealt_out_to_the_hosts_that_it_plays():
    assert own_machine(settings(trainer__ranks=4, local__relays=2)).slots == (0, 0, 1, 1)
    assert own_machine(settings(trainer__ranks=4, local__ranks=0)).slots == ()


def test_an_interface_is_found_by_its_name_or_by_the_network_that_it_is_in():
    offered = {"eth0": "192.0.2.7", "eth1": "10.0.0.7", "ib0": "fd00::7"}
    assert find("eth1", offered) == ("eth1", "10.0.0.7")
    assert find("10.0.0.0/24", offered) == ("eth1", "10.0.0.7")
    assert find("fd00::/64", offered) == ("ib0", "fd00::7")
    assert find("10.9.0.0/16", offered) is None
    assert find("eth", offered) is None
    assert find("10.0.0.0/24", {"eth0": "nonsense"}) is None


def test_this_machine_has_the_loopback():
    assert interfaces()["lo"] == "127.0.0.1"


def test_a_machine_outside_the_trusted_network_or_a_run_without_one_is_refused():
    offered = {"lo": "127.0.0.1", "eth0": "192.0.2.7"}
    apart = settings(trainer__ranks=2, local__ranks=0, trainer__interface="192.0.2.0/24")
    assert refusal(apart, 1, offered) == ""
    assert "has no address; its interfaces are lo (127.0.0.1)" in refusal(apart, 1, {"lo": "127.0.0.1"})
    alone = settings(trainer__ranks=2, local__ranks=0)
    assert refusal(alone, 2, offered) == ""
    assert "names no network for ranks on several machines" in refusal(alone, 1, offered)
    assert "names no network" in refusal(settings(trainer__ranks=2), 2, offered)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local__replicas": 0, "local__listen": ""}, "local.replicas is 0, and nobody can join; write local.listen"),
        ({"trainer__ranks": 2, "local__ranks": 0, "local__listen": ""}, "local.ranks is 0 of trainer.ranks = 2"),
        ({"trainer__ranks": 2, "local__ranks": 3}, "local.ranks is 3, more than trainer.ranks; write 2 or less"),
        ({"trainer__ranks": 2, "local__ranks": 1}, "neither authenticate nor encrypt; write trainer.interface"),
        ({"trainer__interface": "10.0.0.0/99"}, "which is no network"),
        ({"trainer__interface": "lo", "local__listen": "10.0.0.1"}, "the loopback, which no other machine reaches"),
        ({"trainer__interface": "127.0.0.0/8", "local__listen": "10.0.0.1"}, "the loopback"),
        ({"trainer__collective_s": 0}, "trainer.collective_s is 0"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        settings(**options)


def test_a_run_whose_own_ranks_are_not_in_the_network_is_refused_before_it_starts():
    with pytest.raises(ConfigError, match="where this machine has no address; its interfaces are"):
        refuse_lacking_interface(settings(trainer__ranks=2, local__ranks=1, trainer__interface="nothere0"))
    refuse_lacking_interface(settings(trainer__ranks=2, local__ranks=1, trainer__interface="lo"))
    refuse_lacking_interface(settings(trainer__ranks=2, local__ranks=0, trainer__interface="nothere0"))


def test_a_wait_is_said_once_with_the_command_that_ends_it_and_has_a_deadline():
    provision = Provision(settings(local__replicas=0, local__wait_s=10), "tcp://10.0.0.1:47", Path("runs/my/join.key"))
    ranks, replicas = provision.look(0.0, 2, 0)
    command = "tailrace worker --join 10.0.0.1:47 --key runs/my/join.key"
    assert ranks == f"the trainer waits for 2 more ranks: {command} --ranks 2"
    assert replicas == f"the run waits for a replica: {command} --replicas 1"
    assert provision.look(5.0, 2, 1) == []
    assert provision.look(6.0, 1, 1) == [f"the trainer waits for 1 more rank: {command} --ranks 1"]
    assert provision.overdue(16.0) == ""
    assert provision.overdue(16.1).startswith("nobody came within 10 s (local.wait_s), and the trainer waits")
    assert provision.look(17.0, 0, 1) == []
    assert provision.overdue(100.0) == ""


def test_what_is_announced_is_readable_for_ranks_alone():
    mine, other = Announcements("ab" * 32), Announcements("cd" * 32)
    written = mine.write("the key of a store")
    assert b"key of a store" not in bytes.fromhex(written)
    assert mine.read(written.encode()) == b"the key of a store"
    with pytest.raises(ValueError, match="no rank of this trainer"):
        other.read(written.encode())
    assert Announcements().read(Announcements().write("plain").encode()) == b"plain"


def test_there_may_be_as_many_ranks_elsewhere_as_a_trainer_can_have():
    assert settings(trainer__ranks=MOST_RANKS, local__ranks=0).trainer.ranks == MOST_RANKS
