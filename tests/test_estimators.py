"""Scikit-learn's estimators as tasks, against scikit-learn itself: its predictions, its refits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import (
    ElasticNet,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
)
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.posterior.stationarity import stationarity

N = 48
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)) * [1.0, 5.0, 0.2] + 2
SCORE = (X - X.mean(0)) / X.std(0) @ [1.0, -0.7, 0.5]
WORDS = np.array(["cat", "dog", "eel"])[np.digitize(SCORE + RNG.normal(size=N), [-0.7, 0.7])]
YES = (SCORE + RNG.normal(size=N) > 0).astype(int)
REAL = 3 + SCORE + RNG.normal(size=N)
COUNT = RNG.poisson(np.exp(0.5 + 0.4 * SCORE)).astype(float)
TIGHT: dict[str, Any] = {"tol": 1e-10, "max_iter": 5000}
MLP = MLPClassifier((3,), "tanh", solver="lbfgs", alpha=1.0, random_state=0, **TIGHT)
NET = LogisticRegression(penalty="elasticnet", l1_ratio=0, solver="saga", C=0.5, **TIGHT)
CASES: dict[str, tuple[Any, np.ndarray]] = {
    "logistic, 3 classes": (LogisticRegression(C=0.5, **TIGHT), WORDS),
    "logistic, 2 classes": (LogisticRegression(C=2.0, **TIGHT), YES),
    "logistic, weighted": (LogisticRegression(class_weight={0: 1.0, 1: 3.0}, **TIGHT), YES),
    "logistic, elastic net": (NET, YES),
    "least squares": (LinearRegression(), REAL),
    "ridge": (Ridge(alpha=3.0), REAL),
    "ridge, 2 targets": (Ridge(alpha=3.0), np.stack([REAL, SCORE + REAL**2 / 9], 1)),
    "poisson": (PoissonRegressor(alpha=0.1, **TIGHT), COUNT),
    "network, 3 classes": (MLP, WORDS),
    "network, 2 classes": (MLP, YES),
}


def fitted(name: str) -> tuple[Any, np.ndarray, blr.Task]:
    """A pipeline, its targets, and its task."""
    estimator, y = CASES[name]
    pipeline = make_pipeline(StandardScaler(), clone(estimator)).fit(X, y)
    return pipeline, y, blr.Task.from_sklearn(pipeline, X, y)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that scikit-learn gives up
@pytest.mark.parametrize("name", CASES)
def test_the_task_predicts_what_the_estimator_does_at_the_minimum_of_its_loss(name: str) -> None:
    pipeline, _, task = fitted(name)
    posterior = blr.fit_laplace(task, structure="full")
    scores = blr.sensitivity(task, posterior)
    mean = task.likelihood.mean(scores.outputs).numpy()
    if hasattr(pipeline, "predict_proba"):
        expected = pipeline.predict_proba(X)
        expected = expected[:, 1:] if mean.shape[1] == 1 else expected
    else:
        expected = pipeline.predict(X).reshape(mean.shape)
    np.testing.assert_allclose(mean, expected, rtol=1e-7, atol=1e-9)
    where = stationarity(task, posterior)
    assert where.at_minimum
    assert where.decrement < 1e-6
    assert where.residual < 1e-4 or name == "least squares"  # only with the right δ, if any


@pytest.mark.parametrize("y", [YES, WORDS], ids=["two classes", "three"])
def test_balanced_weights_of_test_data_are_those_of_training(y: np.ndarray) -> None:
    train = np.arange(N) < 32
    estimator = LogisticRegression(class_weight="balanced", **TIGHT).fit(X[train], y[train])
    task = blr.Task.from_sklearn(estimator, X[train], y[train])
    q = blr.fit_laplace(task, structure="full")
    assert stationarity(task, q).at_minimum
    seen, counts = np.unique(y[train], return_counts=True)
    weight = dict(zip(seen, train.sum() / (len(seen) * counts), strict=True))
    for kept in (~train, ~train & (y == seen[0])):  # of one class alone as well
        test = blr.Task.from_sklearn(estimator, X[kept], y[kept])
        told = blr.what_if(task, q, remove=[0], evaluate=test)
        p = estimator.predict_proba(X[kept])[np.arange(kept.sum()), np.searchsorted(seen, y[kept])]
        truth = -np.log(p) * [weight[label] for label in y[kept]]
        assert told.before.nll == pytest.approx(truth.mean(), rel=1e-6)


def test_test_data_are_judged_by_the_noise_of_the_training_data(tmp_path: Path) -> None:
    estimator = Ridge(alpha=3.0).fit(X, REAL)
    task = blr.Task.from_sklearn(estimator, X, REAL)
    q = blr.fit_laplace(task, structure="full")
    q.save(tmp_path / "q")
    variance = ((REAL - estimator.predict(X)) ** 2).sum() / (N - 4)
    z = X[:9] + 0.1
    far = estimator.predict(X[:9] + 0.1) + 5
    for y in (estimator.predict(z), far):  # predicted exactly as well
        test = blr.Task.from_sklearn(estimator, z, y)
        square = (y - estimator.predict(z)) ** 2
        truth = 0.5 * (square / variance + np.log(2 * np.pi * variance)).mean()
        for posterior in (q, blr.Posterior.load(tmp_path / "q")):
            assert posterior.predict(test, draws=0).nll == pytest.approx(truth, rel=1e-9)
    diag = blr.fit_laplace(task, structure="diag")
    blr.Index.build(task, diag, tmp_path / "index", dtype="float64")
    alone = blr.Index.open(tmp_path / "index").influence(test)
    torch.testing.assert_close(alone, blr.influence(task, diag, test).matrix)
    added = blr.what_if(task, q, add=test, solver="cg").parameters
    more = Ridge(alpha=3.0).fit(np.r_[X, z], np.r_[REAL, far])
    np.testing.assert_allclose(added["weight"][0], more.coef_, rtol=1e-6)


def test_a_noise_sets_the_scale_of_the_penalty_and_rounding_is_none() -> None:
    ridge = Ridge(alpha=3.0).fit(X, REAL)
    noise = blr.Gaussian(0.25)
    task = blr.Task.from_sklearn(ridge, X, REAL, likelihood=noise)
    assert task.prior_precision["weight"] == pytest.approx(3.0 / 0.25)
    assert stationarity(task, blr.fit_laplace(task, structure="full")).at_minimum
    for n in (3, 4):
        task = blr.Task.from_sklearn(LinearRegression().fit(X[:n], REAL[:n]), X[:n], REAL[:n])
        with pytest.raises(InputError, match="residuals"):
            blr.fit_laplace(task, structure="full")


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize(("by", "off", "times"), [(1, 0, 1e3), (1e-3, 0, 1), (1, 300, 1e-2)])
def test_units_change_nothing(
    by: float, off: float, times: float, alpha: float, intercept: bool
) -> None:
    """Least squares against PRESS, in any units of inputs and targets, with and without a
    constant."""
    x = X * by + off
    y = REAL * times
    kind = {"fit_intercept": intercept}
    estimator = Ridge(alpha=alpha * by**2, **kind) if alpha else LinearRegression(**kind)
    task = blr.Task.from_sklearn(estimator.fit(x, y), x, y)
    q = blr.fit_laplace(task, structure="full")
    loo = blr.leave_one_out(task, q)
    z = np.c_[x, np.ones(N)] if intercept else x
    pull = np.diag([alpha * by**2] * 3 + [0.0] * intercept)
    hat = z @ np.linalg.solve(z.T @ z + pull, z.T)
    press = ((y - hat @ y) / (1 - hat.diagonal())) ** 2
    assert loo.mse == pytest.approx(press.mean(), rel=1e-4)
    assert float(loo.leverage.sum()) == pytest.approx(hat.trace(), rel=1e-4)
    assert ("bias" in task.parameters()) is intercept


def refitted(pipeline: Any, y: np.ndarray, task: blr.Task) -> np.ndarray:
    """Each example's loss under an estimator that scikit-learn fitted without it."""
    z = pipeline[:-1].transform(X)
    estimator = pipeline[-1]
    losses = np.empty(N)
    for i in range(N):
        kept = np.arange(N) != i
        other = copy.deepcopy(estimator)
        if isinstance(other, MLPClassifier):
            other.warm_start = True  # the same minimum, not another one
        elif isinstance(other, PoissonRegressor):
            other.alpha *= N / (N - 1)  # the same penalty on the sum of fewer losses
        other.fit(z[kept], y[kept])
        alone = blr.Task.from_sklearn(other, z[i : i + 1], y[i : i + 1], likelihood=task.likelihood)
        weight = 1.0 if task.likelihood.plain is task.likelihood else 3.0 ** y[i]
        f, t = alone.run(alone.fetch(torch.tensor([0])), alone.parameters(), torch.tensor([0]))
        losses[i] = weight * float(task.likelihood.plain.nll(f, t))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_leaving_one_out_is_what_a_refit_finds(name: str) -> None:
    pipeline, y, task = fitted(name)
    posterior = blr.fit_laplace(task, structure="full")
    refine = N if name.startswith("network") else 0  # no quadratic: by a descent on the others
    loo = blr.leave_one_out(task, posterior, refine=refine)
    truth = refitted(pipeline, y, task)
    ours = loo.losses.numpy()
    rise = truth - loo.losses_before.numpy()
    change = ours - loo.losses_before.numpy()
    if name.startswith(("least", "ridge")):
        np.testing.assert_allclose(ours, truth, rtol=1e-4)  # one step is exact
    else:
        assert np.corrcoef(rise, change)[0, 1] > 0.99
        assert change.sum() == pytest.approx(rise.sum(), rel=0.1)


def test_labels_that_are_words_come_along_and_are_changed_by_them() -> None:
    _, _, task = fitted("logistic, 3 classes")
    assert task.metadata["label"] == WORDS.tolist()
    assert task.prior_precision["weight"] == 2.0
    estimator = LogisticRegression().fit(X, WORDS)
    rows = list(range(N))
    own = blr.Task.from_sklearn(estimator, X, WORDS, metadata={"label": rows})
    assert own.metadata == {"label": rows}
    q = blr.fit_laplace(task, structure="full")
    ask = {"solver": "posterior"}
    variance = blr.sensitivity(task, q).variance  # nothing of what is added to all logits
    assert variance.sum(-1).abs().max() < 1e-6
    assert 0 < variance.diagonal(dim1=1, dim2=2).sum(-1).max() < 20
    said, counted = (blr.what_if(task, q, relabel={0: v}, **ask) for v in ("eel", 2))
    assert said.nll == counted.nll
    with pytest.raises(InputError, match="eagle"):
        blr.what_if(task, q, relabel={0: "eagle"}, **ask)


@pytest.mark.filterwarnings("ignore")
def test_a_penalty_among_minibatches_and_weights_of_a_fit() -> None:
    model = MLPClassifier((2,), alpha=0.5, batch_size=12, max_iter=1).fit(X, YES)
    shared = blr.Task.from_sklearn(model, X, YES).prior_precision["0.weight"]
    assert shared == 0.5 * N / 12  # among the minibatches
    weights = np.linspace(0.5, 2, N)
    estimator = LogisticRegression(**TIGHT).fit(X, YES, sample_weight=weights)
    task = blr.Task.from_sklearn(estimator, X, YES)
    how = {"likelihood": task.likelihood, "forward": task.forward, "weights": weights}
    weighted = blr.Task(task.model, task.dataset.tensors, **how)
    q = blr.fit_laplace(weighted, structure="full", prior_precision=task.prior_precision)
    assert stationarity(weighted, q).residual < 1e-4


@pytest.mark.parametrize(
    ("estimator", "data", "word"),
    [
        (LogisticRegression(), (X, YES), "not fitted"),
        (ElasticNet().fit(X, REAL), (X, REAL), "ElasticNet"),
        (LogisticRegression().fit(X, YES), (X[:, :2], YES), "3 columns were"),
        (LogisticRegression().fit(X, YES), (X, YES + 5), "not fitted to"),
        (LogisticRegression(solver="liblinear").fit(X, YES), (X, YES), "lbfgs"),
        (LogisticRegression(l1_ratio=1, solver="saga", **TIGHT).fit(X, YES), (X, YES), "l1"),
        (LogisticRegression().fit(X, YES), ([["a", "b", "c"]], YES), "X or y is not"),
        (LogisticRegression().fit(X, YES), (X[:0], YES[:0]), "0 sample"),
        (GridSearchCV(Ridge(), {"alpha": [1.0]}).fit(X, REAL), (X, REAL), "GridSearchCV"),
        (LinearRegression(positive=True).fit(X, REAL), (X, REAL), "positive"),
        (MLPClassifier((2,), early_stopping=True).fit(X, YES), (X, YES), "early_stopping"),
        ("words", (X, YES), "fitted estimator"),
        (Ridge().fit(X, REAL), (X * np.nan, REAL), "X contains"),
        (Ridge().fit(X, REAL), (X, [*REAL[:-1], np.nan]), "y contains NaN"),
        (LogisticRegression().fit(X, WORDS), (X, np.array([*WORDS[1:], pd.NA])), "y "),
    ],
)
def test_what_is_no_estimator_for_this(estimator: Any, data: tuple, word: str) -> None:
    with pytest.raises(InputError, match=word):
        blr.Task.from_sklearn(estimator, *data)
