"""`tailrace page`: a run in the browser, until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tailrace.errors import UsageError


def serve_page(runs: Sequence[Path], listen: str | None, token_file: Path | None, save: Path | None = None) -> int:
    if save is not None:
        if listen is not None or token_file is not None:
            raise UsageError("--save writes a file and serves nothing; leave out --listen and --token-file")
        return write_report(runs, save)
    try:
        from tailrace.page.serve import DEFAULT, serve
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "click", "h11"):
            raise
        raise UsageError("the page needs a package: pip install 'tailrace[page]'") from None

    return serve(runs, DEFAULT if listen is None else listen, token_file)


def write_report(runs: Sequence[Path], out: Path) -> int:
    from tailrace.page.report import save_report

    return save_report(runs, out)
