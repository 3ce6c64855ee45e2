"""Wheel and sdist: what they install, in an environment that has never seen this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
AUDIT = """
from importlib.metadata import distributions
from pathlib import Path

import torch
import blr_analysis as blr

task = blr.Task(torch.nn.Linear(4, 3), (torch.randn(60, 4), torch.arange(60) % 3))
blr.report(task, blr.fit_laplace(task), "report.html")
print(blr.__file__)
(installed,) = distributions(path=[Path(blr.__file__).parents[1]])
(command,) = installed.entry_points.select(name="blr-analysis", group="console_scripts")
command.load()(["algorithms"])
"""


def run(*command: object, cwd: Path, **more: object) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    clean |= {k: str(v) for k, v in more.items()}
    how: dict[str, Any] = {"cwd": cwd, "env": clean, "capture_output": True, "text": True}
    done = subprocess.run([str(part) for part in command], timeout=300, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_what_is_installed_writes_a_page(tmp_path: Path) -> None:
    """The wheel is built from the sdist, so that both hold all that is needed; the dependencies
    are those of this environment, so that nothing is fetched."""
    pytest.importorskip("hatchling")
    build = (sys.executable, "-m", "hatchling", "build", "-d", tmp_path / "dist", "-t")
    run(*build, "sdist", cwd=ROOT)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    run(*build, "wheel", cwd=source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("blr_analysis/")}
    package = [p for p in (ROOT / "blr_analysis").rglob("*") if p.is_file()]
    assert held == {str(p.relative_to(ROOT)) for p in package if p.suffix not in (".pyc", ".pyo")}

    place = tmp_path / "installed"  # as pip lays out a wheel that needs no compiler
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    module, *said = run(sys.executable, "-c", AUDIT, cwd=tmp_path, PYTHONPATH=place).splitlines()
    assert Path(module).is_relative_to(place)
    assert (tmp_path / "report.html").stat().st_size > 1e6
    assert "IVON" in "".join(said)
