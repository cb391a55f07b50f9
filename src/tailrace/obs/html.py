"""A report in one HTML file: style, scripts and data are inside, and nothing is loaded from elsewhere.

The scripts are those of the page of a run. The data is JSON that no text in it can end, and the policy lets the
browser run the scripts of the file and nothing else.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

ASSETS = Path(__file__).parent / "assets"


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def report(title: str, body: str, scripts: Sequence[str], data: Any, style: str = "") -> str:
    """`body` is HTML of ours; `data` is anything that msgspec encodes, and what the scripts draw; `style` comes on top
    of that of all reports."""
    style, code = asset("page.css") + style, [asset("charts.js"), *scripts]
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, code))}"
    ending = "\n".join(f"<script>{each}</script>" for each in code)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
<div id="tip" hidden></div>
<script type="application/json" id="data">{_embedded(data)}</script>
{ending}
</body>
</html>
"""


def _embedded(data: Any) -> str:
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
