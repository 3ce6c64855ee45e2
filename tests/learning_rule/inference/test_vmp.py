"""Variational message passing against scikit-learn's BayesianGaussianMixture; chains by all paths.

Its parameters are compared; the lower bound is held from below the evidence.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from learning_rule.inference.problems import F64, IRIS, ONE, draws
from scipy.stats import multivariate_t
from sklearn.mixture import BayesianGaussianMixture as Peer
from torch import Tensor

from blr_analysis.learning_rule.families import Dirichlet, Gamma, NormalWishart
from blr_analysis.learning_rule.inference import (
    BayesianGaussianMixture,
    Conjugate,
    Fitted,
    HiddenMarkov,
    gaussian,
    poisson,
)


class SameStart(Peer):
    """scikit-learn's mixture, started from responsibilities."""

    def _initialize_parameters(self, X, random_state, xp=None) -> None:
        self._initialize(X, self.start)


def model_of(k: int, size: int) -> BayesianGaussianMixture:
    root = draws(size, size, seed=3)
    rate = root @ root.mT + torch.eye(size, dtype=F64)
    component = NormalWishart(3 * torch.ones(size, dtype=F64), 0.3 * ONE, (size + 1.5) * ONE, rate)
    return BayesianGaussianMixture(Dirichlet(torch.full((k,), 0.7, dtype=F64)), component)


def soft(n: int, k: int, seed: int) -> Tensor:
    return torch.softmax(2 * draws(n, k, seed=seed), 1)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::blr_analysis.learning_rule.inference.NotConverged")
@pytest.mark.parametrize("iterations", [1, 4, 40])
@pytest.mark.parametrize(("k", "columns", "seed"), [(3, 4, 0), (5, 4, 1), (2, 1, 2), (4, 2, 3)])
def test_every_iteration_equals_scikit_learn(
    k: int, columns: int, seed: int, iterations: int
) -> None:
    data, model, start = IRIS[:, :columns], model_of(k, columns), soft(150, k, seed)
    prior = model.component
    peer = SameStart(
        n_components=k, reg_covar=0, tol=0, max_iter=iterations,
        degrees_of_freedom_prior=float(prior.dof),
        weight_concentration_prior_type="dirichlet_distribution", weight_concentration_prior=0.7,
        mean_prior=prior.mean.numpy(), mean_precision_prior=float(prior.kappa),
        covariance_prior=prior.rate.numpy(),
    )  # fmt: skip
    peer.start = start.numpy()
    peer.fit(data.numpy())
    fitted = model.fit(data, start=start, max_iter=iterations, tol=0)
    assert len(fitted.history) >= min(iterations, 10)
    nodes = fitted.q["components"]
    for found, wanted in (
        (fitted.q["weights"].concentration, peer.weight_concentration_),
        (nodes.mean, peer.means_),
        (nodes.kappa, peer.mean_precision_),
        (nodes.dof, peer.degrees_of_freedom_),
        (nodes.rate, peer.covariances_ * peer.degrees_of_freedom_[:, None, None]),
        (fitted.responsibilities(data), peer.predict_proba(data.numpy())),
    ):
        np.testing.assert_allclose(found, wanted.reshape(found.shape), rtol=1e-6, atol=1e-7)


def test_the_bound_rises_and_stays_below_the_evidence() -> None:
    """Six examples in two classes: the evidence is a sum over all 2⁶ assignments."""
    data, model = IRIS[[0, 1, 60, 61, 120, 121], :2], model_of(2, 2)
    of_class, terms = Conjugate(model.component, gaussian()), []
    for classes in itertools.product([0, 1], repeat=6):
        chosen = torch.tensor(classes)
        counts = torch.bincount(chosen, minlength=2).double()
        gain = Dirichlet(model.weights.concentration + counts).log_partition()
        term = float(gain - model.weights.log_partition())
        term += sum(of_class.fit(data[chosen == k]).history[0] for k in (0, 1) if counts[k])
        terms.append(term)
    evidence = float(torch.tensor(terms, dtype=F64).logsumexp(0))
    fits = [model.fit(data, start=soft(6, 2, seed), tol=1e-10) for seed in range(8)]
    assert all(fitted.objective == "ELBO" and fitted.converged for fitted in fits)
    best = max(fitted.history[-1] for fitted in fits)
    assert best < evidence < best + 2


def test_the_predictive_is_a_mixture_of_students() -> None:
    fitted = model_of(3, 4).fit(IRIS, start=soft(150, 3, 5))
    weights, nodes = fitted.q["weights"].mean, fitted.q["components"]
    wanted = 0.0
    for k in range(3):
        dof = float(nodes.dof[k]) - 3
        shape = nodes.rate[k] * (1 + 1 / nodes.kappa[k]) / dof
        density = multivariate_t(nodes.mean[k].numpy(), shape.numpy(), dof).pdf(IRIS.numpy())
        wanted = wanted + float(weights[k]) * density
    np.testing.assert_allclose(fitted.log_predictive(IRIS), np.log(wanted), rtol=1e-9)


def test_priors_for_the_data_are_scikit_learns() -> None:
    peer = SameStart(
        n_components=3, weight_concentration_prior_type="dirichlet_distribution", reg_covar=0
    )
    peer.start = soft(150, 3, 0).numpy()
    peer.fit(IRIS.numpy())
    model = BayesianGaussianMixture.for_data(IRIS, 3)
    assert float(model.weights.concentration[0]) == pytest.approx(peer.weight_concentration_prior_)
    np.testing.assert_allclose(model.component.mean, peer.mean_prior_)
    assert float(model.component.kappa) == peer.mean_precision_prior_
    assert float(model.component.dof) == peer.degrees_of_freedom_prior_
    np.testing.assert_allclose(model.component.rate, peer.covariance_prior_)


# Message passing: chains against the sum over all paths, mixtures against their own code.


def chain() -> tuple[HiddenMarkov, Tensor, Fitted]:
    generator = torch.Generator().manual_seed(3)
    rates = torch.tensor([[1.0, 1, 6, 6, 6], [6, 1, 1, 1, 1], [1, 1, 1, 6, 6]])
    data = torch.poisson(rates, generator=generator).double()
    model = HiddenMarkov(2, poisson(), Gamma(ONE, 0.5 * ONE), concentration=0.8)
    seed = torch.Generator().manual_seed(0)
    return model, data, model.fit(data, generator=seed, tol=1e-12, progress=False)


def every_path(q: dict, data: Tensor) -> tuple[Tensor, dict, Tensor]:
    """By enumeration: log-normaliser, expected counts and classes of all series."""
    start, moves = (
        c.digamma() - c.sum(-1, keepdim=True).digamma()
        for c in (q[name].concentration for name in ("initial", "transition"))
    )
    a, b = q["emission"].shape, q["emission"].rate
    logs, starts, counts = [], torch.zeros(2).double(), torch.zeros(2, 2).double()
    classes = torch.zeros(*data.shape, 2).double()
    for s, y in enumerate(data):
        told = y[:, None] * (a.digamma() - b.log()) - a / b - (y[:, None] + 1).lgamma()
        paths = list(itertools.product(range(2), repeat=len(y)))
        weights = torch.stack(
            [
                start[path[0]]
                + sum(told[t, k] for t, k in enumerate(path))
                + sum(moves[k, j] for k, j in itertools.pairwise(path))
                for path in paths
            ]
        )
        logs.append(torch.logsumexp(weights, 0))
        for path, p in zip(paths, torch.softmax(weights, 0), strict=True):
            starts[path[0]] += p
            for t, k in enumerate(path):
                classes[s, t, k] += p
            for k, j in itertools.pairwise(path):
                counts[k, j] += p
    return torch.stack(logs), {"initial": starts, "transition": counts}, classes


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
        moves, at = torch.zeros(2, 2).double(), torch.eye(2).double()[list(path)]
        for k, j in itertools.pairwise(path):
            moves[k, j] += 1
        seen = {
            "initial": {"log": at[0]},
            "transition": {"log": moves},
            "emission": {"log": at.mT @ series, "linear": -at.sum(0)},
        }
        term = -torch.lgamma(series + 1).sum()
        for name, node in q.items():
            after = node.with_natural({k: v + seen[name][k] for k, v in node.natural.items()})
            term = term + (after.log_partition() - node.log_partition()).sum()
        terms.append(term)
    return torch.logsumexp(torch.stack(terms), 0)


def test_what_is_foretold_is_a_close_bound() -> None:
    """Below the sum over all paths, above the bound with θ's own average, and examples leave."""
    model, _, fitted = chain()
    new = torch.tensor([[6, 5, 1, 0], [0, 1, 7, 6]])
    found = fitted.log_predictive(new)
    exact = torch.stack([exact_predictive(fitted.q, y) for y in new.double()])
    loose = model.local({n: q.expectation for n, q in fitted.q.items()}, new.double())
    assert bool((loose < found).all() and (found < exact).all())
    assert (exact - found).max() < 0.2 * (exact - loose).min()


def test_chains_of_length_one_are_a_mixture() -> None:
    """The same lower bound and nodes as variational message passing for mixtures finds."""
    start = torch.eye(2).double()[(torch.arange(40) >= 15).long()]
    y = draws(40, 2, seed=1) + 4 * start[:, :1]
    component = NormalWishart(y.mean(0), ONE, 3 * ONE, torch.eye(2).double())
    weights = Dirichlet(torch.full((2,), 0.7).double())
    theirs = BayesianGaussianMixture(weights, component).fit(y, start=start, tol=1e-13)
    model = HiddenMarkov(2, gaussian(), component, concentration=0.7)
    ours = model.fit(y.unsqueeze(1), start=start, tol=1e-13, progress=False)
    assert ours.history[-1] == pytest.approx(theirs.history[-1], abs=1e-7)
    found, wanted = ours["initial"].concentration, theirs["weights"].concentration
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours["emission"].mean, theirs["components"].mean)
    for name, other in (("initial", "weights"), ("emission", "components")):
        less = ours.without([0, 3])[name].natural
        for key, value in theirs.without([0, 3])[other].natural.items():
            torch.testing.assert_close(less[key], value, rtol=1e-5, atol=1e-5)
