"""Models that look like one thing on a few examples and do another: exact all the same."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from models import randomised, seeded
from oracles import dense_jacobian, relative
from parts import Case, Graph, graph, normal, tokens
from readings import EXACT, example, jacobian_of, task_of, ways
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import DataLoader
from zoo import CASES

from blr_analysis.backprop.plan import plan_for
from blr_analysis.backprop.record import Unit, record
from blr_analysis.task import Task


def check_exact(task: Task, chunk_sizes: Iterable[int] = (1, 2, 3, 7)) -> None:
    jacobian = dense_jacobian(task, task.parameters())
    for chunk_size in chunk_sizes:
        assert relative(jacobian_of(task, chunk_size), jacobian) < EXACT, chunk_size


def test_tokens_routed_one_per_example_on_the_probe_only() -> None:
    """A router that looks like a fixed layout on the probe, and is not one elsewhere."""
    signs = [[1, -1], [1, 1], [-1, -1], [1, 1], [1, -1], [-1, -1], [1, 1], [-1, -1], [-1, 1]]
    x = normal(9, 2, 3)
    x[:, :, 0] = x[:, :, 0].abs() * torch.tensor(signs)

    def call(m: Graph, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        out = rows.new_zeros(len(rows), 4)
        for expert, side in ((m.left, rows[:, 0] > 0), (m.right, rows[:, 0] <= 0)):
            out[side] = torch.tanh(expert(rows[side]))
        return m.out(out).view(len(x), 2, 2).mean(1)

    with seeded(0):
        model = graph(call, left=nn.Linear(3, 4), right=nn.Linear(3, 4), out=nn.Linear(4, 2))
    task = task_of(Case(model, x))
    assert set(ways(task).values()) == {"linear"}, "the probe must be deceived for this test"
    check_exact(task, (1, 2, 4, 9))


def padded(lengths: list[int]) -> DataLoader:
    """Sentences of these lengths, each batch padded with zeros to its longest."""
    generator = torch.Generator().manual_seed(0)
    rows = [(torch.randint(1, 6, (t,), generator=generator), i % 2) for i, t in enumerate(lengths)]

    def collate(items):
        ids = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return ids, torch.tensor([y for _, y in items])

    return DataLoader(rows, collate_fn=collate)


def test_lengths_that_change_from_batch_to_batch() -> None:
    """A collate function that pads to the longest, and rows flattened to [B·T] inside."""

    def call(m: Graph, ids: Tensor) -> Tensor:
        mask = (ids > 0).double()
        h = torch.tanh(m.inner(m.words(ids).flatten(0, 1))).view(*ids.shape, 4)
        return m.out((h * mask.unsqueeze(-1)).sum(1))

    with seeded(0):
        parts = dict(words=nn.Embedding(6, 3), inner=nn.Linear(3, 4), out=nn.Linear(4, 2))
        model = graph(call, **parts)
    task = Task(model, padded([3, 5, 1, 2, 2, 4, 3]))
    check_exact(task)


def test_longer_sequences_call_a_cell_more_often() -> None:
    """Calls beyond those that the probe saw, of a layer that is called once a step."""

    def call(m: Graph, ids: Tensor) -> Tensor:
        h = torch.zeros(len(ids), 4, dtype=torch.float64)
        for step, live in zip(m.words(ids).unbind(1), (ids > 0).unbind(1), strict=True):
            h = torch.where(live.unsqueeze(1), torch.tanh(m.cell(torch.cat([h, step], 1))), h)
        return m.out(h)

    with seeded(0):
        parts = dict(words=nn.Embedding(6, 3), cell=nn.Linear(7, 4), out=nn.Linear(4, 2))
        model = graph(call, **parts)
    task = Task(model, padded([2, 2, 5, 2, 4, 2, 2]))  # the probe sees the first, fourth and last
    assert ways(task)["cell.weight"] == "linear"
    check_exact(task)


@pytest.mark.parametrize("size", [3, 5, 7])
def test_sequences_as_long_as_the_chunk(size: int) -> None:
    """[B, T, D] and [T, B, D] with B = T = D, so that no shape tells one from another."""
    with seeded(0):
        model = graph(
            lambda m, x: m.out(m.seq(torch.tanh(m.lin(x.transpose(0, 1))))[0][-1]),
            lin=nn.Linear(size, size),
            seq=nn.GRU(size, size),
            out=nn.Linear(size, size),
        )
    check_exact(task_of(Case(model, normal(size, size, size))), (1, 3, size))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_read_through_the_whole_model() -> None:
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    task = task_of(Case(torch.jit.trace(model, normal(5, 3)), normal(5, 3)))
    check_exact(task, (2,))


def test_examples_looped_over_inside_the_model() -> None:
    def call(m: Graph, x: Tensor) -> Tensor:
        return torch.stack([m.out(torch.tanh((m.one if r[0] > 0 else m.two)(r))) for r in x])

    with seeded(0):
        model = graph(call, one=nn.Linear(3, 4), two=nn.Linear(3, 4), out=nn.Linear(4, 2))
    check_exact(task_of(Case(model, normal(7, 3))), (1, 3, 7))


class Ensemble(nn.Module):
    """Members that share a module, run by ``vmap`` over their stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 2)
        self.weights = nn.Parameter(torch.randn(3, 2, 3))
        self.biases = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        def member(weight: Tensor, bias: Tensor) -> Tensor:
            return functional_call(self.base, {"weight": weight, "bias": bias}, (x,))

        return torch.tanh(vmap(member)(self.weights, self.biases)).mean(0) + vmap(self.base)(x)


def test_torch_func_inside_the_model() -> None:
    with seeded(0):
        model = randomised(Ensemble())
    check_exact(task_of(Case(model, normal(5, 3))), (2,))


def test_packed_sequences_of_any_length() -> None:
    lengths = torch.tensor([3, 5, 1, 2, 4, 5, 2])

    def call(m: Graph, rows: Tensor) -> Tensor:
        x, sizes = m.words(rows[:, :5]), rows[:, 5]
        rnn = nn.utils.rnn
        packed = rnn.pack_padded_sequence(x, sizes, batch_first=True, enforce_sorted=False)
        return m.out(m.seq(packed)[1][0][-1])

    with seeded(0):
        parts = dict(words=nn.Embedding(5, 3), seq=nn.LSTM(3, 4, batch_first=True))
        model = graph(call, out=nn.Linear(4, 2), **parts)
    check_exact(task_of(Case(model, torch.cat([tokens(7, 5), lengths.unsqueeze(1)], 1))), (1, 3, 7))


def test_embeddings_of_the_batchs_distinct_words() -> None:
    """Rows that belong to several examples, and whose number does not follow the batch."""
    words = torch.tensor([0, 1, 2, 3, 1, 1, 2])

    def call(m: Graph, x: Tensor) -> Tensor:
        distinct, place = torch.unique(x[:, 0].long(), return_inverse=True)
        return m.out(torch.tanh(m.words(distinct))[place] * x[:, 1:])

    with seeded(0):
        model = graph(call, words=nn.Embedding(4, 3), out=nn.Linear(3, 2))
    check_exact(task_of(Case(model, torch.cat([words.unsqueeze(1), normal(7, 1)], 1))))


class Gain(nn.Module):
    """A weight with gradient exp(x), which autograd keeps, while x may be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x) * self.weight


def test_inputs_that_are_overwritten_after_they_were_read() -> None:
    def call(m: Graph, x: Tensor) -> Tensor:
        h = m.one(x)
        gained = m.gain(h)
        h.mul_(3)
        return m.out(gained + h)

    with seeded(0):
        model = graph(call, one=nn.Linear(3, 4), gain=Gain(), out=nn.Linear(4, 2))
    task = task_of(Case(model, normal(7, 3)))
    check_exact(task, (3,))
    plan = plan_for(task, task.parameters())
    assert ways(task) == {n: "" if "gain" in n else "linear" for n in task.parameters()}
    unit = Unit("gain", task.model.gain, {"weight": "gain.weight"}, None)
    batch = torch.arange(3)
    seen = record(task, task.parameters(), task.fetch(batch), [unit], size=3, indices=batch)
    assert [visit.stale for visit in seen.visits] == [True]
    assert plan.axes_of(seen.visits[0], 3) is None


def test_gradients_inside_the_forward_pass() -> None:
    """Forces, the gradient of an energy: the weights are used backward as well."""

    def call(m: Graph, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.out(torch.tanh(m.one(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    with seeded(0):
        model = graph(call, one=nn.Linear(3, 4), out=nn.Linear(4, 1))
    task = task_of(Case(model, normal(5, 3)), "gaussian")
    check_exact(task, (2,))


def test_under_no_grad_and_inference_mode() -> None:
    _, jacobian, _ = example("images")
    with seeded(0):
        inside = task_of(CASES["images"]())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert relative(jacobian_of(inside, 3), jacobian) < EXACT
