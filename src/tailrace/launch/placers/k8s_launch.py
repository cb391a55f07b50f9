"""`tailrace launch k8s`: manifests for a run on Kubernetes, plain or for KubeRay. It prints them and starts nothing."""

from __future__ import annotations

from tailrace.launch.placers.fleet import FleetRequest
from tailrace.launch.placers.keys import make_keys
from tailrace.launch.placers.kuberay import ray_manifests
from tailrace.launch.placers.kubernetes import plain_manifests
from tailrace.launch.placers.manifest_text import documents
from tailrace.launch.placers.pods import PodShape
from tailrace.logs import output


def launch_k8s(fleet: FleetRequest, shape: PodShape, kuberay: bool) -> int:
    output(documents(ray_manifests(fleet, shape) if kuberay else plain_manifests(fleet, shape, make_keys())))
    return 0
