"""Message passing: chains against the sum over all paths, mixtures against their own code."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.learning_rule.families import Dirichlet, Gamma, NormalWishart
from blr_analysis.learning_rule.inference import (
    BayesianGaussianMixture,
    HiddenMarkov,
    MessagePassing,
    gaussian,
    poisson,
)

ONE = torch.ones((), dtype=torch.float64)


def series() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    rates = torch.tensor([[1.0, 1, 6, 6, 6], [6, 1, 1, 1, 1], [1, 1, 1, 6, 6]])
    return torch.poisson(rates, generator=generator).double()


def chain() -> HiddenMarkov:
    return HiddenMarkov(2, poisson(), Gamma(ONE, 0.5 * ONE), concentration=0.8)


def every_path(model: HiddenMarkov, q: dict, data: Tensor) -> tuple[Tensor, dict, Tensor]:
    """By enumeration: log-normaliser, expected counts and classes of all series."""
    start = torch.digamma(q["initial"].concentration)
    start = start - torch.digamma(q["initial"].concentration.sum())
    rows = q["transition"].concentration
    moves = torch.digamma(rows) - torch.digamma(rows.sum(1, keepdim=True))
    a, b = q["emission"].shape, q["emission"].rate
    logs, starts, counts = [], torch.zeros(2).double(), torch.zeros(2, 2).double()
    classes = torch.zeros(*data.shape, 2).double()
    for s, y in enumerate(data):
        paths = list(itertools.product(range(2), repeat=len(y)))
        weights = []
        for path in paths:
            value = start[path[0]]
            for t, k in enumerate(path):
                value = value + y[t] * (torch.digamma(a[k]) - b[k].log()) - a[k] / b[k]
                value = value - torch.lgamma(y[t] + 1)
                if t:
                    value = value + moves[path[t - 1], k]
            weights.append(value)
        logs.append(torch.logsumexp(torch.stack(weights), 0))
        for path, p in zip(paths, torch.softmax(torch.stack(weights), 0), strict=True):
            starts[path[0]] += p
            for t, k in enumerate(path):
                classes[s, t, k] += p
                if t:
                    counts[path[t - 1], k] += p
    return torch.stack(logs), {"initial": starts, "transition": counts}, classes


def test_a_chain_against_the_sum_over_all_paths() -> None:
    model, data = chain(), series()
    fitted = model.fit(data, generator=torch.Generator().manual_seed(0), tol=1e-12, progress=False)
    logs, counts, classes = every_path(model, fitted.q, data)
    passing = MessagePassing(fitted.prior, model.local)
    messages, local = passing.messages(fitted.q, data)
    torch.testing.assert_close(local, logs)
    for name, counted in counts.items():
        torch.testing.assert_close(messages[name]["log"], counted)
    torch.testing.assert_close(fitted.states(data), classes)
    # at the fixed point: λ_0 + Σ λ̃_i, and sites that add up to it
    expected = 0.8 + counts["transition"]
    torch.testing.assert_close(fitted["transition"].concentration, expected, rtol=1e-5, atol=1e-5)
    shape = 1 + (classes * data.unsqueeze(-1)).sum((0, 1))
    torch.testing.assert_close(fitted["emission"].shape, shape, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fitted.sites["transition"]["log"].sum(0), counts["transition"])
    elbo = logs.sum() - sum(q.kl(fitted.prior[n]).sum() for n, q in fitted.q.items())
    assert fitted.history[-1] == pytest.approx(float(elbo), abs=1e-6)
    steps = torch.tensor(fitted.history).diff()
    assert bool((steps > -1e-9).all())


def exact_predictive(model: HiddenMarkov, q: dict, series: Tensor) -> Tensor:
    """log ∫ p(y | θ) q(θ) dθ: Pólya's urns and gamma-Poisson counts, summed over all paths."""
    terms = []
    for path in itertools.product(range(2), repeat=len(series)):
        moves = torch.zeros(2, 2).double()
        for k, j in itertools.pairwise(path):
            moves[k, j] += 1
        first = torch.eye(2).double()[path[0]]
        at = torch.tensor(path)
        sums = torch.stack([series[at == k].sum() for k in range(2)])
        visits = torch.stack([(at == k).sum() for k in range(2)])
        seen = {
            "initial": {"log": first},
            "transition": {"log": moves},
            "emission": {"log": sums, "linear": -visits.double()},
        }
        term = -torch.lgamma(series + 1).sum()
        for name, node in q.items():
            after = node.with_natural({k: v + seen[name][k] for k, v in node.natural.items()})
            term = term + (after.log_partition() - node.log_partition()).sum()
        terms.append(term)
    return torch.logsumexp(torch.stack(terms), 0)


def test_what_is_foretold_is_a_close_bound() -> None:
    """Below the sum over all paths, above the bound with θ's own average, and examples leave."""
    model, data = chain(), series()
    fitted = model.fit(data, generator=torch.Generator().manual_seed(0), tol=1e-12, progress=False)
    new = torch.tensor([[6, 5, 1, 0], [0, 1, 7, 6]])
    found = fitted.log_predictive(new)
    exact = torch.stack([exact_predictive(model, fitted.q, y) for y in new.double()])
    loose = model.local({n: q.expectation for n, q in fitted.q.items()}, new.double())
    assert bool((loose < found).all() and (found < exact).all())
    assert (exact - found).max() < 0.2 * (exact - loose).min()
    left = fitted.left_out()
    for i in range(3):
        one = MessagePassing(fitted.prior, model.local).log_predictive(
            fitted.without([i]), data[i : i + 1]
        )
        torch.testing.assert_close(left[i : i + 1], one)


def test_chains_of_length_one_are_a_mixture() -> None:
    """The same lower bound and nodes as variational message passing for mixtures finds."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(40, 2, generator=generator).double()
    y[:15] += 4
    start = torch.zeros(40, 2).double()
    start[:15, 0], start[15:, 1] = 1, 1
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


def test_minibatches_come_near() -> None:
    model, data = chain(), series().repeat(10, 1)
    g = torch.Generator().manual_seed(0)
    whole = model.fit(data, generator=g, progress=False)
    noisy = model.fit(
        data, generator=torch.Generator().manual_seed(0), progress=False, batch=6, max_iter=150,
        rho=lambda t: (t + 1) ** -0.7,
    )  # fmt: skip
    assert not noisy.converged
    found, wanted = (
        noisy["emission"].expected_point().sort().values,
        whole["emission"].expected_point().sort().values,
    )
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)


def test_bad_input() -> None:
    with pytest.raises(DataError):
        chain().fit(torch.ones(3))
    with pytest.raises(DataError):
        chain().fit(-torch.ones(3, 4))
    with pytest.raises(InputError):
        chain().fit(series(), batch=4)
    with pytest.raises(InputError):
        MessagePassing({}, lambda mu, y: y)
    with pytest.raises(InputError, match="differentiable"):
        MessagePassing({"rate": Gamma(ONE, ONE)}, lambda mu, y: y).fit(torch.ones(3))
    fitted = chain().fit(series(), progress=False, max_iter=3, tol=1e9)
    with pytest.raises(DataError, match="count"):
        list(fitted.refitted(add=series()[:1] + 0.5))
