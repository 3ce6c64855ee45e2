"""Gradients of single examples, read from the user's own forward and backward pass."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import blr_analysis as blr
from blr_analysis.errors import InitialPrecisionWarning, ModelError, OptimizerError
from blr_analysis.learning_rule.optim import OGN, SLANG, VOGN, NoisyKFAC

B = 6


class Made(nn.Module):
    """Of parts, with a function for its forward pass."""

    def __init__(self, run: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Tensor:
        return self.run(self, *args)


def tokens() -> nn.Module:
    """Embedding, a causal-like mix over time, normalisation, tied read-out."""

    def run(m: Any, ids: Tensor) -> Tensor:
        h = m.embed(ids)
        h = m.norm(h + m.inner(h).cumsum(1))
        return m.out(F.relu(h, inplace=True)).mean(1)

    embed, out = nn.Embedding(11, 8, padding_idx=0), nn.Linear(8, 11, bias=False)
    out.weight = embed.weight
    return Made(run, embed=embed, inner=nn.Linear(8, 8), norm=nn.LayerNorm(8), out=out)


def twice() -> nn.Module:
    """One layer called twice; a parameter of the model's own; a residual."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.head((torch.tanh(m.first(h)) + h) * m.scale)

    parts = {"first": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    return Made(run, scale=nn.Parameter(torch.ones(5)), **parts)


def attention() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.norm(x + m.attention(x, x, x, need_weights=False)[0]).mean(1))

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Made(run, attention=attention, norm=nn.RMSNorm(8), head=nn.Linear(8, 3))


def recurrent() -> nn.Module:
    parts = {"cell": nn.GRU(4, 5, batch_first=True), "head": nn.Linear(5, 3)}
    return Made(lambda m, x: m.head(m.cell(x)[0][:, -1]), **parts)


def mlp() -> nn.Module:
    layers = (nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 4, bias=False), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(4, 3))


def convolutional() -> nn.Module:
    layers = (
        *(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.GroupNorm(2, 4)),
        *(nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, stride=2, groups=2)),
        *(nn.BatchNorm2d(6).eval(), nn.Flatten(), nn.Linear(54, 3)),
    )
    return nn.Sequential(*layers)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(B, 5)),
    "convolutional": (convolutional, lambda: torch.randn(B, 2, 8, 8)),
    "tokens": (tokens, lambda: torch.randint(11, (B, 9))),
    "twice": (twice, lambda: torch.randn(B, 5)),
    "attention": (attention, lambda: torch.randn(B, 4, 8)),
    "recurrent": (recurrent, lambda: torch.randn(B, 4, 4)),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model, x = build().double(), inputs()
    return model, (x.double() if x.is_floating_point() else x), torch.randint(3, (B,))


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The mean over examples of squared gradients: one backward pass for each example."""
    model = copy.deepcopy(model)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        for name, p in model.named_parameters():
            total[name] += 0 if p.grad is None else p.grad.square() / len(x)
    return total


def ogn(model: nn.Module, kind: Any = OGN, **options: Any) -> Any:
    """beta2 = 0: ``hess`` is the estimate of the last step; lr = 0: the mean stays."""
    settings: dict[str, Any] = {"lr": 0.0, "ess": 10, "beta2": 0.0, "hess_init": 1.0, **options}
    return kind(model.parameters(), model=model, **settings)


def check(model: nn.Module, optimizer: Any, expected: dict[str, Tensor]) -> None:
    optimizer.step()
    for name, p in model.named_parameters():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(
            optimizer.state[p]["hess"], expected[name], rtol=1e-9, atol=1e-13
        )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def look(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, **options: Any) -> None:
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, **options).backward()


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_backward_pass_per_example(name: str) -> None:
    """At the weights that were drawn, of a mean and a sum, in one pass or in several."""
    model, x, y = problem(name)
    optimizer = ogn(model)
    look(model, optimizer, x, y)
    check(model, optimizer, by_hand(model, x, y))
    optimizer = ogn(model, loss_reduction="sum")
    look(model, optimizer, x, y, reduction="sum")
    check(model, optimizer, by_hand(model, x, y))
    optimizer = ogn(model)
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        with torch.no_grad():
            model(x[:2])
        model(x[:1]).sum()  # never differentiated
        for half in (slice(0, 3), slice(3, 6)):
            (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
    check(model, optimizer, by_hand(model, x, y))
    optimizer = ogn(model, VOGN)
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        drawn = copy.deepcopy(model)
        F.cross_entropy(model(x), y).backward()
    check(model, optimizer, by_hand(drawn, x, y))


def checkpointed(reentrant: bool) -> nn.Module:
    parts = {"layer": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    return Made(lambda m, x: m.head(checkpoint(m.layer, x, use_reentrant=reentrant)), **parts)


def test_activation_checkpointing() -> None:
    torch.manual_seed(0)
    model, (_, x, y) = checkpointed(False).double(), problem("mlp")
    optimizer = ogn(model)
    for _ in range(3):
        look(model, optimizer, x, y)
        check(model, optimizer, by_hand(model, x, y))


def test_frozen_and_unused_parameters() -> None:
    inner, x, y = problem("mlp")
    inner[0].weight.requires_grad_(False)
    model = Made(lambda m, x: m.inner(x), inner=inner, idle=nn.Linear(2, 2).double())
    optimizer = ogn(model)
    look(model, optimizer, x, y)
    optimizer.step()
    touched = {n for n, p in model.named_parameters() if p in optimizer.state}
    assert touched == {f"inner.{n}" for n in ("0.bias", "2.weight", "4.weight", "4.bias")}


def test_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    x, y = torch.randn(B, 5), torch.randint(3, (B,))
    optimizer = ogn(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        look(model, optimizer, x, y)
    optimizer.step()
    for (name, expected), p in zip(by_hand(model, x, y).items(), model.parameters(), strict=True):
        found = optimizer.state[p]["hess"]
        assert found.dtype == torch.float32, name
        assert (found - expected).norm() < 0.05 * expected.norm()


# Refusals -------------------------------------------------------------------------------------


def pair(run: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    return lambda: Made(run, layer=nn.Linear(5, 5), head=nn.Linear(5, 3))


def time_first(steps: int) -> Callable[[], nn.Module]:
    """Works on ``[T, B, D]``."""
    return pair(
        lambda m, x: m.head(m.layer(x[:, None].expand(-1, steps, -1).transpose(0, 1)).mean(0))
    )


def mixing(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x)
    return m.head(h - h.mean(0))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixing": (pair(mixing), r"'layer.weight', 'layer.bias': the model mixes"),
    "functional": (
        pair(lambda m, x: m.head(m.layer(x) + F.linear(x, m.layer.weight))),
        "'layer.weight': .*do not add up",
    ),
    "never called": (
        pair(lambda m, x: m.head(F.linear(x, m.layer.weight))),
        "'layer.weight': no layer",
    ),
    "time first": (time_first(2), r"outputs \[\(2, 6, 5\)\]"),
    "square": (time_first(B), "'layer.weight', 'layer.bias': the model mixes"),  # by its shapes
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        "BatchNorm1d '1' mixes",
    ),
    "max_norm": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.Embedding(3, 3, max_norm=1.0)),
        "embedding '1'",
    ),
    "reentrant": (lambda: checkpointed(True), "no layer"),
    "two calls, one backward": (
        lambda: Made(lambda m, x: m.inner(x), inner=nn.Linear(5, 3)),
        "one backward per call",
    ),
    "a part alone": (mlp, "'0' was called outside"),
    "gradients that were there": (mlp, "call zero_grad"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case: str) -> None:
    build, message = REFUSED[case]
    torch.manual_seed(0)
    model = build().double()
    x, y = torch.randn(B, 5).double().requires_grad_(), torch.randint(3, (B,))
    optimizer = VOGN(model.parameters(), lr=0.1, ess=10, model=model)
    if case == "gradients that were there":
        F.cross_entropy(model(x), y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with (
        pytest.raises((OptimizerError, ModelError), match=message),
        optimizer.sampled_params(train=True),
    ):
        if case == "a part alone":
            model[0](x)
        f = model(x) + (model(x + 1) if case.startswith("two calls") else 0)
        F.cross_entropy(f, y).backward()
    for p, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, expected)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(OptimizerError, match="without a draw"):
        optimizer.step()


def test_a_model_that_returns_its_loss() -> None:
    """No outputs with a row for each example: what is read is right all the same."""
    inner, x, y = problem("mlp")
    model = Made(lambda m, x, y: F.cross_entropy(m.inner(x), y), inner=inner)
    optimizer = ogn(model)
    with optimizer.sampled_params(train=True):
        model(x, y).backward()
    check(model, optimizer, {f"inner.{n}": v for n, v in by_hand(inner, x, y).items()})


def test_the_graph_of_a_step_is_freed() -> None:
    """A graph whose hooks hold it would stay for ever: memory would grow with every step."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 3))
    optimizer = VOGN(model.parameters(), lr=0.1, ess=B, model=model)
    x, y = torch.randn(B, 5), torch.randint(0, 3, (B,))

    def held() -> int:
        """Tensors alive after one more step, and one more context that fails."""
        look(model, optimizer, x, y)
        optimizer.step()
        with pytest.raises(RuntimeError, match="stop"), optimizer.sampled_params(train=True):
            F.cross_entropy(model(x), y).backward()
            raise RuntimeError("stop")
        gc.collect()
        return sum(issubclass(type(found), Tensor) for found in gc.get_objects())

    held()
    gc.freeze()  # what stands is not counted, and not visited
    before = held()
    assert [held() for _ in range(3)] == [before] * 3


def precision(kind: Any, model: nn.Module, loss: Callable[[], Tensor], ess: float) -> Tensor:
    """Of q after three steps of an optimizer."""
    given = {"lr": 0.01, "weight_decay": 1.0, "ess": ess, "beta2": 0.5}
    given["generator"] = torch.Generator().manual_seed(1)
    single = kind in (VOGN, OGN)
    made = {"model": model, **given} if single else given
    optimizer = kind(model.parameters() if single else model, **made)
    for _ in range(3):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss().backward()
        optimizer.step()
    q = blr.Posterior.from_optimizer(optimizer, model) if single else optimizer.posterior()
    return torch.cat([q.precision(n).flatten() for n, _ in model.named_parameters()])


@pytest.mark.filterwarnings("ignore::blr_analysis.errors.InitialPrecisionWarning")
@pytest.mark.parametrize("kind", [VOGN, OGN, NoisyKFAC, SLANG])
def test_examples_that_the_loss_leaves_out_do_not_count(kind: type) -> None:
    """Those of ``ignore_index`` beside the others, or the others alone: the same loss and S."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=g).double(), torch.randint(2, (12,), generator=g)
    ignored = torch.where(torch.arange(12) % 3 == 0, -100, y)

    def learned(x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        return precision(kind, model, lambda: F.cross_entropy(model(x), y), 8)

    with pytest.warns(UserWarning, match="ignore_index") as told:
        beside = learned(x, ignored)
    assert len([w for w in told if "ignore_index" in str(w.message)]) == 1
    alone = learned(x[ignored != -100], y[ignored != -100])
    torch.testing.assert_close(beside, alone, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [VOGN, NoisyKFAC])
def test_examples_whose_only_logit_saturates_count(kind: type) -> None:
    """Torch's gradient of them is exactly 0; softplus keeps what is left of it."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    x[::3, 0] = 50.0
    ones, ends = torch.ones(12).double(), []
    losses = (
        lambda f: F.binary_cross_entropy_with_logits(f, ones),
        lambda f: F.softplus(-f).mean(),
    )
    for loss in losses:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        nn.init.ones_(model.weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", InitialPrecisionWarning)  # after three steps
            told = precision(kind, model, lambda m=model, f=loss: f(m(x)[:, 0]), 1e9)
        ends.append(told)
    torch.testing.assert_close(*ends, rtol=1e-9, atol=0.0)
