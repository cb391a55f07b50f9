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
from collections.abc import Sequence
from pathlib import Path

from tailrace.errors import UsageError
from tailrace.launch.cards import cards_of_worker
from tailrace.launch.limits import BASE, EACH, STRANGERS, allow_files
from tailrace.runtime.agent import Agent, AgentError, Room
from tailrace.runtime.controller import Controller
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER, RunFolder
from tailrace.weights.shared_memory import clear_abandoned
from tailrace.wire import descriptors
from tailrace.wire.keys import JOIN_KEY, JoinKey
from tailrace.wire.messages import WireError

log = logging.getLogger(__name__)

VARIABLE = "TAILRACE_JOIN_KEY"


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
    where = controller.server.endpoint.removeprefix("tcp://")
    return f"other machines may join: tailrace worker --join {where} --key {path}"


def withdraw(folder: RunFolder) -> None:
    (folder.now / JOIN_KEY).unlink(missing_ok=True)


def work(
    join: str,
    file: Path | None,
    replicas: int | str | None = None,
    ranks: int = 0,
    store: Path | None = None,
    own: Sequence[str] = (),
) -> int:
    """Until the run is over (0), or Ctrl-C (130). `replicas`: None: one, unless this machine is for ranks; "auto": one
    for each GPU that ranks leave, or one where there is none. `own`: settings of [rollout] for the replicas here."""
    room = _room(replicas, ranks, store, own)
    endpoint, key = _endpoint(join), _key(file)
    allow_files(BASE + EACH * (room.replicas + room.ranks) + STRANGERS)
    if room.store is not None:
        _prepare(room.store)
    descriptors.raise_limit()
    clear_abandoned()
    try:
        return asyncio.run(_work(endpoint, key, room))
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
    return Room(replicas, ranks, store, cards, tuple(own))


async def _work(endpoint: str, key: JoinKey, room: Room) -> int:
    agent = Agent(endpoint, key, room, _say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, agent.interrupt)
    _say(await agent.run())
    return 130 if agent.interrupted else 0


def _endpoint(join: str) -> str:
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise WireError(f"--join is '{join}', not an address; write HOST:PORT as 'tailrace train' has printed it")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise WireError(f"--join is '{join}', but there is no such host ({error.strerror})") from None
    return f"tcp://{join}"


def _key(file: Path | None) -> JoinKey:
    if file is None and VARIABLE not in os.environ:
        raise WireError(
            f"a join key is needed; write --key FILE with the run's {JOIN_KEY}, or set {VARIABLE} to its content"
        )
    try:
        text = os.environ.pop(VARIABLE) if file is None else file.read_text()  # not for those whom we start
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise WireError(f"the join key {file} cannot be read ({why}); it is {JOIN_KEY} in the run's folder") from None
    return JoinKey.read(text)


def _say(sentence: str) -> None:
    log.info("%s", sentence)


def _prepare(store: Path) -> None:
    try:
        store.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise AgentError(f"--store {store} cannot be made ({error.strerror}); write another directory") from None
