"""What is trained in each case, to the last setting; a changed recipe is a changed truth."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

from torch import nn

from benchmarks.cases import LeNet, mlp
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Gaussian, Likelihood, resolve

FORMAT = 1  # raised when the stored files' meaning, or a tolerance of retrain.py, changes


@dataclass(frozen=True)
class Recipe:
    """One case.

    Attributes:
        source: which data, see :mod:`benchmarks.truth.sources`.
        n_train, n_test: how many examples.
        widths: of a tanh MLP (two numbers: a linear model); () is LeNet-5.
        likelihood: by name; ``noise`` is the Gaussian's variance.
        delta: prior precision δ, the best of three by test NLL (see ``tried``).
        seed: of the first weights, the splits and every draw.
        tried: the values of δ that were tried and their test NLL.
        loo: how many random and how many highest-influence examples are left out one by one.
        subsets: how many random halves are retrained, from each of two sets of first weights and
            from the trained weights.
        relabel: how many examples are given another target, one by one.
        chunk: examples per forward pass.
        mixed: whether a descent begins in float32 (it always ends in float64).
        dense: whether small retrainings are preconditioned by the whole inverse Hessian;
            else by that of ``krylov`` Lanczos steps (0: by nothing).
    """

    source: str
    n_train: int
    n_test: int
    widths: tuple[int, ...]
    likelihood: str
    delta: float
    noise: float = 1.0
    seed: int = 0
    tried: str = ""
    loo: tuple[int, int] = (60, 40)
    subsets: int = 32
    relabel: int = 20
    chunk: int = 500
    mixed: bool = False
    dense: bool = False
    krylov: int = 300

    @property
    def hash(self) -> str:
        """Of everything that decides a retraining's result: the counts and the speed do not."""
        kept = {k: v for k, v in asdict(self).items() if k not in _FREE}
        text = json.dumps({"format": FORMAT, **kept}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def build(self) -> nn.Module:
        """The model in float64, with whatever weights the generator gives it."""
        return (mlp(*self.widths) if self.widths else LeNet()).double()

    def observed(self) -> Likelihood:
        """The likelihood, with its noise."""
        return Gaussian(self.noise) if self.likelihood == "gaussian" else resolve(self.likelihood)


_FREE = {"tried", "loo", "subsets", "relabel", "chunk", "mixed", "dense", "krylov"}
assert {f.name for f in fields(Recipe)} >= _FREE

CASES: dict[str, Recipe] = {
    "breast_cancer": Recipe(
        *("breast_cancer", 400, 169, (30, 1), "bernoulli", 3.0),
        tried="0.3: 0.094, 1: 0.0755, 3: 0.0709, 10: 0.0817",
        loo=(400, 0),
        dense=True,
    ),
    "digits": Recipe(
        *("digits", 1000, 797, (64, 10), "categorical", 0.3),
        tried="0.1: 0.1156, 0.3: 0.1121, 1: 0.1200, 3: 0.1455",
        loo=(1000, 0),
        dense=True,
    ),
    "digits_mlp": Recipe(
        *("digits", 1000, 797, (64, 24, 10), "categorical", 3.0), loo=(80, 40), dense=True
    ),
    "fashion_mlp": Recipe(
        *("fashion", 2000, 1000, (784, 32, 16, 10), "categorical", 30.0),
        tried="3: 0.639, 10: 0.586, 30: 0.551",
        mixed=True,
    ),
    "fashion_lenet": Recipe(
        *("fashion_images", 1000, 1000, (), "categorical", 30.0),
        tried="3: 0.653, 10: 0.578, 30: 0.534 (300 evaluations each)",
        loo=(30, 30),
        subsets=0,
        chunk=125,
        mixed=True,
    ),
    "concrete": Recipe(
        *("concrete", 700, 330, (8, 32, 1), "gaussian", 1.5),
        noise=0.1,  # the held-out mean squared error, which is the variance of best test NLL
        tried="0.5: 0.402, 1.5: 0.257, 5: 0.315",
        dense=True,
    ),
    "newsgroups": Recipe(
        *("newsgroups", 2000, 1000, (384, 20), "categorical", 30.0),
        tried="10: 1.052, 30: 0.977, 100: 0.998",
        loo=(200, 100),
        krylov=0,
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
