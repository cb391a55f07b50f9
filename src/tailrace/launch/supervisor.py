"""The process in front of a run: it starts the controller, and starts it again when it is killed or gets stuck.

`tailrace train` is this process. The controller is forked from it before anything large is imported, so a supervisor
costs no time and hardly any memory, and has next to nothing that could go wrong in it. It holds one end of a pipe, the
lifeline, that everybody else in the run waits for: when the supervisor is gone, by whatever signal, they all go.

    supervisor  --fork-->  controller  --exec-->  trainer, relays, replicas
       \\_______ lifeline _____/______________________/

Ctrl-C and SIGTERM come here and are passed on; the controller has a process group of its own, so that it hears each
of them once. A controller that ends by itself ends the run, with its own exit code.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from tailrace.launch.secret import RunSecret
from tailrace.logs import drain_output
from tailrace.watchdog import show_stacks_when_asked

log = logging.getLogger(__name__)

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
WAITED_FOR = (*PASSED_ON, signal.SIGCHLD)
LOOK_S = 1.0  # between two looks at the controller's heart
STUCK = 30  # looks without a beat until it is killed
IN_A_ROW = 10  # controllers that may die one after the other, each before it has lived for SETTLED_S
SETTLED_S = 30.0
CANNOT_GO_ON, INTERRUPTED = 2, 130  # exit codes of the command
BEGUN, BEATS = 0, 1  # on the board


class Supervisor:
    """What a controller has of its supervisor."""

    def __init__(self, secret: RunSecret | None = None) -> None:
        """`secret`: of the run, if its keys are to be known to others; unset: a new one."""
        # the controller's, which no component has; and what machines that join have
        self.secret, self.token = secret or RunSecret.of(os.urandom(32))
        self.lifeline, self._held = os.pipe()
        self._board = memoryview(mmap.mmap(-1, 16)).cast("Q")  # memory that both processes see

    @property
    def begun(self) -> bool:
        """A controller of this supervisor has opened the run: another one goes on with it."""
        return bool(self._board[BEGUN])

    def begin(self) -> None:
        self._board[BEGUN] = 1

    def beat(self) -> None:
        """From the first call on this has to be called again and again."""
        self._board[BEATS] += 1

    def rest(self) -> None:
        """No more beats are to be expected."""
        self._board[BEATS] = 0

    # -------------------------------------------------------------------------------------------- the supervisor's side

    def keep(self, control: Callable[[Supervisor], int]) -> int:
        """Run `control` in a process of its own until it ends by itself, or must be given up. Returns its status."""
        signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
        in_a_row = 0
        while True:
            began = time.monotonic()
            status, asked = self._watch(self._fork(control))
            if status >= 0:
                return status
            in_a_row = 1 if time.monotonic() - began > SETTLED_S else in_a_row + 1
            if asked or in_a_row > IN_A_ROW:
                _say(f"the controller was killed by signal {-status}; the same command with --resume goes on from here")
                return INTERRUPTED if asked else CANNOT_GO_ON
            _say(f"the controller was killed by signal {-status}; another one takes over, everybody else goes on")

    def _fork(self, control: Callable[[Supervisor], int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        self.rest()
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            os.close(self._held)
            os.setpgid(0, 0)
            show_stacks_when_asked()
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal all the same
            threading.Thread(target=_go_with, args=(self.lifeline,), daemon=True).start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, WAITED_FOR)  # here alone: that thread hears none of them
            status = control(self)
        except BaseException:  # the border of the process
            log.exception("the controller ended with an error")
        finally:
            drain_output()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _watch(self, child: int) -> tuple[int, bool]:
        """How the controller ended, and whether it had been asked to."""
        asked, looks, last = False, 0, 0
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), asked
            heard = signal.sigtimedwait(WAITED_FOR, LOOK_S)
            if heard is None:
                beats = self._board[BEATS]
                looks, last = (looks + 1 if beats and beats == last else 0), beats
                if looks == STUCK:
                    _say(f"the controller has not moved for {STUCK * LOOK_S:.0f} s and is killed")
                    os.kill(child, signal.SIGKILL)
            elif heard.si_signo in PASSED_ON:
                asked = True
                os.kill(child, heard.si_signo)


def _go_with(lifeline: int) -> None:
    """The supervisor is gone, so nobody is there to wait for the end: what is committed is safe, and the rest is
    lost."""
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def _say(sentence: str) -> None:
    log.warning("%s", sentence)
