"""How much is kept under way: what the trainer needs."""

from drive import Drive, config
from tailrace.config.tree import Schedule
from tailrace.control.pacing import Pacing
from tailrace.protocol import TrainerJoined, TrainerLost

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


def test_a_dead_trainer_does_not_limit_what_is_under_way():
    drive = Drive(config(prompts=4, schedule=Schedule(kind="trajectory", max_staleness=8))).join_all()
    drive.plane.state.pacing.limit = 4.0
    context = drive.plane._context
    before = context.admits()
    drive.tell(TrainerLost(context.training.incarnation, "killed"))
    assert context.admits() > before + 8
    drive.tell(TrainerJoined(2, 0, 0))
    assert context.admits() <= before
