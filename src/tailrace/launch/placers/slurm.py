"""`tailrace launch slurm`: one batch script, in which the first node has the controller and every other one an agent.
Where agents have trainer ranks, the first node has as many processes as they do, as children of the controller.

Slurm runs the script; this module only writes it, and hands it in if asked to. What the script does:

- An agent is a job step of its own, so a node that is lost takes nobody along; the run goes on without it.
- If the controller's node is lost, or the time limit is near, the job is queued again and the run goes on where it was.
- The join key is `join.key` in the run's folder, which all nodes see. It is on no command line and in no environment.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tailrace.launch.machines import SILENT
from tailrace.launch.placers.fleet import FleetRequest, LaunchError, NodeShare, quoted, train_words
from tailrace.logs import output

log = logging.getLogger(__name__)

LEAVE_S = 120  # before the time limit: then the run is interrupted, and queued again
FIRST_PORT, PORTS = 20_000, 10_000  # below those that systems hand out; by the job's number, so that two jobs differ

SCRIPT = """\
#!/bin/bash
{directives}
# Written by `tailrace launch slurm`. The first node runs the controller, and its share of what the others run.

run={run}
tailrace=({tailrace})
listen={listen}
port={port}
asked=

stop() {{ asked=$1; kill -TERM "$controller" 2>/dev/null; }}
trap 'stop requeue' USR1    # {leave} s before the time limit
trap 'stop end' TERM        # cancelled, or about to be preempted

"${{tailrace[@]}}" {train} &
controller=$!

# On the node of an agent. If the first node is lost, Slurm takes it out of the job and leaves the others in it. So an
# agent that does not hear the controller any more looks whether that is so, and has the job queued again.
watch='"$@"; status=$?
[ "$status" = {silent} ] && for _ in $(seq 90); do
    case $(sinfo -h -n "$0" -o %T) in down*) scontrol requeue "$SLURM_JOB_ID"; break ;; esac
    sleep 10
done
exit "$status"'

agent() {{  # a job step for each node: one that is lost takes no other along
    step=(srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap bash -c "$watch" "$SLURMD_NODENAME")
    while kill -0 "$controller" 2>/dev/null; do
        "${{step[@]}}" "${{tailrace[@]}}" {worker} && break
        sleep 10
    done
}}
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    [ "$node" = "$SLURMD_NODENAME" ] || agent "$node" &
done

wait "$controller"; status=$?
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; status=$?; done
if [ "$status" -gt 128 ]; then wait "$controller"; again=$?; [ "$again" = 127 ] || status=$again; fi
echo "tailrace ended with status $status" >&2
if [ "$asked" = requeue ] && [ "$status" = 130 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
"""
QUOTED_LISTEN, QUOTED_PORT, QUOTED_JOIN, QUOTED_KEY = '"$listen"', '"$port"', '"$listen:$port"', '"$run/join.key"'
# by which Slurm itself reaches this node
ADDRESS = """$(getent ahosts "$(scontrol show node "$SLURMD_NODENAME" |
    sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')" | awk 'NR == 1 { print $1 }')"""


class SlurmJob(NamedTuple):
    """What is asked of Slurm beside the nodes. `more`: options of sbatch, word by word, that we do not know."""

    cards: int = 0  # on each node
    time: str = ""
    partition: str = ""
    more: Sequence[str] = ()


def batch_script(fleet: FleetRequest, job: SlurmJob) -> str:
    local = fleet.config.local
    port = str(local.port) if local.port else f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    own = fleet.of_controller(_share_of_first(fleet), job.cards)
    train = quoted(train_words(fleet, "@listen@", "@port@", own, "--auto-resume"))
    worker = quoted(fleet.each.worker_words("@listen@:@port@", job.cards, "--key", "@key@"))
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {each}" for each in _directives(fleet, job)),
        run=quoted([str(fleet.folder)]),
        tailrace=quoted([sys.executable, "-m", "tailrace"]),
        listen=fleet.listen or ADDRESS,
        port=port,
        leave=LEAVE_S,
        silent=SILENT,
        train=train.replace("@listen@", QUOTED_LISTEN).replace("@port@", QUOTED_PORT),
        worker=worker.replace("@listen@:@port@", QUOTED_JOIN).replace("@key@", QUOTED_KEY),
    )


def _share_of_first(fleet: FleetRequest) -> NodeShare:
    """What the controller's node computes where all nodes have ranks: those that the others leave, and replicas on the
    rest of its cards."""
    nodes, ranks = fleet.nodes or 1, fleet.config.trainer.ranks
    left = ranks - (nodes - 1) * fleet.ranks
    if fleet.ranks and left > fleet.ranks and fleet.config.local.ranks is None:
        raise LaunchError(
            f"trainer.ranks is {ranks}, and {nodes} nodes with {fleet.ranks} each have room for {nodes * fleet.ranks}; "
            "write more --nodes, more --ranks-per-node or fewer trainer.ranks"
        )
    return replace(fleet.each, ranks=max(0, left))


def _directives(fleet: FleetRequest, job: SlurmJob) -> list[str]:
    name = f"tailrace-{fleet.folder.name}"
    given = {"--gpus-per-node": job.cards or "", "--time": job.time, "--partition": job.partition}
    return [
        f"--job-name={quoted([name])}",
        f"--nodes={fleet.nodes or 1}",
        "--ntasks-per-node=1",
        *[f"{option}={value}" for option, value in given.items() if value],
        "--requeue",
        "--no-kill",
        f"--signal=B:USR1@{LEAVE_S}",
        "--open-mode=append",
        f"--output={quoted([f'{name}-%j.log'])}",
        *job.more,
    ]


def launch_slurm(fleet: FleetRequest, job: SlurmJob, file: Path | None, submit: bool) -> int:
    """Print the script, write it, or hand it in."""
    script = batch_script(fleet, job)
    if submit and shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch here; run this where jobs are submitted, or write the script with -o FILE"
        )
    if file is not None:
        _write(file, script)
    if submit:
        return _submit(script)
    if file is None:
        output(script)
    else:
        log.info("hand it in with: sbatch %s", file)
    return 0


def _write(file: Path, script: str) -> None:
    try:
        file.write_text(script)
        file.chmod(0o755)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written ({error.strerror}); write another -o FILE") from None


def _submit(script: str) -> int:
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        raise LaunchError(f"sbatch refused the job: {' '.join(done.stderr.split())[:500]}")
    output(done.stdout.strip())
    return 0
