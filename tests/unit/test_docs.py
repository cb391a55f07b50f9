"""What the docs say is so: every code name in the design and the walkthrough exists, every answer in SQL is
right, tables are as described, and so is the table of faults."""

import ast
import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from sample_stores import PROMPT, grant, piece, put
from tailrace.cli import main
from tailrace.config import load
from tailrace.config.tree import Config
from tailrace.protocol import Request, Role
from tailrace.runtime.component import ROLES
from tailrace.samples.file import SampleFile
from tailrace.samples.schema import sample_file
from tailrace.store.run import RunStore

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


# ------------------------------------------------------------------------------------------------------------- answers

QUESTION = re.compile(r"```sql\n(.*?)```\n\n```\n(.*?)```", re.S)
RECORDED = ["--gpus", "16", "--schedules", "trajectory", "--trainer.checkpoint_every", "1"]


def recorded(folder: Path, *settings: str) -> sqlite3.Connection:
    own_box = str(ROOT / "examples" / "clusters" / "own_box.toml")
    assert main(["simulate", own_box, *RECORDED, *settings, "--record", str(folder)]) == 0
    return sqlite3.connect(f"file:{folder / 'run.db'}?mode=ro", uri=True)


def answered(database: sqlite3.Connection, query: str) -> list[list[str]]:
    found = database.execute(query)
    return [[column[0] for column in found.description], *[[str(cell) for cell in row] for row in found]]


@pytest.mark.skipif(sqlite3.sqlite_version_info < (3, 38), reason="the questions need SQLite 3.38")
def test_the_answers_in_sql_are_those_of_the_recorded_run(tmp_path: Path) -> None:
    text = (ROOT / "docs/journal.md").read_text()
    section = text.partition("## Questions in SQL\n")[2].partition("\n## ")[0]
    run, slow = recorded(tmp_path / "run"), recorded(tmp_path / "slow", "--workload.reward_s", "5")
    questions = QUESTION.findall(section)
    assert len(questions) >= 6
    with closing(run), closing(slow):
        for query, answer in questions:
            lines = [line.split() for line in answer.splitlines() if not line.startswith("--")]
            assert lines == answered(slow if "ScoringStarted" in query else run, query), query


def a_real_run(folder: Path) -> sqlite3.Connection:
    """With the tables of one, and two samples."""
    with RunStore.create(folder, load([], ["--model.preset", "qwen2.5-7b"])) as store:
        store.trajectories.assign([Request(id, 1, 4, PROMPT.id, 3) for id in (16, 17)])
    with closing(SampleFile.create(sample_file(folder, 0), {"run": "x"})) as file:
        file.add_prompts([PROMPT])
        file.assign([grant(16), grant(17)])
        put(file, 0, 17, 1, 0, piece(17, 0, 3))
        file.commit()
    return sqlite3.connect(folder / "run.db")


def columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))]


def test_the_tables_of_a_real_run_are_those_in_the_docs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    text = (ROOT / "docs/journal.md").read_text()
    monkeypatch.chdir(tmp_path)
    with closing(a_real_run(Path("runs/demo"))) as run, closing(sqlite3.connect("runs/demo/samples-0.db")) as samples:
        for section in ("run.db", "What a real run adds", "samples-0.db"):
            told = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
            tables = re.findall(r"CREATE TABLE (\w+) +\((.*?)\);", told, re.S)
            assert len(tables) >= 2
            for table, content in tables:
                names = [column.split()[0] for column in content.split(",")]
                assert names == columns(samples if section == "samples-0.db" else run, table), table
        section = text.partition("## Questions in SQL to a real run\n")[2].partition("\n## ")[0]
        for query, answer in QUESTION.findall(section):
            *attach, question = query.strip().removesuffix(";").split(";")
            run.executescript(";".join(attach))
            assert answered(run, question)[0] == answer.split("\n", 1)[0].split()
    for program in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(program, {})
    assert len(re.findall(r"\[119,? 150,? 181\]", capsys.readouterr().out)) == 2


def test_the_table_of_faults_is_what_simulate_prints(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    section = (ROOT / "docs/simulate.md").read_text().partition("\n## Faults\n")[2]
    command, table = re.findall(r"```\n(.*?)```", section, re.S)[:2]
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command.replace("\\\n", " "))[1:]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        each.split() for each in table.splitlines()
    ]


# ---------------------------------------------------------------------------------------------------------- the picture


def picture_in(document: str) -> str:
    return next(block for block in (ROOT / document).read_text().split("```\n") if "controller        |" in block)


def test_the_picture_is_that_of_the_tree() -> None:
    picture = picture_in("README.md")
    assert picture == picture_in("docs/design.md")
    assert set(re.findall(r"\| +(\w+) +(?=\|)", picture)) == {"controller", *get_args(Role)}
    assert {f"tailrace.{file.replace('/', '.')}" for file in re.findall(r"([\w/]+)\.py", picture)} == set(
        ROLES.values()
    )
    assert all((SOURCE / folder).is_dir() for folder in re.findall(r"(\w+)/[ )]", picture))
    arrows = {tuple(path.split(" -> ")) for path in re.findall(r"\w+(?: -> \w+)+", picture)}
    assert {role for path in arrows for role in path} <= set(get_args(Role))


def test_the_paths_for_newcomers_lead_to_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### Where to find")[2].partition("[The design]")[0]
    files = re.findall(r"`(\w+/\w+\.py)`", text)
    assert len(files) >= 12
    assert [file for file in files if not (SOURCE / file).is_file()] == []
    missing = [name for name in re.findall(r"\.py` \(`([\w.]+)", text) if not exists(name)]
    assert missing == []
