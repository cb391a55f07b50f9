"""The versions that a relay holds or receives: the state that its threads share."""

from __future__ import annotations

from threading import Condition

from tailrace.types import Version
from tailrace.weights.region import MappedVersion
from tailrace.weights.version_buffer import VersionBuffer

MOST_BASES = 8  # that an offer names


class VersionTable:
    """Hold `changed` for every access to the attributes, and notify it after every change."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.buffers: dict[Version, VersionBuffer] = {}
        self.dropped: set[Version] = set()  # not to be accepted again from a relay that drops them later

    def add(self, buffer: VersionBuffer) -> None:
        with self.changed:
            self.buffers[buffer.version] = buffer
            self.dropped.discard(buffer.version)
            self.changed.notify_all()

    def get(self, version: Version) -> VersionBuffer | None:
        with self.changed:
            return self.buffers.get(version)

    def remove(self, version: Version) -> None:
        with self.changed:
            self.buffers.pop(version, None)
            self.changed.notify_all()

    def sendable(self) -> set[Version]:
        """What is sealed or arriving."""
        return {version for version, buffer in self.buffers.items() if not buffer.paused}

    def bases(self, version: VersionBuffer) -> list[MappedVersion]:
        """The newest of those that it may differ little from."""
        with self.changed:
            held = [each.mapped for each in self.buffers.values() if each is not version and each.mapped]
        return sorted(held, key=lambda each: -each.version)[:MOST_BASES]

    def forget_encoded(self, newest: VersionBuffer) -> None:
        """Of versions before it: whoever still lacks them can do without."""
        with self.changed:
            for version, buffer in self.buffers.items():
                if version < newest.version:
                    buffer.encoded.clear()

    def sealed(self) -> tuple[Version, ...]:
        with self.changed:
            return tuple(sorted(version for version, buffer in self.buffers.items() if buffer.sealed))
