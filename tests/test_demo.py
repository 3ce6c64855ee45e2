"""The demo: small and quick here, whole where it is marked slow."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import sklearn.datasets  # noqa: F401  (slow to import)
import torch
import torch.nn.functional as F
from rich.console import Console

import blr_analysis as blr
from blr_analysis.audit import Findings
from blr_analysis.cli import main
from blr_analysis.cli.inputs import load_tasks
from blr_analysis.demo import load, network, recipe, run, train

FILES = {
    *(f"{name}.{suffix}" for name in ("table", "leave_one_out") for suffix in ("csv", "parquet")),
    *(f"{n}.{s}" for n in ("suspicious", "removals") for s in ("csv", "parquet", "png")),
    *(f"{name}.png" for name in ("memory_map", "deviations", "leave_one_out")),
    *("posterior.safetensors", "digits.py", "summary.txt", "report.html", "checkpoints"),
}


def test_the_split_is_a_partition_of_all_digits() -> None:
    data, other = load(0), load(1)
    rows = torch.cat([data.rows, data.test_rows])
    assert rows.sort().values.tolist() == list(range(1797))
    assert not torch.equal(data.rows, other.rows)
    assert data.images.shape == (1198, 1, 8, 8)
    assert (float(data.images.min()), float(data.images.max())) == (0.0, 1.0)
    means = torch.stack([data.images[data.labels == c].mean(0) for c in range(10)])
    nearest = torch.cdist(data.test_images.flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == data.test_labels).double().mean() > 0.85  # labelled by what they show


def test_training_repeats_itself_and_leaves_generator_and_threads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, threads = load(), torch.get_num_threads()
    state, part = torch.get_rng_state(), (data.images[:200], data.labels[:200])
    first, second, third = (train(*part, epochs=3, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    every = (model.parameters() for model in (first, second, third, network()))
    for a, b, other, start in zip(*every, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start) and not torch.equal(a, other)
    monkeypatch.setattr("blr_analysis.demo.job.load", lambda seed: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "x")
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One test for one run: workers that share the tests would each run the demo again."""
    folder, file = tmp_path / "digits", io.StringIO()
    findings, truth = run(folder, console=Console(file=file, width=120))
    assert {path.name for path in folder.iterdir()} == FILES
    assert all(path.stat().st_size > 500 for path in folder.iterdir() if path.is_file())
    table, removals = (pd.read_parquet(folder / f"{n}.parquet") for n in ("table", "removals"))
    assert table["row"].tolist() == load().rows.tolist() and len(table) == 1198
    pd.testing.assert_frame_equal(removals, findings.removals)
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert (posterior.structure, len(posterior.earlier)) == ("kron", 3)
    assert posterior.temperature == findings.posterior.temperature
    check_words(file.getvalue(), findings, truth)
    check_script(folder, findings, posterior, capsys)
    check_promises(findings, truth)


def check_words(out: str, findings: Findings, truth: dict[int, float]) -> None:
    """What is printed was computed."""
    data, model = load(), network()
    model.load_state_dict(findings.posterior.mean)
    nll = F.cross_entropy(model(data.test_images), data.test_labels).item()
    assert findings.on_test.nll == pytest.approx(nll, rel=1e-6)
    assert all(f"{v:.4f}" in out for v in (findings.loo.nll, findings.on_test.nll))
    assert all(f"{v:.3f}" in out for v in (*findings.removals["nll_after"], *truth.values()))
    assert "The temperature was measured" in out and "\x1b" not in out
    expected = findings.removals.set_index("group")["nll_after"]
    assert list(truth) == [int(expected.idxmax()), int(expected.idxmin())]


def check_script(folder: Path, findings: Findings, posterior: Any, capsys: Any) -> None:
    """The script that it writes states the same task."""
    task, test = load_tasks(f"{folder}/digits.py:train", "test")
    assert test is not None and task.recipe.epochs == recipe(task.n_data).epochs
    assert blr.leave_one_out(task, posterior).nll == pytest.approx(findings.loo.nll, rel=1e-5)
    assert all(torch.equal(w, posterior.mean[name]) for name, w in task.parameters().items())
    argv = ["what-if", f"{folder}/digits.py:train", "-p", f"{folder}/posterior.safetensors"]
    asked = ["--remove", "target == 3", "--test", "test", "--solver", "posterior"]
    assert main([*argv, *asked]) == 0
    count = int((load().labels == 3).sum())
    assert f"{count} of 1,198 training examples" in capsys.readouterr().out


def check_promises(findings: Findings, truth: dict[int, Any]) -> None:
    """What the README says of it."""
    loo, on_test = findings.loo, findings.on_test
    assert on_test is not None and on_test.accuracy > 0.95
    # The estimate from the training data is within twice the standard error of the test NLL …
    noise = float(on_test.losses.std() / len(on_test.losses) ** 0.5)
    assert abs(loo.nll - on_test.nll) < 2 * noise
    # … which the training loss is too low to be an estimate of.
    assert findings.scores.losses.mean() < on_test.nll - noise
    assert abs(loo.accuracy - on_test.accuracy) < 0.02
    after = findings.removals.set_index("group")["nll_after"]
    rise = {c: nll - on_test.nll for c, nll in truth.items()}
    assert all(abs(after[c] - nll) < 0.35 * rise[c] for c, nll in truth.items())
