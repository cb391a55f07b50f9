"""Routes are repaired with a constant number of commands, any relay can become the master, versions retire by quota."""

import pytest

from drive import Drive, config, published, routes
from tailrace.config.tree import Model, Relay
from tailrace.protocol import Drop, LoadWeights, RelayJoined, RelayLost, ReplicaLost, TrainerJoined, VersionStored


def driven(relays=8, replicas=0, **relay):
    drive = Drive(config(relay=Relay(**relay), model=Model(parameters=1e9)), replicas=replicas, relays=relays)
    return drive.join_all()


@pytest.mark.parametrize("lost", range(1, 8))
def test_a_chain_is_spliced_with_one_command(lost):
    commands = driven().tell(RelayLost(lost, 1, "it died"))
    assert routes(commands) == {lost - 1: (lost + 1,) if lost < 7 else ()}


@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("fan_out", [2, 3])
def test_a_tree_is_repaired_with_at_most_three_commands(lost, fan_out):
    commands = driven(topology="tree", fan_out=fan_out).tell(RelayLost(lost, 1, "it died"))
    assert len(routes(commands)) <= 3


@pytest.mark.parametrize("topology", ["chain", "tree"])
def test_a_relay_that_comes_back_costs_two_commands(topology):
    drive = driven(topology=topology)
    drive.tell(RelayLost(3, 1, "it died"))
    assert len(routes(drive.tell(RelayJoined(3, 2)))) == 2


def test_the_next_master_has_what_it_needs_or_gets_it_from_the_trainer():
    drive = Drive(config(), replicas=0, relays=2)
    drive.tell(TrainerJoined(1, 0))
    drive.tell(RelayJoined(0, 1))
    drive.tell(RelayJoined(1, 1))
    drive.tell(VersionStored(0, 1, 0))
    assert published(drive) == [(0, 0)]
    drive.tell(RelayLost(0, 1, "it died before it could forward"))
    assert published(drive) == [(0, 0), (0, 1)]
    drive.tell(VersionStored(1, 1, 0))
    drive.tell(RelayJoined(0, 2))
    drive.tell(RelayLost(0, 2, "it died"))
    assert len(published(drive)) == 2, "the new master had it"


def make_versions(drive, last):
    drive.plane.state.training.version = last  # so many have been made
    drive.plane.state.training.step = last
    return [drive.tell(VersionStored(0, 1, version)) for version in range(1, last + 1)]


def test_the_oldest_versions_beyond_the_quota_are_dropped():
    drive = driven(relays=1, keep_versions=3)
    assert make_versions(drive, 4)[-2:] == [[Drop(0, 1, 0)], [Drop(0, 1, 1)]]
    by_bytes = driven(relays=1, keep_versions=3, quota_gbytes=2.5)  # room for one version of 2 GB
    assert by_bytes.plane.state.relays.relays[0].versions == [0]
    assert make_versions(by_bytes, 1)[-1] == [Drop(0, 1, 0)]


def test_a_version_that_is_being_read_is_not_dropped():
    drive = driven(relays=1, replicas=1, keep_versions=2)
    drive.tell(ReplicaLost(0, 1, "it died"))
    drive.join(0, incarnation=2, version=-1)
    assert drive.orders(LoadWeights)[-1].version == 0
    drive.tell(RelayJoined(0, 2, (0,)))  # the relay has lost its connection, not the reader
    drive.plane.state.training.version = drive.plane.state.training.step = 2
    for version in (1, 2):
        drive.tell(VersionStored(0, 2, version))
    assert drive.plane.state.relays.relays[0].versions == [0, 1, 2]
    drive.load(0)
    assert 0 not in drive.plane.state.relays.relays[0].readers


def test_versions_that_this_run_has_not_made_are_ignored():
    drive = driven(relays=2)
    drive.tell(VersionStored(0, 1, 7))
    drive.tell(RelayJoined(1, 2, (0, 0, 99)))
    assert drive.plane.state.relays.holders == {0: 2}


def test_what_a_relay_brings_along_counts_as_being_there():
    """Its own report of the version may have been overtaken by its reconnection."""
    drive = Drive(config(), replicas=0, relays=1)
    drive.tell(TrainerJoined(1, 0))
    drive.tell(RelayJoined(0, 1))
    drive.tell(RelayJoined(0, 2, (0,)))
    drive.tell(VersionStored(0, 1, 0))
    assert drive.plane.state.relays.newest_everywhere == 0


def test_a_newer_version_than_the_one_ordered_ends_the_publication_too():
    drive = Drive(config()).join_all()
    drive.plane.state.training.version = drive.plane.state.training.step = 2
    drive.plane.state.pushing = 1
    drive.tell(VersionStored(0, 1, 2))
    assert drive.plane.state.pushing == -1
