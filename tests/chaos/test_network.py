"""The relay chain on hosts of their own, while the network between them is slow, lossy, cut, or its hosts die.

The test is in the place of control and says the routes. Every link is encrypted, as between real hosts. The last host
is the trainer's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hosts import Network, clear_abandoned, hosts, missing

from relays import RelayProcess, ending, made_up, until
from tailrace.weights import channel
from tailrace.weights.checksum import PIECE

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

SIZE = 6 * PIECE + 1234
STALL_S = 2.0
PATIENCE_S = 60.0
SLOW_S = 300.0  # one TCP stream with 100 ms of delay and 5 % of loss carries some 40 KB/s, and there are five hops


@contextmanager
def relays_on_hosts(
    count: int, folder: Path, stall_s: float = STALL_S
) -> Iterator[tuple[Network, list[RelayProcess], RelayProcess]]:
    """A chain of relays and a trainer, each on its own host."""
    clear_abandoned()
    with hosts(count + 1) as network, ending() as made:
        made += [start(network, id, folder, stall_s) for id in range(count + 1)]
        *chain, trainer = made
        link_up(chain, attempt=1)
        yield network, chain, trainer


def start(network: Network, id: int, folder: Path, stall_s: float = STALL_S) -> RelayProcess:
    return RelayProcess(id, folder, network[id].inside, "10.77.0.0/24", stall_s)


def link_up(chain: list[RelayProcess], attempt: int) -> None:
    for relay, following in zip(chain, [*chain[1:], None], strict=True):
        relay.route(attempt, [following] if following else [])


def delivered(version: int, relays: list[RelayProcess], size: int = SIZE, patience_s: float = PATIENCE_S) -> None:
    for relay in relays:
        relay.wait_for("stored", version, patience_s)
        assert relay.read(version) == made_up(version, size)


def under_way(relay: RelayProcess, version: int = 1) -> None:
    until(lambda: relay.arriving_bytes(version) >= PIECE, "the version to be under way everywhere")


CONDITIONS = {
    "50 Mbit/s": {"rate_mbits": 50.0},
    "200 ms": {"delay_s": 0.2},
    "5 % lost": {"loss": 0.05},
    "all of it": {"rate_mbits": 50.0, "delay_s": 0.1, "loss": 0.05},
}


LONG = [pytest.param(name, marks=pytest.mark.soak) for name in CONDITIONS if name != "all of it"]


@pytest.mark.parametrize("conditions", ["all of it", *LONG])
def test_a_chain_delivers_over_links_that_are(conditions: str, tmp_path: Path) -> None:
    with relays_on_hosts(3, tmp_path, channel.STALL_S) as (network, chain, trainer):
        network.set(**CONDITIONS[conditions])
        trainer.publish(1, SIZE, chain[0])
        delivered(1, chain)
        assert [relay.reports for relay in chain] == [[], [], []]  # nothing broke off on the way


def test_a_host_that_is_cut_off_in_mid_broadcast_is_routed_around_and_served_when_it_is_back(tmp_path: Path) -> None:
    with relays_on_hosts(3, tmp_path) as (network, chain, trainer):
        first, second, third = chain
        network.set(rate_mbits=8)
        trainer.publish(1, SIZE, first)
        under_way(third)
        network.isolate(1)
        silent = third.wait_for("failed", 1)  # and so is the second, from its own point of view
        assert f"receive from {second.address.host}:" in silent["reason"]
        assert f"no data for {STALL_S} s (v1 from byte" in silent["reason"]
        first.route(2, [third])
        delivered(1, [first, third])
        assert network.switch.received[2] < 1.5 * SIZE  # the rest only, and not all of it again
        assert second.versions() == ()
        network.heal()
        third.route(3, [second])
        delivered(1, [second])


def test_a_relay_that_is_killed_and_then_the_master_in_mid_broadcast_cost_the_others_nothing(tmp_path: Path) -> None:
    with relays_on_hosts(4, tmp_path) as (network, chain, trainer):
        first, second, third, fourth = chain
        network.set(rate_mbits=8, delay_s=0.01)
        trainer.publish(1, 2 * SIZE, first)
        under_way(fourth)
        third.kill()
        first.kill()
        second.route(2, [fourth])
        trainer.publish(1, 2 * SIZE, second)
        delivered(1, [second, fourth], 2 * SIZE)
        assert network.switch.received[3] < 1.5 * 2 * SIZE
        assert trainer.wait_for("published", 1)["first"] > 0


@pytest.mark.soak
def test_a_relay_that_is_stopped_in_mid_broadcast_is_named_by_both_neighbours(tmp_path: Path) -> None:
    with relays_on_hosts(3, tmp_path) as (network, chain, trainer):
        first, second, third = chain
        network.set(rate_mbits=8)
        trainer.publish(1, SIZE, first)
        under_way(third)
        second.stop()
        assert second.address.host in third.wait_for("failed", 1)["reason"]
        first.route(2, [third])
        delivered(1, [first, third])
        second.wake()
        third.route(3, [second])
        delivered(1, [second])


@pytest.mark.soak
def test_a_network_that_is_away_for_a_moment_only_costs_that_moment(tmp_path: Path) -> None:
    with relays_on_hosts(2, tmp_path) as (network, chain, trainer):
        network.set(rate_mbits=8)
        trainer.publish(1, SIZE, chain[0])
        under_way(chain[1])
        network.isolate(1)
        time.sleep(STALL_S / 2)
        network.heal()
        delivered(1, chain)


@pytest.mark.soak
def test_three_minutes_of_random_faults_leave_every_relay_with_the_newest_version(tmp_path: Path) -> None:
    """Hosts are cut off, stopped and started anew, links change; whoever is away is routed around."""
    draw = random.Random(5)
    with relays_on_hosts(5, tmp_path) as (network, chain, trainer):
        attempt, version, ends = 1, 0, time.monotonic() + 180
        while time.monotonic() < ends:
            version, attempt = version + 1, attempt + 2
            network.set(draw.choice([20, 50, 100]), draw.choice([0, 0.02, 0.1]), draw.choice([0, 0.01, 0.05]))
            trainer.publish(version, SIZE, chain[0])
            away = draw.randrange(1, len(chain))
            fault = draw.choice(["cut", "stop", "kill", "none"])
            begun = lambda: chain[-1].arriving_bytes(version) or version in chain[-1].versions()  # noqa: B023, E731
            until(begun, "the last relay to receive the first bytes", SLOW_S)
            strike(network, chain, away, fault, tmp_path)
            there = [relay for relay in chain if relay is not chain[away] or fault in ("none", "kill")]
            link_up(there, attempt)
            delivered(version, there, patience_s=SLOW_S)
            network.heal()
            chain[away].wake()
            link_up(chain, attempt + 1)
            everywhere = lambda: all(version in relay.versions() for relay in chain)  # noqa: B023, E731
            until(everywhere, "the newest version on every relay", SLOW_S)
        assert version >= 5
        assert all(relay.read(version) == made_up(version, SIZE) for relay in chain)


def strike(network: Network, chain: list[RelayProcess], away: int, fault: str, folder: Path) -> None:
    if fault == "cut":
        network.isolate(away)
    elif fault == "stop":
        chain[away].stop()
    elif fault == "kill":
        chain[away].kill()
        chain[away] = start(network, away, folder)
