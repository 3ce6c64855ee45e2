"""Fitted scikit-learn estimators as torch modules, with the loss and penalty of their fit.

Every one of them minimises a sum of losses and a quadratic penalty, once its constant is divided
out, so that the posterior's δ is known and nobody has to name it:

    LogisticRegression   C Σ ℓ_i + ½ ‖w‖²               δ = 1/C
    LinearRegression     Σ (y_i − f_i)²                  δ = 0
    Ridge                Σ (y_i − f_i)² + α ‖w‖²         δ = α/σ²
    PoissonRegressor     (1/N) Σ ℓ_i + ½ α ‖w‖²          δ = α N
    MLPClassifier        (1/B) (Σ_B ℓ_i + ½ α ‖W‖²)      δ = α N/B, B its batch size

ℓ_i is the loss in nats. σ² is the variance of the noise: the user's likelihood names it, or it is
estimated from the residuals, because scikit-learn names none.

Intercepts have no penalty, and some fits have none at all. Directions that change no prediction
still need a precision, so these parameters get δ = 1e-6 times the least curvature that the data
have (1e-6 itself in a network), whatever the units. The one such direction that every softmax has,
the same number added to all of its logits, is taken out of the outputs.
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

UNPENALISED = 1e-6  # δ without a penalty, in units of the least curvature that the data have
ROWS_PER_BLOCK = 4096  # examples whose Λ are in memory at once
MIN_SINGULAR_VALUE = 1e-7  # in units of the largest; a smaller one is rounding
MIN_DELTA = 1e-14  # in units of the largest curvature; a smaller δ is lost in rounding
SKLEARN_BATCH_SIZE = 200  # at most, of an MLPClassifier with batch_size="auto"
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "identity": nn.Identity}


def centred(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits ``[B, C]`` with mean 0 over the classes, and the targets of the batch.

    The probabilities are the same. The logits lack the variance of a number that is added to all of
    them, which no data measure.
    """
    outputs = model(batch[0])
    return outputs - outputs.mean(-1, keepdim=True), batch[1]


@dataclass(frozen=True)
class Fitted:
    """A fitted estimator as model, likelihood and prior.

    Attributes:
        model: the estimator's predictions, in float64.
        likelihood: the loss of the fit, with its ``class_weight``; "balanced" weights are computed
            from these labels and then fixed, so that test data get those of the training data.
        prior: δ by parameter name; None where δ depends on a noise that the residuals do not show.
    """

    model: nn.Module
    likelihood: Likelihood
    prior: dict[str, float] | None


@dataclass(frozen=True)
class FittedTo:
    """The data of a fitted estimator, as the estimator sees them.

    Attributes:
        inputs: the transformed features ``[N, D]``, in float64.
        targets: numbers, or the places of the labels in ``classes``, ``[N]``.
        labels: the label of each example as a word; None where labels are numbers.
        classes: all labels in the order of their places; None as ``labels``.
    """

    inputs: Tensor
    targets: Tensor
    labels: list[str] | None = None
    classes: tuple[str, ...] | None = None


def read_estimator(
    estimator: Any, X: Any, y: Any, likelihood: Likelihood | None
) -> tuple[Fitted, FittedTo]:
    """A fitted estimator, or a Pipeline that ends in one, and the data that it was fitted to.

    Args:
        likelihood: replaces the likelihood of the fit; None: it is read from the estimator.

    Raises:
        InputError: not fitted, an estimator whose likelihood is not known here, a penalty that is
            not quadratic, other data than it was fitted to.
        DataError: NaN or inf in X or y.
    """
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import check_is_fitted

    name = type(estimator).__name__
    with told_as(InputError, f"give a fitted estimator, got {name}"):
        check_is_fitted(estimator)
    if isinstance(estimator, Pipeline):
        with told_as(DataError, "X is not what the estimator was fitted to"):
            transformed = estimator[:-1].transform(X) if len(estimator.steps) > 1 else X
        _, last_step = estimator.steps[-1]
        return read_estimator(last_step, transformed, y, likelihood)
    if name not in _READERS:
        raise InputError(f"{name} is not supported; supported are {', '.join(_READERS)}")
    data = _data_of(estimator, X, y)
    chosen = None if likelihood is None else likelihood.plain
    return _READERS[name](estimator, data.inputs, data.targets, chosen), data


def _data_of(estimator: Any, X: Any, y: Any) -> FittedTo:
    """The data of the fit, checked; labels are their places among the estimator's classes."""
    inputs, values = _checked(estimator, X, y)
    has_classes = values.ndim == 1 and hasattr(estimator, "classes_")
    if not has_classes:
        if values.dtype != np.int64:
            values = values.astype(np.float64)
        return FittedTo(inputs, torch.from_numpy(values))
    classes = estimator.classes_
    unknown = sorted(set(np.unique(values).tolist()) - set(classes.tolist()), key=str)
    if unknown:
        raise InputError(f"the estimator was not fitted to the label {unknown[0]!r}")
    targets = torch.from_numpy(np.searchsorted(classes, values).astype(np.int64))
    are_numbers = classes.dtype.kind in "biuf"
    if are_numbers:
        return FittedTo(inputs, targets)
    labels = [str(value) for value in values]
    return FittedTo(inputs, targets, labels, tuple(str(name) for name in classes))


def _logistic(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    """A LogisticRegression; ``chosen`` replaces the likelihood of the fit."""
    mixes_penalties = estimator.l1_ratio and estimator.penalty != "l2"
    if estimator.penalty == "l1" or mixes_penalties:
        raise InputError(
            "an l1 penalty is no weight decay; fit LogisticRegression with the l2 penalty"
        )
    if estimator.solver == "liblinear":
        raise InputError("liblinear shrinks the intercept too; fit with solver='lbfgs'")
    delta = 0.0 if estimator.penalty is None else 1 / float(np.ravel(estimator.C)[0])
    model = _linear(estimator)
    likelihood = chosen or _by_class(estimator.class_weight, estimator.classes_, y)
    return Fitted(model, likelihood, _linear_prior(model, x, y, likelihood, delta))


def _least_squares(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    """A LinearRegression, Ridge or RidgeCV; ``chosen`` replaces the likelihood of the fit."""
    if getattr(estimator, "positive", False):
        raise InputError("positive=True is a constraint, and no weight decay; fit without it")
    model = _linear(estimator)
    likelihood = chosen if isinstance(chosen, Gaussian) else _noise(estimator, model, x, y)
    alpha = getattr(estimator, "alpha_", getattr(estimator, "alpha", 0.0))
    deltas = np.unique(np.divide(alpha, likelihood.variance))
    if len(deltas) > 1:
        raise InputError(
            "one alpha per target is no single weight decay; fit the targets one by one"
        )
    delta = float(deltas[0])
    if math.isnan(delta):
        return Fitted(model, likelihood, None)
    return Fitted(model, likelihood, _linear_prior(model, x, y, likelihood, delta))


def _noise(estimator: Any, model: nn.Linear, x: Tensor, targets: Tensor) -> Gaussian:
    """A Gaussian with the variance of the residuals.

    The variance is NaN where the residuals are rounding errors. The user must then name σ².
    """
    with torch.no_grad():
        residuals = targets.reshape(len(x), -1) - model(x)
    n_coefficients = x.shape[1] + (model.bias is not None)
    degrees_of_freedom = len(x)
    if len(x) > n_coefficients:
        degrees_of_freedom -= n_coefficients
    noise = Gaussian()
    noise.estimated = True
    noise.variance = float(residuals.square().sum(0).mean()) / degrees_of_freedom
    # Coefficients are solved for to about this relative error, in single or double precision.
    relative_error = np.finfo(estimator.coef_.dtype).eps ** (2 / 3)
    if noise.variance <= relative_error**2 * float(targets.square().mean()):
        noise.variance = math.nan
    return noise


def _poisson(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    """A PoissonRegressor; ``chosen`` replaces the likelihood of the fit."""
    model = _linear(estimator)
    likelihood = chosen or BY_NAME["poisson"]()
    delta = float(estimator.alpha) * len(x)
    return Fitted(model, likelihood, _linear_prior(model, x, y, likelihood, delta))


def _perceptron(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    """An MLPClassifier; ``chosen`` replaces the likelihood of the fit."""
    if estimator.early_stopping:
        raise InputError("early_stopping held back data that cannot be found again; fit without it")
    n_batches = len(x) / _batch_size(estimator, len(x))
    delta = max(estimator.alpha * n_batches, UNPENALISED)
    layers: list[nn.Module] = []
    prior: dict[str, float] = {}
    for coef, intercept in zip(estimator.coefs_, estimator.intercepts_, strict=True):
        place = len(layers)
        prior[f"{place}.weight"] = delta
        prior[f"{place}.bias"] = UNPENALISED
        layers.append(_layer(coef.T, intercept))
        layers.append(ACTIVATIONS[estimator.activation]())
    logits = nn.Sequential(*layers[:-1])  # the last activation belongs to the likelihood
    name = "bernoulli" if estimator.out_activation_ == "logistic" else "categorical"
    return Fitted(logits, chosen or BY_NAME[name](), prior)


def _batch_size(estimator: Any, n_data: int) -> int:
    """The number of examples in a batch of an MLPClassifier."""
    if estimator.solver == "lbfgs":
        return n_data
    batch_size = estimator.batch_size
    if batch_size == "auto":
        batch_size = SKLEARN_BATCH_SIZE
    return min(n_data, int(batch_size))


_READERS = {
    "LogisticRegression": _logistic,
    "LinearRegression": _least_squares,
    "Ridge": _least_squares,
    "RidgeCV": _least_squares,
    "PoissonRegressor": _poisson,
    "MLPClassifier": _perceptron,
}


def _checked(estimator: Any, X: Any, y: Any) -> tuple[Tensor, np.ndarray]:
    """X as the estimator sees it, dense, ``[N, D]`` in float64, and y; both without NaN and inf.

    Raises:
        InputError: another number of columns.
        DataError: NaN, inf or None, or data that cannot be read.
    """
    from sklearn.utils import check_array

    dense = X.toarray() if hasattr(X, "toarray") else X
    with told_as(DataError, "X or y is not what the estimator was fitted to"):
        x = check_array(dense, dtype="float64", input_name="X", copy=True)
        values = check_array(y, dtype=None, ensure_2d=False, input_name="y")  # type: ignore
    if x.shape[1] != estimator.n_features_in_:
        raise InputError(
            f"X of shape {x.shape}, but {estimator.n_features_in_} columns were fitted"
        )
    if values.dtype == object and None in values.tolist():
        raise DataError("y holds None; drop those examples")
    return torch.from_numpy(x), values


def _linear(estimator: Any) -> nn.Linear:
    """A linear estimator as a layer, with a bias if it was fitted with an intercept."""
    return _layer(estimator.coef_, estimator.intercept_ if estimator.fit_intercept else None)


def _layer(coef: Any, intercept: Any) -> nn.Linear:
    """A layer in float64 with weights ``coef`` ``[C, D]`` and, unless None, bias ``intercept``."""
    values = {"weight": torch.tensor(np.atleast_2d(coef), dtype=torch.float64)}
    outputs, inputs = values["weight"].shape
    if intercept is not None:
        bias = torch.tensor(np.ravel(intercept), dtype=torch.float64)
        values["bias"] = bias.expand(outputs)
    layer: Any = nn.utils.skip_init(
        nn.Linear, inputs, outputs, bias=intercept is not None, dtype=torch.float64
    )
    layer.load_state_dict(values)
    return layer


def _linear_prior(
    model: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood, delta: float
) -> dict[str, float]:
    """δ by parameter name: the penalty's, or that of an unpenalised parameter."""
    unpenalised = _unpenalised_delta(model, x, y, likelihood)
    prior = {"weight": delta or unpenalised}
    if model.bias is not None:
        prior["bias"] = unpenalised
    return prior


def _unpenalised_delta(model: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """δ of a parameter without a penalty: 1e-6 of the least curvature that the data have.

    The curvatures of a linear model are s² λ̄, s the singular values of the inputs and λ̄ the mean of
    the diagonals of Λ. Where some direction has no curvature at all, δ alone is its precision, and
    must not be lost in the rounding of the largest.
    """
    inputs = x if model.bias is None else torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    sizes = torch.linalg.svdvals(inputs)
    above_rounding = sizes[sizes > MIN_SINGULAR_VALUE * sizes[0]]
    delta = UNPENALISED * float(above_rounding[-1:].square().sum())
    has_flat_directions = len(above_rounding) < inputs.shape[1]
    if has_flat_directions or isinstance(likelihood, Categorical):
        delta = max(delta, MIN_DELTA * float(sizes[0] ** 2))
    return delta * _mean_curvature(model, x, y, likelihood) or UNPENALISED


def _mean_curvature(model: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """The mean of the diagonals of all Λ_i, the Hessians of the losses in the outputs."""
    with torch.no_grad():
        outputs = model(x)
    targets = likelihood.prepare_targets(y, outputs)
    total = 0.0
    for f, labels in zip(outputs.split(ROWS_PER_BLOCK), targets.split(ROWS_PER_BLOCK), strict=True):
        total += float(likelihood.hessian(f, labels).diagonal(dim1=1, dim2=2).sum())
    return total / outputs.numel()


def _by_class(class_weight: Any, classes: np.ndarray, places: Tensor) -> Likelihood:
    """The likelihood of these classes, each with its weight.

    Args:
        class_weight: as scikit-learn takes it: None, weights by label, or "balanced", which is
            N / (C N_k) for a class of N_k examples.
        classes: the C labels.
        places: of the examples' labels in ``classes``, ``[N]``.
    """
    is_binary = len(classes) == 2
    if class_weight is None:
        return Bernoulli() if is_binary else Categorical()
    if class_weight == "balanced":
        counts = places.bincount(minlength=len(classes)).clamp(min=1).numpy()
        weights = len(places) / (len(classes) * counts)
    else:
        weights = np.array([float(class_weight.get(name, 1.0)) for name in classes.tolist()])
    if not (weights > 0).all():
        excluded = classes[weights <= 0][0]
        raise InputError(f"class_weight of {excluded!r} must be above 0; leave it out")
    likelihood: Likelihood = Categorical(weights)
    if is_binary:
        likelihood = Bernoulli(weights[1] / weights[0], weights[0])
    likelihood.estimated = class_weight == "balanced"
    return likelihood
