"""Which files the user's code consists of: the file of a reward or task, and the modules beside it that it imports.

Nothing is run: imports are read from the text, so what a module imports under a name that it computes is not seen.
Installed packages are not the user's code; their versions are the environment's business.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tailrace.envs.imports import ImportPath, find

INSTALLED = {"site-packages", "dist-packages"}


def code_files(path: str, folders: Sequence[Path], setting: str) -> list[Path]:
    """Of `module:name` or `file.py:name`, in the order in which they are met; nothing if there is no such module."""
    import_path = find(path, folders, setting)
    roots, first = _found(import_path)
    waiting, files = list(first), list[Path]()
    while waiting:
        file = waiting.pop(0)
        if file not in files:
            files.append(file)
            waiting += _imported(file, roots)
    return files


def _found(import_path: ImportPath) -> tuple[list[Path], list[Path]]:
    """The folders in which its modules are looked for, and its own files."""
    roots = list(import_path.folders)
    if import_path.file is not None:
        return roots, [import_path.file]
    for root in (*roots, *map(Path, sys.path)):
        if files := _module(root, import_path.module.split(".")):
            return (roots if INSTALLED & set(root.parts) else [*roots, root]), files
    return [], []


def _imported(file: Path, roots: list[Path]) -> list[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []  # whoever imports it will say so
    return [found for node in ast.walk(tree) for found in _of_statement(node, file, roots)]


def _of_statement(node: ast.AST, file: Path, roots: list[Path]) -> Iterator[Path]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield from _module_of(roots, name.name.split("."))
    elif isinstance(node, ast.ImportFrom):
        base = (node.module or "").split(".") if node.module else []
        folders = [file.parents[node.level - 1]] if node.level else roots
        for name in node.names:  # a module of the package, or something in it
            yield from _module_of(folders, [*base, name.name])


def _module_of(roots: list[Path], parts: list[str]) -> list[Path]:
    if parts[0] in sys.stdlib_module_names:
        return []  # the user's folders come last, so a `json.py` there is not what is imported
    return next((files for root in roots if (files := _module(root, parts))), [])


def _module(root: Path, parts: list[str]) -> list[Path]:
    """The files that are run when the module of this name is imported, as far as they are here."""
    files: list[Path] = []
    for count in range(1, len(parts) + 1):
        path = root.joinpath(*parts[:count])
        if (file := path.with_name(f"{path.name}.py")).is_file():
            return [*files, file.resolve()]
        if (file := path / "__init__.py").is_file():
            files.append(file.resolve())
        elif not path.is_dir():
            break
    return files
