"""The provisioning rule: with which staleness bound, publish interval and rate the trainer never waits."""

from math import inf

import pytest
from test_kinds import fleet

from tailrace.control.provisioning import Provisioning
from tailrace.runtime.provisioning_watch import ProvisioningWatch
from tailrace.sim.provisioning import advice_on, provision_of
from tailrace.sim.simulation import Simulation

RULE = Provisioning(work=1000.0, rate=25.0, step_s=50.0, broadcast_s=45.0, generate_s=55.0, staleness=4)


def test_the_window_is_what_broadcast_and_generation_leave_of_the_bound():
    assert RULE.window_s == 100.0
    assert RULE.needed == 20.0  # the trainer's own pace
    assert RULE.holds
    assert RULE._replace(publish_every=2).needed == 20.0
    late = RULE._replace(publish_every=3)  # no group is done when step x + 5 cannot use version x any more
    assert (late.first_s, late.needed) == (0.0, inf)
    assert RULE._replace(publish_every=3, staleness=5).needed == pytest.approx(20.0)
    assert RULE._replace(staleness=3).needed == 20.0


def test_what_a_step_begins_with_is_less_where_it_is_taken_in_mini_batches():
    rule = RULE._replace(generate_s=95.0, staleness=3)
    assert (rule.window_s, rule.needed) == (10.0, 100.0)
    assert RULE._replace(generate_s=95.0, staleness=4, publish_every=2, picks=4).needed == pytest.approx(1000 / 30)


def test_no_rate_is_enough_where_groups_are_done_too_late_or_versions_queue_up():
    assert RULE._replace(staleness=2).needed == inf
    slow_link = RULE._replace(broadcast_s=120.0, staleness=100)
    assert slow_link.needed == inf
    assert slow_link.least_publish_every == 3
    assert "schedule.publish_every = 3" in next(advice_on(slow_link))
    assert slow_link._replace(publish_every=3).holds


@pytest.mark.parametrize("publish_every", [1, 2, 3, 5])
@pytest.mark.parametrize("picks", [1, 4])
def test_the_least_bound_is_where_the_rule_begins_to_hold(publish_every, picks):
    rule = RULE._replace(publish_every=publish_every, picks=picks)
    least = rule.least_staleness
    assert rule._replace(staleness=least).holds
    assert not rule._replace(staleness=least - 1).holds


def test_a_fleet_that_cannot_keep_up_is_told_so_whatever_the_bound():
    slow = RULE._replace(rate=10.0, staleness=100)
    assert not slow.holds
    assert "add replicas" in next(advice_on(slow))


def far_fleet(link: float):
    """A trainer at home, replicas abroad; with S = 4, weights may take little less than four steps of 15 s."""
    cards = {"H800": {"gpus": 1}, "abroad": {"gpu": "H20", "gpus": 8, "site": "b"}}
    sites = {"b": {"gbytes_per_s": link}}
    return fleet(cards, **{"cluster.sites": sites, "split.trainer_gpus": 1, "run.steps": 10})


@pytest.mark.parametrize(("link", "enough"), [(1.0, True), (0.05, False)])
def test_the_simulated_trainer_waits_where_the_rule_says_so_and_its_controller_is_told_once(link, enough):
    config, told = far_fleet(link), []
    watch = ProvisioningWatch(config)
    idle = Simulation(config, lambda *seen: told.append(watch.see(*seen))).run().trainer_idle
    assert provision_of(config).holds == enough
    assert (idle < 0.05) == enough
    assert bool(list(advice_on(provision_of(config)))) != enough
    assert [bool(sentence) for sentence in told].count(True) == (0 if enough else 1)
