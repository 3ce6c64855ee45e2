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


def read_estimator(estimator: Any, X: Any, y: Any, likelihood: Likelihood | None) -> Any:
    """A fitted estimator, or a Pipeline that ends in one, and the data that it was fitted to;
    ``likelihood`` is taken in place of the one that would be read.

    Returns:
        The estimator as it predicts, in float64; what it was fitted to, with its ``class_weight``
        ("balanced" ones are read from these labels, so that test data take those of the training
        data); δ by parameter name, None where it hangs on a noise that there is not; the data as
        the estimator sees them, transformed, and labels as 0 … C−1; each example's label, and all
        of them in the order of their places, by their own names, where those are no numbers.

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
            X = estimator[:-1].transform(X) if len(estimator.steps) > 1 else X
        return read_estimator(estimator.steps[-1][1], X, y, likelihood)
    if name not in _READERS:
        raise InputError(f"no likelihood is known for {name}, but for {', '.join(_READERS)}")
    x, values = _checked(estimator, X, y)
    labels = words = None
    if values.ndim == 1 and hasattr(estimator, "classes_"):
        classes = estimator.classes_
        if unknown := sorted(set(np.unique(values).tolist()) - set(classes.tolist()), key=str):
            raise InputError(f"the label {unknown[0]!r} is none that the estimator was fitted to")
        if classes.dtype.kind not in "biuf":
            labels, words = [str(v) for v in values], tuple(map(str, classes))
        values = np.searchsorted(classes, values).astype(np.int64)
    targets = torch.from_numpy(values if values.dtype == np.int64 else values.astype(np.float64))
    given = None if likelihood is None else likelihood.plain
    return *_READERS[name](estimator, x, targets, given), x, targets, labels, words


Read = tuple[nn.Module, Likelihood, dict[str, float] | None]


def _logistic(estimator: Any, x: Tensor, y: Tensor, given: Likelihood | None) -> Read:
    if estimator.penalty == "l1" or (estimator.l1_ratio and estimator.penalty != "l2"):
        raise InputError("an l1 penalty has no δ; fit LogisticRegression with the l2 penalty")
    if estimator.solver == "liblinear":
        raise InputError("liblinear shrinks the intercept too; fit with solver='lbfgs'")
    delta = 0.0 if estimator.penalty is None else 1 / float(np.ravel(estimator.C)[0])
    model = _linear(estimator)
    kind = given or _by_class(estimator.class_weight, estimator.classes_, y)
    return model, kind, _linear_prior(model, x, y, kind, delta)


def _least_squares(estimator: Any, x: Tensor, y: Tensor, given: Likelihood | None) -> Read:
    if getattr(estimator, "positive", False):
        raise InputError("positive=True is a constraint, which has no δ; fit without it")
    model = _linear(estimator)
    noise = given if isinstance(given, Gaussian) else _noise(estimator, model, x, y)
    alpha = getattr(estimator, "alpha_", getattr(estimator, "alpha", 0.0))
    delta = np.unique(np.divide(alpha, noise.variance))
    if len(delta) > 1:
        raise InputError("one alpha per target has no single δ; fit the targets one by one")
    known = not math.isnan(delta[0])
    return model, noise, _linear_prior(model, x, y, noise, float(delta[0])) if known else None


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


def _poisson(estimator: Any, x: Tensor, y: Tensor, given: Likelihood | None) -> Read:
    model, kind = _linear(estimator), given or BY_NAME["poisson"]()
    return model, kind, _linear_prior(model, x, y, kind, float(estimator.alpha) * len(x))


def _perceptron(estimator: Any, x: Tensor, y: Tensor, given: Likelihood | None) -> Read:
    if estimator.early_stopping:
        raise InputError("early_stopping held back data that are not on record; fit without it")
    batch = min(len(x), 200 if estimator.batch_size == "auto" else int(estimator.batch_size))
    share = 1.0 if estimator.solver == "lbfgs" else len(x) / batch
    layers: list[nn.Module] = []
    prior = {}
    for coef, intercept in zip(estimator.coefs_, estimator.intercepts_, strict=True):
        k = len(layers)
        prior |= {f"{k}.weight": max(estimator.alpha * share, FREE), f"{k}.bias": FREE}
        layers += [_layer(coef.T, intercept), ACTIVATIONS[estimator.activation]()]
    kind = "bernoulli" if estimator.out_activation_ == "logistic" else "categorical"
    return nn.Sequential(*layers[:-1]), given or BY_NAME[kind](), prior


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

    X = X.toarray() if hasattr(X, "toarray") else X
    with told_as(DataError, "X or y is not what the estimator was fitted to"):
        x = check_array(X, dtype="float64", input_name="X", copy=True)
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
    return prior if model.bias is None else prior | {"bias": free}


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
    made = Bernoulli(w[1] / w[0], w[0]) if kind is Bernoulli else Categorical(w)
    made.estimated = weight == "balanced"
    return made
