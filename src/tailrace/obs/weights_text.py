"""Sentences about weights, for `event_text.py`: what happens to versions on their way from the trainer, through relays,
to replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace.obs.sentences import Sentences
from tailrace.protocol import (
    Command,
    Drop,
    Event,
    LinkFailed,
    LoadWeights,
    Publish,
    PublishFailed,
    PullFailed,
    RelayJoined,
    RelayLost,
    Route,
    VersionStored,
    WeightsLoaded,
)


def _publish(command: Publish) -> Sentences:
    made = "the first weights, " if command.version == 0 else ""
    yield ("version", command.version), f"{made}on the way from the trainer to h{command.relay}"
    yield ("relay", command.relay), f"gets v{command.version} from the trainer, as master relay"


def _version_stored(event: VersionStored) -> Sentences:
    yield ("version", event.version), f"stored on h{event.relay}"
    yield ("relay", event.relay), f"v{event.version} stored"


def _load_weights(command: LoadWeights) -> Sentences:
    yield ("replica", command.replica), f"pulls v{command.version} from h{command.relay}"
    yield ("relay", command.relay), f"r{command.replica} pulls v{command.version} from it"
    yield ("version", command.version), f"r{command.replica} pulls it from h{command.relay}"


def _weights_loaded(event: WeightsLoaded) -> Sentences:
    yield ("replica", event.replica), f"v{event.version} loaded"
    yield ("version", event.version), f"loaded by r{event.replica}"


def _pull_failed(event: PullFailed) -> Sentences:
    yield ("replica", event.replica), f"could not load v{event.version}: {event.reason}"
    yield ("version", event.version), f"r{event.replica} could not load it: {event.reason}"


def _drop(command: Drop) -> Sentences:
    yield ("relay", command.relay), f"told to drop v{command.version}, which has no reader"
    yield ("version", command.version), f"dropped from h{command.relay}"


def _route(command: Route) -> Sentences:
    targets = ", ".join(f"h{id}" for id in command.targets) or "no relay"
    yield ("relay", command.relay), f"told to forward to {targets} (route {command.revision})"


def _relay_joined(event: RelayJoined) -> Sentences:
    again = f" again (incarnation {event.incarnation})" if event.incarnation > 1 else ""
    held = ", ".join(f"v{version}" for version in event.versions) or "nothing"
    yield ("relay", event.relay), f"h{event.relay} joined{again}, holding {held}"


def _relay_lost(event: RelayLost) -> Sentences:
    yield ("relay", event.relay), f"lost (incarnation {event.incarnation}): {event.reason}"


def _link_failed(event: LinkFailed) -> Sentences:
    yield ("relay", event.relay), f"cannot reach h{event.target}: {event.reason}"
    yield ("relay", event.target), f"cannot be reached from h{event.relay}: {event.reason}"


def _publish_failed(event: PublishFailed) -> Sentences:
    text = f"did not get from the trainer to h{event.relay}: {event.reason}"
    yield ("version", event.version), text
    yield ("relay", event.relay), f"v{event.version} {text}"


ABOUT_WEIGHTS: dict[type[Event | Command], Callable[[Any], Sentences]] = {
    Publish: _publish,
    VersionStored: _version_stored,
    LoadWeights: _load_weights,
    WeightsLoaded: _weights_loaded,
    PullFailed: _pull_failed,
    Drop: _drop,
    Route: _route,
    RelayJoined: _relay_joined,
    RelayLost: _relay_lost,
    LinkFailed: _link_failed,
    PublishFailed: _publish_failed,
}
