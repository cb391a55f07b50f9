"""Other settings for a run that is resumed: from the event on control decides by them, and so does a replay."""

from __future__ import annotations

from drive import Drive, config, only, published
from tailrace.config.resuming import differences, fixed, goes_further, replaced
from tailrace.config.tree import Config, EvalSettings, Run, TaskSettings, Trainer
from tailrace.control.plane import ControlPlane
from tailrace.protocol import ControllerRestarted, EvalSetsOpened, SettingsChanged, Stop, Train, TrainerJoined
from tailrace.scoring import EvalSet


def ended() -> Drive:
    """After its only step."""
    drive = Drive(config("sync", run=Run(steps=1)), replicas=1).join_all()
    drive.finish_all()
    assert only(drive.train(), Stop).reason == "all steps are done"
    return drive


def test_a_run_that_had_ended_goes_on_for_more_steps() -> None:
    drive = ended()
    assert only(drive.tell(ControllerRestarted()), Stop), "as long as it has no more to do"
    drive.tell(SettingsChanged({"run.steps": 2}))
    assert not [each for each in drive.tell(ControllerRestarted()) if isinstance(each, Stop)]
    drive.tell(TrainerJoined(2, 1))
    assert published(drive)[-1][0] == 1, "what the last step made was never published"
    drive.store_everywhere(1)
    drive.join(0, incarnation=2, version=1)
    drive.finish_all()
    assert drive.orders(Train)[-1].step == 1
    assert only(drive.train(), Stop).reason == "all steps are done"


def test_another_setting_does_not_wake_a_run_that_is_over() -> None:
    drive = ended()
    assert not drive.tell(SettingsChanged({"trainer.kl": 0.5}))
    assert only(drive.tell(ControllerRestarted()), Stop)


def test_what_has_changed_is_in_a_snapshot() -> None:
    drive = ended()
    begun = drive.plane.config
    drive.tell(SettingsChanged({"run.steps": 5, "trainer.learning_rate": 1e-3}))
    again = ControlPlane.restore(begun, drive.plane.snapshot())
    assert (again.config, again.config.run.steps) == (drive.plane.config, 5)
    assert again.config.trainer.learning_rate == 1e-3


def test_differences_are_of_what_may_change_and_can_be_put_back() -> None:
    before = Config(trainer=Trainer(kl=0.1, cards=(0,)), run=Run(steps=3))
    now = Config(trainer=Trainer(kl=0.2, cards=(1, 2), mini_batches=2), run=Run(steps=4, seed=1))
    changed = differences(before, now)
    assert changed == {"trainer.kl": 0.2, "trainer.cards": (1, 2), "run.steps": 4}
    assert replaced(before, changed) == Config(trainer=Trainer(kl=0.2, cards=(1, 2)), run=Run(steps=4))
    assert fixed(before, now) == ["trainer.mini_batches", "run.seed"]


def test_more_steps_more_prompts_or_more_patience_are_further() -> None:
    one = Config(run=Run(steps=3), task=TaskSettings(epochs=2))
    assert goes_further(one, Config(run=Run(steps=4), task=TaskSettings(epochs=2)))
    assert goes_further(one, Config(run=Run(steps=3), task=TaskSettings(epochs=0)))
    assert not goes_further(one, Config(run=Run(steps=3), task=TaskSettings(epochs=1)))
    patient = [Config(run=Run(steps=3), eval=EvalSettings(every=1, patience=n)) for n in (0, 1, 2)]
    assert [goes_further(patient[1], each) for each in patient] == [True, False, True]
    assert not goes_further(patient[0], patient[2])


def test_a_run_whose_end_waits_for_an_evaluation_goes_on_for_more_steps() -> None:
    drive = Drive(config("sync", run=Run(steps=1), eval=EvalSettings(every=1)), replicas=1)
    drive.tell(EvalSetsOpened((EvalSet("held_out", 2),)))
    drive.join_all()
    drive.finish_all()
    drive.train()
    state = drive.plane.state
    assert (state.stopped, state.evaluation.ending) == ("", "all steps are done")
    drive.tell(SettingsChanged({"run.steps": 2}))
    drive.tell(ControllerRestarted())
    assert not state.evaluation.ending
    assert state.training.step == 1, "it is at its next step"
