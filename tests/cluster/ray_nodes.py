"""A Ray cluster on this machine for tests: a raylet per node, cards that are only counted, nodes added and killed."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STORE = 80 << 20  # bytes; the least that Ray takes
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10_000,  # who is dead refuses at once; who is only slow shall not be taken for dead
    "health_check_failure_threshold": 4,
}


def missing() -> str:
    return "" if find_spec("ray") else "Ray is not installed"


class Nodes:
    """The head, which has no card, and others with two each."""

    def __init__(self, count: int, dashboard: bool = False) -> None:
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
        os.environ |= {"RAY_worker_niceness": "0"}  # 15 otherwise: nodes that share a machine would not be equal
        from ray.cluster_utils import Cluster

        args = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": dashboard, "object_store_memory": STORE}
        args |= {"dashboard_port": _free_port()} if dashboard else {}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args={**args, "_system_config": QUICK})
        self.others: list[Any] = []
        for _ in range(count):
            self.add()

    @property
    def address(self) -> str:
        return self._cluster.address

    @property
    def head(self) -> Any:
        return self._cluster.head_node

    @property
    def dashboard(self) -> str:
        """Where jobs are submitted."""
        return f"http://{self.head.webui_url}"

    def add(self, cards: int = 2) -> Any:
        self.others.append(self._cluster.add_node(num_cpus=1, num_gpus=cards, object_store_memory=STORE))
        return self.others[-1]

    def kill(self, node: Any) -> None:
        """As if the machine were switched off: nobody is told."""
        self.others.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_head(self) -> None:
        """What makes it the head; its raylet stays."""
        self.head.kill_gcs_server()

    def bring_head_back(self) -> None:
        self.head.start_gcs_server()

    def close(self) -> None:
        with suppress(Exception):
            self._cluster.shutdown()


@contextmanager
def ray_nodes(count: int, dashboard: bool = False) -> Iterator[Nodes]:
    nodes = Nodes(count, dashboard)
    try:
        yield nodes
    finally:
        nodes.close()


@contextmanager
def redis(folder: Path) -> Iterator[str]:
    """The store in which a head keeps what it must not forget; yields its address."""
    folder.mkdir()
    port = _free_port()
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
