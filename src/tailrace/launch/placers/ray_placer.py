"""The process that talks to Ray for `tailrace launch ray`: it finds the nodes and keeps an agent on each.

It is apart from the launcher, because Ray's library ends its own process when the head of the cluster is gone, and the
run shall not end with it. Once a second it compares the nodes that there are with those that have an agent: a new one
gets an agent, a lost one is forgotten. That a run's components there are lost, the controller finds out by itself.
When its stdin ends it stops all agents; when it is killed, Ray ends its actors, and with them the agents.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

from tailrace.launch.machines import VARIABLE
from tailrace.launch.placers.fleet import LaunchError
from tailrace.launch.placers.ray_agent import AgentEnd, AgentOrder
from tailrace.launch.placers.ray_cluster import ClusterNode, RayCluster, slowness
from tailrace.launch.placers.ray_messages import Failed, Found, FromPlacer, Go, Order, Said, line, read_from_launcher
from tailrace.wording import counted

TURN_S = 1.0
STOP_S = 10.0  # for the agents to leave
PENDING_S = 30.0  # until somebody is told that a node does not give its cards
FIRST_RETRY_S, LONGEST_RETRY_S = 2.0, 60.0

Say = Callable[[FromPlacer], object]


class PlacedAgent(NamedTuple):
    node: ClusterNode
    actor: Any
    placed: Any  # answered when the actor is there
    running: Any  # answered when the agent has ended
    since: float


class Placing:
    """Keeps one agent on every node, until `stop`."""

    def __init__(self, cluster: RayCluster, order: Order, go: Go, say: Say) -> None:
        self._cluster = cluster
        self._order = order
        self._go = go
        self._say = say
        self._known: dict[str, ClusterNode] = {}  # nodes that were given an agent, by their ids
        self._agents: dict[str, PlacedAgent] = {}
        self._pending: set[str] = set()  # not known to be in their places
        self._failures: dict[str, int] = {}  # of nodes, in a row
        self._again_at: dict[str, float] = {}
        self._done: set[str] = set()  # there the run is over
        self._headless = False

    def turn(self) -> None:
        nodes = self._nodes()
        if nodes is not None:
            self._forget(nodes)
            self._fill(nodes)
        self._look_at_pending()
        self._hear()

    def _nodes(self) -> dict[str, ClusterNode] | None:
        """None: nobody can say."""
        try:
            nodes = {node.id: node for node in self._cluster.others()}
        except Exception as error:  # the border to Ray
            self._tell_headless(True, f"{type(error).__name__}")
            return None
        self._tell_headless(False)
        return nodes

    def _tell_headless(self, headless: bool, why: str = "") -> None:
        if headless and not self._headless:
            text = f"the head of the Ray cluster does not answer ({why}); the run goes on, but no node can be added"
            self._say(Said(text, warning=True))
        elif self._headless and not headless:
            self._say(Said("the head of the Ray cluster answers again"))
        self._headless = headless

    def _forget(self, nodes: Mapping[str, ClusterNode]) -> None:
        for id in self._known.keys() - nodes.keys():
            self._say(Said(f"node {self._known.pop(id)} is lost; the run goes on without it", warning=True))
            if id in self._agents:
                self._remove(id)

    def _remove(self, id: str) -> PlacedAgent:
        self._pending.discard(id)
        agent = self._agents.pop(id)
        self._cluster.drop(agent.actor)
        return agent

    def _fill(self, nodes: Mapping[str, ClusterNode]) -> None:
        now = time.monotonic()
        free = [nodes[id] for id in nodes.keys() - self._agents.keys() - self._done]
        due = [node for node in free if now >= self._again_at.get(node.id, 0.0)]
        room = (self._order.nodes or len(nodes)) - len(self._agents) - len(self._done & nodes.keys())
        for node in sorted(due, key=lambda one: one.id)[: max(0, room)]:
            self._known[node.id] = node
            self._agents[node.id] = self._place(node)

    def _place(self, node: ClusterNode) -> PlacedAgent:
        each = self._order.each
        cards, replicas = each.cards_for(node.cards), each.replicas_for(node.cards)
        actor = self._cluster.hold(node, cards)
        ranks = f" and {counted(each.ranks, 'trainer rank')}" if each.ranks else ""
        words = each.worker_words(self._go.join, node.cards)
        order = AgentOrder(words, {VARIABLE: self._go.key}, cards, self._go.folder, self._go.threads)
        has = f"{counted(replicas, 'replica')}{ranks} on {counted(cards, 'card')}"
        self._say(Said(f"node {node}: an agent with {has}"))
        self._pending.add(node.id)
        return PlacedAgent(node, actor, actor.where.remote(), actor.run.remote(order), time.monotonic())

    def _look_at_pending(self) -> None:
        for id in list(self._pending):
            agent = self._agents[id]
            waited = time.monotonic() - agent.since
            if self._cluster.ended([agent.placed], 0.0):
                self._pending.discard(id)
            elif waited > PENDING_S:
                self._pending.discard(id)
                text = f"node {agent.node} has not given its cards for {waited:.0f} s: other jobs have them"
                self._say(Said(f"{text}; the agent starts when they are free", warning=True))

    def _hear(self) -> None:
        """Whoever has ended; waits a turn for it."""
        running = {agent.running: id for id, agent in self._agents.items()}
        if not running:
            time.sleep(TURN_S)
        for call in self._cluster.ended(list(running), TURN_S):
            agent = self._remove(running[call])
            if time.monotonic() - agent.since > LONGEST_RETRY_S:
                self._failures.pop(agent.node.id, None)
            try:
                self._ended(agent.node, self._cluster.result(call))
            except LaunchError as error:
                self._retry(agent.node, f"the agent on node {agent.node} is lost: {error}")

    def _ended(self, node: ClusterNode, end: AgentEnd) -> None:
        if end.status == 0:
            self._done.add(node.id)
            return
        last = " | ".join(end.last) or "nothing"
        self._retry(node, f"the agent on node {node} ended with status {end.status}; it said last: {last}")

    def _retry(self, node: ClusterNode, text: str) -> None:
        failures = self._failures[node.id] = self._failures.get(node.id, 0) + 1
        pause = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (failures - 1))
        self._again_at[node.id] = time.monotonic() + pause
        self._say(Said(f"{text}; another one in {pause:g} s, if the node is there", warning=True))

    def stop(self) -> None:
        """All agents leave; whoever does not is ended."""
        for agent in self._agents.values():
            agent.actor.stop.remote()
        until = time.monotonic() + STOP_S
        while self._agents and time.monotonic() < until:
            running = {agent.running: id for id, agent in self._agents.items()}
            for call in self._cluster.ended(list(running), TURN_S):
                self._remove(running[call])
        for id in list(self._agents):
            self._remove(id)


def _asked(lines: BinaryIO, order: Order, say: Say) -> None:
    cluster = RayCluster(order.address)
    try:
        others = cluster.others()
        _refuse_too_many(order.nodes, len(others))
        cards = cluster.reserve() if order.cards is None else order.cards
        say(Found(cluster.own.address, cards, len(others)))
        if advice := slowness():
            say(Said(advice))
        go = lines.readline()
        if go:
            _keep(cluster, order, read_from_launcher(go), say, lines)
    finally:
        cluster.close()


def _keep(cluster: RayCluster, order: Order, go: Any, say: Say, lines: BinaryIO) -> None:
    placing = Placing(cluster, order, go, say)
    try:
        while not select.select([lines], [], [], 0)[0]:
            placing.turn()
    finally:
        placing.stop()


def _refuse_too_many(asked: int, there: int) -> None:
    if asked > there:
        raise LaunchError(
            f"--nodes is {asked}, and beside this node the cluster has {there}; write --nodes {max(1, there)}, or "
            "start more with 'ray start --address HEAD:6379'"
        )


def main() -> int:
    """Stdout is for messages alone: what Ray prints goes to stderr."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = sys.stdin.buffer
    order = read_from_launcher(lines.readline())
    assert isinstance(order, Order)
    try:
        _asked(lines, order, lambda message: output.write(line(message)))
    except LaunchError as error:
        output.write(line(Failed(str(error))))
        return 2
    except BrokenPipeError:  # the launcher is gone
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
