"""The wheel and the sdist: built, installed and run outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runs import EMULATED, NATIVE, START

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)], ROOT)
    return folder


def run(command: list[str], cwd: Path, path: str | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def installed(archive: Path, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "--target", str(folder), str(archive)], folder.parent)
    return folder


def trained(settings: str, package: Path, folder: Path) -> str:
    """In an empty folder, with nothing of the checkout on the path."""
    (folder / "mine.toml").write_text(settings)
    where = run([sys.executable, "-c", "import tailrace; print(tailrace.__file__)"], folder, str(package))
    assert Path(where.strip()).is_relative_to(package)
    return run([sys.executable, "-m", "tailrace", "train", "mine.toml", "--run.steps", "2"], folder, str(package))


def test_a_wheel_trains_a_model_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    package = installed(next(built.glob("*.whl")), tmp_path / "package")
    source = {file.relative_to(ROOT / "src") for file in (ROOT / "src").rglob("*") if file.is_file()}
    lacking = {file for file in source if "__pycache__" not in file.parts and not (package / file).is_file()}
    assert not lacking, "pages, pictures and kernels are part of it"
    shutil.copytree(START, tmp_path / "model")
    assert "all steps are done" in trained(NATIVE.replace(str(START), "model"), package, tmp_path)


def test_an_sdist_is_installed_and_runs(built: Path, tmp_path: Path) -> None:
    package = installed(next(built.glob("*.tar.gz")), tmp_path / "package")
    assert "all steps are done" in trained(EMULATED, package, tmp_path)
