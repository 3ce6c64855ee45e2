"""Memory stays within the budget, whatever the number of examples; results do not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from allocations import peak_bytes
from models import randomised, seeded
from parts import Graph, graph, normal
from torch import Tensor, nn

from blr_analysis import sensitivity
from blr_analysis.backprop import engine
from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.plan import plan_for
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.task import Task

MB = 2**20


def test_the_ruler_measures() -> None:
    assert peak_bytes(lambda: [torch.zeros(MB // 4) for _ in range(3)]) == 3 * MB
    assert peak_bytes(lambda: [torch.zeros(MB // 4).sum() for _ in range(3)]) < 1.01 * MB


def _attention(m: Graph, ids: Tensor) -> Tensor:
    x = m.norm(m.words(ids) + m.places(torch.arange(ids.shape[1])))
    heads = [y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (m.q(x), m.k(x), m.v(x))]
    mixed = torch.softmax(heads[0] @ heads[1].mT, -1) @ heads[2]
    return m.out(mixed.transpose(1, 2).flatten(2).mean(1))


def build(name: str, n: int, **options: int) -> Task:
    """Single precision models with the kinds of cost that a chunk can have."""
    generator = torch.Generator().manual_seed(0)
    with seeded(0):
        if name == "mlp":
            model = nn.Sequential(
                nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 8)
            )
            x = torch.randn(n, 100, generator=generator)
        elif name == "convolutions":
            model = nn.Sequential(
                nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 5),
                nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(108, 8),
            )  # fmt: skip
            x = torch.randn(n, 1, 20, 20, generator=generator)
        elif name == "attention":
            parts = {k: nn.Linear(32, 32) for k in "qkv"}
            parts |= dict(words=nn.Embedding(50, 32), places=nn.Embedding(32, 32))
            model = graph(_attention, norm=nn.LayerNorm(32), out=nn.Linear(32, 8), **parts)
            x = torch.randint(0, 50, (n, 32), generator=generator)
        else:  # without a rule
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            model = nn.Sequential(layer, nn.Flatten(), nn.Linear(16 * 16, 8))
            x = torch.randn(n, 16, 16, generator=generator)
    return Task(randomised(model).float(), (x, torch.arange(n) % 8), **options)


def posterior_for(task: Task, structure: str) -> Posterior:
    some = task.subset(range(16))
    q = fit_laplace(some, structure=structure, prior_precision=1.0)
    return Posterior(q.mean, q.form, prior_precision=1.0, n_data=task.n_data)


def allowance(task: Task, variance: bool) -> int:
    """What any method needs beside its working memory: the answers, and Σ beside S."""
    c = plan_for(task, task.parameters()).outputs
    answers = task.n_data * (c * c + 8 * c if variance else 8 * c) * 4
    return 2 * answers + 3 * sum(4 * p.numel() for p in task.parameters().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "variance"), [("diag", True), ("kron", True), ("kron", False)]
)
@pytest.mark.parametrize("name", ["mlp", "convolutions", "attention", "layer_without_a_rule"])
def test_peak_is_within_the_budget(name: str, structure: str, variance: bool) -> None:
    budget = 2 * MB
    task = build(name, 192 if name in ("mlp", "convolutions") else 48, memory_budget=budget)
    q = posterior_for(task, structure)
    sensitivity(task, q)  # what is met for the first time is also recognised
    peak = peak_bytes(lambda: sensitivity(task, q, variance=variance))
    assert peak <= budget + allowance(task, variance)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_fit_is_within_the_budget(structure: str) -> None:
    budget = 2 * MB
    task = build("convolutions", 96, memory_budget=budget)
    plan_for(task, task.parameters())
    peak = peak_bytes(lambda: fit_laplace(task, structure=structure, prior_precision=1.0))
    assert peak <= budget + allowance(task, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plans_check_holds_little_more_than_a_training_pass(dtype: torch.dtype) -> None:
    """Of a language model's kind: a tied table, outputs that are large beside the layers."""
    with seeded(0):
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)]
        ends = nn.Embedding(400, 64), nn.Linear(64, 400, bias=False)
        model = nn.Sequential(ends[0], *layers, ends[1]).to(dtype)
    ends[1].weight = ends[0].weight
    ids = torch.randint(400, (3, 96), generator=torch.Generator().manual_seed(0))
    task = Task(model, (ids, ids), likelihood="tokens", batch_size=3)

    def training() -> None:
        logits = model(ids).float().flatten(0, 1)
        nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum").backward()
        model.zero_grad()

    params = task.cast(task.parameters())
    assert peak_bytes(lambda: plan_for(task, params)) < 2 * peak_bytes(training)


def test_the_budget_is_used() -> None:
    """A larger budget gives larger chunks, not the same ones."""
    task = build("convolutions", 400, memory_budget=16 * MB)
    plan = plan_for(task, task.parameters())
    small, large = (plan.chunk_size(8, budget, 4, 10**6) for budget in (4 * MB, 16 * MB))
    assert 3 <= small < large
    assert large == pytest.approx(4 * small, rel=0.3)
    q = posterior_for(task, "diag")
    peak = peak_bytes(lambda: sensitivity(task, q))
    assert peak > 3 * MB


def sizes_of(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[int]:
    """The batch sizes that the model was run on."""
    seen: list[int] = []
    record = engine.record

    def spy(*args, **kwargs):
        seen.append(kwargs["size"])
        return record(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "record", spy)
        call()
    return seen


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 1}, [1] * 10),
        ({"batch_size": 4}, [4, 4, 2]),
        ({"batch_size": 99}, [10]),
        ({"batch_size": 4, "memory_budget": 1}, [4, 4, 2]),
        ({"memory_budget": 1}, [1] * 10),  # a tiny budget still takes one example
    ],
)
def test_batch_sizes_and_budgets_are_kept(monkeypatch, options, sizes: list[int]) -> None:
    task = build("mlp", 10, **options)
    q = posterior_for(build("mlp", 16), "diag")
    q = Posterior(q.mean, q.form, prior_precision=1.0, n_data=10)
    sensitivity(task, q)  # what is met for the first time is also recognised
    assert sizes_of(monkeypatch, lambda: sensitivity(task, q)) == sizes


# What is not asked about costs nothing.


class Counted(nn.Module):
    """A linear layer that counts its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if x.requires_grad:
            x.register_hook(self._count)
        return x

    def _count(self, grad: Tensor) -> None:
        self.passes += 1


def test_frozen_layers_cost_nothing() -> None:
    """The backward pass stops at the first trainable layer."""
    frozen, live = Counted(), Counted()
    model = nn.Sequential(frozen, nn.Tanh(), live, nn.Tanh(), Counted()).double()
    frozen.requires_grad_(False)
    task = Task(model, (normal(4, 3), torch.arange(4) % 3))
    params = task.parameters()
    plan_for(task, params)
    frozen.passes = live.passes = 0
    for chunk in chunks(task, params, size=4):
        chunk.jacobian_terms()
    assert frozen.passes == 0
    assert live.passes == 3  # one pass for each output, none twice
