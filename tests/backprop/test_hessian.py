"""The loss's sum and gradient, and products with its Hessian, against automatic differentiation."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from models import graph, normal, seeded
from oracles import flatten, relative, rows
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call
from torch.utils.data import StackDataset

from blr_analysis import Task
from blr_analysis.backprop.hessian import Hessian
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.record import examples_per_pass
from blr_analysis.errors import ModelError

LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "poisson")


def problem(likelihood: str, *, conv: bool = False, **options: Any) -> Task:
    n = 11
    c = 3 if likelihood == "categorical" else 2
    with seeded(0):
        if conv:
            layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, c)]
        else:
            layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, c)]
    y = torch.arange(n) % c
    if likelihood != "categorical":
        y = (torch.arange(n * c).view(n, c) % 2).double()
    x = normal(n, 1, 6, 6) if conv else normal(n, 4)
    model = nn.Sequential(*layers).double()
    return Task(model, (x, y), likelihood=likelihood, batch_size=4, **options)


def dense(task: Task) -> Tensor:
    """The whole matrix by autograd: torch.func's disagrees with finite differences for LayerNorm
    (torch 2.13)."""
    x, y = task.dataset.tensors
    params = task.parameters()
    sizes = [p.numel() for p in params.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = zip(params.items(), vector.split(sizes), strict=True)
        f = functional_call(task.model, {n: v.view(p.shape) for (n, p), v in parts}, (x,))
        return task.likelihood.nll(f, y).sum()

    actual = hessian(loss, flatten(params))
    assert isinstance(actual, Tensor)
    return actual


def vectors(task: Task, count: int = 3) -> dict[str, Tensor]:
    params = task.parameters().items()
    return {n: normal(count, *p.shape, seed=i) for i, (n, p) in enumerate(params)}


def product(task: Task, v: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    return Hessian(task, task.parameters()).product(vectors(task) if v is None else v)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("conv", [False, True])
def test_products_are_those_of_the_dense_matrix(likelihood: str, conv: bool) -> None:
    task = problem(likelihood, conv=conv)
    task.model.train()
    before = {n: p.detach().clone() for n, p in task.model.named_parameters()}
    matrix = dense(task)
    for count in (1, 3):
        v = vectors(task, count)
        assert relative(rows(product(task, v)), rows(v) @ matrix) < 1e-12
    assert task.model.training
    assert all(torch.equal(p, before[n]) for n, p in task.model.named_parameters())
    tight = problem(likelihood, conv=conv, memory_budget=1)
    again = Hessian(tight, tight.parameters())
    for _ in range(2):  # nothing is kept between the two
        assert relative(rows(again.product(v)), rows(v) @ matrix) < 1e-12


def test_loss_and_gradient_come_from_the_same_passes() -> None:
    task = problem("categorical")
    gradient, loss = loss_and_gradient(task, task.parameters())
    x, y = task.dataset.tensors
    truth = nn.functional.cross_entropy(task.model(x), y, reduction="sum")
    grads = torch.autograd.grad(truth, list(task.model.parameters()))
    assert abs(loss - float(truth.detach())) < 1e-10
    for actual, expected in zip(gradient.values(), grads, strict=True):
        assert relative(actual, expected) < 1e-12


def test_tensors_are_read_in_larger_batches_as_far_as_memory_goes() -> None:
    x = normal(600, 4)
    y = torch.arange(600) % 3
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        wide = nn.Sequential(nn.Linear(4, 40_000), nn.Tanh(), nn.Linear(40_000, 3)).double()
    fetched = Task(model, StackDataset(x, y), batch_size=8)
    tensors = Task(model, (x, y), batch_size=8)
    of_wide_model = Task(wide, (x, y), batch_size=8)
    order = torch.arange(600)
    params = tensors.parameters()
    assert examples_per_pass(fetched, params, order) == 8
    assert examples_per_pass(tensors, params, order[:9]) == 8
    assert examples_per_pass(tensors, params, order) > 600
    n_wide = examples_per_pass(of_wide_model, of_wide_model.parameters(), order)
    assert 8 < n_wide < 400  # 640 kB each of 64 MiB
    gradient, loss = loss_and_gradient(tensors, params)
    expected_gradient, expected_loss = loss_and_gradient(fetched, params)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert relative(flatten(gradient), flatten(expected_gradient)) < 1e-12


def test_a_parameter_that_the_outputs_do_not_depend_on_has_no_curvature() -> None:
    model = graph(lambda m, x: m.used(x), used=nn.Linear(2, 1), idle=nn.Linear(2, 1))
    actual = product(Task(model, (normal(5, 2), normal(5)), likelihood="gaussian"))
    assert not bool(actual["idle.weight"].any())
    assert bool(actual["used.weight"].any())


class Odd(torch.autograd.Function):
    """A sine that ``vmap`` cannot go back through."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if torch._C._functorch.is_batchedtensor(grad):
            raise RuntimeError("not under vmap")
        return grad * x.cos()


def test_operations_that_cannot_be_batched_go_one_by_one() -> None:
    odd, plain = (
        graph(lambda m, x, f=f: f(m.layer(x)), layer=nn.Linear(3, 2))
        for f in (Odd.apply, torch.sin)
    )
    odd.load_state_dict(plain.state_dict())
    data = normal(5, 3), normal(5, 2)
    ours, truth = (rows(product(Task(m, data, likelihood="gaussian"))) for m in (odd, plain))
    assert relative(ours, truth) < 1e-12


class Words(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        return self.out(torch.tanh(rows if rows.ndim == 2 else rows.mean(1)))


def test_embeddings_of_sparse_gradients_have_the_products_of_others() -> None:
    vectors = []  # the gradient and the Hessian's products, dense and sparse
    for sparse in (False, True):
        with seeded(0):
            model = Words(nn.Embedding(7, 3, sparse=sparse)).double()
            task = Task(model, (torch.randint(7, (9, 4)), torch.arange(9) % 2))
        slope = flatten(loss_and_gradient(task, task.parameters())[0])
        vectors.append((slope, rows(product(task))))
        assert model.table.sparse is sparse
    for dense, of_sparse in zip(*vectors, strict=True):
        assert bool(dense.any())
        assert torch.equal(dense, of_sparse)


def test_what_torch_cannot_differentiate_is_named() -> None:
    twice = Task(Words(nn.EmbeddingBag(7, 3)), (torch.randint(7, (9, 4)), torch.arange(9) % 2))
    with pytest.raises(ModelError, match="'table'"):
        product(twice)
    data = normal(5, 4).float(), torch.arange(5) % 3
    cut = Task(nn.Linear(4, 3), data, forward=lambda m, b: (m(b[0]).detach(), b[1]))
    with pytest.raises(ModelError, match="do not depend on"):
        product(cut)


def test_weights_are_let_go_of() -> None:
    task = problem("categorical")
    weights = {n: p.detach().clone() for n, p in task.model.named_parameters()}
    watched = weakref.ref(weights["0.weight"].untyped_storage())
    curvature = Hessian(task, weights)
    curvature.product(vectors(task))
    del curvature, weights
    gc.collect()
    assert watched() is None
