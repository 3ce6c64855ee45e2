"""The demo: small and quick here, whole where it is marked slow."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

import blr_analysis as blr
from blr_analysis.cli import main
from blr_analysis.cli.script import load_tasks
from blr_analysis.demo import RECIPE, TrainingRecipe, load, network, run, train
from blr_analysis.demo.removals import FULL, IVON_DIAGONAL, KRONECKER, ClassRemovals

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


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("demo") / "digits"
    file, said = io.StringIO(), []
    found = run(
        folder, recipe=QUICK, console=Console(file=file, width=100), say=lambda s: said.append(s)
    )
    return folder, file.getvalue(), said, *found


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


@pytest.mark.slow
def test_the_folder_holds_everything(quick) -> None:
    folder, _, _, findings, removals = quick
    assert {path.name for path in folder.iterdir()} == FILES
    assert all(path.stat().st_size > 500 for path in folder.iterdir())
    table = pd.read_parquet(folder / "table.parquet")
    assert len(table) == 1198
    assert table["row"].tolist() == load().rows.tolist()
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "removals.parquet"), removals.table)
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert posterior.structure == "diag"
    assert posterior.record["kind"] == findings.posterior.record["kind"]


@pytest.mark.slow
def test_what_is_printed_was_computed(quick) -> None:
    _, out, said, findings, removals = quick
    assert f"{findings.loo.nll:.4f}" in out
    assert f"{findings.on_test.nll:.4f}" in out
    data = load()
    model, _ = train(data.images, data.labels, recipe=QUICK)
    with torch.no_grad():
        nll = F.cross_entropy(model(data.test_images), data.test_labels).item()
    assert findings.on_test.nll == pytest.approx(nll, rel=1e-6)
    assert findings.removals is None
    for each in removals.predicted.values():
        for value in each["nll_after"]:
            assert f"{value:.3f}" in out
    for nll, _ in removals.retrained.values():
        assert f"{nll:.3f}" in out
    assert f"Closest: {removals.closest}." in out
    assert "\x1b" not in out
    epochs = [line for line in said if re.match(r"  epoch \d", line)]
    assert len(epochs) == QUICK.epochs
    assert any("retraining from scratch" in line for line in said)


@pytest.mark.slow
def test_the_retrained_classes_are_those_expected_to_matter_most_and_least(quick) -> None:
    *_, removals = quick
    expected = removals.predicted[FULL].set_index("group")["nll_after"]
    assert list(removals.retrained) == [int(expected.idxmax()), int(expected.idxmin())]
    lost = next(iter(removals.retrained))
    data = load()
    kept = data.labels != lost
    model, _ = train(data.images[kept], data.labels[kept], recipe=QUICK)
    with torch.no_grad():
        nll = F.cross_entropy(model(data.test_images), data.test_labels).item()
    assert removals.retrained[lost][0] == pytest.approx(nll, rel=1e-6)


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


@pytest.mark.slow
def test_the_script_that_it_writes_states_the_same_task(quick, capsys) -> None:
    folder, _, _, findings, _ = quick
    task, test = load_tasks(f"{folder}/digits.py:train", "test")
    assert test is not None
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert blr.leave_one_out(task, posterior).nll == pytest.approx(findings.loo.nll, rel=1e-6)
    for name, weights in task.parameters().items():
        assert torch.equal(weights, posterior.mean[name])
    argv = ["what-if", f"{folder}/digits.py:train", "-p", f"{folder}/posterior.safetensors"]
    assert main([*argv, "--remove", "target=3", "--test", "test"]) == 0
    count = int((load().labels == 3).sum())
    assert f"{count} of 1,198 training examples" in capsys.readouterr().out


def test_the_number_of_threads_is_given_back(tmp_path: Path, monkeypatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr("blr_analysis.demo.job.load", lambda seed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "x")
    assert torch.get_num_threads() == before


@pytest.mark.slow
def test_the_whole_demo_says_what_the_readme_promises(tmp_path: Path) -> None:
    file = io.StringIO()
    findings, removals = run(tmp_path / "digits", console=Console(file=file, width=100))
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
