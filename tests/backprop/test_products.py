"""Matrix-free curvature products against dense matrices made by automatic differentiation."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from oracles import relative
from parts import normal
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev
from torch.utils.data import StackDataset

from blr_analysis import Task
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.products import Curvature
from blr_analysis.backprop.record import together
from blr_analysis.errors import InputError, ModelError

LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "poisson")


def problem(likelihood: str, *, conv: bool = False, batch_size: int = 4) -> Task:
    torch.manual_seed(0)
    n, c = 11, 3 if likelihood == "categorical" else 2
    if conv:
        layers = [nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, c)]
        x = normal(n, 1, 6, 6)
    else:
        layers = [nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, c)]
        x = normal(n, 4)
    y = torch.arange(n) % c
    if likelihood != "categorical":
        y = (torch.arange(n * c).view(n, c) % 2).double()
    model = nn.Sequential(*layers).double()
    return Task(model, (x, y), likelihood=likelihood, batch_size=batch_size)


def flat(tree: dict[str, Tensor], lead: int = 0) -> Tensor:
    return torch.cat([t.flatten(lead) for t in tree.values()], dim=-1)


def dense(task: Task, kind: str, indices: Tensor) -> Tensor:
    """The whole matrix. The Hessian is autograd's own: torch.func's disagrees with finite
    differences for LayerNorm (torch 2.13)."""
    x, y = (torch.stack(t) for t in zip(*(task.dataset[int(i)] for i in indices), strict=True))
    params = task.parameters()
    sizes = [p.numel() for p in params.values()]

    def outputs(vector: Tensor) -> Tensor:
        parts = vector.split(sizes)
        values = {n: p.view(params[n].shape) for n, p in zip(params, parts, strict=True)}
        return functional_call(task.model, values, (x,))

    at = flat(params)
    if kind == "hessian":
        found = hessian(lambda v: task.likelihood.nll(outputs(v), y).sum(), at)
        assert isinstance(found, Tensor)
        return found
    jacobian, f = jacrev(outputs)(at), outputs(at)
    targets = task.likelihood.prepare_targets(y, f)
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, task.likelihood.hessian(f, targets), jacobian)


def vectors(task: Task, *lead: int) -> dict[str, Tensor]:
    return {
        n: normal(*lead, *p.shape, seed=i) for i, (n, p) in enumerate(task.parameters().items())
    }


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("conv", [False, True])
def test_products_are_those_of_the_dense_matrix(kind: str, likelihood: str, conv: bool) -> None:
    task = problem(likelihood, conv=conv)
    indices = torch.tensor([9, 0, 3, 4, 7])
    curvature = Curvature(task, task.parameters(), indices=indices, kind=kind)
    matrix = dense(task, kind, indices)
    for lead in ((), (1,), (3, 2)):
        v = vectors(task, *lead)
        found = curvature.product(v, progress=False)
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in v.items()}
        truth = flat(v, len(lead)) @ matrix
        assert relative(flat(found, len(lead)), truth) < 1e-12


def test_loss_and_gradient_come_from_the_same_passes() -> None:
    task = problem("categorical")
    gradient, loss = loss_and_gradient(task, task.parameters())
    x, y = task.dataset.tensors
    truth = nn.functional.cross_entropy(task.model(x), y, reduction="sum")
    grads = torch.autograd.grad(truth, list(task.model.parameters()))
    assert abs(loss - float(truth.detach())) < 1e-10
    for found, expected in zip(gradient.values(), grads, strict=True):
        assert relative(found, expected) < 1e-12


def test_tensors_are_read_in_larger_batches_as_far_as_memory_goes(monkeypatch) -> None:
    x, y = normal(600, 4), torch.arange(600) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    few = Task(model, StackDataset(x, y), batch_size=8)
    many = Task(model, (x, y), batch_size=8)
    order, params = torch.arange(600), many.parameters()
    assert together(few, params, order) == together(many, params, order[:9]) == 8
    assert together(many, params, order) > 600
    (gradient, loss), (again, same) = (loss_and_gradient(t, params) for t in (many, few))
    assert loss == pytest.approx(same, rel=1e-12)
    assert relative(flat(gradient), flat(again)) < 1e-12
    monkeypatch.setattr("blr_analysis.backprop.record.SMALL", 8000)
    assert 8 < together(many, params, order) < 100


def test_budget_changes_what_is_kept_and_nothing_else() -> None:
    task = problem("categorical", conv=True)
    v = vectors(task, 3)
    whole = Curvature(task, task.parameters())
    tight = Curvature(task, task.parameters(), memory_budget=1)
    expected = [whole.product(v, progress=False) for _ in range(2)][1]
    found = [tight.product(v, progress=False) for _ in range(2)][1]
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=0)
    assert whole.products == tight.products == 6
    assert (whole.passes, tight.passes) == (1 + 12, 2 + 12)


def test_parameters_that_are_not_named_stay_the_models_own() -> None:
    task = problem("gaussian")
    last = {n: p for n, p in task.parameters().items() if n.startswith("3")}
    rows = [list(task.parameters()).index(n) for n in last]
    assert rows == [4, 5]
    full = vectors(task)
    zeroed = {n: t if n in last else torch.zeros_like(t) for n, t in full.items()}
    found = Curvature(task, last).product({n: full[n] for n in last}, progress=False)
    expected = Curvature(task, task.parameters()).product(zeroed, progress=False)
    for name in last:
        assert relative(found[name], expected[name]) < 1e-12


def test_a_parameter_that_the_outputs_do_not_depend_on_has_no_curvature() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    task = Task(Partly().double(), (normal(5, 2), normal(5)), likelihood="gaussian")
    for kind in ("ggn", "hessian"):
        found = Curvature(task, task.parameters(), kind=kind).product(vectors(task, 2))
        assert not bool(found["idle.weight"].any())
        assert bool(found["used.weight"].any())


def test_operations_that_cannot_be_batched_go_one_by_one() -> None:
    class Odd(torch.autograd.Function):
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

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Odd.apply(self.layer(x))

    task = Task(Model().double(), (normal(5, 3), normal(5, 2)), likelihood="gaussian")
    v = vectors(task, 3)
    found = Curvature(task, task.parameters()).product(v)
    single = [
        Curvature(task, task.parameters()).product({n: t[k] for n, t in v.items()})
        for k in range(3)
    ]
    for name in v:
        assert relative(found[name], torch.stack([s[name] for s in single])) < 1e-15
        assert bool(found[name].any())


class Words(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.out = table, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        return self.out(torch.tanh(rows if rows.ndim == 2 else rows.mean(1)))


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_embeddings_of_sparse_gradients_have_the_products_of_others(kind: str) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Words(nn.Embedding(7, 3, sparse=sparse)).double()
        task = Task(model, (torch.randint(7, (9, 4)), torch.arange(9) % 2))
        params = task.parameters()
        slope = flat(loss_and_gradient(task, params)[0])
        found.append((slope, flat(Curvature(task, params, kind=kind).product(vectors(task)))))
        assert model.table.sparse is sparse
    assert all(bool(one.any()) and torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_what_torch_differentiates_only_once_is_named(kind: str) -> None:
    task = Task(Words(nn.EmbeddingBag(7, 3)), (torch.randint(7, (9, 4)), torch.arange(9) % 2))
    with pytest.raises(ModelError, match="'table'"):
        Curvature(task, task.parameters(), kind=kind).product(vectors(task, 2))


def test_the_model_is_left_as_it_is() -> None:
    task = problem("categorical")
    task.model.train()
    before = {n: p.detach().clone() for n, p in task.model.named_parameters()}
    Curvature(task, {n: p + 1 for n, p in task.parameters().items()}).product(vectors(task))
    assert task.model.training
    for name, p in task.model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_bad_input_is_named() -> None:
    task = problem("categorical")
    with pytest.raises(InputError, match="kind must be one of 'ggn', 'hessian'"):
        Curvature(task, task.parameters(), kind="fisher")
    curvature = Curvature(task, task.parameters())
    with pytest.raises(InputError, match=r"needs '0.bias' of shape \(5,\).*got nothing"):
        curvature.product({n: v for n, v in vectors(task).items() if n != "0.bias"})
    with pytest.raises(InputError, match=r"got \(4, 5\)"):
        curvature.product({**vectors(task), "0.weight": normal(4, 5)})
    with pytest.raises(InputError, match="leading dimensions differ"):
        curvature.product({**vectors(task), "0.bias": normal(2, 5)})
    frozen = nn.Sequential(nn.Linear(4, 3)).double()
    detached = Task(
        frozen, (normal(5, 4), torch.arange(5) % 3), forward=lambda m, b: (m(b[0]).detach(), b[1])
    )
    with pytest.raises(ModelError, match="do not depend on"):
        Curvature(detached, detached.parameters()).product(
            {n: torch.ones_like(p) for n, p in detached.parameters().items()}
        )


@pytest.mark.parametrize("kind", ["ggn", "hessian"])
def test_weights_are_let_go_of(kind: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    task = Task(model, (torch.randn(6, 3), torch.randint(2, (6,))))
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    watched = weakref.ref(weights["0.weight"].untyped_storage())
    curvature = Curvature(task, weights, kind=kind)
    curvature.product({n: torch.ones_like(w) for n, w in weights.items()}, progress=False)
    del curvature, weights
    gc.collect()
    assert watched() is None
