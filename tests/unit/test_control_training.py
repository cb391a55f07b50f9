"""The trainer repeats exactly what its checkpoint lacks, versions never go back, and payloads live until then."""

import pytest

from drive import Drive, config, only, published
from tailrace.config.tree import Run, Schedule, Trainer
from tailrace.protocol import Checkpointed, Forget, PromptsAdded, Stop, Train, Trained, TrainerJoined, TrainerLost
from tailrace.types import Prompt


def driven(steps=0, **sections):
    """After so many steps, with the groups of the next one ready or being generated."""
    drive = Drive(config(**{"schedule": Schedule(max_staleness=4, max_inflight=4), **sections}), replicas=1).join_all()
    for _ in range(steps):
        train_a_step(drive)
    return drive


def train_a_step(drive):
    version = drive.plane.state.training.version
    while drive.plane.state.training.version == version:
        while not drive.plane.state.training.busy:
            drive.finish_all()
        drive.train()
    drive.store_everywhere(version + 1)
    if drive.plane.state.pulling:
        drive.load(0)


def test_a_trainer_from_an_older_checkpoint_repeats_the_same_mini_batches():
    drive = driven(steps=2)
    first, second = drive.orders(Train)[:2]
    drive.tell(TrainerLost(1, "it died"))
    repeated = [only(drive.tell(TrainerJoined(2, 0)), Train)]
    repeated.append(only(drive.train(), Train))
    assert [(one.step, one.mini_batch, one.groups) for one in repeated] == [
        (one.step, one.mini_batch, one.groups) for one in (first, second)
    ]
    assert drive.plane.state.training.version == 2
    trained = drive.plane.state.ledger.tally.trained
    drive.train()
    assert drive.plane.state.ledger.tally.trained == trained == 4


def test_published_versions_never_go_back():
    drive = driven(steps=2)
    drive.tell(TrainerJoined(2, 0))
    while drive.plane.state.training.picked:
        drive.train()
    versions = [version for version, _ in published(drive)]
    assert versions == sorted(versions)


def test_payloads_are_kept_until_two_checkpoints_cover_them():
    drive = driven(steps=2)
    drive.tell(Checkpointed(1, 1))
    drive.tell(Checkpointed(1, 1))
    assert not drive.orders(Forget), "should that one be damaged, step 0 has to be trained again"
    commands = drive.tell(Checkpointed(1, 2))
    step_0 = [id for group in drive.orders(Train)[0].groups for id in group.trajectories]
    assert sorted(only(commands, Forget).trajectories) == sorted(step_0)


def test_a_checkpoint_that_overtakes_the_report_of_its_step_frees_nothing_too_early():
    drive = driven(steps=1)
    drive.tell(Checkpointed(1, 2))
    assert (drive.plane.state.training.saved, drive.plane.state.training.durable) == (1, 0)


def test_a_mini_batch_counts_once_and_only_from_the_living_trainer():
    drive = driven(trainer=Trainer(mini_batches=2))
    while not drive.orders(Train):
        drive.finish_all()
    drive.tell(Trained(0, 0, 0))
    drive.tell(Trained(1, 0, 1))
    assert drive.plane.state.training.busy
    drive.tell(Trained(1, 0, 0))
    drive.tell(Trained(1, 0, 0))
    assert (drive.plane.state.training.step, drive.plane.state.training.mini_batch) == (0, 1)


def test_what_the_trainer_did_before_its_report_was_lost_is_caught_up_with():
    drive = driven(steps=1)
    while not drive.plane.state.training.busy:
        drive.finish_all()
    drive.tell(TrainerJoined(2, 2))  # it has trained step 1, saved it and died
    assert drive.plane.state.training.version == 2
    assert drive.plane.state.ledger.tally.trained == 4


@pytest.mark.parametrize(("step", "part"), [(7, 0), (1, 3), (2, 0)])
def test_a_trainer_with_steps_that_nobody_ordered_ends_the_run(step, part):
    drive = driven(steps=1)
    assert "never told to train" in only(drive.tell(TrainerJoined(2, step, part)), Stop).reason


def test_a_run_survives_the_loss_of_its_newest_checkpoint_again_and_again():
    drive = driven(steps=2)
    for step in (1, 2):
        drive.tell(Checkpointed(1, step))
    for incarnation in (2, 3):
        repeated = only(drive.tell(TrainerJoined(incarnation, 1)), Train)
        assert repeated.groups == drive.orders(Train)[1].groups
        drive.train()
        drive.tell(Checkpointed(incarnation, 2))
    assert drive.plane.state.training.version == 2
    assert [version for version, _ in published(drive)] == [0, 1, 2], "what the relays hold is not made again"


def test_a_trainer_without_its_two_newest_checkpoints_ends_the_run():
    drive = driven(steps=2)
    drive.tell(Checkpointed(1, 1))
    drive.tell(Checkpointed(1, 2))
    assert "checkpoints of step 1 and later are gone" in only(drive.tell(TrainerJoined(2, 0)), Stop).reason


def test_the_run_ends_after_its_last_step():
    drive = driven(run=Run(steps=1))
    while not drive.orders(Train):
        drive.finish_all()
    assert only(drive.train(), Stop).reason == "all steps are done"
    assert drive.tick() == []


def stopped_after_three_prompts(**settings) -> Stop:
    drive = Drive(config(schedule=Schedule(max_inflight=4), **settings), replicas=1)
    drive.tell(PromptsAdded(0, tuple(Prompt(id, 10) for id in range(3)), last=True))
    drive.join_all()
    for _ in range(3):
        drive.finish_all()
        if drive.plane.state.training.busy:
            drive.train()
    return drive.orders(Stop)[-1]


def test_a_source_that_runs_dry_ends_the_run_and_says_what_is_left():
    stop = stopped_after_three_prompts()
    assert stop.reason == "the prompts ran out after 1 step: 1 group left over, too few for one more of 2"
    assert not stop.failed


def test_prompts_that_ran_out_in_the_middle_of_a_step_are_counted_too():
    stop = stopped_after_three_prompts(prompts=4, trainer=Trainer(mini_batches=2))
    assert "after 0 steps: 3 groups left over, too few for one more of 4, 2 of them trained" in stop.reason
    assert stop.failed, "a run that made no version has trained nothing"
