"""The shape of the source tree: lines, functions, import cycles, class names in several modules, words not used here.

    python benchmarks/shape.py            # prints tables, writes benchmarks/results/shape.json

Import cycles count every import: at the top of a module, inside functions and under TYPE_CHECKING.
`tests/unit/test_shape.py` asserts what must hold.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LONGEST = 10  # functions and files that are listed

# Metaphors for things that have a usual name, as words of identifiers: `Door` in `PageDoor`, `desk` in `desk_of`.
# A capital letter asks for a class: `letter` may be a letter of a word.
WORDS = (
    *("Desk", "desk", "Crew", "crew", "Courier", "courier", "Tie", "tie", "Overseer", "overseer", "Door", "door"),
    *("Knock", "knock", "knocks", "Letter", "Parcel", "parcel", "Shelf", "shelf", "Errand", "errand", "errands"),
    *("Berth", "berth", "berths", "Hauler", "hauler", "haul", "Site", "Reign", "reign", "edition"),
    *("Lesson", "lesson", "lessons", "Grade", "grade", "facing", "turned", "surprises", "beginnings", "lean"),
)


class Function(NamedTuple):
    name: str  # of its module, and its own
    lines: int


class Module(NamedTuple):
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def package(self) -> str:
        """The first package below the root; a module of the root stands for itself."""
        return ".".join(self.name.split(".")[:2])

    def functions(self) -> Iterator[Function]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(f"{self.name}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)

    def classes(self) -> set[str]:
        return {node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def imported(self) -> Iterator[str]:
        """Dotted names, wherever they are imported; of `from a import b` both `a.b` and `a` may be the module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{self._origin(node)}.{alias.name}" for alias in node.names)

    def _origin(self, node: ast.ImportFrom) -> str:
        """The package that a `from` names, relative ones made absolute."""
        inner = [*self.name.split("."), "__init__"] if self.path.name == "__init__.py" else self.name.split(".")
        return ".".join([*inner[: -node.level], *filter(None, [node.module])]) if node.level else str(node.module)

    def identifiers(self) -> Iterator[str]:
        yield self.name.rpartition(".")[2]
        for node in ast.walk(self.tree):
            for field in ("name", "id", "attr", "arg", "asname"):
                if isinstance(name := getattr(node, field, None), str):
                    yield name.rpartition(".")[2]


class Shape:
    """What is known of one tree of sources."""

    def __init__(self, source: Path) -> None:
        self.modules = {module.name: module for module in _read(source)}

    @cached_property
    def functions(self) -> list[Function]:
        return [function for module in self.modules.values() for function in module.functions()]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        return {
            name: {found for target in module.imported() if (found := self._module(target)) and found != name}
            for name, module in self.modules.items()
        }

    def _module(self, target: str) -> str:
        """The module that an import loads: the longest beginning of the name that is one of ours."""
        while target and target not in self.modules:
            target = target.rpartition(".")[0]
        return target

    @property
    def median(self) -> float:
        return median(function.lines for function in self.functions)

    @property
    def percentile_95(self) -> float:
        return quantiles([function.lines for function in self.functions], n=20, method="inclusive")[-1]

    @property
    def cycles(self) -> list[list[str]]:
        """Strongly connected components of more than one module."""
        reached = {name: self._reached(name) for name in self.modules}
        knots = {frozenset(other for other in reached[name] if name in reached[other]) for name in self.modules}
        return sorted(sorted(knot) for knot in knots if knot)

    def _reached(self, name: str) -> set[str]:
        found, left = set[str](), list(self.imports[name])
        while left:
            if (module := left.pop()) not in found:
                found.add(module)
                left += self.imports[module]
        return found

    @property
    def duplicate_classes(self) -> dict[str, list[str]]:
        owners: dict[str, list[str]] = {}
        for module in self.modules.values():
            for name in module.classes():
                owners.setdefault(name, []).append(module.name)
        return {name: sorted(found) for name, found in sorted(owners.items()) if len(found) > 1}

    @property
    def unwanted_words(self) -> dict[str, dict[str, int]]:
        """Each word with the modules that use it, and how often."""
        found: dict[str, Counter[str]] = {}
        for module in self.modules.values():
            for identifier in module.identifiers():
                for word in set(WORDS) & set(words_of(identifier)):
                    found.setdefault(word, Counter())[module.name] += 1
        return {word: dict(counts.most_common()) for word, counts in sorted(found.items())}


def words_of(identifier: str) -> list[str]:
    """`_SimReplica2` -> Sim, Replica; `page_door` -> page, door."""
    return re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)


def _read(source: Path) -> Iterator[Module]:
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        yield Module(name.removesuffix(".__init__"), path, text, ast.parse(text))


def report(shape: Shape) -> dict[str, Any]:
    lines = Counter[str]()
    for module in shape.modules.values():
        lines[module.package] += module.lines
    longest = sorted(shape.functions, key=lambda function: (-function.lines, function.name))[:LONGEST]
    files = sorted(shape.modules.values(), key=lambda module: (-module.lines, module.name))[:LONGEST]
    return {
        "lines": lines.total(),
        "lines_by_package": dict(lines.most_common()),
        "functions": len(shape.functions),
        "function_lines_median": shape.median,
        "function_lines_p95": shape.percentile_95,
        "longest_functions": {function.name: function.lines for function in longest},
        "longest_files": {module.name: module.lines for module in files},
        "import_cycles": shape.cycles,
        "duplicate_classes": shape.duplicate_classes,
        "unwanted_words": shape.unwanted_words,
    }


def show(found: dict[str, Any], console: Console) -> None:
    summary = Table("figure", "value")
    for key in ("lines", "functions", "function_lines_median", "function_lines_p95"):
        summary.add_row(key, f"{found[key]:,g}")
    for key in ("import_cycles", "duplicate_classes", "unwanted_words"):
        summary.add_row(key, f"{len(found[key]):,}")
    console.print(summary)
    for key in ("lines_by_package", "longest_functions", "longest_files"):
        grid = Table(key, "lines")
        for name, lines in found[key].items():
            grid.add_row(name, f"{lines:,}")
        console.print(grid)
    for cycle in found["import_cycles"]:
        console.print(f"import cycle: {', '.join(cycle)}")
    for name, modules in found["duplicate_classes"].items():
        console.print(f"class {name}: {', '.join(modules)}")
    for word, modules in found["unwanted_words"].items():
        console.print(f"word {word}: {', '.join(f'{module} {count}' for module, count in modules.items())}")


def main() -> None:
    found = report(Shape(ROOT / "src"))
    show(found, Console(highlight=False))
    (ROOT / "benchmarks" / "results" / "shape.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
