"""`tailrace workers`: the keys of the strangers that work for a run."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import UsageError
from tailrace.logs import output
from tailrace.runtime.worker_keys import WorkerKeys
from tailrace.store.journal import Journal


def workers(run: Path, invite: str | None, revoke: str | None, reason: str) -> int:
    """Make a key, withdraw one, or say who has one."""
    if reason and revoke is None:
        raise UsageError("--reason says why a key is withdrawn; write it with --revoke NAME")
    keys = WorkerKeys(Journal(run).path.parent)
    if invite is not None:
        output(f"{keys.invite(invite)}: bring it to {invite}, who joins with tailrace worker --key")
    elif revoke is not None:
        keys.revoke(revoke, reason)
        output(f"the key of {revoke} is withdrawn; a run that goes on sends it away within a heartbeat")
    else:
        for name in keys.names():
            output(name)
        for name, why in keys.revoked():
            output(f"{name}: revoked{f', {why}' if why else ''}")
    return 0
