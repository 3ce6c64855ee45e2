"""How well faults that were planted in real data are found: wrong labels, copies, strangers.

    python -m benchmarks.wrong_data [--quick] [--seeds 3] [--only DATA]

One row per data set, optimizer, fault and score: AUROC, precision at k (k: how many faults were
planted) and seconds, training included; means over the seeds. A last table says how well the kinds
that `blr.suspicious` names are right: of the examples named so how many were planted (precision),
of those planted how many are named so (recall), and of labels the precision that is expected.
cleanlab's scores are its own (`get_label_quality_scores`), from probabilities of 5-fold
cross-validation (five trainings more) or of the trained network itself. ``--quick`` takes digits
and one seed; otherwise 5,000 images of Fashion-MNIST too, fetched as in the tutorials.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable, Iterator

import pandas as pd
import torch
import torch.nn.functional as F
from cleanlab.rank import get_label_quality_scores
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn

import blr_analysis as blr
from tutorials.data import read

FOLDS = 5
BATCH = 50
EPOCHS = 20
CLASSES = 10
NAMES = ["data", "optimizer", "fault", "score"]
Scores = dict[str, tuple[Tensor, float]]  # larger is more suspicious; seconds
Fault = tuple[Tensor, Tensor, Tensor]  # inputs, targets, which are wrong


def optimizer_of(how: str, model: nn.Module, n: int, steps: int) -> torch.optim.Optimizer:
    if how == "IVON":
        return blr.IVON(model.parameters(), lr=0.2, ess=n, weight_decay=1 / n, steps=steps)
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def train(how: str, x: Tensor, y: Tensor, seed: int) -> tuple[nn.Module, blr.Checkpoints, float]:
    """A network of two hidden layers, its checkpoints, and seconds."""
    torch.manual_seed(seed)
    hidden = (nn.Linear(x[0].numel(), 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, CLASSES))
    begun = time.perf_counter()
    n = len(x)
    steps = EPOCHS * math.ceil(len(x) / BATCH)
    optimizer = optimizer_of(how, model, n, steps)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    checkpoints = blr.Checkpoints(model, steps=steps)
    for _ in range(EPOCHS):
        for batch in torch.randperm(n).split(BATCH):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            schedule.step()
            checkpoints.step()
    return model.eval(), checkpoints, time.perf_counter() - begun


@torch.no_grad()
def predictions(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([model(part) for part in x.split(1000)])


def flipped(x: Tensor, y: Tensor, kind: str, seed: int) -> Fault:
    """Labels with errors: 5 % anything else, or 10 % the next class."""
    g = torch.Generator().manual_seed(1000 + seed)
    n = len(y)
    wrong = torch.zeros(n, dtype=torch.bool)
    wrong[torch.randperm(n, generator=g)[: round((0.05 if kind == "any" else 0.1) * n)]] = True
    shift = torch.randint(1, CLASSES, (n,), generator=g) if kind == "any" else torch.tensor(1)
    return x, torch.where(wrong, (y + shift) % CLASSES, y), wrong


def strangers(x: Tensor, y: Tensor, seed: int) -> Fault:
    """Nine tenths of the data, and 3 % of others with labels at random: turned, and noise."""
    g = torch.Generator().manual_seed(2000 + seed)
    n = round(0.9 * len(y))
    count = max(10, n // 60)
    side = math.isqrt(x[0].numel())
    turned = x[n:][:count].reshape(-1, side, side).rot90(1, (1, 2)).reshape(-1, *x.shape[1:])
    other = torch.cat([turned, torch.rand(count, *x.shape[1:], generator=g)])
    labels = torch.cat([y[:n], torch.randint(CLASSES, (len(other),), generator=g)])
    return torch.cat([x[:n], other]), labels, torch.arange(n + len(other)) >= n


def copies(x: Tensor, y: Tensor, seed: int, exact: bool) -> Fault:
    """The data with 2.5 % of them there twice; copies that are not exact differ a little."""
    g = torch.Generator().manual_seed(3000 + seed)
    n = len(y)
    chosen = torch.randperm(n, generator=g)[: n // 40]
    twin = x[chosen].clone()
    if not exact:
        bright = 0.8 + 0.4 * torch.rand(len(twin), *[1] * (twin.ndim - 1), generator=g)
        twin = (twin * bright + 0.04 * torch.randn(twin.shape, generator=g)).clamp(0, 1)
    wrong = torch.zeros(n + len(twin), dtype=torch.bool)
    wrong[chosen] = wrong[n:] = True
    return torch.cat([x, twin]), torch.cat([y, y[chosen]]), wrong


def cleanlab(p: Tensor, y: Tensor) -> Tensor:
    p = p.double() / p.double().sum(1, keepdim=True)
    return torch.from_numpy(1 - get_label_quality_scores(y.numpy(), p.numpy()))


def neighbours(z: Tensor, k: int) -> Tensor:
    distance = torch.cdist(z, z)
    return distance.fill_diagonal_(torch.inf).topk(k, largest=False).values


def label_scores(how: str, x: Tensor, y: Tensor, seed: int, model: nn.Module) -> Scores:
    """What has no part of ours: cleanlab's, and the training loss."""
    crossed = torch.empty(len(y), CLASSES)
    begun = time.perf_counter()
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    for rest, out in folds.split(torch.zeros(len(y)), y):
        crossed[out] = predictions(train(how, x[rest], y[rest], seed)[0], x[out]).softmax(1)
    taken = time.perf_counter() - begun
    f = predictions(model, x)
    return {
        "plain loss": (F.cross_entropy(f.double(), y, reduction="none"), 0.0),
        "cleanlab, in-sample": (cleanlab(f.softmax(1), y), 0.0),
        "cleanlab, 5-fold": (cleanlab(crossed, y), taken),
    }


def rows(where: tuple[str, ...], fault: Fault, seed: int) -> Iterator[dict[str, object]]:
    """Every score of one fault, and the kinds that were named."""
    x, y, wrong = fault
    how = where[1]
    model, checkpoints, base = train(how, x, y, seed)
    begun = time.perf_counter()
    kind = where[2].partition(",")[0]
    task = blr.Task(model, (x, y), checkpoints=checkpoints, progress=False)
    ours = blr.suspicious(task, blr.fit_laplace(task))
    taken = base + time.perf_counter() - begun
    # type: ignore[index]
    f = predictions(model, x)
    z = predictions(model[:-1], x)
    if kind == "label":
        scores = label_scores(how, x, y, seed, model)
        scores["mean loss of the run"] = (ours.losses, taken)
        scores["leave-one-out loss"] = (ours.left_out, taken)
    elif kind == "unfamiliar":
        scores = {
            "1 − largest probability": (1 - f.softmax(1).amax(1), base),
            "10th neighbour, pixels": (neighbours(x.flatten(1), 10)[:, -1], 0.0),
            "10th neighbour, features": (neighbours(z, 10)[:, -1], base),
            "unfamiliarity tr ΛV": (ours.unfamiliarity, taken),
        }
    else:
        pixels = neighbours(x.flatten(1), 10)
        features = neighbours(z, 10)
        scores = {
            "nearest ÷ 10th, pixels": (-pixels[:, 0] / pixels[:, -1], 0.0),
            "nearest ÷ 10th, features": (-features[:, 0] / features[:, -1], base),
            "closeness": (ours.score("duplicate"), taken),
        }
    named = torch.tensor([word == kind for word in ours.kind])
    k = int(wrong.sum())
    right = float((named & wrong).sum())
    told = max(1, int(named.sum()))
    about = {"named": int(named.sum()), "precision": right / told, "recall": right / k}
    about["expected"] = ours.precision if kind == "label" and ours.precision else math.nan
    yield {**dict(zip(NAMES, (*where, "named"), strict=True)), "planted": k, **about}
    for name, (score, seconds) in scores.items():
        first = torch.argsort(score, descending=True, stable=True)[:k]
        yield {
            **dict(zip(NAMES, (*where, name), strict=True)),
            "AUROC": roc_auc_score(wrong, torch.nan_to_num(score.double())),
            "precision": float(wrong[first].double().mean()),
            "seconds": seconds,
        }


def measured(name: str, x: Tensor, y: Tensor, seed: int) -> Iterator[dict[str, object]]:
    faults: dict[str, Callable[[], Fault]] = {
        "label, 5 % any": lambda: flipped(x, y, "any", seed),
        "label, 10 % next class": lambda: flipped(x, y, "next", seed),
        "unfamiliar": lambda: strangers(x, y, seed),
        "duplicate, exact": lambda: copies(x, y, seed, True),
        "duplicate, altered": lambda: copies(x, y, seed, False),
    }
    for how in ("Adam", "IVON"):
        for fault, made in faults.items():
            if how == "Adam" or fault.startswith("label"):
                yield from rows((name, how, fault), made(), seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="no download, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="data sets whose name begins so")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pixels, digit = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    problems = {"digits": (pixels.float() / 16, digit)}
    if not args.quick:
        clothes = read("fashion-mnist")
        problems["Fashion-MNIST"] = (clothes.images[:5000], clothes.labels[:5000])
    found = []
    for name, data in problems.items():
        if name.startswith(args.only):
            for seed in range(1 if args.quick else args.seeds):
                found += measured(name, *data, seed)
    table = pd.DataFrame(found)
    kinds = table["recall"].notna()
    of_kinds = ["planted", "named", "precision", "expected", "recall"]
    for part, columns in ((~kinds, ["AUROC", "precision", "seconds"]), (kinds, of_kinds)):
        print(table[part].pivot_table(columns, NAMES, sort=False)[columns].round(3).to_string())


if __name__ == "__main__":
    main()
