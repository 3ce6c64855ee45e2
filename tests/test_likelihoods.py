"""The four likelihoods against torch.distributions and automatic differentiation, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import relative
from parts import normal
from torch import Tensor
from torch import distributions as d

from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods import (
    BY_NAME,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MeanAndVariance,
    Poisson,
    resolve,
)

KINDS = (Categorical(), Bernoulli(), Gaussian(), Gaussian(0.3), Poisson())
every = pytest.mark.parametrize("likelihood", KINDS, ids=repr)
N, C = 6, 3


def distribution(likelihood: Likelihood, f: Tensor) -> d.Distribution:
    """What torch.distributions calls p(y | f), one event per example."""
    if isinstance(likelihood, Categorical):
        return d.Categorical(logits=f)
    kinds = {
        "bernoulli": lambda: d.Bernoulli(logits=f),
        "gaussian": lambda: d.Normal(f, math.sqrt(getattr(likelihood, "variance", 1.0))),
        "poisson": lambda: d.Poisson(f.exp()),
    }
    return d.Independent(kinds[likelihood.name](), 1)


def targets_of(likelihood: Likelihood) -> Tensor:
    """Some of every kind of target."""
    if isinstance(likelihood, Categorical):
        return torch.arange(N) % C
    if isinstance(likelihood, Gaussian):
        return normal(N, C, seed=9)
    return torch.arange(N * C).view(N, C).double() % (2 if likelihood.name == "bernoulli" else 5)


@every
def test_loss_is_the_negative_log_density(likelihood: Likelihood) -> None:
    f, y = 2 * normal(N, C), targets_of(likelihood)
    truth = -distribution(likelihood, f).log_prob(y)
    assert likelihood.nll(f, y).shape == (N,)
    assert relative(likelihood.nll(f, y), truth) < 1e-12


@every
def test_error_and_hessian_are_the_losss_derivatives(likelihood: Likelihood) -> None:
    f, y = 2 * normal(N, C), targets_of(likelihood)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return -distribution(likelihood, output.unsqueeze(0)).log_prob(target.unsqueeze(0)).sum()

    error = torch.stack([torch.func.grad(loss)(f[i], y[i]) for i in range(N)])
    hessian = torch.stack([torch.func.hessian(loss)(f[i], y[i]) for i in range(N)])
    assert relative(likelihood.error(f, y), error) < 1e-12
    assert relative(likelihood.hessian(f, y), hessian) < 1e-12
    root = likelihood.hessian_root(f, y)
    assert relative(root @ root.mT, hessian) < 1e-12


@every
def test_mean_is_the_distributions(likelihood: Likelihood) -> None:
    f = 2 * normal(N, C)
    p = distribution(likelihood, f)
    truth = p.probs if isinstance(p, d.Categorical) else p.mean
    assert relative(likelihood.mean(f), truth) < 1e-12


@every
def test_error_vanishes_on_average_and_its_covariance_is_the_hessian(likelihood) -> None:
    """E[e] = 0 and E[e eᵀ] = Λ (or Λ again after the Gaussian's division by σ²)."""
    f = normal(1, C).expand(200_000, C)
    y = likelihood.sample(f, torch.Generator().manual_seed(0))
    y = likelihood.prepare_targets(y, f)
    e = likelihood.error(f, y)
    hessian = likelihood.hessian(f[:1], y[:1])[0]
    spread = e.std(0) / len(e) ** 0.5
    assert float((e.mean(0) / spread).abs().max()) < 4
    products = e.unsqueeze(-1) * e.unsqueeze(-2)
    spread = products.std(0) / len(e) ** 0.5
    assert float(((products.mean(0) - hessian) / spread.clamp_min(1e-12)).abs().max()) < 4.5


@every
def test_samples_are_targets_and_come_from_the_generator(likelihood: Likelihood) -> None:
    f = normal(N, C)
    one, two, other = (likelihood.sample(f, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    before = torch.get_rng_state()
    likelihood.sample(f, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), before)
    prepared = likelihood.prepare_targets(one, f)
    assert torch.isfinite(likelihood.nll(f, prepared)).all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_keeps_the_outputs_dtype(likelihood: Likelihood, dtype: torch.dtype) -> None:
    f = normal(N, C).to(dtype)
    y = likelihood.prepare_targets(targets_of(likelihood), f)
    for found in (
        likelihood.error(f, y),
        likelihood.hessian(f, y),
        likelihood.hessian_root(f, y),
        likelihood.nll(f, y),
        likelihood.mean(f),
    ):
        assert found.dtype == dtype


@pytest.mark.parametrize("ask", ["nll", "error", "hessian", "hessian_times"])
@pytest.mark.parametrize("likelihood", KINDS[1:], ids=repr)
def test_targets_that_would_broadcast_are_refused(likelihood: Likelihood, ask: str) -> None:
    f = normal(N, 1)
    vectors = [f] if ask == "hessian_times" else []
    getattr(likelihood, ask)(f, torch.ones(N, 1).double(), *vectors)
    with pytest.raises(DataError, match="alike"):
        getattr(likelihood, ask)(f, torch.ones(N).double(), *vectors)


@pytest.mark.parametrize("ask", ["nll", "error"])
def test_so_are_those_of_means_and_variances(ask: str) -> None:
    with pytest.raises(DataError, match="alike"):
        getattr(MeanAndVariance(), ask)(normal(N, 2).abs(), torch.ones(N).double())


def test_a_column_of_classes_is_not_taken_for_shares() -> None:
    for ask in (Categorical().error, Categorical().hessian, Categorical(label_smoothing=0.1).error):
        with pytest.raises(DataError, match="alike"):
            ask(normal(N, C), torch.ones(N, 1, dtype=torch.long))


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()], ids=repr)
@pytest.mark.parametrize("size", [50.0, 800.0])
def test_confident_logits_give_finite_numbers(likelihood: Likelihood, size: float) -> None:
    f = torch.tensor([[size, -size], [-size, size]], dtype=torch.float64)
    y = torch.tensor([0, 0]) if isinstance(likelihood, Categorical) else torch.zeros(2, 2).double()
    for found in (likelihood.error(f, y), likelihood.hessian_root(f, y), likelihood.nll(f, y)):
        assert torch.isfinite(found).all()
    wrong = 2 * size if isinstance(likelihood, Categorical) else size
    assert float(likelihood.nll(f, y)[1]) == pytest.approx(wrong)


def test_predictions_and_who_is_right() -> None:
    f = torch.tensor([[2.0, 1.0], [-1.0, 3.0]])
    assert Categorical().prediction(f).tolist() == [0, 1]
    assert Categorical().correct(f, torch.tensor([0, 0])).tolist() == [True, False]
    assert Bernoulli().prediction(f).tolist() == [[1, 1], [0, 1]]
    labels = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert Bernoulli().correct(f, labels).tolist() == [True, False]
    one = torch.tensor([[0.3], [-0.3]])
    assert Bernoulli().prediction(one).tolist() == [1, 0]
    assert Gaussian().prediction(one).tolist() == pytest.approx([0.3, -0.3])
    assert Poisson().prediction(one).tolist() == pytest.approx([math.exp(0.3), math.exp(-0.3)])
    assert Gaussian().correct(one, one) is None
    assert Poisson().correct(one, one) is None


def test_distances() -> None:
    before, after = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
    assert float(Categorical().distance(before, after)) == pytest.approx(0.5)  # ¼ + ¼
    assert float(Bernoulli().distance(before, after)) == pytest.approx(0.25)
    assert float(Gaussian().distance(before, torch.tensor([[3.0, 4.0]]))) == pytest.approx(5.0)
    assert float(Poisson().distance(before, torch.tensor([[3.0, 4.0]]))) == pytest.approx(5.0)
    for likelihood in KINDS:
        assert float(likelihood.distance(after, after)) == 0


@pytest.mark.parametrize(
    ("likelihood", "targets", "prepared"),
    [
        (Categorical(), torch.tensor([0, 2], dtype=torch.uint8), torch.tensor([0, 2])),
        (Categorical(), torch.tensor([[0], [2]]), torch.tensor([0, 2])),
        (Bernoulli(), torch.tensor([[1, 0, 1], [0, 0, 1]]), [[1.0, 0, 1], [0, 0, 1]]),
        (Bernoulli(), torch.ones(2, 3, dtype=torch.bool), [[1.0] * 3] * 2),
        (Gaussian(), torch.ones(2, 3, dtype=torch.int32), [[1.0] * 3] * 2),
        (Poisson(), torch.full((2, 3), 7), [[7.0] * 3] * 2),
    ],
)
def test_targets_are_brought_into_form(likelihood, targets, prepared) -> None:
    outputs = torch.zeros(2, 3, dtype=torch.float64)
    found = likelihood.prepare_targets(targets, outputs)
    wanted = torch.as_tensor(prepared)
    assert torch.equal(found, wanted if likelihood.integer_targets else wanted.double())
    assert found.dtype == (torch.int64 if likelihood.integer_targets else torch.float64)


def test_targets_of_one_output_may_be_flat() -> None:
    outputs = torch.zeros(3, 1)
    for likelihood in (Bernoulli(), Gaussian(), Poisson()):
        found = likelihood.prepare_targets(torch.tensor([0, 1, 1]), outputs)
        assert found.tolist() == [[0.0], [1.0], [1.0]]


@pytest.mark.parametrize(
    ("likelihood", "targets", "message"),
    [
        (Categorical(), torch.tensor([0, 3]), r"0 … 2.*found 3"),
        (Categorical(), torch.tensor([0, -100]), "found -100"),
        (Categorical(), torch.tensor([0.0, 1.0]), r"integers.*float32.*y\.long"),
        (Categorical(), torch.tensor([True, False]), "integers"),
        (Categorical(), torch.eye(3)[:2].long(), "argmax"),
        (Bernoulli(), torch.full((2, 3), 2), "0 … 1"),
        (Bernoulli(), torch.full((2, 3), -0.5), "0 … 1"),
        (Bernoulli(), torch.zeros(2), r"\(2,\).*\(2, 3\)"),
        (Gaussian(), torch.zeros(2, 2), r"\(2, 2\).*\(2, 3\)"),
        (Gaussian(), torch.full((2, 3), float("nan")), "NaN"),
        (Gaussian(), torch.full((2, 3), float("inf")), "inf"),
        (Gaussian(), torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
        (Poisson(), torch.full((2, 3), -1), "counts"),
        (Poisson(), torch.full((2, 3), 0.5), "counts"),
    ],
)
def test_targets_out_of_the_support_are_refused(likelihood, targets, message: str) -> None:
    with pytest.raises(DataError, match=message):
        likelihood.prepare_targets(targets, torch.zeros(2, 3))


def test_resolve() -> None:
    assert {name: type(resolve(name)) for name in BY_NAME} == BY_NAME
    own = Gaussian(0.5)
    assert resolve(own) is own
    for wrong, word in (
        ("softmax", "'categorical'"),
        (None, "'categorical'"),
        (Gaussian, "call it"),
    ):
        with pytest.raises(InputError, match=word):
            resolve(wrong)  # type: ignore[arg-type]


def test_outputs_are_checked() -> None:
    with pytest.raises(DataError, match=r"\[batch, C\].*\(2, 3, 4\)"):
        Gaussian().check_outputs(torch.zeros(2, 3, 4))
    with pytest.raises(DataError, match='likelihood="bernoulli"'):
        Categorical().check_outputs(torch.zeros(2, 1))


@pytest.mark.parametrize("variance", [0, -1.0, float("nan"), float("inf"), "one", None])
def test_noise_must_be_a_positive_number(variance: object) -> None:
    with pytest.raises(InputError, match="variance"):
        Gaussian(variance)  # type: ignore[arg-type]
