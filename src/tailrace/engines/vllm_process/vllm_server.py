"""vLLM for one replica, in its own Python: `python vllm_server.py SOCKET LIFELINE`, two descriptors that it inherits.

Started by `engines/vllm_link.py`; speaks `vllm_messages` on the socket. It knows requests by number and holds no
trajectory: what is sampled goes out within milliseconds. New weights end all requests first, so every token that was
sent before `Loaded` is of the old ones; whoever asked for them submits the rest again. When the lifeline ends, or vLLM
does, this process ends with everything that vLLM has started.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.
from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from importlib.util import find_spec
from typing import Any

import msgspec
from vllm_messages import (
    GOES_ON,
    LIMITED,
    STOPPED,
    Abort,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineTotals,
    Load,
    Loaded,
    PromptRequest,
    Sampled,
    StartEngine,
    Submit,
    ToVllm,
    frame,
    take_frames,
)

GATHER_S = 0.01  # what is sampled within it goes out together
TOKEN_BYTES = 4
LOOK_S = 1.0  # how often a quiet engine is looked at
ABORT_S = 0.05  # before it is asked again
ABORTING_S = 60.0
ENDED = {"stop": STOPPED, "length": LIMITED}  # of an aborted one nobody waits for the end
SERVER = "TAILRACE_VLLM_SERVER"
NO_EXPERT_PARALLELISM = (
    "vLLM's CPU build has no expert parallelism: its kernel does not look at which experts a rank has; "
    "leave out rollout.vllm.enable_expert_parallel, and tensor_parallel_size splits every expert"
)
NOT_READ_BACK = (
    "{count} tensors of a new version cannot be read back from vLLM, such as {name}, so nobody knows whether it took "
    "them; experts can where rollout.vllm.moe_backend is 'triton'"
)


def main() -> None:
    link, lifeline = (int(word) for word in sys.argv[1:3])
    for descriptor in (link, lifeline):
        os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ[SERVER] = str(os.getpid())  # for the workers, which end with it
    if find_spec("flashinfer") is None:  # vLLM 0.24 fails for lack of it instead of doing without
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    connection = socket.socket(fileno=link)
    try:
        asyncio.run(_serve(connection))
    except Exception as error:  # the border of the process: the replica gets a sentence
        _say_last(connection, error)
    finally:
        _end_all()


def _end_with(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written to it
    _end_all()


def _end_all() -> None:
    """This process leads its group, in which all processes of vLLM are."""
    os.killpg(0, signal.SIGKILL)


def _say_last(connection: socket.socket, error: Exception) -> None:
    import traceback

    traceback.print_exception(error)
    connection.setblocking(True)
    connection.settimeout(LOOK_S)
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    connection.sendall(frame(EngineFailed(reason[:4000])))


async def _serve(connection: socket.socket) -> None:
    connection.setblocking(True)
    start = _first(connection)
    reader, writer = await asyncio.open_connection(sock=connection)
    server = EngineServer(start, writer)
    await server.prepare()
    work = [asyncio.ensure_future(one) for one in (server.obey(reader), server.send_all(), server.watch())]
    done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    for one in done:
        one.result()


def _first(connection: socket.socket) -> StartEngine:
    buffer = bytearray()
    while True:
        for body in take_frames(buffer):
            return msgspec.msgpack.decode(body, type=StartEngine)
        piece = connection.recv(1 << 16)
        if not piece:
            _end_all()
        buffer += piece


class FreshTokens:
    """What a request has been given since the last frame."""

    __slots__ = ("ended", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ended = GOES_ON


class EngineServer:
    def __init__(self, start: StartEngine, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tally = StepTally()
        self._engine, self._ready = build(start, self._tally)
        self._sampling = start.sampling
        self._requests: dict[int, asyncio.Task[None]] = {}
        self._fresh: dict[int, FreshTokens] = {}
        self._anything = asyncio.Event()
        self._failed: BaseException | None = None
        self._loads = 0  # salts the prefix cache: keys and values of other weights are never found in it

    async def prepare(self) -> None:
        """One token of nothing, because the first request is slow."""
        await self._engine.collective_rpc("make_ready")
        async for _ in self._outputs(PromptRequest(0, bytes(4), 1)):
            pass
        self._say(self._ready)

    async def obey(self, reader: asyncio.StreamReader) -> None:
        buffer = bytearray()
        while piece := await reader.read(1 << 20):
            buffer += piece
            for body in take_frames(buffer):
                await self._do(msgspec.msgpack.decode(body, type=ToVllm))

    async def _do(self, message: Any) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self._begin(request)
        elif isinstance(message, Abort):
            await self._abort(message.numbers)
        elif isinstance(message, Load):
            await self._load(message)

    async def send_all(self) -> None:
        """A frame for whatever came within a few milliseconds."""
        while True:
            await self._anything.wait()
            await asyncio.sleep(GATHER_S)
            self._send_sampled()
            await self._writer.drain()

    async def watch(self) -> None:
        """A request that fails, and an engine that dies with nothing to do, end this process."""
        while self._failed is None and not self._engine.errored:
            await asyncio.sleep(LOOK_S)
        raise self._failed or RuntimeError("vLLM's engine process has died; the log of this replica says more")

    # ---------------------------------------------------------------------------------------------------- requests

    def _begin(self, request: PromptRequest) -> None:
        self._tally.begin_request()
        task = asyncio.create_task(self._generate(request))
        self._requests[request.number] = task
        task.add_done_callback(lambda done: self._end(request.number, done))

    def _end(self, number: int, task: asyncio.Task[None]) -> None:
        self._tally.end_request()
        self._requests.pop(number, None)
        if not task.cancelled() and task.exception() is not None:
            self._failed = self._failed or task.exception()

    async def _generate(self, request: PromptRequest) -> None:
        length = len(request.tokens) // TOKEN_BYTES
        async for output in self._outputs(request):
            count = self._take(request.number, output.outputs[0])
            self._tally.read_kv(length, count)
            length += count

    def _outputs(self, request: PromptRequest) -> AsyncIterator[Any]:
        from vllm.inputs import tokens_input

        prompt = tokens_input(array("i", request.tokens).tolist(), cache_salt=f"weights {self._loads}")
        own = {} if request.temperature is None else {"temperature": request.temperature}
        parameters = sampling_parameters(self._sampling | own, request.max_tokens)
        return self._engine.generate(prompt, parameters, str(request.number))

    def _take(self, number: int, completion: Any) -> int:
        """How many tokens it has more."""
        fresh = self._fresh.get(number)
        if fresh is None:
            fresh = self._fresh[number] = FreshTokens()
        count = len(completion.token_ids)
        if count:
            fresh.tokens += completion.token_ids
            fresh.logprobs += completion.logprobs.logprobs[:count]  # an aborted request's last word repeats all of them
        if completion.finish_reason:
            fresh.ended = ENDED.get(completion.finish_reason, GOES_ON)
        self._anything.set()
        return count

    async def _abort(self, numbers: Iterable[int]) -> None:
        """Until they have ended: one that is just being added cannot be aborted yet."""
        wanted = {number: self._requests[number] for number in numbers if number in self._requests}
        until = time.monotonic() + ABORTING_S
        while wanted:
            await self._engine.abort([str(number) for number in wanted])
            await asyncio.wait(wanted.values(), timeout=ABORT_S)
            wanted = {number: task for number, task in wanted.items() if not task.done()}
            if wanted and time.monotonic() > until:
                raise RuntimeError(f"vLLM did not abort {len(wanted)} requests within {ABORTING_S:g} s")

    # ----------------------------------------------------------------------------------------------------- weights

    async def _load(self, order: Load) -> None:
        began = time.monotonic()
        await self._abort(list(self._requests))
        self._send_sampled()
        if not order.keep_kv:
            self._loads += 1
            await self._engine.reset_prefix_cache()
        answers = await self._engine.collective_rpc("load_version", args=(order.path,))
        unchecked = set.intersection(*[set(names) for _, names in answers])  # on no rank
        if unchecked:
            raise RuntimeError(NOT_READ_BACK.format(count=len(unchecked), name=min(unchecked)))
        self._say(Loaded(order.version, time.monotonic() - began, answers[0][0]))

    # -------------------------------------------------------------------------------------------------------- wire

    def _send_sampled(self) -> None:
        self._anything.clear()
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, {}
        tokens, logprobs = array("i"), array("f")
        for one in fresh.values():
            tokens.extend(one.tokens)
            logprobs.extend(one.logprobs)
        counts, ended = [len(one.tokens) for one in fresh.values()], [one.ended for one in fresh.values()]
        self._say(Sampled(list(fresh), counts, tokens.tobytes(), logprobs.tobytes(), ended, self._tally.totals()))

    def _say(self, message: EngineMessage) -> None:
        self._writer.write(frame(message))


# ---------------------------------------------------------------------------------------------------------- vLLM itself


class StepTally:
    """Adds up what vLLM says after each of its steps, while there are requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = 0
        self._clock = clock
        self._kv = self._waiting = self._steps = self._decoded = self._kv_read = self._prefilled = 0
        self._busy_s = 0.0
        self._requests = 0
        self._at = clock()  # what came before is counted, or was idle

    def begin_request(self) -> None:
        if not self._requests:
            self._at = self._clock()
        self._requests += 1

    def end_request(self) -> None:
        self._requests -= 1

    def read_kv(self, length: int, count: int) -> None:
        """A sequence of so many tokens has got so many more: each step read all that there were."""
        self._kv_read += count * length + count * (count - 1) // 2

    def record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self._kv, self._waiting = round(scheduler.kv_cache_usage * self.capacity), scheduler.num_waiting_reqs
        if not self._requests:
            return
        now = self._clock()
        self._busy_s += now - self._at
        self._at = now
        if iteration is not None:  # some sequence has a token
            self._steps += 1
            self._decoded += iteration.num_generation_tokens
            self._prefilled += iteration.prompt_token_stats.computed

    def totals(self) -> EngineTotals:
        work = (self._busy_s, self._steps, self._decoded, self._kv_read, self._prefilled)
        return EngineTotals(self._kv, self._waiting, *work)


def build(start: StartEngine, tally: StepTally) -> tuple[Any, EngineReady]:
    """The engine, with nothing to do."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    if on_cpu and start.arguments.get("enable_expert_parallel"):
        raise ValueError(NO_EXPERT_PARALLELISM)
    memory = {"gpu_memory_utilization": start.cpu_memory if on_cpu else start.gpu_memory}
    precision = {} if "dtype" in start.arguments else {"dtype": "float32" if on_cpu else "bfloat16"}
    config = AsyncEngineArgs(**memory, **precision, **start.arguments).create_engine_config()
    cache = config.cache_config
    if start.kv_tokens:
        cache.num_gpu_blocks_override = max(1, start.kv_tokens // cache.block_size)
    engine = AsyncLLM.from_vllm_config(config, stat_loggers=[stat_logger(tally)], disable_log_stats=True)
    cache = engine.vllm_config.cache_config
    tally.capacity = cache.num_gpu_blocks * cache.block_size
    context = engine.vllm_config.model_config.max_model_len
    return engine, EngineReady(vllm.__version__, current_platform.device_type, tally.capacity, context)


def stat_logger(tally: StepTally) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase

    class TallyLogger(StatLoggerBase):
        """Tells the tally of every step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
            tally.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return TallyLogger


def sampling_parameters(sampling: dict[str, Any], max_tokens: int) -> Any:
    """Only what was asked for ends a request: our stop tokens and its limit."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.DELTA,
    )


if __name__ == "__main__":
    main()
