"""The benchmarks' truth: converged minima, files that survive an interruption, changed recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from benchmarks import truth
from benchmarks.truth import recipes, retrain, sources, store
from benchmarks.truth.__main__ import main
from blr_analysis.errors import DataError

N, M = 60, 30
TINY = recipes.Recipe(
    *("tiny", N, M, (4, 3), "categorical", 0.7), loo=(3, 2), subsets=2, relabel=2, dense=True
)


def numbers(recipe: recipes.Recipe) -> sources.Split:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(N + M, 4, dtype=torch.float64, generator=generator)
    slopes, noise = (
        torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in (4, N + M)
    )
    scores = x @ slopes + 0.7 * noise
    y = scores[:, 0] if recipe.likelihood == "gaussian" else scores.argmax(1)
    return sources.Split(x[:N], y[:N], x[N:], y[N:])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> recipes.Recipe:
    """A case called "tiny", in a cache of its own."""
    monkeypatch.setenv("BLR_CACHE", str(tmp_path))
    monkeypatch.setitem(sources.SOURCES, "tiny", numbers)
    monkeypatch.setitem(recipes.CASES, "tiny", TINY)
    return TINY


def written(kind: str = "") -> dict[str, bytes]:
    """Every stored tensor of the case "tiny", as bytes, by file and name."""
    found = {}
    for path in sorted(store.folder("tiny").rglob(f"{kind}*/*.safetensors")):
        file = store.read(path, recipes.CASES["tiny"].hash)
        assert file is not None
        found |= {
            f"{path.parent.name}/{path.name}/{name}": np.asarray(t).tobytes()
            for name, t in file.tensors.items()
        }
    return found


def coefficients(x: torch.Tensor, y: torch.Tensor, delta: float) -> np.ndarray:
    """scikit-learn's logistic regression with the bias penalised like the other weights."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = LogisticRegression(C=1 / delta, fit_intercept=False, solver="newton-cholesky", tol=1e-10)
    return fit.fit(ones.numpy(), y.numpy()).coef_


def as_rows(theta: torch.Tensor) -> np.ndarray:
    return torch.cat([theta[:12].view(3, 4), theta[12:, None]], 1).numpy()


def test_the_minimum_is_that_of_scikit_learn(tiny: recipes.Recipe) -> None:
    main(["--case", "tiny", "--what", "loo", "class"])
    case = truth.load("tiny")
    x, y = case.train
    assert case.record["converged"]
    assert as_rows(case.theta) == pytest.approx(coefficients(x, y, 0.7), abs=1e-6)
    for table in (case.loo, case.classes):
        assert bool(table.converged.all())
    for k, theta in enumerate(case.loo.theta):
        kept = case.loo.kept[k]
        assert int(kept.sum()) == N - 1
        expected = coefficients(x[kept], y[kept], 0.7)
        # strongly convex: no further from the minimum than gradient norm / δ
        gap = float(np.linalg.norm(as_rows(theta) - expected))
        assert gap <= float(case.loo.gradient_norm[k]) / 0.7 + 1e-8


def test_the_minimum_is_that_of_ridge_regression(tiny: recipes.Recipe) -> None:
    ridge = replace(TINY, widths=(4, 1), likelihood="gaussian", noise=0.3)
    x, y, *_ = numbers(ridge)
    minimum, _ = retrain.descend(ridge, x, y, retrain.fresh(ridge, 0), 1e-10)
    ones = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1)
    left = ones.T @ ones / 0.3 + 0.7 * torch.eye(5, dtype=x.dtype)
    exact = torch.linalg.solve(left, ones.T @ y / 0.3)
    assert minimum.converged
    torch.testing.assert_close(minimum.theta, exact, rtol=0, atol=1e-6)


def test_a_start_in_single_precision_ends_at_the_same_minimum(tiny: recipes.Recipe) -> None:
    x, y, *_ = numbers(TINY)
    start = retrain.fresh(TINY, 0)
    double, none = retrain.descend(TINY, x, y, start, 1e-9)
    both, some = retrain.descend(replace(TINY, mixed=True), x, y, start, 1e-9)
    assert both.converged and none == 0 and 0 < some < both.evaluations
    torch.testing.assert_close(both.theta, double.theta, rtol=0, atol=1e-7)


def test_what_is_stored_is_what_the_weights_give(tiny: recipes.Recipe) -> None:
    main(["--case", "tiny"])
    case = truth.load("tiny")
    assert len(case.loo) == 5 and sorted(set(case.loo.notes)) == ["random", "top"]
    assert case.classes.notes == ["0", "1", "2"]
    assert len(case.relabel) == 2
    for table in (case.loo, case.classes, case.relabel, case.subsets("B")):
        for k, theta in enumerate(table.theta):
            x, y = case.test
            losses = torch.nn.functional.cross_entropy(case.model(theta)(x), y, reduction="none")
            torch.testing.assert_close(table.test_losses[k], losses.detach())
            f = case.model(theta)(case.train[0]).detach()
            touched = [*table.removed[k].tolist(), *(i for i, _ in table.relabelled[k])]
            torch.testing.assert_close(table.left_out_outputs[k], f[sorted(touched)])
            nll = torch.nn.functional.cross_entropy(f, case.train[1], reduction="none")
            torch.testing.assert_close(table.train_losses[k], nll)
    before = case.train_losses[torch.cat(case.loo.removed)]
    assert bool((case.loo.left_out_losses > before).all())  # an example left out is missed


def test_an_interrupted_run_goes_on_where_it_stopped(
    tiny: recipes.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--case", "tiny", "--what", "class", "loo"])
    whole = written()
    stopped = sorted(store.folder("tiny").glob("*/*.safetensors"))[1::2]
    for path in stopped:
        path.unlink()
    stopped[0].write_bytes(b"half a file")
    made = []
    once = retrain.retrain
    monkeypatch.setattr(
        "benchmarks.truth.__main__.retrain", lambda *a: made.append(a[1].name) or once(*a)
    )
    main(["--case", "tiny", "--what", "class", "loo"])
    assert sorted(made) == sorted(path.stem for path in stopped)
    assert written() == whole


def test_a_changed_recipe_is_computed_again(
    tiny: recipes.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--case", "tiny", "--what", "class"])
    before = truth.load("tiny")
    classes = before.classes
    monkeypatch.setitem(recipes.CASES, "tiny", replace(TINY, delta=2.0))
    with pytest.raises(DataError, match=r"python -m benchmarks\.truth --case tiny"):
        truth.load("tiny")
    main(["--case", "tiny", "--what", "class"])
    after = truth.load("tiny")
    assert float(after.theta.norm()) < float(before.theta.norm())
    assert float(after.classes.theta.norm()) < float(classes.theta.norm())
    monkeypatch.setitem(recipes.CASES, "tiny", replace(TINY, delta=2.0, loo=(9, 9), chunk=7))
    assert len(truth.load("tiny").classes) == 3  # counts and chunks change no result
