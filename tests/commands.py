"""The command line as tests run it."""

from __future__ import annotations

import multiprocessing

import pytest

from blr_analysis.cli import main

FORK = multiprocessing.get_context("fork")  # of processes that need not import torch again


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    capsys.readouterr()
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err
