"""A network with BatchNorm, dropout and wrong labels: what its run says, beside retraining.

python -m benchmarks.run
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr

EPOCHS, BATCH, LR, N, WRONG = 24, 40, 2e-3, 700, 28
FOLDS = 10


def data() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs and targets of training and test, and which labels are wrong."""
    x, y = load_digits(return_X_y=True)
    order = np.random.RandomState(77).permutation(len(x))
    x, y = torch.from_numpy((x[order] - 4.9) / 6.0).float(), torch.from_numpy(y[order]).long()
    random, own = np.random.RandomState(78), y[:N].clone()
    wrong = torch.from_numpy(random.permutation(N)[:WRONG])
    own[wrong] = (own[wrong] + torch.from_numpy(random.randint(1, 10, WRONG))) % 10
    return x[:N], own, x[N:1400], y[N:1400], wrong


X, Y, X_TEST, Y_TEST, PLANTED = data()


def train(keep: Tensor, seed: int) -> tuple[nn.Module, blr.Checkpoints]:
    """AdamW at a constant rate, stopped off the minimum."""
    torch.manual_seed(seed)
    wide = nn.Linear(64, 80), nn.BatchNorm1d(80), nn.ReLU(), nn.Dropout(0.15)
    model = nn.Sequential(*wide, nn.Linear(80, 40), nn.ReLU(), nn.Linear(40, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=1e-2)
    checkpoints = blr.Checkpoints(model, steps=EPOCHS * -(-N // BATCH))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for batch in torch.randperm(N, generator=generator).split(BATCH):
            batch = batch[keep[batch]]
            if len(batch) > 1:
                optimizer.zero_grad()
                cross_entropy(model(X[batch]), Y[batch]).backward()
                optimizer.step()
            checkpoints.step()
    return model.eval(), checkpoints


@torch.no_grad()
def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y, reduction="none")


def without(chosen: Tensor, seed: int) -> nn.Module:
    keep = torch.ones(N, dtype=torch.bool)
    keep[chosen] = False
    return train(keep, seed)[0]


def removals(task: blr.Task, q: blr.Posterior, test: blr.Task, truths: list[float]) -> str:
    table = blr.what_if_each(task, q, evaluate=test)
    guess, true = table.nll_after.to_numpy(), np.array(truths)
    inside = int(((table.nll_low < true) & (true < table.nll_high)).sum())
    said = f"Pearson {pearsonr(true, guess)[0]:.2f}, error {np.mean(abs(guess / true - 1)):.0%}"
    return f"{said}, {inside} of 10 inside; note: {table.note[0]!r}"


def main() -> None:
    model, checkpoints = train(torch.ones(N, dtype=torch.bool), 0)
    recipe = blr.Recipe("adamw", lr=LR, weight_decay=1e-2, epochs=EPOCHS, batch_size=BATCH)
    task = blr.Task(model, (X, Y), checkpoints=checkpoints, recipe=recipe, progress=False)
    bare = blr.Task(model, (X, Y), progress=False)
    test = blr.Task(model, (X_TEST, Y_TEST), progress=False)
    run, end = blr.fit_laplace(task), blr.fit_laplace(bare)
    measured = blr.calibrate(task, run)
    print(f"{run}\ntemperature {measured.temperature:.3f}, error {measured.temperature_error:.3f}")
    truth = torch.zeros(N)
    for fold in torch.from_numpy(np.random.RandomState(5).permutation(N)).chunk(FOLDS):
        truth[fold] = losses(without(fold, 20), X[fold], Y[fold])
    for name, q in (("calibrated", measured), ("a guess", run), ("the end alone, a guess", end)):
        found = blr.leave_one_out(task if q is not end else bare, q)
        rank = spearmanr(found.losses, truth)[0]
        said = (
            f"loss {found.nll:.3f}, cross-validated {truth.mean():.3f}, rank agreement {rank:.3f}"
        )
        print(f"leave-one-out, {name}: {said}")
    for name, t, q in (("the run", task, measured), ("the end alone", bare, end)):
        first = set(blr.suspicious(t, q).order[:WRONG].tolist())
        share = len(first & set(PLANTED.tolist())) / WRONG
        print(f"wrong labels among the first, {name}: {share:.2f}")
    groups = [(c == Y).nonzero().flatten() for c in range(10)]
    truths = [
        float(np.mean([losses(without(g, s), X_TEST, Y_TEST).mean() for s in (30, 31)]))
        for g in groups
    ]
    print("class removal, recipe known:", removals(task, measured, test, truths))
    print("class removal, no recipe:", removals(bare, end, test, truths))


if __name__ == "__main__":
    main()
