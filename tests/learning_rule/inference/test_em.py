"""EM for mixtures of Gaussians against scikit-learn's, from the same start."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn import datasets
from sklearn.datasets import load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as Sklearns
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture as Peer
from torch import Tensor

from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families import DiagonalGaussian, FullGaussian, GaussianMixture
from blr_analysis.learning_rule.inference import (
    FactorAnalysis,
    GaussianMixtureEM,
    NotConverged,
)

IRIS = torch.from_numpy(datasets.load_iris().data)
WINE = torch.from_numpy(datasets.load_wine().data)
CASES = [("full", 1e-6), ("diag", 1e-6), ("spherical", 1e-3)]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(data: Tensor, covariance: str, k: int, seed: int) -> GaussianMixture:
    """K examples as means, unequal weights, and precisions on the scale of the data."""
    generator = torch.Generator().manual_seed(seed)
    means = data[torch.randperm(len(data), generator=generator)[:k]]
    precision = (1 + torch.rand(k, 1, generator=generator, dtype=data.dtype)) / data.var(0)
    if covariance == "spherical":
        precision = precision.mean(1, keepdim=True).expand_as(precision)
    weights = torch.rand(k, generator=generator, dtype=data.dtype) + 1
    parts = (
        FullGaussian(means, torch.diag_embed(precision))
        if covariance == "full"
        else DiagonalGaussian(means, precision)
    )
    return GaussianMixture(weights / weights.sum(), parts)


def peer_of(start: GaussianMixture, covariance: str, floor: float, iterations: int) -> Peer:
    precision = start.components.precision.numpy()
    return Peer(
        n_components=len(start.weights),
        covariance_type=covariance,
        reg_covar=floor,
        tol=0,
        max_iter=iterations,
        weights_init=start.weights.numpy(),
        means_init=start.components.mean.numpy(),
        precisions_init=precision[:, 0] if covariance == "spherical" else precision,
    )


def covariances(q: GaussianMixture, covariance: str) -> np.ndarray:
    parts = q.components
    if isinstance(parts, FullGaussian):
        return parts.covariance.numpy()
    variances = (1 / parts.precision).numpy()
    return variances[:, 0] if covariance == "spherical" else variances


@pytest.mark.parametrize(("covariance", "floor"), CASES)
@pytest.mark.parametrize(("data", "k"), [(IRIS, 3), (WINE[:, :6], 2), (IRIS, 4)])
def test_every_iteration_equals_scikit_learn(
    data: Tensor, k: int, covariance: str, floor: float
) -> None:
    start, iterations = started(data, covariance, k, seed=k), 25
    peer = peer_of(start, covariance, floor, iterations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        peer.fit(data.numpy())
    model = GaussianMixtureEM(k, covariance, floor=floor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConverged)
        fitted = model.fit(data, start=start, max_iter=iterations, tol=0)
    assert len(fitted.history) == len(peer.lower_bounds_) == iterations  # still rising
    np.testing.assert_allclose(np.array(fitted.history) / len(data), peer.lower_bounds_, rtol=1e-9)
    np.testing.assert_allclose(fitted.q.weights, peer.weights_, rtol=1e-6)
    np.testing.assert_allclose(fitted.q.components.mean, peer.means_, rtol=1e-6)
    np.testing.assert_allclose(
        covariances(fitted.q, covariance), peer.covariances_, rtol=1e-5, atol=1e-9
    )
    np.testing.assert_allclose(
        fitted.responsibilities(data), peer.predict_proba(data.numpy()), atol=1e-6
    )
    np.testing.assert_allclose(
        fitted.log_predictive(data), peer.score_samples(data.numpy()), rtol=1e-6
    )


def test_online_em_is_the_average_of_expected_statistics() -> None:
    """Cappé & Moulines, 2009, written out in numpy over the same minibatches."""
    start, steps, size = started(IRIS, "full", 3, seed=1), 12, 40

    def rho(t: int) -> float:
        return (t + 1) ** -0.6

    model = GaussianMixtureEM(3, floor=0.01)
    fitted = model.fit(
        IRIS, start=start, rho=rho, batch=size, max_iter=steps,
        generator=seeded(5),
    )  # fmt: skip
    draw = seeded(5)
    weights, means = start.weights.numpy(), start.components.mean.numpy()
    covs = start.components.covariance.numpy()
    count, linear = weights.copy(), weights[:, None] * means
    square = weights[:, None, None] * (covs + means[:, :, None] * means[:, None])
    for t in range(1, steps + 1):
        y = IRIS[torch.randperm(150, generator=draw)[:size]].numpy()
        joint = np.stack(
            [w * multivariate_normal(m, c).pdf(y)
             for w, m, c in zip(weights, means, covs, strict=True)], 1,
        )  # fmt: skip
        assert fitted.history[t - 1] == pytest.approx(150 / size * np.log(joint.sum(1)).sum())
        r = joint / joint.sum(1, keepdims=True)
        count += rho(t) * (r.mean(0) - count)
        linear += rho(t) * (r.T @ y / size - linear)
        square += rho(t) * (np.einsum("nk,ni,nj->kij", r, y, y) / size - square)
        weights, means = count / count.sum(), linear / count[:, None]
        covs = square / count[:, None, None] - means[:, :, None] * means[:, None]
        covs = covs + 0.01 * np.eye(4)
    assert not fitted.converged
    np.testing.assert_allclose(fitted.q.weights, weights, rtol=1e-9)
    np.testing.assert_allclose(fitted.q.components.mean, means, rtol=1e-9)
    np.testing.assert_allclose(covariances(fitted.q, "full"), covs, rtol=1e-6, atol=1e-9)


def test_generalised_em_rises_in_smaller_steps_to_the_same_rest() -> None:
    start, model = started(WINE[:, :6], "diag", 2, seed=2), GaussianMixtureEM(2, "diag", floor=1e-9)
    whole, part = (model.fit(WINE[:, :6], start=start, rho=r, tol=1e-10) for r in (1.0, 0.4))
    assert whole.converged and part.converged
    assert np.diff(part.history).min() > -1e-9
    assert part.history[-1] == pytest.approx(whole.history[-1], abs=1e-5)
    assert part.history[1] < whole.history[1]
    without = [f.without([0, 5]).components.mean for f in (whole, part)]
    without = [m[m[:, 0].argsort()] for m in without]
    torch.testing.assert_close(*without, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical"])
def test_taking_examples_out_is_an_m_step_without_them(covariance: str) -> None:
    model = GaussianMixtureEM(3, covariance, floor=1e-6)
    fitted = model.fit(IRIS, generator=torch.Generator().manual_seed(1), tol=1e-10)
    gone = torch.arange(0, 150, 7)
    keep = torch.ones(150, dtype=torch.bool)
    keep[gone] = False
    # One M-step for the others, from the responsibilities that they had, by hand.
    sites = fitted.sites
    weights = sites["count"][keep]
    mean = weights.mT @ IRIS[keep] / weights.sum(0).unsqueeze(1)
    q = fitted.without(gone)
    torch.testing.assert_close(q.components.mean, mean)
    torch.testing.assert_close(q.weights, weights.mean(0))
    for k in range(3):
        wanted = np.cov(IRIS[keep].T, bias=True, aweights=weights[:, k])
        found = covariances(q, "full" if covariance == "full" else "diag")[k]
        if covariance != "full":
            wanted = wanted.diagonal()
        if covariance == "spherical":
            wanted = np.full_like(wanted, wanted.mean())
        floor = 1e-6 * (np.eye(4) if covariance == "full" else 1)
        np.testing.assert_allclose(found, wanted + floor, rtol=1e-9)


def test_a_component_that_rests_on_an_example_does_not_leave_it() -> None:
    data = torch.cat([IRIS, torch.full((1, 4), 1e3, dtype=torch.float64)])
    fitted = GaussianMixtureEM(3).fit(data, generator=seeded(0))
    with pytest.raises(DataError, match=r"rests on these examples alone.*no examples left"):
        fitted.without([150])


# Factor analysis against scikit-learn's, probabilistic PCA against its closed form.


def wine() -> torch.Tensor:
    x = torch.tensor(load_wine().data)[:, :6]
    return (x - x.mean(0)) / x.std(0)


def test_factor_analysis_against_scikit_learn() -> None:
    y = wine()
    fitted = FactorAnalysis(2).fit(y, progress=False)
    theirs = Sklearns(2, tol=1e-12, max_iter=20000, svd_method="lapack").fit(y.numpy())
    assert fitted.converged
    assert fitted.history[-1] / len(y) == pytest.approx(theirs.score(y.numpy()), abs=1e-5)
    found = torch.linalg.inv(fitted.q.marginal.precision)
    torch.testing.assert_close(found, torch.tensor(theirs.get_covariance()), rtol=0, atol=2e-3)
    z = torch.tensor(theirs.transform(y.numpy()))
    gram, wanted = fitted.factors(y) @ fitted.factors(y).mT, z @ z.mT  # W has any rotation
    assert (gram - wanted).norm() < 1e-2 * wanted.norm()
    assert bool((torch.tensor(fitted.history).diff() > -1e-8).all())


def test_probabilistic_pca_has_its_closed_form() -> None:
    """σ² is the mean of the eigenvalues left out, and the likelihood that of PCA."""
    y = torch.tensor(load_iris().data)
    fitted = FactorAnalysis(2, noise="spherical").fit(y, tol=1e-13, progress=False)
    values = torch.linalg.eigvalsh(torch.cov(y.mT, correction=0))
    torch.testing.assert_close(fitted.noise, values[:2].mean().expand(4), rtol=1e-6, atol=0)
    pca = PCA(2).fit(y.numpy())
    leading = torch.tensor(pca.components_)
    within = fitted.loadings - leading.mT @ (leading @ fitted.loadings)
    assert within.norm() < 1e-5 * fitted.loadings.norm()
    sizes = torch.linalg.eigvalsh(fitted.loadings.mT @ fitted.loadings)
    torch.testing.assert_close(sizes, values[2:] - fitted.noise[0], rtol=1e-5, atol=0)
