"""The demo: small and quick here, whole where it is marked slow."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401  (slow to import)
import torch
from commands import documented_names
from rich.console import Console

import blr_analysis as blr
from blr_analysis.audit.section import two_digits
from blr_analysis.cli.facts import facts_of_demo
from blr_analysis.cli.inputs import load_tasks
from blr_analysis.demo import load, network, recipe, run, train
from blr_analysis.demo.job import _one_thread
from blr_analysis.terminal import json_value


def test_the_split_is_a_partition_of_all_digits() -> None:
    data = load(0)
    other = load(1)
    rows = torch.cat([data.rows, data.test_rows])
    assert rows.sort().values.tolist() == list(range(1797))
    assert not torch.equal(data.rows, other.rows)
    assert (float(data.images.min()), float(data.images.max())) == (0.0, 1.0)
    means = torch.stack([data.images[data.labels == c].mean(0) for c in range(10)])
    nearest = torch.cdist(data.test_images.flatten(1), means.flatten(1)).argmin(1)
    right = torch.tensor([name != "eve" for name in data.test_annotators])
    hits = (nearest == data.test_labels).double()
    assert hits[right].mean() > 0.85  # labelled by what they show
    by_eve = torch.tensor([name == "eve" for name in data.annotators])
    assert data.planted[by_eve].double().mean() == pytest.approx(0.2, abs=0.08)
    assert not data.planted[~by_eve].any()


def test_training_repeats_itself_and_leaves_generator_and_threads_alone() -> None:
    data = load()
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    part = data.images[:200], data.labels[:200]
    first, second, third = (train(*part, epochs=3, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    every = (model.parameters() for model in (first, second, third, network()))
    for a, b, other, start in zip(*every, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)
        assert not torch.equal(a, other)
    with pytest.raises(ZeroDivisionError), _one_thread():
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    """What is printed was computed, the script that is written states the same task, and what the
    README promises is so; in one test, for it is one run."""
    folder = tmp_path / "digits"
    file = io.StringIO()
    findings, truth = run(folder, console=Console(file=file, width=120))
    told = file.getvalue()
    loo = findings.loo
    on_test = findings.on_test
    removals = findings.removals
    assert on_test is not None
    assert removals is not None
    assert all(path.name in told for path in folder.iterdir() if path.name != "checkpoints")
    assert {"report.html", "summary.txt", "removals.png"} <= {p.name for p in folder.iterdir()}
    assert findings.table["row"].tolist() == load().rows.tolist()
    assert all(two_digits(nll) in told for nll in (*removals["nll_after"], *truth.values()))
    assert "The scale of all sizes was measured" in told
    assert "\x1b" not in told
    after = removals.set_index("group")["nll_after"]
    assert list(truth) == [int(after.idxmax()), int(after.idxmin())]

    task, test = load_tasks(f"{folder}/digits.py:train", "test")
    posterior = blr.Posterior.load(folder / "posterior.safetensors")
    assert test is not None
    assert task.recipe.epochs == recipe(task.n_data).epochs
    assert (posterior.structure, len(posterior.earlier)) == ("kron", 3)
    assert blr.leave_one_out(task, posterior).nll == pytest.approx(loo.nll, rel=1e-5)
    assert on_test.accuracy > 0.9  # eve labelled the test data as well
    planted = load().planted
    assert planted[findings.suspicions.order[: int(planted.sum())]].double().mean() > 0.7
    assert "Annotator eve supplied" in told
    assert "labels were planted wrong" in told
    facts = json_value(facts_of_demo(findings, truth, folder))
    assert facts.keys() == documented_names("audit") | {"retrained"}
    # The estimate from the training data is within twice the standard error of the test NLL …
    noise = float(on_test.losses.std() / len(on_test.losses) ** 0.5)
    assert abs(loo.nll - on_test.nll) < 2 * noise
    # … which the training loss is too low to be an estimate of.
    assert findings.scores.losses.mean() < min(loo.nll, on_test.nll)
    assert abs(loo.accuracy - on_test.accuracy) < 0.02
    assert all(abs(after[c] - v) < 0.35 * (v - on_test.nll) for c, v in truth.items())
