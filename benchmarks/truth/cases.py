"""What is trained in each case, to the last setting; a changed recipe is a changed truth."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from benchmarks.cases import mlp
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Likelihood, resolve

FORMAT = 2  # raised when the stored files' meaning, or a tolerance of retrain.py, changes


class Data(NamedTuple):
    """Inputs and targets to train on, and held out, in float64."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Recipe:
    """One case.

    Attributes:
        source: which data, of :data:`SOURCES`.
        n_train, n_test: how many examples.
        widths: of a tanh MLP (two numbers: a linear model).
        delta: prior precision δ, the best of three or four by test NLL (digits_mlp: set).
        loo: how many random examples are left out one by one.
        subsets: how many random halves are retrained, from each of two sets of first weights.
        dense: whether these small retrainings are preconditioned by the inverse Hessian.
    """

    source: str
    n_train: int
    n_test: int
    widths: tuple[int, ...]
    likelihood: str
    delta: float
    loo: int = 100
    subsets: int = 32
    dense: bool = True

    @property
    def hash(self) -> str:
        """Of everything that decides a retraining's result: the counts do not."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("loo", "subsets", "dense")}
        text = json.dumps({"format": FORMAT, **kept}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def build(self) -> nn.Module:
        """The model in float64, with whatever weights the generator gives it."""
        return mlp(*self.widths).double()

    def observed(self) -> Likelihood:
        return resolve(self.likelihood)

    def data(self) -> Data:
        """Shuffled (but for Fashion-MNIST), standardised, split."""
        return SOURCES[self.source](self.n_train, self.n_test)


def digits(n: int, m: int) -> Data:
    """scikit-learn's digits; one mean and scale for all pixels."""
    data = _shuffled(*load_digits(return_X_y=True), n, m)
    return _scaled(data, data.x.mean(), data.x.std())


def breast_cancer(n: int, m: int) -> Data:
    """A table; every column by its own mean and scale."""
    x, y = load_breast_cancer(return_X_y=True)
    data = _shuffled(x, y.astype(float), n, m)
    return _scaled(data, data.x.mean(0), data.x.std(0).clamp_min(1e-12))


def fashion(n: int, m: int) -> Data:
    """The first images of Fashion-MNIST's two parts, flat; one mean and scale for all pixels."""
    from tutorials.data import read

    found = read("fashion-mnist")
    x, x_test = (i.flatten(1).double() for i in (found.images[:n], found.test_images[:m]))
    data = Data(x, found.labels[:n], x_test, found.test_labels[:m])
    return _scaled(data, data.x.mean(), data.x.std())


def _shuffled(x: object, y: object, n: int, m: int) -> Data:
    inputs = torch.as_tensor(x).double()
    targets = torch.as_tensor(y)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    train = order[:n]
    test = order[n : n + m]
    return Data(inputs[train], targets[train], inputs[test], targets[test])


def _scaled(data: Data, mean: Tensor, scale: Tensor) -> Data:
    return data._replace(x=(data.x - mean) / scale, x_test=(data.x_test - mean) / scale)


SOURCES: dict[str, Callable[[int, int], Data]] = {
    f.__name__: f for f in (digits, breast_cancer, fashion)
}
CASES: dict[str, Recipe] = {
    "breast_cancer": Recipe("breast_cancer", 400, 169, (30, 1), "bernoulli", 3.0, loo=400),
    "digits": Recipe("digits", 1000, 797, (64, 10), "categorical", 0.3, loo=1000),
    "digits_mlp": Recipe("digits", 1000, 797, (64, 24, 10), "categorical", 3.0),
    "fashion_mlp": Recipe(
        "fashion", 2000, 1000, (784, 32, 16, 10), "categorical", 30.0, dense=False
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of a case.

    Raises:
        InputError: there is no such case.
    """
    if name not in CASES:
        raise InputError(f"case must be one of {', '.join(CASES)}; got {name!r}")
    return CASES[name]
