"""Gradients of single examples, read from the user's own forward and backward pass."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import graph, mlp, normal
from optimizer_makers import step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import CASES, LAYERS

import blr_analysis as blr
from blr_analysis.errors import InitialPrecisionWarning, ModelError, OptimizerError
from blr_analysis.learning_rule.optim import OGN, SLANG, VOGN, NoisyKFAC

B = 6
X = normal(B, 4)
SPECIAL = ("forward_never_called", "embedding_sparse")  # run or trained in ways of their own
MAY_NOT = ("lstm_with_states", "embedding_bag_offsets")  # examples are not their first dimension


def loss_of(model: nn.Module, x: Any, reduction: str = "mean") -> Tensor:
    losses = (model(x).reshape(len(x), -1) - 0.3).square().sum(1)
    return losses.mean() if reduction == "mean" else losses.sum()


def by_hand(model: nn.Module, x: Any, loss: Callable[..., Tensor] = loss_of) -> dict[str, Tensor]:
    """The mean over examples of squared gradients: one backward pass for each example."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(len(x)):
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad(loss(model, x[i : i + 1]), [*params.values()], **options)
        for name, grad in zip(params, grads, strict=True):
            total[name] += grad.square() / len(x)
    return total


def ogn(model: nn.Module, kind: Any = OGN, **options: Any) -> Any:
    """beta2 = 0: ``hess`` is the estimate of the last step; lr = 0: the mean stays."""
    settings: dict[str, Any] = {"lr": 0.0, "ess": 10, "beta2": 0.0, "hess_init": 1.0, **options}
    return kind(model.parameters(), model=model, **settings)


def check(model: nn.Module, optimizer: Any, expected: dict[str, Tensor]) -> None:
    optimizer.step()
    for name, p in model.named_parameters():
        if p in optimizer.state:
            actual = optimizer.state[p]["hess"]
            torch.testing.assert_close(actual, expected[name], rtol=1e-9, atol=1e-13)
        else:
            assert not p.requires_grad or not expected[name].any()


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("name", [name for name in CASES if name not in SPECIAL])
def test_equals_one_backward_pass_per_example_or_is_refused(name: str) -> None:
    case = CASES[name]()
    model = case.model
    x = case.inputs
    optimizer = ogn(model)
    reference = by_hand(model, x)
    before = hooks(model)
    exact = name in LAYERS and name not in MAY_NOT
    try:
        with optimizer.sampled_params(train=True):
            with torch.no_grad():
                model(x)
            model(x).sum()  # never differentiated
            loss_of(model, x).backward()
        check(model, optimizer, reference)
    except OptimizerError as error:
        if exact or "cannot read the gradient of each example for" not in str(error):
            raise
    assert hooks(model) == before


def test_a_loss_that_is_a_sum() -> None:
    model = mlp()
    optimizer = ogn(model, loss_reduction="sum")
    with optimizer.sampled_params(train=True):
        loss_of(model, X, "sum").backward()
    check(model, optimizer, by_hand(model, X))


def checkpointed(reentrant: bool) -> nn.Module:
    parts = {"layer": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
    return graph(lambda m, x: m.head(checkpoint(m.layer, x, use_reentrant=reentrant)), **parts)


def test_activation_checkpointing() -> None:
    model = checkpointed(False)
    optimizer = ogn(model)
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss_of(model, X).backward()
        check(model, optimizer, by_hand(model, X))


def test_autocast() -> None:
    model = mlp().float()
    x = X.float()
    optimizer = ogn(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), optimizer.sampled_params(train=True):
        loss_of(model, x).backward()
    optimizer.step()
    for (name, expected), p in zip(by_hand(model, x).items(), model.parameters(), strict=True):
        actual = optimizer.state[p]["hess"]
        assert actual.dtype == torch.float32, name
        assert (actual - expected).norm() < 0.05 * expected.norm()


def mixing(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.head(h - h.mean(0))


def pair(run: Callable[..., Tensor]) -> nn.Module:
    return graph(run, layer=nn.Linear(4, 5), head=nn.Linear(5, 3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixing": (lambda: pair(mixing), r"'layer.weight', 'layer.bias': the model mixes"),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        "the model mixes",
    ),
    "max_norm": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Embedding(3, 3, max_norm=1.0)),
        "embedding '1'",
    ),
    "reentrant": (lambda: checkpointed(True), "no layer"),
    "two calls": (mlp, "2 calls of model="),
    "a part alone": (mlp, "'0' was called outside"),
    "gradients that were there": (mlp, "call zero_grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str) -> None:
    build, message = REFUSED[case]
    model = build().double()
    x = X.clone().requires_grad_()
    optimizer = VOGN(model.parameters(), lr=0.1, ess=10, model=model)
    if case == "gradients that were there":
        loss_of(model, x).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises((OptimizerError, ModelError), match=message),
        optimizer.sampled_params(train=True),
    ):
        if case == "a part alone":
            model[0](x)
        loss = loss_of(model, x)
        if case == "two calls":
            loss = loss + loss_of(model, x + 1)
        loss.backward()
    assert all(map(torch.equal, model.parameters(), before))
    assert not hooks(model)
    with pytest.raises(OptimizerError, match="without a draw"):
        optimizer.step()


def test_a_model_that_returns_its_loss() -> None:
    """No outputs with a row for each example: what is read is right all the same."""
    inner = mlp()
    model = graph(lambda m, x: loss_of(m.inner, x), inner=inner)
    optimizer = ogn(model)
    with optimizer.sampled_params(train=True):
        model(X).backward()
    check(model, optimizer, by_hand(model, X, lambda m, x: m(x)))


def test_the_graph_of_a_step_is_freed() -> None:
    """A graph whose hooks hold it would stay for ever: memory would grow with every step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    optimizer = VOGN(model.parameters(), lr=0.1, ess=B, model=model)

    def alive() -> int:
        """Tensors alive after one more step, and one more context that fails."""
        step("", optimizer, lambda: loss_of(model, X))
        with pytest.raises(RuntimeError, match="stop"), optimizer.sampled_params(train=True):
            loss_of(model, X).backward()
            raise RuntimeError("stop")
        gc.collect()
        return sum(issubclass(type(x), Tensor) for x in gc.get_objects())

    alive()
    gc.freeze()  # objects of before are neither counted nor visited
    before = alive()
    assert [alive() for _ in range(3)] == [before] * 3


def precision(kind: Any, model: nn.Module, loss: Callable[[], Tensor], ess: float) -> Tensor:
    """The precision of q after three steps of an optimizer."""
    elementwise = kind in (VOGN, OGN)
    noise = torch.Generator().manual_seed(1)
    settings = {"lr": 0.01, "weight_decay": 1.0, "ess": ess, "beta2": 0.5, "generator": noise}
    if elementwise:
        optimizer = kind(model.parameters(), model=model, **settings)
    else:
        optimizer = kind(model, **settings)
    for _ in range(3):
        step("", optimizer, loss)
    if elementwise:
        q = blr.Posterior.from_optimizer(optimizer, model)
    else:
        q = optimizer.posterior()
    return torch.cat([q.precision(n).flatten() for n, _ in model.named_parameters()])


@pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")
@pytest.mark.parametrize("kind", [VOGN, OGN, NoisyKFAC, SLANG])
def test_examples_that_the_loss_leaves_out_do_not_count(kind: type) -> None:
    """The loss and S are the same with examples of ``ignore_index`` and without them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=g).double()
    y = torch.randint(2, (12,), generator=g)
    ignored = torch.where(torch.arange(12) % 3 == 0, -100, y)

    def learned(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        return precision(kind, model, lambda: F.cross_entropy(model(x), y), 8)

    with pytest.warns(UserWarning, match="ignore_index") as warned:
        beside = learned(x, ignored)
    messages = [str(warning.message) for warning in warned]
    assert sum("ignore_index" in message for message in messages) == 1
    alone = learned(x[ignored != -100], y[ignored != -100])
    torch.testing.assert_close(beside, alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [VOGN, NoisyKFAC])
def test_examples_whose_only_logit_saturates_count(kind: type) -> None:
    """Torch's gradient of them is exactly 0; that of softplus is small and positive."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    x[::3, 0] = 50.0
    ones = torch.ones(12).double()
    ends = []
    plain = partial(F.binary_cross_entropy_with_logits, target=ones)
    for loss in (plain, lambda f: F.softplus(-f).mean()):
        model = nn.Linear(3, 1).double()
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", InitialPrecisionWarning)  # after three steps
            ends.append(precision(kind, model, lambda m=model, f=loss: f(m(x)[:, 0]), 1e9))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=0.0)
