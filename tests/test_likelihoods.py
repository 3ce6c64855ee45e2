"""Likelihoods against torch.distributions, torch's loss modules and automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from likelihood_cases import (
    BITS,
    CLASSES,
    KINDS,
    MEMBERS,
    NUMBERS,
    SEQUENCES,
    SOFT,
    TOKENS,
    W,
    each,
    focal,
)
from models import normal
from oracles import relative
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.likelihoods import (
    BY_NAME,
    Bernoulli,
    Categorical,
    CausalLM,
    Gaussian,
    Likelihood,
    MeanAndVariance,
    Poisson,
    TokenCategorical,
    Weighted,
    resolve,
)

N = 8
C = 4
T = 5


@pytest.mark.parametrize("name", MEMBERS)
class TestLikelihoodContract:
    """Loss, error and Hessian of every likelihood, against torch and automatic differentiation."""

    def test_loss_error_and_hessian_are_torchs(self, name: str) -> None:
        likelihood, raw, labels, loss = MEMBERS[name]
        likelihood.check_outputs(raw)
        raw = raw.clone().requires_grad_()
        outputs, y = likelihood.prepare(raw, labels)  # of sequences shifted and masked
        truth = loss(raw, labels)
        f = outputs.detach()
        assert truth.shape == (N,)
        assert relative(likelihood.nll(f, y), truth.detach()) < 1e-12
        if name.startswith("NLLLoss"):
            truth = each(nn.CrossEntropyLoss(W, ignore_index=2))(raw, y)  # softmax(log p) = p
        (slope,) = torch.autograd.grad(truth.sum(), raw, create_graph=True)
        (error,) = torch.autograd.grad(outputs, raw, likelihood.error(f, y), retain_graph=True)
        assert relative(error, slope.detach()) < 1e-12
        if isinstance(likelihood, MeanAndVariance):  # its Λ is a mean, no second derivative
            return check_hessian_parts(likelihood, f, y)
        v = normal(*raw.shape, seed=5)
        along = likelihood.prepare(v, labels)[0] if likelihood.is_sequence else v
        (bend,) = torch.autograd.grad(slope, raw, v, retain_graph=True)
        product = likelihood.hessian_times(f, y, along)
        (product,) = torch.autograd.grad(outputs, raw, product)
        assert relative(product, bend) < 1e-12
        check_hessian_parts(likelihood, f, y)

    def test_weights_multiply_it(self, name: str) -> None:
        likelihood, raw, y, _ = MEMBERS[name]
        weighted = Weighted(likelihood, torch.arange(N).double())
        f, y = weighted.prepare(raw, y)
        names = ["nll", "error"]
        if not likelihood.is_sequence:
            names.append("hessian")
        for quantity in names:
            plain = getattr(likelihood, quantity)(f, y)
            w = torch.arange(N).double().view(-1, *[1] * (plain.ndim - 1))
            assert relative(getattr(weighted, quantity)(f, y), plain * w) < 1e-12
        check_hessian_parts(weighted, f, y)
        half = weighted.at(torch.tensor([3, 5]))
        assert relative(half.nll(f[[3, 5]], y[[3, 5]]), weighted.nll(f, y)[[3, 5]]) < 1e-12
        with pytest.raises(InputError, match="weights for"):
            half.nll(f, y)

    def test_everything_keeps_the_outputs_dtype(self, name: str) -> None:
        likelihood, raw, labels, _ = MEMBERS[name]
        methods = [likelihood.error, likelihood.nll]
        if not likelihood.is_sequence:
            methods += [likelihood.hessian, likelihood.hessian_root]
        for dtype in (torch.float32, torch.float64):
            f, y = likelihood.prepare(raw.to(dtype), labels)
            assert likelihood.mean(f).dtype == dtype
            for method in methods:
                assert method(f, y).dtype == dtype


def check_hessian_parts(likelihood: Likelihood, f: Tensor, y: Tensor) -> None:
    """The root and the products agree with Λ; for sequences Λ is refused."""
    if likelihood.is_sequence:
        for method in (likelihood.hessian, likelihood.hessian_root):
            with pytest.raises(InputError, match="empirical_fisher"):
                method(f, y)
        return
    hessian = likelihood.hessian(f, y)
    v = normal(3, *f.shape, seed=11)
    root = likelihood.hessian_root(f, y)
    assert relative(root @ root.mT, hessian) < 1e-12
    product = torch.einsum("bcd,kbd->kbc", hessian, v)
    assert relative(likelihood.hessian_times(f, y, v), product) < 1e-12


@pytest.mark.parametrize(("likelihood", "make", "y"), KINDS, ids=[repr(k[0]) for k in KINDS])
def test_means_are_the_distributions_and_draws_come_from_the_generator(likelihood, make, y) -> None:
    f = 2 * normal(N, C)
    p = make(f)
    mean = p.probs if likelihood.integer_targets else p.mean
    assert relative(likelihood.mean(f), mean) < 1e-12
    before = torch.get_rng_state()

    def draw(seed: int) -> Tensor:
        return likelihood.sample(f, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), before)


DRAWN = [
    *((likelihood, y) for likelihood, _, y in KINDS),
    (Categorical(weight=W, label_smoothing=0.1), CLASSES),
    (Categorical(label_smoothing=0.1), SOFT),
    (Categorical(weight=W, ignore_index=int(CLASSES[0])), CLASSES),  # ignored classes are drawn too
    (Bernoulli(pos_weight=3.0, weight=W), BITS),
    (MeanAndVariance(), NUMBERS[:, : C // 2]),
    (Weighted(Categorical(weight=W), torch.full((50_000,), 2.5)), CLASSES),
    *((likelihood, TOKENS[:, :2]) for likelihood in SEQUENCES if likelihood.ignore_index == -100),
]


@pytest.mark.parametrize(("likelihood", "y"), DRAWN, ids=[repr(k[0]) for k in DRAWN])
def test_drawn_errors_have_the_hessian_as_mean_square(likelihood, y) -> None:
    f = normal(N, *y.shape[1:], C) if likelihood.is_sequence else normal(N, C)
    f, y = likelihood.prepare(f.abs() + 0.3, y)
    f, y = (t[2:3].expand(50_000, *t.shape[1:]) for t in (f, y))
    drawn = likelihood.resample(f, y, torch.Generator().manual_seed(0))
    e = likelihood.drawn_error(f, y, likelihood.prepare_targets(drawn, f)).flatten(1)
    unit = torch.eye(e.shape[1]).to(f).view(-1, 1, *f.shape[1:])
    hessian = likelihood.at(torch.arange(1)).hessian_times(f[:1], y[:1], unit).flatten(1)
    for values, expected in ((e, 0 * e[0]), (e.unsqueeze(-1) * e.unsqueeze(-2), hessian)):
        spread = (values.std(0) / len(e) ** 0.5).clamp_min(1e-9)
        assert float(((values.mean(0) - expected) / spread).abs().max()) < 4.5
        assert float(spread.max()) < 0.2 * float(hessian.abs().max())


@pytest.mark.parametrize("size", [50.0, 800.0])
def test_confident_logits_give_finite_numbers(size: float) -> None:
    f = torch.tensor([[size, -size], [-size, size]], dtype=torch.float64)
    zeros = torch.zeros(2, 2).double()
    # the second example's loss: the gap of both logits, or one logit that is wrong
    for likelihood, y, loss in (
        (Categorical(), zeros[0].long(), 2 * size),
        (Bernoulli(), zeros, size),
    ):
        for method in (likelihood.error, likelihood.hessian_root, likelihood.nll):
            assert torch.isfinite(method(f, y)).all()
        assert float(likelihood.nll(f, y)[1]) == pytest.approx(loss)


def test_predictions_distances_and_moves() -> None:
    f = torch.tensor([[2.0, 1.0], [-1.0, 3.0]])
    labels = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert Categorical().prediction(f).tolist() == [0, 1]
    assert Categorical().correct(f, torch.tensor([0, 0])).tolist() == [True, False]
    assert Bernoulli().prediction(f).tolist() == [[1, 1], [0, 1]]
    assert Bernoulli().correct(f, labels).tolist() == [True, False]
    single_output = torch.tensor([[0.3], [-0.3]])
    assert Bernoulli().prediction(single_output).tolist() == [1, 0]
    for likelihood, expected in ((Gaussian(), single_output), (Poisson(), single_output.exp())):
        assert torch.equal(likelihood.prediction(single_output), expected.squeeze(1))
        assert likelihood.correct(single_output, single_output) is None
    before = torch.tensor([[0.0, 0.0]])
    after = torch.tensor([[math.log(3), 0.0]])
    assert float(Categorical().distance(before, after)) == pytest.approx(0.5)  # ¼ + ¼
    assert float(Bernoulli().distance(before, after)) == pytest.approx(0.25)
    assert float(Poisson().distance(before, torch.tensor([[3.0, 4.0]]))) == pytest.approx(5.0)
    # μ' = μ + Δμ and log v' = log v + Δv / v
    f = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    step = torch.tensor([[0.5, 0.0, -4.0, 1.0]])
    expected = [1.5, -1.0, 2 * math.exp(-2), 0.5 * math.exp(2)]
    assert MeanAndVariance().moved(f, step).tolist()[0] == pytest.approx(expected)
    assert float(MeanAndVariance().distance(f, f + step)) == pytest.approx(0.5)
    assert torch.equal(Gaussian().moved(f, step), f + step)


def test_targets_are_brought_into_form() -> None:
    ones = [[1.0] * 3] * 2
    outputs = torch.zeros(2, 3, dtype=torch.float64)
    for likelihood, targets, expected in (
        (Categorical(), torch.tensor([0, 2], dtype=torch.uint8), [0, 2]),
        (Categorical(), torch.tensor([[0], [2]]), [0, 2]),
        (Bernoulli(), torch.ones(2, 3, dtype=torch.bool), ones),
        (Gaussian(), torch.ones(2, 3, dtype=torch.int32), ones),
        (Poisson(), torch.full((2, 3), 1), ones),
    ):
        actual = likelihood.prepare_targets(targets, outputs)
        assert actual.tolist() == expected
        assert actual.dtype == (torch.int64 if likelihood.integer_targets else torch.float64)
    flat = Gaussian().prepare_targets(torch.tensor([0, 1, 1]), torch.zeros(3, 1))
    assert flat.tolist() == [[0.0], [1.0], [1.0]]


def test_negative_curvature_of_a_function_counts_as_none() -> None:
    f = 3 * normal(N, C)
    likelihood = resolve(focal)

    def loss_of_one(f: Tensor, y: Tensor) -> Tensor:
        return focal(f[None], y[None])[0]

    hessian = torch.func.hessian(loss_of_one)
    exact = torch.stack([hessian(row, y) for row, y in zip(f, CLASSES, strict=True)])
    values, turn = torch.linalg.eigh(exact)
    assert float(values.min()) < -1e-2
    positive_part = turn @ torch.diag_embed(values.clamp_min(0)) @ turn.mT
    assert relative(likelihood.hessian(f, CLASSES), positive_part) < 1e-12
    check_hessian_parts(likelihood, f, CLASSES)


def test_a_loss_that_curves_near_the_targets_alone_is_taken() -> None:
    model = nn.Linear(3, 1).double()
    x = normal(N, 3)
    y = 100 + normal(N, seed=1)
    for targets in (y, y[:, None]):
        task = blr.Task(model, (x, targets), likelihood=nn.HuberLoss())
        ones = {n: torch.ones_like(p) for n, p in task.parameters().items()}
        q = blr.Posterior(task.parameters(), ones, prior_precision=1.0, n_data=N)
        assert float(blr.sensitivity(task, q).error.abs().max()) == 1


def test_settings_are_said_and_compared() -> None:
    assert {name: type(resolve(name)) for name in BY_NAME} == BY_NAME
    gaussian = Gaussian(0.5)
    assert resolve(gaussian) is gaussian
    assert repr(Categorical(weight=[1, 2.5])) == "Categorical(weight=[1.0, 2.5])"
    assert Categorical().recorded == "categorical"
    assert Bernoulli(pos_weight=3).recorded == "Bernoulli(pos_weight=[3.0])"
    assert resolve(nn.MSELoss()).same(Gaussian(0.5, normalized=False))
    assert not Gaussian(2.0).judged_by(Gaussian())
    assert TokenCategorical(weight=W).same(TokenCategorical(weight=list(W)))
    for kind in (Categorical, CausalLM):
        smoothed = kind(label_smoothing=0.1)
        assert smoothed.judged_by(kind())
        assert not kind().judged_by(smoothed)
        assert not smoothed.same(kind())
        assert "label_smoothing=0.1" in smoothed.recorded


class Focal(nn.Module):
    """A loss module of one's own, with a setting, a buffer and a reduction."""

    def __init__(self, gamma: float = 2.0, weight: Tensor = W) -> None:
        super().__init__()
        self.gamma = gamma
        self.reduction = "mean"
        self.register_buffer("weight", weight)

    def forward(self, f: Tensor, y: Tensor) -> Tensor:
        log_probs = torch.log_softmax(f, -1).gather(-1, y[:, None]).squeeze(-1)
        losses = -self.weight[y] * log_probs
        return losses.mean() if self.reduction == "mean" else losses


def test_two_of_one_loss_are_the_same() -> None:
    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (nn.HuberLoss, lambda: nn.HuberLoss(delta=2.0)),
        (lambda: nn.SmoothL1Loss(reduction="sum"), nn.HuberLoss),
        (lambda: nn.PoissonNLLLoss(log_input=False), nn.PoissonNLLLoss),
        (Focal, lambda: Focal(gamma=1.0)),
        (Focal, lambda: Focal(weight=2 * W)),
        (lambda: focal, Focal),
    ]
    for make, make_another in pairs:
        assert resolve(make()).same(resolve(make()))
        assert not resolve(make()).same(resolve(make_another()))
        assert not resolve(make_another()).same(resolve(make()))


def task_of(likelihood: Any, y: Tensor, **options: Any) -> blr.Task:
    model = nn.Linear(3, C).double()
    for p in model.parameters():
        p.data = normal(*p.shape, seed=2)
    return blr.Task(model, (normal(len(y), 3), y), likelihood=likelihood, **options)


def fitted(likelihood: Any, y: Tensor, **options: Any) -> blr.Posterior:
    return blr.fit_laplace(task_of(likelihood, y), structure="diag", prior_precision=1.0, **options)


def test_a_loss_module_of_ones_own_serves_test_data_and_additions() -> None:
    task = task_of(Focal(2.0), CLASSES)
    test = task_of(Focal(2.0), CLASSES)
    other_loss = task_of(Focal(1.0), CLASSES)
    q = blr.fit_laplace(task, structure="full", prior_precision=1.0)
    scores = blr.sensitivity(task, q)
    influence = blr.influence(task, q, test)
    assert relative(torch.as_tensor(influence.diagonal()), scores.self_influence) < 1e-9
    assert blr.what_if(task, q, add=test).nll > 0
    with pytest.raises(InputError, match="likelihood"):
        blr.influence(task, q, other_loss)


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
    (lambda: resolve("softmax"), InputError, '"categorical"'),
    (lambda: resolve(None), InputError, '"categorical"'),  # type: ignore[arg-type]
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
    *((lambda w=w: TokenCategorical(w), InputError, "ignore_index") for w in (None, 1.5, "-100")),
    (lambda: TokenCategorical(weight=[1.0]).check_outputs(normal(2, T, C)), DataError, "1 entries"),
    (lambda: fitted(Categorical(weight=[1.0, 2.0]), CLASSES), DataError, "2 entries for 4"),
    (lambda: fitted(Bernoulli(pos_weight=[1.0, 2.0]), BITS), DataError, "2 entries for 4"),
    (lambda: fitted(Gaussian([1.0, 2.0]), NUMBERS), DataError, "2 entries for 4"),
    (lambda: fitted("categorical", 2 * SOFT), DataError, "sum to one"),
    (lambda: fitted("categorical", SOFT - 0.5), DataError, "sum to one"),
    (lambda: fitted(nn.GaussianNLLLoss(), NUMBERS[:, :2]), ModelError, "negative"),
    (lambda: fitted(lambda f, y: ((f - y) ** 2).mean(), NUMBERS), InputError, "per example"),
    (lambda: fitted(lambda f, y: (f - f.mean(0) - y).norm(dim=1), NUMBERS), InputError, "depends"),
    *(
        (lambda loss=loss, y=y: fitted(loss, y), InputError, f"second derivative.*{remedy}")
        for loss, y, remedy in (
            (nn.L1Loss(), NUMBERS, "HuberLoss"),
            (nn.MultiMarginLoss(), CLASSES, "CrossEntropyLoss"),
            (nn.KLDivLoss(reduction="batchmean"), SOFT, "logits and nn.CrossEntropyLoss"),
            (nn.HingeEmbeddingLoss(), NUMBERS.sign(), "SoftMarginLoss"),
        )
    ),
    (lambda: fitted(lambda f, y: (f.detach() - y).norm(dim=1), NUMBERS), InputError, "different"),
    (lambda: fitted(lambda f, y: f.nonsense, NUMBERS), InputError, "nonsense"),
    (lambda: fitted(focal, CLASSES, curvature="mc_fisher"), InputError, "ggn"),
    *(
        (lambda w=w: task_of("categorical", CLASSES, weights=w), InputError, "w")
        for w in (torch.ones(N - 1), -torch.ones(N), torch.zeros(N), ["a"] * N)
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_refusals(call: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
