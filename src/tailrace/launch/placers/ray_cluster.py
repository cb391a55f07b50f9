"""A Ray cluster as a placer sees it: nodes with cards, and actors that are held in their places.

The only module that calls Ray, together with what runs in its actors. Whatever Ray raises leaves here as one sentence.
"""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tailrace.launch.placers.fleet import LaunchError
from tailrace.launch.placers.ray_agent import NodeAgent
from tailrace.launch.placers.ray_system import TIGHT

CALL_S = 5.0  # for the head to answer
SLOW_S = 5.0  # to notice a dead node
RESERVE_S = 60.0  # for the cards of this node
START = "start one with 'ray start --head' and, on the other machines, 'ray start --address HEAD:6379'"


class ClusterNode(NamedTuple):
    id: str
    address: str
    cards: int

    def __str__(self) -> str:
        return f"{self.address} ({self.id[:8]})"


class RayCluster:
    def __init__(self, address: str) -> None:
        _connect(address)
        nodes = {node.id: node for node in self.nodes()}
        self.own = nodes[ray.get_runtime_context().get_node_id()]
        self._kept: list[Any] = []  # actors that hold cards

    def nodes(self) -> list[ClusterNode]:
        """Those that are alive."""
        return [
            ClusterNode(one["NodeID"], one["NodeManagerAddress"], int(one["Resources"].get("GPU", 0)))
            for one in ray.nodes()
            if one["Alive"]
        ]

    def others(self) -> list[ClusterNode]:
        return [node for node in self.nodes() if node.id != self.own.id]

    def hold(self, node: ClusterNode, cards: int) -> Any:
        """A new actor on this very node. It never comes back by itself: on a node that is gone it could not."""
        actor = ray.remote(NodeAgent).options(  # pyright: ignore[reportAttributeAccessIssue]
            num_cpus=0,
            num_gpus=cards,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return actor.remote()

    def reserve(self) -> str:
        """All cards of this node, for the run's own processes here. Returns which they are."""
        if not self.own.cards:
            return ""
        holder = self.hold(self.own, self.own.cards)
        try:
            cards: str = ray.get(holder.cards.remote(self.own.cards), timeout=RESERVE_S)
        except exceptions.GetTimeoutError:
            raise LaunchError(
                f"other jobs of the cluster have cards of {self.own}, where the run is to train; wait for them, or "
                "say which are ours with CUDA_VISIBLE_DEVICES"
            ) from None
        self._kept.append(holder)
        return cards

    def ended(self, calls: list[Any], within_s: float) -> list[Any]:
        """Which of these calls are over."""
        return ray.wait(calls, timeout=within_s, num_returns=1)[0] if calls else []

    def result(self, call: Any) -> Any:
        """Of a call that is over; `LaunchError` if Ray lost it."""
        try:
            return ray.get(call)
        except Exception as error:  # the border to Ray
            raise LaunchError(sentence(error)) from None

    def drop(self, actor: Any) -> None:
        with suppress(Exception):  # it is gone already, or nobody can be told
            ray.kill(actor)

    def close(self) -> None:
        with suppress(Exception):
            ray.shutdown()


def _connect(address: str) -> None:
    if address.startswith("ray://"):
        raise LaunchError(
            f"--address is {address}, a proxy for notebooks; run this on a node of the cluster with --address auto, "
            "or hand it in with 'ray job submit'"
        )
    where = "here" if address == "auto" else f"at {address}"
    try:
        if address != "auto":
            _call(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, OSError):
        raise LaunchError(f"no Ray cluster is running {where}; {START}") from None
    except LaunchError:
        raise
    except Exception as error:  # the border to Ray
        raise LaunchError(f"Ray at {address} cannot be used: {sentence(error)}") from None


def _call(address: str) -> None:
    """Ray tries for minutes where nobody is."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(
            f"--address is {address}, not an address; write HOST:PORT as 'ray start --head' has printed it"
        )
    socket.create_connection((host.strip("[]"), int(port)), CALL_S).close()


def sentence(error: BaseException) -> str:
    """What an error of Ray says, without its dump."""
    text = str(error)
    if "No module named 'tailrace'" in text:
        return "tailrace is not installed there; install the same release on every node"
    if isinstance(error, exceptions.ActorUnschedulableError):
        return "the node is gone"
    if isinstance(error, exceptions.RayActorError):
        return "its process was killed, or the node is gone"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason was given'}"[:400]


def slowness() -> str:
    """Advice, where a dead node is noticed late; our own heartbeats find lost agents in any case."""
    with suppress(ImportError, AttributeError):
        from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]

        seconds = Config.health_check_period_ms() * Config.health_check_failure_threshold() / 1000
        if seconds > SLOW_S:
            return (
                f"Ray notices a dead node after {seconds:g} s, and only then is it replaced; for sooner start the "
                f"head with ray start --head --system-config='{TIGHT}'"
            )
    return ""
