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
class Fitted:
    """What a fitted estimator says.

    Attributes:
        model: the estimator as it predicts, in float64.
        likelihood: what it was fitted to, with its ``class_weight``; "balanced" weights are read
            from these labels, so that test data take those of the training data.
        prior: δ by parameter name; None where it hangs on a noise that there is not.
    """

    model: nn.Module
    likelihood: Likelihood
    prior: dict[str, float] | None


@dataclass(frozen=True)
class FittedTo:
    """The data of a fitted estimator, as it sees them.

    Attributes:
        inputs: transformed, in float64.
        targets: labels as 0 … C−1.
        labels: each example's label by its own name; None where those are numbers.
        classes: all of them in the order of their places; None as ``labels``.
    """

    inputs: Tensor
    targets: Tensor
    labels: list[str] | None = None
    classes: tuple[str, ...] | None = None


def read_estimator(
    estimator: Any, X: Any, y: Any, likelihood: Likelihood | None
) -> tuple[Fitted, FittedTo]:
    """A fitted estimator, or a Pipeline that ends in one, and the data that it was fitted to;
    ``likelihood`` is taken in place of the one that would be read.

    Raises:
        InputError: not fitted, no likelihood known for it here, a penalty that is no square, other
            data than it was fitted to.
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
        raise InputError(f"no likelihood is known for {name}, but for {', '.join(_READERS)}")
    data = _data_of(estimator, X, y)
    chosen = None if likelihood is None else likelihood.plain
    return _READERS[name](estimator, data.inputs, data.targets, chosen), data


def _data_of(estimator: Any, X: Any, y: Any) -> FittedTo:
    """What the estimator was fitted to, checked; labels by their places among its classes."""
    inputs, values = _checked(estimator, X, y)
    has_classes = values.ndim == 1 and hasattr(estimator, "classes_")
    if not has_classes:
        is_whole = values.dtype == np.int64
        return FittedTo(inputs, torch.from_numpy(values if is_whole else values.astype(np.float64)))
    classes = estimator.classes_
    unknown = sorted(set(np.unique(values).tolist()) - set(classes.tolist()), key=str)
    if unknown:
        raise InputError(f"the label {unknown[0]!r} is none that the estimator was fitted to")
    targets = torch.from_numpy(np.searchsorted(classes, values).astype(np.int64))
    are_numbers = classes.dtype.kind in "biuf"
    if are_numbers:
        return FittedTo(inputs, targets)
    labels = [str(value) for value in values]
    return FittedTo(inputs, targets, labels, tuple(str(name) for name in classes))


def _logistic(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    if estimator.penalty == "l1" or (estimator.l1_ratio and estimator.penalty != "l2"):
        raise InputError("an l1 penalty has no δ; fit LogisticRegression with the l2 penalty")
    if estimator.solver == "liblinear":
        raise InputError("liblinear shrinks the intercept too; fit with solver='lbfgs'")
    delta = 0.0 if estimator.penalty is None else 1 / float(np.ravel(estimator.C)[0])
    model = _linear(estimator)
    likelihood = chosen or _by_class(estimator.class_weight, estimator.classes_, y)
    return Fitted(model, likelihood, _linear_prior(model, x, y, likelihood, delta))


def _least_squares(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    if getattr(estimator, "positive", False):
        raise InputError("positive=True is a constraint, which has no δ; fit without it")
    model = _linear(estimator)
    noise = chosen if isinstance(chosen, Gaussian) else _noise(estimator, model, x, y)
    alpha = getattr(estimator, "alpha_", getattr(estimator, "alpha", 0.0))
    delta = np.unique(np.divide(alpha, noise.variance))
    if len(delta) > 1:
        raise InputError("one alpha per target has no single δ; fit the targets one by one")
    if math.isnan(delta[0]):
        return Fitted(model, noise, None)
    return Fitted(model, noise, _linear_prior(model, x, y, noise, float(delta[0])))


def _noise(estimator: Any, model: nn.Linear, x: Tensor, targets: Tensor) -> Gaussian:
    """σ² of the residuals; NaN, which only a likelihood that knows it mends, where they are
    rounding."""
    with torch.no_grad():
        residuals = targets.reshape(len(x), -1) - model(x)
    n_coefficients = x.shape[1] + (model.bias is not None)
    freedom = len(x) - n_coefficients if len(x) > n_coefficients else len(x)
    noise = Gaussian()
    noise.estimated = True
    noise.variance = float(residuals.square().sum(0).mean()) / freedom
    rounding = np.finfo(estimator.coef_.dtype).eps ** (4 / 3)
    if noise.variance <= rounding * float(targets.square().mean()):
        noise.variance = math.nan
    return noise


def _poisson(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    model = _linear(estimator)
    likelihood = chosen or BY_NAME["poisson"]()
    delta = float(estimator.alpha) * len(x)
    return Fitted(model, likelihood, _linear_prior(model, x, y, likelihood, delta))


def _perceptron(estimator: Any, x: Tensor, y: Tensor, chosen: Likelihood | None) -> Fitted:
    if estimator.early_stopping:
        raise InputError("early_stopping held back data that are not on record; fit without it")
    batch_size = 200 if estimator.batch_size == "auto" else int(estimator.batch_size)
    is_full_batch = estimator.solver == "lbfgs"
    n_batches = 1.0 if is_full_batch else len(x) / min(len(x), batch_size)
    delta = max(estimator.alpha * n_batches, FREE)
    layers: list[nn.Module] = []
    prior: dict[str, float] = {}
    for coef, intercept in zip(estimator.coefs_, estimator.intercepts_, strict=True):
        place = len(layers)
        prior[f"{place}.weight"] = delta
        prior[f"{place}.bias"] = FREE
        layers.append(_layer(coef.T, intercept))
        layers.append(ACTIVATIONS[estimator.activation]())
    name = "bernoulli" if estimator.out_activation_ == "logistic" else "categorical"
    return Fitted(nn.Sequential(*layers[:-1]), chosen or BY_NAME[name](), prior)


_READERS = {
    "LogisticRegression": _logistic,
    "LinearRegression": _least_squares,
    "Ridge": _least_squares,
    "RidgeCV": _least_squares,
    "PoissonRegressor": _poisson,
    "MLPClassifier": _perceptron,
}


def _checked(estimator: Any, X: Any, y: Any) -> tuple[Tensor, np.ndarray]:
    """What the estimator sees, dense, in float64, and y, without NaN, inf and None."""
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
    """A linear estimator; without an intercept where it was fitted without."""
    return _layer(estimator.coef_, estimator.intercept_ if estimator.fit_intercept else None)


def _layer(coef: Any, intercept: Any) -> nn.Linear:
    values = {"weight": torch.tensor(np.atleast_2d(coef), dtype=torch.float64)}
    outputs, inputs = values["weight"].shape
    if intercept is not None:
        bias = torch.tensor(np.ravel(intercept), dtype=torch.float64)
        values["bias"] = bias.expand(outputs)
    shape = {"bias": intercept is not None, "dtype": torch.float64}
    layer: Any = nn.utils.skip_init(nn.Linear, inputs, outputs, **shape)
    layer.load_state_dict(values)
    return layer


def _linear_prior(
    model: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood, weight: float
) -> dict[str, float]:
    """δ by name: the penalties, and FREE of the data's least curvature where there is none."""
    inputs = x if model.bias is None else torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    sizes = torch.linalg.svdvals(inputs)
    above_rounding = sizes[sizes > RANK * sizes[0]]
    free = FREE * float(above_rounding[-1:].square().sum())
    has_flat_directions = len(above_rounding) < inputs.shape[1]
    if has_flat_directions or isinstance(likelihood, Categorical):
        free = max(free, LEAST * float(sizes[0] ** 2))
    free = free * _mean_curvature(model, x, y, likelihood) or FREE
    prior = {"weight": weight or free}
    if model.bias is not None:
        prior["bias"] = free
    return prior


def _mean_curvature(model: nn.Linear, x: Tensor, y: Tensor, likelihood: Likelihood) -> float:
    """The mean of the diagonals of all Λ_i."""
    with torch.no_grad():
        outputs = model(x)
    targets = likelihood.prepare_targets(y, outputs)
    total = 0.0
    for f, labels in zip(outputs.split(ROWS), targets.split(ROWS), strict=True):
        total += float(likelihood.hessian(f, labels).diagonal(dim1=1, dim2=2).sum())
    return total / outputs.numel()


def _by_class(weight: Any, classes: np.ndarray, places: Tensor) -> Likelihood:
    """The likelihood of these classes, each with its weight; a balanced one has n / (C n_k)."""
    kind = Bernoulli if len(classes) == 2 else Categorical
    if weight is None:
        return kind()
    if weight == "balanced":
        counts = places.bincount(minlength=len(classes)).clamp(min=1).numpy()
        w = len(places) / (len(classes) * counts)
    else:
        w = np.array([float(weight.get(c, 1.0)) for c in classes.tolist()])
    if not (w > 0).all():
        raise InputError(f"class_weight of {classes[w <= 0][0]!r} must be above 0; leave it out")
    likelihood: Likelihood = Categorical(w)
    if kind is Bernoulli:
        likelihood = Bernoulli(w[1] / w[0], w[0])
    likelihood.estimated = weight == "balanced"
    return likelihood
