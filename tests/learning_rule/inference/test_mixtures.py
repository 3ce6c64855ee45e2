"""Classes that are hidden: EM and message passing against scikit-learn's and all paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from inference_problems import F64, IRIS, ONE, draws
from scipy.stats import multivariate_normal, multivariate_t
from sklearn.datasets import load_wine
from sklearn.decomposition import PCA
from sklearn.decomposition import FactorAnalysis as Sklearns
from sklearn.mixture import BayesianGaussianMixture as BayesianPeer
from sklearn.mixture import GaussianMixture as Peer
from torch import Tensor

from blr_analysis.learning_rule import families as fam
from blr_analysis.learning_rule import inference as inf
from blr_analysis.learning_rule.inference import FactorAnalysis, GaussianMixtureEM

WINE = torch.from_numpy(load_wine().data)[:, :6]
CASES = [("full", 1e-6), ("diag", 1e-6), ("spherical", 1e-3)]
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::blr_analysis.learning_rule.inference.NotConverged"),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(data: Tensor, covariance: str, k: int, seed: int) -> fam.GaussianMixture:
    """K examples as means, unequal weights, and precisions on the scale of the data."""
    generator = seeded(seed)
    means = data[torch.randperm(len(data), generator=generator)[:k]]
    precision = (1 + torch.rand(k, 1, generator=generator, dtype=data.dtype)) / data.var(0)
    if covariance == "spherical":
        precision = precision.mean(1, keepdim=True).expand_as(precision)
    weights = torch.rand(k, generator=generator, dtype=data.dtype) + 1
    if covariance == "full":
        components = fam.FullGaussian(means, torch.diag_embed(precision))
    else:
        components = fam.DiagonalGaussian(means, precision)
    return fam.GaussianMixture(weights / weights.sum(), components)


def covariances(q: fam.GaussianMixture, covariance: str) -> np.ndarray:
    parts = q.components
    if isinstance(parts, fam.FullGaussian):
        return parts.covariance.numpy()
    variances = (1 / parts.precision).numpy()
    return variances[:, 0] if covariance == "spherical" else variances


@pytest.mark.parametrize(("covariance", "floor"), CASES)
@pytest.mark.parametrize(("data", "k"), [(IRIS, 3), (WINE, 2), (IRIS, 4)])
def test_every_iteration_equals_scikit_learn(
    data: Tensor, k: int, covariance: str, floor: float
) -> None:
    start = started(data, covariance, k, seed=k)
    steps = 25
    precision = start.components.precision.numpy()
    peer = Peer(
        n_components=k,
        covariance_type=covariance,
        reg_covar=floor,
        tol=0,
        max_iter=steps,
        weights_init=start.weights.numpy(),
        means_init=start.components.mean.numpy(),
        precisions_init=precision[:, 0] if covariance == "spherical" else precision,
    ).fit(data.numpy())
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
    start = started(IRIS, "full", 3, seed=1)
    steps = 12
    size = 40

    def rho(t: int) -> float:
        return (t + 1) ** -0.6

    draw = seeded(5)
    model = GaussianMixtureEM(3, floor=0.01)
    settings = {"rho": rho, "batch": size, "max_iter": steps}
    fitted = model.fit(IRIS, start=start, generator=seeded(5), **settings)
    weights = start.weights.numpy()
    means = start.components.mean.numpy()
    covs = start.components.covariance.numpy()
    count = weights.copy()
    linear = weights[:, None] * means
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
        weights = count / count.sum()
        means = linear / count[:, None]
        covs = square / count[:, None, None] - means[:, :, None] * means[:, None]
        covs = covs + 0.01 * np.eye(4)
    assert not fitted.converged
    np.testing.assert_allclose(fitted.q.weights, weights, rtol=1e-9)
    np.testing.assert_allclose(fitted.q.components.mean, means, rtol=1e-9)
    np.testing.assert_allclose(covariances(fitted.q, "full"), covs, rtol=1e-6, atol=1e-9)


def test_generalised_em_rises_in_smaller_steps_to_the_same_rest() -> None:
    start = started(WINE, "diag", 2, seed=2)
    model = GaussianMixtureEM(2, "diag", floor=1e-9)
    whole = model.fit(WINE, start=start, rho=1.0, tol=1e-10)
    part = model.fit(WINE, start=start, rho=0.4, tol=1e-10)
    assert whole.converged
    assert part.converged
    assert np.diff(part.history).min() > -1e-9
    assert part.history[-1] == pytest.approx(whole.history[-1], abs=1e-5)
    assert part.history[1] < whole.history[1]
    expected = whole.without([0, 5]).components.mean
    actual = part.without([0, 5]).components.mean
    expected = expected[expected[:, 0].argsort()]
    actual = actual[actual[:, 0].argsort()]
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


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
        reference = np.cov(IRIS[keep].T, bias=True, aweights=weights[:, k])
        reference = reference + 1e-6 * np.eye(4)
        if covariance == "diag":
            reference = reference.diagonal()
        if covariance == "spherical":
            reference = reference.diagonal().mean()
        np.testing.assert_allclose(covariances(q, covariance)[k], reference, rtol=1e-9)


# Factor analysis against scikit-learn's, probabilistic PCA against its closed form.


def test_factor_analysis_against_scikit_learn() -> None:
    y = (WINE - WINE.mean(0)) / WINE.std(0)
    fitted = FactorAnalysis(2).fit(y, progress=False)
    theirs = Sklearns(2, tol=1e-12, max_iter=20000, svd_method="lapack").fit(y.numpy())
    assert fitted.converged
    assert fitted.history[-1] / len(y) == pytest.approx(theirs.score(y.numpy()), abs=1e-5)
    actual = torch.linalg.inv(fitted.q.marginal.precision)
    torch.testing.assert_close(actual, torch.tensor(theirs.get_covariance()), rtol=0, atol=2e-3)
    z = torch.tensor(theirs.transform(y.numpy()))
    # W has any rotation
    gram = fitted.factors(y) @ fitted.factors(y).mT
    reference = z @ z.mT
    assert (gram - reference).norm() < 1e-2 * reference.norm()


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


class SameStart(BayesianPeer):
    """scikit-learn's mixture, started from responsibilities."""

    def _initialize_parameters(self, X, random_state, xp=None) -> None:
        self._initialize(X, self.start)


def model_of(k: int, size: int) -> inf.BayesianGaussianMixture:
    root = draws(size, size, seed=3)
    rate = root @ root.mT + torch.eye(size, dtype=F64)
    component = fam.NormalWishart(
        3 * torch.ones(size, dtype=F64), 0.3 * ONE, (size + 1.5) * ONE, rate
    )
    return inf.BayesianGaussianMixture(fam.Dirichlet(torch.full((k,), 0.7, dtype=F64)), component)


def soft(n: int, k: int, seed: int) -> Tensor:
    return torch.softmax(2 * draws(n, k, seed=seed), 1)


def close(actual: Tensor, reference: np.ndarray) -> None:
    np.testing.assert_allclose(actual, reference.reshape(actual.shape), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("iterations", [1, 4, 40])
@pytest.mark.parametrize(("k", "columns", "seed"), [(3, 4, 0), (5, 4, 1), (2, 1, 2), (4, 2, 3)])
def test_message_passing_equals_scikit_learn(
    k: int, columns: int, seed: int, iterations: int
) -> None:
    data = IRIS[:, :columns]
    model = model_of(k, columns)
    start = soft(150, k, seed)
    prior = model.component
    peer = SameStart(
        n_components=k,
        reg_covar=0,
        tol=0,
        max_iter=iterations,
        degrees_of_freedom_prior=float(prior.dof),
        weight_concentration_prior_type="dirichlet_distribution",
        weight_concentration_prior=0.7,
        mean_prior=prior.mean.numpy(),
        mean_precision_prior=float(prior.kappa),
        covariance_prior=prior.rate.numpy(),
    )
    peer.start = start.numpy()
    peer.fit(data.numpy())
    fitted = model.fit(data, start=start, max_iter=iterations, tol=0)
    assert len(fitted.history) >= min(iterations, 10)
    nodes = fitted.q["components"]
    rate = peer.covariances_ * peer.degrees_of_freedom_[:, None, None]
    close(fitted.q["weights"].concentration, peer.weight_concentration_)
    close(nodes.mean, peer.means_)
    close(nodes.kappa, peer.mean_precision_)
    close(nodes.dof, peer.degrees_of_freedom_)
    close(nodes.rate, rate)
    close(fitted.responsibilities(data), peer.predict_proba(data.numpy()))


def test_the_bound_rises_and_stays_below_the_evidence() -> None:
    """Six examples in two classes: the evidence is a sum over all 2⁶ assignments."""
    data = IRIS[[0, 1, 60, 61, 120, 121], :2]
    model = model_of(2, 2)
    of_class = inf.Conjugate(model.component, inf.gaussian())
    terms = []
    for classes in itertools.product([0, 1], repeat=6):
        chosen = torch.tensor(classes)
        counts = torch.bincount(chosen, minlength=2).double()
        gain = fam.Dirichlet(model.weights.concentration + counts).log_partition()
        term = float(gain - model.weights.log_partition())
        term += sum(of_class.fit(data[chosen == k]).history[0] for k in (0, 1) if counts[k])
        terms.append(term)
    evidence = float(torch.tensor(terms, dtype=F64).logsumexp(0))
    fits = [model.fit(data, start=soft(6, 2, seed), tol=1e-10) for seed in range(8)]
    assert {fitted.objective for fitted in fits} == {"ELBO"}
    assert all(fitted.converged for fitted in fits)
    best = max(fitted.history[-1] for fitted in fits)
    assert best < evidence < best + 2


def test_the_predictive_is_a_mixture_of_students() -> None:
    fitted = model_of(3, 4).fit(IRIS, start=soft(150, 3, 5))
    weights = fitted.q["weights"].mean
    nodes = fitted.q["components"]
    reference = 0.0
    for k in range(3):
        dof = float(nodes.dof[k]) - 3
        shape = nodes.rate[k] * (1 + 1 / nodes.kappa[k]) / dof
        density = multivariate_t(nodes.mean[k].numpy(), shape.numpy(), dof).pdf(IRIS.numpy())
        reference = reference + float(weights[k]) * density
    np.testing.assert_allclose(fitted.log_predictive(IRIS), np.log(reference), rtol=1e-9)


def test_priors_for_the_data_are_scikit_learns() -> None:
    peer = SameStart(
        n_components=3, weight_concentration_prior_type="dirichlet_distribution", reg_covar=0
    )
    peer.start = soft(150, 3, 0).numpy()
    peer.fit(IRIS.numpy())
    model = inf.BayesianGaussianMixture.for_data(IRIS, 3)
    assert float(model.weights.concentration[0]) == pytest.approx(peer.weight_concentration_prior_)
    np.testing.assert_allclose(model.component.mean, peer.mean_prior_)
    assert float(model.component.kappa) == peer.mean_precision_prior_
    assert float(model.component.dof) == peer.degrees_of_freedom_prior_
    np.testing.assert_allclose(model.component.rate, peer.covariance_prior_)


# Message passing: chains against the sum over all paths, mixtures against their own code.


def chain() -> tuple[inf.HiddenMarkov, Tensor, inf.Fitted]:
    generator = torch.Generator().manual_seed(3)
    rates = torch.tensor([[1.0, 1, 6, 6, 6], [6, 1, 1, 1, 1], [1, 1, 1, 6, 6]])
    data = torch.poisson(rates, generator=generator).double()
    model = inf.HiddenMarkov(2, inf.poisson(), fam.Gamma(ONE, 0.5 * ONE), concentration=0.8)
    seed = torch.Generator().manual_seed(0)
    return model, data, model.fit(data, generator=seed, tol=1e-12, progress=False)


def expected_log(concentration: Tensor) -> Tensor:
    """E[log π] under a Dirichlet."""
    return concentration.digamma() - concentration.sum(-1, keepdim=True).digamma()


def every_path(q: dict, data: Tensor) -> tuple[Tensor, dict, Tensor]:
    """By enumeration of all paths: log-normalisers, expected counts and classes of all series."""
    start = expected_log(q["initial"].concentration)
    moves = expected_log(q["transition"].concentration)
    a = q["emission"].shape
    b = q["emission"].rate
    logs = []
    starts = torch.zeros(2).double()
    counts = torch.zeros(2, 2).double()
    classes = torch.zeros(*data.shape, 2).double()
    for s, y in enumerate(data):
        log_emissions = y[:, None] * (a.digamma() - b.log()) - a / b - (y[:, None] + 1).lgamma()
        paths = list(itertools.product(range(2), repeat=len(y)))
        weights = torch.stack([log_weight(path, start, moves, log_emissions) for path in paths])
        logs.append(torch.logsumexp(weights, 0))
        for path, p in zip(paths, torch.softmax(weights, 0), strict=True):
            starts[path[0]] += p
            for t, k in enumerate(path):
                classes[s, t, k] += p
            for k, j in itertools.pairwise(path):
                counts[k, j] += p
    return torch.stack(logs), {"initial": starts, "transition": counts}, classes


def log_weight(path: tuple, start: Tensor, moves: Tensor, log_emissions: Tensor) -> Tensor:
    """The unnormalised log-probability of a path of classes."""
    emissions = sum(log_emissions[t, k] for t, k in enumerate(path))
    transitions = sum(moves[k, j] for k, j in itertools.pairwise(path))
    return start[path[0]] + emissions + transitions


def test_a_chain_against_the_sum_over_all_paths() -> None:
    model, data, fitted = chain()
    logs, counts, classes = every_path(fitted.q, data)
    mu = {name: node.expectation for name, node in fitted.q.items()}
    torch.testing.assert_close(model.local(mu, data), logs)
    for name, counted in counts.items():
        torch.testing.assert_close(fitted.sites[name]["log"].sum(0), counted)
    torch.testing.assert_close(fitted.states(data), classes)
    # at the fixed point: λ_0 + Σ λ̃_i, and sites that add up to it
    expected = 0.8 + counts["transition"]
    torch.testing.assert_close(fitted["transition"].concentration, expected, rtol=1e-5, atol=1e-5)
    shape = 1 + (classes * data.unsqueeze(-1)).sum((0, 1))
    torch.testing.assert_close(fitted["emission"].shape, shape, rtol=1e-5, atol=1e-5)
    elbo = logs.sum() - sum(q.kl(fitted.prior[n]).sum() for n, q in fitted.q.items())
    assert fitted.history[-1] == pytest.approx(float(elbo), abs=1e-6)


def exact_predictive(q: dict, series: Tensor) -> Tensor:
    """log ∫ p(y | θ) q(θ) dθ: Pólya's urns and gamma-Poisson counts, summed over all paths."""
    terms = []
    for path in itertools.product(range(2), repeat=len(series)):
        moves = torch.zeros(2, 2).double()
        states = torch.eye(2).double()[list(path)]
        for k, j in itertools.pairwise(path):
            moves[k, j] += 1
        sites = {
            "initial": {"log": states[0]},
            "transition": {"log": moves},
            "emission": {"log": states.mT @ series, "linear": -states.sum(0)},
        }
        term = -torch.lgamma(series + 1).sum()
        for name, node in q.items():
            after = node.with_natural({k: v + sites[name][k] for k, v in node.natural.items()})
            term = term + (after.log_partition() - node.log_partition()).sum()
        terms.append(term)
    return torch.logsumexp(torch.stack(terms), 0)


def test_what_is_foretold_is_a_close_bound() -> None:
    """It lies below the sum over all paths and above the bound with θ's average."""
    model, _, fitted = chain()
    new = torch.tensor([[6, 5, 1, 0], [0, 1, 7, 6]])
    actual = fitted.log_predictive(new)
    exact = torch.stack([exact_predictive(fitted.q, y) for y in new.double()])
    loose = model.local({n: q.expectation for n, q in fitted.q.items()}, new.double())
    assert (loose < actual).all()
    assert (actual < exact).all()
    assert (exact - actual).max() < 0.2 * (exact - loose).min()
