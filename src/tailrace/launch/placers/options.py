"""The options of `tailrace launch`, and what each placer is called with. The command line calls `add_placers` once.

What a placer needs is imported when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from tailrace.errors import UsageError
from tailrace.launch.arguments import RESUMING, path, whole

if TYPE_CHECKING:
    from tailrace.launch.placers.fleet import FleetRequest

Run = Callable[[argparse.Namespace], int]
Add = Callable[[str, Run, str], argparse.ArgumentParser]


def add_placers(placer: Add) -> None:
    """`placer` adds one, by its name, what runs it and a line about it."""
    _add_ray(placer("ray", _launch_ray, "the controller here, and an agent on every other node of a Ray cluster"))
    about = "a batch script: the controller on the first node, an agent on each other"
    _add_slurm(placer("slurm", _launch_slurm, about))
    _add_k8s(placer("k8s", _launch_k8s, "manifests for Kubernetes: a controller and agents, or a RayJob"))


def _add_ray(ray: argparse.ArgumentParser) -> None:
    _of_a_fleet(ray)
    ray.add_argument(
        "--address", default="auto", metavar="HOST:PORT", help="of the cluster's head (auto: of this node)"
    )
    ray.add_argument("--nodes", type=_nodes, metavar="N", help="machines beside that of the controller (all)")
    for option, text in RESUMING.items():
        ray.add_argument(option, dest="resume", action="store_const", const=option, default="", help=text)


def _add_slurm(slurm: argparse.ArgumentParser) -> None:
    _of_a_fleet(slurm)
    slurm.add_argument("--nodes", type=_nodes, default=1, metavar="N", help="machines, with the controller's (1)")
    slurm.add_argument("--gpus-per-node", type=_gpus, default=0, metavar="N", help="cards on each machine (0)")
    slurm.add_argument("--time", default="", metavar="LIMIT", help="of sbatch: 8:00:00")
    slurm.add_argument("--partition", default="", metavar="NAME", help="of sbatch")
    more = "any other option of sbatch: --sbatch=--account=lab; may be repeated"
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)
    slurm.add_argument("-o", "--output", type=path, metavar="FILE", help="write the script there (standard output)")
    slurm.add_argument("--submit", action="store_true", help="hand it in with sbatch")


def _add_k8s(k8s: argparse.ArgumentParser) -> None:
    _of_a_fleet(k8s)
    k8s.add_argument("--image", required=True, metavar="IMAGE", help="a container image with tailrace and the model")
    k8s.add_argument("--nodes", type=_nodes, default=1, metavar="N", help="pods beside that of the controller (1)")
    k8s.add_argument("--gpus-per-node", type=_gpus, default=0, metavar="N", help="cards of each pod (0)")
    k8s.add_argument("--storage", default="100Gi", metavar="SIZE", help="for the run's folder (100Gi)")
    k8s.add_argument("--memory", default="16Gi", metavar="SIZE", help="shared memory for weights, of each pod (16Gi)")
    claims = "a volume claim that exists, for all pods to read, such as models:/models; may be repeated"
    k8s.add_argument("--volume", type=_volume, action="append", default=[], metavar="CLAIM:PATH", help=claims)
    k8s.add_argument("--kuberay", action="store_true", help="a RayJob of KubeRay instead of plain Jobs")


def _of_a_fleet(command: argparse.ArgumentParser) -> None:
    each = "on each machine (auto: one per card that ranks leave, or one)"
    command.add_argument("--replicas-per-node", type=_replicas_or_auto, metavar="auto|N", help=each)
    ranks = "of the trainer, on each machine (0); trainer.ranks, local.ranks and trainer.interface have to fit"
    command.add_argument("--ranks-per-node", type=_ranks, default=0, metavar="N", help=ranks)


def _launch_ray(arguments: argparse.Namespace) -> int:
    from tailrace.launch.placers.ray_launch import launch_ray

    return launch_ray(_request(arguments), arguments.address)


def _launch_slurm(arguments: argparse.Namespace) -> int:
    from tailrace.launch.placers.slurm import SlurmJob, launch_slurm

    job = SlurmJob(arguments.gpus_per_node, arguments.time, arguments.partition, arguments.sbatch)
    return launch_slurm(_request(arguments), job, arguments.output, arguments.submit)


def _launch_k8s(arguments: argparse.Namespace) -> int:
    from tailrace.launch.placers.k8s_launch import launch_k8s
    from tailrace.launch.placers.pods import PodShape

    shape = PodShape(arguments.image, arguments.gpus_per_node, arguments.storage, arguments.memory, arguments.volume)
    return launch_k8s(_request(arguments), shape, arguments.kuberay)


def _request(arguments: argparse.Namespace) -> FleetRequest:
    """What every placer is asked for."""
    from tailrace.launch.placers.fleet import FleetRequest

    resume, each = getattr(arguments, "resume", ""), (arguments.replicas_per_node, arguments.ranks_per_node)
    if each == (0, 0):
        raise UsageError(
            "--replicas-per-node is 0, and no rank is asked for; write --ranks-per-node 1, or more replicas"
        )
    return FleetRequest(arguments.files, arguments.settings, arguments.nodes, each[0], resume, each[1])


def _replicas_or_auto(text: str) -> int | None:
    what = "a number of replicas; write --replicas-per-node 2 or auto"
    return None if text == "auto" else whole(text, 1024, what, least=0)


def _ranks(text: str) -> int:
    return whole(text, 1024, "a number of ranks; write --ranks-per-node 8", least=0)


def _nodes(text: str) -> int:
    return whole(text, 4096, "a number of machines; write --nodes 4")


def _gpus(text: str) -> int:
    return 0 if text == "0" else whole(text, 1024, "a number of cards; write --gpus-per-node 8")


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a claim and a path; write --volume models:/models")
    return claim, path
