"""The vLLM process of a replica: started in its own Python, spoken to over a socket, ended with the replica.

`vllm_engine.py` owns one. The process leads a group of its own, in which all processes of vLLM are, and holds a pipe of
ours: when this process ends, however it does, that group ends too. When the group ends, the next call says so.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.engines.vllm_process import vllm_messages as words

SERVER = Path(words.__file__).with_name("vllm_server.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a model is a folder that is there
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked one would keep our socket open
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or all replicas of a host share the first cores
}
SENDING_S = 60.0
ENDING_S = 10.0
Answer = TypeVar("Answer", bound=words.EngineMessage)


class VllmLostError(RuntimeError):
    """vLLM has ended or does not answer. The replica ends with it and is started again, as if it had been killed."""


class VllmProcess:
    def __init__(self, python: str, server: Path = SERVER) -> None:
        ours, theirs = socket.socketpair()
        held, self._lifeline = os.pipe()
        with theirs:
            self._process = subprocess.Popen(
                [python, str(server), str(theirs.fileno()), str(held)],
                pass_fds=(theirs.fileno(), held),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # an evaluation says its results on its own
                start_new_session=True,
                env=ENVIRONMENT | dict(os.environ),
            )
        os.close(held)
        self._socket = ours
        self._buffer = bytearray()
        self._heard: list[words.FromVllm] = []  # not asked for yet

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: words.EngineMessage) -> None:
        self._socket.settimeout(SENDING_S)
        try:
            self._socket.sendall(words.frame(message))
        except TimeoutError:
            raise VllmLostError(f"vLLM (process {self.pid}) has taken no message for {SENDING_S:g} s") from None
        except OSError:
            self._see_its_end()

    def receive(self, timeout_s: float) -> list[words.FromVllm]:
        """What it has said so far; if that is nothing, what it says within so long."""
        if self._heard or select.select([self._socket], [], [], timeout_s)[0]:
            self._read()
        heard, self._heard = self._heard, []
        return heard

    def wait_for(self, kind: type[Answer], what: str, within_s: float) -> tuple[Answer, list[words.FromVllm]]:
        """Its next message of this kind, and what it said before that."""
        before: list[words.FromVllm] = []
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            heard = self.receive(min(1.0, until - time.monotonic()))
            for at, message in enumerate(heard):
                if isinstance(message, kind):
                    self._heard = heard[at + 1 :]
                    return message, before
                before.append(message)
        raise VllmLostError(f"vLLM (process {self.pid}) did not {what} within {within_s:g} s")

    def close(self) -> None:
        """End it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._socket.close()
        self._end_lifeline()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)

    def _end_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def _read(self) -> None:
        """Everything that has arrived."""
        self._socket.settimeout(0)
        try:
            while True:
                piece = self._socket.recv(1 << 20)
                if not piece:
                    self._see_its_end()
                self._buffer += piece
        except BlockingIOError:
            pass
        except ConnectionError:
            self._see_its_end()
        finally:
            self._decode()

    def _decode(self) -> None:
        for body in words.take_frames(self._buffer):
            message = msgspec.msgpack.decode(body, type=words.FromVllm)
            if isinstance(message, words.EngineFailed):
                self.close()
                raise VllmLostError(message.reason)
            self._heard.append(message)

    def _see_its_end(self) -> None:
        """It is gone, or about to be; what it started must not stay."""
        self._decode()
        self.close()
        status = self._process.returncode
        how = f"was killed by signal {-status}" if status and status < 0 else f"ended with status {status}"
        raise VllmLostError(f"vLLM (process {self.pid}) {how}; the log of this replica says more")
