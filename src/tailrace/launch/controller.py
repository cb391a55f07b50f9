"""What the controller's process of `tailrace train` does, after its supervisor has forked it: settings, limits, the
run."""

from __future__ import annotations

import logging
from typing import NamedTuple

from tailrace.config import load
from tailrace.launch.limits import allow_files, needed_files
from tailrace.launch.supervisor import Supervisor
from tailrace.runtime.placement import refuse_lacking_interface

log = logging.getLogger(__name__)


class Resuming(NamedTuple):
    """What to do about a run of this name that is there already."""

    resume: bool = False
    auto: bool = False  # resume it if there is one, else begin it
    accept: bool = False  # a run that is resumed may have other inputs than before


def control(files: list[str], settings: list[str], resuming: Resuming, supervisor: Supervisor) -> int:
    config = load(files, settings)
    allow_files(needed_files(config))
    refuse_lacking_interface(config)
    from tailrace.launch.cards import deal_cards
    from tailrace.launch.folder import has_run, is_complete, run_folder
    from tailrace.launch.train import train

    folder = run_folder(config, files)
    begun = resuming.auto and has_run(folder)
    if begun and is_complete(folder) and not supervisor.begun:
        log.info("%s has a complete run; nothing is left to do", folder)
        return 0
    resume = resuming.resume or begun
    dealt = deal_cards(config, folder, resume, supervisor.begun)
    allow_files(needed_files(dealt.config))
    return 0 if train(dealt, folder, resume, supervisor, resuming.accept) else 130
