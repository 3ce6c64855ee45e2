"""EM for mixtures of Gaussians against scikit-learn's, from the same start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learning_rule.inference.problems import IRIS
from scipy.stats import multivariate_normal
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as Sklearns
from sklearn.mixture import GaussianMixture as Peer
from torch import Tensor

from blr_analysis.errors import DataError
from blr_analysis.learning_rule.families import DiagonalGaussian, FullGaussian, GaussianMixture
from blr_analysis.learning_rule.inference import FactorAnalysis, GaussianMixtureEM

WINE = torch.from_numpy(load_wine().data)[:, :6]
CASES = [("full", 1e-6), ("diag", 1e-6), ("spherical", 1e-3)]
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::blr_analysis.learning_rule.inference.NotConverged"),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(data: Tensor, covariance: str, k: int, seed: int) -> GaussianMixture:
    """K examples as means, unequal weights, and precisions on the scale of the data."""
    generator = seeded(seed)
    means = data[torch.randperm(len(data), generator=generator)[:k]]
    precision = (1 + torch.rand(k, 1, generator=generator, dtype=data.dtype)) / data.var(0)
    if covariance == "spherical":
        precision = precision.mean(1, keepdim=True).expand_as(precision)
    weights = torch.rand(k, generator=generator, dtype=data.dtype) + 1
    kind, spread = (
        (FullGaussian, torch.diag_embed) if covariance == "full" else (DiagonalGaussian, Tensor)
    )
    return GaussianMixture(weights / weights.sum(), kind(means, spread(precision)))


def covariances(q: GaussianMixture, covariance: str) -> np.ndarray:
    parts = q.components
    if isinstance(parts, FullGaussian):
        return parts.covariance.numpy()
    variances = (1 / parts.precision).numpy()
    return variances[:, 0] if covariance == "spherical" else variances


@pytest.mark.parametrize(("covariance", "floor"), CASES)
@pytest.mark.parametrize(("data", "k"), [(IRIS, 3), (WINE, 2), (IRIS, 4)])
def test_every_iteration_equals_scikit_learn(
    data: Tensor, k: int, covariance: str, floor: float
) -> None:
    start, steps = started(data, covariance, k, seed=k), 25
    precision = start.components.precision.numpy()
    peer = Peer(
        n_components=k, covariance_type=covariance, reg_covar=floor, tol=0, max_iter=steps,
        weights_init=start.weights.numpy(), means_init=start.components.mean.numpy(),
        precisions_init=precision[:, 0] if covariance == "spherical" else precision,
    ).fit(data.numpy())  # fmt: skip
    model = GaussianMixtureEM(k, covariance, floor=floor)
    fitted = model.fit(data, start=start, max_iter=steps, tol=0)
    assert len(fitted.history) == len(peer.lower_bounds_) == steps  # still rising
    close = np.testing.assert_allclose
    close(np.array(fitted.history) / len(data), peer.lower_bounds_, rtol=1e-9)
    close(fitted.q.weights, peer.weights_, rtol=1e-6)
    close(fitted.q.components.mean, peer.means_, rtol=1e-6)
    close(covariances(fitted.q, covariance), peer.covariances_, rtol=1e-5, atol=1e-9)
    close(fitted.responsibilities(data), peer.predict_proba(data.numpy()), atol=1e-6)
    close(fitted.log_predictive(data), peer.score_samples(data.numpy()), rtol=1e-6)


def test_online_em_is_the_average_of_expected_statistics() -> None:
    """Cappé & Moulines, 2009, written out in numpy over the same minibatches."""
    start, steps, size = started(IRIS, "full", 3, seed=1), 12, 40

    def rho(t: int) -> float:
        return (t + 1) ** -0.6

    draw, model = seeded(5), GaussianMixtureEM(3, floor=0.01)
    how = {"rho": rho, "batch": size, "max_iter": steps}
    fitted = model.fit(IRIS, start=start, generator=seeded(5), **how)
    weights, means = start.weights.numpy(), start.components.mean.numpy()
    covs = start.components.covariance.numpy()
    count, linear = weights.copy(), weights[:, None] * means
    square = weights[:, None, None] * (covs + means[:, :, None] * means[:, None])
    for t in range(1, steps + 1):
        y = IRIS[torch.randperm(150, generator=draw)[:size]].numpy()
        classes = zip(weights, means, covs, strict=True)
        joint = np.stack([w * multivariate_normal(m, c).pdf(y) for w, m, c in classes], 1)
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
    start, model = started(WINE, "diag", 2, seed=2), GaussianMixtureEM(2, "diag", floor=1e-9)
    whole, part = (model.fit(WINE, start=start, rho=r, tol=1e-10) for r in (1.0, 0.4))
    assert whole.converged and part.converged and np.diff(part.history).min() > -1e-9
    assert part.history[-1] == pytest.approx(whole.history[-1], abs=1e-5)
    assert part.history[1] < whole.history[1]
    without = [f.without([0, 5]).components.mean for f in (whole, part)]
    torch.testing.assert_close(*(m[m[:, 0].argsort()] for m in without), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical"])
def test_taking_examples_out_is_an_m_step_without_them(covariance: str) -> None:
    """One M-step for the others, from the responsibilities that they had, by hand."""
    fitted = GaussianMixtureEM(3, covariance, floor=1e-6).fit(IRIS, generator=seeded(1), tol=1e-10)
    keep = torch.arange(150) % 7 != 0
    weights = fitted.sites["count"][keep]
    q = fitted.without((~keep).nonzero().flatten())
    mean = weights.mT @ IRIS[keep] / weights.sum(0).unsqueeze(1)
    torch.testing.assert_close(q.components.mean, mean)
    torch.testing.assert_close(q.weights, weights.mean(0))
    for k in range(3):
        wanted = np.cov(IRIS[keep].T, bias=True, aweights=weights[:, k])
        wanted = wanted + 1e-6 * np.eye(4)
        if covariance == "diag":
            wanted = wanted.diagonal()
        if covariance == "spherical":
            wanted = wanted.diagonal().mean()
        np.testing.assert_allclose(covariances(q, covariance)[k], wanted, rtol=1e-9)


def test_a_component_that_rests_on_an_example_does_not_leave_it() -> None:
    data = torch.cat([IRIS, torch.full((1, 4), 1e3, dtype=torch.float64)])
    fitted = GaussianMixtureEM(3).fit(data, generator=seeded(0))
    with pytest.raises(DataError, match=r"rests on these examples alone.*no examples left"):
        fitted.without([150])


# Factor analysis against scikit-learn's, probabilistic PCA against its closed form.


def test_factor_analysis_against_scikit_learn() -> None:
    y = (WINE - WINE.mean(0)) / WINE.std(0)
    fitted = FactorAnalysis(2).fit(y, progress=False)
    theirs = Sklearns(2, tol=1e-12, max_iter=20000, svd_method="lapack").fit(y.numpy())
    assert fitted.converged
    assert fitted.history[-1] / len(y) == pytest.approx(theirs.score(y.numpy()), abs=1e-5)
    found = torch.linalg.inv(fitted.q.marginal.precision)
    torch.testing.assert_close(found, torch.tensor(theirs.get_covariance()), rtol=0, atol=2e-3)
    z = torch.tensor(theirs.transform(y.numpy()))
    gram, wanted = fitted.factors(y) @ fitted.factors(y).mT, z @ z.mT  # W has any rotation
    assert (gram - wanted).norm() < 1e-2 * wanted.norm()


def test_probabilistic_pca_has_its_closed_form() -> None:
    """σ² is the mean of the eigenvalues left out, and the likelihood that of PCA."""
    fitted = FactorAnalysis(2, noise="spherical").fit(IRIS, tol=1e-13, progress=False)
    values = torch.linalg.eigvalsh(torch.cov(IRIS.mT, correction=0))
    torch.testing.assert_close(fitted.noise, values[:2].mean().expand(4), rtol=1e-6, atol=0)
    leading = torch.tensor(PCA(2).fit(IRIS.numpy()).components_)
    within = fitted.loadings - leading.mT @ (leading @ fitted.loadings)
    assert within.norm() < 1e-5 * fitted.loadings.norm()
    sizes = torch.linalg.eigvalsh(fitted.loadings.mT @ fitted.loadings)
    torch.testing.assert_close(sizes, values[2:] - fitted.noise[0], rtol=1e-5, atol=0)
