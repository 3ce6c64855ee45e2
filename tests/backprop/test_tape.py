"""What a tape notes of a training's passes, beside autograd's own gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import graph, normal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.record import Visit
from blr_analysis.backprop.tape import Gradients, Reader, Tape, terms_of, unlike_autograd
from blr_analysis.errors import ModelError

N = 6
X = normal(N, 4)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.twice(torch.tanh(m.first(x)))))


def twice(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.twice(torch.tanh(m.twice(torch.tanh(m.first(x)))))))


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        h = checkpoint(
            lambda v: torch.tanh(m.twice(torch.tanh(m.first(v)))), x, use_reentrant=reentrant
        )
        return m.head(h)

    return run


RUNS = {
    "plain": plain,
    "a layer called twice": twice,
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
}


def network(run: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(4, 5), "twice": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    return graph(run, **layers).train()


def losses(outputs: Tensor) -> Tensor:
    return (outputs - 0.3).square().sum(1)


def axes(visit: Visit, gradients: Gradients) -> Any:
    return [Axis()], [Axis()]


class Last(Reader):
    """The terms of the one pass that a tape noted."""

    def __init__(self, model: nn.Module) -> None:
        self.tape = Tape(model, self)
        self.tape.start(units_of(model, {name for name, _ in model.named_parameters()}))

    def terms(self) -> Any:
        (forward,) = [forward for forward in self.tape.passes if forward.differentiated]
        calls = forward.differentiated
        gradients = [call.gradients for call in calls]
        return terms_of(self.tape.model, calls, gradients, axes, forward.batch)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scale", [1.0, 2.0**10], ids=["", "scaled"])
def test_sums_and_squares_are_autograds(name: str, scale: float) -> None:
    model = network(RUNS[name])
    reader = Last(model)
    x = X.clone().requires_grad_()  # as reentrant checkpoints ask for
    (losses(model(x)).sum() * scale).backward()
    terms = reader.terms()
    reader.tape.stop()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == 6
    assert not unlike_autograd(terms, gradients, [x])
    assert unlike_autograd(terms, {name: 2 * g for name, g in gradients.items()}, [x])
    squares = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(N):
        model.zero_grad()
        (losses(model(x[i : i + 1])).sum() * scale).backward()
        for name, p in model.named_parameters():
            squares[name] += p.grad.square()
    actual = {name: total for term in terms for name, total in term.square_sum().items()}
    torch.testing.assert_close(actual, squares)


def test_autocast_and_a_gradient_scaler() -> None:
    model = network(plain).float()
    reader = Last(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = losses(model(X.float())).mean()
    scaler.scale(loss).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert not unlike_autograd(reader.terms(), gradients, [torch.zeros(1, dtype=torch.bfloat16)])


def test_the_examples_that_count_alone() -> None:
    model = network(plain)
    reader = Last(model)
    counts = torch.arange(N) % 3 > 0
    losses(model(X))[counts].mean().backward()
    (forward,) = reader.tape.passes
    assert torch.equal(forward.counted(), counts)
    chosen = forward.of_examples(counts.nonzero().flatten())
    first = chosen.differentiated[-1]
    assert chosen.batch == int(counts.sum())
    assert torch.equal(first.visit.args[0], X[counts])


def test_nothing_of_copies_of_passes_without_gradients_and_after_the_end() -> None:
    model = network(plain)
    reader = Last(model)
    losses(copy.deepcopy(model)(X)).sum().backward()
    with torch.no_grad():
        model(X)
    assert not reader.tape.passes
    losses(model(X)).sum().backward()
    assert len(reader.tape.passes) == 1
    reader.tape.stop()
    losses(model(X)).sum().backward()
    assert not reader.tape.passes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_input_that_is_overwritten_is_refused() -> None:
    model = network(plain)
    model.get_submodule("first").weight.requires_grad_(False)
    reader = Last(model)
    inputs = X.clone()
    loss = losses(model(inputs)).sum()
    inputs.add_(1.0)
    with pytest.raises(ModelError, match="in place"):
        loss.backward()
    reader.tape.stop()
