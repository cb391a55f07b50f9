"""How much is kept under way: what the trainer needs."""

from tailrace.control.pacing import Pacing

MOST, STEP, MINI = 1024, 128, 32


def made(pacing, step, spare=None, starved=False):
    if spare is not None:
        pacing.picked(spare)
    pacing.starved = starved
    pacing.step_made(step, MOST, STEP, MINI)
    return pacing.limit


def test_what_no_pick_needed_is_not_kept_under_way():
    pacing = Pacing()
    limits = [made(pacing, step, spare=300) for step in range(1, 30)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] < MOST / 2


def test_a_trainer_that_waits_gets_all_that_admission_allows():
    pacing = Pacing(limit=200.0)
    limits = [made(pacing, step, spare=0, starved=True) for step in range(1, 60)]
    assert limits[-1] == MOST


def test_a_raise_is_given_time_before_the_next():
    pacing = Pacing(limit=512.0)
    first = made(pacing, 1, spare=0, starved=True)
    assert first > 512
    assert made(pacing, 2, spare=0, starved=True) == first


def test_what_was_left_over_only_now_and_then_is_kept():
    pacing = Pacing(limit=512.0)
    spares = [400, 400, 400, 0, 400] * 6
    assert [made(pacing, step, spare=spare) for step, spare in enumerate(spares, 1)] == [512.0] * len(spares)


def test_a_trainer_that_waited_is_remembered_for_as_long_as_work_is_under_way():
    pacing = Pacing(limit=256.0, settled_at=100)
    made(pacing, 1, starved=True)
    limits = [made(pacing, step, spare=400) for step in range(2, 9)]
    assert limits[:3] == [256.0] * 3
    assert limits[-1] < 256


def test_a_reserve_and_a_step_stay():
    pacing = Pacing(limit=512.0)
    assert [made(pacing, step, spare=2 * MINI) for step in range(1, 9)] == [512.0] * 8
    for step in range(9, 400):
        made(pacing, step, spare=1000)
    assert pacing.limit == STEP
