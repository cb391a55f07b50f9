"""The provisioning rule while a run goes on: what it is given, and when a line is written."""

from drive import Drive, config
from tailrace.control.provisioned import SURE, ProvisioningWatch
from tailrace.control.provisioning import Provisioning
from tailrace.protocol import EngineWork, Progressed

HOLDS = Provisioning(work=100.0, rate=50.0, step_s=4.0, broadcast_s=1.0, generate_s=2.0, staleness=4)
SLOW = HOLDS._replace(rate=10.0)
FAR = HOLDS._replace(broadcast_s=9.0)
STALE = HOLDS._replace(generate_s=14.0)


def said(*rules):
    watch = ProvisioningWatch()
    return [sentence for rule in rules for sentence in [watch.look(rule)] if sentence]


def test_one_line_when_it_stops_holding_and_one_when_it_holds_again():
    lines = said(*[HOLDS] * 9, *[SLOW] * 9, None, *[HOLDS] * 9)
    assert len(lines) == 2
    assert "replicas sample 10 tokens/s, and it takes 25" in lines[0]
    assert "need not wait any more" in lines[1]


def test_what_comes_and_goes_is_not_worth_a_line():
    assert not said(*[HOLDS, SLOW, SLOW][:SURE] * 9)


def test_the_line_says_what_would_help():
    assert "schedule.publish_every = 3 would help" in said(*[FAR] * SURE)[0]
    assert f"schedule.max_staleness = {STALE.least_staleness} would help" in said(*[STALE] * SURE)[0]


def trained(kind):
    drive = Drive(config(kind, prompts=2, size=4)).join_all()
    for replica in (0, 1):
        for count in range(1, 9):
            drive.tell(Progressed(replica, 1, 40, 4, 0, EngineWork(count * 0.4, 10 * count, 40 * count, 0, 0)))
    assert drive.plane.provisioning() is None
    drive.now += 7.0
    drive.finish_all()
    drive.train(after=10.0)
    return drive.plane.provisioning()


def test_it_is_made_of_what_was_measured():
    rule = trained("trajectory")
    assert rule is not None
    assert (round(rule.work), round(rule.step_s), rule.staleness, rule.picks) == (400, 10, 4, 1)
    assert 0.0 < rule.generate_s <= 7.0
    assert rule.rate > 150.0, "two replicas of about 100 tokens/s"


def test_behind_a_barrier_waiting_is_by_design():
    assert trained("sync") is None
