"""`tailrace train`: from settings to a finished run, with everything that can be refused refused before it starts.

settings -> folder and store -> task and prompts -> accuracy before -> controller until it stops -> accuracy after
         -> summary
"""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tailrace.config.tree import Config
from tailrace.launch.evaluation import measure
from tailrace.launch.folder import CHECKPOINTS, open_store
from tailrace.launch.keeper import Keeper
from tailrace.launch.machines import invite, withdraw
from tailrace.launch.sources import Later, open_source
from tailrace.launch.view import View
from tailrace.model.device import check_devices
from tailrace.obs.progress import Progress
from tailrace.obs.summary import write_summary
from tailrace.relay.arena import clear_abandoned
from tailrace.runtime.controller import INTERRUPTED, Controller, Source
from tailrace.runtime.local import read_traces
from tailrace.runtime.parts import Tie
from tailrace.store.journal import Journal
from tailrace.store.run import RunStore
from tailrace.wire import descriptors
from tailrace.wire.keys import Keyring

BEFORE, AFTER = "accuracy_before", "accuracy_after"


def train(config: Config, folder: Path, resume: bool, keeper: Keeper) -> bool:
    """Run until it is over (True) or interrupted (False). The folder has everything that came of it."""
    if keeper.begun and Journal(folder).complete:
        return _complete(folder, "the run was over already")
    descriptors.raise_limit()
    descriptors.refuse_too_few(1 + config.local.relays + config.local.replicas)
    source = Later(config) if keeper.begun else open_source(config)
    note = "" if keeper.begun else check_devices(config)
    if note:
        print(note, file=sys.stderr, flush=True)
    clear_abandoned()
    keys = Keyring(keeper.secret, keeper.token)
    tie = Tie(keys, keeper.lifeline, read_traces(folder) if keeper.begun else None)
    store = open_store(folder, config, resume or keeper.begun)
    keeper.begin()
    try:
        if _evaluates(config) and store.meta.get(BEFORE) is None:
            store.meta.set(BEFORE, str(_accuracy(config, None, "accuracy before training")))
            store.commit()
        reason, complete = asyncio.run(_drive(store, config, source, tie, keeper))
        clear_abandoned()  # of relays that were killed and did not come back before the end
        if complete and _evaluates(config):
            store.meta.set(AFTER, str(_accuracy(config, _newest(folder), "accuracy after training")))
    except BaseException:
        store.close(complete=False)
        raise
    store.close(complete=complete)
    if complete:
        return _complete(folder, reason)
    print(f"interrupted; the same command with --resume goes on from here ({folder})")
    return False


def _complete(folder: Path, reason: str) -> bool:
    write_summary(folder, sys.stdout)
    print(reason)
    return True


def _evaluates(config: Config) -> bool:
    has_rows = bool(config.task.name or config.task.eval_data or config.task.eval_rows)
    return config.run.evaluate and config.rollout.engine == "native" and has_rows


def _accuracy(config: Config, weights: Path | None, title: str) -> float:
    with Progress(title) as progress:
        return measure(config, weights, lambda done, total: progress(done, total, "prompts")).accuracy


def _newest(folder: Path) -> Path | None:
    from tailrace.trainer.checkpoint import newest

    return newest(folder / CHECKPOINTS)


async def _drive(store: RunStore, config: Config, source: Source, tie: Tie, keeper: Keeper) -> tuple[str, bool]:
    view = View(store, config)
    controller = Controller(store, config, source, tie, view)
    invitation = invite(controller, store.folder)
    if invitation and tie.left is None:
        print(invitation, file=sys.stderr, flush=True)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, controller.interrupt)
    showing = asyncio.create_task(view.show(lambda: controller.now, keeper.beat))
    # It never ends by itself: what went wrong with it is raised below.
    showing.add_done_callback(lambda task: None if task.cancelled() else controller.interrupt())
    try:
        reason = await controller.run()
    finally:
        keeper.rest()
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing
        withdraw(store.folder)
    return reason, reason != INTERRUPTED
