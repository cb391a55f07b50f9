"""Kubernetes objects as YAML text, for people to read and for kubectl to apply. Writes; never reads.

Every string is quoted as JSON, which YAML takes literally, except text of several lines, which stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def documents(objects: Sequence[Mapping[str, Any]]) -> str:
    return "---\n".join("\n".join(_lines(each, "")) + "\n" for each in objects)


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{indent}{json.dumps(key) if _unsafe(key) else key}:", inner, indent)
    else:
        for inner in value:
            yield from _item(inner, indent)


def _entry(head: str, value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from _lines(value, f"{indent}  ")
    elif isinstance(value, str) and "\n" in value:
        yield f"{head} |"
        yield from (f"{indent}  {line}".rstrip() for line in value.splitlines())
    else:
        yield f"{head} {json.dumps(value)}"


def _item(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        first, *rest = _lines(value, f"{indent}  ")
        yield f"{indent}- {first.lstrip()}"
        yield from rest
    else:
        yield f"{indent}- {json.dumps(value)}"


def _unsafe(key: str) -> bool:
    return not all(letter.isalnum() or letter in "._/-" for letter in key)
