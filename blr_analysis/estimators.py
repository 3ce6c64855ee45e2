"""Fitted scikit-learn estimators as torch modules, with the loss and penalty of their fit.

Every one of them minimises a sum of losses and a quadratic penalty, once its constant is divided
out, so that the posterior's δ is known and nobody has to name it:

    LogisticRegression   C Σ ℓ_i + ½ ‖w‖²               δ = 1/C
    LinearRegression     Σ (y_i − f_i)²                  δ = 0
    Ridge                Σ (y_i − f_i)² + α ‖w‖²         δ = α/σ²
    PoissonRegressor     (1/N) Σ ℓ_i + ½ α ‖w‖²          δ = α N
    MLPClassifier        (1/B) (Σ_B ℓ_i + ½ α ‖W‖²)      δ = α N/B, B its batch size

ℓ_i is the loss in nats; σ², the variance of the noise, is estimated from the residuals, as
scikit-learn names none. Intercepts are not penalised; they, and δ = 0, get a precision of 1e-6, a
standard deviation of 1000, so that directions which change no prediction have one as well. The
largest of those, one number added to all logits of a softmax, is taken out of the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blr_analysis.errors import InputError
from blr_analysis.likelihoods import BY_NAME, Gaussian, Likelihood

FREE = 1e-6  # δ where there is no penalty
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity}


def centred(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits with mean 0 over the classes, and the targets: the same probabilities, without the
    variance of intercepts that all move together, which no data hold."""
    outputs = model(batch[0])
    return outputs - outputs.mean(-1, keepdim=True), batch[1]


@dataclass(frozen=True)
class Estimator:
    """What a task is made of.

    Attributes:
        model: the estimator as it predicts, in float64.
        inputs, targets: the data as the estimator sees them: transformed, labels as 0 … C−1.
        likelihood: what it was fitted to.
        prior_precision: δ by parameter name.
        weights: of the examples, by ``class_weight``; None: 1.
        labels: each example's label by its own name, where that is no number; None.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    likelihood: Likelihood
    prior_precision: dict[str, float]
    weights: np.ndarray | None = None
    labels: list[str] | None = None


def read_estimator(estimator: Any, X: Any, y: Any) -> Estimator:
    """A fitted estimator, or a Pipeline that ends in one, and the data that it was fitted to.

    Raises:
        InputError: not fitted, no likelihood known for it here, a penalty that is no square, other
            data than it was fitted to.
    """
    from sklearn.exceptions import NotFittedError
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(estimator)
    except NotFittedError as error:
        name = type(estimator).__name__
        raise InputError(f"this {name} is not fitted; call fit(X, y) first") from error
    except TypeError as error:
        raise InputError(
            f"from_sklearn takes a fitted estimator, got {type(estimator).__name__}"
        ) from error
    if isinstance(estimator, Pipeline):
        X = estimator[:-1].transform(X) if len(estimator.steps) > 1 else X
        return read_estimator(estimator.steps[-1][1], X, y)
    name = type(estimator).__name__
    if name not in _READERS:
        known = ", ".join(_READERS)
        raise InputError(f"no likelihood is known for {name}, but for {known} and their Pipelines")
    return _READERS[name](estimator, _inputs(estimator, X), np.asarray(y))


def _logistic(estimator: Any, x: Tensor, y: np.ndarray) -> Estimator:
    ratio = estimator.l1_ratio or 0.0
    if estimator.penalty in ("l1", "elasticnet") or (ratio and estimator.penalty != "l2"):
        raise InputError("an l1 penalty has no δ; fit LogisticRegression with the l2 penalty")
    if estimator.solver == "liblinear" and len(estimator.classes_) > 2:
        raise InputError("liblinear fits one model per class; fit with solver='lbfgs'")
    delta = 0.0 if estimator.penalty is None else 1 / float(np.ravel(estimator.C)[0])
    model = _linear(estimator.coef_, estimator.intercept_)
    places, labels = _classes(estimator.classes_, y)
    binary = len(estimator.coef_) == 1
    free = delta if estimator.solver == "liblinear" else FREE
    return Estimator(
        model,
        x,
        torch.from_numpy(places).double() if binary else torch.from_numpy(places),
        BY_NAME["bernoulli" if binary else "categorical"](),
        {"weight": max(delta, FREE), "bias": max(free, FREE)},
        _class_weights(estimator.class_weight, estimator.classes_, places),
        labels,
    )


def _least_squares(estimator: Any, x: Tensor, y: np.ndarray) -> Estimator:
    model = _linear(np.atleast_2d(estimator.coef_), estimator.intercept_)
    targets = torch.from_numpy(y.astype(np.float64))
    with torch.no_grad():
        residuals = targets.reshape(len(x), -1) - model(x)
    n = len(x)
    free = max(n - x.shape[1] - 1, 1) if n > x.shape[1] + 1 else n
    variance = float(residuals.square().sum(0).mean()) / free
    if not variance > 0:
        raise InputError("the residuals are 0: no noise is left to estimate")
    alpha = np.unique(getattr(estimator, "alpha_", getattr(estimator, "alpha", 0.0)))
    if len(alpha) > 1:
        raise InputError("one alpha per target has no single δ; fit the targets one by one")
    delta = float(alpha[0]) / variance
    prior = {"weight": max(delta, FREE), "bias": FREE}
    noise = Gaussian(variance)
    noise.estimated = True
    return Estimator(model, x, targets, noise, prior)


def _poisson(estimator: Any, x: Tensor, y: np.ndarray) -> Estimator:
    model = _linear(np.atleast_2d(estimator.coef_), estimator.intercept_)
    prior = {"weight": max(float(estimator.alpha) * len(x), FREE), "bias": FREE}
    return Estimator(model, x, torch.from_numpy(y.astype(np.float64)), BY_NAME["poisson"](), prior)


def _perceptron(estimator: Any, x: Tensor, y: np.ndarray) -> Estimator:
    if estimator.early_stopping:
        raise InputError("early_stopping held back data that are not on record; fit without it")
    layers: list[nn.Module] = []
    prior = {}
    batch = min(len(x), 200 if estimator.batch_size == "auto" else int(estimator.batch_size))
    share = 1.0 if estimator.solver == "lbfgs" else len(x) / batch
    for k, (coef, intercept) in enumerate(
        zip(estimator.coefs_, estimator.intercepts_, strict=True)
    ):
        prior |= {f"{2 * k}.weight": max(estimator.alpha * share, FREE), f"{2 * k}.bias": FREE}
        layers += [_linear(coef.T, intercept), ACTIVATIONS[estimator.activation]()]
    if y.ndim == 2:
        kind, targets, labels = "bernoulli", y.astype(np.float64), None
    else:
        targets, labels = _classes(estimator.classes_, y)
        kind = "bernoulli" if estimator.out_activation_ == "logistic" else "categorical"
    values = torch.from_numpy(targets)
    return Estimator(
        nn.Sequential(*layers[:-1]),
        x,
        values.double() if kind == "bernoulli" else values,
        BY_NAME[kind](),
        prior,
        labels=labels,
    )


_READERS = {
    "LogisticRegression": _logistic,
    "LinearRegression": _least_squares,
    "Ridge": _least_squares,
    "RidgeCV": _least_squares,
    "PoissonRegressor": _poisson,
    "MLPClassifier": _perceptron,
}


def _inputs(estimator: Any, X: Any) -> Tensor:
    """What the estimator sees, dense, in float64."""
    X = X.toarray() if hasattr(X, "toarray") else X
    try:
        values = np.array(X, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"the inputs are no numbers: {error}") from error
    if values.ndim != 2 or values.shape[1] != estimator.n_features_in_:
        raise InputError(
            f"inputs of shape {values.shape} for an estimator of {estimator.n_features_in_} columns"
        )
    return torch.from_numpy(values)


def _linear(coef: Any, intercept: Any) -> nn.Linear:
    coef = np.asarray(coef, dtype=np.float64)
    layer: Any = nn.utils.skip_init(nn.Linear, coef.shape[1], coef.shape[0], dtype=torch.float64)
    bias = np.broadcast_to(np.asarray(intercept, dtype=np.float64), coef.shape[:1])
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(coef.copy()))
        layer.bias.copy_(torch.from_numpy(bias.copy()))
    return layer


def _classes(classes: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Labels as their places among the classes, and by name where they are words."""
    if unknown := sorted(set(np.unique(y).tolist()) - set(classes.tolist()), key=str):
        raise InputError(f"the label {unknown[0]!r} is none that the estimator was fitted to")
    places = np.searchsorted(classes, y).astype(np.int64)
    return places, None if classes.dtype.kind in "biuf" else [str(v) for v in y]


def _class_weights(weight: Any, classes: np.ndarray, places: np.ndarray) -> np.ndarray | None:
    if weight is None:
        return None
    if weight == "balanced":
        counts = np.bincount(places, minlength=len(classes))
        return (len(places) / (len(classes) * counts))[places]
    return np.array([weight.get(c, 1.0) for c in classes.tolist()])[places]
