"""What a simulation takes for granted because nobody has said it: told with every result that depends on it."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.config import Config
from tailrace.config.render import changes
from tailrace.config.tree import Cluster

LENGTHS = "workload.lengths."


def assumptions(config: Config) -> Iterator[str]:
    cluster, workload = config.cluster, config.workload
    if config.model.path and not config.costs.measured and cluster == Cluster():
        yield (
            f"no [cluster] is given, so this is for {config.size} ({cluster.gpu}), not for the machine that trains; "
            "write cluster.gpu and cluster.gpus"
        )
    if not any(key.startswith(LENGTHS) for key in changes(config)):
        yield (
            f"no lengths are given, so answers are taken to have a median of {workload.lengths.median:,.0f} tokens, "
            f"cut at {workload.max_completion_tokens:,}; write workload.lengths.median and p99"
        )
