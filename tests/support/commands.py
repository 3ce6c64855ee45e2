"""The command line as tests run it, and what every command promises."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest

from blr_analysis.cli import main
from blr_analysis.cli.commands import COMMANDS

JSON_NAMES = re.compile(r"--json prints ([^.]*)\.")
FORK = multiprocessing.get_context("fork")  # its processes need not import torch again


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    capsys.readouterr()
    code = main([str(a) for a in argv])
    output, errors = capsys.readouterr()
    return code, output, errors


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line of a refusal, with code 2 and nothing on standard output."""
    code, output, errors = run(capsys, *argv)
    (line,) = (line for line in errors.splitlines() if line.startswith("blr-analysis: "))
    assert code == 2, errors
    assert output == ""
    assert line == errors.splitlines()[-1]
    return line


def files(place: Path) -> dict[str, int]:
    """Every file below, and when it was written."""
    return {str(p): os.stat(p).st_mtime_ns for p in place.rglob("*") if p.is_file()}


def documented_names(command: str) -> set[str]:
    """The names that the help of a command promises of its JSON."""
    (names,) = JSON_NAMES.findall(" ".join((COMMANDS[command].__doc__ or "").split()))
    return set(names.split(", "))


def facts_of(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """The one JSON object on standard output; the words are on standard error."""
    code, output, errors = run(capsys, *argv, "--json")
    assert code == 0, errors
    assert errors
    return json.loads(output)


class CommandContract:
    """Every command: a dry run writes nothing, the output is the function's own, a second run
    replaces it only with --force, and --json prints one object of the documented names."""

    name: str
    argv: tuple[object, ...]  # a run that succeeds, without its output's place
    to: tuple[object, ...] = ("--out", "out")
    resumes = False  # True where a second run completes the first instead of replacing it

    def check(self, out: Path, printed: str) -> None:
        """The files in ``out`` and the printed text are what the function returns."""
        raise NotImplementedError

    def test_a_dry_run_writes_nothing(self, here: Path, capsys: Any) -> None:
        code, output, errors = run(capsys, self.name, *self.argv, *self.to, "--dry-run")
        assert code == 0, errors
        assert output
        assert not (here / "out").exists()

    def test_json_is_one_object_with_the_documented_names(self, here: Path, capsys: Any) -> None:
        costs = facts_of(capsys, self.name, *self.argv, *self.to, "--dry-run")
        assert costs.keys() == {"dry_run"}
        facts = facts_of(capsys, self.name, *self.argv, *self.to)
        assert facts.keys() == documented_names(self.name)

    def test_the_output_is_the_functions_and_replaced_by_force_alone(
        self, here: Path, capsys: Any
    ) -> None:
        code, printed, errors = run(capsys, self.name, *self.argv, *self.to)
        assert code == 0, errors
        self.check(here / "out", printed)
        before = files(here / "out")
        if not self.resumes:
            line = refused(capsys, self.name, *self.argv, *self.to)
            assert re.search("there already|not empty|force", line), line
            assert files(here / "out") == before
        code, _, errors = run(capsys, self.name, *self.argv, *self.to, "--force")
        assert code == 0, errors
        now = files(here / "out")
        assert now.keys() == before.keys()
        assert any(now[name] > before[name] for name in now)
