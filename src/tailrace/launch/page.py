"""`tailrace page`: a run in the browser, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path

from tailrace.launch.errors import UsageError


def serve_page(run: Path, listen: str | None, token_file: Path | None) -> int:
    try:
        from tailrace.page.serve import DEFAULT, serve
    except ModuleNotFoundError as error:
        if error.name != "h11":
            raise
        raise UsageError("the page needs a package: pip install 'tailrace[page]'") from None

    return serve(run, DEFAULT if listen is None else listen, token_file)
