"""Stands in for `vllm_server.py`: speaks its language, and makes up tokens. Started as a script, by tests of the link.

Token k of a request is 100 + k, its log-prob -k/1000, so that what is lost, doubled or mixed up shows. `script` in the
sampling settings: "" answers; "dies" at the first request; "fails" with a sentence; "silent" never answers.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from array import array
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "src" / "tailrace" / "engines" / "vllm_process"))
import vllm_messages as words

PERIOD_S = 0.003


class ScriptedRequest:
    def __init__(self, request: words.PromptRequest) -> None:
        self.at, self.left = len(request.tokens) // 4, request.max_tokens

    def take(self, count: int) -> list[int]:
        count = min(count, self.left)
        self.at, self.left = self.at + count, self.left - count
        return list(range(self.at - count, self.at))


class ScriptedServer:
    def __init__(self, link: socket.socket) -> None:
        self.link, self.script, self.steps, self.decoded, self.kv_read, self.prefilled = link, "", 0, 0, 0, 0
        self.requests: dict[int, ScriptedRequest] = {}

    def run(self) -> None:
        buffer = bytearray()
        while True:
            if select.select([self.link], [], [], PERIOD_S)[0]:
                piece = self.link.recv(1 << 16)
                if not piece:
                    return
                buffer += piece
            for body in words.take_frames(buffer):
                self.obey(msgspec.msgpack.decode(body, type=words.ToVllm))
            self.sample()

    def obey(self, message: Any) -> None:
        if isinstance(message, words.StartEngine):
            self.script = message.sampling.get("script", "")
            if self.script == "fails":
                self.say(words.EngineFailed("ValueError: no such model"))
            elif self.script != "silent":
                self.say(words.EngineReady("0.0", "cpu", 4096, 512))
        elif isinstance(message, words.Submit):
            if self.script == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            self.requests |= {one.number: ScriptedRequest(one) for one in message.requests}
            self.prefilled += sum(len(one.tokens) // 4 for one in message.requests)
        elif isinstance(message, words.Load):
            self.load(message)
        # an order to abort is ignored: what comes of a withdrawn request must be dropped by whoever withdrew it

    def load(self, order: words.Load) -> None:
        Path(order.path).read_bytes()
        self.sample()  # of the old weights, on its way when the order came
        self.requests.clear()
        self.say(words.Loaded(order.version, 0.0, 1))

    def sample(self) -> None:
        if not self.requests:
            return
        self.steps += 1
        fresh = {number: one.take(1 + self.steps % 2) for number, one in self.requests.items()}
        ended = [0 if self.requests[number].left else words.LIMITED for number in fresh]
        places = [place for those in fresh.values() for place in those]
        tokens, logprobs = array("i", [100 + one for one in places]), array("f", [-one / 1000 for one in places])
        self.decoded += len(places)
        self.kv_read += sum(places)
        work = (self.steps / 1000, self.steps, self.decoded, self.kv_read, self.prefilled)
        totals = words.EngineTotals(len(fresh), 0, *work)
        counts = [len(those) for those in fresh.values()]
        self.say(words.Sampled(list(fresh), counts, tokens.tobytes(), logprobs.tobytes(), ended, totals))
        self.requests = {number: one for number, one in self.requests.items() if one.left}

    def say(self, message: words.EngineMessage) -> None:
        self.link.sendall(words.frame(message))


if __name__ == "__main__":
    ScriptedServer(socket.socket(fileno=int(sys.argv[1]))).run()
