"""`tailrace launch ray`: the controller as a child of this process, agents on the other nodes of a Ray cluster.

    launcher  --->  tailrace train                            the controller, the trainer and replicas of this node
              --->  ray_placer  --Ray-->  an actor per node  --->  tailrace worker

The launcher does not import Ray. It hands out the run's keys, waits for the controller and returns its exit code. A
placer that is lost, because the head of the cluster is, is started again until the run is over. When the launcher
itself is gone the kernel asks the controller to stop, and ends the placer.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from msgspec.structs import replace

from tailrace.launch.machines import VARIABLE as KEY
from tailrace.launch.placers.bound import bound, tailrace
from tailrace.launch.placers.fleet import FleetRequest, LaunchError, free_port, train_words
from tailrace.launch.placers.keys import make_keys
from tailrace.launch.placers.ray_agent import CARDS, THREADS
from tailrace.launch.placers.ray_messages import Failed, Found, FromPlacer, Go, Order, Said, line, read_from_placer
from tailrace.launch.secret import VARIABLE
from tailrace.logs import queue_output

log = logging.getLogger(__name__)

LOOK_S = 0.2
FIND_S = 120.0  # until the cluster must have been found
LEAVE_S = 20.0  # for the placer, after the run
AGAIN_S = 5.0  # before another placer is started
LOST = "the connection to Ray is lost; the run goes on, and agents are placed again as soon as Ray is back"


class PlacerProcess:
    """One process of `ray_placer`, and what it says."""

    def __init__(self, *orders: Order | Go) -> None:
        self.was_found = False  # the cluster, by this one
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - what Ray prints, until both are gone
        words = [sys.executable, "-m", "tailrace.launch.placers.ray_placer"]
        self._process = subprocess.Popen(
            bound(words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        self._found: queue.Queue[Found | Failed] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        for order in orders:
            self.send(order)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def found(self) -> Found:
        """`LaunchError` if there is no such cluster."""
        until = time.monotonic() + FIND_S
        while time.monotonic() < until:
            with suppress(queue.Empty):
                found = self._found.get(timeout=LOOK_S)
                if isinstance(found, Found):
                    return found
                raise LaunchError(found.reason)
            if self.ended and self._found.empty():
                raise LaunchError(f"the connection to Ray ended at once; it said last: {self.last_line()}")
        raise LaunchError(f"Ray did not answer within {FIND_S:g} s; does 'ray status' answer here?")

    def end(self) -> None:
        with suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_line(self) -> str:
        """Of what Ray printed."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((text.strip() for text in reversed(lines) if text.strip()), "nothing")[:300]

    def send(self, message: Order | Go) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its end is seen
            self._process.stdin.write(line(message))
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._hear(read_from_placer(text))

    def _hear(self, message: FromPlacer) -> None:
        if isinstance(message, Said):
            log.log(logging.WARNING if message.warning else logging.INFO, "%s", message.text)
        else:
            self.was_found = isinstance(message, Found)
            self._found.put(message)


class RayLaunch:
    def __init__(self, fleet: FleetRequest, address: str) -> None:
        self._config = fleet.config
        self._fleet = fleet
        self._keys = make_keys()
        cards = os.environ.get(CARDS) or None  # of a job that was submitted with cards
        self._order = Order(address, fleet.nodes or 0, fleet.each, cards)

    def run(self) -> int:
        placer = PlacerProcess(self._order)
        try:
            found = placer.found()
            listen = self._fleet.listen or found.address
            port = self._config.local.port or free_port(listen)
            go = Go(f"{_in_brackets(listen)}:{port}", self._keys.join, os.getcwd(), os.environ.get(THREADS))
            with self._controller(listen, port, found.cards) as controller:
                placer.send(go)
                placer = self._until_over(controller, placer, go)
        finally:
            placer.end()
        return controller.returncode if controller.returncode >= 0 else 128 - controller.returncode

    @contextmanager
    def _controller(self, listen: str, port: int, cards: str) -> Iterator[subprocess.Popen[bytes]]:
        """`tailrace train`. It hears our signals once, from us, and is asked to stop when we are gone."""
        environment = {**os.environ, VARIABLE: self._keys.secret, CARDS: cards}
        environment.pop(KEY, None)
        words = bound(tailrace(train_words(self._fleet, listen, port, self._fleet.of_controller())), signal.SIGTERM)
        child = subprocess.Popen(words, env=environment, start_new_session=True)
        before = {number: signal.signal(number, _passing_on(child)) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield child
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if child.poll() is None:
                child.terminate()
                child.wait()

    def _until_over(self, controller: subprocess.Popen[bytes], placer: PlacerProcess, go: Go) -> PlacerProcess:
        """Returns the placer of the end: the run outlives those whose cluster lost its head. A later one takes what
        nodes there are."""
        again = replace(self._order, nodes=0)
        again_at = 0.0
        while controller.poll() is None:
            time.sleep(LOOK_S)
            if placer.ended and time.monotonic() >= again_at:
                again_at = time.monotonic() + AGAIN_S
                if placer.was_found:
                    log.warning("%s (%s)", LOST, placer.last_line())
                placer.end()
                placer = PlacerProcess(again, go)
        return placer


def launch_ray(fleet: FleetRequest, address: str) -> int:
    """The exit code of the run."""
    queue_output()
    config = fleet.config  # mistakes are told before anything is started
    _refuse_without_ray()
    del config
    return RayLaunch(fleet, address).run()


def _refuse_without_ray() -> None:
    if find_spec("ray") is None:
        raise LaunchError("launch ray needs Ray in this Python: pip install 'tailrace[ray]', on every node")


def _passing_on(child: subprocess.Popen[bytes]) -> Callable[[int, object], None]:
    def pass_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):
            child.send_signal(number)

    return pass_on


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address
