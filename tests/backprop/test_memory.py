"""Memory stays within the budget, whatever the number of examples; results do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from models import mlp, normal, seeded, tokens
from snapshots import peak_bytes
from tiny_lm import tiny_lm
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


def pooled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]).logits.mean(1), batch[1]


def build(name: str, n: int, **options: Any) -> Task:
    """Single precision models with the kinds of cost that a chunk can have."""
    if name == "mlp":
        model = mlp(100, 200, 8)
        x = normal(n, 100)
    elif name == "convolutions":
        with seeded(0):
            model = nn.Sequential(
                nn.Conv2d(1, 6, 5, padding=2),
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.Conv2d(6, 12, 5),
                nn.Tanh(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(108, 8),
            )
        x = normal(n, 1, 20, 20)
    else:  # attention of its own, or the library's, which has no rule
        library = name == "layer_without_a_rule"
        model = tiny_lm(vocabulary=50, width=32, longest=32, classes=8, library=library)
        x = tokens(n, 32, 50)
        options["forward"] = pooled
    x = x.float() if x.is_floating_point() else x
    return Task(model.float(), (x, torch.arange(n) % 8), **options)


def posterior_for(task: Task, structure: str) -> Posterior:
    part = task.subset(range(min(16, task.n_data)))
    q = fit_laplace(part, structure=structure, prior_precision=1.0)
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


def scored(task: Task) -> None:
    mean = task.parameters()
    ones = {n: torch.ones_like(p) for n, p in mean.items()}
    sensitivity(task, Posterior(mean, ones, prior_precision=1.0, n_data=task.n_data))


FIT = partial(fit_laplace, prior_precision=1.0, structure="diag")


@pytest.mark.parametrize("sweep", [FIT, partial(FIT, structure="kron"), scored])
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_examples(sweep: Callable[[Task], Any]) -> None:
    budget = 2 * MB
    task = build("convolutions", 48, memory_budget=budget)
    sweep(task)  # what is met for the first time is also recognised
    half, peak = (peak_bytes(partial(sweep, t)) for t in (task.subset(range(24)), task))
    assert peak <= budget + allowance(task, True)
    assert peak < 1.05 * half


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
def test_batch_sizes_and_budgets_are_kept(options: dict[str, int], sizes: list[int]) -> None:
    task = build("mlp", 10, **options)
    sizes_seen = []
    q = posterior_for(task, "diag")
    task.model.register_forward_pre_hook(lambda module, args: sizes_seen.append(len(args[0])))
    sensitivity(task, q)  # what is met for the first time is also recognised
    sizes_seen.clear()
    sensitivity(task, q)
    assert sizes_seen == sizes


def test_frozen_layers_cost_nothing() -> None:
    """The backward pass stops at the first trainable layer."""
    passes: list[nn.Module] = []

    def count(module: nn.Module, args: tuple[Tensor]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: passes.append(module))

    after_frozen = nn.Tanh()
    after_live = nn.Tanh()
    frozen, live, last = (nn.Linear(3, 3) for _ in range(3))
    model = nn.Sequential(frozen, after_frozen, live, after_live, last).double()
    frozen.requires_grad_(False)
    for module in (after_frozen, after_live):
        module.register_forward_pre_hook(count)
    task = Task(model, (normal(4, 3), torch.arange(4) % 3))
    params = task.parameters()
    plan_for(task, params)
    passes.clear()
    for chunk in chunks(task, params, size=4):
        chunk.jacobian_terms()
    assert passes == 3 * [after_live]  # one pass for each output, none twice


@pytest.mark.parametrize("length", [1, 60, 300, 10_000])
def test_long_sequences_are_computed_few_at_a_time(length: int) -> None:
    """As few as have the tokens that a CPU needs together; short ones as many as ever."""
    task = build("mlp", 4)
    plan = replace(plan_for(task, task.parameters()), tokens=length)
    most = int(engine.EXAMPLES_IN_MEMORY)
    count = int(engine.examples_in_memory(task, plan))
    assert 1 <= count <= most
    assert (count - 1) * length < engine.TOKENS_ON_CPU
    assert count * length >= engine.TOKENS_ON_CPU or count == most
