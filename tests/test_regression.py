"""Errors of regressions in the targets' units, beside scikit-learn's; and what a result lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score, root_mean_squared_error
from sklearn.model_selection import LeaveOneOut, cross_val_predict

import blr_analysis as blr


def problem(outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """30 noisy examples of a linear function."""
    g = np.random.default_rng(0)
    x = g.normal(size=(30, 3))
    return x, x @ g.normal(size=(3, outputs)) + g.normal(size=(30, outputs))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("likelihood", ["gaussian", torch.nn.MSELoss()])
def test_predictions_are_as_far_off_as_scikit_learn_says(outputs: int, likelihood: Any) -> None:
    x, y = (torch.tensor(part) for part in problem(outputs))
    model = torch.nn.Linear(3, outputs).double()
    task = blr.Task(model, (x, y), likelihood=likelihood)
    predicted = blr.fit_laplace(task, prior_precision=1.0).predict(task, draws=0)
    outputs_of_model = model(x).detach().numpy()
    truth = float(np.sqrt(np.mean((outputs_of_model - y.numpy()) ** 2)))
    assert predicted.rmse == pytest.approx(truth)
    assert predicted.r2 == pytest.approx(r2_score(y, outputs_of_model))


def test_left_out_errors_are_those_of_fits_without_each_example() -> None:
    x, y = problem(1)
    fitted = LinearRegression().fit(x, y[:, 0])
    task = blr.Task.from_sklearn(fitted, x, y[:, 0])
    posterior = blr.fit_laplace(task, structure="full", prior_precision=1e-9)
    loo = blr.leave_one_out(task, posterior)
    truth = cross_val_predict(LinearRegression(), x, y[:, 0], cv=LeaveOneOut())
    assert loo.rmse == pytest.approx(root_mean_squared_error(y[:, 0], truth), rel=1e-4)
    assert loo.r2 == pytest.approx(r2_score(y[:, 0], truth), rel=1e-4)


def test_classes_have_no_such_errors() -> None:
    x = torch.randn(30, 3)
    y = torch.arange(30) % 3
    task = blr.Task(torch.nn.Linear(3, 3), (x, y))
    posterior = blr.fit_laplace(task, prior_precision=1.0)
    for result in (posterior.predict(task, draws=0), blr.leave_one_out(task, posterior)):
        assert result.rmse is None
        assert result.r2 is None


def test_a_result_lists_what_it_found() -> None:
    x = torch.randn(30, 3)
    y = torch.arange(30) % 3
    task = blr.Task(torch.nn.Linear(3, 3), (x, y))
    posterior = blr.fit_laplace(task, prior_precision=1.0)
    expected = {
        "deviation": blr.sensitivity(task, posterior),
        "nll": blr.leave_one_out(task, posterior),
        "top": blr.influence(task, posterior, task),
        "order": blr.suspicious(task, posterior),
        "interval": blr.what_if(task, posterior, remove=[1], solver="posterior"),
    }
    for name, result in expected.items():
        names = dir(result)
        assert name in names
        assert "note" in names
        assert "plot" in names
        assert len(names) < 40
        assert not any(listed.startswith("_") for listed in names)
