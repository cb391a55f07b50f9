"""Several machines for one run: how a run invites them, and `tailrace worker`, by which one of them comes.

The key that lets a machine in is a line in `join.key` of the run's folder, readable by its owner alone, or the content
of an environment variable; it is never on a command line. It is as good as the run is long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tailrace.config import refuse_other_sections
from tailrace.errors import UsageError
from tailrace.launch.cards import cards_of_worker
from tailrace.launch.limits import BASE, EACH, STRANGERS, allow_files
from tailrace.runtime.agent import Agent, AgentError, Room, SilentError
from tailrace.runtime.controller import Controller
from tailrace.runtime.worker_keys import WorkerKeys
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER, RunFolder
from tailrace.weights.shared_memory import clear_abandoned
from tailrace.wire import descriptors
from tailrace.wire.keys import JOIN_KEY, JoinKey
from tailrace.wire.messages import AbsentError, WireError

log = logging.getLogger(__name__)

VARIABLE = "TAILRACE_JOIN_KEY"
SILENT = 4  # exit code
RETURN_S = 0.5  # between two tries to find a run that is away


def invite(controller: Controller, folder: RunFolder) -> str:
    """Write the key, and say how to join; nothing if nobody may."""
    key = controller.components.join_key
    if key is None:
        return ""
    folder.refuse_moved()
    path = folder.path / JOIN_KEY
    written = path.with_suffix(".new")
    written.touch(PRIVATE)
    written.write_text(f"{key}\n")
    os.replace(written, path)
    WorkerKeys(folder.path).renew(key.fingerprint)
    where = controller.server.endpoint.removeprefix("tcp://")
    how = f"other machines may join: tailrace worker --join {where} --key {path}"
    if not controller.config.strangers.checkers:
        return how
    return f"{how}\nfor one that is not trusted, make a key: tailrace workers {folder.path} --invite NAME"


def withdraw(folder: RunFolder) -> None:
    (folder.now / JOIN_KEY).unlink(missing_ok=True)


class Patience(NamedTuple):
    """For so long a run may be away before it begins; `stay`: between two starts too, so one that stops is not over."""

    wait_s: float = 0.0
    stay: bool = False


def work(
    join: str,
    file: Path | None,
    replicas: int | str | None = None,
    ranks: int = 0,
    store: Path | None = None,
    own: Sequence[str] = (),
    patience: Patience = Patience(),
    site: str = "",
) -> int:
    """Until the run is over (0), is not heard of any more (4), or Ctrl-C (130). `replicas`: None: one, unless this
    machine is for ranks; "auto": one for each GPU that ranks leave, or one where there is none. `own`: settings of
    [rollout] for the replicas here. `site`: where this machine is, if it is far away."""
    room = _room(replicas, ranks, store, own)._replace(site=site)
    allow_files(BASE + EACH * (room.replicas + room.ranks) + STRANGERS)
    _host_and_port(join)
    key = _key_reader(file)
    if room.store is not None:
        _prepare(room.store)
    descriptors.raise_limit()
    clear_abandoned()
    try:
        return _patiently(partial(_attend, join, key, room), patience)
    finally:
        clear_abandoned()  # of relays that were killed


def _room(replicas: int | str | None, ranks: int, store: Path | None, own: Sequence[str]) -> Room:
    cards = cards_of_worker()
    if replicas is None:
        replicas = int(not ranks)
    elif isinstance(replicas, str):
        replicas = max(1, len(cards) - ranks)
    if not replicas and not ranks:
        raise UsageError("0 is not a number of replicas for a worker without ranks; write --replicas 1 or --ranks 1")
    refuse_other_sections(own, "rollout.")
    return Room(replicas, ranks, store, cards, tuple(own))


class Attendance(NamedTuple):
    """How a machine's time with a run ended: the exit code, and whether the run may go on later."""

    status: int
    resumable: bool


def _patiently(attend: Callable[[], Attendance], patience: Patience) -> int:
    """Take part in a run, also if it is not there at first or is started again."""
    until, told = time.monotonic() + patience.wait_s, False
    while True:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # while it waits; who takes part handles both
        try:
            attended = attend()
            if attended.status or not attended.resumable or not patience.stay:
                return attended.status
            until, told = time.monotonic() + patience.wait_s, False
        except AbsentError as error:
            if isinstance(error, SilentError):
                if not patience.stay:
                    log.error("%s", error)
                    return SILENT
                until, told = time.monotonic() + patience.wait_s, False  # it was there until now
            if time.monotonic() >= until:
                raise
            if not told:
                _say(f"waiting up to {patience.wait_s:g} s for the run: {error}")
            told = True
        time.sleep(RETURN_S)


def _attend(join: str, key: Callable[[], JoinKey], room: Room) -> Attendance:
    return asyncio.run(_work(_endpoint(join), key(), room))


async def _work(endpoint: str, key: JoinKey, room: Room) -> Attendance:
    agent = Agent(endpoint, key, room, _say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, agent.interrupt)
    _say(await agent.run())
    return Attendance(130 if agent.interrupted else 0, agent.resumable)


def _endpoint(join: str) -> str:
    host, port = _host_and_port(join)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        raise AbsentError(f"--join is '{join}', but there is no such host ({error.strerror})") from None
    return f"tcp://{join}"


def _host_and_port(join: str) -> tuple[str, int]:
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise WireError(f"--join is '{join}', not an address; write HOST:PORT as 'tailrace train' has printed it")
    return host.strip("[]"), int(port)


def _key_reader(file: Path | None) -> Callable[[], JoinKey]:
    """A file is read each time: it may be written later, or anew."""
    if file is not None:
        return partial(_key_of, file)
    if VARIABLE not in os.environ:
        raise WireError(
            f"a join key is needed; write --key FILE with the run's {JOIN_KEY}, or set {VARIABLE} to its content"
        )
    key = JoinKey.read(os.environ.pop(VARIABLE))  # not for those whom we start
    return lambda: key


def _key_of(file: Path) -> JoinKey:
    try:
        return JoinKey.read(file.read_text())
    except FileNotFoundError as error:
        raise AbsentError(_unreadable(file, error.strerror)) from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WireError(_unreadable(file, why)) from None


def _unreadable(file: Path, why: str | None) -> str:
    return f"the join key {file} cannot be read ({why}); it is {JOIN_KEY} in the run's folder"


def _say(sentence: str) -> None:
    log.info("%s", sentence)


def _prepare(store: Path) -> None:
    try:
        store.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise AgentError(f"--store {store} cannot be made ({error.strerror}); write another directory") from None
