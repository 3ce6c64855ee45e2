"""Merging four tasks that are far apart: Fashion-MNIST upright, turned by 90° and 180°, inverted.

    python -m benchmarks.merging.turned | python -m benchmarks.results turned turned_summary

An MLP 784-128-64-10 is trained on 1,000 other images of each task, five epochs (a weak base), then
fine-tuned on 4,000 images of each task; joint training on all of them from the same base is the
ceiling. Accuracy of every merge on 2,000 test images of each task, per cent: mean over the tasks,
the worst task, and the standard error of both over the seeds. ``auto`` chooses on 500 images of
each task that nothing else sees; ``best α`` is the best of a grid on the test images themselves, so
that it flatters task arithmetic. That damping 1 is the default of "kron" was chosen on seed 0.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor, nn

import blr_analysis as blr
from tutorials.data import read as read_images

TRAIN, TEST, VALIDATE, BASE = 4000, 2000, 500, 4000
TASKS = ("upright", "90°", "180°", "inverted")
GRID = [k / 20 for k in range(1, 21)]
State = dict[str, Tensor]


def turned(images: Tensor, task: str) -> Tensor:
    """Pixels from 0 to 1, flat."""
    if task == "inverted":
        images = 1 - images
    elif task != "upright":
        images = images.rot90(1 if task == "90°" else 2, (2, 3))
    return images.flatten(1)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def trained(model: nn.Sequential, x: Tensor, y: Tensor, epochs: int, seed: int) -> nn.Sequential:
    """A copy, trained by AdamW in batches of 64."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.eval()


@dataclass
class Case:
    """One seed: the base, the four models with their data, and what they are judged by."""

    base: State
    models: list[State]
    joint: State
    train: list[blr.Task]
    validate: dict[str, blr.Task]
    test: list[tuple[Tensor, Tensor]]

    def accuracies(self, state: State) -> list[float]:
        model = network()
        model.load_state_dict(state)
        with torch.no_grad():
            return [100 * float((model(x).argmax(1) == y).float().mean()) for x, y in self.test]


def case(seed: int, epochs: int) -> Case:
    """Images drawn, networks trained."""
    found = read_images("fashion-mnist")
    (x, y), (x_test, y_test) = (found.images, found.labels), (found.test_images, found.test_labels)
    torch.manual_seed(seed)
    size = BASE + 4 * (TRAIN + VALIDATE)
    order = torch.randperm(len(x))[:size]
    drawn = x[order], y[order]
    parts = [d.split([BASE, *4 * [TRAIN, VALIDATE]]) for d in drawn]
    first, *rest = zip(*parts, strict=True)
    mixed = torch.cat([turned(p, t) for p, t in zip(first[0].chunk(4), TASKS, strict=True)])
    base = trained(network(), mixed, first[1], 5, seed)
    own, validation = rest[::2], rest[1::2]
    data = [(turned(a, t), b) for (a, b), t in zip(own, TASKS, strict=True)]
    models = [trained(base, a, b, epochs, seed) for a, b in data]
    joint = trained(base, *(torch.cat(p) for p in zip(*data, strict=True)), epochs, seed)
    chosen = torch.randperm(len(x_test))[:TEST]
    unseen = x_test[chosen], y_test[chosen]
    checks = zip(TASKS, validation, strict=True)
    return Case(
        base.state_dict(),
        [m.state_dict() for m in models],
        joint.state_dict(),
        [blr.Task(m, d) for m, d in zip(models, data, strict=True)],
        {t: blr.Task(network(), (turned(a, t), b)) for t, (a, b) in checks},
        [(turned(unseen[0], t), unseen[1]) for t in TASKS],
    )


def merges(c: Case) -> Iterator[tuple[str, State]]:
    """Every row of the table."""
    fit = {
        s: [blr.fit_laplace(t, structure=s, prior_precision=1.0, progress=False) for t in c.train]
        for s in ("diag", "gram", "kron")
    }
    yield "average", blr.merge(None, c.models, method="linear")
    for alpha in (0.3, 0.5, 1.0):
        merged = blr.merge(c.base, c.models, method="task_arithmetic", weights=alpha)
        yield f"task arithmetic, α = {alpha}", merged
    tried = [blr.merge(c.base, c.models, method="task_arithmetic", weights=a) for a in GRID]
    yield "task arithmetic, best α", max(tried, key=lambda s: sum(c.accuracies(s)))
    yield "Fisher average, diag", blr.merge(None, c.models, precisions=fit["diag"], method="fisher")
    first = blr.fit_laplace(
        blr.Task(loaded(c.base), c.train[0].fetch(torch.arange(TRAIN))),
        structure="diag", prior_precision=1.0, progress=False,
    )  # fmt: skip
    yield (
        "gradient matching, diag, α = 1",
        blr.merge(c.base, c.models, precisions=fit["diag"], base_precision=first, delta=1.0),
    )
    for shrink in (1.0, 0.9, 0.5):
        how = {"precisions": fit["gram"], "method": "fisher", "shrink": shrink}
        yield f"gram, shrink {shrink}", blr.merge(None, c.models, **how)
    for power in (1.0, 0.5, 0.0):
        for damping in (0.0, 0.1, 1.0):
            how = {"precisions": fit["kron"], "method": "fisher", "power": power}
            merged = blr.merge(None, c.models, **how, damping=damping)
            yield f"kron, Gᵖ with p = {power:g}, damping {damping:g}", merged
    for shrink in (1.0, 0.9):
        merged = blr.merge(None, c.models, tasks=c.train, method="fisher", shrink=shrink)
        yield f"propagated (RegMean++), shrink {shrink}", merged
    for structure in ("diag", "kron", "gram"):
        how = {"precisions": fit[structure], "method": "auto"}
        yield f"auto, {structure}, by predicted gap", blr.merge(c.base, c.models, **how)
    checked = blr.merge(c.base, c.models, **how, tasks=c.train, validate=c.validate)
    print(f"auto took {checked.choice!r}")
    yield "auto, gram, by validation", checked
    yield "joint training", c.joint


def loaded(state: State) -> nn.Module:
    model = network()
    model.load_state_dict(state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in options.seeds:
        c = case(seed, options.epochs)
        own = [c.accuracies(m)[t] for t, m in enumerate(c.models)]
        others = ((name, c.accuracies(state)) for name, state in merges(c))
        for name, reached in [("own models", own), ("base", c.accuracies(c.base)), *others]:
            each = {t: round(value, 2) for t, value in zip(TASKS, reached, strict=True)}
            rows.append({"seed": seed, "merge": name, **each})
    table = pd.DataFrame(rows)
    print(markdown(table), markdown(summary(table)), sep="\n\n")


def markdown(table: pd.DataFrame) -> str:
    """A table as results.py reads it."""
    head = [" | ".join(table.columns), "|".join(["---"] * table.shape[1])]
    rows = [" | ".join(map(str, row)) for row in table.itertuples(index=False)]
    return "\n".join(f"| {row} |" for row in [*head, *rows])


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and worst task, with standard errors over the seeds."""
    each = table[list(TASKS)]
    reached = table.assign(mean=each.mean(axis=1), worst=each.min(axis=1))
    found = reached.groupby("merge", sort=False)[["mean", "worst"]].agg(["mean", "sem"]).round(2)
    found.columns = ["mean", "± mean", "worst task", "± worst"]
    return found.reset_index()


if __name__ == "__main__":
    main()
