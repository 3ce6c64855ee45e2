"""The benchmarks' truth, on one small case: minima, what is stored of them, and the scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import classes
from sklearn.linear_model import LogisticRegression

from benchmarks.agreement import metrics
from benchmarks.truth import cases, store
from benchmarks.truth.__main__ import main
from benchmarks.truth.retrain import KINDS, Truth
from blr_analysis.errors import DataError

TINY = cases.Recipe("tiny", 60, 30, (4, 3), "categorical", 0.7, loo=5, subsets=2)


def coefficients(x: torch.Tensor, y: torch.Tensor, delta: float) -> np.ndarray:
    """scikit-learn's logistic regression with the bias penalised like the other weights."""
    ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    fit = LogisticRegression(C=1 / delta, fit_intercept=False, solver="newton-cholesky", tol=1e-10)
    return fit.fit(ones.numpy(), y.numpy()).coef_


def test_a_case_is_retrained_and_stored_and_goes_on_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BLR_CACHE", str(tmp_path))
    (x, *test_x), (y, *test_y) = (t.split(60) for t in classes(5, n=90))
    test = (*test_x, *test_y)
    monkeypatch.setitem(cases.SOURCES, "tiny", lambda n, m: cases.Data(x, y, *test))
    monkeypatch.setitem(cases.CASES, "tiny", TINY)
    main(["--case", "tiny"])
    tiny = Truth("tiny")
    assert tiny.base.record["converged"]
    for kind, count in zip(KINDS, (3, 5, 2, 2), strict=True):
        table: Any = tiny.retrained(kind)
        assert len(table) == count
        assert bool(table.converged.all())
        for k, (theta, kept) in enumerate(zip(table.theta, table.kept, strict=True)):
            assert not bool(kept[table.removed[k]].any())
            if kind != "class":  # of which scikit-learn has one fewer
                rows = torch.cat([theta[:12].view(3, 4), theta[12:, None]], 1)
                assert rows.numpy() == pytest.approx(coefficients(x[kept], y[kept], 0.7), abs=1e-4)
            f = tiny.model(theta)(test[0]).detach()
            expected = torch.nn.functional.cross_entropy(f, test[1], reduction="none")
            torch.testing.assert_close(table.test_losses[k], expected)
    loo: Any = tiny.retrained("loo")
    before = tiny.base.tensors["train_losses"][torch.cat(loo.removed)]
    assert bool((loo.left_out_losses > before).all())  # an example left out is missed
    first, *rest = sorted(store.folder("tiny").glob("*/*.safetensors"))
    first.write_bytes(b"half a file")
    kept_as = [path.stat().st_mtime_ns for path in rest]
    main(["--case", "tiny"])
    assert [path.stat().st_mtime_ns for path in rest] == kept_as
    assert first.stat().st_size > 1000
    monkeypatch.setitem(cases.CASES, "tiny", replace(TINY, delta=2.0))
    assert Truth("tiny").retrained("class") is None
    with pytest.raises(DataError, match=r"python -m benchmarks\.truth --case tiny"):
        assert len(Truth("tiny").theta)


def test_scores_are_one_where_losses_are_sums_of_influences() -> None:
    generator = torch.Generator().manual_seed(0)
    influence = torch.randn(30, 4, generator=generator).double()
    kept = torch.rand(50, 30, generator=generator) < 0.5
    losses = (~kept).double() @ influence
    assert metrics.linear_datamodeling(influence, kept, losses).value == pytest.approx(1)
    mixed = metrics.linear_datamodeling(influence * torch.tensor([1.0, 1, 1, -1]), kept, losses)
    assert mixed.value == pytest.approx(0.5)
    assert mixed.error == pytest.approx(1 / 2 * 3**0.5 / 2, rel=0.15)  # σ of ±1, √4 examples
