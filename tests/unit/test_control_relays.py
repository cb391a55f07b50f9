"""Routes are repaired with a constant number of commands, any relay can become the master, versions retire by quota."""

import pytest

from drive import Drive, config, published, routes
from tailrace.config.tree import Model, RelaySettings
from tailrace.protocol import (
    Drop,
    GiveUp,
    HostJoined,
    LinkFailed,
    LoadWeights,
    PublishFailed,
    RelayJoined,
    RelayLost,
    ReplicaLost,
    Stop,
    TrainerJoined,
    VersionStored,
)


def driven(relays=8, replicas=0, **relay):
    drive = Drive(config(relay=RelaySettings(**relay), model=Model(parameters=1e9)), replicas=replicas, relays=relays)
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


@pytest.mark.parametrize("topology", ["chain", "tree"])
def test_a_relay_that_its_predecessor_cannot_reach_is_fed_by_another_and_lost_only_if_that_fails_too(topology):
    drive = driven(relays=4, topology=topology)
    moved = routes(drive.tell(LinkFailed(0, 1, 1, "no data for 10 s")))
    assert 1 not in moved[0]
    after = next(relay for relay, targets in moved.items() if 1 in targets)
    assert drive.tell(LinkFailed(0, 1, 1, "it was under way when the route changed")) == []
    lost = drive.tell(LinkFailed(after, 1, 1, "no data for 10 s"))
    assert [command.id for command in lost if isinstance(command, GiveUp)] == [1]
    assert not drive.plane.state.relays.relays[1].live


def test_a_relay_that_has_got_something_since_is_given_another_chance():
    drive = driven(relays=4)
    drive.plane.state.training.version = 1
    drive.tell(LinkFailed(0, 1, 1, "?"))  # 0 2 3 1
    drive.tell(VersionStored(1, 1, 1))
    drive.tell(LinkFailed(0, 1, 2, "?"))  # 0 3 1 2
    drive.tell(LinkFailed(3, 1, 1, "?"))
    assert drive.plane.state.relays.relays[1].live


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


# ----------------------------------------------------------------------------- the way from the trainer to the master


def waiting_for_version_1(relays, **relay):
    drive = driven(relays, **relay)
    drive.plane.state.training.version = drive.plane.state.training.step = 1
    drive.tell(VersionStored(0, 1, 0))
    assert published(drive)[-1] == (1, 0)
    return drive


@pytest.mark.parametrize("topology", ["chain", "tree"])
def test_a_master_that_the_trainer_cannot_reach_goes_to_the_end_and_another_gets_the_version(topology):
    drive = waiting_for_version_1(3, topology=topology)
    commands = drive.tell(PublishFailed(1, 1, 0, "no data for 10 s"))
    master = drive.plane.state.relays.master
    assert published(drive)[-1] == (1, master)
    assert master != 0
    assert any(0 in targets for targets in routes(commands).values()), "it is fed by another relay"
    assert drive.tell(PublishFailed(1, 1, 0, "late")) == []
    assert drive.plane.state.relays.live == 3


def test_an_only_relay_that_the_trainer_cannot_reach_is_started_again_and_in_the_end_the_run_stops():
    drive = waiting_for_version_1(1)
    incarnation = 0
    while not drive.orders(Stop):
        incarnation += 1
        drive.tell(PublishFailed(1, 1, 0, "no data for 10 s"))
        assert [one.incarnation for one in drive.orders(GiveUp) if one.role == "relay"][-1] == incarnation
        drive.plane.state.training.last_seen = drive.now + 100.0  # it is well
        drive.tick(100.0)
        if not drive.orders(Stop):
            drive.tell(RelayJoined(0, incarnation + 1))
            assert published(drive)[-1] == (1, 0)
    assert incarnation == 1 + drive.plane.config.health.max_restarts
    assert "the trainer cannot reach it: no data" in drive.orders(Stop)[0].reason


def test_a_failure_of_another_trainer_or_of_an_older_version_changes_nothing():
    drive = waiting_for_version_1(2)
    for event in (PublishFailed(2, 1, 0, "?"), PublishFailed(1, 0, 0, "?"), PublishFailed(1, 1, 1, "?")):
        assert drive.tell(event) == []
    drive.tell(VersionStored(0, 1, 1))
    assert drive.tell(PublishFailed(1, 1, 0, "it has arrived all the same")) == []


# --------------------------------------------------------------------------------------------------------------- sites


def with_sites(home=2, **relay):
    """Relays 0 and 1 at home, 10 and 11 in Oslo, 20 and 21 in Lima."""
    drive = driven(relays=home, **relay)
    for host in (10, 11, 20, 21):
        drive.tell(HostJoined(host, (), site="oslo" if host < 20 else "lima"))
        drive.tell(RelayJoined(host, 1))
    return drive


def forwards(drive):
    relays = drive.plane.state.relays
    return {one.id: relays.targets(drive.plane.config.relay, one) for one in relays.relays.values() if one.live}


@pytest.mark.parametrize("topology", ["chain", "tree"])
def test_the_master_feeds_one_relay_of_each_site_and_that_one_the_others(topology):
    assert forwards(with_sites(topology=topology)) == {
        0: (1, 10, 20),
        1: (),
        10: (11,),
        11: (),
        20: (21,),
        21: (),
    }


def test_when_the_first_of_a_site_is_lost_the_next_one_gets_it_from_the_master():
    drive = with_sites()
    assert routes(drive.tell(RelayLost(10, 1, "it died"))) == {0: (1, 11, 20)}
    assert routes(drive.tell(RelayJoined(10, 2))) == {11: (10,), 10: ()}
    assert routes(drive.tell(LinkFailed(0, 1, 11, "no data for 10 s"))) == {10: (11,), 11: (), 0: (1, 10, 20)}


def test_a_new_master_feeds_the_sites_and_while_nobody_is_at_home_it_is_one_of_them():
    drive = with_sites()
    assert routes(drive.tell(RelayLost(0, 1, "it died"))) == {1: (10, 20)}
    assert routes(drive.tell(RelayLost(1, 1, "it died"))) == {10: (11, 20)}
    assert drive.plane.state.relays.master == 10
    assert routes(drive.tell(RelayJoined(0, 2))) == {0: (10, 20), 10: (11,)}


def test_a_replica_whose_relay_is_gone_is_served_within_its_site():
    drive = with_sites()
    drive.tell(RelayLost(11, 1, "it died"))
    relays = drive.plane.state.relays
    relays.relays[10].versions = [3]
    source = relays.source_for(11, 3)
    assert source is not None
    assert source.id == 10
