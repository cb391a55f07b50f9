"""Every code name in the design and the walkthrough exists: a renamed function must not live on in the docs."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tailrace.config.tree import Config

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tailrace"
DOCUMENTS = ["docs/design.md", "docs/walkthrough.md"]
NAME = re.compile(r"[A-Za-z_][\w/]*(\.[A-Za-z_]\w*)*(\.(py|md|toml|json|db|log))?")
CALL = re.compile(r"\(.*")  # what a function is given, and gives
WORDS = {"finally", "lcm"}  # of the language and its library


@cache
def definitions() -> dict[str, set[str]]:
    """What each module and class defines, by its short name; '' has everything."""
    found: dict[str, set[str]] = {"": set()}
    for path in SOURCE.rglob("*.py"):
        module = path.parent.name if path.stem == "__init__" else path.stem
        tree = ast.parse(path.read_text())
        collect(tree, module, found)
        found[""] |= {
            part.value for part in ast.walk(tree) if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
    for section in Config.__struct_fields__:
        fields = getattr(type(getattr(Config(), section)), "__struct_fields__", ())
        found.setdefault(section, set()).update(fields)
    return found


def collect(tree: ast.AST, owner: str, found: dict[str, set[str]]) -> None:
    mine = found.setdefault(owner, set())
    for node in ast.iter_child_nodes(tree):
        names = set(defined(node))
        mine |= names
        found[""] |= names
        if isinstance(node, ast.ClassDef):
            collect(node, node.name, found)
            mine |= found[node.name]  # `plane._decide` is a method of a class in plane.py
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            attributes = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            arguments = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
            mine |= attributes
            found[""] |= attributes | arguments


def defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case _:
            pass


def names_in(document: str) -> list[str]:
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.S)
    code = {CALL.sub("", each) for each in re.findall(r"`([^`\n]+)`", text)}
    return sorted(name for name in code if NAME.fullmatch(name))


def exists(name: str) -> bool:
    *folders, last = name.split("/")
    if (ROOT / name).exists() or (SOURCE / name).exists() or name in WORDS or name in definitions()[""]:
        return True
    if last.endswith((".py", ".md")):
        return any(path.as_posix().endswith("/" + name) for path in ROOT.glob("*/**/" + last))
    owners = last.split(".")
    if folders and not (SOURCE / "/".join([*folders, owners[0] + ".py"])).exists():
        return False
    known = definitions()
    return all(
        inner in known.get(outer, ()) for outer, inner in zip(["", *owners], owners, strict=False) if outer
    ) and (len(owners) > 1 or owners[0] in known[""] or owners[0] in known)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_code_name_in_a_document_exists(document: str) -> None:
    missing = [name for name in names_in(document) if not exists(name)]
    assert not missing, f"{document} names what is not there: {', '.join(missing)}"
