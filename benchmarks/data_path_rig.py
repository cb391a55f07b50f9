"""What `data_path.py` and `data_path_before.py` have in common: processes of mock replicas, the process of a real
controller, and what is measured of them. It knows nothing of Tailrace, so that it serves any release of it.

A mock replica is whatever has the methods of `Mock`. Many are in one process, which serves them in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import ceil
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "data_path.json"
ANSWER, VOCABULARY = 16_384, 150_000  # tokens of an answer; token ids are random below this
PAGE, TICK = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
PROCESSES = 2  # that the mocks are in
LOOK_S = 1.0
GROUP, PROMPTS = 16, 64  # samples of a group, and groups of a step
PIECES = 64  # of random tokens, which every answer is made of
SAMPLE_S = 0.05  # how often the controller's process looks at itself
LOSSES = ("ReplicaLost", "StoreLost", "TrainerLost", "RelayLost")
IDLE_S = 0.01  # that mocks wait which may not generate
AT_ONCE = 16  # mocks of a process that are served in one turn; they stand for other machines, and need no prompt answer
JOIN_S = 180.0
NICE = 5


class Mock(Protocol):
    """A replica that generates nothing but random tokens, a chunk of every answer at a time."""

    stored: int  # tokens that are known to be durable
    held_up: bool  # it waits for whoever stores them
    lost: bool  # the controller does not know its connection any more: it waits to be started again

    def join(self) -> None: ...

    def beat(self) -> None: ...

    def take_in(self) -> None:
        """Whatever has arrived."""
        ...

    def generate(self) -> int:
        """A chunk of every answer, if more may be on its way; returns the tokens."""
        ...

    def send(self) -> None: ...

    def close(self) -> None: ...


class Board:
    """Figures that all processes see."""

    def __init__(self, context: Any, replicas: int) -> None:
        self.stored = context.Array("q", PROCESSES, lock=False)  # tokens, by process of mocks
        self.kept = context.Value("q", -1, lock=False)  # tokens that the controller has stored; -1: the mocks know it
        self.incarnations = context.Array("q", replicas, lock=False)  # of each replica; 0: it is not to be there
        self.held_up = context.Array("q", PROCESSES, lock=False)
        self.rate = context.Value("d", 0.0, lock=False)  # tokens/s that are offered in all; 0: whatever is taken
        self.over = context.Value("b", 0, lock=False)

    @property
    def tokens(self) -> int:
        """That are stored."""
        return sum(self.stored) if self.kept.value < 0 else self.kept.value


def produce(board: Board, at: int, make: Callable[[int, int], Mock], ids: list[int], heartbeat_s: float) -> None:
    """A process of mock replicas. Each has its own moment for its heartbeats, as processes have. They stand for other
    machines, so they leave the processor to the run's own processes where both want it."""
    os.nice(NICE)
    fleet = MockFleet(board, make, ids)
    began, beats, budget = time.monotonic(), 0, Budget(board, fleet)
    while not board.over.value:
        mocks = fleet.mocks()
        due = int((time.monotonic() - began) / heartbeat_s * len(ids))
        for turn in range(beats, due if mocks else beats):
            with fleet.giving_up(mocks[turn % len(mocks)]) as mock:
                mock.beat()
        beats = due
        grown = budget.spend(mocks)
        board.stored[at] = sum([mock.stored for mock in mocks])
        board.held_up[at] = sum([mock.held_up for mock in mocks])
        if not grown:
            time.sleep(IDLE_S)


class MockFleet:
    """The mocks of a process, as the controller wants them: one that it has killed ends, one that it starts begins."""

    def __init__(self, board: Board, make: Callable[[int, int], Mock], ids: list[int]) -> None:
        self._board, self._make, self._ids = board, make, ids
        self._known: dict[int, tuple[int, Mock]] = {}  # and the incarnation of each

    def mocks(self) -> list[Mock]:
        for id in self._ids:
            wanted, (known, mock) = self._board.incarnations[id], self._known.get(id, (0, None))
            if wanted != known and mock is not None:
                mock.close()
                del self._known[id]
            if wanted and wanted != known:
                self._known[id] = (wanted, self._make(id, wanted))
                self._known[id][1].join()
        return [mock for _, mock in self._known.values() if not mock.lost]

    @contextmanager
    def giving_up(self, mock: Mock) -> Iterator[Mock]:
        """What the controller has cut off waits to be started again."""
        try:
            yield mock
        except ConnectionError:
            mock.lost = True


class Budget:
    """Tokens that the mocks of a process may generate, by the rate that is offered."""

    def __init__(self, board: Board, fleet: MockFleet) -> None:
        self._board, self._left, self._counted_at, self._next = board, 0.0, time.monotonic(), 0
        self._fleet = fleet

    def spend(self, mocks: list[Mock]) -> int:
        """A turn of some mocks, while there is something left for them to generate; the next turn begins with the one
        after them. Returns the tokens."""
        now, rate, grown = time.monotonic(), self._board.rate.value / PROCESSES, 0
        self._left = min(self._left + (now - self._counted_at) * rate, rate)  # what is a second late is not made up for
        self._counted_at = now
        for _ in range(min(AT_ONCE, len(mocks))):
            if rate and self._left <= grown:
                break
            with self._fleet.giving_up(mocks[self._next % len(mocks)]) as mock:
                mock.take_in()
                grown += mock.generate()
                mock.send()
            self._next += 1
        self._left = max(self._left - grown, -rate) if rate else 0.0
        return grown


class Controller:
    """The process of a real controller, seen from here. It answers every word with a dictionary of figures."""

    def __init__(self, context: Any, control: Callable[..., None], *values: Any) -> None:
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=control, args=(other, *values))
        self.process.start()

    def ask(self, word: str, within_s: float = JOIN_S) -> dict[str, Any]:
        self._pipe.send(word)
        if not self._pipe.poll(within_s):
            raise TimeoutError(f"the controller does not answer {word!r}")
        return self._pipe.recv()

    def asking(self, word: str, every_s: float) -> Iterator[None]:
        """The same, with something to do until `answer` is there."""
        self._pipe.send(word)
        while not self._pipe.poll(every_s):
            assert self.process.is_alive(), "the controller has ended"
            yield
        self.answer: dict[str, Any] = self._pipe.recv()

    def end(self) -> None:
        self.ask("end")
        self.process.join(60)


# ------------------------------------------------------------------------------------------ the controller's process


class Absent:
    """In place of the process of a replica."""

    pid = started = 0
    how = "was killed"

    def __init__(self, board: Board, spec: Any) -> None:
        self.ended = asyncio.Event()
        self._board, self._spec = board, spec
        board.incarnations[spec.id] = spec.incarnation

    def send(self, number: int) -> None:
        if self._board.incarnations[self._spec.id] == self._spec.incarnation:
            self._board.incarnations[self._spec.id] = 0
        self.ended.set()


class Seen:
    """An observer that counts."""

    def __init__(self) -> None:
        self.deaths = 0
        self.trained_tokens = 0.0
        self.train_at = self.trained_at = 0.0  # when the first mini-batch was ordered, and when the last was done
        self.train_cpu = self.trained_cpu = 0.0  # of this process, then

    def see(self, now: float, event: Any, commands: Any) -> None:
        names = [type(one).__name__ for one in commands]
        self.deaths += names.count("GiveUp") + (type(event).__name__ in LOSSES)
        if "Train" in names and not self.train_at:
            self.train_at, self.train_cpu = time.monotonic(), time.process_time()
        if type(event).__name__ == "Trained":
            self.trained_at, self.trained_cpu = time.monotonic(), time.process_time()

    def measure(self, now: float, step: int, source: str, values: Any) -> None:
        self.trained_tokens += values.get("trainer/tokens", 0.0)


class Lag:
    """How late the event loop is, all samples that were due counted."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._due = time.monotonic()

    async def sample(self) -> None:
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        now = time.monotonic()
        while self._due <= now:
            self.samples.append(now - self._due)
            self._due += SAMPLE_S


class ControllerProcess:
    """Runs a real controller, whose replicas are elsewhere, and answers what it is asked."""

    def __init__(self, pipe: Pipe, board: Board) -> None:
        self._pipe, self._board, self._seen, self._lag = pipe, board, Seen(), Lag()
        self._mark = (0, 0, 0.0)  # samples of the lag, deaths and trained tokens until then
        self._silence_s = 0.0  # of the trainer, the longest
        self._lifeline, self._held = os.pipe()

    async def run(self, make: Callable[[int, Seen], Any]) -> None:
        self._controller = make(self._lifeline, self._seen)
        self._local: Any = self._controller.components._local
        self._begin, self._local._begin = self._local._begin, self._begin_all_but_replicas
        running, asked = asyncio.create_task(self._controller.run()), ""
        while asked != "end":
            asked = self._pipe.recv() if not asked and self._pipe.poll() else asked
            found = self._answer(asked, running.done()) if asked else None
            if found is not None:
                self._pipe.send(found)
                asked = ""
            await self._lag.sample()
            self._listen()
            if running.done():
                running.result()
        self._controller.interrupt()
        await running
        self._pipe.send({})

    def _answer(self, word: str, is_over: bool) -> dict[str, Any] | None:
        match word:
            case "up":
                return self._up()
            case "joined":
                return {} if self._controller.state.fleet.live == self._controller.config.local.replicas else None
            case "mark":
                return self._marked()
            case "step" if is_over:
                return self._step()
            case _:
                return None

    def _begin_all_but_replicas(self, process: Any) -> None:
        if process.spec.role == "replica":
            process.children.append(Absent(self._board, process.spec))
        else:
            self._begin(process)

    def _up(self) -> dict[str, Any] | None:
        """Once everybody is started: where it listens, and the processes."""
        config, started = self._controller.config, self._local.processes
        found = {role: one.children for (role, _), one in started.items() if role != "replica"}
        if len(started) < config.local.replicas + len(found) or not all(found.values()) or "trainer" not in found:
            return None
        ranks = {f"rank {at}": child.pid for at, child in enumerate(found.pop("trainer"))}
        pids = {role: children[0].pid for role, children in found.items()} | ranks
        return {"port": self._controller.server.port, "heartbeat_s": config.health.heartbeat_s, "pids": pids}

    def _listen(self) -> None:
        trainer, liveness = (
            self._controller.components.get("trainer", 0),
            getattr(self._controller.server, "liveness", None),
        )
        if trainer is not None and liveness is not None and trainer.joined and not self._controller.stopped:
            self._silence_s = max(self._silence_s, liveness.age_s(trainer.spec.name))

    def _marked(self) -> dict[str, Any]:
        """Since the last time."""
        at, deaths, tokens = self._mark
        lags, seen = self._lag.samples[at:], self._seen
        self._mark = (len(self._lag.samples), seen.deaths, seen.trained_tokens)
        lag = {"lag_p50_s": percentile(lags, 0.5), "lag_p99_s": percentile(lags, 0.99)}
        return lag | {"deaths": seen.deaths - deaths, "trained_tokens": seen.trained_tokens - tokens}

    def _step(self) -> dict[str, Any]:
        seen, heartbeat_s = self._seen, self._controller.config.health.heartbeat_s
        return self._marked() | {
            "seconds": seen.trained_at - seen.train_at,
            "controller_cpu_s": seen.trained_cpu - seen.train_cpu,
            "longest_silence_s": self._silence_s,
            "missed_heartbeats": max(0, int(self._silence_s / heartbeat_s) - 1),
        }


class BareTimer:
    """How late a thread wakes up that does nothing else: the share of every lag that is the machine's."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            time.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            while due <= now:
                self._samples.append(now - due)
                due += SAMPLE_S

    def p99_s(self) -> float:
        """Since the last time."""
        samples, self._samples = self._samples, []
        return percentile(samples, 0.99)


class Rig:
    """A controller, and its mock replicas."""

    def __init__(self, replicas: int, control: Callable[..., None], make: Callable[..., Any], *values: Any) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.board, self.timer = Board(self._context, replicas), BareTimer()
        self.controller = Controller(self._context, control, self.board, *values)
        up = self.controller.ask("up")  # its port, and the processes that it has started
        self.pids: dict[str, int] = {"controller": self.controller.process.pid or 0, **up["pids"]}
        shares = [list(range(replicas))[at::PROCESSES] for at in range(PROCESSES)]
        self.producers = [
            self._context.Process(target=_produce, args=(self.board, at, make, up, ids), daemon=True)
            for at, ids in enumerate(shares)
        ]
        for producer in self.producers:
            producer.start()
        self.controller.ask("joined")

    def cpus(self) -> dict[str, float]:
        mocks = sum([cpu_s(one.pid or 0) for one in self.producers])
        return {name: cpu_s(pid) for name, pid in self.pids.items()} | {"mocks": mocks}

    def end(self) -> None:
        self.board.over.value = 1
        for producer in self.producers:
            producer.join(30)
        self.controller.end()


def fleet_settings(replicas: int, running: int) -> dict[str, str]:
    """Of a run with so many mock replicas, each with so many answers at once. What is generated is trained once;
    versions are loaded in the middle of an answer, which costs a mock nothing."""
    return {
        "model.preset": "qwen2.5-7b",
        "rollout.engine": "emulated",
        "trainer.engine": "emulated",
        "trainer.mini_batches": "2",
        "costs.decode_step": "0.001",
        "schedule.kind": "partial",
        "schedule.max_staleness": "1000",
        "schedule.max_inflight": str(replicas * running),
        "schedule.steps_ahead": str(ceil(replicas * running / (PROMPTS * GROUP)) + 2),
        "workload.group_size": str(GROUP),
        "workload.prompts_per_step": str(PROMPTS),
        "workload.max_completion_tokens": str(ANSWER),
        "local.start_s": "600",
        "run.steps": "1000000",
        "run.evaluate": "false",
    }


def _produce(board: Board, at: int, make: Callable[..., Mock], up: dict[str, Any], ids: list[int]) -> None:
    with suppress(ConnectionError):  # the controller has ended
        produce(board, at, lambda *name: make(*name, up["port"]), ids, up["heartbeat_s"])


# ------------------------------------------------------------------------------------------------------- the figures


class Phase:
    """Some seconds with one rate."""

    def __init__(self, rig: Rig, name: str, seconds: float, rate: float = 0.0) -> None:
        self._rig, self.name, self._seconds, self._rate = rig, name, seconds, rate
        rig.board.rate.value = rate
        rig.controller.ask("mark")
        rig.timer.p99_s()
        self._began, self._cpus, self._written = time.monotonic(), rig.cpus(), written_mb(rig.pids)
        self._stored = rig.board.tokens
        self._looks: list[dict[str, float]] = []

    def watch(self) -> dict[str, Any]:
        while (past := time.monotonic() - self._began) < self._seconds:
            time.sleep(min(LOOK_S, self._seconds - past))
            self._look()
            assert all(one.is_alive() for one in self._rig.producers), "a process of mock replicas has ended"
        return self._row()

    def _look(self) -> None:
        board, pids = self._rig.board, self._rig.pids
        rss = {f"{name}_rss_mb": rss_mb(pid) for name, pid in pids.items()}
        tokens = board.tokens - self._stored
        at = time.monotonic() - self._began
        self._looks.append({"at_s": at, "tokens": tokens, "held_up": sum(board.held_up), **rss})

    def _row(self) -> dict[str, Any]:
        wall_s = time.monotonic() - self._began
        tokens = self._rig.board.tokens - self._stored
        found, cpus = self._rig.controller.ask("mark"), self._rig.cpus()
        used = {name: (cpus[name] - before) for name, before in self._cpus.items()}
        rss = [look["controller_rss_mb"] for look in self._looks]
        return {
            "phase": self.name,
            "offered_tokens_per_s": self._rate,
            "seconds": wall_s,
            "tokens_per_s": tokens / wall_s,
            "slowest_5_s_tokens_per_s": slowest(self._looks),
            "cpu_s_per_million": {name: one / max(tokens / 1e6, 1e-9) for name, one in used.items()},
            "cores": {name: one / wall_s for name, one in used.items()},
            "controller_rss_mb": {f"{share} %": rss[max(0, len(rss) * share // 100 - 1)] for share in (10, 50, 100)},
            "held_up": statistics.fmean([look["held_up"] for look in self._looks]),
            "written_mb_per_s": (written_mb(self._rig.pids) - self._written) / wall_s,
            **found,
            "bare_timer_p99_s": self._rig.timer.p99_s(),
            "load": os.getloadavg()[0],
            "looks": thinned(self._looks),
        }


def slowest(looks: list[dict[str, float]], window: int = 5) -> float:
    pairs = zip(looks, looks[window:], strict=False)
    return min([(b["tokens"] - a["tokens"]) / (b["at_s"] - a["at_s"]) for a, b in pairs], default=0.0)


def thinned(looks: list[dict[str, float]], most: int = 30) -> list[dict[str, float]]:
    return looks[:: max(1, len(looks) // most)]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))] if values else 0.0


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def rss_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1e6
    except OSError:
        return 0.0


def written_mb(pids: dict[str, int]) -> float:
    return sum([_written_mb(pid) for name, pid in pids.items() if name in ("store", "controller")])


def _written_mb(pid: int) -> float:
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["write_bytes"]) / 1e6


def disk_mb_per_s(folder: Path, mbytes: int = 1024, piece: int = 16 << 20) -> float:
    """Plain sequential writes, synced about as often as a busy store commits."""
    content, began = os.urandom(piece), time.monotonic()
    path = folder / "plain"
    with path.open("wb", buffering=0) as file:
        for _ in range(mbytes * (1 << 20) // piece):
            file.write(content)
            os.fdatasync(file.fileno())
    path.unlink()
    return mbytes * 1.048576 / (time.monotonic() - began)


# ------------------------------------------------------------------------------------------------------------- phases


def phases(rig: Rig, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All that is asked for of one rig: as much as it takes, or what happens when it is offered twice of that."""
    yield Phase(rig, "warm-up", options.warm_up, options.rate).watch()
    if not options.overload:
        yield Phase(rig, "sustained", options.seconds, options.rate).watch()
        return
    found = Phase(rig, "as much as is taken", options.seconds / 4).watch()
    yield found
    limit = found["tokens_per_s"]
    for name, share in (("below the limit", 0.7), ("twice the limit", 2.0), ("below it again", 0.7)):
        yield Phase(rig, name, options.seconds / 4, share * limit).watch()


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--running", type=int, default=64, help="answers that each generates at once")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=15.0)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of an answer that are sent at once")
    parser.add_argument("--rate", type=float, default=0.0, help="tokens/s that are offered; 0: as many as are taken")
    parser.add_argument("--overload", action="store_true", help="find the limit, then offer twice of it for a while")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--dry", action="store_true", help="write no result")
    return parser


def measured(what: str, chosen: argparse.Namespace, build: Callable[[Path], Rig]) -> None:
    """Build a rig in a folder of its own, go through its phases, print and keep the figures."""
    folder = Path(tempfile.mkdtemp(prefix="tailrace-data-path-", dir=chosen.folder))
    try:
        disk = disk_mb_per_s(folder)
        rig = build(folder / "run")
        try:
            rows = [row | {"disk_mb_per_s": disk} for row in phases(rig, chosen)]
        finally:
            rig.end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept = {name: value for name, value in vars(chosen).items() if isinstance(value, int | float | bool)}
    for row in rows:
        print("\n".join(figures(what, kept, row)), flush=True)
    if not chosen.dry:
        keep([{"what": what, "options": kept, **row} for row in rows if row["phase"] != "warm-up"])


def keep(rows: list[dict[str, Any]]) -> None:
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*before, *rows], indent=1) + "\n")


def figures(what: str, chosen: dict[str, Any], row: dict[str, Any]) -> Iterator[str]:
    offered = f", {row['offered_tokens_per_s'] / 1e6:.2f}M offered" if row["offered_tokens_per_s"] else ""
    fleet = f"{chosen['replicas']} replicas x {chosen['running']}"
    yield f"{what}, {fleet}, {row['phase']}, {row['seconds']:.0f} s{offered}:"
    slow = f"slowest 5 s: {row['slowest_5_s_tokens_per_s'] / 1e6:.2f}M"
    yield f"  {row['tokens_per_s'] / 1e6:.2f}M tokens/s ({slow}), held up: {row['held_up']:.1f} replicas"
    yield "  CPU s per million tokens: " + _listed(row["cpu_s_per_million"], "{:.4f}")
    yield "  cores: " + _listed(row["cores"], "{:.2f}")
    yield "  controller: RSS " + _listed(row["controller_rss_mb"], "{:.0f} MB")
    lag = f"p50 {1e3 * row['lag_p50_s']:.1f} ms, p99 {1e3 * row['lag_p99_s']:.1f} ms"
    yield f"  event-loop lag {lag}; of a bare timer p99 {1e3 * row['bare_timer_p99_s']:.1f} ms"
    yield f"  declared dead: {row['deaths']}; trained tokens {row['trained_tokens'] / 1e6:.1f}M"
    disk = f"written {row['written_mb_per_s']:.0f} MB/s, plain synced writes {row['disk_mb_per_s']:.0f} MB/s"
    yield f"  {disk}; load average {row['load']:.1f}"


def _listed(values: dict[str, float], form: str) -> str:
    return ", ".join([f"{name} {form.format(value)}" for name, value in values.items()])
