"""Sample stores are killed, stopped, damaged, or lost with their host: every sample is there once, or made again."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from faults import Fault
from guests import ends_well, left, on_two_hosts
from hosts import missing
from proof import prove
from victim import victim

from runs import EMULATED, Run
from tailrace.protocol import Forget
from tailrace.samples.file import SampleFile
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file
from tailrace.store.journal import Journal

GROWING = ("--workload.lengths.median", "80", "--costs.decode_step", "0.003", "--rollout.stream_tokens", "4")
PATIENT = ("--run.steps", "100000", "--schedule.max_staleness", "100")  # nothing is dropped as stale meanwhile
STEPS = 12  # of runs that are interrupted in their middle
FLEET = (EMULATED, *GROWING, "--local.replicas", "3", "--local.relays", "2", "--repack.every_s", "0.2")


def query(run: Run, statement: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{run.folder / 'run.db'}?mode=ro", uri=True)) as database:
        return database.execute(statement).fetchall()


def lost(run: Run) -> set[int]:
    """Samples that the journal says were lost with their tokens."""
    forgets = [one for entry in Journal(run.folder).entries() for one in entry.commands if isinstance(one, Forget)]
    return {id for forget in forgets if forget.reason in ("lost", "regenerate") for id in forget.trajectories}


def test_nothing_is_lost_or_doubled_whatever_happens_to_the_store(tmp_path):
    with victim(tmp_path, *FLEET, *PATIENT) as run:
        run.start()
        trained_some(run)
        for number, kind in enumerate(("killed", "killed with the controller", "stopped for good", "killed")):
            assert Fault(0.0, f"store {kind}", number).strike(run)
            trained_some(run)
        assert run.interrupt()[0] == 130, run.said()
        proof = prove(run.folder)
    assert (proof.regenerated, run.resumed) == (0, 0)
    assert proof.lost["Store"] >= 3
    assert proof.read > proof.trained > 20


def trained_some(run: Run) -> None:
    parts = run.events("Trained")
    run.until(lambda: run.events("Trained") > parts + 8, "more steps")


# ----------------------------------------------------------------------------------------------- two stores, two hosts

GUEST = 2  # the number of the second machine that joins


def trained_from(run: Run) -> Counter[int]:
    """Samples that were trained, by the store that has them."""
    return Counter(dict(query(run, "SELECT store, count(*) FROM trajectories WHERE step IS NOT NULL GROUP BY store")))


def trained_on_both(run: Run) -> None:
    before, both = trained_from(run), (0, GUEST)
    run.until(lambda: min((trained_from(run) - before)[store] for store in both) > 8, "samples of both to be trained")


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_a_host_keeps_its_samples_and_when_it_is_cut_off_they_are_generated_again(tmp_path):
    SampleFile.at(sample_file(tmp_path / "foreign", 1), "another run").close()
    with on_two_hosts(tmp_path, *GROWING, *PATIENT) as (network, run, join):
        status, err = join("--store", str(tmp_path / "foreign")).wait()
        assert (status, "samples-1.db is of another run; move it away" in err.splitlines()[-1]) == (2, True), err
        guest = join("--store", str(tmp_path / "kept"))
        trained_on_both(run)
        os.kill(guest.components()[f"store{GUEST}"], signal.SIGKILL)
        trained_on_both(run)
        assert not lost(run), "a store that comes back has lost nothing"
        network.isolate(1)
        run.until(lambda: [one.host for one in left(run)] == [1, GUEST], "its loss")
        trained_some(run)
        guest.child.kill()  # it would wait for a minute
        proof = ends_well(run)
    assert proof.lost["Store"] == 1
    assert proof.regenerated == len(lost(run)) > 0
    told = dict(query(run, f"SELECT id, tokens FROM trajectories WHERE store = {GUEST} AND step IS NOT NULL"))
    assert told.items() >= trained_in(tmp_path / "kept", told).items() > set()


def trained_in(folder: Path, trained: Collection[int]) -> dict[int, int]:
    """Of what was trained: the samples that a store had when it was cut off, and how many tokens of each. Those that no
    checkpoint covered yet are read; the others may all be archived by then."""
    path = sample_file(folder, GUEST)
    with closing(sqlite3.connect(path)) as database, closing(SampleReader(path)) as reader:
        rows = database.execute("SELECT id, tokens, payload FROM trajectories WHERE payload IN ('live', 'archived')")
        found = {id: (tokens, payload) for id, tokens, payload in rows if id in trained}
        live = sorted(id for id, (_, payload) in found.items() if payload == "live")
        read = {one.id: sum(map(len, one.pieces[1:])) for one in reader.read(live)}
        return {id: tokens for id, (tokens, _) in found.items()} | read


# ------------------------------------------------------------------------------------------------------- damaged files


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Run:
    """A run that was stopped with samples that are finished and not trained yet, and others half generated."""
    folder = tmp_path_factory.mktemp("interrupted")
    run = Run(folder, EMULATED, *GROWING, "--costs.train_mini_batch", "0.2", "--run.steps", str(STEPS)).start()
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
    "changed": lambda run: flip_bits(run, "state IN ('finished', 'trained', 'running')"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_gone_or_changed_is_generated_again_and_never_trained_on(interrupted, tmp_path, damage):
    run = copy_of(interrupted, tmp_path)
    shutil.copy(interrupted.folder.parents[1] / "older.db", tmp_path / "older.db")
    DAMAGE[damage](run)
    run.finish("--resume")
    proof = prove(run.folder)
    assert proof.steps == STEPS
    assert run.events("SamplesLost")
    assert proof.regenerated == len(lost(run)) > 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("another run", "samples-0.db is of another run; move it away, and the samples that are missing are generated"),
        ("heads", "samples-0.db is damaged: what is noted of t"),
        ("prompts", "samples-0.db is damaged: p"),
    ],
)
def test_a_file_that_cannot_be_trusted_ends_the_run_with_one_sentence(interrupted, tmp_path, content, sentence):
    run = copy_of(interrupted, tmp_path)
    spoil(sample_file(run.folder, 0), content)
    trained = run.events("Trained")
    ends_with_one_sentence(run, sentence)
    assert run.events("Trained") == trained


def ends_with_one_sentence(run: Run, sentence: str) -> None:
    status, _, err = run.start("--resume").wait()
    assert (status, len(err.strip().splitlines())) == (2, 1), err
    assert sentence in err


def spoil(path: Path, content: str) -> None:
    match content:
        case "another run":
            path.unlink()
            SampleFile.at(path, "another run").close()
        case "heads":
            change(path, "UPDATE trajectories SET attempt = attempt + 1 WHERE payload = 'live'")
        case _:
            change(path, "UPDATE prompts SET tokens = zeroblob(length(tokens) + 4)")


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)


# -------------------------------------------------------------------------------------------------------- a full disk


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_without_room_for_samples_ends_the_run_with_one_sentence_and_it_goes_on_later(interrupted, tmp_path):
    run, elsewhere = copy_of(interrupted, tmp_path), tmp_path / "disk"
    file, moved = sample_file(run.folder, 0), elsewhere / "samples-0.db"
    elsewhere.mkdir()
    with mounted(elsewhere, file.stat().st_size + (200 << 10)):
        shutil.move(file, moved)
        file.symlink_to(moved)
        ends_with_one_sentence(run, "samples-0.db cannot be written any further: the disk is full; what was committed")
        subprocess.run(["mount", "-o", "remount,size=64m", str(elsewhere)], check=True, timeout=20)
        run.finish("--resume")
        proof = prove(run.folder)
    assert (proof.steps, proof.regenerated) == (STEPS, 0)


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=20).returncode:
        pytest.skip("a small disk cannot be mounted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)
