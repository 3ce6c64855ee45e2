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


def random_model(seed: int, *, varying: bool, times: int = 7) -> tuple[StateSpace, Tensor]:
    """Three states, two of them driven by noise; two components observed, some missing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def lead(n: int) -> tuple[int, ...]:
        return (n,) if varying else ()

    root = draw(*lead(times - 1), 3, 2)
    noise = draw(*lead(times), 2, 2)
    spread = draw(3, 3)
    model = StateSpace(
        transition=0.6 * draw(*lead(times - 1), 3, 3) + torch.eye(3, dtype=torch.float64),
        transition_noise=root @ root.mT,
        observation=draw(*lead(times), 2, 3),
        observation_noise=noise @ noise.mT + 0.3 * torch.eye(2, dtype=torch.float64),
        prior=FullGaussian(draw(3), spread @ spread.mT + 0.2 * torch.eye(3, dtype=torch.float64)),
        transition_offset=draw(*lead(times - 1), 3),
        observation_offset=draw(*lead(times), 2),
    )
    data = 3 * draw(times, 2)
    data[1, 0] = data[3, :] = data[5, 1] = math.nan
    return model, data


def dense(model: StateSpace, data: np.ndarray, upto: int | None = None):
    """Marginal means and covariances of the states, and log p(y), from the joint Gaussian."""
    times, size = len(data), len(model.prior.mean)

    def at(value: Tensor, time: int, rank: int) -> np.ndarray:
        return (value[time] if value.ndim > rank else value).numpy()

    mean = [model.prior.mean.numpy()]
    covariance = np.zeros((times * size, times * size))
    covariance[:size, :size] = np.linalg.inv(model.prior.precision.numpy())
    for t in range(times - 1):
        move = at(model.transition, t, 2)
        mean.append(move @ mean[-1] + at(model.transition_offset, t, 1))
        past, here = slice(0, (t + 1) * size), slice(t * size, (t + 1) * size)
        ahead = slice((t + 1) * size, (t + 2) * size)
        covariance[ahead, past] = move @ covariance[here, past]
        covariance[past, ahead] = covariance[ahead, past].T
        covariance[ahead, ahead] = move @ covariance[here, here] @ move.T + at(
            model.transition_noise, t, 2
        )
    width = data.shape[1]
    matrix = np.zeros((times * width, times * size))
    noise = np.zeros((times * width, times * width))
    offset = np.zeros(times * width)
    for t in range(times):
        block = slice(t * width, (t + 1) * width)
        matrix[block, t * size : (t + 1) * size] = at(model.observation, t, 2)
        noise[block, block] = at(model.observation_noise, t, 2)
        offset[block] = at(model.observation_offset, t, 1)
    flat = data.reshape(-1)
    keep = ~np.isnan(flat)
    if upto is not None:
        keep[upto * width :] = False
    matrix, noise = matrix[keep], noise[np.ix_(keep, keep)]
    residual = flat[keep] - offset[keep] - matrix @ np.concatenate(mean)
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


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_states_and_likelihood_equal_the_joint_gaussian(seed: int, varying: bool) -> None:
    model, data = random_model(seed, varying=varying)
    fitted = model.fit(data)
    mean, covariance, log_prob = dense(model, data.numpy())
    close(fitted.q.mean, mean)
    close(fitted.q.covariance, covariance)
    assert fitted.history[-1] == pytest.approx(log_prob, rel=1e-10)


@pytest.mark.parametrize("time", [0, 2, 4, 6])
def test_the_filter_has_seen_the_past_and_the_present(time: int) -> None:
    model, data = random_model(11, varying=True)
    fitted = model.fit(data)
    mean, covariance, log_prob = dense(model, data.numpy(), upto=time + 1)
    close(fitted.filtered.mean[time], mean[time])
    close(fitted.filtered.covariance[time], covariance[time])
    assert fitted.history[time] == pytest.approx(log_prob, rel=1e-10)
    before, spread, _ = dense(model, data.numpy(), upto=time)
    close(fitted.predicted.mean[time], before[time])
    close(fitted.predicted.covariance[time], spread[time])


@pytest.mark.parametrize("kind", ["nile", "fixed", "varying"])
def test_equal_to_statsmodels(kind: str) -> None:
    smoother = pytest.importorskip("statsmodels.tsa.statespace.kalman_smoother")
    if kind == "nile":
        model, data = nile(), torch.from_numpy(NILE).clone()
        data[20:40] = math.nan
    else:
        model, data = random_model(5, varying=kind == "varying")

    def theirs(value: Tensor, rank: int, *, moves: bool) -> np.ndarray:
        if value.ndim == rank:
            return value.numpy() if rank == 2 else value.numpy()[:, None]
        value = torch.cat([value, value[-1:]]) if moves else value  # the last move is not used
        return np.moveaxis(value.numpy(), 0, -1)

    size, width = model.prior.mean.shape[0], data.shape[1]
    peer = smoother.KalmanSmoother(k_endog=width, k_states=size)
    peer.bind(data.numpy().copy())
    peer["transition"] = theirs(model.transition, 2, moves=True)
    peer["selection"] = np.eye(size)
    peer["state_cov"] = theirs(model.transition_noise, 2, moves=True)
    peer["design"] = theirs(model.observation, 2, moves=False)
    peer["obs_cov"] = theirs(model.observation_noise, 2, moves=False)
    peer["state_intercept"] = theirs(model.transition_offset, 1, moves=True)
    peer["obs_intercept"] = theirs(model.observation_offset, 1, moves=False)
    peer.initialize_known(model.prior.mean.numpy(), model.prior.covariance.numpy())
    peer.tolerance = 0  # it would stop updating a covariance that has nearly converged
    wanted, fitted = peer.smooth(), model.fit(data)
    close(fitted.q.mean, wanted.smoothed_state.T, 1e-9)
    close(fitted.q.covariance, np.moveaxis(wanted.smoothed_state_cov, -1, 0), 1e-9)
    close(fitted.filtered.mean, wanted.filtered_state.T, 1e-9)
    close(fitted.predicted.mean, wanted.predicted_state.T[:-1], 1e-9)
    steps = np.asarray(wanted.llf_obs)
    np.testing.assert_allclose(np.diff(fitted.history, prepend=0), steps, rtol=1e-9, atol=1e-9)


def test_observations_without_noise_are_interpolated() -> None:
    model = nile()
    model = StateSpace(ONE, LEVEL * ONE, ONE, 1e-9 * ONE, model.prior)
    fitted = model.fit(torch.from_numpy(NILE))
    close(fitted.q.mean, NILE, 1e-10)


@pytest.mark.parametrize("varying", [False, True])
def test_left_out_and_without_equal_fits_without(varying: bool) -> None:
    model, data = random_model(8, varying=varying)
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
    model, data = random_model(3, varying=False)
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
