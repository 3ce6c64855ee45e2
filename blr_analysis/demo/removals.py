"""Classes taken out in one step, by three posteriors, against networks retrained without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import pandas as pd

from blr_analysis.audit import evaluated
from blr_analysis.demo.training import Digits, TrainingRecipe, train
from blr_analysis.posterior import Posterior, fit_laplace
from blr_analysis.sensitivity import what_if_each
from blr_analysis.task import Task
from blr_analysis.views import Tabular

IVON_DIAGONAL = "IVON, diagonal"
KRONECKER = "Kronecker"
FULL = "full GGN"


@dataclass(frozen=True)
class ClassRemovals(Tabular):
    """What each class is worth: predicted by every posterior, and what came true.

    Attributes:
        predicted: by the posterior's name, the table of ``what_if_each``, rows in class order.
        retrained: class → (NLL, accuracy) on the test data of a network trained without it.
    """

    predicted: dict[str, pd.DataFrame]
    retrained: dict[int, tuple[float, float]]

    def misses(self) -> dict[str, float]:
        """Mean |predicted − retrained NLL| of each posterior over the retrained classes."""
        truth = pd.Series({c: nll for c, (nll, _) in self.retrained.items()})
        return {
            name: fmean((table.set_index("group")["nll_after"] - truth).abs().dropna())
            for name, table in self.predicted.items()
        }

    @property
    def rise(self) -> float:
        """By how much the NLL truly rises without a class, on average over the retrained."""
        return fmean((self.table["nll_after_retrained"] - self.table["nll_before"]).dropna())

    @property
    def closest(self) -> str:
        """The posterior that comes nearest to the retrained networks."""
        misses = self.misses()
        return min(misses, key=misses.__getitem__)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per class: n, the NLL before, and after by each posterior and by retraining."""
        first = next(iter(self.predicted.values()))
        kept = ("group", "n", "nll_before", "accuracy_before")
        table = pd.DataFrame({name: first[name] for name in kept})
        for name, each in self.predicted.items():
            short = name.lower().replace(", ", "_").replace(" ", "_")
            table[f"nll_after_{short}"] = each["nll_after"]
            table[f"accuracy_after_{short}"] = each["accuracy_after"]
        nothing = (float("nan"), float("nan"))
        truth = [self.retrained.get(c, nothing) for c in table["group"]]
        table["nll_after_retrained"] = [nll for nll, _ in truth]
        table["accuracy_after_retrained"] = [accuracy for _, accuracy in truth]
        return table


def remove_each_class(
    task: Task,
    posterior: Posterior,
    test: Task,
    data: Digits,
    *,
    seed: int,
    recipe: TrainingRecipe,
    say: Callable[[str], None],
) -> ClassRemovals:
    """Take out every class in one step, then retrain without two of them.

    The two are those of which the full posterior expects most and least. They are retrained from
    scratch: the same initial weights, recipe and seed, without the class.
    """
    posteriors = {IVON_DIAGONAL: posterior}
    for name, structure in ((KRONECKER, "kron"), (FULL, "full")):
        say(f"Laplace posterior at the same weights, {name} structure")
        posteriors[name] = fit_laplace(
            task, structure=structure, prior_precision=recipe.prior_precision
        )
    predicted = {}
    for name, q in posteriors.items():
        say(f"what if: without each class, one step ({name})")
        predicted[name] = what_if_each(task, q, evaluate=test, solver="posterior")
    expected = predicted[FULL].set_index("group")["nll_after"]
    retrained = {}
    for c in dict.fromkeys([int(expected.idxmax()), int(expected.idxmin())]):
        say(f"retraining from scratch without class {c}, to compare")
        kept = data.labels != c
        model, _ = train(
            data.images[kept], data.labels[kept], seed=seed, recipe=recipe, label=f"without {c}"
        )
        truth = Task(model, (data.test_images, data.test_labels))
        evaluation, _ = evaluated(truth, truth.parameters())
        retrained[c] = (evaluation.nll, float(evaluation.accuracy or 0.0))
    return ClassRemovals(predicted, retrained)
