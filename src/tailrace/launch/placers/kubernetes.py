"""A run as plain objects of Kubernetes.

A Job for the controller, with a volume for the run and a Service by which agents find it; a Job for the agents,
as many pods as asked for. The keys are two Secrets: the controller's pod never shows its own to an agent. A pod that is
evicted hears SIGTERM and leaves in time; the Jobs make another one, and the run goes on.
"""

from __future__ import annotations

from tailrace.launch.placers.fleet import FleetRequest
from tailrace.launch.placers.keys import RunKeys
from tailrace.launch.placers.pods import (
    RUNS,
    SETTINGS,
    Manifest,
    PodShape,
    Volume,
    claim,
    head,
    pod,
    run_name,
    secret,
    settings_map,
)
from tailrace.wire.keys import JOIN_KEY

PORT = 4700
KEYS = "/var/run/tailrace"
RUN_SECRET = "run.secret"
INTERRUPTED, UNUSABLE = 130, 2  # exit codes of a run
ATTEMPTS = 100  # pods of a Job that may fail, those that were evicted not counted


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
    words = ["tailrace", *fleet.each.worker_words(f"{name}:{PORT}", shape.cards, *more)]
    return pod(shape, words, [key_volume(f"{name}-agents")], {})


def key_volume(name: str) -> Volume:
    return Volume("keys", KEYS, {"secret": {"secretName": name, "defaultMode": 0o400}})
