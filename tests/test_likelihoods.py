"""Likelihoods against torch.distributions, torch's loss modules and automatic differentiation."""

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
    Weighted,
    resolve,
)

N, C = 8, 4
W = torch.tensor([0.5, 15.0, 1.0, 2.0], dtype=torch.float64)
Loss = Callable[[Tensor, Tensor], Tensor]


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


# What torch.distributions calls p(y | f), and targets; then torch's own loss modules.
KINDS: list[tuple[Likelihood, Callable[[Tensor], d.Distribution], Tensor]] = [
    (Categorical(), lambda f: d.Categorical(logits=f), classes()),
    (Bernoulli(), lambda f: d.Independent(d.Bernoulli(logits=f), 1), bits()),
    (Gaussian(), lambda f: d.Independent(d.Normal(f, 1.0), 1), numbers()),
    (Gaussian(0.3), lambda f: d.Independent(d.Normal(f, 0.3**0.5), 1), numbers()),
    (Poisson(), lambda f: d.Independent(d.Poisson(f.exp()), 1), counts()),
]
MODULES: list[tuple[nn.Module, Tensor]] = [
    (nn.CrossEntropyLoss(), classes()),
    (nn.CrossEntropyLoss(weight=W, reduction="sum"), classes()),
    (nn.CrossEntropyLoss(label_smoothing=0.2), classes()),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.2, ignore_index=1), classes()),
    (nn.CrossEntropyLoss(reduction="none"), soft()),
    (nn.CrossEntropyLoss(weight=W, label_smoothing=0.1), soft()),
    (nn.NLLLoss(weight=W, ignore_index=2), classes()),
    (nn.BCEWithLogitsLoss(), bits()),
    (nn.BCEWithLogitsLoss(weight=W, pos_weight=W.flip(0)), bits()),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0).double()), soft()),
    (nn.MSELoss(), numbers()),
    (nn.PoissonNLLLoss(), counts()),
    (nn.PoissonNLLLoss(full=True), counts()),
    (nn.HuberLoss(delta=0.7), numbers()),
    (nn.BCELoss(), bits()),
    (nn.PoissonNLLLoss(log_input=False), counts()),
    (nn.GaussianNLLLoss(full=True, eps=1e-3), numbers()),
]


def own_outputs(module: nn.Module, f: Tensor) -> Tensor:
    """What a module takes: log-probabilities, probabilities, rates, or means and variances."""
    if isinstance(module, nn.GaussianNLLLoss):
        variance = normal(N, C, seed=2).exp()
        variance[0, 0] = 1e-9  # below eps
        return torch.cat((f, variance), -1)
    if isinstance(module, nn.PoissonNLLLoss) and not module.log_input:
        return f.exp()
    kinds = {nn.NLLLoss: lambda f: f.log_softmax(-1), nn.BCELoss: torch.sigmoid}
    return kinds.get(type(module), lambda f: f)(f)


def by_torch(module: nn.Module) -> Loss:
    """torch's own loss of every example."""
    one = copy.copy(module)
    one.reduction = "sum"

    def loss(f: Tensor, y: Tensor) -> Tensor:
        if isinstance(module, nn.GaussianNLLLoss):
            pairs = zip(*f.chunk(2, -1), y, strict=True)
            return torch.stack([one(m[None], t[None], v[None]) for m, v, t in pairs])
        return torch.stack([one(f[i : i + 1], y[i : i + 1]) for i in range(len(f))])

    return loss


def density(make: Callable[[Tensor], d.Distribution]) -> Loss:
    return lambda f, y: -make(f).log_prob(y)


def members() -> dict[str, tuple[Likelihood, Tensor, Tensor, Loss]]:
    """Likelihood, outputs, targets and its loss of every example by torch."""
    f = 2 * normal(N, C)
    found = {repr(one): (one, f, y, density(make)) for one, make, y in KINDS}
    for module, y in MODULES:
        found[f"{module} {y.ndim}"] = (resolve(module), own_outputs(module, f), y, by_torch(module))
    return found


MEMBERS = members()


@pytest.mark.parametrize("name", MEMBERS)
class TestLikelihoodContract:
    """Loss, error and Hessian of every likelihood, against torch and automatic differentiation."""

    def test_the_loss_is_torchs(self, name: str) -> None:
        likelihood, f, y, loss = MEMBERS[name]
        likelihood.check_outputs(f)
        y = likelihood.prepare_targets(y, f)
        found = likelihood.nll(f, y)
        assert found.shape == (N,) and relative(found, loss(f, y)) < 1e-12

    def test_error_and_hessian_are_its_derivatives(self, name: str) -> None:
        likelihood, f, y, loss = MEMBERS[name]
        y = likelihood.prepare_targets(y, f)
        if name.startswith("NLLLoss"):
            loss = by_torch(nn.CrossEntropyLoss(W, ignore_index=2))  # softmax(log p) = p

        def one(f: Tensor, y: Tensor) -> Tensor:
            return loss(f.unsqueeze(0), y.unsqueeze(0)).sum()

        pairs = list(zip(f, y, strict=True))
        error = torch.stack(
            [torch.autograd.functional.jacobian(partial(one, y=t), x) for x, t in pairs]
        )
        assert relative(likelihood.error(f, y), error) < 1e-12
        if not isinstance(likelihood, MeanAndVariance):  # whose Λ is a mean
            bends = [torch.autograd.functional.hessian(partial(one, y=t), x) for x, t in pairs]
            assert relative(likelihood.hessian(f, y), torch.stack(bends)) < 1e-12
        check_hessian_parts(likelihood, f, y)

    def test_weights_multiply_it(self, name: str) -> None:
        likelihood, f, y, _ = MEMBERS[name]
        w = torch.arange(N).double()
        weighted = Weighted(likelihood, w)
        y = weighted.prepare_targets(y, f)
        for ask in ("nll", "error", "hessian"):
            plain = getattr(likelihood, ask)(f, y)
            found = getattr(weighted, ask)(f, y)
            assert relative(found, plain * w.view(-1, *[1] * (plain.ndim - 1))) < 1e-12
        check_hessian_parts(weighted, f, y)
        half = weighted.at(torch.tensor([3, 5]))
        assert relative(half.nll(f[[3, 5]], y[[3, 5]]), weighted.nll(f, y)[[3, 5]]) < 1e-12
        with pytest.raises(InputError, match="weights for"):
            half.nll(f, y)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_everything_keeps_the_outputs_dtype(self, name: str, dtype: torch.dtype) -> None:
        likelihood, f, y, _ = MEMBERS[name]
        f = f.to(dtype)
        y = likelihood.prepare_targets(y, f)
        asked = (likelihood.error, likelihood.hessian, likelihood.hessian_root, likelihood.nll)
        assert {ask(f, y).dtype for ask in asked} == {likelihood.mean(f).dtype} == {dtype}


def check_hessian_parts(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """The root and the products, against Λ."""
    hessian, v = likelihood.hessian(f, y), normal(3, *f.shape, seed=11)
    root = likelihood.hessian_root(f, y)
    assert relative(root @ root.mT, hessian) < 1e-12
    product = torch.einsum("bcd,kbd->kbc", hessian, v)
    assert relative(likelihood.hessian_times(f, y, v), product) < 1e-12


@pytest.mark.parametrize(("likelihood", "make", "y"), KINDS, ids=[repr(k[0]) for k in KINDS])
def test_mean_and_draws_are_the_distributions(likelihood, make, y) -> None:
    """E[y|f]; E[e] = 0 and E[e eᵀ] = Λ over draws, which come from the generator."""
    f = 2 * normal(N, C)
    p = make(f)
    truth = p.probs if isinstance(p, d.Categorical) else p.mean
    assert relative(likelihood.mean(f), truth) < 1e-12
    before = torch.get_rng_state()
    one, two, other = (likelihood.sample(f, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)
    f = normal(1, C).expand(100_000, C)
    drawn = likelihood.sample(f, torch.Generator().manual_seed(0))
    e = likelihood.error(f, likelihood.prepare_targets(drawn, f))
    assert float((e.mean(0) / (e.std(0) / len(e) ** 0.5)).abs().max()) < 4


LIKELIHOODS = [
    *((likelihood, y) for likelihood, _, y in KINDS),
    (Categorical(weight=W, label_smoothing=0.1), classes()),
    (Categorical(label_smoothing=0.1), soft()),
    (Bernoulli(pos_weight=3.0, weight=W), bits()),
    (Gaussian(W), numbers()),
    (MeanAndVariance(), normal(N, C // 2, seed=7)),
    (Weighted(Categorical(weight=W), torch.full((100_000,), 2.5)), classes()),
]


@pytest.mark.parametrize(("likelihood", "y"), LIKELIHOODS, ids=[repr(k[0]) for k in LIKELIHOODS])
def test_drawn_errors_have_the_hessian_as_mean_square(likelihood, y) -> None:
    f = normal(N, C).abs() + 0.3
    y = likelihood.prepare_targets(y, f)
    f, y = (t[2:3].expand(100_000, *t.shape[1:]) for t in (f, y))
    drawn = likelihood.resample(f, y, torch.Generator().manual_seed(0))
    e = likelihood.drawn_error(f, y, likelihood.prepare_targets(drawn, f))
    products = e.unsqueeze(-1) * e.unsqueeze(-2)
    spread = products.std(0) / len(e) ** 0.5
    hessian = likelihood.hessian(f, y)[0]
    assert float(((products.mean(0) - hessian) / spread.clamp_min(1e-12)).abs().max()) < 4.5


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
    for likelihood, *_ in KINDS:
        assert float(likelihood.distance(after, after)) == 0


def test_variances_move_on_the_log_scale() -> None:
    """μ' = μ + Δμ and log v' = log v + Δv / v."""
    f, step = torch.tensor([[1.0, -1.0, 2.0, 0.5]]), torch.tensor([[0.5, 0.0, -4.0, 1.0]])
    wanted = [1.5, -1.0, 2 * math.exp(-2), 0.5 * math.exp(2)]
    assert MeanAndVariance().moved(f, step).tolist()[0] == pytest.approx(wanted)
    assert torch.equal(Gaussian().moved(f, step), f + step)


def test_probabilities_are_told_from_logits() -> None:
    f = 3 * normal(N, C)
    assert Categorical().looks_normalised(f.softmax(-1))
    assert not Categorical().looks_normalised(f)
    assert not Categorical().looks_normalised(f.softmax(-1) * 2)
    shares = torch.linspace(0.01, 0.99, 20).unsqueeze(1)
    assert Bernoulli().looks_normalised(shares) and not Bernoulli().looks_normalised(shares[:9])
    assert not Bernoulli().looks_normalised(0.3 + 0.4 * shares)


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


def test_resolve() -> None:
    assert {name: type(resolve(name)) for name in BY_NAME} == BY_NAME
    own = Gaussian(0.5)
    assert resolve(own) is own


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


class Scaled(Gaussian):
    """One of a user's own, with a tensor for a setting."""

    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = by

    __repr__ = Likelihood.__repr__


def test_settings_are_said_and_compared() -> None:
    assert repr(Categorical(weight=[1, 2.5])) == "Categorical(weight=[1.0, 2.5])"
    assert Categorical().recorded == "categorical"
    assert repr(Scaled(torch.ones(2))) == "Scaled(by=tensor([1., 1.]))"
    assert Scaled(torch.ones(2)).same(Scaled(torch.ones(2)))
    assert not Scaled(torch.ones(2)).same(Scaled(torch.zeros(2)))
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
    ],
)
def test_two_of_one_loss_are_the_same(make, other) -> None:
    assert resolve(make()).same(resolve(make()))
    assert not resolve(make()).same(resolve(other()))
    assert not resolve(other()).same(resolve(make()))


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


def fitted(likelihood, y: Tensor, **options) -> blr.Posterior:
    task = blr.Task(nn.Linear(3, C).double(), (normal(len(y), 3), y), likelihood=likelihood)
    return blr.fit_laplace(task, structure="diag", prior_precision=1.0, **options)


def prepared(likelihood: Likelihood, y: Tensor) -> Tensor:
    return likelihood.prepare_targets(y, torch.zeros(2, 3))


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: prepared(Categorical(), torch.tensor([0, 3])), DataError, r"0 … 2.*found 3"),
    (lambda: prepared(Categorical(), torch.tensor([0, -100])), DataError, "found -100"),
    (lambda: prepared(Categorical(), torch.zeros(2)), DataError, r"integers.*float32.*y\.long"),
    (lambda: prepared(Categorical(), torch.zeros(2).bool()), DataError, "integers"),
    (lambda: prepared(Categorical(), torch.eye(3)[:2].long()), DataError, "argmax"),
    (lambda: prepared(Bernoulli(), torch.full((2, 3), -0.5)), DataError, "0 … 1"),
    (lambda: prepared(Bernoulli(), torch.zeros(2)), DataError, r"\(2,\).*\(2, 3\)"),
    (lambda: prepared(Gaussian(), torch.full((2, 3), math.nan)), DataError, "NaN"),
    (lambda: prepared(Gaussian(), torch.zeros(2, 3) * 1j), DataError, "complex64"),
    (lambda: prepared(Poisson(), torch.full((2, 3), -1)), DataError, "counts"),
    (lambda: prepared(Poisson(), torch.full((2, 3), 0.5)), DataError, "counts"),
    (lambda: resolve("softmax"), InputError, "'categorical'"),
    (lambda: resolve(None), InputError, "'categorical'"),  # type: ignore[arg-type]
    (lambda: resolve(nn.CrossEntropyLoss), InputError, "call it"),  # type: ignore[arg-type]
    (lambda: Gaussian().check_outputs(torch.zeros(2, 3, 4)), DataError, r"\[batch, C\]"),
    (lambda: Categorical().check_outputs(torch.zeros(2, 1)), DataError, '"bernoulli"'),
    (lambda: Categorical(weight=[1.0, -1.0]), InputError, "weight"),
    (lambda: Categorical(weight=[[1.0]]), InputError, "weight"),
    (lambda: Categorical(label_smoothing=1.5), InputError, "label_smoothing"),
    (lambda: Bernoulli(pos_weight=-2.0), InputError, "pos_weight"),
    (lambda: Gaussian([1.0, 0.0]), InputError, "variance"),
    (lambda: Gaussian("one"), InputError, "variance"),
    (lambda: Gaussian(None), InputError, "variance"),
    (lambda: MeanAndVariance(eps=0.0), InputError, "eps"),
    (lambda: fitted(Categorical(weight=[1.0, 2.0]), classes()), DataError, "2 entries for 4"),
    (lambda: fitted(Bernoulli(pos_weight=[1.0, 2.0]), bits()), DataError, "2 entries for 4"),
    (lambda: fitted(Gaussian([1.0, 2.0]), numbers()), DataError, "2 entries for 4"),
    (lambda: fitted("categorical", 2 * soft()), DataError, "sum to one"),
    (lambda: fitted("categorical", soft() - 0.5), DataError, "sum to one"),
    (lambda: fitted(nn.GaussianNLLLoss(), numbers()[:, :2]), ModelError, "negative"),
    (lambda: fitted(lambda f, y: ((f - y) ** 2).mean(), numbers()), InputError, "per example"),
    (
        lambda: fitted(lambda f, y: (f - f.mean(0) - y).square().sum(-1), numbers()),
        InputError,
        "depends on",
    ),
    (lambda: fitted(nn.L1Loss(), numbers()), InputError, "second derivative"),
    (lambda: fitted(nn.MultiMarginLoss(), classes()), InputError, "second derivative"),
    (
        lambda: fitted(lambda f, y: (f.detach() - y).square().sum(-1), numbers()),
        InputError,
        "differentiable",
    ),
    (lambda: fitted(lambda f, y: f.nonsense, numbers()), InputError, "nonsense"),
    (lambda: fitted(focal, classes(), curvature="mc_fisher"), InputError, "ggn"),
    *(
        (
            lambda w=w: blr.Task(nn.Linear(3, C), (normal(N, 3), classes()), weights=w),
            InputError,
            "w",
        )
        for w in (torch.ones(N - 1), -torch.ones(N), torch.zeros(N), ["a"] * N)
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_refusals(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
