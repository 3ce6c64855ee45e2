"""Gaussian-process classification: the rule beside expectation propagation and Laplace.

    python -m benchmarks.ep

Two kinds of iris in alternation halved into examples and held-out points, squared exponential
kernel, logistic link, as in the tests' long NUTS run (nuts.npz), which is the truth. Deviations of
the held-out probabilities and of f's mean and standard deviations at the examples (in NUTS's
standard deviations), and the log evidence: EP's, Laplace's, and the rule's lower bound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial.hermite import hermgauss
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel

from blr_analysis.learning_rule.inference.gp import GaussianProcess, function_values, rbf

NUTS = Path(__file__).parents[1] / "tests/learning_rule/inference/nuts.npz"
NODES, WEIGHTS = hermgauss(64)


class Approximation(NamedTuple):
    """Of f at the examples, the sites' linear terms and precisions, and the log evidence."""

    mean: np.ndarray
    covariance: np.ndarray
    linear: np.ndarray
    precision: np.ndarray
    log_evidence: float


def ep(
    cover: np.ndarray, log_p: Callable[[int, np.ndarray], np.ndarray], sweeps: int = 30
) -> Approximation:
    """Sites N(f_i | …) whose tilted moments agree (Minka, 2001; Rasmussen & Williams, 3.6).

    Args:
        cover: k(x, x) ``[N, N]``.
        log_p: (i, f) → log p(y_i | f).
    """
    n = len(cover)
    linear, precision = np.zeros(n), np.zeros(n)
    mean, spread, total = np.zeros(n), cover.copy(), 0.0
    for _ in range(sweeps):
        before, total = total, 0.0
        for i in range(n):
            tau, nu = 1 / spread[i, i] - precision[i], mean[i] / spread[i, i] - linear[i]
            at = nu / tau + np.sqrt(2 / tau) * NODES
            tilted = WEIGHTS * np.exp(log_p(i, at)) / np.sqrt(np.pi)
            mass = tilted.sum()
            m = tilted @ at / mass
            v = tilted @ (at - m) ** 2 / mass
            change = 1 / v - tau - precision[i]
            precision[i], linear[i] = 1 / v - tau, m / v - nu
            spread -= np.outer(spread[i], spread[i]) * change / (1 + change * spread[i, i])
            mean = spread @ linear
            total += np.log(mass) + partition(nu, tau) - partition(m / v, 1 / v)
        root = np.sqrt(precision)
        inner = np.eye(n) + root[:, None] * cover * root
        spread = cover - cover * root @ np.linalg.solve(inner, root[:, None] * cover)
        mean = spread @ linear
        total += 0.5 * mean @ linear - 0.5 * np.linalg.slogdet(inner)[1]
        if abs(total - before) < 1e-10:
            break
    return Approximation(mean, spread, linear, precision, float(total))


def partition(linear: float, precision: float) -> float:
    """Of exp(linear · f − ½ precision · f²), up to a constant, in logarithms."""
    return 0.5 * linear**2 / precision - 0.5 * np.log(precision)


def predicted(
    found: Approximation, cover: np.ndarray, across: np.ndarray, prior: float
) -> np.ndarray:
    """p(y = 1) at points with covariances ``across [M, N]``, under the logistic link."""
    root = np.sqrt(found.precision)
    inner = np.linalg.inv(np.eye(len(cover)) + root[:, None] * cover * root)
    mean = across @ np.linalg.solve(cover + 1e-10 * np.eye(len(cover)), found.mean)
    side = across * root
    deviation = np.sqrt(prior - np.einsum("mi,ij,mj->m", side, inner, side))
    at = mean[:, None] + np.sqrt(2) * deviation[:, None] * NODES
    return (1 / (1 + np.exp(-at))) @ WEIGHTS / np.sqrt(np.pi)


def iris() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_iris(return_X_y=True)
    x, y = x[y > 0], (y[y > 0] == 2).astype(float)
    return (x - x.mean(0)) / x.std(0), y


def compared() -> dict[str, dict[str, float]]:
    """What the table shows, by row."""
    with np.load(NUTS, allow_pickle=False) as file:
        truth = {name.partition("/")[2]: file[name] for name in file.files if "iris/" in name}
    length, variance = float(truth["lengthscale"]), float(truth["variance"])
    x, y = iris()
    kernel = partial(rbf, lengthscale=length, variance=variance)
    points, held = torch.tensor(x[::2]), torch.tensor(x[1::2])
    cover, across = kernel(points, points).numpy(), kernel(held, points).numpy()
    side = 2 * y[::2] - 1
    by_ep = ep(cover, lambda i, f: -np.logaddexp(0, -side[i] * f))
    fitted = GaussianProcess(kernel).fit((points, torch.tensor(y[::2])), progress=False)
    mean, covariance = (part.numpy() for part in function_values(fitted))
    peer = GaussianProcessClassifier(
        ConstantKernel(variance, "fixed") * RBF(length, "fixed"), optimizer=None
    ).fit(x[::2], y[::2])
    deviations = np.sqrt(np.diag(truth["covariance"]))

    def row(probability: np.ndarray, evidence: float, moments: tuple | None) -> dict[str, float]:
        gap = np.abs(probability - truth["probability"])
        found = {"largest error of p": gap.max(), "mean error of p": gap.mean()}
        if moments is not None:
            m, c = moments
            found["error of f's mean"] = (np.abs(m - truth["mean"]) / deviations).max()
            found["f's deviation, of NUTS's"] = (np.sqrt(np.diag(c)) / deviations).mean()
        return {**found, "log evidence": evidence}

    return {
        "the rule": row(fitted.predict(held).numpy(), fitted.history[-1], (mean, covariance)),
        "EP": row(
            predicted(by_ep, cover, across, variance), by_ep.log_evidence, by_ep[:2]
        ),
        "Laplace (scikit-learn)": row(
            peer.predict_proba(x[1::2])[:, 1], peer.log_marginal_likelihood_value_, None
        ),
    }  # fmt: skip


def main() -> None:
    rows = compared()
    columns = list(rows["EP"])
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, found in rows.items():
        cells = [f"{found[c]:.4f}" if c in found else "" for c in columns]
        print("|", " | ".join([name, *cells]), "|")


if __name__ == "__main__":
    main()
