"""The process of one sample store: a server for replicas and trainer ranks, and a client of the controller, which
directs it.

Consumes `Assigned`, `Reconcile`, `FetchPrompts` and `Forget`; produces `StoreJoined`, `PromptsAdded` (once the prompts
are durable), `SamplesLost` and `Accused`. It is started again on its file, and goes on where that ends.

A store has the prompts of its samples: the first one renders them, the others get them from it. An assignment whose
prompt is missing waits for that, and everything after it.
"""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

from tailrace.envs.inputs import recorded
from tailrace.envs.sources import Later, PromptSource
from tailrace.model.load import vocabulary_of
from tailrace.protocol import Dismiss, FetchPrompts, Forget, PromptsAdded, SamplesLost, StoreJoined
from tailrace.samples.client import SampleClient
from tailrace.samples.file import SampleFile
from tailrace.samples.messages import CompletionLimits
from tailrace.samples.schema import sample_file
from tailrace.samples.server import SampleServer
from tailrace.store.folder import refuse_moved
from tailrace.store.journal import Journal
from tailrace.types import Prompt, PromptId, Row, TrajectoryId
from tailrace.wire import descriptors
from tailrace.wire.client import ControlClient
from tailrace.wire.keys import sample_key, signed_receipt
from tailrace.wire.messages import (
    LOOPBACK,
    Accused,
    Assigned,
    ComponentSpec,
    Ended,
    Grant,
    Introduce,
    Ordered,
    Reconcile,
)
from tailrace.wire.tls import Identity, own_address

PATIENCE_S = 0.5  # orders wake the loop; this bounds how late an error of another thread is seen
NO_FOLDER = (0, 0)  # of a spec that does not say which directory it means
FIRST = 0
GARBAGE = 100_000  # new objects before cycles are looked for: a commit makes thousands of rows, and none is in one


def run(spec: ComponentSpec) -> None:
    descriptors.raise_limit()
    gc.set_threshold(GARBAGE)
    StoreWorker(spec).run()


class StoreWorker:
    def __init__(self, spec: ComponentSpec) -> None:
        self.spec = spec
        self.archive = spec.config.run.archive
        self._others = SampleClient(spec.name)
        self.controller = ControlClient(spec, find_stores=self._others.find)
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()  # of the server's threads
        self.server = _server(spec, self._accuse, self._errors.put, self._report_lost)
        self._orders = ThreadPoolExecutor(1, "orders")
        self._rendering = ThreadPoolExecutor(1, "prompts")  # opening a large task must not keep control waiting

    def run(self) -> None:
        self.server.start()
        self._others.open()
        self.controller.open(address=self.server.address)
        self._join()
        try:
            while self._obey():
                self._raise_what_broke()
        finally:
            self._others.close(0.0)
            self._orders.shutdown()
            self._rendering.shutdown(cancel_futures=True)
            self.server.close()
            self.controller.close()

    def _join(self) -> None:
        """At the beginning, and whenever there is a new controller."""
        self.controller.report(StoreJoined(self.spec.id, self.controller.incarnation))

    def _raise_what_broke(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()

    def _accuse(self, component: str, reason: str) -> None:
        self.controller.send(Accused(component, reason))

    def _report_lost(self, trajectories: list[TrajectoryId]) -> None:
        if trajectories:
            self.controller.report(SamplesLost(self.spec.id, self.controller.incarnation, tuple(trajectories)))

    # ----------------------------------------------------------------------------------------------------------- orders

    def _obey(self) -> bool:
        for message in self.controller.receive(PATIENCE_S):
            match message:
                case Ended():
                    return False
                case Introduce():
                    self._join()
                case Assigned(grants):
                    self._submit(self._orders, self._assign, grants)
                case Reconcile() as order:
                    self._submit(self._orders, self._reconcile, order)
                case Ordered(Forget(trajectories)):
                    self._submit(self._orders, self.server.forget, trajectories, self.archive)
                case Ordered(Dismiss(worker)):
                    self.server.expel(worker)
                case Ordered(FetchPrompts() as order):
                    self._submit(self._rendering, self._fetch_prompts, order)
                case _:
                    pass  # for other roles
        return True

    def _submit(self, thread: ThreadPoolExecutor, carry_out: Callable[..., None], *values: object) -> None:
        """In their order, and beside this loop: one that has to wait for prompts must not keep control waiting."""

        def attempt() -> None:
            try:
                carry_out(*values)
            except Exception as error:  # the border of the thread: the loop raises it
                self._errors.put(error)

        thread.submit(attempt)

    def _assign(self, grants: tuple[Grant, ...]) -> None:
        self._bring({grant.prompt for grant in grants})
        self.server.assign(grants)

    def _reconcile(self, order: Reconcile) -> None:
        self._bring({*order.prompts, *[grant.prompt for grant in order.grants]})
        self.server.reconcile(order, self.archive, self._report_lost)

    # ---------------------------------------------------------------------------------------------------------- prompts

    @cached_property
    def _source(self) -> PromptSource:
        """Opened with the first order. It has to be the one that the run began with."""
        return Later(self.spec.config, recorded(Journal(Path(self.spec.folder)).meta))

    def _bring(self, prompts: set[PromptId]) -> None:
        """Those that are missing, ahead of whatever is done next."""
        missing = sorted(prompts - self.server.prompts)
        if missing:
            self.server.add_prompts(self._rows(missing), lambda: None)

    def _rows(self, prompts: list[PromptId]) -> list[Row]:
        """The first store lacks what it has rendered only if its file was lost."""
        if self.spec.id != FIRST:
            return self._others.rows(prompts, FIRST)
        return self._rendering.submit(lambda: [row for id in prompts for row in self._source.rows(id, 1)]).result()

    def _fetch_prompts(self, order: FetchPrompts) -> None:
        total = self._source.total
        count = order.count if total is None else max(0, min(order.count, total - order.start))
        rows = self._source.rows(order.start, count)
        prompts = tuple([Prompt(row.id, row.length, self._source.number(row.id)) for row in rows])
        last = total is not None and order.start + count >= total
        self.server.add_prompts(rows, partial(self.controller.report, PromptsAdded(order.start, prompts, last)))


def _server(
    spec: ComponentSpec,
    accuse: Callable[[str, str], None],
    broken: Callable[[BaseException], None],
    lost: Callable[[list[TrajectoryId]], None],
) -> SampleServer:
    folder, key, host = Path(spec.folder), bytes.fromhex(spec.key), own_address(spec.listen)
    if spec.folder_id != NO_FOLDER:
        refuse_moved(folder, spec.folder_id)
    limits = CompletionLimits(vocabulary_of(spec.config), spec.config.workload.max_completion_tokens)
    identity = None if host == LOOPBACK else Identity()
    file = SampleFile.at(sample_file(folder, spec.id), spec.run)
    sign = partial(signed_receipt, spec.name, key)
    return SampleServer(file, partial(sample_key, key), sign, accuse, broken, limits, identity, host, lost=lost)
