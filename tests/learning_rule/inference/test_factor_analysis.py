"""Factor analysis against scikit-learn's, probabilistic PCA against its closed form."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as Sklearns

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.inference import FactorAnalysis


def wine() -> torch.Tensor:
    x = torch.tensor(load_wine().data)[:, :6]
    return (x - x.mean(0)) / x.std(0)


def test_factor_analysis_against_scikit_learn() -> None:
    y = wine()
    fitted = FactorAnalysis(2).fit(y, progress=False)
    theirs = Sklearns(2, tol=1e-12, max_iter=20000, svd_method="lapack").fit(y.numpy())
    assert fitted.converged
    assert fitted.history[-1] / len(y) == pytest.approx(theirs.score(y.numpy()), abs=1e-5)
    found = torch.linalg.inv(fitted.q.precision)
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


def test_without_is_the_first_step_of_fitting_again() -> None:
    y = wine()
    fitted = FactorAnalysis(2).fit(y, tol=1e-8, progress=False)
    left_out = fitted.left_out()
    truth, step, before = [], [], []
    for i in range(3):
        kept = torch.arange(len(y)) != i
        again = FactorAnalysis(2).fit(y[kept], tol=1e-8, progress=False)
        truth.append(float(again.log_predictive(y[i : i + 1])))
        step.append(float(left_out[i]))
        before.append(float(fitted.log_predictive(y[i : i + 1])))
    torch.testing.assert_close(fitted.without([0]).mean, y[1:].mean(0), rtol=0, atol=0.02)
    gap = torch.tensor(step) - torch.tensor(truth)
    assert gap.abs().sum() < (torch.tensor(before) - torch.tensor(truth)).abs().sum()
    whole = {k: v.sum(0) for k, v in fitted.sites.items()}
    for key, value in fitted.totals.items():
        torch.testing.assert_close(whole[key], value)


def test_bad_input() -> None:
    y = wine()
    for wrong in (y[:, :2], torch.cat([y[:, :3], y[:, :1]], 1)):
        with pytest.raises(DataError):
            FactorAnalysis(2).fit(wrong, progress=False)
    with pytest.raises(InputError):
        FactorAnalysis(2, noise="full")
