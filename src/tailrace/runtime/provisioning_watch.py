"""Whether a running fleet is provisioned so that its trainer need not wait: the rule of `control/provisioning.py`, on
what the controller sees.

`see` takes in events and commands in order and answers with a sentence when the trainer has waited for several steps in
a row and the rule says why; again only after it has stopped waiting. For schedules that generate continuously: in
rounds, waiting is meant.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.config.tree import Config
from tailrace.control.provisioning import Provisioning, advice_on
from tailrace.control.schedules import traits
from tailrace.protocol import Command, Event, Finished, Forget, Generate, Train, Trained, VersionStored
from tailrace.types import TrajectoryId, Version

WAITS = 0.1  # share of a step's time
STEPS = 3  # in a row: a pipeline takes some to fill
KEPT = 16  # published versions: later arrivals are not counted
NEWEST = 0.1  # weight of the newest sample in the time that one takes


class ProvisioningWatch:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.traits = traits(config)
        self._told = False
        self._waited = 0  # steps in a row
        self._ordered_at = self._made_at = self._busy_s = 0.0
        self._made: dict[Version, float] = {}  # that may still be on their way
        self._broadcast: tuple[Version, float] = (
            -1,
            0.0,
        )  # the newest on relays, and until the last had it
        self._sample_s = 0.0
        self._finished = 0  # samples, in this step
        self._started: dict[TrajectoryId, float] = {}

    def see(self, now: float, event: Event, commands: Iterable[Command]) -> str:
        """What to write to the log; mostly nothing."""
        if self.traits.rounds:
            return ""
        advice = ""
        match event:
            case Finished(meta=meta):
                self._note_finished(now, meta.id)
            case VersionStored(version=version) if version in self._made:
                self._broadcast = max(self._broadcast, (version, now - self._made[version]))
            case Trained(step=step, mini_batch=mini_batch):
                self._busy_s += now - self._ordered_at
                if mini_batch + 1 == self.config.trainer.mini_batches:
                    advice = self._step_made(now, step + 1)
            case _:
                pass
        self._note_orders(now, commands)
        return advice

    def _note_orders(self, now: float, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Generate):
                for request in command.requests:
                    self._started.setdefault(request.trajectory, now)
            elif isinstance(command, Forget):
                for trajectory in command.trajectories:
                    self._started.pop(trajectory, None)
            elif isinstance(command, Train):
                self._ordered_at = now

    def _note_finished(self, now: float, trajectory: TrajectoryId) -> None:
        began = self._started.pop(trajectory, None)
        if began is not None:
            self._finished += 1
            self._sample_s += (NEWEST if self._sample_s else 1.0) * (now - began - self._sample_s)

    def _step_made(self, now: float, version: Version) -> str:
        rule, waited = self._rule(now), 1.0 - self._busy_s / max(now - self._made_at, 1e-9)
        self._waited = self._waited + 1 if waited > WAITS else 0
        oldest = version - KEPT * self.config.schedule.publish_every
        self._made = {made: at for made, at in self._made.items() if made > oldest} | {version: now}
        self._made_at, self._busy_s, self._finished = now, 0.0, 0
        if self._waited < STEPS or self._told or rule is None:
            self._told = self._told and self._waited > 0
            return ""
        advice = next(advice_on(rule, "samples"), "")
        self._told = bool(advice)
        return advice and f"the trainer waits {100 * waited:.0f} % of the time: {advice}"

    def _rule(self, now: float) -> Provisioning | None:
        """By what was seen in the last step; None: too little."""
        if not self._busy_s or not self._finished or not self._made_at:
            return None
        return Provisioning(
            work=self.config.workload.trajectories_per_step,
            rate=self._finished / (now - self._made_at),
            step_s=self._busy_s,
            broadcast_s=self._broadcast[1],
            generate_s=self._sample_s,
            staleness=self.config.schedule.max_staleness,
            publish_every=self.config.schedule.publish_every,
            picks=self.config.trainer.waits if self.traits.streams else 1,
        )
