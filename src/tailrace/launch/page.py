"""`tailrace page`: a run in the browser, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import UsageError


def serve_page(run: Path, listen: str | None, token_file: Path | None, save: Path | None = None) -> int:
    if save is not None:
        from tailrace.page.report import save_report

        if listen is not None or token_file is not None:
            raise UsageError("--save writes a file and serves nothing; leave out --listen and --token-file")
        return save_report(run, save)
    try:
        from tailrace.page.serve import DEFAULT, serve
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "click", "h11"):
            raise
        raise UsageError("the page needs a package: pip install 'tailrace[page]'") from None

    return serve(run, DEFAULT if listen is None else listen, token_file)
