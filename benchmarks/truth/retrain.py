"""Training and retraining to convergence, and what is kept of each."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.truth import sources, store
from benchmarks.truth.minimise import Memory, Minimum, Solve, minimise
from benchmarks.truth.objective import Objective, flat_parameters
from benchmarks.truth.plan import Job
from benchmarks.truth.recipes import Recipe

# The gradient norm at which a descent ends, relative to that where it starts: first training
# (and training from fresh weights), then retraining from the trained weights.
TRAINED = 1e-9
FRESH = 1e-6
RETRAINED = {"loo": 1e-5, "relabel": 1e-5, "class": 1e-5, "subset": 1e-5}
SINGLE = 3e-3  # of the start: down to here in float32, where the recipe allows


@dataclass(frozen=True)
class Trained:
    """The trained model of a case: its weights and what retraining starts with."""

    recipe: Recipe
    data: sources.Split
    theta: Tensor
    influence: Tensor
    record: dict[str, Any]


def objective(
    recipe: Recipe, x: Tensor, y: Tensor, dtype: torch.dtype = torch.float64
) -> Objective:
    """The training objective on these examples."""
    y = y if recipe.likelihood == "categorical" else y.to(dtype).reshape(len(y), -1)
    model = recipe.build().to(dtype)
    return Objective(model, x, y, recipe.observed(), recipe.delta, recipe.chunk, dtype)


def fresh(recipe: Recipe, seed: int) -> Tensor:
    """First weights, ``[P]``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return flat_parameters(recipe.build())


def descend(
    recipe: Recipe,
    x: Tensor,
    y: Tensor,
    start: Tensor,
    relative: float,
    memory: Memory | None = None,
    single: bool = True,
) -> tuple[Minimum, int]:
    """To the minimum from ``start``; and how many of the evaluations were in float32."""
    double = objective(recipe, x, y)
    if not (single and recipe.mixed):
        return minimise(double, start, relative=relative, memory=memory), 0
    rough = objective(recipe, x, y, torch.float32)
    first = minimise(rough, start, relative=SINGLE, dtype=torch.float32, memory=memory)
    goal = relative * float(first.trace[0, 2])
    last = minimise(double, first.theta, absolute=goal, memory=first.memory)
    later = last.trace + torch.tensor([first.evaluations, 0.0, 0.0], dtype=torch.float64)
    whole = replace(
        last,
        evaluations=first.evaluations + last.evaluations,
        trace=torch.cat([first.trace, later]),
    )
    return whole, first.evaluations


def train(case: str, recipe: Recipe) -> Trained:
    """The trained model of a case, from disk or from its first weights."""
    path, data = store.folder(case) / "base.safetensors", sources.stored(case, recipe)
    found = store.read(path, recipe.hash)
    if found is None:
        begun = time.perf_counter()
        start = fresh(recipe, recipe.seed)
        minimum, single = descend(recipe, data.x, data.y, start, TRAINED)
        tensors = measured(recipe, data, minimum.theta)
        whole = objective(recipe, data.x, data.y)
        tensors["influence"] = whole.diagonal_self_influence(minimum.theta)
        tensors["trace"] = minimum.trace
        record = summary(recipe, minimum, single, time.perf_counter() - begun)
        store.write(path, tensors, record)
        found = store.Stored(tensors, record)
    return Trained(recipe, data, found.tensors["theta"], found.tensors["influence"], found.record)


def retrain(
    trained: Trained, job: Job, memory: Memory | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """One retraining: what is stored of it."""
    recipe, data = trained.recipe, trained.data
    begun = time.perf_counter()
    kept = torch.ones(len(data.y), dtype=torch.bool)
    kept[job.removed] = False
    y = data.y.clone()
    for i, target in job.relabelled.items():
        y[i] = target
    start = trained.theta if job.seed is None else fresh(recipe, job.seed)
    relative = RETRAINED[job.kind] if job.seed is None else FRESH
    small = job.kind in ("loo", "relabel")
    minimum, single = descend(
        *(recipe, data.x[kept], y[kept], start, relative),
        memory=memory if small else None,
        single=not small,
    )
    touched = torch.tensor(sorted([*job.removed, *job.relabelled]))
    tensors = measured(recipe, data, minimum.theta)
    tensors["removed"] = torch.tensor(job.removed, dtype=torch.int64)
    tensors["left_out_outputs"] = objective(recipe, data.x[touched], data.y[touched]).outputs(
        minimum.theta
    )
    tensors["trace"] = minimum.trace
    record = summary(recipe, minimum, single, time.perf_counter() - begun)
    relabelled = [[i, new] for i, new in job.relabelled.items()]
    return tensors, {**record, "note": job.note, "seed": job.seed, "relabelled": relabelled}


def measured(recipe: Recipe, data: sources.Split, theta: Tensor) -> dict[str, Tensor]:
    """The weights and every example's loss (with its own target) at them."""
    train, test = objective(recipe, data.x, data.y), objective(recipe, data.x_test, data.y_test)
    return {"theta": theta, "train_losses": train.each(theta), "test_losses": test.each(theta)}


def summary(recipe: Recipe, minimum: Minimum, single: int, seconds: float) -> dict[str, Any]:
    """The record of a descent."""
    return {
        "hash": recipe.hash,
        "evaluations": minimum.evaluations,
        "of_which_float32": single,
        "start_norm": float(minimum.trace[0, 2]),
        "gradient_norm": minimum.gradient_norm,
        "tolerance": minimum.tolerance,
        "converged": minimum.converged,
        "objective": minimum.value,
        "seconds": round(seconds, 3),
    }


def starting_memory(trained: Trained) -> Memory | None:
    """An inverse Hessian at the trained weights, with which small changes are soon learned."""
    recipe, theta = trained.recipe, trained.theta
    if recipe.dense:
        whole = objective(recipe, trained.data.x, trained.data.y)
        factor = torch.linalg.cholesky(whole.hessian(theta))
        return Memory(solve=lambda v: torch.cholesky_solve(v[:, None], factor)[:, 0])
    if not recipe.krylov:
        return None
    single = torch.float32 if recipe.mixed else torch.float64
    whole = objective(recipe, trained.data.x, trained.data.y, single)
    basis, small = lanczos(lambda v: whole.hessian_product(theta, v), len(theta), recipe.krylov)
    values, turn = torch.linalg.eigh(small)
    # what the basis has not seen is as curved as the prior; rounding may not undercut it
    gain = turn @ ((1 / values.clamp_min(recipe.delta) - 1 / recipe.delta)[:, None] * turn.T)
    return Memory(solve=lambda v: v / recipe.delta + (gain @ (v @ basis)) @ basis.T)


def lanczos(product: Solve, size: int, steps: int) -> tuple[Tensor, Tensor]:
    """An orthonormal Krylov basis Q ``[P, K]`` of a symmetric matrix H and Qᵀ H Q ``[K, K]``.

    Lanczos' recursion, every vector made orthogonal to all before it (twice is enough).
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(size, dtype=torch.float64, generator=generator)
    columns = torch.zeros(size, min(steps, size), dtype=torch.float64)
    images = torch.zeros_like(columns)
    for k in range(columns.shape[1]):
        for _ in range(2):
            v = v - columns[:, :k] @ (columns[:, :k].T @ v)
        columns[:, k] = v / v.norm()
        v = images[:, k] = product(columns[:, k])
    small = columns.T @ images
    return columns, (small + small.T) / 2
