"""The Kalman filter and smoother against a dense Gaussian, and against statsmodels.

nile.csv: annual flow of the Nile at Aswan, 1871–1970, in 10⁸ m³ (Cobb, Biometrika 65, 1978); the
series of statsmodels.datasets.nile, in the public domain.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from blr_analysis.learning_rule.families import FullGaussian
from blr_analysis.learning_rule.inference import StateSpace

ONE = torch.ones(1, 1, dtype=torch.float64)
NILE = np.loadtxt(Path(__file__).with_name("nile.csv"), delimiter=",", skiprows=1)[:, 1:]
# The variances that maximise the likelihood of the local level (Durbin and Koopman, 2012, 2.2.5).
LEVEL, NOISE = 1469.1, 15099.0


def nile(prior_variance: float = 1e7) -> StateSpace:
    prior = FullGaussian(torch.zeros(1, dtype=torch.float64), ONE / prior_variance)
    return StateSpace(ONE, LEVEL * ONE, ONE, NOISE * ONE, prior)


def random_model(seed: int, times: int = 7) -> tuple[StateSpace, Tensor]:
    """Three states, two of them driven by noise; two components observed, some missing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    root, noise, spread = draw(3, 2), draw(2, 2), draw(3, 3)
    model = StateSpace(
        transition=0.6 * draw(3, 3) + torch.eye(3, dtype=torch.float64),
        transition_noise=root @ root.mT,
        observation=draw(2, 3),
        observation_noise=noise @ noise.mT + 0.3 * torch.eye(2, dtype=torch.float64),
        prior=FullGaussian(draw(3), spread @ spread.mT + 0.2 * torch.eye(3, dtype=torch.float64)),
    )
    data = 3 * draw(times, 2)
    data[1, 0] = data[3, :] = data[5, 1] = math.nan
    return model, data


def dense(model: StateSpace, data: np.ndarray, upto: int | None = None):
    """Marginal means and covariances of the states, and log p(y), from the joint Gaussian."""
    times, size = len(data), len(model.prior.mean)
    move, driven = model.transition.numpy(), model.transition_noise.numpy()
    mean = [model.prior.mean.numpy()]
    covariance = np.zeros((times * size, times * size))
    covariance[:size, :size] = np.linalg.inv(model.prior.precision.numpy())
    for t in range(times - 1):
        mean.append(move @ mean[-1])
        past, here = slice(0, (t + 1) * size), slice(t * size, (t + 1) * size)
        ahead = slice((t + 1) * size, (t + 2) * size)
        covariance[ahead, past] = move @ covariance[here, past]
        covariance[past, ahead] = covariance[ahead, past].T
        covariance[ahead, ahead] = move @ covariance[here, here] @ move.T + driven
    matrix = np.kron(np.eye(times), model.observation.numpy())
    noise = np.kron(np.eye(times), model.observation_noise.numpy())
    flat = data.reshape(-1)
    keep = ~np.isnan(flat)
    if upto is not None:
        keep[upto * data.shape[1] :] = False
    matrix, noise = matrix[keep], noise[np.ix_(keep, keep)]
    residual = flat[keep] - matrix @ np.concatenate(mean)
    marginal = matrix @ covariance @ matrix.T + noise
    gain = np.linalg.solve(marginal, matrix @ covariance).T
    smoothed = np.concatenate(mean) + gain @ residual
    posterior = covariance - gain @ matrix @ covariance
    log_prob = -0.5 * (
        residual @ np.linalg.solve(marginal, residual)
        + np.linalg.slogdet(marginal)[1]
        + len(residual) * math.log(2 * math.pi)
    )
    blocks = posterior.reshape(times, size, times, size)
    return smoothed.reshape(times, size), np.einsum("tatb->tab", blocks), log_prob


def close(found: Tensor, wanted: np.ndarray, tol: float = 1e-10) -> None:
    np.testing.assert_allclose(found.numpy(), wanted, rtol=tol, atol=tol * np.abs(wanted).max())


@pytest.mark.parametrize("seed", range(4))
def test_states_and_likelihood_equal_the_joint_gaussian(seed: int) -> None:
    """What is smoothed has seen all, what is filtered the past and the present."""
    model, data = random_model(seed)
    fitted = model.fit(data)
    mean, covariance, log_prob = dense(model, data.numpy())
    close(fitted.q.mean, mean)
    close(fitted.q.covariance, covariance)
    assert fitted.history[-1] == pytest.approx(log_prob, rel=1e-10)
    for time in (0, 2, 4, 6):
        mean, covariance, log_prob = dense(model, data.numpy(), upto=time + 1)
        close(fitted.filtered.mean[time], mean[time])
        close(fitted.filtered.covariance[time], covariance[time])
        assert fitted.history[time] == pytest.approx(log_prob, rel=1e-10)
        before, spread, _ = dense(model, data.numpy(), upto=time)
        close(fitted.predicted.mean[time], before[time])
        close(fitted.predicted.covariance[time], spread[time])


def test_observations_without_noise_are_interpolated() -> None:
    model = nile()
    model = StateSpace(ONE, LEVEL * ONE, ONE, 1e-9 * ONE, model.prior)
    fitted = model.fit(torch.from_numpy(NILE))
    close(fitted.q.mean, NILE, 1e-10)


def test_left_out_and_without_equal_fits_without() -> None:
    model, data = random_model(8)
    fitted = model.fit(data)
    left_out = fitted.left_out()
    for t in range(len(data)):
        rest = data.clone()
        rest[t] = math.nan
        mean, _, log_rest = dense(model, rest.numpy())
        _, _, log_all = dense(model, data.numpy())
        assert float(left_out[t]) == pytest.approx(log_all - log_rest, abs=1e-9)
        close(fitted.without([t]).mean, mean)
    rest = data.clone()
    rest[[0, 2, 6]] = math.nan
    close(fitted.without([0, 2, 6]).covariance, dense(model, rest.numpy())[1])


def test_the_sites_of_what_is_missing_are_zero() -> None:
    model, data = random_model(3)
    sites = model.fit(data).sites
    assert not sites["linear"][3].any() and not sites["square"][3].any()
    assert sites["linear"][2].any() and torch.linalg.matrix_rank(sites["square"][1]) == 1


def test_a_series_of_nothing_observed_leaves_the_prior() -> None:
    """A random walk from N(0, 1): variances 1, 2, 3, and a log-likelihood of 0."""
    prior = FullGaussian(torch.zeros(1).double(), ONE)
    fitted = StateSpace(ONE, ONE, ONE, ONE, prior).fit(torch.full((3, 1), math.nan))
    torch.testing.assert_close(
        fitted.q.covariance.flatten(), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    )
    assert fitted.history == [0.0, 0.0, 0.0]
