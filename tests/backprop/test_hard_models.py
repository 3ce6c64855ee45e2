"""Models that look like one thing on a few examples and do another: exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Case, graph, normal, seeded, tokens
from oracles import dense_jacobian, relative
from readings import EXACT, example, jacobian_of, task_of, ways
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader
from zoo import CASES

from blr_analysis.task import Task


def made(call: Any, x: Tensor, **parts: Any) -> Task:
    return task_of(Case(graph(call, **parts), x))


def padded(call: Any, lengths: list[int], **parts: Any) -> Task:
    """Sentences of these lengths, each batch padded with zeros to its longest."""
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(1, 6, (t,), generator=generator), i % 2) for i, t in enumerate(lengths)]

    def collate(items):
        ids = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return ids, torch.tensor([y for _, y in items])

    return Task(graph(call, **parts), DataLoader(rows, collate_fn=collate))


def stacked(layer: nn.Module, *bias: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)).double()
    model[0].bias = nn.Parameter(torch.rand(bias).double())
    return model


def routed(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    mixed = rows.new_zeros(len(rows), 4)
    for expert, side in ((m.left, rows[:, 0] > 0), (m.right, rows[:, 0] <= 0)):
        mixed[side] = torch.tanh(expert(rows[side]))
    return m.out(mixed).view(len(x), 2, 2).mean(1)


def one_each_on_the_probe_only() -> Tensor:
    signs = [[1, -1], [1, 1], [-1, -1], [1, 1], [1, -1], [-1, -1], [1, 1], [-1, -1], [-1, 1]]
    x = normal(9, 2, 3)
    x[:, :, 0] = x[:, :, 0].abs() * torch.tensor(signs)
    return x


def flattened(m: Any, ids: Tensor) -> Tensor:
    mask = (ids > 0).double()
    h = torch.tanh(m.inner(m.words(ids).flatten(0, 1))).view(*ids.shape, 4)
    return m.out((h * mask.unsqueeze(-1)).sum(1))


def unrolled(m: Any, ids: Tensor) -> Tensor:
    h = torch.zeros(len(ids), 4, dtype=torch.float64)
    for step, live in zip(m.words(ids).unbind(1), (ids > 0).unbind(1), strict=True):
        h = torch.where(live.unsqueeze(1), torch.tanh(m.cell(torch.cat([h, step], 1))), h)
    return m.out(h)


def cube(size: int) -> Task:
    """[B, T, D] and [T, B, D] with B = T = D, so that no shape tells one from another."""
    parts = dict(lin=nn.Linear(size, size), seq=nn.GRU(size, size), out=nn.Linear(size, size))
    return made(
        lambda m, x: m.out(m.seq(torch.tanh(m.lin(x.transpose(0, 1))))[0][-1]),
        normal(size, size, size),
        **parts,
    )


def looped(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.out(torch.tanh((m.one if r[0] > 0 else m.two)(r))) for r in x])


def ensemble(m: Any, x: Tensor) -> Tensor:
    def member(weight: Tensor, bias: Tensor) -> Tensor:
        return functional_call(m.base, {"weight": weight, "bias": bias}, (x,))

    return torch.tanh(vmap(member)(m.weights, m.biases)).mean(0) + vmap(m.base)(x)


def packed(m: Any, rows: Tensor) -> Tensor:
    options = dict(batch_first=True, enforce_sorted=False)
    words = nn.utils.rnn.pack_padded_sequence(m.words(rows[:, :5]), rows[:, 5], **options)
    return m.out(m.seq(words)[1][0][-1])


def distinct(m: Any, x: Tensor) -> Tensor:
    """Rows that belong to several examples, and whose number does not follow the batch."""
    words, place = torch.unique(x[:, 0].long(), return_inverse=True)
    return m.out(torch.tanh(m.words(words))[place] * x[:, 1:])


def gain() -> nn.Module:
    """Random in training; autograd keeps its gradient exp(x), while x may be overwritten."""
    return graph(
        lambda m, x: nn.functional.dropout(torch.exp(x) * m.weight, 0.5, m.training),
        weight=nn.Parameter(torch.randn(4)),
    )


def overwritten(m: Any, x: Tensor) -> Tensor:
    h = m.one(x)
    gained = m.gain(h)
    h.mul_(1 + 2 * (x[:, :1] > 5))  # never on the probe: the first, fourth and last
    return m.out(gained + h)


class Router(nn.Linear):
    """Gives its scores and what it makes of them, as mixtures of experts do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = super().forward(x)
        return scores, scores.softmax(-1)


def gated(m: Any, x: Tensor) -> Tensor:
    scores, shares = m.router(m.inner(x))
    counts = (x[:, :1] > 5).double()  # never on the probe
    return m.out(counts * (shares + scores) + x)


def forces(m: Any, x: Tensor) -> Tensor:
    """The gradient of an energy: the weights are used backward as well."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.out(torch.tanh(m.one(x))).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


X = normal(7, 3)
HARD: dict[str, Callable[[], Task]] = {
    "routed one per example on the probe only": lambda: made(
        routed,
        one_each_on_the_probe_only(),
        left=nn.Linear(3, 4),
        right=nn.Linear(3, 4),
        out=nn.Linear(4, 2),
    ),
    "lengths that change, flattened": lambda: padded(
        flattened,
        [3, 5, 1, 2, 2, 4, 3],
        words=nn.Embedding(6, 3),
        inner=nn.Linear(3, 4),
        out=nn.Linear(4, 2),
    ),
    "more calls than on the probe": lambda: padded(  # which sees the first, fourth and last
        unrolled,
        [2, 2, 5, 2, 4, 2, 2],
        words=nn.Embedding(6, 3),
        cell=nn.Linear(7, 4),
        out=nn.Linear(4, 2),
    ),
    **{f"as long as wide, {size}": lambda size=size: cube(size) for size in (3, 5, 7)},
    "torchscript": lambda: task_of(Case(torch.jit.trace(stacked(nn.Tanh(), 4), X), X)),
    "looped": lambda: made(
        looped, X, one=nn.Linear(3, 4), two=nn.Linear(3, 4), out=nn.Linear(4, 2)
    ),
    "ensemble by vmap": lambda: made(
        ensemble,
        X,
        base=nn.Linear(3, 2),
        weights=nn.Parameter(torch.randn(3, 2, 3)),
        biases=nn.Parameter(torch.randn(3, 2)),
    ),
    "packed sequences": lambda: made(
        packed,
        torch.cat([tokens(7, 5), torch.tensor([[3, 5, 1, 2, 4, 5, 2]]).T], 1),
        words=nn.Embedding(5, 3),
        seq=nn.LSTM(3, 4, batch_first=True),
        out=nn.Linear(4, 2),
    ),
    "a batch's distinct words": lambda: made(
        distinct,
        torch.cat([torch.tensor([[0, 1, 2, 3, 1, 1, 2]]).T, X[:, :1]], 1),
        words=nn.Embedding(4, 3),
        out=nn.Linear(3, 2),
    ),
    "overwritten after it was read": lambda: made(
        overwritten,
        X + 9 * torch.tensor([[0, 1, 1, 0, 1, 1, 0]]).T,
        one=nn.Linear(3, 4),
        gain=gain(),
        out=nn.Linear(4, 2),
    ),
    "scores beside what is made of them": lambda: made(
        gated,
        X + 9 * torch.tensor([[0, 1, 1, 0, 1, 1, 0]]).T,
        inner=nn.Linear(3, 3),
        router=Router(3, 3),
        out=nn.Linear(3, 2),
    ),
    "random in training": lambda: Task(stacked(gain(), 4).train(), (X, torch.arange(7) % 2)),
    "forces": lambda: made(forces, X, one=nn.Linear(3, 4), out=nn.Linear(4, 1)),
    **{
        f"a bias that torch spreads, {len(shape)}": lambda shape=shape: task_of(
            Case(stacked(nn.Tanh(), *shape), X)
        )
        for shape in ((), (1,), (1, 4))
    },
}
READ = {  # the probe must be deceived for these
    "routed one per example on the probe only": {"left.weight": "linear", "right.bias": "linear"},
    "more calls than on the probe": {"cell.weight": "linear"},
    "overwritten after it was read": {"one.bias": "linear", "gain.weight": ""},
    "torchscript": {"0.weight": "whole model"},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HARD)
def test_exact(name: str) -> None:
    with seeded(0):
        task = HARD[name]()
    assert ways(task).items() >= READ.get(name, {}).items()
    jacobian = dense_jacobian(task, task.parameters())
    for chunk_size in {1, 2, 3, 4, task.n_data}:
        assert relative(jacobian_of(task, chunk_size), jacobian) < EXACT, chunk_size


def test_under_no_grad_and_inference_mode() -> None:
    _, jacobian, _ = example("images")
    with seeded(0):
        inside = task_of(CASES["images"]())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert relative(jacobian_of(inside, 3), jacobian) < EXACT
