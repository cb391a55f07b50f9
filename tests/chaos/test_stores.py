"""Sample stores are killed, stopped, damaged, or lost with their host: every sample is there once, or made again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from faults import Fault
from guests import a_run, at_work, ends_well, left, on_two_hosts
from hosts import missing
from proof import prove
from torment import torment
from victim import victim

from runs import EMULATED, Run
from tailrace.protocol import Forget
from tailrace.samples.file import SampleFile, SampleReader, sample_file
from tailrace.store.journal import Journal

GROWING = ("--workload.lengths.median", "80", "--costs.decode_step", "0.003", "--rollout.stream_tokens", "4")
PATIENT = ("--run.steps", "100000", "--schedule.max_staleness", "100")  # nothing is dropped as stale meanwhile
FLEET = (EMULATED, *GROWING, "--local.replicas", "3", "--local.relays", "2", "--repack.every_s", "0.2")


def query(run: Run, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        return database.execute(statement).fetchall()


def lost(run: Run) -> set[int]:
    """Samples that the journal says were lost with their tokens."""
    forgets = [one for entry in Journal(run.folder).entries() for one in entry.commands if isinstance(one, Forget)]
    return {id for forget in forgets if forget.reason in ("lost", "regenerate") for id in forget.trajectories}


@pytest.mark.parametrize("kind", ["store killed", "store stopped for good", "store killed with the controller"])
def test_nothing_is_lost_or_doubled_whatever_happens_to_the_store(tmp_path, kind):
    draw = random.Random(kind)
    faults = [Fault(draw.uniform(0.2, 2.0), kind, draw.randrange(1 << 30)) for _ in range(4)]
    with victim(tmp_path, *FLEET, "--run.steps", "25") as run:
        struck = torment(run, iter(faults))
        proof = prove(run.folder)
    assert (proof.trained, proof.regenerated, run.resumed) == (25 * 4, 0, 0)
    assert struck
    assert proof.read > 25 * 4


# ----------------------------------------------------------------------------------------------- two stores, two hosts


def trained_from(run: Run) -> Counter[int]:
    """Samples that were trained, by the store that has them."""
    return Counter(dict(query(run, "SELECT store, count(*) FROM trajectories WHERE step IS NOT NULL GROUP BY store")))


def trained_on_both(run: Run) -> None:
    before = trained_from(run)
    run.until(lambda: min((trained_from(run) - before)[store] for store in (0, 1)) > 8, "samples of both to be trained")


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_a_host_keeps_its_samples_and_when_it_is_cut_off_they_are_generated_again(tmp_path):
    with on_two_hosts(tmp_path, *GROWING, *PATIENT) as (network, run, join):
        join("--store", str(tmp_path / "kept"))
        at_work(run, 1)
        trained_on_both(run)
        network.isolate(1)
        run.until(partial(left, run), "its loss")
        steps = run.events("Trained")
        run.until(lambda: run.events("Trained") > steps + 20, "steps without it")
        proof = ends_well(run)
    assert [one.host for one in left(run)] == [1]
    assert proof.regenerated == len(lost(run)) > 0
    with closing(SampleReader(sample_file(tmp_path / "kept", 1))) as reader:
        ids = [id for (id,) in query(run, "SELECT id FROM trajectories WHERE store = 1 AND step IS NOT NULL")]
        told = dict(query(run, "SELECT id, tokens FROM trajectories WHERE store = 1 AND step IS NOT NULL"))
        assert {one.id: sum(map(len, one.pieces[1:])) for one in reader.read(ids)} == told


def test_a_store_elsewhere_comes_back_alone_and_leaves_with_its_host(tmp_path):
    with a_run(tmp_path, *GROWING, *PATIENT) as (run, join):
        guest = join("--store", str(tmp_path / "kept"))
        at_work(run, 1)
        trained_on_both(run)
        os.kill(guest.components()["store1"], signal.SIGKILL)
        trained_on_both(run)
        assert not lost(run)
        guest.child.kill()
        run.until(partial(left, run), "its loss")
        steps = run.events("Trained")
        run.until(lambda: run.events("Trained") > steps + 20, "steps without it")
        proof = ends_well(run)
    assert proof.lost["Store"] >= 1
    assert proof.regenerated == len(lost(run)) > 0


def test_a_machine_that_offers_the_samples_of_another_run_is_sent_away_with_a_sentence(tmp_path):
    SampleFile.at(sample_file(tmp_path / "kept", 1), "another run").close()
    with a_run(tmp_path, *PATIENT) as (run, join):
        status, err = join("--store", str(tmp_path / "kept")).wait()
        assert status == 2
        assert "samples-1.db is of another run; move it away" in err.splitlines()[-1]
        at_work(run, 0)
        ends_well(run)


# ------------------------------------------------------------------------------------------------------- damaged files


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Run:
    """A run that was stopped with samples that are finished and not trained yet, and others half generated."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = Run(folder, EMULATED, *GROWING, "--costs.train_mini_batch", "0.2", "--run.steps", "12").start()
    run.until(lambda: run.events("Trained") >= 6, "three steps")
    older = folder / "older.db"
    run.until(lambda: _backed_up(run, older), "a copy of its samples")
    run.until(lambda: run.events("Trained") >= 10, "five steps")
    assert run.interrupt()[0] == 130
    assert query(run, "SELECT count(*) FROM trajectories WHERE state = 'finished'") > [(0,)]
    return run


def _backed_up(run: Run, copy: Path) -> bool:
    with closing(sqlite3.connect(run.folder / "samples-0.db")) as now, closing(sqlite3.connect(copy)) as then:
        now.backup(then)
    return True


def copy_of(run: Run, folder: Path) -> Run:
    shutil.copytree(run.folder, folder / "runs" / "run")
    options = run.options[run.options.index("--run.folder") + 2 :]
    return Run(folder, EMULATED, *options)


def flip_bits(run: Run, where: str) -> None:
    """In the tokens of the segments of some samples."""
    with closing(sqlite3.connect(run.folder / "samples-0.db")) as database, database:
        database.execute(f"ATTACH '{run.folder / 'run.db'}' AS run")
        rows = database.execute(
            "SELECT number, s.tokens FROM segments AS s JOIN run.trajectories AS t ON t.id = trajectory_id"
            f" WHERE t.payload = 'live' AND {where}"
        ).fetchall()
        assert rows
        changed = [(bytes([blob[0] ^ 1, *blob[1:]]), number) for number, blob in rows]
        database.executemany("UPDATE segments SET tokens = ? WHERE number = ?", changed)


DAMAGE = {
    "missing": lambda run: (run.folder / "samples-0.db").unlink(),
    "an older copy": lambda run: shutil.copy(run.folder.parents[1] / "older.db", run.folder / "samples-0.db"),
    "finished samples changed": lambda run: flip_bits(run, "state IN ('finished', 'trained')"),
    "prefixes changed": lambda run: flip_bits(run, "state = 'running'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_gone_or_changed_is_generated_again_and_never_trained_on(interrupted, tmp_path, damage):
    run = copy_of(interrupted, tmp_path)
    shutil.copy(interrupted.folder.parents[1] / "older.db", tmp_path / "older.db")
    DAMAGE[damage](run)
    run.finish("--resume")
    proof = prove(run.folder)
    assert proof.steps == 12
    assert run.events("SamplesLost")
    assert proof.regenerated == len(lost(run)) > 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("another run", "samples-0.db is of another run; move it away, and the samples that are missing are generated"),
        ("text", "samples-0.db is not the journal of a run: it is not a SQLite file"),
        ("half", "samples-0.db is cut in the middle"),
        ("heads", "samples-0.db is damaged: what is noted of t"),
        ("prompts", "samples-0.db is damaged: p"),
    ],
)
def test_a_file_that_cannot_be_trusted_ends_the_run_with_one_sentence(interrupted, tmp_path, content, sentence):
    run = copy_of(interrupted, tmp_path)
    spoil(sample_file(run.folder, 0), content)
    trained = run.events("Trained")
    status, _, err = run.start("--resume").wait()
    assert (status, len(err.strip().splitlines())) == (2, 1), err
    assert sentence in err
    assert run.events("Trained") == trained


def spoil(path: Path, content: str) -> None:
    match content:
        case "another run":
            path.unlink()
            SampleFile.at(path, "another run").close()
        case "text":
            path.write_text("not a database at all")
        case "half":
            os.truncate(path, path.stat().st_size // 2)
        case "heads":
            change(path, "UPDATE trajectories SET attempt = attempt + 1 WHERE payload = 'live'")
        case _:
            change(path, "UPDATE prompts SET tokens = zeroblob(length(tokens) + 4)")


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
