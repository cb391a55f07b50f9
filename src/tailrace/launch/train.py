"""`tailrace train`: from settings to a finished run, with everything that can be refused refused before it starts.

settings -> folder and store -> task and prompts -> accuracy before -> controller until it stops -> accuracy after
         -> summary
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tailrace.config.tree import Config
from tailrace.launch.evaluation import measure
from tailrace.launch.folder import CHECKPOINTS, open_store
from tailrace.launch.sources import open_source
from tailrace.model.device import check_devices
from tailrace.obs.live import LiveRun
from tailrace.obs.progress import Progress
from tailrace.obs.summary import write_summary
from tailrace.obs.terminal import Show, watch
from tailrace.relay.arena import clear_abandoned
from tailrace.runtime.controller import INTERRUPTED, Controller, Source
from tailrace.store.run import RunStore

SHOW_S = 0.25
BEFORE, AFTER = "accuracy_before", "accuracy_after"


def train(config: Config, folder: Path, resume: bool) -> bool:
    """Run until it is over (True) or interrupted (False). The folder has everything that came of it."""
    source = open_source(config)
    note = check_devices(config)
    if note:
        print(note, file=sys.stderr, flush=True)
    clear_abandoned()
    store = open_store(folder, config, resume)
    try:
        if _evaluates(config) and store.meta.get(BEFORE) is None:
            store.meta.set(BEFORE, str(_accuracy(config, None, "accuracy before training")))
            store.commit()
        reason, complete = asyncio.run(_drive(store, config, source))
        if complete and _evaluates(config):
            store.meta.set(AFTER, str(_accuracy(config, _newest(folder), "accuracy after training")))
    except BaseException:
        store.close(complete=False)
        raise
    store.close(complete=complete)
    if complete:
        write_summary(folder, sys.stdout)
    print(reason if complete else f"interrupted; the same command with --resume goes on from here ({folder})")
    return complete


def _evaluates(config: Config) -> bool:
    has_rows = bool(config.task.name or config.task.eval_data or config.task.eval_rows)
    return config.run.evaluate and config.rollout.engine == "native" and has_rows


def _accuracy(config: Config, weights: Path | None, title: str) -> float:
    with Progress(title) as progress:
        return measure(config, weights, lambda done, total: progress(done, total, "prompts")).accuracy


def _newest(folder: Path) -> Path | None:
    from tailrace.trainer.checkpoint import newest

    return newest(folder / CHECKPOINTS)


async def _drive(store: RunStore, config: Config, source: Source) -> tuple[str, bool]:
    live = LiveRun(config)
    for entry in store.entries():
        live.see(entry.now, entry.event, entry.commands)
    controller = Controller(store, config, source, secrets.token_hex(32), live)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, controller.interrupt)
    with watch(live) as show:
        showing = asyncio.create_task(_show(show, controller))
        try:
            reason = await controller.run()
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing
    return reason, reason != INTERRUPTED


async def _show(show: Show, controller: Controller) -> None:
    while True:
        show(controller.now)
        await asyncio.sleep(SHOW_S)
