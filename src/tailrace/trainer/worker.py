"""The process of one trainer rank: trains what it is given, publishes what came of it, writes checkpoints.

Rank 0 talks to the controller; the other ranks hear from it what to do. Consumes `Train` and `Publish`; produces
`Trained`, `Checkpointed`, `PublishFailed` and metrics. The only stall of a publication is the copy into the publisher's
buffer, of its own rows by every rank: the streams to the relays run beside the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tailrace.protocol import (
    Checkpointed,
    KeepCheckpoints,
    Publish,
    PublishFailed,
    Train,
    Trained,
    TrainerJoined,
    TrainFailed,
)
from tailrace.samples.client import SampleClient, SampleStoreError
from tailrace.samples.messages import SampleLength
from tailrace.store.folder import refuse_moved
from tailrace.trainer.divergence import DivergedError, Divergence, put_aside_after, way_back
from tailrace.trainer.manifest import CheckpointError
from tailrace.trainer.pace import CheckpointPace
from tailrace.trainer.rank_group import RankGroup, build_rank_group
from tailrace.trainer.reader import SampleInfo, sample_infos
from tailrace.trainer.sending import PublishRoute
from tailrace.trainer.spared import SparedSteps
from tailrace.types import StoreId, TrajectoryId, Version
from tailrace.wire.client import ControlClient
from tailrace.wire.messages import (
    Collapsed,
    ComponentSpec,
    Ended,
    FromController,
    Introduce,
    Ordered,
    StoreAddresses,
    is_marked,
)

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # orders wake the loop; this only bounds how long it sleeps


def run(spec: ComponentSpec) -> None:
    """After an error the other ranks are not told to leave: they may be in the middle of anything, or hang, and see
    that this one has ended. Only a divergence is noticed while they wait for the next command."""
    rank_group = build_rank_group(spec)
    try:
        if spec.rank:
            rank_group.follow()
        else:
            TrainerWorker(spec, rank_group).run()
    except DivergedError:
        rank_group.close()
        raise
    except RuntimeError as error:
        raise explained(error, spec.config.trainer.collective_s) from error
    rank_group.close()


def explained(error: RuntimeError, deadline_s: float) -> RuntimeError:
    """What gloo and NCCL say of a rank that hangs, for people."""
    if "Timed out" not in str(error) and "timeout" not in str(error).lower():
        return error
    late = f"a collective took longer than {deadline_s:g} s (trainer.collective_s), so another rank hangs"
    return RuntimeError(f"{late}, or the network between them: {error}")


class TrainerWorker:
    def __init__(self, spec: ComponentSpec, rank_group: RankGroup) -> None:
        self.spec = spec
        self.checkpoints = Path(spec.folder) / "checkpoints"
        self.rank_group = rank_group
        self._refuse_moved()
        self.step = rank_group.restore(self.checkpoints, spec.step)
        self.began_at: Version = self.step
        self.saved: Version = self.step
        every, publish_every = spec.config.trainer.checkpoint_every, spec.config.schedule.publish_every
        self.pace = CheckpointPace(every, publish_every, rank_group.checkpoint_bytes, time.monotonic())
        self.spared = SparedSteps(spec.config.eval.every if spec.config.eval.keep_best else 0)
        self.mini_batch = 0
        self.samples = SampleClient(spec.name)
        self.divergence = Divergence()
        self.controller = ControlClient(spec, find_stores=self._find_stores)

    def run(self) -> None:
        self.rank_group.snapshot(self.step)
        self.samples.open()
        self.controller.open()
        self._join()
        try:
            while all(self._obey(message) for message in self.controller.receive(PATIENCE_S)):
                pass
        except DivergedError as error:  # said before the other ranks leave: their end would count as a loss
            self.controller.send(Collapsed(str(error), expected=True))
            raise
        finally:
            self.samples.close()
            self.controller.close()

    def _find_stores(self, stores: StoreAddresses) -> None:
        """In the link's thread, at once: a rank may be waiting for one that has moved."""
        self.samples.find(stores)
        self.rank_group.find_stores(stores)

    def _join(self) -> None:
        """Say what is in the weights, at the beginning and whenever there is a new controller."""
        self.controller.report(TrainerJoined(self.controller.incarnation, self.step, self.mini_batch))

    def _obey(self, message: FromController) -> bool:
        if isinstance(message, Ended):
            self._finish(message.complete)
            return False
        if isinstance(message, Introduce):
            self._join()
            return True
        match message:
            case Ordered(Train() as command):
                self._train(message, command)
            case Ordered(Publish() as command):
                self._publish(message, command)
            case Ordered(KeepCheckpoints() as command):
                self.spared = self.spared.judge(command.versions, command.judged)
            case other:
                raise AssertionError(f"not for a trainer: {other}")
        return True

    def _finish(self, complete: bool) -> None:
        """The newest checkpoint of a run that is complete is the one that people use; others are resumed from it."""
        if self.divergence.in_a_row:
            if complete:
                put_aside_after(self.checkpoints, self.divergence.good)
        elif self.mini_batch == 0 and self.step > self.saved and (complete or self.pace.may_save(self.step)):
            self._save()

    def _train(self, order: Ordered, command: Train) -> None:
        began, cpu = time.monotonic(), time.process_time()
        try:
            samples = self._describe(command, order)
            measured = self.rank_group.train(command.step, command.mini_batch, samples, self.samples)
        except SampleStoreError as error:
            self.controller.report(
                TrainFailed(self.controller.incarnation, command.step, command.mini_batch, str(error))
            )
            return
        tokens = sum(info.length for info in samples)
        measured |= {
            "trainer/seconds": time.monotonic() - began,
            "trainer/cpu_s": time.process_time() - cpu,
            "trainer/tokens": float(tokens),
        }
        self.controller.measure(command.step, measured)
        self._watch(command, measured)
        self.mini_batch = 0 if command.last else command.mini_batch + 1
        self.step = command.step + 1 if command.last else command.step
        if command.last:
            self._snapshot()
        self.controller.report(Trained(self.controller.incarnation, command.step, command.mini_batch))
        self.pace.trained(len(samples), tokens)
        if command.last and not measured.get("skipped") and self._is_to_be_saved():
            self._save()

    def _is_to_be_saved(self) -> bool:
        """Also what may turn out to be one of the best."""
        return self.spared.is_candidate(self.step) or self.pace.is_due(self.step, time.monotonic())

    def _describe(self, command: Train, order: Ordered) -> tuple[SampleInfo, ...]:
        """All that the plan of a mini-batch needs: lengths from the stores, the rest from the controller."""
        stores = {id: store for group in command.groups for id, store in group.located()}
        return sample_infos(command, order, {one.id: one for one in self._lengths(stores)})

    def _lengths(self, stores: Mapping[TrajectoryId, StoreId]) -> Iterator[SampleLength]:
        for store in sorted(set(stores.values())):
            yield from self.samples.lengths([id for id, at in stores.items() if at == store], store)

    def _watch(self, command: Train, measured: Mapping[str, float]) -> None:
        """Weights that have diverged are neither published nor saved, and training them again would change nothing."""
        trouble = self.divergence.see(command.step, measured)
        if not trouble:
            return
        log.warning("%s", trouble)
        if self.divergence.is_final:
            rate = self.spec.config.trainer.learning_rate
            advice = way_back(self.checkpoints, self.divergence.good, self.began_at == 0, rate)
            raise DivergedError(f"{trouble}; {advice}")

    def _snapshot(self) -> None:
        """Keep this version as it is: it may have to be published, now or again, while training goes on."""
        if self.step % self.spec.config.schedule.publish_every == 0:
            stall = self.rank_group.snapshot(self.step)
            self.controller.measure(self.step, {"publish/stall_s": stall})

    def _publish(self, order: Ordered, command: Publish) -> None:
        def give_up(version: Version, reason: str) -> None:
            self.controller.report(PublishFailed(self.controller.incarnation, version, command.relay, reason))

        self.rank_group.publish(command.version, PublishRoute(command.relay, order.addresses), give_up)

    def _refuse_moved(self) -> None:
        """Checkpoints are read and written by name: there may be another run of that name by now, or another trainer of
        this one, if this machine was cut off."""
        refuse_moved(Path(self.spec.folder), self.spec.folder_id)
        if self.spec.folder_mark and not is_marked(self.spec):
            raise CheckpointError(f"another trainer writes checkpoints in {self.spec.folder} by now")

    def _save(self) -> None:
        self._refuse_moved()
        began = time.monotonic()
        self.rank_group.save(self.checkpoints, self.step, self.divergence.good, self.spared)
        self.saved = self.step
        ended = time.monotonic()
        self.pace.saved(ended, ended - began)
        self.controller.measure(self.step, {"checkpoint/stall_s": ended - began})
        self.controller.report(Checkpointed(self.controller.incarnation, self.step))
