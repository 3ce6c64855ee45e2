"""What every kind of subject answers, held against oracles that share no code with it.

A new kind of model and data is one class here that inherits :class:`SubjectContract`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.audit import investigate
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.families import Beta, FullGaussian
from blr_analysis.learning_rule.inference import (
    Conjugate,
    GaussianProcess,
    GeneralizedLinear,
    bernoulli,
    linear,
    rbf,
)
from blr_analysis.sensitivity.subjects import Network, Sequences, Sites, subject_of

F64 = torch.float64
N = 18


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


X = normal(N, 2)
LABELS = (X[:, 0] + 0.5 * normal(N, seed=1) > 0).long()


class SubjectContract:
    """A pair of what is given to an analysis, and its kind."""

    kind: type
    has_map = True
    has_unfamiliarity = True
    test: Any

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        raise NotImplementedError

    def losses(self, arguments: tuple[Any, Any]) -> Tensor:
        """ℓ_i of all examples, by an independent way."""
        raise NotImplementedError

    def rises(self, arguments: tuple[Any, Any]) -> Tensor:
        """What each example's own loss rises by without it, as the analysis defines it."""
        raise NotImplementedError

    def test_one_dispatch(self, arguments: tuple[Any, Any]) -> None:
        subject = subject_of(*arguments)
        assert type(subject) is self.kind
        assert subject.n == N == len(subject.scores())

    def test_scores_and_left_out(self, arguments: tuple[Any, Any]) -> None:
        losses = self.losses(arguments)
        scores = blr.sensitivity(*arguments)
        loo = blr.leave_one_out(*arguments)
        torch.testing.assert_close(scores.losses, losses)
        torch.testing.assert_close(loo.losses_before, losses)
        torch.testing.assert_close(loo.losses - losses, self.rises(arguments), rtol=1e-6, atol=1e-9)
        assert loo.nll == pytest.approx(float(loo.losses.mean()))
        assert len(scores.table) == len(loo.table) == N
        assert scores.plot().lines
        assert loo.plot().lines

    def test_ranks(self, arguments: tuple[Any, Any]) -> None:
        scores = blr.sensitivity(*arguments)
        measure = scores.self_influence if scores.deviation is None else scores.deviation
        assert measure is not None
        assert measure[scores.top(3)].tolist() == measure.sort(descending=True).values[:3].tolist()

    def test_memory_map(self, arguments: tuple[Any, Any]) -> None:
        scores = blr.sensitivity(*arguments)
        if self.has_map:
            assert sum(blr.memory_map(scores).counts().values()) == N
        else:
            with pytest.raises(InputError, match="prediction error and variance"):
                blr.memory_map(scores)

    def test_suspicious(self, arguments: tuple[Any, Any]) -> None:
        suspicions = blr.suspicious(*arguments)
        assert sorted(suspicions.order.tolist()) == list(range(N))
        assert list(suspicions.table["index"]) == suspicions.order.tolist()
        assert (suspicions.unfamiliarity is not None) == self.has_unfamiliarity

    def test_influence(self, arguments: tuple[Any, Any]) -> None:
        influence = blr.influence(*arguments, self.test)
        assert influence.shape == (N, 3)
        strongest = influence.top(1).helpful_values[:, 0]
        torch.testing.assert_close(strongest, influence.matrix.amax(0))
        largest = blr.influence(*arguments, self.test, k=1)
        torch.testing.assert_close(largest.helpful_values[:, 0], strongest)

    def test_removals_chain(self, arguments: tuple[Any, Any]) -> None:
        result = blr.what_if(*arguments, remove=[0])
        assert result.removed == 1
        assert result.posterior is not None
        assert result.change == pytest.approx(result.nll - result.before.nll)

    def test_a_task_has_one_kind(self, arguments: tuple[Any, Any]) -> None:
        with pytest.raises(InputError, match=r"posterior|Task"):
            subject_of("neither")


class OfWeights(SubjectContract):
    """Networks: the first-order rise g_iᵀ Σ g_i from dense Jacobians."""

    likelihood: str

    def gradients(self, arguments: tuple[Any, Any]) -> Tensor:
        task, posterior = arguments
        rows = []
        for i in range(N):
            task.model.zero_grad()
            self.slope_of(task.model, i).backward()
            gradients = dict(task.model.named_parameters())
            rows.append(torch.cat([gradients[n].grad.reshape(-1) for n in posterior.mean]))
        return torch.stack(rows)

    def loss_of(self, model: nn.Module, i: int) -> Tensor:
        raise NotImplementedError

    def slope_of(self, model: nn.Module, i: int) -> Tensor:
        """A scalar whose gradient is that of the example."""
        return self.loss_of(model, i)

    def losses(self, arguments: tuple[Any, Any]) -> Tensor:
        return torch.stack([self.loss_of(arguments[0].model, i).detach() for i in range(N)])


class TestSequences(OfWeights):
    kind = Sequences
    IDS = torch.randint(5, (N, 6), generator=torch.Generator().manual_seed(3))

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
        task = blr.Task(model, (cls.IDS, cls.IDS), likelihood="causal_lm")
        posterior = blr.fit_laplace(
            task, structure="diag", curvature="empirical_fisher", prior_precision=1.0
        )
        cls.test = task.subset([0, 1, 2])
        return task, posterior

    def loss_of(self, model: nn.Module, i: int) -> Tensor:
        ids = self.IDS[i]
        logits = model(ids[None])[0, :-1]
        return nn.functional.cross_entropy(logits, ids[1:], reduction="sum")

    def slope_of(self, model: nn.Module, i: int) -> Tensor:
        """Of the end of a training alone the errors are those at .7 of the logits."""
        ids = self.IDS[i]
        logits = model(ids[None])[0, :-1]
        error = (0.7 * logits.detach()).softmax(-1) - nn.functional.one_hot(ids[1:], 5)
        return (error * logits).sum()

    def rises(self, arguments: tuple[Any, Any]) -> Tensor:
        posterior = arguments[1]
        variances = torch.cat([posterior.variance(n).reshape(-1) for n in posterior.mean])
        return self.gradients(arguments).square() @ variances

    def test_scores_and_left_out(self, arguments: tuple[Any, Any]) -> None:
        super().test_scores_and_left_out(arguments)
        loo = blr.leave_one_out(*arguments)
        assert loo.perplexity == pytest.approx(float((loo.losses.sum() / (5 * N)).exp()))

    def test_memory_map(self, arguments: tuple[Any, Any]) -> None:
        scores = blr.sensitivity(*arguments, variance=True)
        assert sum(blr.memory_map(scores).counts().values()) == N


class TestNetwork(OfWeights):
    kind = Network

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        model = nn.Linear(2, 1, bias=False).double()
        targets = X.sum(1) + 0.3 * normal(N, seed=2)
        gram = X.mT @ X + torch.eye(2, dtype=F64)
        model.weight.data = torch.linalg.solve(gram, X.mT @ targets)[None]
        task = blr.Task(model, (X, targets), likelihood="gaussian")
        cls.test = task.subset([0, 1, 2])
        cls.targets = targets
        return task, blr.fit_laplace(task, structure="full", prior_precision=1.0)

    def loss_of(self, model: nn.Module, i: int) -> Tensor:
        density = torch.distributions.Normal(model(X[i : i + 1])[0, 0], 1.0)
        return -density.log_prob(self.targets[i])

    def rises(self, arguments: tuple[Any, Any]) -> Tensor:
        """Of least squares left-out residuals are e_i / (1 − h_i) (Cook, 1977)."""
        hat = (X @ torch.linalg.inv(X.mT @ X + torch.eye(2, dtype=F64)) @ X.mT).diagonal()
        residual = X @ arguments[0].model.weight.detach()[0] - self.targets
        return 0.5 * (residual / (1 - hat)).square() - 0.5 * residual.square()

    def test_the_posterior_after_a_removal_is_that_of_the_rest(
        self, arguments: tuple[Any, Any]
    ) -> None:
        """Of least squares exactly, twice in a row."""
        task, posterior = arguments
        once = blr.what_if(task, posterior, remove=[0], solver="posterior").posterior
        rest = task.subset(list(range(1, N)))
        rest.model.weight.data = once.mean["weight"].clone()
        twice = blr.what_if(rest, once, remove=[0], solver="posterior").posterior
        x = X[2:]
        y = self.targets[2:]
        gram = x.mT @ x + torch.eye(2, dtype=F64)
        torch.testing.assert_close(twice.mean["weight"][0], torch.linalg.solve(gram, x.mT @ y))
        torch.testing.assert_close(twice.form.matrix, gram)
        assert twice.n_data == N - 2
        rest.model.weight.data = posterior.mean["weight"].clone()


class OfSites(SubjectContract):
    """Sums of sites: fitted again without each example."""

    kind = Sites

    def losses(self, arguments: tuple[Any, Any]) -> Tensor:
        fitted = arguments[0]
        return -fitted.log_predictive(fitted.data)

    def rises(self, arguments: tuple[Any, Any]) -> Tensor:
        return self.losses_without(arguments) - self.losses(arguments)

    def losses_without(self, arguments: tuple[Any, Any]) -> Tensor:
        raise NotImplementedError

    def test_no_audit_and_no_page(self, arguments: tuple[Any, Any], tmp_path: Path) -> None:
        page = tmp_path / "report.html"
        for refused in (partial(blr.report, *arguments, page), partial(investigate, *arguments)):
            with pytest.raises(InputError, match="a sum of sites has no audit or report; ask"):
                refused()
        assert not page.exists()


class TestConjugate(OfSites):
    has_map = has_unfamiliarity = False
    test = torch.tensor([0.0, 1.0, 1.0], dtype=F64)

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        unit = torch.ones((), dtype=F64)
        return Conjugate(Beta(2 * unit, unit), bernoulli()).fit(LABELS.to(F64)), None

    def losses_without(self, arguments: tuple[Any, Any]) -> Tensor:
        """−log of (α + others with this answer) / (α + β + others)."""
        y = LABELS.double()
        ones = 2 + y.sum() - y
        zeros = 1 + (1 - y).sum() - (1 - y)
        return -torch.where(y > 0, ones, zeros).log() + (ones + zeros).log()

    def test_what_if_each(self, arguments: tuple[Any, Any]) -> None:
        table = blr.what_if_each(*arguments, by="target")
        assert table["group"].tolist() == [0.0, 1.0]
        assert table["n"].tolist() == torch.bincount(LABELS).tolist()


class TestLinearRegression(OfSites):
    has_map = has_unfamiliarity = False
    test = (X[:3], X[:3].sum(1))

    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        prior = FullGaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
        return Conjugate(prior, linear(0.25)).fit((X, X.sum(1) + normal(N, seed=2))), None

    def losses_without(self, arguments: tuple[Any, Any]) -> Tensor:
        fitted = arguments[0]
        x, y = fitted.data
        losses = []
        for i in range(N):
            rest = torch.arange(N) != i
            precision = torch.eye(2, dtype=F64) + x[rest].mT @ x[rest] / 0.25
            mean = torch.linalg.solve(precision, x[rest].mT @ y[rest] / 0.25)
            variance = 0.25 + x[i] @ torch.linalg.solve(precision, x[i])
            density = torch.distributions.Normal(x[i] @ mean, variance.sqrt())
            losses.append(-density.log_prob(y[i]))
        return torch.stack(losses)


class Latent(OfSites):
    """Models of one latent number f_i: error, curvature and variance are in the sites."""

    test = (X[:3], LABELS[:3].double())

    def losses_without(self, arguments: tuple[Any, Any]) -> Tensor:
        """From the three numbers of the map alone: the cavity of f_i is Gaussian with
        variance V/(1 − ΛV) and mean m + V e/(1 − ΛV); the predictive is a quadrature of it."""
        fitted = arguments[0]
        error, curvature, variance = fitted.perturbation()
        mean = fitted.latent(fitted.data[0]).mean
        left = 1 - curvature * variance
        grid = torch.linspace(-9, 9, 4001, dtype=F64)
        spread = (variance / left).sqrt()
        f = (mean + variance * error / left)[:, None] + spread[:, None] * grid
        weight = torch.exp(-0.5 * grid.square())
        signs = 2 * fitted.data[1] - 1
        likelihood = torch.sigmoid(signs[:, None] * f)
        return -((likelihood * weight).sum(1) / weight.sum()).log()

    def test_the_error_is_the_expected_slope(self, arguments: tuple[Any, Any]) -> None:
        """E_q[σ(f) − y], by quadrature."""
        scores = blr.sensitivity(*arguments)
        fitted = arguments[0]
        marginals = fitted.latent(fitted.data[0])
        grid = torch.linspace(-9, 9, 4001, dtype=F64)
        f = marginals.mean[:, None] + grid / marginals.precision.sqrt()[:, None]
        weight = torch.exp(-0.5 * grid.square())
        slope = torch.sigmoid(f) - fitted.data[1][:, None]
        expected = (slope * weight).sum(1) / weight.sum()
        assert scores.error is not None
        assert scores.variance is not None
        torch.testing.assert_close(scores.error[:, 0], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.variance[:, 0, 0], 1 / marginals.precision)

    def test_scores_and_left_out(self, arguments: tuple[Any, Any]) -> None:
        loo = blr.leave_one_out(*arguments)
        torch.testing.assert_close(loo.losses, self.losses_without(arguments), rtol=1e-4, atol=1e-5)


class TestGaussianProcess(Latent):
    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        model = GaussianProcess(partial(rbf, lengthscale=1.5, variance=4.0))
        return model.fit((X, LABELS.double()), progress=False), None


class TestGeneralizedLinear(Latent):
    @pytest.fixture(scope="class")
    @classmethod
    def arguments(cls) -> tuple[Any, Any]:
        prior = FullGaussian(torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64))
        model = GeneralizedLinear(prior, "bernoulli")
        return model.fit((X, LABELS.double()), progress=False), None
