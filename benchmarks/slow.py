"""What takes long: each call once, its seconds and the process's peak memory.

    python -m benchmarks.slow CASE [--threads T] [--share S]

``--share`` below 1 takes that share of the examples. RNN, GRU and LSTM (64 units, 1,000 sequences
of 64 steps, 16 features, 5 classes) are ``sensitivity`` at a diagonal posterior, with V_i and
without, in turn with a loop that takes the same gradients by autograd, one example after the other,
of 20 of them.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr


def table(n: int, features: int, classes: int) -> tuple[Tensor, Tensor]:
    """Inputs from N(0, 1), labels from a linear model with noise."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(n, features, generator=g), torch.randn(features, classes, generator=g)
    return x, (x @ w + torch.randn(n, classes, generator=g)).argmax(1)


def trained(x: Tensor, y: Tensor, hidden: int, classes: int, steps: int) -> nn.Module:
    """An MLP after some steps of Adam; not at its minimum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, classes))
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        batch = torch.randint(len(x), (256,))
        adam.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        adam.step()
    return model


def timed(name: str, call: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name}: {wall:.1f} s, {cpu:.1f} CPU-s, peak {peak:.2f} GiB", flush=True)
    return result


Question = Callable[[blr.Task, blr.Posterior], Any]
# Rows, features, hidden units, classes, steps of training, structure of the posterior, question.
CASES: dict[str, tuple[int, int, int, int, int, str, Question]] = {
    "top_influence": (100_000, 20, 32, 3, 300, "kron", lambda t, q: blr.influence(
        t, q, t.subset(range(1000)), k=5, progress=False)),
    "suspicious": (20_000, 20, 32, 3, 300, "kron", lambda t, q: blr.suspicious(
        t, q)),
    "calibrate": (100_000, 20, 32, 3, 300, "kron", lambda t, q: blr.calibrate(
        t, q)),
    "leave_one_out": (1000, 64, 32, 1000, 100, "kron", lambda t, q: blr.leave_one_out(
        t, q)),
    "subset_posterior": (1000, 64, 330, 10, 100, "kron", lambda t, q: blr.subset_posterior(
        t, q, 0.5, progress=False)),
    "lowrank": (2444, 64, 330, 10, 100, "diag", lambda t, q: blr.fit_laplace(
        t, structure="lowrank", prior_precision=1.0)),
}  # fmt: skip


RECURRENT = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


class Sequences(nn.Module):
    """Classes of sequences by the last state of a recurrent layer."""

    def __init__(self, kind: str, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layer = RECURRENT[kind](features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def beside_a_loop(kind: str, share: float, some: int = 20, rounds: int = 5) -> None:
    """``sensitivity`` of a recurrent layer, and g Σ g of ``some`` examples by autograd."""
    torch.manual_seed(0)
    classes = 5
    model = Sequences(kind, 16, 64, classes).eval()
    x, y = torch.randn(int(share * 1000), 64, 16), torch.randint(classes, (int(share * 1000),))
    task = blr.Task(model, (x, y))
    params = list(model.parameters())
    q = blr.Posterior(task.parameters(), {n: torch.full_like(p, 2.0) for n, p in
                      model.named_parameters()}, prior_precision=1.0, n_data=len(x))  # fmt: skip

    def loop(variance: bool) -> None:
        for row, target in zip(x[:some].split(1), y[:some].split(1), strict=True):
            f = model(row)
            asked = f[0].unbind() if variance else [nn.functional.cross_entropy(f, target)]
            grads = [torch.autograd.grad(one, params, retain_graph=True) for one in asked]
            jacobian = torch.stack([torch.cat([p.flatten() for p in g]) for g in grads])
            _ = jacobian / 2.0 @ jacobian.mT

    for variance in (True, False):
        ours, theirs = [], []
        for _ in range(rounds + 1):
            start = time.process_time()
            blr.sensitivity(task, q, variance=variance)
            middle = time.process_time()
            loop(variance)
            ours.append((middle - start) / len(x))
            theirs.append((time.process_time() - middle) / some)
        one, other = (1e3 * statistics.median(t[1:]) for t in (ours, theirs))
        what = "V" if variance else "self-influence"
        said = f"{one:.3f} ms of a processor an example, the loop {other:.3f}"
        print(f"{kind}, {what}: {said}, {other / one:.1f} times", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=[*CASES, *RECURRENT])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.case in RECURRENT:
        beside_a_loop(args.case, args.share)
        return
    rows, features, hidden, classes, steps, structure, question = CASES[args.case]
    x, y = table(int(args.share * rows), features, classes)
    task = blr.Task(trained(x, y, hidden, classes, steps), (x, y))
    q = timed(f"fit {structure}", lambda: blr.fit_laplace(
        task, structure=structure, prior_precision=1.0))  # fmt: skip
    timed(args.case, lambda: question(task, q))


if __name__ == "__main__":
    main()
