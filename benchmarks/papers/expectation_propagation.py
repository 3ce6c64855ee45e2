"""Gaussian-process classification: the rule beside expectation propagation and Laplace.

    python -m benchmarks.papers.expectation_propagation

Khan & Rue, "The Bayesian learning rule", JMLR 2023, Section 5. Two kinds of iris, squared
exponential kernel, logistic link; the truth is the tests' long NUTS run.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.polynomial.hermite import hermgauss
from scipy import stats
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from blr_analysis.learning_rule.inference.gp import GaussianProcess, function_values, rbf

NUTS = Path(__file__).parents[2] / "tests/learning_rule/inference/nuts.npz"
NODES, WEIGHTS = hermgauss(64)


Approximation = namedtuple("Approximation", "mean covariance log_evidence")  # of f at the examples


def ep(cover: np.ndarray, log_p: Callable[[int, np.ndarray], np.ndarray]) -> Approximation:
    """Sites N(f_i | …) whose tilted moments agree (Minka, 2001); cover is k(x, x) ``[N, N]``."""
    n = len(cover)
    spread = cover.copy()
    total = 0.0
    linear, precision, mean = np.zeros((3, n))
    for _ in range(30):
        before = total
        total = 0.0
        for i in range(n):
            tau = 1 / spread[i, i] - precision[i]
            nu = mean[i] / spread[i, i] - linear[i]
            at = nu / tau + np.sqrt(2 / tau) * NODES
            tilted = WEIGHTS * np.exp(log_p(i, at)) / np.sqrt(np.pi)
            mass = tilted.sum()
            m = tilted @ at / tilted.sum()
            v = tilted @ (at - m) ** 2 / mass
            change = 1 / v - tau - precision[i]
            precision[i] = 1 / v - tau
            linear[i] = m / v - nu
            spread -= np.outer(spread[i], spread[i]) * change / (1 + change * spread[i, i])
            mean = spread @ linear
            total += np.log(mass) + 0.5 * (nu**2 / tau - np.log(tau) - m**2 / v - np.log(v))
        root = np.sqrt(precision)
        inner = np.eye(n) + root[:, None] * cover * root
        spread = cover - cover * root @ np.linalg.solve(inner, root[:, None] * cover)
        mean = spread @ linear
        total += 0.5 * mean @ linear - 0.5 * np.linalg.slogdet(inner)[1]
        if abs(total - before) < 1e-10:
            break
    return Approximation(mean, spread, float(total))


def predicted(found: Approximation, cover: Any, across: Any, prior: float) -> np.ndarray:
    """p(y = 1) at points with covariances ``across [M, N]``, under the logistic link."""
    turned = np.linalg.solve(cover + 1e-10 * np.eye(len(cover)), across.T)
    variance = prior - (across.T * turned).sum(0) + (turned * (found.covariance @ turned)).sum(0)
    at = (turned.T @ found.mean)[:, None] + np.sqrt(2 * variance)[:, None] * NODES
    return (1 / (1 + np.exp(-at))) @ WEIGHTS / np.sqrt(np.pi)


def compared() -> dict[str, dict[str, float]]:
    """What the table shows, by row."""
    with np.load(NUTS, allow_pickle=False) as file:
        truth = {name.partition("/")[2]: file[name] for name in file.files if "iris/" in name}
    length = float(truth["lengthscale"])
    variance = float(truth["variance"])
    x, kind = load_iris(return_X_y=True)
    x = stats.zscore(x[kind > 0])
    y = (kind[kind > 0] == 2).astype(float)
    kernel = partial(rbf, lengthscale=length, variance=variance)
    points, held = torch.tensor(x).view(-1, 2, 4).unbind(1)
    cover = kernel(points, points).numpy()
    across = kernel(held, points).numpy()
    by_ep = ep(cover, lambda i, f: -np.logaddexp(0, -(2 * y[2 * i] - 1) * f))
    fitted = GaussianProcess(kernel).fit((points, torch.tensor(y[::2])), progress=False)
    scale = ConstantKernel(variance, "fixed") * RBF(length, "fixed")
    peer = GaussianProcessClassifier(scale, optimizer=None).fit(x[::2], y[::2])
    q = function_values(fitted)[1].numpy()
    wide = np.diag(truth["covariance"])
    rows = {
        "the rule": (fitted.predict(held).numpy(), fitted.history[-1], q),
        "EP": (predicted(by_ep, cover, across, variance), by_ep.log_evidence, by_ep.covariance),
        "Laplace": (peer.predict_proba(x[1::2])[:, 1], peer.log_marginal_likelihood_value_, None),
    }
    return {
        name: {
            "largest error of p": np.abs(p - truth["probability"]).max(),
            "log evidence": evidence,
            "f's deviation, of NUTS's": np.nan if c is None else np.sqrt(np.diag(c) / wide).mean(),
        }
        for name, (p, evidence, c) in rows.items()
    }


if __name__ == "__main__":
    print(*compared().items(), sep="\n")
