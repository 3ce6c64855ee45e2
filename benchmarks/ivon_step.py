"""Seconds of an optimizer step on a model of ten million parameters, gradients given.

    python benchmarks/ivon_step.py --memory kept|afresh [--json FILE] [--repeats 15] [--threads 2]
    python benchmarks/ivon_step.py --device cuda

Compared are torch's AdamW (``foreach=True``, and its compiled ``fused=True`` kernel for reference),
the IVON of this package, and ``ivon-opt`` where it is installed. Two rows each for the IVONs:

* step: ``step()`` alone. A draw is on hand.
* draw + step: everything that training pays beside forward and backward pass: draw and perturb
  the weights, put them back, ``step()``.

AdamW (foreach) makes 40 MB of temporary tensors several times in a step. Where the allocator keeps
freed memory for them they cost nothing, where it gives it back every page is faulted in anew, which
takes longer than the step: ``--memory`` says which. A process may do either, by what it freed
before, so that a ratio stands only beside the word.

The contestants take turns, so that a busy machine is busy for all; medians are printed. The noise
alone, ten million normal numbers of torch's generator (which runs on one thread), is a row of its
own: no method that draws weights is faster. So is the floor in memory traffic: the time to copy the
bytes that a step must read and write once (AdamW: weight, gradient and two moments, 7 passes over
the parameters; IVON: weight, gradient, noise, precision and momentum, 8).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext

import torch
from measure import arguments, clock, write
from torch import Tensor

from blr_analysis.learning_rule.optim import IVON

try:
    import ivon as ivon_opt
except ImportError:
    ivon_opt = None

SHAPES = [(2048, 1024), (2048,), (1024, 2048), (1024,), (2048, 2048), (2048,), (784, 2048), (1000,)]
"""Weights and biases of 10,000,360 parameters."""


def make_parameters(device: str) -> list[Tensor]:
    """The same weights and gradients for everyone, in memory of their own."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        for shape in SHAPES
    ]
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (noise * 0.01).to(device)
    return list(parameters)


class Contestant:
    """An optimizer, and the seconds of its calls."""

    def __init__(
        self, name: str, make: Callable[[list[Tensor]], torch.optim.Optimizer], device: str = "cpu"
    ) -> None:
        self.name = name
        self.optimizer = make(make_parameters(device))
        self.steps: list[float] = []
        self.draws: list[float] = []

    def run(self) -> None:
        """One draw, where there are draws, and one step."""
        sampled = getattr(self.optimizer, "sampled_params", None)
        start = clock()
        with nullcontext() if sampled is None else sampled(train=True):
            pass
        middle = clock()
        self.optimizer.step()
        end = clock()
        self.steps.append(end - middle)
        self.draws.append(end - start if sampled is not None else float("nan"))


def time_alone(function: Callable[[], object]) -> float:
    start = clock()
    function()
    return clock() - start


def measure(repeats: int, device: str, warmup: int = 3) -> list[dict[str, float | str]]:
    """Rows of name, seconds, and ratio to AdamW(foreach)."""
    contestants = [
        Contestant("AdamW(foreach)", lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), device),
        Contestant("AdamW(fused)", lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), device),
        Contestant("IVON", lambda p: IVON(p, lr=1e-3, ess=1e5), device),
    ]
    if ivon_opt is not None:
        package = ivon_opt
        contestants.append(
            Contestant("ivon-opt", lambda p: package.IVON(p, lr=1e-3, ess=1e5), device)
        )
    count = sum(parameter.numel() for parameter in make_parameters("cpu"))
    noise, target = torch.empty(count, device=device), torch.empty(count, device=device)
    noises: list[float] = []
    copies: list[float] = []
    for repeat in range(warmup + repeats):
        for contestant in contestants:
            contestant.run()
        noises.append(time_alone(noise.normal_))
        copies.append(time_alone(lambda: target.copy_(noise)))
        if repeat < warmup:
            for times in (*(c.steps for c in contestants), *(c.draws for c in contestants)):
                times.clear()
            noises.clear()
            copies.clear()
    pass_seconds = statistics.median(copies) / 2  # a copy reads once and writes once
    seconds = {f"{c.name}, step": statistics.median(c.steps) for c in contestants}
    seconds |= {
        f"{c.name}, draw + step": statistics.median(c.draws)
        for c in contestants
        if c.draws[0] == c.draws[0]
    }
    seconds["noise alone"] = statistics.median(noises)
    seconds["floor of AdamW's step (7 passes)"] = 7 * pass_seconds
    seconds["floor of IVON's step (8 passes)"] = 8 * pass_seconds
    base = seconds["AdamW(foreach), step"]
    return [
        {"what": name, "seconds": value, "ratio": value / base} for name, value in seconds.items()
    ]


def main() -> None:
    given = arguments(__doc__, repeats=15, n=2)
    rows = measure(given.repeats, given.device)
    print(f"{'10,000,360 parameters, float32':<36}{'ms':>10}{'ratio':>10}")
    for row in rows:
        print(f"{row['what']:<36}{1e3 * float(row['seconds']):>10.1f}{row['ratio']:>10.2f}")
    write(given, rows)


if __name__ == "__main__":
    main()
