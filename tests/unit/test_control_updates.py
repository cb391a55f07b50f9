"""What a replica with work in hand does about a newer version, and what that is expected to cost."""

import math

import pytest

from drive import Drive, config
from tailrace.config.tree import Schedule, Trainer
from tailrace.control.quota import timely_share
from tailrace.control.speed import DecodeCosts
from tailrace.control.update_costs import CHEAPEST, DEAREST, InFlight, Situation, choose, price_of_lag
from tailrace.control.updates import in_flight
from tailrace.protocol import EngineWork, Explain, Generate, LoadWeights, Progressed

COSTS = DecodeCosts(step=0.011, sequence=3e-5, kv_token=2e-8, prefill_token=2.5e-5)


def situation(samples, **changes):
    standard = {
        "costs": COSTS,
        "samples": samples,
        "kv": sum(one.context for one in samples),
        "batch": 64.0,
        "elsewhere": 0.0,
        "late_share": [0.0],
        "pace_s": 60.0,
        "may_mix": True,
        "may_stay": True,
    }
    return Situation(**{**standard, **changes})


def chosen(samples, **changes):
    return choose(situation(samples, **changes))[0]


def test_a_few_long_ones_are_taken_along():
    choice, costs = choose(situation([InFlight(4_000, 6_000)] * 3))
    assert choice == "take_along"
    assert costs.recompute_s == pytest.approx(0.3)
    assert costs.drain_s > 30, "6,000 steps of a nearly empty batch"


def test_a_report_of_kv_that_is_older_than_its_samples_ends_nothing():
    """What is left of it is then below 0, and so is the time that a step would take."""
    samples = [InFlight(context=4_000, left=10, due_s=1e4, at_stake=100.0), InFlight(8_000, 11, 1e4, 100.0)]
    slow_memory = COSTS._replace(step=1e-4, sequence=0.0, kv_token=1e-6)
    assert choose(situation(samples, costs=slow_memory, kv=100))[0] in ("take_along", "stay", "drain")


def test_lag_costs_more_where_the_trainer_seldom_waits():
    prices = [price_of_lag(waits) for waits in (0.0, 0.05, 0.15, 0.25, 0.4, 1.0)]
    assert prices == sorted(prices, reverse=True)
    assert prices[:2] == [DEAREST] * 2
    assert prices[-2:] == [CHEAPEST] * 2

    behind = situation([InFlight(4_000, 6_000)] * 60, kv=2e6)  # recomputing would cost 50 s
    assert [choose(behind._replace(lag_price=price))[0] for price in (CHEAPEST, 1.0)] == ["stay", "take_along"]


def test_what_is_about_to_end_is_waited_for():
    assert chosen([InFlight(8_000, 10)] * 4) == "drain"


def test_where_nothing_may_start_nothing_is_lost_by_draining():
    choice, costs = choose(situation([InFlight(4_000, 6_000)] * 3, batch=0.0))
    assert (choice, costs.drain_s) == ("drain", 0.0)


def test_what_a_tool_has_is_not_waited_for_unless_nothing_may_start():
    ending = [InFlight(8_000, 10)] * 4
    choice, costs = choose(situation(ending, away=3))
    assert (choice, costs.drain_s) == ("take_along", math.inf)
    assert chosen(ending, away=3, batch=0.0) == "drain"
    assert chosen(ending, away=3, may_mix=False, may_stay=False) == "drain"


def test_where_work_is_scarce_an_idle_batch_costs_less():
    few = [InFlight(2_000, 4_000)] * 8
    everywhere_full, scarce = (choose(situation(few, batch=24.0, elsewhere=e))[1].drain_s for e in (0.0, 40.0))
    assert scarce < everywhere_full / 2


def test_a_full_cache_lets_a_version_pass_but_not_many():
    full = [InFlight(4_000, 4_000)] * 200
    assert chosen(full, batch=200.0, pace_s=200.0) == "stay", "20 s of prefill at every version is too much"
    assert chosen(full, batch=200.0, pace_s=200.0, late_share=[0.0, 0.0]) == "take_along"


def test_what_would_come_too_late_is_not_started_on_old_weights():
    full = [InFlight(4_000, 4_000)] * 200
    assert chosen(full, batch=200.0, pace_s=200.0, late_share=[0.2]) == "take_along"


@pytest.mark.parametrize(
    ("due_s", "at_stake", "choice"),
    [
        (90, 500_000, "drain"),  # 70 s if it runs out, 108 s in a full batch, about as uncertain as they are long
        (90, 1_000, "take_along"),  # not worth that
        (1, 500_000, "take_along"),  # lost in any case
        (900, 500_000, "take_along"),  # in time in any case
    ],
)
def test_what_would_be_dropped_in_a_full_batch_runs_out_before_it(due_s, at_stake, choice):
    assert chosen([InFlight(4_000, 6_000, due_s, at_stake)] * 3) == choice


def test_without_mixing_it_runs_out():
    choice, costs = choose(situation([InFlight(4_000, 6_000)] * 3, may_mix=False, may_stay=False))
    assert (choice, costs.recompute_s, costs.stay_s) == ("drain", None, None)
    uneven = [InFlight(4_000, 100), InFlight(4_000, 100), InFlight(4_000, 6_000)]
    to_the_end = choose(situation(uneven, may_mix=False, may_stay=False))[1].drain_s
    assert to_the_end > 20 * choose(situation(uneven))[1].drain_s, "the long one is not taken along"


# ------------------------------------------------------------------------------------------------------- in control


def report_speed(drive, replica):
    """The engine of a replica does four different things, each at the standard costs."""
    seconds, sums = 0.0, (0, 0, 0, 0)
    for done in ((100, 100, 9_000, 0), (100, 900, 90_000, 0), (100, 900, 900_000, 0), (10, 90, 9_000, 20_000)):
        seconds += sum(cost * amount for cost, amount in zip(COSTS, done, strict=True))
        sums = tuple(a + b for a, b in zip(sums, done, strict=True))
        drive.tell(Progressed(replica, 1, 400, 4, 0, EngineWork(seconds, *sums)))


def outdated(**schedule):
    """A version is made; replica 0 is free, replica 1 has samples in hand, and there are prompts for more."""
    settings = {"kind": "adaptive", "max_inflight": 16, "max_staleness": 8, "steps_ahead": 4, "mixed_share": 1.0}
    drive = Drive(config(prompts=2, size=4, schedule=Schedule(**{**settings, **schedule}))).join_all()
    for replica in (0, 1):
        report_speed(drive, replica)
    for request in drive.running():
        if request.group < 2 or request.trajectory % 4 > 1:  # two samples of each later group go on
            drive.finish(request)
    drive.train(after=60.0)
    drive.fetch()
    return drive


def test_a_replica_goes_on_under_newer_weights_and_says_why():
    drive = outdated()
    held = drive.running(1)
    drive.store_everywhere(1)
    (explained,) = drive.orders(Explain)
    assert (explained.replica, explained.choice, explained.samples) == (1, "take_along", len(held))
    assert explained.recompute_s is not None
    assert explained.drain_s is not None
    assert explained.recompute_s < explained.drain_s
    assert {order.replica for order in drive.orders(LoadWeights)} == {0, 1}
    assert drive.plane.state.ledger.mixed == len(held) > 0


def test_no_more_samples_are_mixed_than_allowed():
    drive = outdated(mixed_share=0.0)
    drive.store_everywhere(1)
    assert {order.replica for order in drive.orders(LoadWeights)} == {0}, "the other one runs out first"
    assert drive.plane.state.ledger.mixed == 0


def test_kv_that_the_last_report_had_and_no_sample_has_any_more_is_not_recomputed():
    drive = outdated()
    drive.tell(Progressed(1, 1, 1_000_000, 4, 0))
    contexts = [one.context for one in in_flight(drive.plane._context, drive.plane.state.fleet.replicas[1])]
    drive.store_everywhere(1)
    (explained,) = drive.orders(Explain)
    assert explained.recompute_s == pytest.approx(COSTS.prefill_token * sum(contexts), rel=0.01)


def test_between_two_reports_samples_grow_as_fast_as_their_engine_decodes():
    drive = outdated()
    context, replica = drive.plane._context, drive.plane.state.fleet.replicas[1]
    drive.tell(Progressed(1, 1, 400, 4, 0))
    reported = context.steps(replica)
    context.now += 0.5
    assert context.steps(replica) == pytest.approx(reported + 0.5 / COSTS.step, rel=0.05)
    context.now += 60.0
    most = reported + 1.0 / COSTS.step
    assert context.steps(replica) == pytest.approx(most, rel=0.05), "a report a second was promised"
    for request in drive.running(1):
        drive.finish(request)
    assert context.steps(replica) == reported, "it has nothing to do"


def test_nothing_starts_on_weights_that_are_about_to_be_replaced():
    drive = outdated()
    drive.store_everywhere(1)
    for replica in (0, 1):
        drive.load(replica)
    drive.plane.state.relays.publish_s = 1.0  # it has taken that long so far
    drive.finish_all()
    before = len(drive.orders(Generate))
    drive.train(after=60.0)
    drive.fetch()
    assert len(drive.orders(Generate)) == before, "version 2 is made, and will be there in a second"
    drive.store_everywhere(2)
    for replica in (0, 1):
        drive.load(replica)
    assert len(drive.orders(Generate)) > before


@pytest.mark.parametrize(("mini_batches", "lag", "steps"), [(1, 0, 3.5), (1, 3, 0.5), (4, 3, 1.25)])
def test_what_starts_behind_has_until_the_last_pick_that_may_take_it(mini_batches, lag, steps):
    """Where all samples are of one length, one that needs a little less is in time, and one that needs more is late."""
    sections = {"schedule": Schedule(kind="adaptive", max_staleness=4), "trainer": Trainer(mini_batches=mini_batches)}
    context = Drive(config(prompts=4, **sections)).plane._context
    context.training.pace_s = 100.0
    for _ in range(64):
        context.ledger.lengths.note_group([math.log(1000)] * 2)
    in_time = [timely_share(context, lag, step_s=steps * 100.0 / 1000 * share) for share in (0.9, 1.1)]
    assert in_time == pytest.approx([1.0, 0.0], abs=0.01)
