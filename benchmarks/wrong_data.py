"""How well faults that were planted in real data are found: wrong labels, copies, strangers.

    python -m benchmarks.wrong_data [--quick] [--seeds 3] [--images 5000] [--out FILE]

One row per data set, training, fault and score: AUROC, precision at k (k: how many faults were
planted) and seconds, training included; means over the seeds. A last table says how well the kinds
that `blr.suspicious` names by default are right: of the examples named so how many were planted
(precision), of those planted how many are named so (recall). cleanlab's scores are its own
(`get_label_quality_scores`), from probabilities of 5-fold cross-validation (five trainings more)
or of the trained network itself. ``--quick`` takes what scikit-learn ships and one seed; otherwise
Fashion-MNIST is fetched as in the tutorials.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from cleanlab.rank import get_label_quality_scores
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

import blr_analysis as blr

ROOT = Path(__file__).resolve().parents[1]
FOLDS, MOMENTS, BATCH = 5, 10, 50
PRIOR = {"IVON": 20.0, "Adam": 1.0, "Adam, overfitted": 0.1}
SHARPER = 10.0  # S of networks is multiplied by it: a kron overstates V_i; tried on Fashion-MNIST
LENGTH = {"IVON": 1, "Adam": 1, "Adam, overfitted": 2}
NAMES = ["data", "training", "fault", "score"]
KIND = {"labels": "label", "strangers": "unfamiliar", "copies": "duplicate"}  # of each fault
Scores = dict[str, tuple[Tensor, float]]  # larger is more suspicious; seconds


@dataclass(frozen=True)
class Problem:
    """Real data, a network for them, and how long it is trained."""

    name: str
    x: Tensor
    y: Tensor
    net: Callable[[], nn.Module]
    epochs: int
    trainings: tuple[str, ...]

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


@dataclass(frozen=True)
class Trained:
    """A network, what it said at some moments of its training, and its posteriors there."""

    model: nn.Module
    outputs: list[Tensor]
    posteriors: list[blr.Posterior]
    seconds: float
    posterior_seconds: float


def mlp(inputs: int, width: int = 64) -> Callable[[], nn.Module]:
    def net() -> nn.Module:
        hidden = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))

    return net


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def problems(quick: bool, images: int) -> Iterator[Problem]:
    trainings = tuple(PRIOR)
    pixels, digit = (torch.from_numpy(np.asarray(a)) for a in load_digits(return_X_y=True))
    n = 900 if quick else len(digit)
    yield Problem("digits", pixels[:n].float() / 16, digit[:n], mlp(64), 40, trainings)
    cells, tumour = (np.asarray(a) for a in load_breast_cancer(return_X_y=True))
    cells = torch.from_numpy((cells - cells.mean(0)) / cells.std(0)).float()
    yield Problem(
        "breast cancer", cells, torch.from_numpy(tumour), lambda: nn.Linear(30, 2), 0, ("L-BFGS",)
    )
    if quick:
        return
    sys.path.insert(0, str(ROOT / "tutorials"))
    from data import read  # type: ignore[import-not-found]

    clothes = read("fashion-mnist")
    x, y = clothes.images[:images], clothes.labels[:images]
    yield Problem("Fashion-MNIST, MLP", x, y, mlp(784), 20, trainings)
    yield Problem("Fashion-MNIST, LeNet", x, y, lenet, 20, trainings[:2])


def train(problem: Problem, how: str, x: Tensor, y: Tensor, seed: int, moments: int = 0) -> Trained:
    """Train; with ``moments``, keep outputs and posteriors at as many moments, the end the last."""
    torch.manual_seed(seed)
    model, start = problem.net(), time.perf_counter()
    if how == "L-BFGS":
        return _logistic(model, x, y, start, bool(moments))
    n, epochs = len(x), problem.epochs * LENGTH[how]
    steps, delta = epochs * math.ceil(n / BATCH), PRIOR[how]
    ivon = how == "IVON"
    optimizer: torch.optim.Optimizer = (
        blr.IVON(
            model.parameters(),
            lr=0.2,
            ess=n,
            hess_init=30_000 / n,
            beta2=math.exp(-3 / steps),
            weight_decay=delta / n,
        )
        if ivon
        else torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=delta / n)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    outputs, posteriors, posterior_seconds = [], [], 0.0
    task = blr.Task(model, (x, y))
    every = max(1, epochs // max(moments, 1))
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(n).split(BATCH):
            if isinstance(optimizer, blr.IVON):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x[batch]), y[batch]).backward()
            else:
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
        if moments and epoch % every == 0:
            begun = time.perf_counter()
            outputs.append(predictions(model, x))
            posteriors.append(
                blr.Posterior.from_optimizer(optimizer, model) if ivon else sharper(task, delta)
            )
            posterior_seconds += time.perf_counter() - begun
    seconds = time.perf_counter() - start - posterior_seconds
    return Trained(model, outputs, posteriors, seconds, posterior_seconds)


def _logistic(model: nn.Module, x: Tensor, y: Tensor, start: float, wanted: bool) -> Trained:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = F.cross_entropy(model(x), y, reduction="sum")
        total = total + sum(0.5 * p.square().sum() for p in model.parameters())
        total.backward()
        return total

    optimizer.step(loss)
    seconds = time.perf_counter() - start
    if not wanted:
        return Trained(model, [], [], seconds, 0.0)
    q = laplace(blr.Task(model, (x, y)), 1.0, "full")
    return Trained(
        model, [predictions(model, x)], [q], seconds, time.perf_counter() - start - seconds
    )


def laplace(task: blr.Task, delta: float, structure: str = "kron") -> blr.Posterior:
    return blr.fit_laplace(task, structure=structure, prior_precision=delta)


def sharper(task: blr.Task, delta: float) -> blr.Posterior:
    """The Kronecker Laplace posterior with S made ``SHARPER`` times as large."""
    q = laplace(task, delta)
    form = q.form.plus(q.form, SHARPER - 1)
    return blr.Posterior(q.mean, form, prior_precision=delta, n_data=task.n_data)


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(1000)])


def flipped(problem: Problem, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """Labels with errors, and which: 5 % anything else, or 10 % the next class."""
    g, n, c = torch.Generator().manual_seed(1000 + seed), len(problem.y), problem.classes
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n, generator=g)[: round((0.05 if kind == "uniform" else 0.1) * n)]] = True
    shift = torch.randint(1, c, (n,), generator=g) if kind == "uniform" else torch.tensor(1)
    return torch.where(wrong, (problem.y + shift) % c, problem.y), wrong


def nll(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.double(), y, reduction="none")


def cleanlab(p: Tensor, y: Tensor, method: str = "self_confidence") -> Tensor:
    p = p.double() / p.double().sum(1, keepdim=True)
    return torch.from_numpy(1 - get_label_quality_scores(y.numpy(), p.numpy(), method=method))


def label_scores(problem: Problem, how: str, y: Tensor, seed: int) -> tuple[Scores, blr.Suspicions]:
    found = train(problem, how, problem.x, y, seed, MOMENTS)
    task, base = blr.Task(found.model, (problem.x, y)), found.seconds
    last = found.posterior_seconds / len(found.posteriors)
    begun = time.perf_counter()
    loo = blr.leave_one_out(task, found.posteriors[-1])
    one = base + last + time.perf_counter() - begun
    begun = time.perf_counter()
    several = blr.suspicious(task, found.posteriors)
    many = base + found.posterior_seconds + time.perf_counter() - begun
    alone = blr.suspicious(task, found.posteriors[-1], duplicates=False)
    crossed, begun = torch.empty(len(y), problem.classes), time.perf_counter()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for rest, out in folds.split(np.zeros(len(y)), y.numpy()):
        model = train(problem, how, problem.x[rest], y[rest], seed).model
        crossed[out] = predictions(model, problem.x[out]).softmax(1)
    cv = time.perf_counter() - begun
    out, moments = found.outputs[-1], len(found.outputs)
    losses = torch.stack([nll(f, y) for f in found.outputs])
    scores = {
        "plain loss": (losses[-1], base),
        f"plain loss, mean of {moments} moments": (losses.mean(0), base),
        "cleanlab, in-sample": (cleanlab(out.softmax(1), y), base),
        "cleanlab, 5-fold": (cleanlab(crossed, y), cv),
        "cleanlab, 5-fold, margin": (cleanlab(crossed, y, "normalized_margin"), cv),
        "LOO loss": (loo.losses, one),
        "cleanlab on LOO probabilities, margin": (
            cleanlab(loo.logits.softmax(1), y, "normalized_margin"),
            one,
        ),
        "self-influence": (blr.sensitivity(task, found.posteriors[-1]).self_influence, one),
        "relabelling gain": (alone.gain, one),
        f"relabelling gain, mean of {moments} moments": (several.gain, many),
    }
    return scores, several


def strangers(problem: Problem, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The data with 5 % of other images, labelled at random: turned, noise, and (28²) digits."""
    g, n = torch.Generator().manual_seed(2000 + seed), round(0.9 * len(problem.y))
    x, rest = problem.x[:n], problem.x[n:]
    count = max(10, n // 60)
    side = math.isqrt(x[0].numel())
    turned = rest[:count].reshape(-1, side, side).rot90(1, (1, 2)).reshape(-1, *x.shape[1:])
    parts = [turned, torch.rand(count, *x.shape[1:], generator=g)]
    if side == 28:
        flat = np.asarray(load_digits(return_X_y=True)[0])[:count]
        pixels = torch.from_numpy(flat).float().reshape(-1, 1, 8, 8) / 16
        parts.append(F.interpolate(pixels, size=28, mode="bilinear").reshape(-1, *x.shape[1:]))
    other = torch.cat(parts)
    y = torch.cat([problem.y[:n], torch.randint(problem.classes, (len(other),), generator=g)])
    wrong = torch.arange(n + len(other)) >= n
    return torch.cat([x, other]), y, wrong


def copies(problem: Problem, seed: int, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The data with 2.5 % of them there twice; copies that are not exact differ a little."""
    g, n = torch.Generator().manual_seed(3000 + seed), len(problem.y)
    chosen = torch.randperm(n, generator=g)[: n // 40]
    twin = problem.x[chosen].clone()
    if not exact:
        bright = 0.8 + 0.4 * torch.rand(len(twin), *[1] * (twin.ndim - 1), generator=g)
        twin = (twin * bright + 0.04 * torch.randn(twin.shape, generator=g)).clamp(0, 1)
        if twin.ndim == 4:
            twin[::2] = twin[::2].roll(1, 2)
    wrong = torch.zeros(n + len(twin), dtype=torch.bool)
    wrong[chosen] = wrong[n:] = True
    return torch.cat([problem.x, twin]), torch.cat([problem.y, problem.y[chosen]]), wrong


def neighbours(z: Tensor, k: int) -> Tensor:
    distance = torch.cdist(z, z)
    return distance.fill_diagonal_(torch.inf).topk(k, largest=False).values


def stranger_scores(
    problem: Problem, how: str, x: Tensor, y: Tensor, seed: int
) -> tuple[Scores, blr.Suspicions]:
    found = train(problem, how, x, y, seed, 1)
    task, base = blr.Task(found.model, (x, y)), found.seconds
    f = found.outputs[-1].double()
    begun = time.perf_counter()
    q = sharper(task, PRIOR[how])
    ours = blr.suspicious(task, q)
    variance = blr.sensitivity(task, q).variance
    loo = blr.leave_one_out(task, q)
    seconds = base + time.perf_counter() - begun
    assert variance is not None
    p = f.softmax(1)
    features = predictions(found.model[:-1], x)  # type: ignore[index]
    scores = {
        "plain loss": (nll(f, y), base),
        "1 − largest probability": (1 - p.amax(1), base),
        "entropy": (-(p * p.clamp_min(1e-30).log()).sum(1), base),
        "energy": (-f.logsumexp(1), base),
        "10th neighbour, pixels": (neighbours(x.flatten(1), 10)[:, -1], 0.0),
        "10th neighbour, features": (neighbours(features, 10)[:, -1], base),
        "tr V": (variance.diagonal(dim1=1, dim2=2).sum(1), seconds),
        "LOO loss": (loo.losses, seconds),
        "unfamiliarity tr ΛV": (ours.unfamiliarity, seconds),
    }
    return scores, ours


def copy_scores(
    problem: Problem, how: str, x: Tensor, y: Tensor, seed: int
) -> tuple[Scores, blr.Suspicions]:
    found = train(problem, how, x, y, seed, 1)
    task, base, begun = blr.Task(found.model, (x, y)), found.seconds, time.perf_counter()
    ours = blr.suspicious(task, sharper(task, PRIOR[how]))
    seconds = base + time.perf_counter() - begun
    pixels = neighbours(x.flatten(1), 10)
    features = neighbours(predictions(found.model[:-1], x), 10)  # type: ignore[index]
    scores = {
        "nearest, pixels": (-pixels[:, 0], 0.0),
        "nearest ÷ 10th, pixels": (-pixels[:, 0] / pixels[:, -1], 0.0),
        "nearest, features": (-features[:, 0], base),
        "nearest ÷ 10th, features": (-features[:, 0] / features[:, -1], base),
        "closeness": (ours.score("duplicate"), seconds),
    }
    return scores, ours


def rows_of(
    where: tuple[str, ...], found: tuple[Scores, blr.Suspicions], wrong: Tensor
) -> Iterator[dict[str, object]]:
    (scores, suspicions), k = found, int(wrong.sum())
    kind = KIND[where[-1].partition(",")[0]]
    named = torch.tensor([word == kind for word in suspicions.kind])
    right = float((named & wrong).sum())
    yield {
        **dict(zip(NAMES, (*where, f"kind {kind!r}"), strict=True)),
        "planted": k,
        "named": int(named.sum()),
        "precision": right / max(1, int(named.sum())),
        "recall": right / k,
    }
    for name, (score, seconds) in scores.items():
        first = torch.argsort(score, descending=True, stable=True)[:k]
        yield {
            **dict(zip(NAMES, (*where, name), strict=True)),
            "AUROC": roc_auc_score(wrong, torch.nan_to_num(score.double())),
            "precision": float(wrong[first].double().mean()),
            "seconds": seconds,
        }


def run(problem: Problem, how: str, seed: int) -> Iterator[dict[str, object]]:
    for kind, words in (("uniform", "labels, 5 % any"), ("next", "labels, 10 % next class")):
        y, wrong = flipped(problem, kind, seed)
        yield from rows_of((problem.name, how, words), label_scores(problem, how, y, seed), wrong)
    if how != "Adam":
        return
    x, y, wrong = strangers(problem, seed)
    scores = stranger_scores(problem, how, x, y, seed)
    yield from rows_of((problem.name, how, "strangers"), scores, wrong)
    for exact, words in ((True, "copies, exact"), (False, "copies, altered")):
        x, y, wrong = copies(problem, seed, exact)
        scores = copy_scores(problem, how, x, y, seed)
        yield from rows_of((problem.name, how, words), scores, wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="no download, one seed")
    parser.add_argument("--seeds", type=int, default=3, help="of the problems that are small")
    parser.add_argument("--images", type=int, default=5000, help="of Fashion-MNIST")
    parser.add_argument("--only", default="", help="data sets whose name begins so")
    parser.add_argument("--training", default="", help="trainings whose name begins so")
    parser.add_argument("--out", type=Path, help="CSV with a row per seed")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    for problem in problems(args.quick, args.images):
        if not problem.name.startswith(args.only):
            continue
        small = len(problem.y) < 2000 and not args.quick
        for how in (t for t in problem.trainings if t.startswith(args.training)):
            for seed in range(args.seeds if small else 1):
                rows += [{**row, "seed": seed} for row in run(problem, how, seed)]
                if args.out is not None:
                    pd.DataFrame(rows).to_csv(args.out, index=False)
            print(f"{problem.name}, {how}: done", file=sys.stderr, flush=True)
    show(pd.DataFrame(rows))


def show(rows: pd.DataFrame) -> None:
    """Means over the seeds, a block for each data set, training and fault."""
    kinds = rows["recall"].notna()
    columns = ["planted", "named", "precision", "recall"]
    mean = rows[~kinds].pivot_table(["AUROC", "precision", "seconds"], NAMES, sort=False)
    for where, part in mean.groupby(level=NAMES[:3], sort=False):
        print("\n" + ", ".join(map(str, where if isinstance(where, tuple) else (where,))))
        part = part.droplevel(NAMES[:3])
        print(part.to_string(float_format=lambda value: f"{value:.4f}"))
    print("\nkinds of blr.suspicious")
    table = rows[kinds].pivot_table(columns, NAMES, sort=False)[columns]
    print(table.round(2).reset_index().to_string(index=False))


if __name__ == "__main__":
    main()
