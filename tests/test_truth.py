"""The benchmarks' truth: converged minima, files that survive an interruption, changed recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression

from benchmarks.agreement import metrics
from benchmarks.truth import cases, store
from benchmarks.truth.__main__ import main
from benchmarks.truth.cases import Data, Recipe
from benchmarks.truth.retrain import KINDS, Truth
from blr_analysis.errors import DataError

N, M = 60, 30
TINY = Recipe("tiny", N, M, (4, 3), "categorical", 0.7, loo=5, subsets=2)


def numbers(n: int, m: int) -> Data:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n + m, 4, dtype=torch.float64, generator=generator)
    slopes, noise = (
        torch.randn(k, 3, dtype=torch.float64, generator=generator) for k in (4, n + m)
    )
    y = (x @ slopes + 0.7 * noise).argmax(1)
    return Data(x[:n], y[:n], x[n:], y[n:])


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Truth:
    """A case called "tiny", in a cache of its own."""
    monkeypatch.setenv("BLR_CACHE", str(tmp_path))
    monkeypatch.setitem(cases.SOURCES, "tiny", numbers)
    monkeypatch.setitem(cases.CASES, "tiny", TINY)
    return Truth("tiny")


def written() -> dict[str, bytes]:
    """Every stored tensor of the case "tiny", as bytes, by file and name."""
    found = {}
    for path in sorted(store.folder("tiny").rglob("*.safetensors")):
        file = store.read(path, cases.CASES["tiny"].hash)
        assert file is not None
        for name, t in file.tensors.items():
            found[f"{path.parent.name}/{path.name}/{name}"] = np.asarray(t).tobytes()
    return found


def coefficients(x: torch.Tensor, y: torch.Tensor, delta: float) -> np.ndarray:
    """scikit-learn's logistic regression with the bias penalised like the other weights."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = LogisticRegression(C=1 / delta, fit_intercept=False, solver="newton-cholesky", tol=1e-10)
    return fit.fit(ones.numpy(), y.numpy()).coef_


def as_rows(theta: torch.Tensor) -> np.ndarray:
    return torch.cat([theta[:12].view(3, 4), theta[12:, None]], 1).numpy()


def test_the_minimum_is_that_of_scikit_learn(tiny: Truth) -> None:
    main(["--case", "tiny", "--what", "loo", "class", "A"])
    x, y, *_ = tiny.data
    assert tiny.base.record["converged"]
    assert as_rows(tiny.theta) == pytest.approx(coefficients(x, y, 0.7), abs=1e-6)
    for kind, count in (("loo", 5), ("class", 3), ("A", 2)):
        table = tiny.retrained(kind)
        assert table is not None and len(table) == count and bool(table.converged.all())
        for theta, kept in [] if kind == "class" else zip(table.theta, table.kept, strict=True):
            expected = coefficients(x[kept], y[kept], 0.7)
            assert as_rows(theta) == pytest.approx(expected, abs=1e-4)
    assert tiny.retrained("B") is None


def test_what_is_stored_is_what_the_weights_give(tiny: Truth) -> None:
    main(["--case", "tiny"])
    x, y, x_test, y_test = tiny.data
    for kind in KINDS:
        table: Any = tiny.retrained(kind)
        for k, theta in enumerate(table.theta):
            model = tiny.model(theta)
            for given, targets, kept in (
                (x, y, table.train_losses),
                (x_test, y_test, table.test_losses),
            ):
                losses = torch.nn.functional.cross_entropy(model(given), targets, reduction="none")
                torch.testing.assert_close(kept[k], losses.detach())
            assert not bool(table.kept[k][table.removed[k]].any())
    loo: Any = tiny.retrained("loo")
    before = tiny.base.tensors["train_losses"][torch.cat(loo.removed)]
    assert bool((loo.left_out_losses > before).all())  # an example left out is missed


def test_an_interrupted_run_goes_on_and_a_changed_recipe_is_computed_again(
    tiny: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["--case", "tiny", "--what", "class", "loo"])
    whole, before = written(), float(tiny.theta.norm())
    stopped = sorted(store.folder("tiny").glob("*/*.safetensors"))[1::2]
    for path in stopped:
        path.unlink()
    stopped[0].write_bytes(b"half a file")
    kept = {path: path.stat().st_mtime_ns for path in store.folder("tiny").glob("*/*.safetensors")}
    del kept[stopped[0]]
    main(["--case", "tiny", "--what", "class", "loo"])
    assert written() == whole
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    monkeypatch.setitem(cases.CASES, "tiny", replace(TINY, delta=2.0))
    with pytest.raises(DataError, match=r"python -m benchmarks\.truth --case tiny"):
        assert len(Truth("tiny").theta)
    assert Truth("tiny").retrained("class") is None
    main(["--case", "tiny", "--what", "class"])
    assert float(Truth("tiny").theta.norm()) < before


def test_scores_are_those_of_scipy_and_one_where_losses_are_sums_of_influences() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(6, (40, 3), generator=generator).double()  # with ties
    b = torch.randn(40, 3, generator=generator) + a
    ranks = [stats.spearmanr(a[:, j], b[:, j])[0] for j in range(3)]
    assert metrics.spearman(a, b).tolist() == pytest.approx(ranks, abs=1e-12)
    linear = stats.pearsonr(a[:, 1], b[:, 1])[0]
    assert float(metrics.pearson(a, b)[1]) == pytest.approx(linear, abs=1e-12)
    influence = torch.randn(30, 4, generator=generator).double()
    kept = torch.rand(50, 30, generator=generator) < 0.5
    losses = (~kept).double() @ influence
    assert metrics.linear_datamodeling(influence, kept, losses).value == pytest.approx(1)
    mixed = metrics.linear_datamodeling(influence * torch.tensor([1.0, 1, 1, -1]), kept, losses)
    assert mixed.value == pytest.approx(0.5)
    assert mixed.error == pytest.approx(1 / 2 * 3**0.5 / 2, rel=0.15)  # σ of ±1, √4 examples
