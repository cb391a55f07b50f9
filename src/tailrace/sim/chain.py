"""How long a version takes from relay to relay: chunks that follow each other through a chain or a tree.

Pure arithmetic, for the simulator (`cost_model.py`) and for the predictions of the planner (`publishing.py`).
"""

from __future__ import annotations

from math import sqrt

from tailrace.config.tree import RelaySettings

MANY = 1e6  # chunks, where a message costs nothing


def best_chunks(relays: int, transfer_s: float, latency_s: float) -> float:
    """The number of chunks that makes a chain fastest, for a version that takes `transfer_s` over one link."""
    if latency_s <= 0 or relays <= 2:
        return 1.0 if relays <= 2 else MANY
    return max(1.0, sqrt((relays - 2) * transfer_s / latency_s))


def hop_s(transfer_s: float, latency_s: float, chunks: float, fan_out: int) -> float:
    """One chunk over one hop; a relay with several targets shares its link between them."""
    return latency_s + fan_out * transfer_s / chunks


def broadcast_s(hops: int, transfer_s: float, latency_s: float, chunks: float, fan_out: int = 1) -> float:
    """Until the relay that is `hops` away from the master has all chunks."""
    return (hops - 1 + chunks) * hop_s(transfer_s, latency_s, chunks, fan_out) if hops else 0.0


def farthest(relays: int, settings: RelaySettings) -> int:
    """Hops from the master to the last of so many relays, the master included."""
    if settings.topology == "chain":
        return max(0, relays - 1)
    hops, reached, level = 0, 1, 1
    while reached < relays:
        hops, level = hops + 1, level * settings.fan_out
        reached += level
    return hops


def chunk_count(weight_bytes: float, chunk_mbytes: float, best: float) -> float:
    """As configured, or the best."""
    return max(1.0, weight_bytes / (chunk_mbytes * 1e6)) if chunk_mbytes else best
