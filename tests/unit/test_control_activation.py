"""Cheapest first: who is asked to generate, who is sent home, and who is called back."""

import pytest

from drive import Drive, config
from tailrace.config.tree import EvalSettings, Run
from tailrace.control.activation import Priced, choose
from tailrace.control.margin import LEAST, Margin
from tailrace.protocol import (
    Activate,
    EngineWork,
    EvalSetsOpened,
    Evaluate,
    Generate,
    LoadWeights,
    PriceChanged,
    Progressed,
    ReplicaLost,
)
from tailrace.scoring import EvalSet


def priced(id, price, rate=100.0, active=True):
    return Priced(id, price, rate, active)


def test_a_useful_token_costs_by_price_and_speed():
    assert priced(0, 3.6, 1000.0).cost == pytest.approx(1.0), "dollars for a million"
    assert priced(0, 3.6, 0.0).cost == 0.0, "not known yet"


def test_the_cheapest_that_are_enough_are_chosen():
    replicas = [priced(0, 4.0), priced(1, 1.0), priced(2, 3.0, 400.0), priced(3, 2.0)]
    assert choose(replicas, 90.0) == {2}, "which is the fastest for its price"
    assert choose([one._replace(active=False) for one in replicas], 450.0) == {1, 2}
    assert choose(replicas, 10_000.0) == {0, 1, 2, 3}


def test_all_are_chosen_while_nothing_is_known_and_the_free_always():
    assert choose([priced(0, 4.0), priced(1, 1.0)], 0.0) == {0, 1}
    assert choose([priced(0, 4.0), priced(1, 0.0), priced(2, 0.0)], 1.0) == {1, 2}
    assert choose([priced(0, 4.0, 0.0), priced(1, 1.0)], 1.0) == {0, 1}, "it has to show how fast it is"


def test_nobody_goes_to_and_fro():
    """At the limit one that is at work stays, and one that is at home stays there."""
    first, second = priced(0, 1.0), priced(1, 2.0)
    assert choose([first, second], 95.0) == {0, 1}
    assert choose([first, second._replace(active=False)], 95.0) == {0}


def test_the_margin_grows_when_the_trainer_waited_and_is_given_time():
    margin = Margin()
    margin.step_made(1, 0.5)
    raised = margin.value
    margin.step_made(2, 0.5)
    assert raised == margin.value == pytest.approx(1.5 * LEAST)
    for step in range(3, 200):
        margin.step_made(step, 0.0)
    assert margin.value == LEAST


# ------------------------------------------------------------------------------------------------ through the plane


def priced_fleet(*prices, train_s=10.0, **sections):
    """Every replica makes 100 tokens per second; the trainer takes 40 in `train_s` for a step of 8 samples."""
    drive = Drive(config(prompts=2, size=4, **sections), replicas=len(prices))
    drive.join_all()
    drive.tell(PriceChanged((0,), prices[0]))
    for replica, price in enumerate(prices):
        drive.tell(PriceChanged((replica,), price))
        for count in range(1, 9):
            work = EngineWork(count * 0.4, 10 * count, 40 * count, 0, 0)
            drive.tell(Progressed(replica, 1, 40, 4, 0, work))
    step(drive, train_s)
    return drive


def step(drive, train_s=10.0):
    drive.finish_all()
    drive.train(after=train_s)


def at_home(drive):
    return {one.id for one in drive.plane.state.fleet.replicas.values() if one.resting}


def test_who_is_not_needed_is_sent_home_and_gets_nothing():
    drive = priced_fleet(2.0, 1.0, 3.0)
    assert at_home(drive) == {0, 2}
    assert [(one.replica, one.active) for one in drive.orders(Activate)] == [(0, False), (2, False)]
    before = len(drive.sent)
    drive.store_everywhere(1)
    drive.fetch()
    drive.finish_all()
    assert {one.replica for one in drive.sent[before:] if isinstance(one, Generate | LoadWeights)} == {1}


def test_without_a_price_nobody_is():
    drive = priced_fleet(0.0, 0.0, 0.0)
    assert not drive.orders(Activate)


def test_when_the_cheapest_is_lost_the_next_is_called_back_at_once():
    drive = priced_fleet(2.0, 1.0, 3.0)
    drive.tell(ReplicaLost(1, 1, "the spot market took it"))
    assert at_home(drive) == {2}


def test_prices_may_change_while_running():
    drive = priced_fleet(2.0, 1.0, 3.0)
    drive.tell(PriceChanged((2,), 0.5))
    assert at_home(drive) == {0, 1}
    drive.tell(PriceChanged((0, 1, 2), 0.0))
    assert not at_home(drive), "what costs nothing is not sent home"


def test_a_price_that_was_set_outlives_a_restart_of_the_replica():
    drive = priced_fleet(2.0, 1.0, 3.0)
    drive.join(2, incarnation=2)
    assert drive.plane.state.fleet.replicas[2].price == 3.0
    drive.join(2, incarnation=3, price=7.0)
    assert drive.plane.state.fleet.replicas[2].price == 7.0


def test_a_trainer_that_waits_calls_them_back():
    drive = priced_fleet(2.0, 1.0, 3.0)
    for count in range(2, 20):
        drive.store_everywhere(count - 1)
        drive.fetch()
        for order in drive.orders(LoadWeights)[-3:]:
            if drive.plane.state.fleet.replicas[order.replica].state == "pulling":
                drive.load(order.replica)
        drive.now += 30.0  # in which the trainer has nothing
        drive.keep_alive()
        step(drive, 0.1)
    assert not at_home(drive)
    assert drive.plane.state.training.version > 3


def test_at_the_end_all_are_called_back_to_evaluate():
    """Else nobody would, were the last one at work lost."""
    drive = priced_fleet(2.0, 1.0, run=Run(steps=2), eval=EvalSettings(every=2))
    drive.tell(EvalSetsOpened((EvalSet("held_out", 4),)))
    assert at_home(drive) == {0}
    drive.fetch()
    step(drive)
    drive.store_everywhere(2)
    assert not at_home(drive)
    drive.tell(ReplicaLost(1, 1, "the spot market took it"))
    drive.load(0)
    assert (drive.orders(Evaluate)[-1].replica, drive.orders(Evaluate)[-1].version) == (0, 2)
