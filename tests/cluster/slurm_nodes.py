"""A Slurm cluster on this machine for tests: slurmctld and a slurmd per node, each a host of its own.

A node is a network namespace (see `hosts` of the chaos tests) with a hostname of its own; the first host has slurmctld
and is where jobs are handed in. Everything that Slurm keeps lies in one folder, and is gone with it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hosts import Host, Network, clear_abandoned, hosts
from hosts import missing as missing_for_hosts

DEADLINE_S = 600.0  # a busy machine is slow, and not wrong
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
CONFIG = """
ClusterName=tailrace
SlurmctldHost=controller({controller})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=30
KillWait=5
BatchStartTimeout=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What such a cluster needs and this machine lacks, or nothing."""
    lacking = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]
    return f"needs {', '.join(lacking)} (packages slurm-wlm and munge)" if lacking else missing_for_hosts()


class SlurmNodes:
    def __init__(self, folder: Path, network: Network) -> None:
        self._folder = folder
        self._network = network
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self._write()

    def start_all(self) -> None:
        self._munge()
        self._start(self._network[0], "controller", "slurmctld", "-D", "-i")
        for host in list(self._network)[1:]:
            self.start(host.number)
        self.until(lambda: self.states() == ["idle"] * len(self._daemons_of_nodes()), "all nodes to be idle")

    def _write(self) -> None:
        (self._folder / "state").mkdir(parents=True, exist_ok=True)
        lines = [f"NodeName=n{one.number} NodeAddr={one.address} CPUs=2" for one in list(self._network)[1:]]
        text = CONFIG.format(controller=self._network[0].address, folder=self._folder, nodes="\n".join(lines))
        (self._folder / "slurm.conf").write_text(text)
        plugin = "cgroup/v1" if Path("/sys/fs/cgroup/freezer").is_dir() else "autodetect"
        (self._folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def _munge(self) -> None:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        words = [f"--{name}={self._folder}/munge.{end}" for name, end in MUNGE]
        self._daemons["munged"] = subprocess.Popen(
            ["munged", "--foreground", "--force", *words], env=self.environment, stderr=subprocess.DEVNULL
        )
        self.until((self._folder / "munge.socket").exists, "munged")

    def _daemons_of_nodes(self) -> list[str]:
        return [name for name in self._daemons if name.startswith("n")]

    def start(self, number: int) -> None:
        """A node that was off comes up."""
        self._start(self._network[number], f"n{number}", "slurmd", "-D", "-N", f"n{number}")

    def _start(self, host: Host, name: str, *words: str) -> None:
        named = 'hostname "$0"; exec "$@"'
        command = [*host.inside, "unshare", "--uts", "sh", "-c", named, name, *words]
        self._daemons[name] = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def kill(self, number: int) -> None:
        """As if the machine were switched off: all that runs there is gone, and nobody is told."""
        name = self._network[number].name
        while found := subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout.split():
            for process in found:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.02)
        self._daemons.pop(f"n{number}").wait()

    def run(self, *words: str, folder: Path | None = None) -> str:
        """A command where jobs are handed in."""
        command = [*self._network[0].inside, *words]
        done = subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> list[str]:
        with suppress(AssertionError):
            return sorted(self.run("sinfo", "-N", "-h", "-o", "%T").split())
        return []

    def job(self, number: int, what: str = "JobState") -> str:
        told = self.run("scontrol", "show", "job", str(number))
        return next(word.partition("=")[2] for word in told.split() if word.startswith(f"{what}="))

    def until(self, condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
        limit = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < limit, f"waited {within_s} s for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        return "\n".join(
            f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in self._folder.glob("*.log")
        )

    def close(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()


MUNGE = (
    ("key-file", "key"),
    ("socket", "socket"),
    ("pid-file", "pid"),
    ("log-file", "log"),
    ("seed-file", "seed"),
)


@contextmanager
def slurm_nodes(folder: Path, count: int) -> Iterator[SlurmNodes]:
    clear_abandoned()
    with hosts(count + 1) as network:
        nodes = SlurmNodes(folder, network)
        try:
            nodes.start_all()
            yield nodes
        finally:
            nodes.close()
