"""`tailrace launch k8s`: manifests for a run on Kubernetes, plain or for KubeRay. It prints them and starts nothing.

Plain: a Job for the controller, with a volume for the run and a Service by which agents find it; a Job for the agents,
as many pods as asked for. The keys are two Secrets: the controller's pod never shows its own to an agent. A pod that is
evicted hears SIGTERM and leaves in time; the Jobs make another one, and the run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.config import render
from tailrace.launch.machines import FILE as JOIN_KEY
from tailrace.launch.placers.fleet import FleetRequest, LaunchError, worker_words
from tailrace.launch.placers.keys import RunKeys, make_keys
from tailrace.launch.placers.manifest_text import documents
from tailrace.logs import output

PORT = 4700
LEAVE_S = 60  # between the notice and the end of a pod
SETTINGS, KEYS, RUNS = "/etc/tailrace", "/var/run/tailrace", "/runs"
RUN_SECRET = "run.secret"
LONGEST_NAME = 40  # Kubernetes adds to names, and takes 63
INTERRUPTED, UNUSABLE = 130, 2  # exit codes of a run
ATTEMPTS = 100  # pods of a Job that may fail, those that were evicted not counted

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


def plain_manifests(fleet: FleetRequest, shape: PodShape, keys: RunKeys) -> list[Manifest]:
    name = run_name(fleet)
    return [
        secret(f"{name}-controller", {RUN_SECRET: keys.secret}),
        secret(f"{name}-agents", {JOIN_KEY: keys.join}),
        settings_map(name, fleet),
        claim(name, shape.storage),
        _service(name),
        _job(name, "controller", _controller_pod(name, fleet, shape), {"completions": 1, "parallelism": 1}),
        _job(name, "agents", _agent_pod(name, fleet, shape), {"parallelism": fleet.nodes or 1}),
    ]


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


def _service(name: str) -> Manifest:
    """Without an address of its own, so that all ports of the pod are reached, also by datagrams."""
    selector = {"app": name, "part": "controller"}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": _ports()}
    return {**head("Service", name), "spec": spec}


def _ports() -> list[Manifest]:
    return [{"name": word, "port": PORT, "protocol": word.upper()} for word in ("tcp", "udp")]


def _job(name: str, part: str, pod: Manifest, size: Manifest) -> Manifest:
    """Pods that were evicted do not count as failed, nor do those that were asked to stop; a run that cannot go on is
    not tried again."""
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [
        evicted,
        _on_exit("Ignore", INTERRUPTED),
        *([_on_exit("FailJob", UNUSABLE)] if part == "controller" else []),
    ]
    labels = {"app": name, "part": part}
    spec = {
        **size,
        "backoffLimit": ATTEMPTS,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {**head("Job", f"{name}-{part}", "batch/v1"), "spec": spec}


def _on_exit(action: str, status: int) -> Manifest:
    return {"action": action, "onExitCodes": {"operator": "In", "values": [status]}}


def _controller_pod(name: str, fleet: FleetRequest, shape: PodShape) -> Manifest:
    place = ["--run.folder", RUNS, "--run.name", fleet.folder.name]
    listen = ["--local.listen", "$(POD_IP)", "--local.port", str(PORT)]
    words = ["tailrace", "train", f"{SETTINGS}/run.toml", *place, *listen]
    words += ["--auto-resume", "--secret", f"{KEYS}/{RUN_SECRET}"]
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 10}
    volumes = [
        Volume("settings", SETTINGS, {"configMap": {"name": name}}),
        key_volume(f"{name}-controller"),
        Volume("runs", RUNS, {"persistentVolumeClaim": {"claimName": name}}, readable=False),
    ]
    return pod(shape, words, volumes, {"env": [address], "ports": _container_ports(), "readinessProbe": probe})


def _container_ports() -> list[Manifest]:
    return [{"containerPort": each["port"], "protocol": each["protocol"]} for each in _ports()]


def _agent_pod(name: str, fleet: FleetRequest, shape: PodShape) -> Manifest:
    more = ["--key", f"{KEYS}/{JOIN_KEY}", "--stay"]
    words = ["tailrace", *worker_words(f"{name}:{PORT}", fleet.replicas_for(shape.cards), *more)]
    return pod(shape, words, [key_volume(f"{name}-agents")], {})


def key_volume(name: str) -> Volume:
    return Volume("keys", KEYS, {"secret": {"secretName": name, "defaultMode": 0o400}})


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


def launch_k8s(fleet: FleetRequest, shape: PodShape, kuberay: bool) -> int:
    if kuberay:
        from tailrace.launch.placers.kuberay import ray_manifests

        output(documents(ray_manifests(fleet, shape)))
    else:
        output(documents(plain_manifests(fleet, shape, make_keys())))
    return 0
