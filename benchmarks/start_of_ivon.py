"""Should the analyses look at IVON's precision with its start, or without it? Beside retraining.

    python -m benchmarks.start_of_ivon [CASE ...]

Networks that IVON trained as the docs say. Of the captured precision without its start, and as
weights were drawn (with it):

* loss: the mean left-out loss, beside that of tenfold cross-validation and the training loss;
* rank: Spearman's correlation of the left-out losses with the cross-validated ones, beside that of
  the training losses, "nothing changes";
* wrong: the share of planted wrong targets among the first k of ``suspicious``;
* influence: the linear datamodeling score over 32 random halves, of 100 test examples;
* groups: ten groups (classes, or tenths along the target) removed by ``solver="posterior"``; the
  mean error of the test loss after the removal, in parts of its mean true rise ("nothing changes":
  1), and Pearson's r.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import blr_analysis as blr
from benchmarks.agreement.metrics import linear_datamodeling, pearson, spearman
from benchmarks.field.cases import mlp
from benchmarks.papers import clothes

FOLDS = 10
HALVES = 32
ASKED = 100  # test examples
PLANTED = 0.05  # of the targets
BATCH = 50
NORMALISER = math.log(2 * math.pi) / 2  # of a Gaussian's −log density of variance 1


@dataclass(frozen=True)
class Case:
    """Data and a training: inputs and targets, for training and for test."""

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor]
    network: Callable[[], nn.Module]
    epochs: int
    likelihood: str
    hess_init: float = 1.0

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.likelihood == "categorical":
            return cross_entropy(outputs, targets, reduction="none")
        return (outputs.squeeze(1) - targets).square() / 2 + NORMALISER

    def planted(self) -> tuple[Tensor, Tensor]:
        """Targets of which some are wrong, and which."""
        n = len(self.x)
        generator = torch.Generator().manual_seed(1)
        chosen = torch.randperm(n, generator=generator)[: round(PLANTED * n)]
        y = self.y.clone()
        if self.likelihood == "categorical":
            shift = torch.randint(1, 10, (len(chosen),), generator=generator)
            y[chosen] = (y[chosen] + shift) % 10
        else:
            y[chosen] = -y[chosen]
        return y, chosen

    def trained(self, x: Tensor, y: Tensor, seed: int) -> tuple[nn.Module, blr.IVON]:
        torch.manual_seed(seed)
        model = self.network()
        n = len(x)
        steps = self.epochs * -(-n // BATCH)
        optimizer = blr.IVON(
            model.parameters(),
            lr=0.3,
            ess=n,
            weight_decay=1 / n,
            steps=steps,
            hess_init=self.hess_init,
            batch_size=BATCH,
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(self.epochs):
            for batch in torch.randperm(n).split(BATCH):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    self.losses(model(x[batch]), y[batch]).mean().backward()
                optimizer.step()
                schedule.step()
        return model.eval(), optimizer


def digits(hess_init: float = 1.0) -> Case:
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = ((x[order] - 4.9) / 6).float()
    y = y[order]
    test = (x[1000:], y[1000:])
    return Case(x[:1000], y[:1000], test, lambda: mlp(64, 64, 10), 30, "categorical", hess_init)


def fashion() -> Case:
    x, y, x_test, y_test = clothes(2000)
    x = x.flatten(1)
    test = (x_test[:2000].flatten(1), y_test[:2000])
    return Case(x, y, test, lambda: mlp(784, 64, 10), 25, "categorical")


def diabetes() -> Case:
    x, y = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = (20 * x[order]).float()
    y = ((y[order] - 152) / 77).float()
    test = (x[342:], y[342:])
    return Case(x[:342], y[:342], test, lambda: mlp(10, 32, 1), 60, "gaussian")


CASES: dict[str, Callable[[], Case]] = {
    "digits": digits,
    "digits, start 3": lambda: digits(3.0),
    "fashion": fashion,
    "diabetes": diabetes,
}


def without_gradient(case: Case, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return case.losses(model(x), y)


def crossed(case: Case, y: Tensor) -> Tensor:
    """Every example's loss where it was left out."""
    losses = torch.zeros(len(y))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(2))
    for fold in order.chunk(FOLDS):
        stays = torch.ones(len(y), dtype=torch.bool)
        stays[fold] = False
        model, _ = case.trained(case.x[stays], y[stays], seed=1)
        losses[fold] = without_gradient(case, model, case.x[fold], y[fold])
    return losses


def groups_of(case: Case, y: Tensor) -> list[Tensor]:
    if case.likelihood == "categorical":
        return [(y == k).nonzero().flatten() for k in range(10)]
    return list(y.argsort().chunk(10))


def test_loss(case: Case, model: nn.Module) -> float:
    return float(without_gradient(case, model, *case.test).mean())


def study(name: str) -> None:
    case = CASES[name]()
    y, wrong = case.planted()
    model, optimizer = case.trained(case.x, y, seed=0)
    task = blr.Task(model, (case.x, y), likelihood=case.likelihood, progress=False)
    asked = tuple(part[:ASKED] for part in case.test)
    asked_task = blr.Task(model, asked, likelihood=case.likelihood, progress=False)
    test_task = blr.Task(model, case.test, likelihood=case.likelihood, progress=False)
    captured = blr.Posterior.from_optimizer(optimizer, model)
    truth = crossed(case, y)
    training = without_gradient(case, model, case.x, y)
    hits = torch.isin(training.argsort(descending=True)[: len(wrong)], wrong)
    print(f"{name}: {captured}")
    print(
        f"  cross-validated loss {float(truth.mean()):.3f}; training {float(training.mean()):.3f}, "
        f"rank {spearman(training, truth):.3f}, wrong {float(hits.double().mean()):.2f}; "
        f"held-out {test_loss(case, model):.3f}",
        flush=True,
    )
    generator = torch.Generator().manual_seed(3)
    halves = [torch.randperm(len(y), generator=generator)[: len(y) // 2] for _ in range(HALVES)]
    kept = torch.zeros(HALVES, len(y), dtype=torch.bool)
    of_halves = []
    for k, half in enumerate(halves):
        kept[k, half] = True
        without, _ = case.trained(case.x[half], y[half], seed=1)
        of_halves.append(without_gradient(case, without, *asked))
    groups = groups_of(case, y)
    after = []
    for group in groups:
        stays = torch.ones(len(y), dtype=torch.bool)
        stays[group] = False
        without, _ = case.trained(case.x[stays], y[stays], seed=0)
        after.append(test_loss(case, without))
    before = test_loss(case, model)
    rises = torch.tensor(after) - before
    posteriors = {"without start": captured.changed(start=None), "as drawn": captured}
    for title, posterior in posteriors.items():
        loo = blr.leave_one_out(task, posterior)
        suspects = torch.tensor(blr.suspicious(task, posterior).table["index"].to_numpy().copy())
        hits = torch.isin(suspects[: len(wrong)], wrong)
        influence: Any = blr.influence(task, posterior, asked_task)
        answers = [
            blr.what_if(task, posterior, remove=group, evaluate=test_task, solver="posterior")
            for group in groups
        ]
        predicted = torch.tensor([answer.nll - before for answer in answers])
        error = float((predicted - rises).abs().mean() / rises.mean())
        score = linear_datamodeling(influence, kept, torch.stack(of_halves)).value
        print(
            f"  {title}: loss {loo.nll:.3f}, rank {spearman(loo.losses, truth):.3f}, "
            f"wrong {float(hits.double().mean()):.2f}, influence {score:.2f}, "
            f"groups error {error:.2f}, r {pearson(predicted, rises):.2f}",
            flush=True,
        )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or CASES:
        study(chosen)
