"""What the manifests of plain Kubernetes and of KubeRay have in common: names, settings, volumes, one container."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.config import render
from tailrace.launch.placers.fleet import FleetRequest, LaunchError

LEAVE_S = 60  # between the notice and the end of a pod
SETTINGS, RUNS = "/etc/tailrace", "/runs"
LONGEST_NAME = 40  # Kubernetes adds to names, and takes 63

Manifest = dict[str, Any]


class PodShape(NamedTuple):
    """What every pod gets. `volumes`: claims that exist, and where they are mounted."""

    image: str
    cards: int = 0
    storage: str = "100Gi"  # for the run's folder
    memory: str = "16Gi"  # shared, for versions of the weights
    volumes: Sequence[tuple[str, str]] = ()


class Volume(NamedTuple):
    name: str
    path: str
    source: Manifest
    readable: bool = True  # and nothing more

    @property
    def mount(self) -> Manifest:
        return {"name": self.name, "mountPath": self.path, **({"readOnly": True} if self.readable else {})}

    @property
    def entry(self) -> Manifest:
        return {"name": self.name, **self.source}


def run_name(fleet: FleetRequest) -> str:
    """That of the run, as Kubernetes takes names."""
    name = re.sub(r"[^a-z0-9]+", "-", fleet.folder.name.lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    if not name or not name[0].isalpha():
        raise LaunchError(f"'{fleet.folder.name}' is no name for Kubernetes; write --run.name with letters and digits")
    return f"tailrace-{name}"


def head(kind: str, name: str, version: str = "v1") -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": {"app": name}}}


def secret(name: str, data: Mapping[str, str]) -> Manifest:
    return {**head("Secret", name), "type": "Opaque", "stringData": dict(data)}


def settings_map(name: str, fleet: FleetRequest) -> Manifest:
    """All settings in one file. Paths in it are as they are here: they have to be so in the image."""
    return {**head("ConfigMap", name), "data": {"run.toml": render(fleet.config)}}


def claim(name: str, storage: str) -> Manifest:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": storage}}}
    return {**head("PersistentVolumeClaim", name), "spec": spec}


def pod(shape: PodShape, words: Sequence[str], volumes: Sequence[Volume], more: Manifest) -> Manifest:
    """One container. It hears SIGTERM itself; ended grandchildren are taken care of by the pod."""
    everything = [*volumes, *common_volumes(shape)]
    container = {
        "name": "tailrace",
        "image": shape.image,
        "command": list(words),
        **more,
        **limits(shape),
        "volumeMounts": [volume.mount for volume in everything],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": LEAVE_S,
        "shareProcessNamespace": True,
        "containers": [container],
        "volumes": [volume.entry for volume in everything],
    }


def common_volumes(shape: PodShape) -> list[Volume]:
    shared = {"emptyDir": {"medium": "Memory", "sizeLimit": shape.memory}}
    named = enumerate(shape.volumes)
    claims = [Volume(f"data-{n}", path, {"persistentVolumeClaim": {"claimName": each}}) for n, (each, path) in named]
    return [Volume("shm", "/dev/shm", shared, readable=False), *claims]


def limits(shape: PodShape) -> Manifest:
    return {"resources": {"limits": {"nvidia.com/gpu": shape.cards}}} if shape.cards else {}
