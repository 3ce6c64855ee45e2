"""Fitted scikit-learn estimators as torch modules, with the loss and penalty of their fit.

Every one of them minimises a sum of losses and a quadratic penalty, once its constant is divided
out, so that the posterior's δ is known and nobody has to name it:

    LogisticRegression   C Σ ℓ_i + ½ ‖w‖²               δ = 1/C
    LinearRegression     Σ (y_i − f_i)²                  δ = 0
    Ridge                Σ (y_i − f_i)² + α ‖w‖²         δ = α/σ²
    PoissonRegressor     (1/N) Σ ℓ_i + ½ α ‖w‖²          δ = α N
    MLPClassifier        (1/B) (Σ_B ℓ_i + ½ α ‖W‖²)      δ = α N/B, B its batch size

ℓ_i is the loss in nats; σ², the variance of the noise, is that of the likelihood given, else
estimated from the residuals, as scikit-learn names none. Intercepts are not penalised; they, and
δ = 0, get a millionth of the least curvature that the data have (of a network 1e-6), whatever the
units, so that directions which change no prediction have one as well. The largest of those, one
number added to all logits of a softmax, is taken out of the outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.likelihoods import BY_NAME, Bernoulli, Categorical, Gaussian, Likelihood

FREE = 1e-6  # δ where there is no penalty, of the least curvature that the data have
ROWS = 4096  # examples whose Λ are held at once
RANK = 1e-7  # of the largest singular value: a smaller one is rounding
LEAST = 1e-14  # of the largest curvature: a smaller δ is lost in rounding
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
        likelihood: what it was fitted to, with its ``class_weight``; "balanced" ones are read
            from these labels, so that test data take those of the training data.
        prior_precision: δ by parameter name; None where it hangs on a noise that there is not.
        labels, classes: each example's label, and all of them in the order of their places, by
            their own names, where those are no numbers; None.
    """

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    likelihood: Likelihood
    prior_precision: dict[str, float] | None
    labels: list[str] | None = None
    classes: tuple[str, ...] | None = None


def read_estimator(
    estimator: Any, X: Any, y: Any, likelihood: Likelihood | None = None
) -> Estimator:
    """A fitted estimator, or a Pipeline that ends in one, and the data that it was fitted to;
    ``likelihood`` is taken in place of the one that would be read.

    Raises:
        InputError: not fitted, no likelihood known for it here, a penalty that is no square, other
            data than it was fitted to.
        DataError: NaN or inf in X or y.
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
        raise InputError(f"give a fitted estimator, got {type(estimator).__name__}") from error
    if isinstance(estimator, Pipeline):
        X = estimator[:-1].transform(X) if len(estimator.steps) > 1 else X
        return read_estimator(estimator.steps[-1][1], X, y, likelihood)
    name = type(estimator).__name__
    if name not in _READERS and hasattr(estimator, "best_estimator_"):
        raise InputError(f"{name} searches estimators; give its best_estimator_")
    if name not in _READERS:
        known = ", ".join(_READERS)
        raise InputError(f"no likelihood is known for {name}, but for {known} and their Pipelines")
    given = None if likelihood is None else likelihood.plain
    return _READERS[name](estimator, _inputs(estimator, X), _targets(y), given)


def _logistic(estimator: Any, x: Tensor, y: np.ndarray, given: Likelihood | None) -> Estimator:
    ratio = estimator.l1_ratio or 0.0
    if estimator.penalty == "l1" or (ratio and estimator.penalty != "l2"):
        raise InputError("an l1 penalty has no δ; fit LogisticRegression with the l2 penalty")
    if estimator.solver == "liblinear" and len(estimator.classes_) > 2:
        raise InputError("liblinear fits one model per class; fit with solver='lbfgs'")
    delta = 0.0 if estimator.penalty is None else 1 / float(np.ravel(estimator.C)[0])
    model = _linear(estimator, x)
    places, labels = _classes(estimator.classes_, y)
    binary = len(estimator.coef_) == 1
    targets = torch.from_numpy(places).double() if binary else torch.from_numpy(places)
    kind = given or _by_class(estimator.class_weight, estimator.classes_, places)
    liblinear = estimator.solver == "liblinear"  # whose intercept is a weight of this column
    shrunk = delta / estimator.intercept_scaling**2 if liblinear else 0.0
    return Estimator(
        model,
        x,
        targets,
        kind,
        _linear_prior(model, x, targets, kind, delta, bias=shrunk),
        labels,
        _words(estimator),
    )


def _least_squares(estimator: Any, x: Tensor, y: np.ndarray, given: Likelihood | None) -> Estimator:
    if getattr(estimator, "positive", False):
        raise InputError("positive=True is a constraint, which has no δ; fit without it")
    model = _linear(estimator, x)
    targets = torch.from_numpy(y.astype(np.float64))
    noise = given if isinstance(given, Gaussian) else _noise(estimator, model, x, targets)
    alpha = getattr(estimator, "alpha_", getattr(estimator, "alpha", 0.0))
    delta = np.unique(np.divide(alpha, noise.variance))
    if len(delta) > 1:
        raise InputError("one alpha per target has no single δ; fit the targets one by one")
    known = not math.isnan(delta[0])
    prior = _linear_prior(model, x, targets, noise, float(delta[0])) if known else None
    return Estimator(model, x, targets, noise, prior)


def _noise(estimator: Any, model: nn.Linear, x: Tensor, targets: Tensor) -> Gaussian:
    """σ² of the residuals; NaN, which only a likelihood that knows it mends, where they are
    rounding."""
    with torch.no_grad():
        residuals = targets.reshape(len(x), -1) - model(x)
    fitted = x.shape[1] + (model.bias is not None)
    left = len(x) - fitted if len(x) > fitted else len(x)
    noise = Gaussian()
    noise.estimated = True
    noise.variance = float(residuals.square().sum(0).mean()) / left
    rounding = np.finfo(estimator.coef_.dtype).eps ** (4 / 3)
    if noise.variance <= rounding * float(targets.square().mean()):
        noise.variance = math.nan
    return noise


def _poisson(estimator: Any, x: Tensor, y: np.ndarray, given: Likelihood | None) -> Estimator:
    model, kind = _linear(estimator, x), given or BY_NAME["poisson"]()
    targets = torch.from_numpy(y.astype(np.float64))
    prior = _linear_prior(model, x, targets, kind, float(estimator.alpha) * len(x))
    return Estimator(model, x, targets, kind, prior)


def _perceptron(estimator: Any, x: Tensor, y: np.ndarray, given: Likelihood | None) -> Estimator:
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
        layers += [_layer(coef.T, intercept), ACTIVATIONS[estimator.activation]()]
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
        given or BY_NAME[kind](),
        prior,
        labels=labels,
        classes=_words(estimator) if labels else None,
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
    from sklearn.utils import check_array

    X = X.toarray() if hasattr(X, "toarray") else X
    with told_as(DataError, "X is not what the estimator was fitted to"):
        values = check_array(X, dtype="float64", input_name="X", copy=True)
    if values.shape[1] != estimator.n_features_in_:
        columns = estimator.n_features_in_
        raise InputError(f"X of shape {values.shape} for an estimator of {columns} columns")
    return torch.from_numpy(values)


def _targets(y: Any) -> np.ndarray:
    """y as an array, without NaN, inf and None."""
    from sklearn.utils import assert_all_finite

    values = np.asarray(y)
    with told_as(DataError, "y is not what the estimator was fitted to"):
        assert_all_finite(values, input_name="y")
    if values.dtype == object and None in values.tolist():
        raise DataError("y holds None; drop those examples")
    return values


def _linear(estimator: Any, x: Tensor) -> nn.Linear:
    """A linear estimator; without an intercept where it was fitted without."""
    intercept = estimator.intercept_ if estimator.fit_intercept else None
    return _layer(np.atleast_2d(estimator.coef_), intercept)


def _layer(coef: Any, intercept: Any) -> nn.Linear:
    coef = np.asarray(coef, dtype=np.float64)
    outputs, inputs = coef.shape
    free = intercept is not None
    layer: Any = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=free, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(coef.copy()))
        if free:
            bias = np.broadcast_to(np.asarray(intercept, dtype=np.float64), coef.shape[:1])
            layer.bias.copy_(torch.from_numpy(bias.copy()))
    return layer


def _linear_prior(
    model: nn.Linear,
    x: Tensor,
    y: Tensor,
    likelihood: Likelihood,
    weight: float,
    bias: float = 0.0,
) -> dict[str, float]:
    """δ by name: the penalties, and FREE of the data's least curvature where there is none."""
    inputs = x if model.bias is None else torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    sizes = torch.linalg.svdvals(inputs)
    seen = sizes[sizes > RANK * sizes[0]]
    free = FREE * float(seen[-1:].square().sum())
    if len(seen) < inputs.shape[1] or isinstance(likelihood, Categorical):  # directions without any
        free = max(free, LEAST * float(sizes[0] ** 2))
    with torch.no_grad():
        f = model(x)
    parts = zip(f.split(ROWS), likelihood.prepare_targets(y, f).split(ROWS), strict=True)
    curved = sum(float(likelihood.hessian(*p).diagonal(dim1=1, dim2=2).sum()) for p in parts)
    free = free * curved / f.numel() or FREE
    prior = {"weight": weight or free}
    return prior if model.bias is None else prior | {"bias": bias or free}


def _classes(classes: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Labels as their places among the classes, and by name where they are words."""
    if unknown := sorted(set(np.unique(y).tolist()) - set(classes.tolist()), key=str):
        raise InputError(f"the label {unknown[0]!r} is none that the estimator was fitted to")
    places = np.searchsorted(classes, y).astype(np.int64)
    return places, None if classes.dtype.kind in "biuf" else [str(v) for v in y]


def _words(estimator: Any) -> tuple[str, ...] | None:
    """The classes by their own names, in order; None where those are numbers."""
    classes = estimator.classes_
    return None if classes.dtype.kind in "biuf" else tuple(map(str, classes))


def _by_class(weight: Any, classes: np.ndarray, places: np.ndarray) -> Likelihood:
    """The likelihood of these classes, each with its weight; a balanced one has n / (C n_k)."""
    kind = Bernoulli if len(classes) == 2 else Categorical
    if weight is None:
        return kind()
    if weight == "balanced":
        counts = np.bincount(places, minlength=len(classes))
        w = len(places) / (len(classes) * np.maximum(counts, 1))
    else:
        w = np.array([float(weight.get(c, 1.0)) for c in classes.tolist()])
    if not (w > 0).all():
        raise InputError(f"class_weight of {classes[w <= 0][0]!r} must be above 0; leave it out")
    made = Bernoulli(w[1] / w[0], w[0]) if kind is Bernoulli else Categorical(w)
    made.estimated = weight == "balanced"
    return made
