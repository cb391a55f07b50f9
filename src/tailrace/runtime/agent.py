"""A machine that works for a run elsewhere: `tailrace worker`. It starts the components that the controller wants here.

    agent       Offer(so many replicas and ranks; these components are here, those ended)      twice a second
    controller  Wanted(these components)

What is wanted and not here is started, what is here and not wanted is ended, as processes of this machine (`local`)
that hold the agent's lifeline: when it is gone, by whatever signal, so are they. A controller that was replaced is told
the same as the one before. One that is not heard of for long is given up.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tailrace.config import with_options
from tailrace.config.dealing import deal_elsewhere
from tailrace.config.tree import Config
from tailrace.errors import TailraceError
from tailrace.release import __version__
from tailrace.runtime.hosts import LONGEST
from tailrace.runtime.local import LocalProcesses, Process, how_it_ended, last_lines
from tailrace.store.folder import RunFolder, identity_of
from tailrace.types import Card
from tailrace.wire.client import ControlClient
from tailrace.wire.connection import check_join_key
from tailrace.wire.interfaces import interfaces
from tailrace.wire.keys import JoinKey, host_key
from tailrace.wire.messages import (
    OFFER_S,
    AbsentError,
    ComponentSpec,
    Dismissed,
    Ended,
    FromController,
    Offer,
    Wanted,
    shares_folder,
)

IN_ORDER = how_it_ended(0)
JOIN_CHECK_S = 10.0  # until the run must have let us in
SILENCE_S = 60.0  # without a word of the controller, which may have to be replaced
ENDING_S = 10.0  # for the components to leave
FAREWELL_S = 3.0  # for the controller to say that it has heard of our leaving


class AgentError(TailraceError):
    """Why this machine cannot work for the run, for the person who asked it to."""


class SilentError(AbsentError):
    """The run was there, and is not heard any more."""


class Room(NamedTuple):
    """What this machine has for a run. `store`: the folder for the tokens of what is generated here; None: they go to
    the run's own machine. `cards`: its GPUs, to be dealt here. `own`: settings of [rollout] for the replicas here, as
    options."""

    replicas: int
    ranks: int = 0
    store: Path | None = None
    cards: tuple[Card, ...] = ()
    own: tuple[str, ...] = ()
    site: str = ""  # where it is, if it is far away from the run


class Agent:
    def __init__(self, endpoint: str, key: JoinKey, room: Room, say: Callable[[str], None]) -> None:
        spec = ComponentSpec(
            "host",
            secrets.randbits(48),
            1,
            endpoint,
            key.token,
            "",
            Config(),
            fingerprint=key.fingerprint,
            worker=key.worker,
        )
        self._spec = replace(spec, key=host_key(key.token, spec.name).hex())
        check_join_key(endpoint, spec.name, host_key(key.token, spec.name), key.fingerprint, JOIN_CHECK_S)
        self._room = room
        self._say = say
        self._own, self._held = os.pipe()
        self._folder = Path(tempfile.mkdtemp(prefix="tailrace-worker-"))
        self._local = LocalProcesses(RunFolder(self._folder), 0, self._ended)
        self._components: dict[str, str] = {}  # by name; of those that ended, how
        self._controller = ControlClient(self._spec)
        self._heard_at = time.monotonic()
        self._silence_s = SILENCE_S  # after which the run is given up; with leases: no sooner than they end
        self._leaving = False
        self._over = self._trouble = ""
        self._ended_with_the_run = False  # then the components have been told
        self.resumable = False  # the run has stopped, and may go on later

    def interrupt(self) -> None:
        """Leave; the second time: at once."""
        if self._leaving:
            self._over = "left at once"
        self._leaving = True

    @property
    def interrupted(self) -> bool:
        return self._leaving

    async def run(self) -> str:
        """Until the run is over or `interrupt` is called. Returns why; `AgentError` if something is wrong."""
        self._controller.open()
        clean = False
        try:
            await self._serve()
            clean = True
        except (AgentError, SilentError) as error:
            self._trouble = str(error)[:LONGEST]
            raise
        finally:
            if not self._ended_with_the_run:
                self._offer(leaving=True)
            await self._local.end(self._local.processes.values(), ENDING_S if self._ended_with_the_run else 0.0)
            self._local.forget()
            self._controller.close()
            os.close(self._held)
            if clean or not self._local.processes:  # else somebody may want to read the logs
                shutil.rmtree(self._folder, ignore_errors=True)
        return self._over

    async def _serve(self) -> None:
        leave_at = float("inf")
        while not self._over:
            self._offer(self._leaving)
            if self._leaving:
                leave_at = min(leave_at, time.monotonic() + FAREWELL_S)
            if time.monotonic() > leave_at:
                self._over = "left"
            if time.monotonic() - self._last_sign_at > self._silence_s:
                silence = f"nothing was heard of the run for {self._silence_s:g} s"
                raise SilentError(f"{silence}; if it goes on, join it again")
            await self._listen(time.monotonic() + OFFER_S)

    @property
    def _last_sign_at(self) -> float:
        """Of the run. Who has just been let in again waits for the answer, however long it was cut off before."""
        return max(self._heard_at, self._controller.connected_at)

    def _offer(self, leaving: bool) -> None:
        room, networks = self._room, interfaces() if self._room.ranks else {}
        offer = Offer(__version__, room.replicas, room.store is not None, self._components, room.ranks, networks)
        self._controller.offer(replace(offer, leaving=leaving, reason=self._trouble, site=room.site))

    async def _listen(self, until: float) -> None:
        """Between two offers. Something that changes here is worth one at once."""
        leaving, components = self._leaving, dict(self._components)
        while (
            time.monotonic() < until and not self._over and (leaving, components) == (self._leaving, self._components)
        ):
            for message in self._controller.listen(0):
                self._heard_at = time.monotonic()
                self._obey(message)
            await asyncio.sleep(0.05)

    def _obey(self, message: FromController) -> None:
        if isinstance(message, Ended):
            self._over = "the run is complete" if message.complete else "the run has stopped"
            self._ended_with_the_run = True
            self.resumable = not message.complete
        elif isinstance(message, Dismissed):
            raise AgentError(message.reason)
        elif isinstance(message, Wanted) and self._leaving and not message.names:
            self._over = "left"
        elif isinstance(message, Wanted) and not self._leaving:
            self._bring_about(message)

    def _bring_about(self, wanted: Wanted) -> None:
        names = set(wanted.names)
        for process in list(self._local.processes.values()):
            if process.spec.name not in names:
                process.kill()
                del self._local.processes[process.spec.slot]
        self._components = {name: how for name, how in self._components.items() if name in names}
        for spec in wanted.specs:
            if spec.name not in self._components:
                self._silence_s = max(self._silence_s, spec.config.health.lease_s)
                _refuse_missing_model(spec.config)
                if spec.worker:
                    _refuse_own_draws(self._of_replicas(spec.config))
                if spec.role == "trainer":
                    _refuse_missing_torch()
                    _refuse_other_folder(spec)
                self._deal(spec.config)
                self._start(self._at_home(spec))

    def _deal(self, config: Config) -> None:
        room = self._room
        self._local.deal = deal_elsewhere(self._of_replicas(config), room.cards, room.replicas, room.ranks)

    def _start(self, spec: ComponentSpec) -> None:
        """What cannot be started now is still wanted with the next answer."""
        try:
            self._local.start(spec)
            self._welcomed(spec)
            self._components[spec.name] = ""
        except OSError as error:
            self._say(f"{_title(spec)} cannot be started ({error.strerror}); it is tried again")

    def _welcomed(self, spec: ComponentSpec) -> None:
        if not self._components:
            where = self._spec.endpoint.removeprefix("tcp://")
            self._say(f"joined the run at {where} as host {spec.host}; logs are in {self._folder / 'logs'}")

    def _at_home(self, spec: ComponentSpec) -> ComponentSpec:
        """The same with what is different on this machine."""
        listen = spec.listen if "/" in spec.listen else _own_address(self._spec.endpoint)
        here = replace(
            spec,
            endpoint=self._spec.endpoint,
            fingerprint=self._spec.fingerprint,
            lifeline=self._own,
            listen=listen,
            config=self._own_config(spec),
        )
        if spec.role == "trainer":
            return replace(here, folder_id=identity_of(Path(spec.folder)) or spec.folder_id)
        return replace(here, folder=str(self._room.store), folder_id=(0, 0)) if spec.role == "store" else here

    def _of_replicas(self, config: Config) -> Config:
        """They may have settings of their own here."""
        return with_options(config, self._room.own, "rollout.") if self._room.own else config

    def _own_config(self, spec: ComponentSpec) -> Config:
        """Processes share what is here with those that are here."""
        config = self._of_replicas(spec.config) if spec.role == "replica" else spec.config
        local = replace(config.local, replicas=max(1, self._room.replicas), ranks=self._room.ranks)
        return replace(config, local=local)

    def _ended(self, process: Process, how: str) -> None:
        if how != IN_ORDER:
            self._say(f"{_title(process.spec)} {how}; see {process.log}")
        self._components[process.spec.name] = f"{how}; its log ends with: {last_lines(process.log, 2)}"[:LONGEST]


def _title(spec: ComponentSpec) -> str:
    """For people."""
    return f"rank {spec.rank} of the trainer" if spec.role == "trainer" else f"{spec.role} {spec.id}"


def _refuse_own_draws(config: Config) -> None:
    """vLLM draws with numbers of its own, which nobody can check."""
    if config.strangers.draws and config.rollout.engine == "vllm":
        raise AgentError(
            "this run checks that a stranger's tokens are those that its seed gives, which vLLM cannot do; join with "
            "--rollout.engine native, or ask for strangers.draws = false there"
        )


def _refuse_missing_torch() -> None:
    if find_spec("torch") is None:
        raise AgentError("ranks of the trainer need torch, which is not installed here: pip install 'tailrace[train]'")


def _refuse_other_folder(spec: ComponentSpec) -> None:
    """Checkpoints are written and read by all ranks."""
    folder = Path(spec.folder)
    if not shares_folder(spec):
        raise AgentError(
            f"the run's folder {folder} is not shared with this machine, and ranks on several machines write their "
            "checkpoints there; mount it here at the same path, or join with --replicas alone"
        )
    if not os.access(folder, os.W_OK):
        raise AgentError(f"the run's folder {folder} cannot be written here; let this user write it")


def _refuse_missing_model(config: Config) -> None:
    path = config.model.path
    if path and not path.startswith("package:") and not Path(path).exists():
        raise AgentError(f"model.path is {path}, which is not on this machine; copy the model to the same path here")


def _own_address(endpoint: str) -> str:
    """By which the controller's machine, and so the others, can reach this one."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as asking:
        asking.connect(address)  # sends nothing: it only chooses the way there
        return asking.getsockname()[0]


__all__ = ["Agent", "AgentError", "Room", "SilentError"]
