"""The four likelihoods against torch.distributions and automatic differentiation, in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import relative
from parts import normal
from torch import Tensor, nn
from torch import distributions as d

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError
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
    assert root.shape[-1] == C - isinstance(likelihood, Categorical)  # what a GGN takes backward
    if (parts := likelihood.hessian_parts(f, y)) is not None:
        s, v = parts
        assert relative(s.diag_embed() - v.unsqueeze(-1) * v.unsqueeze(-2), hessian) < 1e-12


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


# The losses that people train with, against torch's own modules and autograd, in float64.


N, C = 8, 4
W = torch.tensor([0.5, 15.0, 1.0, 2.0], dtype=torch.float64)


def focal(f: Tensor, y: Tensor) -> Tensor:
    """Lin et al., 2017, with γ = 2."""
    logp = f.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
    return -((1 - logp.exp()) ** 2) * logp


def classes(seed: int = 3) -> Tensor:
    return torch.randint(C, (N,), generator=torch.Generator().manual_seed(seed))


def soft() -> Tensor:
    return normal(N, C, seed=5).softmax(-1)


def bits() -> Tensor:
    return (normal(N, C, seed=6) > 0).double()


def numbers() -> Tensor:
    return normal(N, C, seed=7)


def counts() -> Tensor:
    return torch.randint(6, (N, C), generator=torch.Generator().manual_seed(8)).double()


MODULES: list[tuple[nn.Module, Callable[[], Tensor]]] = [
    (nn.CrossEntropyLoss(), classes),
    (nn.CrossEntropyLoss(weight=W, reduction="sum"), classes),
    (nn.CrossEntropyLoss(label_smoothing=0.2), classes),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.2, ignore_index=1), classes),
    (nn.CrossEntropyLoss(reduction="none"), soft),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1), soft),
    (nn.NLLLoss(weight=W, ignore_index=2), classes),
    (nn.BCEWithLogitsLoss(), bits),
    (nn.BCEWithLogitsLoss(weight=W, pos_weight=W.flip(0)), bits),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0).double()), soft),
    (nn.MSELoss(), numbers),
    (nn.PoissonNLLLoss(), counts),
    (nn.PoissonNLLLoss(full=True), counts),
    (nn.HuberLoss(delta=0.7), numbers),
    (nn.BCELoss(), bits),
    (nn.PoissonNLLLoss(log_input=False), counts),
]
OWN_OUTPUTS = {
    nn.NLLLoss: lambda f: f.log_softmax(-1),
    nn.BCELoss: lambda f: f.sigmoid(),
}


def outputs_for(module: nn.Module) -> Tensor:
    f = 2 * normal(N, C)
    if isinstance(module, nn.PoissonNLLLoss) and not module.log_input:
        return f.exp()
    return OWN_OUTPUTS.get(type(module), lambda f: f)(f)


def each(module: nn.Module, f: Tensor, y: Tensor) -> Tensor:
    """torch's own loss of every example."""
    one = copy.copy(module)
    one.reduction = "sum"
    return torch.stack([one(f[i : i + 1], y[i : i + 1]) for i in range(len(f))])


@pytest.mark.parametrize(("module", "targets"), MODULES, ids=[str(m) for m, _ in MODULES])
def test_a_module_is_read_as_the_loss_that_it_is(module, targets) -> None:
    likelihood, f = resolve(module), outputs_for(module)
    likelihood.check_outputs(f)
    y = likelihood.prepare_targets(targets(), f)
    assert relative(likelihood.nll(f, y), each(module, f, y)) < 1e-12
    if isinstance(module, nn.NLLLoss):
        module = nn.CrossEntropyLoss(module.weight, ignore_index=module.ignore_index)
    check_derivatives(likelihood, f, y, lambda f, y: each(module, f, y))


def check_derivatives(likelihood: Likelihood, f: Tensor, y: Tensor, loss) -> None:
    """e and Λ (convex losses) against autograd, the products and the root against Λ."""

    def one(f: Tensor, y: Tensor) -> Tensor:
        return loss(f.unsqueeze(0), y.unsqueeze(0)).sum()

    error = torch.stack([torch.func.grad(one)(f[i], y[i]) for i in range(len(f))])
    hessian = torch.stack([torch.func.hessian(one)(f[i], y[i]) for i in range(len(f))])
    assert relative(likelihood.error(f, y), error) < 1e-12
    assert relative(likelihood.hessian(f, y), hessian) < 1e-12
    check_hessian_parts(likelihood, f, y)


def check_hessian_parts(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    hessian, v = likelihood.hessian(f, y), normal(3, *f.shape, seed=11)
    root = likelihood.hessian_root(f, y)
    assert relative(root @ root.mT, hessian) < 1e-12
    product = torch.einsum("bcd,kbd->kbc", hessian, v)
    assert relative(likelihood.hessian_times(f, y, v), product) < 1e-12


def test_learned_variances_are_those_of_torch() -> None:
    mean, v, y = normal(N, C), normal(N, C, seed=2).exp(), numbers()
    v[0, 0] = 1e-9  # below eps
    for full in (False, True):
        module = nn.GaussianNLLLoss(full=full, eps=1e-3, reduction="none")
        likelihood, f = resolve(module), torch.cat((mean, v), -1)
        assert torch.equal(likelihood.prepare_targets(y, f), y)
        assert relative(likelihood.nll(f, y), module(mean, y, v).sum(-1)) < 1e-12
        g = f.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(g[:, :C], y, g[:, C:]).sum(), g)
        assert relative(likelihood.error(f, y), slope) < 1e-12
        check_hessian_parts(likelihood, f, y)


LIKELIHOODS = [
    (Categorical(weight=W, label_smoothing=0.1), classes),
    (Categorical(label_smoothing=0.1), soft),
    (Bernoulli(pos_weight=3.0, weight=W), bits),
    (Gaussian(W), numbers),
    (MeanAndVariance(), lambda: normal(N, C // 2, seed=7)),
]


@pytest.mark.parametrize(
    ("likelihood", "targets"), LIKELIHOODS, ids=[repr(likelihood) for likelihood, _ in LIKELIHOODS]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_drawn_errors_have_the_hessian_as_mean_square(likelihood, targets, weighted: bool) -> None:
    f = normal(N, C).abs() + 0.3
    y = likelihood.prepare_targets(targets(), f)
    f, y = (t[2:3].expand(100_000, *t.shape[1:]) for t in (f, y))
    if weighted:
        likelihood = blr.likelihoods.Weighted(likelihood, torch.full((len(f),), 2.5))
    drawn = likelihood.resample(f, y, torch.Generator().manual_seed(0))
    e = likelihood.drawn_error(f, y, likelihood.prepare_targets(drawn, f))
    products = e.unsqueeze(-1) * e.unsqueeze(-2)
    spread = products.std(0) / len(e) ** 0.5
    hessian = likelihood.hessian(f, y)[0]
    assert float(((products.mean(0) - hessian) / spread.clamp_min(1e-12)).abs().max()) < 4.5


def test_negative_curvature_of_a_function_counts_as_none() -> None:
    f, y = 3 * normal(N, C), classes()
    likelihood = resolve(focal)
    exact = torch.stack(
        [torch.func.hessian(lambda f, y=y[i]: focal(f[None], y[None])[0])(f[i]) for i in range(N)]
    )
    values, turn = torch.linalg.eigh(exact)
    assert float(values.min()) < -1e-2
    kept = turn @ torch.diag_embed(values.clamp_min(0)) @ turn.mT
    assert relative(likelihood.hessian(f, y), kept) < 1e-12
    check_hessian_parts(likelihood, f, y)


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_a_loss_that_curves_near_the_targets_alone_is_taken(shape: tuple[int, ...]) -> None:
    x, y = normal(N, 3), 100 + normal(*shape, seed=1)
    task = blr.Task(nn.Linear(3, 1).double(), (x, y), likelihood=nn.HuberLoss())
    assert float(blr.sensitivity(task, _flat(task)).error.abs().max()) == 1


def _flat(task: blr.Task) -> blr.Posterior:
    ones = {n: torch.ones_like(p) for n, p in task.parameters().items()}
    return blr.Posterior(task.parameters(), ones, prior_precision=1.0, n_data=N)


def test_settings_are_said_and_compared() -> None:
    assert repr(Categorical(weight=[1, 2.5])) == "Categorical(weight=[1.0, 2.5])"
    assert Categorical().recorded == "categorical"
    assert Bernoulli(pos_weight=3).recorded == "Bernoulli(pos_weight=[3.0])"
    assert resolve(nn.MSELoss()).same(Gaussian(0.5, normalized=False))
    assert not Categorical(label_smoothing=0.1).same(Categorical())
    assert Categorical(label_smoothing=0.1).judged_by(Categorical())
    assert not Categorical().judged_by(Categorical(label_smoothing=0.1))
    assert not Gaussian(2.0).judged_by(Gaussian())


class Focal(nn.Module):
    """A loss module of one's own, with a setting, a buffer and a reduction."""

    def __init__(self, gamma: float = 2.0, weight: Tensor = W) -> None:
        super().__init__()
        self.gamma, self.reduction = gamma, "mean"
        self.register_buffer("weight", weight)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        losses = -self.weight[y] * torch.log_softmax(f, -1).gather(-1, y[:, None]).squeeze(-1)
        return losses.mean() if self.reduction == "mean" else losses


def powered(power: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: focal(f, y) ** power


LOADED_TWICE = """
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, f, y):
        return {}
"""


def loaded(says: str) -> nn.Module:
    scope = {"nn": nn, "focal": focal, "__name__": "losses"}
    exec(LOADED_TWICE.format(says), scope)
    return scope["Twice"]()


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (nn.HuberLoss, lambda: nn.HuberLoss(delta=2.0)),
        (lambda: nn.SmoothL1Loss(reduction="sum"), nn.HuberLoss),
        (nn.MultiLabelSoftMarginLoss, lambda: nn.MultiLabelSoftMarginLoss(weight=W)),
        (lambda: nn.PoissonNLLLoss(log_input=False), nn.PoissonNLLLoss),
        (Focal, lambda: Focal(gamma=1.0)),
        (Focal, lambda: Focal(weight=2 * W)),
        (lambda: focal, lambda: Focal()),
        (lambda: powered(1.0), lambda: powered(2.0)),
        (lambda: partial(focal), lambda: partial(focal, y=3)),
        (lambda: Focal().forward, lambda: Focal(gamma=1.0).forward),
        (lambda: loaded("focal(f, y)"), lambda: loaded("2 * focal(f, y)")),
    ],
)
def test_two_of_one_loss_are_the_same(make, other) -> None:
    assert resolve(make()).same(resolve(make()))
    assert not resolve(make()).same(resolve(other()))
    assert not resolve(other()).same(resolve(make()))


def test_losses_that_hold_themselves_are_the_same_only_as_one_object() -> None:
    def make() -> Callable[[Tensor, Tensor], Tensor]:
        def half(f: Tensor, y: Tensor) -> Tensor:
            return focal(f, y) if y.ndim == 1 else half(f, y[:, 0])

        return half

    one = make()
    assert resolve(one).same(resolve(one))
    assert not resolve(one).same(resolve(make()))


def test_a_loss_module_of_ones_own_serves_test_data_and_additions() -> None:
    model, x, y = nn.Linear(3, C).double(), normal(N, 3), classes()
    task, test = (blr.Task(model, (x, y), likelihood=Focal()) for _ in range(2))
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    scores = blr.sensitivity(task, q)
    influence = blr.influence(task, q, test)
    assert relative(torch.as_tensor(influence.diagonal()), scores.self_influence) < 1e-9
    assert blr.what_if(task, q, add=test).nll > 0
    with pytest.raises(InputError, match="likelihood"):
        blr.influence(task, q, blr.Task(model, (x, y), likelihood=Focal(gamma=1.0)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Categorical(weight=[1.0, -1.0]),
        lambda: Categorical(weight=[float("nan"), 1.0]),
        lambda: Categorical(weight=[[1.0]]),
        lambda: Categorical(label_smoothing=1.5),
        lambda: Bernoulli(pos_weight=-2.0),
        lambda: Gaussian([1.0, 0.0]),
        lambda: MeanAndVariance(eps=0.0),
        lambda: resolve(nn.CrossEntropyLoss),  # type: ignore[arg-type]
    ],
)
def test_impossible_settings_are_refused(make) -> None:
    with pytest.raises(InputError):
        make()


def fitted(likelihood, y: Tensor, c: int = C, **options) -> blr.Posterior:
    model = nn.Linear(3, c).double()
    task = blr.Task(model, (normal(len(y), 3), y), likelihood=likelihood, **options)
    return blr.fit_laplace(task, structure="diag", prior_precision=1.0)


@pytest.mark.parametrize(
    ("likelihood", "targets", "error", "message"),
    [
        (Categorical(weight=[1.0, 2.0]), classes(), DataError, "2 entries for 4"),
        (Bernoulli(pos_weight=[1.0, 2.0]), bits(), DataError, "2 entries for 4"),
        (Gaussian([1.0, 2.0]), numbers(), DataError, "2 entries for 4"),
        ("categorical", 2 * soft(), DataError, "sum to one"),
        ("categorical", soft() - 0.5, DataError, "sum to one"),
        ("bernoulli", 2 * soft(), DataError, "0 … 1"),
        (nn.GaussianNLLLoss(), numbers()[:, :2], ModelError, "negative"),
        (lambda f, y: ((f - y) ** 2).mean(), numbers(), InputError, "per example"),
        (lambda f, y: (f - y) ** 2, numbers(), InputError, "per example"),
        (lambda f, y: (f - f.mean(0) - y).square().sum(-1), numbers(), InputError, "depends on"),
        (nn.L1Loss(), numbers(), InputError, "second derivative"),
        (nn.MultiMarginLoss(), torch.arange(N) % C, InputError, "second derivative"),
        (lambda f, y: (f.detach() - y).square().sum(-1), numbers(), InputError, "differentiable"),
        (lambda f, y: f.nonsense, numbers(), InputError, "nonsense"),
    ],
)
def test_bad_losses_and_targets_are_refused(likelihood, targets, error, message: str) -> None:
    with pytest.raises(error, match=message):
        fitted(likelihood, targets)


def test_labels_cannot_be_drawn_from_a_function() -> None:
    task = blr.Task(nn.Linear(3, C), (normal(N, 3), classes()), likelihood=focal)
    with pytest.raises(InputError, match="ggn"):
        blr.fit_laplace(task, curvature="mc_fisher", prior_precision=1.0)


@pytest.mark.parametrize("weights", [torch.ones(N - 1), -torch.ones(N), torch.zeros(N), ["a"] * N])
def test_bad_weights_are_refused(weights) -> None:
    with pytest.raises(InputError, match="weights"):
        blr.Task(nn.Linear(3, C), (normal(N, 3), classes()), weights=weights)
