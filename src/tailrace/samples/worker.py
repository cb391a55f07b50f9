"""The process of one sample store: a server for replicas and trainer ranks, and a link over which control directs it.

Consumes `Assigned`, `Reconcile`, `FetchPrompts` and `Forget`; produces `StoreJoined`, `PromptsAdded` (once the prompts
are durable), `SamplesLost` and `Accused`. It is started again on its file, and goes on where that ends.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

from tailrace.envs.inputs import recorded
from tailrace.envs.sources import Later, PromptSource
from tailrace.model.load import vocabulary_of
from tailrace.protocol import FetchPrompts, Forget, PromptsAdded, SamplesLost, StoreJoined
from tailrace.samples.file import SampleFile, sample_file
from tailrace.samples.messages import CompletionLimits
from tailrace.samples.server import SampleServer
from tailrace.store.folder import refuse_moved
from tailrace.store.journal import Journal
from tailrace.types import Prompt, TrajectoryId
from tailrace.wire import descriptors
from tailrace.wire.keys import sample_key
from tailrace.wire.link import Link
from tailrace.wire.messages import LOOPBACK, Accused, Assigned, Ended, Introduce, Ordered, Reconcile, Spec
from tailrace.wire.tls import Identity, own_address

PATIENCE_S = 0.5  # orders wake the loop; this bounds how late an error of another thread is seen
NO_FOLDER = (0, 0)  # of a spec that does not say which directory it means


def run(spec: Spec) -> None:
    descriptors.raise_limit()
    StoreWorker(spec).run()


class StoreWorker:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.archive = spec.config.run.archive
        self.link = Link(spec)
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()  # of the server's threads
        self.server = _server(spec, lambda name, reason: self.link.send(Accused(name, reason)), self._errors.put)
        self._rendering = ThreadPoolExecutor(1, "prompts")  # opening a large task must not keep control waiting

    def run(self) -> None:
        self.server.start()
        self.link.open(address=self.server.address)
        self._join()
        try:
            while self._obey():
                self._raise_what_broke()
        finally:
            self._rendering.shutdown(cancel_futures=True)
            self.server.close()
            self.link.close()

    def _join(self) -> None:
        """At the beginning, and whenever there is a new controller."""
        self.link.report(StoreJoined(self.spec.id, self.link.incarnation))

    def _raise_what_broke(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()

    # ------------------------------------------------------------------------------------------------------- orders

    def _obey(self) -> bool:
        for message in self.link.receive(PATIENCE_S):
            match message:
                case Ended():
                    return False
                case Introduce():
                    self._join()
                case Assigned(grants):
                    self.server.assign(grants)
                case Reconcile(grants, keep):
                    self.server.reconcile(grants, keep, self.archive, self._reconciled)
                case Ordered(Forget(trajectories)):
                    self.server.forget(trajectories, self.archive)
                case Ordered(FetchPrompts() as order):
                    self._rendering.submit(self._fetch_prompts, order)
                case _:
                    pass  # for other roles
        return True

    def _reconciled(self, missing: list[TrajectoryId]) -> None:
        if missing:
            self.link.report(SamplesLost(self.spec.id, self.link.incarnation, tuple(missing)))

    # ------------------------------------------------------------------------------------------------------ prompts

    @cached_property
    def _source(self) -> PromptSource:
        """Opened with the first order. It has to be the one that the run began with."""
        return Later(self.spec.config, recorded(Journal(Path(self.spec.folder)).meta))

    def _fetch_prompts(self, order: FetchPrompts) -> None:
        try:
            total = self._source.total
            count = order.count if total is None else max(0, min(order.count, total - order.start))
            rows = self._source.rows(order.start, count)
        except Exception as error:
            self._errors.put(error)
            return
        prompts = tuple([Prompt(row.id, row.length) for row in rows])
        last = total is not None and order.start + count >= total
        self.server.add_prompts(rows, partial(self.link.report, PromptsAdded(order.start, prompts, last)))


def _server(spec: Spec, accuse: Callable[[str, str], None], broken: Callable[[BaseException], None]) -> SampleServer:
    folder, key, host = Path(spec.folder), bytes.fromhex(spec.key), own_address(spec.listen)
    if spec.folder_id != NO_FOLDER:
        refuse_moved(folder, spec.folder_id)
    limits = CompletionLimits(vocabulary_of(spec.config), spec.config.workload.max_completion_tokens)
    identity = None if host == LOOPBACK else Identity()
    file = SampleFile.at(sample_file(folder, spec.id))
    return SampleServer(file, partial(sample_key, key), accuse, broken, limits, identity, host)
