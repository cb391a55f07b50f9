"""What a started process runs: `python -m tailrace.runtime.component`, with its `ComponentSpec` as one line of JSON on
stdin.

Secrets and settings come over the pipe, never on the command line. Beside it a component inherits the lifeline of the
run: when that ends, however the run's supervisor did, the component ends too, so nothing is left behind. A controller
that dies alone is waited for (see `wire`): the component goes on with what it has.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module

import msgspec

from tailrace.errors import TailraceError
from tailrace.logs import for_component
from tailrace.model.numa import stay_near
from tailrace.watchdog import show_stacks_when_asked
from tailrace.wire.client import ControlClient
from tailrace.wire.messages import Collapsed, ComponentSpec

log = logging.getLogger("tailrace.runtime.component")  # __name__ is __main__ here
ROLES = {
    "replica": "tailrace.rollout.worker",
    "relay": "tailrace.weights.relay_worker",
    "store": "tailrace.samples.worker",
    "trainer": "tailrace.trainer.worker",
}
STDIN = 0
ORPHANED = 3  # exit status of a component whose run is gone
GRACE_S = 5.0  # for it to put things in order


def main() -> int:
    for_component()
    show_stacks_when_asked()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's; it tells us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(ORPHANED))
    spec = msgspec.json.decode(_first_line(), type=ComponentSpec)
    log.info("%s starts as process %d%s", spec.name, os.getpid(), _dealt(spec))
    stay_near(spec.cpus)  # before there are threads, and before anything large is in memory
    threading.Thread(target=_leave_with_the_run, args=(spec.lifeline,), daemon=True).start()
    try:
        run: Callable[[ComponentSpec], None] = import_module(ROLES[spec.role]).run
        run(spec)
    except Exception as error:  # the border of the process: whatever it was, the controller gets a sentence
        log.exception("%s ends with an error", spec.name)
        _give_up(spec, error)
        return 1
    return 0


def _dealt(spec: ComponentSpec) -> str:
    if not spec.cards:
        return ""
    near = f", on the CPUs {spec.cpus}" if spec.cpus else ""
    return f" with {100 * spec.memory:.0f} % of GPU {', '.join(map(str, spec.cards))}{near}"


def _give_up(spec: ComponentSpec, error: Exception) -> None:
    if spec.rank:
        return  # the first rank speaks for all; that this one has ended is seen
    ours = isinstance(error, TailraceError)
    controller = ControlClient(spec)
    controller.open()
    controller.send(Collapsed(str(error) if ours else f"{type(error).__name__}: {error}", expected=ours))
    controller.close()


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(STDIN, 1 << 16)
        if not piece:
            sys.exit("started without a specification; components of a run are started by 'tailrace train'")
        line += piece
    return line


def _leave_with_the_run(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written to it
    os.kill(os.getpid(), signal.SIGTERM)  # ends the main thread in order, so that shared memory is given back
    time.sleep(GRACE_S)
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
