"""What storing precisions in bfloat16 costs in a merge.

    python benchmarks/merging/bf16_precision.py [--entries 2000000] [--tasks 3] [--seed 0]

Weights θ_0 ~ N(0, 0.02²), fine-tunes θ_t = θ_0 + N(0, 0.002²), and precisions H_0, H_t of two
kinds: uniform on (0, 1), and log-normal with 99.9 % of the entries within eight decades, the
tasks' independent of each other (the hardest case) or alike up to a factor of about two. The
merge is gradient matching with α_t = 1, in float64 from float32 precisions (the reference), and

* ``H in bfloat16``: the data's part rounded, the prior apart, as this package stores it;
* ``S in bfloat16``: H + δ rounded and δ taken off again, as a file with the prior inside would,
  for a δ of one and of a hundred times the median H;
* ``float32 arithmetic``: nothing rounded but the arithmetic, for comparison;
* ``result in bfloat16``: exact precisions, the merged weights rounded, as most models are stored.

Errors, against the reference: of the step θ − θ_0 as a whole (norm over norm), of its entries
relative to the largest |θ_t − θ_0| there (median, 99.9 %, largest), and of the merged weights as
a whole. Rounding to bfloat16 changes a number by at most 2⁻⁸ = 0.39 %.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from blr_analysis.merging.formula import combine

DECADES = 8.0
WITHIN = 3.2905  # 99.9 % of a normal's mass lies within so many standard deviations


@dataclass(frozen=True)
class World:
    """A base, its fine-tunes, and the precision of each."""

    name: str
    base: Tensor
    models: list[Tensor]
    first: Tensor
    precisions: list[Tensor]


@dataclass(frozen=True)
class Row:
    """The errors of one way to store precisions."""

    world: str
    stored: str
    step: float
    median: float
    most: float
    worst: float
    weights: float
    fallback: int


def worlds(entries: int, tasks: int, generator: torch.Generator) -> Iterator[World]:
    """The three kinds of precisions, with the same weights."""

    def normal(scale: float = 1.0) -> Tensor:
        return torch.randn(entries, generator=generator) * scale

    base = normal(0.02)
    models = [base + normal(0.002) for _ in range(tasks)]
    uniform = [torch.rand(entries, generator=generator) for _ in range(tasks + 1)]
    yield World("uniform", base, models, uniform[0], uniform[1:])
    spread = math.log(10.0) * DECADES / 2 / WITHIN
    free = [(normal(spread)).exp() for _ in range(tasks + 1)]
    yield World("log-normal, independent", base, models, free[0], free[1:])
    shared = normal(spread)
    alike = [(shared + normal(math.log(2.0))).exp() for _ in range(tasks + 1)]
    yield World("log-normal, alike", base, models, alike[0], alike[1:])


def rows(world: World) -> Iterator[Row]:
    """Every way of storing, against the reference."""
    exact = merged(world, world.first, world.precisions, torch.float64)
    every = [world.first, *world.precisions]

    def measured(stored: str, result: Tensor, curved: list[Tensor] | None = None) -> Row:
        return _row(world, stored, exact, result.double(), every if curved is None else curved)

    def with_(curved: list[Tensor]) -> Tensor:
        return merged(world, curved[0], curved[1:], torch.float64)

    rounded = [h.bfloat16().float() for h in every]
    yield measured("H in bfloat16", with_(rounded), rounded)
    median = float(torch.cat([h[:100_000] for h in every]).median())
    for times in (1, 100):
        delta = times * median
        inside = [(h + delta).bfloat16().float().sub(delta).clamp(min=0) for h in every]
        yield measured(f"S in bfloat16, δ = {times} median", with_(inside), inside)
    yield measured("float32 arithmetic", merged(world, every[0], every[1:], torch.float32))
    yield measured("result in bfloat16", exact.bfloat16())


def merged(world: World, first: Tensor, curved: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Gradient matching with α_t = 1."""
    return combine(world.base, world.models, precisions=curved, base_precision=first, dtype=dtype)


def _row(world: World, stored: str, exact: Tensor, found: Tensor, curved: list[Tensor]) -> Row:
    base = world.base.double()
    error = found - exact
    gaps = torch.stack([m.double() - base for m in world.models]).abs().amax(0)
    relative = (error.abs() / gaps).sort().values
    return Row(
        world.name,
        stored,
        step=float(error.norm() / (exact - base).norm()),
        median=float(relative[len(relative) // 2]),
        most=float(relative[int(0.999 * len(relative))]),
        worst=float(relative[-1]),
        weights=float(error.norm() / exact.norm()),
        fallback=int((torch.stack(curved).sum(0) <= 0).sum()),
    )


HEAD = ("precisions", "stored as", "step", "median", "99.9 %", "largest", "weights", "no step")


def table(found: list[Row]) -> str:
    """The rows in Markdown; ``no step``: entries that fell back to task arithmetic."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "--:|" * (len(HEAD) - 2)]
    for r in found:
        errors = [f"{e:.1e}" for e in (r.step, r.median, r.most, r.worst, r.weights)]
        lines.append("| " + " | ".join([r.world, r.stored, *errors, f"{r.fallback:,}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=2_000_000)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(given.seed)
    found = [row for world in worlds(given.entries, given.tasks, generator) for row in rows(world)]
    print(f"{given.entries:,} entries, {given.tasks} tasks, seed {given.seed}\n\n{table(found)}")
    if given.json:
        given.json.write_text(json.dumps([vars(row) for row in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
