"""How time and memory grow: with N examples, P parameters, C classes, T tokens.

    python -m benchmarks.growth [AXIS ...] [--device cpu|cuda] [--most SIZE] [--out FILE.csv]
    python -m benchmarks.growth --plot FILE.csv [FILE.csv ...] FIGURE.png

Axes: ``rows`` (a table of 20 features), ``images`` (784-500-300-10), ``weights`` (784-w-w-10),
``resnet`` (ResNet-18 with group norm, 11 million parameters, N grows), ``language`` (a Llama of 135
million parameters with random weights, N grows), ``classes`` and ``tokens`` (a Llama of 6 layers).
Every point runs in a process of its own: ``blr.sensitivity`` at a diagonal posterior, with V_i or,
as "self-influence", without. Beside it stand its floor, of the same process (C backward passes that
stop at the layers' outputs; for self-influence a training pass, both by batches of at most 1,000),
the peak memory above model, data, posterior and plan (how the model is read), and the bound on it:
the working memory that the engine takes by default, four copies of the parameters, and the results.
Exponents are slopes of least squares in logarithms, over all points and over the upper half.
On a CPU seconds are those of the processor (so take one thread), on a GPU of a synchronised clock;
memory is the process's, or what torch allocates on the GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from cases import mlp
from measure import clock, peak_above, threads
from variance import floor

BATCH = 1000
COPIES = 4  # of the parameters, at most: their variances, and what checking and casting them takes
SIZES: dict[str, tuple[list[str], list[int]]] = {
    "rows": (["sensitivity", "self-influence"], [1_000, 3_000, 10_000, 30_000, 100_000, 300_000]),
    "images": (["sensitivity", "self-influence"], [1_000, 3_000, 10_000, 30_000, 60_000]),
    "weights": (
        ["sensitivity", "self-influence"],
        [10_000, 100_000, 1_000_000, 10_000_000, 100_000_000],
    ),
    "resnet": (["sensitivity", "self-influence"], [16, 64, 256]),
    "language": (["self-influence"], [4, 8, 16]),
    "classes": (["sensitivity"], [2, 8, 32, 128, 256]),
    "many classes": (["self-influence"], [2, 10, 100, 1_000, 10_000]),
    "tokens": (["self-influence"], [16, 64, 256, 1_024]),
}


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, after)
        around = [nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after)]
        self.around = nn.Sequential(*around) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + self.around(x))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18 for images of 32 × 32, with group norm."""
    stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [Block(a, b, s) for a, b, s in stages for a, s in ((a, s), (b, 1))]
    first = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return nn.Sequential(*first, *blocks, *last)


def llama(large: bool) -> nn.Module:
    """135 million parameters, or 6 layers of 256; random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49_152 if large else 8_000,
        hidden_size=576 if large else 256,
        intermediate_size=1_536 if large else 688,
        num_hidden_layers=30 if large else 6,
        num_attention_heads=9 if large else 8,
        num_key_value_heads=3 if large else 4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def problem(axis: str, size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs, targets of one point."""
    torch.manual_seed(0)
    if axis in ("language", "tokens"):
        n, t = (size, 64) if axis == "language" else (8, size)
        model = llama(axis == "language")
        ids = torch.randint(model.config.vocab_size, (n, t))  # type: ignore[union-attr, arg-type]
        return model, ids, ids
    n, classes = size, 10
    if axis == "rows":
        model, x, classes = mlp(20, 32, 3), torch.randn(n, 20), 3
    elif axis == "images":
        model, x = mlp(784, 500, 300, 10), torch.rand(n, 784)
    elif axis == "resnet":
        model, x = resnet18(), torch.rand(n, 3, 32, 32)
    elif axis == "weights":
        n = 256
        width = round((794**2 / 4 + size) ** 0.5 - 794 / 2)
        model, x = mlp(784, width, width, 10), torch.rand(n, 784)
    else:
        n, classes = 256, size
        model, x = mlp(64, 32, size), torch.randn(n, 64)
    return model, x, torch.randint(classes, (n,))


def task_of(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    import blr_analysis as blr

    if x.is_floating_point():
        return blr.Task(model, (x, y))

    def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return model(input_ids=batch[0], use_cache=False).logits, batch[1]

    return blr.Task(model, (x, y), likelihood="causal_lm", forward=forward, batch_size=8)


def training_pass(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """A forward and a backward pass over all examples."""
    size = (
        BATCH if x.ndim == 2 and x.is_floating_point() else 8 if not x.is_floating_point() else 64
    )
    for p in model.parameters():
        p.grad = None
    for some, targets in zip(x.split(size), y.split(size), strict=True):
        if x.is_floating_point():
            F.cross_entropy(model(some), targets, reduction="sum").backward()
        else:
            logits = model(input_ids=some, use_cache=False).logits[:, :-1]
            flat = logits.flatten(0, 1), targets[:, 1:].flatten()
            F.cross_entropy(*flat, reduction="sum").backward()


def point(axis: str, question: str, size: int, device: str) -> dict[str, Any]:
    """One point, in this process."""
    import blr_analysis as blr
    from blr_analysis.backprop.engine import DEFAULT_MEMORY, MOST, default_memory
    from blr_analysis.backprop.plan import plan_for

    model, x, y = problem(axis, size)
    model, x, y = model.to(device), x.to(device), y.to(device)
    task = task_of(model, x, y)
    mean = task.parameters()
    precision = {n: torch.full_like(p, 2.0) for n, p in mean.items()}
    q = blr.Posterior(mean, precision, prior_precision=1.0, n_data=task.n_data)
    variance = question == "sensitivity"

    def ours() -> object:
        return blr.sensitivity(task, q, variance=variance)

    def bottom() -> None:
        if variance:
            for run in bottoms:
                run()
        else:
            training_pass(model, x, y)

    plan = plan_for(task, mean)  # made once per task; some modules are imported for it
    columns = plan.outputs if variance else 1
    part = BATCH if x.ndim == 2 else 64
    bottoms = [floor(model, some, columns) for some in x.split(part)] if variance else []
    bottom()  # libraries make themselves ready
    peak = peak_above(ours)
    taken: list[tuple[float, float]] = []
    spent, tick = clock(), time.process_time if device == "cpu" else clock
    while len(taken) < 7 and (not taken or clock() - spent < 20):
        start = tick()
        ours()
        middle = tick()
        bottom()
        taken.append((middle - start, tick() - middle))
    least = DEFAULT_MEMORY if device == "cpu" else MOST
    one = 4 * plan.floats(columns, by_parts=variance)
    working = max(one, default_memory(mean, least, one))
    count, outputs = task.n_data, plan.outputs
    results = 4 * count * (outputs * outputs * variance + 6 * outputs)
    weights = sum(p.numel() for p in mean.values())
    return {
        "axis": axis,
        "question": question,
        "size": size,
        "parameters": weights,
        "seconds": float(np.median([a for a, _ in taken])),
        "floor": float(np.median([b for _, b in taken])),
        "× floor": float(np.median([a / b for a, b in taken])),
        "peak MB": peak / 2**20,
        "bound MB": (working + 4 * COPIES * weights + results) / 2**20 + (device == "cpu") * 32,
        "device": device,
        "clock": "processor" if device == "cpu" else "wall",
    }


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """The slopes of time, floor and memory against the size."""
    rows = []
    for (axis, question, device), some in table.groupby(["axis", "question", "device"], sort=False):
        row = {"axis": axis, "question": question, "device": device}
        for part, name in ((some, "all"), (some.tail((len(some) + 1) // 2), "upper half")):
            if len(part) > 1:
                x = np.log(part["parameters"] if axis == "weights" else part["size"])
                for column in ("seconds", "floor", "peak MB"):
                    slope = np.polyfit(x, np.log(part[column].clip(lower=0.1**4)), 1)[0]
                    row[f"{column}, {name}"] = round(float(slope), 2)
        rows.append(row)
    return pd.DataFrame(rows)


def plot(table: pd.DataFrame, path: str) -> None:
    """Seconds and floor above, memory and its bound below; one column for each axis."""
    import matplotlib.pyplot as plt

    axes = list(dict.fromkeys(table["axis"]))
    figure, panels = plt.subplots(2, len(axes), figsize=(3 * len(axes), 5.4), squeeze=False)
    for (upper, lower), axis in zip(panels.T, axes, strict=True):
        some = table[table["axis"] == axis]
        for i, ((question, device), line) in enumerate(some.groupby(["question", "device"])):
            x, color = line["parameters"] if axis == "weights" else line["size"], f"C{i}"
            upper.loglog(x, line["seconds"], "o-", color=color, label=f"{question}, {device}")
            upper.loglog(x, line["floor"], ":", color=color)
            lower.loglog(x, line["peak MB"].clip(lower=1), "o-", color=color)
            lower.loglog(x, line["bound MB"], ":", color=color)
        upper.set_title(axis)
        upper.legend(fontsize=6)
    panels[0, 0].set_ylabel("seconds (dotted: floor)")
    panels[1, 0].set_ylabel("peak MB (dotted: bound)")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("axes", nargs="*", help=", ".join(SIZES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=float("inf"), help="no larger sizes")
    parser.add_argument("--least", type=float, default=0, help="no smaller sizes")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for a point")
    parser.add_argument("--out", type=Path, help="a CSV, written after every point")
    parser.add_argument("--plot", nargs="+", metavar="FILE", help="CSVs, then the figure")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plot:
        table = pd.concat([pd.read_csv(file) for file in args.plot[:-1]])
        plot(table, args.plot[-1])
        print(exponents(table).to_string(index=False))
        return
    if args.point:
        threads(args.threads)
        axis, question, size = args.point
        print(json.dumps(point(axis, question, int(size), args.device)))
        return
    rows: list[dict[str, Any]] = []
    for axis in args.axes or SIZES:
        questions, sizes = SIZES[axis]
        for question in questions:
            for size in (s for s in sizes if args.least <= s <= args.most):
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.growth"]
                command += ["--point", axis, question, str(size), "--device", args.device]
                command += ["--threads", str(args.threads)]
                try:
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=args.timeout, check=False
                    )
                except subprocess.TimeoutExpired:
                    print(f"{axis} {question} {size}: not done in {args.timeout:g} s", flush=True)
                    continue
                if done.returncode:
                    print(f"{axis} {question} {size}: failed\n{done.stderr[-600:]}", flush=True)
                    continue
                rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()},
                      flush=True)  # fmt: skip
                if args.out:
                    pd.DataFrame(rows).to_csv(args.out, index=False, float_format="%.4g")
    if rows:
        print(exponents(pd.DataFrame(rows)).to_string(index=False))


if __name__ == "__main__":
    main()
