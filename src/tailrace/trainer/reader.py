"""What a mini-batch is planned from, and where the tokens of its samples come from.

A mini-batch is planned from metadata alone: one `SampleInfo` per sample. Every rank makes the same plan and then reads
just the samples of its own share, by id, through a `TrajectoryReader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tailrace.protocol import Train
from tailrace.samples.client import SampleClient, SampleStoreError
from tailrace.samples.messages import SampleLength, StoredSample, segment_of
from tailrace.types import GroupId, StoreId, Struct, Trajectory, TrajectoryId, Version
from tailrace.wire.messages import Ordered


class SampleInfo(Struct):
    """All that the plan has to know of a sample."""

    id: TrajectoryId
    group: GroupId
    reward: float | None
    length: int  # tokens up to the last sampled one, prompt included; 0 where nothing was sampled
    sampled: int
    prompt: int = 0
    store: StoreId = 0  # that has it
    versions: tuple[Version, Version] | None = None  # the oldest and newest that its tokens may be of
    left_out: tuple[float, ...] = ()  # rewards of samples of its group that are not trained on


def sample_infos(
    command: Train, order: Ordered, lengths: Mapping[TrajectoryId, SampleLength]
) -> tuple[SampleInfo, ...]:
    """Of a mini-batch, in its order. `SampleStoreError` where a store has another number of tokens than a sample
    finished with: its file may be an older copy, and it has not been told yet what should be there."""
    infos: list[SampleInfo] = []
    for group, id, store in [(one, *located) for one in command.groups for located in one.located()]:
        found, finished_with = lengths[id], order.tokens.get(id)
        if finished_with not in (None, found.tokens):
            raise SampleStoreError(
                f"t{id} has {found.tokens} tokens in store {store}, and finished with {finished_with}"
            )
        told = order.rewards[id], found.length, found.sampled, found.prompt
        infos.append(SampleInfo(id, group.group, *told, store, order.versions.get(id), group.left_out))
    return tuple(infos)


class SampleLengths(NamedTuple):
    """In tokens."""

    prompt: int
    length: int  # up to the last sampled one, prompt included; 0 where nothing was sampled
    sampled: int


class TrajectoryReader(Protocol):
    def lengths(self, ids: Sequence[TrajectoryId]) -> Sequence[SampleLengths]: ...

    def read(self, ids: Sequence[TrajectoryId]) -> Iterable[Trajectory]:
        """In the order asked for. They may come one by one: nobody needs all of them at once."""
        ...


class StoreReader:
    """From the sample stores that have them."""

    def __init__(self, client: SampleClient, samples: Iterable[SampleInfo]) -> None:
        self._client = client
        self._samples = {info.id: info for info in samples}

    def lengths(self, ids: Sequence[TrajectoryId]) -> list[SampleLengths]:
        known = [self._samples[id] for id in ids]
        return [SampleLengths(info.prompt, info.length, info.sampled) for info in known]

    def read(self, ids: Sequence[TrajectoryId]) -> Iterator[Trajectory]:
        """Every store streams what was asked of it, in the order asked for."""
        by_store: dict[StoreId, list[TrajectoryId]] = {}
        for id in ids:
            by_store.setdefault(self._samples[id].store, []).append(id)
        streams = {store: self._client.read(mine, store) for store, mine in by_store.items()}
        return (self._trajectory(next(streams[self._samples[id].store])) for id in ids)

    def _trajectory(self, stored: StoredSample) -> Trajectory:
        info, sampled = self._samples[stored.id], [one.version for one in stored.pieces if one.version is not None]
        if info.versions and sampled and not info.versions[0] <= min(sampled) <= max(sampled) <= info.versions[1]:
            found, said = f"versions {min(sampled)} to {max(sampled)}", f"{info.versions[0]} to {info.versions[1]}"
            raise SampleStoreError(f"t{stored.id} is of {found} in store {info.store}, and finished with {said}")
        segments = tuple(map(segment_of, stored.pieces))
        return Trajectory(stored.id, stored.group, stored.prompt, segments, "", info.reward)


class InMemoryReader(Struct):
    """Samples that are here, for trials and tests."""

    trajectories: tuple[Trajectory, ...]

    def lengths(self, ids: Sequence[TrajectoryId]) -> list[SampleLengths]:
        return [_lengths(trajectory) for trajectory in self.read(ids)]

    def read(self, ids: Sequence[TrajectoryId]) -> Iterator[Trajectory]:
        by_id = {trajectory.id: trajectory for trajectory in self.trajectories}
        return (by_id[id] for id in ids)


def in_memory(groups: Iterable[Iterable[Trajectory]]) -> tuple[tuple[SampleInfo, ...], InMemoryReader]:
    """The metadata of a mini-batch, the samples of a group side by side, and a reader for them."""
    reader = InMemoryReader(tuple([trajectory for group in groups for trajectory in group]))
    lengths = reader.lengths([one.id for one in reader.trajectories])
    pairs = zip(reader.trajectories, lengths, strict=True)
    return tuple([SampleInfo(t.id, t.group, t.reward, n.length, n.sampled, n.prompt) for t, n in pairs]), reader


def _lengths(trajectory: Trajectory) -> SampleLengths:
    length = read = 0
    for segment in trajectory.segments:
        read += len(segment)
        length = read if segment.version is not None and len(segment) else length
    return SampleLengths(len(trajectory.segments[0]), length, trajectory.sampled_tokens)
