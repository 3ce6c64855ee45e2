"""The benchmarks of an index's costs run at a small size, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "adapters --small": ("plain", "index", "ratio", "disk"),
    "query_cost --texts 300 --questions 3": ("open", "best 50 of 3", "best 50, refined"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_of_an_index_prints_its_figures(command: str) -> None:
    pytest.importorskip("peft")
    module, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for label in COMMANDS[command]:
        line = next(line for line in done.stdout.splitlines() if line.startswith(label))
        figures = re.findall(r"\d+\.\d+", line.removeprefix(label))
        assert figures, line
        assert all(float(figure) >= 0 for figure in figures)
