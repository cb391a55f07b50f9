"""The shape of the source tree stays as it is meant to be: small functions, no cycles, one owner for every name."""

from __future__ import annotations

from pathlib import Path

import pytest
from shape import Shape, words_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shape() -> Shape:
    return Shape(ROOT / "src")


def test_no_modules_import_each_other_even_for_types_alone(shape: Shape) -> None:
    assert shape.cycles == []


def test_functions_are_small(shape: Shape) -> None:
    assert shape.median <= 6
    assert shape.percentile_95 <= 17


def test_a_class_name_belongs_to_one_module(shape: Shape) -> None:
    assert shape.duplicate_classes == {}


def test_no_metaphor_stands_for_a_usual_thing(shape: Shape) -> None:
    assert shape.unwanted_words == {}


def test_the_command_line_only_parses_and_calls_the_commands(shape: Shape) -> None:
    used = {module.split(".")[1] for module in shape.imports["tailrace.cli"] if "." in module}
    assert used == {"errors", "launch", "logs", "release"}


def test_every_kind_of_import_makes_a_cycle(tmp_path: Path) -> None:
    package = tmp_path / "p"
    (package / "inner").mkdir(parents=True)
    modules = {
        "__init__": "",
        "top": "from p import typed",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.lazy import f",
        "lazy": "def f() -> None:\n    import p.inner.deep",
        "inner/__init__": "",
        "inner/deep": "from ..top import typed",
        "apart": "from p import top\nimport os",
    }
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    assert Shape(tmp_path).cycles == [["p.inner.deep", "p.lazy", "p.top", "p.typed"]]


def test_identifiers_are_split_into_words() -> None:
    assert words_of("_SimHTTPDoor2") == ["Sim", "HTTP", "Door"]
    assert words_of("page_door") == ["page", "door"]


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by name alone: of two with the same one it would collect one."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
