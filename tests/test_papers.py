"""The figures of the papers, small: each shows what its paper says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.papers import expectation_propagation as ep
from benchmarks.papers import posterior_approximation, segmentation, theorem_1, two_wells

slow = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks" / "papers").glob("[!_]*.py"))
FIGURES: list = [
    # Deviations in units of mean-field's: Gauss–Newton is right, ĝ² of M = 10 too wide.
    pytest.param(
        posterior_approximation,
        lambda actual: (
            actual["VOGN, M = 1"] == pytest.approx(1, abs=0.15)
            and actual["VOGGN"] == pytest.approx(1, abs=0.05)
            and actual["Vadam, M = 10"] > 1.5
            and max(v for k, v in actual.items() if k.endswith("mean")) < 0.4
        ),
        marks=slow,
    ),
    (theorem_1, lambda actual: actual["error"] < 0.08 and actual["ratio at N"] > 2),
    pytest.param(
        two_wells,
        lambda actual: (
            actual["gradient descent"] == pytest.approx(-1, abs=0.05)
            and actual["Vadam"] == pytest.approx(1.9, abs=0.4)
        ),
        marks=slow,
    ),
    pytest.param(
        segmentation,
        lambda actual: (
            actual["share wrong"] < 0.05  # unsure where wrong
            and actual["entropy at borders"] > 5 * actual["entropy elsewhere"]
            and actual["entropy where wrong"] > actual["entropy at borders"]
        ),
        marks=slow,
    ),
]


@pytest.mark.parametrize(("paper", "holds"), FIGURES)
def test_a_figure_shows_what_its_paper_says(paper: ModuleType, holds: Callable) -> None:
    figure, actual = paper.draw(True)
    assert all(axes.has_data() for axes in figure.axes) and holds(actual), actual


@slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs(script: str, tmp_path: Path) -> None:
    """As its head says, from the command line."""
    command = [sys.executable, "-m", f"benchmarks.papers.{script}", "--small"]
    if "[--out DIR]" in (ROOT / "benchmarks" / "papers" / f"{script}.py").read_text():
        command += ["--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr[-2000:]


def test_expectation_propagation() -> None:
    """The rule, EP and Laplace against NUTS, and the rule's bound."""
    rule, peer, laplace = ep.compared().values()
    error = "largest error of p"
    spread = "f's deviation, of NUTS's"
    assert max(rule[error], peer[error]) < 0.01
    assert laplace[error] > 3 * rule[error]
    assert rule[spread] < peer[spread] < 1.02
    assert 0 < peer["log evidence"] - rule["log evidence"] < 0.5
