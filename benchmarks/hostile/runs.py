"""Decoders of what a run wrote: the journal, `run.db`, snapshots, checkpoints."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from hostile.inputs import Decode
from hostile.messages import examples


def events(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.protocol import AnyEvent

    decoder = msgspec.json.Decoder(AnyEvent)
    seeds = [msgspec.json.encode(each.event) for each in examples()[0] if hasattr(each, "event")]
    return seeds, lambda data: bool(decoder.decode(data) or True)


def commands(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.protocol import AnyCommand

    decoder = msgspec.json.Decoder(list[AnyCommand])
    seeds = [msgspec.json.encode([each.command]) for each in examples()[1] if hasattr(each, "command")]
    return seeds, lambda data: bool(decoder.decode(data) or True)


def _small_run(folder: Path) -> Path:
    """A run's store with something in every table."""
    from tailrace.config import load
    from tailrace.protocol import Request, TrajectoryMeta
    from tailrace.store.run import RunStore

    shutil.rmtree(folder / "run", ignore_errors=True)
    config = load([], ["--model.preset", "qwen2.5-7b"])
    with RunStore.create(folder / "run", config) as store:
        store.trajectories.assign([Request(id, 1, 0, 0, 3) for id in range(2)])
        store.trajectories.finish(TrajectoryMeta(0, 1, 2, 0, 0, "stop", 1.0))
        store.metrics.measure(0.0, 1, "trainer", {"loss": 0.5})
        up, _ = examples()
        for number, each in enumerate(each for each in up if hasattr(each, "event")):
            store.record(float(number), each.event, [])
        store.snapshot(3, b"state")
    return folder / "run" / "run.db"


def journal_rows(folder: Path) -> tuple[list[bytes], Decode]:
    """Whatever a row may hold, as text or as bytes."""
    from tailrace.store.journal import Journal

    path = _small_run(folder)
    seeds = [msgspec.json.encode(each.event) for each in examples()[0] if hasattr(each, "event")]
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("DELETE FROM journal WHERE seq > 1")
        database.commit()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA synchronous = OFF")
    column = ["event", "event", "commands", "now", "kind", "crc", "seq"]

    def decode(data: bytes) -> None:
        value: Any = data.decode(errors="replace") if len(data) % 3 else data
        name = column[len(data) % len(column)] if data not in seeds else "event"
        database.execute("DELETE FROM journal")
        row = {"seq": 1, "now": 0.0, "kind": "x", "event": seeds[0].decode(), "commands": "[]", "crc": 0}
        row[name] = value if name != "event" or data not in seeds else data.decode()
        with suppress(sqlite3.IntegrityError):
            database.execute("INSERT INTO journal VALUES (:seq, :now, :kind, :event, :commands, :crc)", row)
        journal = Journal(path)
        list(journal.entries())
        if data not in seeds:
            journal.check()

    return seeds, decode


def run_file(folder: Path) -> tuple[list[bytes], Decode]:
    """run.db itself: read as `story`, `replay` and the page do, and opened as `--resume` does."""
    from tailrace.page.follow import Follower
    from tailrace.store.journal import Journal, JournalError
    from tailrace.store.metrics import measurements
    from tailrace.store.run import RunStore
    from tailrace.store.trajectories import known_trajectories

    path = _small_run(folder)
    whole = path.read_bytes()
    for rest in path.parent.glob("run.db-*"):
        rest.unlink()

    def decode(data: bytes) -> None:
        for rest in path.parent.glob("run.db-*"):
            rest.unlink()
        path.write_bytes(data)
        trouble: JournalError | None = None
        for read in (
            lambda: [Journal(path).config, *Journal(path).entries()],
            lambda: known_trajectories(path, "trajectory", 0),
            lambda: list(measurements(path)),
            lambda: Follower(path),
            lambda: _resumed(RunStore.reopen(path.parent)),
        ):
            try:
                read()
            except JournalError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    return [whole], decode


def _resumed(store: Any) -> None:
    with store:
        list(store.entries(0))
        store.newest_snapshot()
        store.trajectories.results([0, 1])


def snapshots(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load
    from tailrace.control.plane import ControlPlane
    from tailrace.protocol import Prompt, PromptsAdded

    config = load([], ["--model.preset", "qwen2.5-7b"])
    plane = ControlPlane(config)
    plane.handle(0.0, PromptsAdded(0, tuple(Prompt(each, 10) for each in range(4))))  # type: ignore[call-arg]
    return [plane.snapshot()], lambda data: bool(ControlPlane.restore(config, data))


def checkpoint_state(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.trainer.manifest import TrainerState, check, described
    from tailrace.trainer.sealed import sealed

    place = folder / "step-00000001"
    place.mkdir(exist_ok=True)
    (place / "model.safetensors").write_bytes(b"weights" * 100)
    state = TrainerState(1, 4, files={"model.safetensors": described(place / "model.safetensors")})

    def decode(data: bytes) -> None:
        (place / "state.json").write_bytes(data)
        check(place)

    return [sealed(state)], decode


def checkpoint_tensors(folder: Path) -> tuple[list[bytes], Decode]:
    import torch
    from safetensors.torch import save

    from tailrace.trainer.saved_tensors import SavedTensors, whole

    file = folder / "optimizer.safetensors"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        with SavedTensors(folder) as saved:
            whole(saved, "optimizer")

    return [save({"exp_avg/a": torch.ones(3, 4), "step/a": torch.tensor(3.0)}), save({"x": torch.zeros(0)})], decode
