"""Models that cannot be analysed are refused, with what to do about it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from models import seeded
from parts import Graph, graph, normal
from torch import Tensor, nn

from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.errors import ModelError
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task


class Mixing(nn.Module):
    """Subtracts a little of the batch's mean."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.out = share, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - self.share * x.mean(0))


@pytest.mark.parametrize("share", [1.0, 1e-4])
def test_examples_that_are_mixed_are_refused(share: float) -> None:
    task = Task(Mixing(share).double(), (normal(6, 3), torch.arange(6) % 2))
    with pytest.raises(ModelError, match="batch"):
        fit_laplace(task, prior_precision=1.0, progress=False)


def test_outputs_that_depend_on_the_place_in_the_batch_are_refused() -> None:
    def call(m: Graph, x: Tensor) -> Tensor:
        return m.out(x) * (1 + torch.arange(len(x)) % 2).unsqueeze(1)

    task = Task(graph(call, out=nn.Linear(3, 2)), (normal(6, 3), torch.arange(6) % 2))
    with pytest.raises(ModelError, match="its place there"):
        fit_laplace(task, prior_precision=1.0, progress=False)


class Noisy(nn.Module):
    """Dropout that stays on in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.dropout(x, 0.5, training=True))


def test_random_models_are_refused() -> None:
    task = Task(Noisy().double(), (normal(6, 3), torch.arange(6) % 2))
    with pytest.raises(ModelError, match=r"deterministic|random"):
        fit_laplace(task, prior_precision=1.0, progress=False)


def test_what_autograd_cannot_do_is_refused() -> None:
    def overwritten(m: Graph, x: Tensor) -> Tensor:
        h = m.one(x)
        z = m.two(h)
        h.add_(1)
        return m.out(z) + h.sum(1, keepdim=True)

    parts = dict(one=nn.Linear(3, 4), two=nn.Linear(4, 4), out=nn.Linear(4, 2))
    task = Task(graph(overwritten, **parts), (normal(6, 3), torch.arange(6) % 2))
    with pytest.raises(ModelError, match="in place"):
        fit_laplace(task, prior_precision=1.0, progress=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing_works_where_nothing_is_run_again() -> None:
    """It runs the forward pass again with the model's own weights, after the swap is over."""
    plain, checkpointed = (checkpointed_task(use_reentrant=k) for k in (False, True))
    with pytest.raises(ModelError, match="checkpointing"):
        fit_laplace(checkpointed, prior_precision=1.0, progress=False)
    plain.model.use = lambda inner, x: inner(x)
    ours = checkpointed_task(use_reentrant=False)
    elsewhere = {n: p + 0.1 for n, p in ours.parameters().items()}  # not the model's own weights
    for way in (lambda t: fit_laplace(t, **FIT).precision("two.weight"),
                lambda t: loss_and_gradient(t, elsewhere)[0]["two.weight"]):  # fmt: skip
        assert torch.equal(way(ours), way(plain))


FIT: dict[str, Any] = dict(prior_precision=1.0, structure="diag", progress=False)


def checkpointed_task(use_reentrant: bool) -> Task:
    from torch.utils.checkpoint import checkpoint

    def call(m: Graph, x: Tensor) -> Tensor:
        inner = lambda h: torch.tanh(m.two(h))  # noqa: E731
        return m.out(m.use(inner, torch.tanh(m.one(x))))

    with seeded(0):
        parts = dict(one=nn.Linear(3, 4), two=nn.Linear(4, 4), out=nn.Linear(4, 2))
    model = graph(call, **parts)
    model.use = partial(checkpoint, use_reentrant=use_reentrant)
    return Task(model, (normal(6, 3), torch.arange(6) % 2))


class Recomputed(torch.autograd.Function):
    """Checkpointing as people write it: forward again in the backward pass, and backward()."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), grads)
        return None, x.grad


def test_checkpointing_of_ones_own_is_refused() -> None:
    """``autograd.grad`` says 0 for its layer, ``backward()`` the truth."""

    def call(m: Graph, x: Tensor) -> Tensor:
        return m.out(Recomputed.apply(lambda h: torch.tanh(m.two(h)), torch.tanh(m.one(x))))

    parts = dict(one=nn.Linear(3, 4), two=nn.Linear(4, 4), out=nn.Linear(4, 2))
    model = graph(call, **parts)
    x, y = normal(6, 3), torch.arange(6) % 2
    nn.functional.cross_entropy(model(x), y).backward()
    held = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert held["two.weight"].any()
    with pytest.raises(ModelError, match=r"'two\.weight'.*checkpointing"):
        fit_laplace(Task(model, (x, y)), prior_precision=1.0, progress=False)
    with pytest.raises(ModelError, match=r"'two\.weight'.*checkpointing"):
        loss_and_gradient(Task(model, (x, y)), {n: p.detach() for n, p in model.named_parameters()})
    assert all(torch.equal(p.grad, held[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("options", "match"),
    [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "scale_grad_by_freq")],
)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_with_gradients_of_their_own_are_refused(kind, options, match) -> None:
    model = graph(
        lambda m, i: m.out(m.words(i).flatten(1)),
        words=kind(5, 2, **options),
        out=nn.Linear(8 if kind is nn.Embedding else 2, 2),
    )
    task = Task(model, (torch.randint(0, 5, (6, 4)), torch.arange(6) % 2))
    with pytest.raises(ModelError, match=match):
        fit_laplace(task, prior_precision=1.0, progress=False)
