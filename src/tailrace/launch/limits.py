"""What a run takes of the machine's limits, asked for before anything is started."""

from __future__ import annotations

import resource

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.wire.descriptors import STRANGERS

BASE = 128  # open files of any process of a run: its own, its libraries', and some to spare
EACH = 4  # for every process that it starts or talks to


def needed_files(config: Config) -> int:
    """Open files that a process of such a run may come to have."""
    replicas = 1 if config.local.is_auto else config.local.replicas
    components = config.trainer.ranks + config.local.relays + replicas
    return BASE + EACH * (components + config.task.reward_workers) + (STRANGERS if config.local.listen else 0)


def allow_files(needed: int = BASE) -> None:
    """See that this process, and all that it starts, may open so many; ConfigError if that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"this takes up to {needed} open files in one process, and the limit here is {hard}; raise it with "
            f"'ulimit -n {max(1024, needed)}' (as root, or in the settings of the container) and start again"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
