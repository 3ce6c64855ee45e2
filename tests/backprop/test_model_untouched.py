"""The model comes back exactly as it was: after every analysis, and after every failure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from models import Graph, graph, normal, seeded
from readings import task_of
from snapshots import untouched
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import CASES

from blr_analysis import leave_one_out, sensitivity, what_if
from blr_analysis.backprop.engine import chunks, predict
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.errors import ModelError
from blr_analysis.posterior import fit_laplace
from blr_analysis.task import Task

# The hooks below are there to be found again, not to be of use.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def as_people_look(module: nn.Module, args: Any, output: Any) -> None:
    """Hooks see ordinary tensors."""
    for tensor in _tensors(output):
        tensor.detach().numpy()


def mixed_modes(model: nn.Module) -> nn.Module:
    """Half of the modules in training mode, gradients and hooks of every kind, a frozen weight."""
    for number, module in enumerate(model.modules()):
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        module.training = number % 2 == 0 and not batch_norm
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, float(number)) if number % 3 else None
    last = list(model.modules())[-1]
    last.register_forward_hook(as_people_look)
    last.register_forward_pre_hook(lambda m, args: None)
    last.register_full_backward_hook(lambda m, gi, go: None)
    return model


@pytest.mark.parametrize(("name", "number"), [(name, n) for n, name in enumerate(CASES)])
def test_after_every_analysis(name: str, number: int) -> None:
    """Left-out predictions come from the sweep of the scores; every fourth model is asked for
    what takes other ways."""
    with seeded(0):
        case = CASES[name]()
    data = [t.clone() for t in _tensors(case.inputs)]
    task = task_of(case)
    mixed_modes(task.model)
    before = torch.get_rng_state()
    with untouched(task.model):
        q = fit_laplace(task, structure="kron", prior_precision=0.7)
        leave_one_out(task, q, correction="first_order")
        if number % 4 == 0:
            sensitivity(task, q, variance=False)
            predict(task, q.mean)
        if task.n_data > 2:
            what_if(task, q, remove=[0], evaluate=task)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    assert all(map(torch.equal, _tensors(case.inputs), data)), "the data were changed"


def _tensors(batch: object) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, Tensor)]


class Fragile(nn.Module):
    """Fails on the n-th forward call with an exception of the user's choice."""

    def __init__(self, error: BaseException, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4).eval(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)
        self.error = error
        self.after = after
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        self.calls += 1
        if self.calls > self.after:
            raise self.error
        return self.head(h)


@pytest.mark.parametrize("after", range(0, 9))
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("shapes"), ModelError),
        (KeyError("mask"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(3), SystemExit),
        (MemoryError(), MemoryError),
    ],
)
def test_after_an_exception_in_the_forward_pass(error, raised, after: int) -> None:
    model = mixed_modes(Fragile(error, after).double())
    task = Task(model, (normal(6, 3), torch.arange(6) % 2))
    with untouched(model), pytest.raises(raised):
        q = fit_laplace(task, structure="kron", prior_precision=1.0)
        sensitivity(task, q)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_an_exception_in_a_consumers_loop(error: type[BaseException]) -> None:
    with seeded(0):
        task = task_of(CASES["images"]())
    mixed_modes(task.model)
    with untouched(task.model):
        with pytest.raises(error):
            for chunk in chunks(task, task.parameters(), size=2):
                chunk.jacobian_terms()
                raise error
        for chunk in chunks(task, task.parameters(), size=2):
            chunk.jacobian_terms()
            break


def test_weights_swapped_by_the_analysis_are_the_posteriors() -> None:
    """Inside, the model runs at the mean; outside, at its own weights, at any time."""
    model = graph(lambda m, x: m.out(x), out=nn.Linear(3, 2))
    task = Task(model, (normal(6, 3), torch.arange(6) % 2))
    own_weight = model.out.weight.detach().clone()
    params = {n: torch.zeros_like(p) for n, p in task.parameters().items()}
    for chunk in chunks(task, params, size=2):
        assert torch.equal(chunk.outputs, torch.zeros(2, 2, dtype=torch.float64))
        assert torch.equal(model.out.weight, own_weight)


def places(m: Graph, x: Tensor) -> Tensor:
    return m.out(x) * (1 + torch.arange(len(x)) % 2).unsqueeze(1)


def overwritten(m: Graph, x: Tensor) -> Tensor:
    h = m.one(x)
    z = m.out(h)
    h.add_(1)
    return z + h.sum(1, keepdim=True)


def table(kind: type, option: str) -> Any:
    return lambda: graph(
        lambda m, x: m.out(m.words((x > 0).long()).flatten(1)),
        words=kind(5, 2, **{option: 1.0 if option == "max_norm" else True}),
        out=nn.Linear(6 if kind is nn.Embedding else 2, 2),
    )


def part(call: Any) -> Any:
    return lambda: graph(call, one=nn.Linear(3, 3), two=nn.Linear(3, 3), out=nn.Linear(3, 2))


def normed(norm: Any) -> Any:
    return lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(norm), nn.Linear(4, 2)).double()


def checkpointed(run: Any) -> Any:
    return part(lambda m, x: m.out(run(lambda h: torch.tanh(m.two(h)), torch.tanh(m.one(x)))))


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


class Backward(torch.autograd.Function):
    """Interrupts the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no way back")


def overflowing() -> nn.Module:
    model = graph(lambda m, x: 100 * m.out(0 * x.half() + 6e4), out=nn.Linear(3, 2)).half()
    nn.init.zeros_(model.out.weight)
    return model


REFUSED = {
    "BatchNorm in training": (normed(nn.BatchNorm1d(4)), r"'1\.0'.*eval\(\)"),
    "SyncBatchNorm in training": (normed(nn.SyncBatchNorm(4)), r"'1\.0'.*eval\(\)"),
    "BatchNorm without statistics": (
        normed(nn.BatchNorm1d(4, track_running_stats=False).eval()),
        r"'1\.0'.*GroupNorm",
    ),
    "examples that are mixed a little": (part(lambda m, x: m.out(x - 1e-4 * x.mean(0))), "batch"),
    "chance": (part(lambda m, x: m.out(x + torch.randn_like(x))), "from call to call"),
    "places in the batch": (part(places), "its place there"),
    "overwritten before the way back": (part(overwritten), "in place"),
    "an error on the way back": (part(lambda m, x: m.out(Backward.apply(m.one(x)))), "no way back"),
    "reentrant checkpointing": (
        checkpointed(partial(checkpoint, use_reentrant=True)),
        "checkpointing",
    ),
    "checkpointing of one's own": (checkpointed(Recomputed.apply), r"'two\.weight'.*checkpointing"),
    "gradients beyond half precision": (overflowing, "NaN or inf in float16: use model.float"),
    **{
        f"{kind.__name__}, {o}": (table(kind, o), o)
        for kind in (nn.Embedding, nn.EmbeddingBag)
        for o in ("max_norm", "scale_grad_by_freq")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_analysed_are_refused(name: str) -> None:
    make, match = REFUSED[name]
    model = make()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    task = Task(model, (normal(6, 3), torch.arange(6) % 2))
    sweeps = [lambda: fit_laplace(task, prior_precision=1.0)]
    if "Norm" in name:
        sweeps.append(lambda: next(iter(chunks(task, task.parameters()))))
        sweeps.append(lambda: predict(task, task.parameters()))
    if "checkpointing" in name:
        sweeps.append(lambda: loss_and_gradient(task, dict(model.named_parameters())))
    for sweep in sweeps:
        with untouched(model), pytest.raises(ModelError, match=match):
            sweep()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing_works_where_nothing_is_run_again() -> None:
    """It runs the forward pass again with the model's own weights, after the swap is over."""
    actual = []
    for run in (partial(checkpoint, use_reentrant=False), lambda inner, x: inner(x)):
        with seeded(0):
            actual.append(Task(checkpointed(run)(), (normal(6, 3), torch.arange(6) % 2)))
    ours, plain = actual
    elsewhere = {n: p + 0.1 for n, p in ours.parameters().items()}  # not the model's own weights
    fit = partial(fit_laplace, structure="diag", prior_precision=1.0)
    for way in (
        lambda t: fit(t).precision("two.weight"),
        lambda t: loss_and_gradient(t, elsewhere)[0]["two.weight"],
    ):
        assert torch.equal(way(ours), way(plain))
