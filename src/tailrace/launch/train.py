"""`tailrace train`: from settings to a finished run, with everything that can be refused refused before it starts.

settings -> folder and store -> task and prompts -> accuracy before -> controller until it stops -> accuracy after
         -> summary
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.envs.sources import PromptSource, open_source, steps_short
from tailrace.errors import TailraceError
from tailrace.launch.beginning import Beginning
from tailrace.launch.cards import Dealt, record_cards
from tailrace.launch.evaluation import measure
from tailrace.launch.folder import CHECKPOINTS, begin_store, resume_store, take_over_store
from tailrace.launch.fork import begin_fork
from tailrace.launch.log import Trackers
from tailrace.launch.machines import invite, withdraw
from tailrace.launch.resumed import note_files
from tailrace.launch.supervisor import Supervisor
from tailrace.launch.view import LiveView
from tailrace.launch.vllm_python import check_vllm
from tailrace.logs import output
from tailrace.model.advice import advice
from tailrace.obs.progress import Progress
from tailrace.obs.summary import AFTER, BEFORE, write_summary
from tailrace.runtime.components import RunHandle
from tailrace.runtime.controller import INTERRUPTED, Controller, RunError
from tailrace.runtime.local import read_records
from tailrace.scoring import EvalSet
from tailrace.sinks.packages import check_packages, notes
from tailrace.store.database import has_log
from tailrace.store.journal import Journal
from tailrace.store.run import RunStore
from tailrace.store.waiting import to_terminal
from tailrace.trainer.export import as_model_folder
from tailrace.trainer.manifest import ORIGIN
from tailrace.weights.shared_memory import clear_abandoned
from tailrace.wire import descriptors
from tailrace.wire.keys import Keyring
from tailrace.wording import plain_line

log = logging.getLogger(__name__)

DIVERGED = (
    "the loss or gradient of the last updates was not finite; the newest checkpoint is from before them, "
    "later ones are called diverged-...; try again with a lower trainer.learning_rate"
)


def train(dealt: Dealt, folder: Path, beginning: Beginning, supervisor: Supervisor) -> bool:
    """Run until it is over (True) or interrupted (False). The folder has everything that came of it."""
    config = dealt.config
    if supervisor.begun and Journal(folder).complete:
        return _complete(folder, "the run was over already")
    descriptors.raise_limit()
    source = None if supervisor.begun else open_source(config)
    for note in () if source is None else _notes(dealt, source):
        if note:
            log.warning("%s", note)
    eval_sets = _eval_sets(config, source)
    clear_abandoned()
    keys = Keyring(supervisor.secret, supervisor.token)
    handle = RunHandle(keys, supervisor.lifeline, read_records(folder) if supervisor.begun else None, dealt.deal)
    store = _opened(folder, config, beginning, supervisor)
    config = store.config if beginning.origin else config  # a fork has files of its own
    record_cards(store.meta, dealt.cards)
    note_files(store.meta, beginning.files)
    supervisor.begin()
    trackers = Trackers(folder, config)
    try:
        if _evaluates(config) and store.meta.get(f"accuracy_{BEFORE}") is None:
            _evaluate(store, config, _newest(folder / ORIGIN), BEFORE)
            store.commit()
        reason, complete = asyncio.run(_drive(store, config, handle, supervisor, eval_sets))
        clear_abandoned()  # of relays that were killed and did not come back before the end
        store.run_folder.refuse_moved()
        if complete and _evaluates(config):
            _evaluate(store, config, _newest(folder / CHECKPOINTS), AFTER)
    except BaseException as error:
        _close(store, complete=False, failed=_fatal(error))
        trackers.close()
        if isinstance(error, RunError):
            with suppress(OSError):  # the sentence that ended the run matters more
                write_summary(folder)
        raise
    _close(store, complete)
    trackers.close()
    if complete:
        return _complete(folder, reason)
    output(f"interrupted; the same command with --resume goes on from here ({folder})")
    return False


def _notes(dealt: Dealt, source: PromptSource) -> Iterator[str]:
    """What is refused here is refused before anything starts."""
    yield from dealt.notes
    yield check_vllm(dealt.config)
    check_packages(dealt.config.log.to)
    yield notes(dealt.config.log.to)
    yield from advice(dealt.config)
    yield steps_short(dealt.config, source)


def _opened(folder: Path, config: Config, beginning: Beginning, supervisor: Supervisor) -> RunStore:
    if supervisor.begun:
        return take_over_store(folder, config)
    if beginning.resume:
        return resume_store(folder, config, beginning.accept)
    return begin_fork(folder, config, beginning.origin) if beginning.origin else begin_store(folder, config)


def _close(store: RunStore, complete: bool, failed: str = "") -> None:
    store.close(complete, failed)
    if has_log(store.file):
        to_terminal(
            f"another program has {store.file} open, so run.db-wal and run.db-shm stay beside it until that is closed; "
            "whoever copies the run before then has to copy all three"
        )


def _fatal(error: BaseException) -> str:
    """The sentence that ended the run; nothing for Ctrl-C, which is no failure."""
    if not isinstance(error, Exception):
        return ""
    return str(error) if isinstance(error, TailraceError) else f"{type(error).__name__}: {error}"


def _complete(folder: Path, reason: str) -> bool:
    write_summary(folder, sys.stdout)
    output(plain_line(reason))
    return True


def _evaluates(config: Config) -> bool:
    """Before and after, in a process of its own. Where replicas evaluate while training, they do these too."""
    if config.eval.every:
        return False
    has_rows = bool(config.task.name or config.task.eval_data or config.task.eval_rows != 0)
    return config.run.evaluate and config.rollout.engine != "emulated" and has_rows


def _eval_sets(config: Config, source: PromptSource | None) -> tuple[EvalSet, ...] | None:
    """What replicas evaluate while training; None: a controller has taken over, and it is known."""
    if source is None:
        return None
    if config.eval.every and not source.eval_sets:
        raise ConfigError(
            "eval.every is set, but no rows are held out; write task.eval_data, or task.eval_rows above 0"
        )
    return source.eval_sets if config.eval.every else ()


def _evaluate(store: RunStore, config: Config, weights: Path | None, when: str) -> None:
    """Note what the held-out prompts come to; on disk with the next commit."""
    as_folder = as_model_folder(weights) if weights is not None else nullcontext()
    with Progress(f"accuracy {when} training") as progress, as_folder as folder:
        found = measure(config, folder, lambda done, total: progress(done, total, "samples"))
    if found.results:
        store.meta.set(f"accuracy_{when}", str(found.results[0].accuracy))
        store.meta.set(f"reward_{when}", str(found.results[0].mean_reward))


def _newest(folder: Path) -> Path | None:
    from tailrace.trainer.checkpoint import newest

    return newest(folder)


async def _drive(
    store: RunStore,
    config: Config,
    handle: RunHandle,
    supervisor: Supervisor,
    eval_sets: tuple[EvalSet, ...] | None,
) -> tuple[str, bool]:
    view = LiveView(store, config)
    controller = Controller(store, config, handle, view, eval_sets)
    invitation = invite(controller, store.run_folder)
    if invitation and handle.left is None:
        log.info("%s", invitation)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, controller.interrupt)
    showing = asyncio.create_task(view.show(lambda: controller.now, supervisor.beat))
    # It never ends by itself: what went wrong with it is raised below.
    showing.add_done_callback(lambda task: None if task.cancelled() else controller.interrupt())
    try:
        reason = await controller.run()
    finally:
        supervisor.rest()
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing
        withdraw(store.run_folder)
    if view.live.diverging and reason != INTERRUPTED:
        log.error(DIVERGED)
    return reason, reason != INTERRUPTED
