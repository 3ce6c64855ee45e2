"""A fit that was ended goes on where it was, and comes to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import sequences, task_of, tiny_lm

import blr_analysis as blr
from blr_analysis.files import storage
from blr_analysis.posterior.fit import Fit


class Killed(Exception):
    """Ends a fit."""


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_fit_that_was_ended_comes_to_the_same_bits(
    structure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was ended: curvature, prior precision and distance from the minimum."""
    task = task_of(tiny_lm(), sequences(9), batch_size=2)
    whole = blr.fit_laplace(task, structure=structure)
    monkeypatch.setattr(storage, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(storage, "MIN_WRITINGS", 0.0)
    true = Fit._curvature_columns
    chunks = 0
    ends = 0

    def columns(*args: Any) -> Any:
        nonlocal chunks
        chunks += 1
        if chunks % 5 == 0:
            raise Killed
        return true(*args)

    monkeypatch.setattr(Fit, "_curvature_columns", columns)
    unfinished = tmp_path / "unfinished"
    posterior = None
    while posterior is None and ends < 50:
        try:
            posterior = blr.fit_laplace(task, structure=structure, unfinished=unfinished)
        except Killed:
            ends += 1
    assert posterior is not None
    assert ends > 2
    for name, diagonal in whole.form.diagonal().items():
        assert torch.equal(posterior.form.diagonal()[name], diagonal)
    assert posterior.prior_precision == whole.prior_precision
    assert posterior.stationarity == whole.stationarity

    monkeypatch.setattr(Fit, "_curvature_columns", lambda *_: 1 / 0)
    again = blr.fit_laplace(task, structure=structure, unfinished=unfinished)  # is read
    assert torch.equal(again.form.diagonal()[name], diagonal)
    with pytest.raises(ZeroDivisionError):
        other = task.subset(list(range(task.n_data - 1)))
        blr.fit_laplace(other, structure=structure, unfinished=unfinished)
