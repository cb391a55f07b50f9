"""What the controller's process of `tailrace train` does, after its supervisor has forked it: settings, limits, the
run."""

from __future__ import annotations

from tailrace.config import load
from tailrace.launch.limits import allow_files, needed_files
from tailrace.launch.supervisor import Supervisor
from tailrace.runtime.placement import refuse_lacking_interface


def control(files: list[str], settings: list[str], resume: bool, accept: bool, supervisor: Supervisor) -> int:
    """`accept`: a run that is resumed may have other inputs than before."""
    config = load(files, settings)
    allow_files(needed_files(config))
    refuse_lacking_interface(config)
    from tailrace.launch.cards import deal_cards
    from tailrace.launch.folder import run_folder
    from tailrace.launch.train import train

    folder = run_folder(config, files)
    dealt = deal_cards(config, folder, resume, supervisor.begun)
    allow_files(needed_files(dealt.config))
    return 0 if train(dealt, folder, resume, supervisor, accept) else 130
