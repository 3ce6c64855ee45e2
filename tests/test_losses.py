"""The losses that people train with, against torch's own modules and autograd, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracles import relative
from parts import normal
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MeanAndVariance,
    resolve,
)

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
    assert float(blr.sensitivity(task, _flat(task), progress=False).error.abs().max()) == 1


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
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0, progress=False)
    scores = blr.sensitivity(task, q, progress=False)
    influence = blr.influence(task, q, test, progress=False)
    assert relative(torch.as_tensor(influence.diagonal()), scores.self_influence) < 1e-9
    assert blr.what_if(task, q, add=test, progress=False).nll > 0
    with pytest.raises(InputError, match="likelihood"):
        blr.influence(task, q, blr.Task(model, (x, y), likelihood=Focal(gamma=1.0)), progress=False)


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
    return blr.fit_laplace(task, structure="diag", prior_precision=1.0, progress=False)


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
        blr.fit_laplace(task, curvature="mc_fisher", prior_precision=1.0, progress=False)


@pytest.mark.parametrize("weights", [torch.ones(N - 1), -torch.ones(N), torch.zeros(N), ["a"] * N])
def test_bad_weights_are_refused(weights) -> None:
    with pytest.raises(InputError, match="weights"):
        blr.Task(nn.Linear(3, C), (normal(N, 3), classes()), weights=weights)
