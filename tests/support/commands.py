"""The command line as tests run it, and what every command promises."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from blr_analysis.cli import main

FORK = multiprocessing.get_context("fork")  # of processes that need not import torch again


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    capsys.readouterr()
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line of a refusal, with code 2 and nothing on standard output."""
    code, out, err = run(capsys, *argv)
    (line,) = (line for line in err.splitlines() if line.startswith("blr-analysis: "))
    assert (code, out) == (2, "") and line == err.splitlines()[-1], (code, out, err)
    return line


def files(place: Path) -> dict[str, int]:
    """Every file below, and when it was written."""
    return {str(p): os.stat(p).st_mtime_ns for p in place.rglob("*") if p.is_file()}


class CommandContract:
    """Every command: a dry run that writes nothing, output that is the function's own, and none
    that is replaced unless --force says so."""

    name: str
    argv: tuple[object, ...]  # a run that succeeds, but for where it writes
    to: tuple[object, ...] = ("--out", "out")
    resumes = False  # the same again is no replacement

    def check(self, out: Path, said: str) -> None:
        """What was written and said is what the function gives."""
        raise NotImplementedError

    def test_a_dry_run_writes_nothing(self, here: Path, capsys: Any) -> None:
        code, out, err = run(capsys, self.name, *self.argv, *self.to, "--dry-run")
        assert code == 0 and out and not (here / "out").exists(), err

    def test_the_output_is_the_functions_and_replaced_by_force_alone(
        self, here: Path, capsys: Any
    ) -> None:
        code, said, err = run(capsys, self.name, *self.argv, *self.to)
        assert code == 0, err
        self.check(here / "out", said)
        before = files(here / "out")
        if not self.resumes:
            line = refused(capsys, self.name, *self.argv, *self.to)
            assert any(said in line for said in ("there already", "not empty", "force")), line
            assert files(here / "out") == before
        code, _, err = run(capsys, self.name, *self.argv, *self.to, "--force")
        assert code == 0, err
        now = files(here / "out")
        assert now.keys() == before.keys()
        assert any(now[name] > before[name] for name in now)
