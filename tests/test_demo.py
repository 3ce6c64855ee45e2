"""The demo: small and quick here, whole where it is marked slow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

import blr_analysis as blr
from blr_analysis.audit import Findings
from blr_analysis.cli import main
from blr_analysis.cli.script import load_tasks
from blr_analysis.demo import RECIPE, TrainingRecipe, load, network, run, train
from blr_analysis.demo.removals import FULL, IVON_DIAGONAL, KRONECKER, ClassRemovals
from blr_analysis.demo.training import Digits
from blr_analysis.learning_rule.optim import IVON

QUICK = TrainingRecipe(epochs=3)
FILES = {
    *(f"{name}.{suffix}" for name in ("table", "leave_one_out") for suffix in ("csv", "parquet")),
    *(f"removals.{suffix}" for suffix in ("csv", "parquet", "png")),
    *(f"{name}.png" for name in ("memory_map", "deviations", "suspicious", "leave_one_out")),
    "leave_one_out_while_training.png",
    "posterior.safetensors",
    "digits.py",
    "summary.txt",
    "report.html",
}


def test_the_split_is_a_partition_of_all_digits() -> None:
    data, other = load(0), load(1)
    rows = torch.cat([data.rows, data.test_rows])
    assert rows.sort().values.tolist() == list(range(1797))
    assert not torch.equal(data.rows, other.rows)
    assert data.images.shape == (1198, 1, 8, 8)
    assert (float(data.images.min()), float(data.images.max())) == (0.0, 1.0)


def test_training_repeats_itself_and_leaves_the_global_generator_alone() -> None:
    data = load()
    state = torch.get_rng_state()
    first, _ = train(data.images[:200], data.labels[:200], recipe=QUICK)
    second, _ = train(data.images[:200], data.labels[:200], recipe=QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    for a, b, start in zip(
        first.parameters(), second.parameters(), network().parameters(), strict=True
    ):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)
    third, _ = train(data.images[:200], data.labels[:200], recipe=QUICK, seed=1)
    assert not torch.equal(next(first.parameters()), next(third.parameters()))


def test_the_closest_posterior_is_the_one_with_the_smallest_miss() -> None:
    def table(*after: float) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "group": [0, 1],
                "n": [5, 5],
                "nll_before": 0.1,
                "accuracy_before": 0.9,
                "nll_after": after,
                "accuracy_after": 0.8,
            }
        )

    predicted = {IVON_DIAGONAL: table(0.2, 0.2), KRONECKER: table(0.9, 0.6), FULL: table(2.0, 0.1)}
    removals = ClassRemovals(predicted, {0: (1.0, 0.8), 1: (0.5, 0.8)})
    misses = removals.misses()
    assert misses == pytest.approx({IVON_DIAGONAL: 0.55, KRONECKER: 0.1, FULL: 0.7})
    assert removals.closest == KRONECKER
    assert removals.rise == pytest.approx(0.65)
    assert removals.table["nll_after_retrained"].tolist() == [1.0, 0.5]


def test_the_number_of_threads_is_given_back(tmp_path: Path, monkeypatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("blr_analysis.demo.job.load", lambda seed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "x")
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys, monkeypatch) -> None:
    """One test for one run: workers that share the tests would each run the demo again."""
    folder, file, said, again = tmp_path / "digits", io.StringIO(), [], []

    def noted(images: Tensor, labels: Tensor, **how: Any) -> tuple[torch.nn.Module, IVON]:
        model, optimizer = train(images, labels, **how)
        again.append((model, labels, how))
        return model, optimizer

    monkeypatch.setattr("blr_analysis.demo.removals.train", noted)
    findings, removals = run(folder, console=Console(file=file, width=100), say=said.append)
    check_files(folder, findings, removals)
    check_words(file.getvalue(), said, findings, removals)
    check_retrained(removals, again)
    check_script(folder, findings, capsys)
    check_promises(findings, removals)


def check_files(folder: Path, findings: Findings, removals: ClassRemovals) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert all(path.stat().st_size > 500 for path in folder.iterdir())
    table = pd.read_parquet(folder / "table.parquet")
    assert table["row"].tolist() == load().rows.tolist() and len(table) == 1198
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "removals.parquet"), removals.table)
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert posterior.structure == "diag"
    assert posterior.record["kind"] == findings.posterior.record["kind"]


def check_words(out: str, said: list[str], findings: Findings, removals: ClassRemovals) -> None:
    """What is printed was computed."""
    assert f"{findings.loo.nll:.4f}" in out and f"{findings.on_test.nll:.4f}" in out
    data, model = load(), network()
    model.load_state_dict(findings.posterior.mean)
    assert findings.on_test.nll == pytest.approx(loss_on_test(model, data), rel=1e-6)
    assert findings.removals is None
    after = [value for each in removals.predicted.values() for value in each["nll_after"]]
    assert all(f"{value:.3f}" in out for value in after)
    assert all(f"{nll:.3f}" in out for nll, _ in removals.retrained.values())
    assert f"Closest: {removals.closest}." in out and "\x1b" not in out
    assert any(line.startswith(f"  epoch {RECIPE.epochs}: ") for line in said)
    assert any("retraining from scratch" in line for line in said)


def check_retrained(removals: ClassRemovals, again: list[tuple[Any, Tensor, Any]]) -> None:
    """The classes expected to matter most and least, retrained as the demo trains."""
    expected = removals.predicted[FULL].set_index("group")["nll_after"]
    assert list(removals.retrained) == [int(expected.idxmax()), int(expected.idxmin())]
    data = load()
    for (lost, (nll, _)), (model, labels, how) in zip(
        removals.retrained.items(), again, strict=True
    ):
        assert torch.equal(labels, data.labels[data.labels != lost])
        assert (how["seed"], how["recipe"]) == (0, RECIPE)
        assert nll == pytest.approx(loss_on_test(model, data), rel=1e-6)


def loss_on_test(model: torch.nn.Module, data: Digits) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(data.test_images), data.test_labels).item()


def check_script(folder: Path, findings: Findings, capsys: pytest.CaptureFixture[str]) -> None:
    """The script that it writes states the same task."""
    task, test = load_tasks(f"{folder}/digits.py:train", "test")
    assert test is not None
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert blr.leave_one_out(task, posterior).nll == pytest.approx(findings.loo.nll, rel=1e-6)
    assert all(torch.equal(w, posterior.mean[name]) for name, w in task.parameters().items())
    argv = ["what-if", f"{folder}/digits.py:train", "-p", f"{folder}/posterior.safetensors"]
    assert main([*argv, "--remove", "target=3", "--test", "test"]) == 0
    count = int((load().labels == 3).sum())
    assert f"{count} of 1,198 training examples" in capsys.readouterr().out


def check_promises(findings: Findings, removals: ClassRemovals) -> None:
    """What the README says of it."""
    assert findings.on_test is not None
    assert findings.on_test.accuracy is not None
    assert findings.loo.accuracy is not None
    assert findings.on_test.accuracy > 0.95
    # The estimate from the training data is within twice the standard error of the test NLL …
    noise = float(findings.on_test.losses.std() / len(findings.on_test.losses) ** 0.5)
    assert abs(findings.loo.nll - findings.on_test.nll) < 2 * noise
    # … which the training loss is too low to be an estimate of.
    assert findings.scores.losses.mean() < findings.on_test.nll - noise
    assert abs(findings.loo.accuracy - findings.on_test.accuracy) < 0.02
    # Correlations between weights are what class removals need.
    misses = removals.misses()
    assert misses[FULL] < 0.5 * removals.rise < misses[IVON_DIAGONAL]
    assert misses[FULL] < misses[KRONECKER] < misses[IVON_DIAGONAL]
    assert TrainingRecipe() == RECIPE
