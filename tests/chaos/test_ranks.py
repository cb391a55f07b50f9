"""The ranks of one trainer on several machines: they come, die, hang and leave in every way, and training goes on.

Each test without a network of its own plays the machines on the loopback: `tailrace worker` twice or more.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
import xxhash
from guests import Guest, address, at_work, ends_well, gone, joined, left, on_hosts, waiting_run
from hosts import Network, missing
from safetensors.torch import load
from transformers import AutoConfig, AutoModelForCausalLM

from runs import EMULATED, NATIVE, START, Run
from tailrace.runtime.local import read_records
from tailrace.trainer.export import write_model
from tailrace.weights.shared_memory import default_base

TWO = ("--trainer.ranks", "2", "--trainer.interface", "lo", "--run.steps", "100000")
needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def trained(run: Run, more: int = 3) -> None:
    """So many mini-batches from now on."""
    before = run.events("Trained")
    run.until(lambda: run.events("Trained") >= before + more, "training")


def came_back(run: Run, joined: int) -> None:
    run.until(lambda: run.events("TrainerJoined") > joined, "the trainer to be back")
    trained(run)


def test_ranks_of_workers_that_come_late_train_die_and_are_found_again_by_a_new_controller(tmp_path):
    with waiting_run(tmp_path, *TWO, "--local.ranks", "0") as (run, join):
        run.until(lambda: run.events("TrainerWaits"), "the sentence")
        first = join("--ranks", "1")
        run.until(lambda: run.events("TrainerWaits") == 2, "one of two")
        second = join("--replicas", "1", "--ranks", "1")
        trained(run)
        assert (first.components().keys(), second.components().keys()) == (
            {"relay1", "trainer0"},
            {"relay2", "replica1", "trainer0.1"},
        )
        at_work(run, 0, 1)

        before = first.components() | second.components()
        os.kill(run.controller(), signal.SIGKILL)
        came_back(run, run.events("TrainerJoined"))
        assert first.components() | second.components() == before
        assert run.events("TrainerLost") == 0

        joined = run.events("TrainerJoined")
        os.kill(second.components()["trainer0.1"], signal.SIGKILL)
        came_back(run, joined)
        assert not left(run)
        proof = ends_well(run)
        assert proof.lost["Trainer"] == 1
        assert [guest.wait()[0] for guest in (first, second)] == [0, 0]
        waits = "the trainer waits for 2 more ranks: tailrace worker --join 127.0.0.1:"
        assert waits in (run.folder / "logs" / "controller.log").read_text()


OTHER_FOLDER = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')  # then the folder


@pytest.mark.skipif(os.geteuid() != 0, reason="a machine with another file system is made by root")
def test_a_run_with_nothing_of_its_own_waits_for_what_others_bring_and_sends_away_who_does_not_fit(tmp_path):
    nothing = ("--local.ranks", "0", "--local.replicas", "0", "--run.steps", "100000", "--trainer.ranks", "1")
    with waiting_run(tmp_path, *nothing) as (run, join):
        run.until(lambda: run.events("TrainerWaits"), "the sentence")
        key, where = (run.folder / "join.key").read_text(), ("--join", address(run))
        elsewhere = Guest(tmp_path / "other", *where, "--ranks", "1", inside=(*OTHER_FOLDER, str(run.folder)), key=key)
        status, err = elsewhere.wait()
        assert (status, "is not shared with this machine" in err.splitlines()[-1]) == (2, True), err
        run.until(lambda: left(run), "its leaving")
        assert "is not shared with this machine" in left(run)[0].reason

        training, generating = join("--ranks", "1"), join()
        trained(run)
        assert sorted(name.rstrip("0123456789") for name in training.components()) == ["relay", "trainer"]
        assert generating.interrupt()[0] == 130
        run.until(lambda: len(left(run)) == 2, "its leaving")
        join()
        trained(run)
        ends_well(run)
        assert training.wait()[0] == 0
        log = (run.folder / "logs" / "controller.log").read_text()
        assert len(re.findall("the run waits for a replica: tailrace worker --join .* --replicas 1", log)) == 2
        assert "the trainer waits for 1 more rank: tailrace worker" in log


def test_nobody_comes_and_the_run_ends_with_the_sentence(tmp_path):
    wait = ("--local.ranks", "0", "--trainer.ranks", "2", "--trainer.interface", "lo", "--local.wait_s", "1")
    run = Run(tmp_path, EMULATED, "--local.listen", "127.0.0.1", *wait).start()
    status, _, err = run.wait()
    assert status == 2, err
    assert "nobody came within 1 s (local.wait_s), and the trainer waits for 2 more ranks: tailrace worker" in err


@pytest.mark.soak
def test_what_dies_together_with_the_controller_is_missed_by_the_next_one(tmp_path):
    """A rank on another machine, and then the whole machine; one is in reserve."""
    with waiting_run(tmp_path, *TWO, "--local.ranks", "1") as (run, join):
        guests = [join("--ranks", "1")]
        trained(run)
        guests.append(join("--ranks", "1"))
        run.until(lambda: len(joined(run)) == 2, "the reserve")
        for whom in ("rank", "machine"):
            back, victim = run.events("TrainerJoined"), guests[0]
            ids = [victim.components()["trainer0.1"]] if whom == "rank" else [victim.child.pid]
            for id in (run.controller(), *ids):
                os.kill(id, signal.SIGKILL)
            came_back(run, back)
        gone(run, guests[0])
        assert "trainer0.1" in guests[1].components()
        assert ends_well(run).lost["Trainer"] >= 2


@pytest.mark.soak
def test_a_worker_that_leaves_takes_its_rank_along_and_the_trainer_waits_for_another(tmp_path):
    with waiting_run(tmp_path, *TWO, "--local.ranks", "1") as (run, join):
        first = join("--ranks", "1")
        trained(run)
        back, finished = run.events("TrainerJoined"), run.events("Finished")
        assert first.interrupt()[0] == 130
        run.until(lambda: run.events("TrainerWaits") == 2, "the trainer to wait")
        run.until(lambda: run.events("Finished") > finished, "rollouts to go on")
        join("--ranks", "3")
        came_back(run, back)
        ends_well(run)


# ------------------------------------------------------------------------------------------------- hosts of their own

NETWORK = ("--trainer.interface", "10.77.0.0/24")
ENDLESS = ("--run.steps", "100000", "--local.replicas", "1")


def host_of_rank(run: Run, rank: int) -> int:
    """The number of the machine, by the newest start of the trainer."""
    (record,) = [one for one in read_records(run.folder).components if one.role == "trainer"]
    return record.rank_hosts[rank]


@needs_hosts
@pytest.mark.soak
def test_when_the_host_of_a_rank_or_of_the_meeting_dies_others_take_its_place(tmp_path):
    """Five machines: the controller's without ranks, and room for five of three ranks on the others."""
    options = ("--trainer.ranks", "3", "--local.ranks", "0", *NETWORK, *ENDLESS)
    with on_hosts(5, tmp_path, EMULATED, *options) as (network, run, join):
        guests = {}
        for number, ranks in ((1, 1), (2, 1), (3, 2), (4, 1)):
            guests[number] = join(number, "--ranks", str(ranks), "--replicas", "1")
            run.until(lambda n=number: len(joined(run)) == n, "it to join")
        trained(run)
        assert [host_of_rank(run, rank) for rank in range(3)] == [1, 2, 3]
        only_on(network, 1)

        back = run.events("TrainerJoined")
        kill(guests[2])  # the host of rank 1
        came_back(run, back)
        assert [host_of_rank(run, rank) for rank in range(3)] == [1, 3, 3]
        back = run.events("TrainerJoined")
        kill(guests[1])  # the host of rank 0, where they meet
        came_back(run, back)
        assert [host_of_rank(run, rank) for rank in range(3)] == [3, 3, 4]
        back, waits = run.events("TrainerJoined"), run.events("TrainerWaits")
        network.isolate(4)  # too few are left
        run.until(lambda: run.events("TrainerWaits") > waits, "the trainer to wait")
        network.heal()  # it joins again by itself
        came_back(run, back)
        proof = ends_well(run)
        assert proof.lost["Trainer"] >= 3


def kill(guest: Guest) -> None:
    """As when its machine loses power: nobody there says anything more."""
    for id in guest.components().values():
        os.kill(id, signal.SIGKILL)
    guest.child.kill()
    guest.wait()


def only_on(network: Network, number: int) -> None:
    """Whatever listens on that host does so at its one address in the network, or on the loopback."""
    command = [*network[number].inside, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    listening = {row[1].partition(":")[0] for row in rows if len(row) > 3 and row[3] == "0A"}
    there = f"{int.from_bytes(socket.inet_aton(network[number].address), 'little'):08X}"
    assert there in listening
    assert listening <= {there, "0100007F"}, listening


@needs_hosts
@pytest.mark.soak
def test_a_rank_that_hangs_is_found_by_the_deadline_of_collectives(tmp_path):
    options = ("--trainer.ranks", "2", "--local.ranks", "1", *NETWORK, *ENDLESS, "--trainer.collective_s", "5")
    with on_hosts(2, tmp_path, EMULATED, *options) as (_, run, join):
        guest = join(1, "--ranks", "1")
        trained(run)
        back = run.events("TrainerJoined")
        os.kill(guest.components()["trainer0.1"], signal.SIGSTOP)
        came_back(run, back)
        assert ends_well(run).lost["Trainer"] == 1


def figures(run: Run) -> dict[tuple[int, str], float]:
    query = "SELECT step, name, value FROM metrics WHERE name IN ('loss', 'grad_norm') AND source = 'trainer'"
    with closing(sqlite3.connect(run.folder / "run.db")) as database:
        return {(step, name): value for step, name, value in database.execute(query)}


STEPS = 8
SYNC = ("--schedule.kind", "sync", "--schedule.max_staleness", "0", "--run.steps", str(STEPS))
RANKS = {2: (1, 1, 0, 0), 3: (1, 2, 0, 0), 4: (0, 1, 1, 2)}  # on each of four hosts, the controller's first


@needs_hosts
@pytest.mark.soak
def test_ranks_on_several_hosts_have_the_losses_of_one_and_resume_on_any_number(tmp_path):
    """Four hosts with a relay and a replica each; the run goes on with 2, 3, 4 ranks, and at last with one."""
    (tmp_path / "alone").mkdir()
    alone = Run(tmp_path / "alone", NATIVE, *SYNC)
    alone.finish()
    with on_hosts(4, tmp_path, NATIVE, *SYNC, *NETWORK, *ranks(2)) as (_, run, join):
        begun = run.options
        for number in RANKS:
            guests = [join(host, "--replicas", "1", "--ranks", str(RANKS[number][host])) for host in (1, 2, 3)]
            run.until(lambda n=number: run.events("Trained") >= 2 * (n - 1), "two more steps")
            assert run.interrupt()[0] == 130
            assert [guest.wait()[0] for guest in guests] == [0, 0, 0]
            run.options = [*begun, "--resume", *ranks(number + 1 if number < 4 else 1)]
            run.start()
            run.until((run.folder / "join.key").exists, "its key")
        status, out, err = run.wait()
        assert status == 0, f"{out}\n{err}\n{run.logs()}"
    ours, theirs = figures(run), figures(alone)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * STEPS
    assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    assert run.trained_prompts() == alone.trained_prompts()
    assert run.events("RelayJoined") == 4 * len(RANKS) + 1


def ranks(number: int) -> tuple[str, ...]:
    here = RANKS[number][0] if number in RANKS else number
    return "--trainer.ranks", str(number), "--local.ranks", str(here)


WIDER = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_hidden_layers": 4}
BRIEF = ("--workload.prompts_per_step", "2", "--workload.group_size", "2", "--workload.max_completion_tokens", "8")
KEEP_ALL = ("--trainer.checkpoint_every", "1", "--trainer.keep_checkpoints", "1000")
SLOW_MBITS = 4.0


@needs_hosts
@pytest.mark.soak
def test_ranks_killed_in_the_middle_of_a_publication_leave_nothing_torn(tmp_path):
    """First the one that joined, then the one that the others meet at. What relays hold is at all times bit by bit what
    the trainer saved: a version is saved before it is sent."""
    options = ("--trainer.ranks", "2", "--local.ranks", "1", *NETWORK, *ENDLESS, *BRIEF, *KEEP_ALL)
    where = ("--model.path", str(wider_model(tmp_path)))
    with on_hosts(2, tmp_path, NATIVE, *options, *where) as (network, run, join):
        guest = join(1, "--ranks", "1", "--replicas", "1")
        held = Held(run)
        for name in ("trainer0.1", "trainer0"):
            trained(run, 2)
            network.set(rate_mbits=SLOW_MBITS)  # the publication that follows would take half a minute
            back, victim = run.events("TrainerJoined"), (guest.components() | run.components())[name]
            run.until(held.arrives, "a publication")
            os.kill(victim, signal.SIGKILL)
            torn = held.arrives()
            network.set()
            assert torn, "it had arrived by then"
            run.until(lambda n=torn, seen=held: seen.look(n), "that version or the next, whole")
            came_back(run, back)
        held.look()
        proof = ends_well(run)
        assert proof.lost["Trainer"] == 2
        assert len({folder for folder, _ in held.versions}) == 2
        trained_ones = {key: tensors for key, tensors in held.versions.items() if key[1]}  # the first is not saved
        for (_, version), tensors in trained_ones.items():
            saved = saved_weights(run, version, tmp_path)
            assert tensors.keys() == saved.keys()
            assert all(torch.equal(tensors[each], saved[each]) for each in saved), f"version {version} is torn"


class Held:
    """What the relays of a run on this machine hold, as anybody can read it who maps the files."""

    def __init__(self, run: Run) -> None:
        self._mark = xxhash.xxh3_64_hexdigest(str(run.folder.resolve()).encode())[:8]
        self.versions: dict[tuple[Path, int], dict[str, torch.Tensor]] = {}

    def folders(self) -> list[Path]:
        return sorted(default_base().glob(f"tailrace-*{self._mark}*"))

    def arrives(self) -> int:
        """A version of which some is there and that is whole nowhere; 0 if there is none."""
        self.look()
        partial = {int(file.stem[1:]) for folder in self.folders() for file in folder.glob("v*.partial")}
        return max(partial - {version for _, version in self.versions}, default=0)

    def look(self, version: int = 0) -> bool:
        """Read what is new. Whether a relay has this version or a newer one."""
        for folder in self.folders():
            for file in folder.glob("v*.safetensors"):
                key = folder, int(file.name.partition(".")[0][1:])
                if key not in self.versions:
                    with suppress(FileNotFoundError):  # dropped by now
                        self.versions[key] = load(file.read_bytes())
        return any(found >= version for _, found in self.versions)


def wider_model(folder: Path) -> Path:
    """The default one with 6M parameters: more than the sockets hold."""
    shutil.copytree(START, folder / "wider")
    config = AutoConfig.from_pretrained(START, **WIDER)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "wider")
    return folder / "wider"


def saved_weights(run: Run, version: int, folder: Path) -> dict[str, torch.Tensor]:
    place = folder / f"of{version}"
    if not place.exists():  # of the other relay
        write_model(run.folder / "checkpoints" / f"step-{version:08d}", place)
    return load((place / "model.safetensors").read_bytes())
