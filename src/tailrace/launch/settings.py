"""`--dry-run` of any command: check the settings and print all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tailrace.config import Config, ConfigError, load, render
from tailrace.logs import output

log = logging.getLogger(__name__)


def print_settings(files: Sequence[str], settings: Sequence[str]) -> int:
    config = load(files, settings) if files or settings else Config()
    output(render(config))
    if config.model.path and config.rollout.engine != "emulated":
        _note_missing_model(config.model.path)
    return 0


def _note_missing_model(path: str) -> None:
    from tailrace.model.load import check_path

    try:
        check_path(path)
    except ConfigError as error:
        log.info("note: %s", error)
