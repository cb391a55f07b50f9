"""Manifests for KubeRay: a RayJob, in which `tailrace launch ray` runs on the head and places agents on the workers.

The head has the run's folder and trains; the group of workers generates, and may be scaled while the run goes on. Keys
are made by `launch ray` itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tailrace.launch.placers.fleet import FleetRequest, quoted
from tailrace.launch.placers.pods import (
    LEAVE_S,
    RUNS,
    SETTINGS,
    Manifest,
    PodShape,
    Volume,
    claim,
    common_volumes,
    head,
    limits,
    run_name,
    settings_map,
)
from tailrace.launch.placers.ray_system import TIGHT

HERE = "tailrace_controller"  # a resource that only the head has: the controller runs where the run's folder is


def ray_manifests(fleet: FleetRequest, shape: PodShape) -> list[Manifest]:
    name = run_name(fleet)
    return [settings_map(name, fleet), claim(name, shape.storage), _ray_job(name, fleet, shape)]


def _ray_job(name: str, fleet: FleetRequest, shape: PodShape) -> Manifest:
    words = ["tailrace", "launch", "ray", f"{SETTINGS}/run.toml", "--run.folder", RUNS, "--run.name", fleet.folder.name]
    replicas = ["--replicas-per-node", str(fleet.replicas or "auto")]
    spec = {
        "entrypoint": quoted([*words, *replicas, "--auto-resume"]),
        "entrypointResources": json.dumps({HERE: 1}),
        "shutdownAfterJobFinishes": True,
        "backoffLimit": 3,
        "rayClusterSpec": {
            "headGroupSpec": _head_group(name, shape),
            "workerGroupSpecs": [_worker_group(fleet, shape)],
        },
    }
    return {**head("RayJob", name, "ray.io/v1"), "spec": spec}


def _head_group(name: str, shape: PodShape) -> Manifest:
    volumes = [
        Volume("settings", SETTINGS, {"configMap": {"name": name}}),
        Volume("runs", RUNS, {"persistentVolumeClaim": {"claimName": name}}, readable=False),
    ]
    params = {
        "resources": json.dumps(json.dumps({HERE: 1})),
        "system-config": f"'{TIGHT}'",
        "dashboard-host": "0.0.0.0",
    }
    return {"rayStartParams": params, "template": {"spec": _ray_pod("ray-head", shape, volumes)}}


def _worker_group(fleet: FleetRequest, shape: PodShape) -> Manifest:
    count = fleet.nodes or 1
    size = {"groupName": "agents", "replicas": count, "minReplicas": 0, "maxReplicas": max(count, 64)}
    return {**size, "rayStartParams": {}, "template": {"spec": _ray_pod("ray-worker", shape, ())}}


def _ray_pod(name: str, shape: PodShape, volumes: Sequence[Volume]) -> Manifest:
    everything = [*volumes, *common_volumes(shape)]
    mounts = [volume.mount for volume in everything]
    container = {"name": name, "image": shape.image, **limits(shape), "volumeMounts": mounts}
    return {
        "terminationGracePeriodSeconds": LEAVE_S,
        "containers": [container],
        "volumes": [volume.entry for volume in everything],
    }
