"""How far influence agrees with retraining, measured on a user's own model.

The model is retrained on random halves of its data by its own recipe. The linear datamodeling score
(:mod:`blr_analysis.sensitivity.agreement`) says how well influence, or any other method, predicts
the losses after these retrainings. The ceiling says how well the noise of retraining allows it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import at_least, instance, positive_int
from blr_analysis.errors import InputError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.progress import announce
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity.agreement import Agreement, agreement_of, agreement_of_seeds
from blr_analysis.sensitivity.door import check_test
from blr_analysis.sensitivity.halves import HalvesFile, Retraining, random_halves
from blr_analysis.sensitivity.influence.influence import influence
from blr_analysis.sensitivity.score_files import score_matrices
from blr_analysis.sensitivity.validation import Validation
from blr_analysis.task import Task

INFLUENCE = "influence"  # the name of the package's own row
FEWEST = 4  # halves: of fewer a rank correlation says nothing
ONE_SEED = "a single seed gives no ceiling"
ALL_ALIKE = "every retraining gave the same losses: nothing can be compared"
MOSTLY_NOISE = "two seeds do not agree beyond chance: take more seeds or halves"


@dataclass(frozen=True)
class Study:
    """What is to be validated, checked.

    Attributes:
        retraining: on which halves, and how.
        file: where retrainings are kept.
        scores: of other methods, ``[N, M]`` by name.
    """

    retraining: Retraining
    file: HalvesFile | None
    scores: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, task: Any, test: Any, scores: Any, halves: int, seeds: int, passes: Any, keep: Any
    ) -> Study:
        """Check everything before any work.

        Raises:
            InputError: see :func:`validate`.
        """
        instance("task", task, Task, "a blr_analysis.Task")
        test = check_test(test, task, "test_task")
        at_least(FEWEST, "halves", halves)
        positive_int("seeds", seeds)
        if task.n_data < 2:
            raise InputError("validate needs 2 training examples or more to halve them")
        matrices = score_matrices(scores, (task.n_data, test.n_data))
        if INFLUENCE in matrices:
            raise InputError(f"{INFLUENCE!r} names the package's own row: rename your scores")
        retraining = Retraining(task, test, shortened_recipe(task, passes), halves, seeds)
        return cls(retraining, HalvesFile.at(keep), matrices)

    @property
    def cost(self) -> str:
        """What the retrainings take, in a line."""
        return self.retraining.cost(self.retraining.count_missing(self.file))

    def run(self, posterior: Any) -> Validation:
        """Retrain, and compare.

        Args:
            posterior: of the task, or of several runs; None: other methods' scores alone.
        """
        retraining = self.retraining
        matrices = dict(self.scores)
        note = ""
        if posterior is not None:
            matrix: Any = influence(retraining.task, posterior, retraining.test)
            note = matrix.pairs.unlike
            matrices = {INFLUENCE: matrix.matrix, **matrices}
        losses = retraining.losses(self.file)
        return compared(retraining, losses, matrices, note)


def shortened_recipe(task: Task, passes: int | None) -> Recipe:
    """The recipe of the retrainings.

    Raises:
        InputError: no recipe, passes below 1, or beside a ``train=``.
    """
    recipe = task.recipe
    if recipe is None:
        raise InputError("no recipe to retrain by: give Task(recipe=), or train with BLRCallback")
    if passes is None:
        return recipe
    positive_int("passes", passes)
    if recipe.train is not None:
        raise InputError("train= trains as long as it does: leave passes= out")
    return recipe.shortened(passes)


def compared(
    retraining: Retraining, losses: Tensor, matrices: Mapping[str, Tensor], note: str = ""
) -> Validation:
    """The result: every method beside the retrained losses ``[K, S, M]``."""
    halves = random_halves(retraining.task.n_data, retraining.n_halves)
    agreements = [agreement_of(name, matrix, halves, losses) for name, matrix in matrices.items()]
    seeds_agree = agreement_of_seeds(losses) if retraining.seeds > 1 else None
    lines = [*_caveats(retraining, seeds_agree), note]
    return Validation(
        agreements=tuple(sorted(agreements, key=lambda method: -method.value)),
        seeds_agree=seeds_agree,
        halves=halves,
        losses=losses,
        epochs=retraining.recipe.epochs,
        note="; ".join(filter(None, lines)),
    )


def _caveats(retraining: Retraining, seeds_agree: Agreement | None) -> Iterator[str]:
    """Why not to trust the scores, a line each."""
    recipe = retraining.task.recipe
    assert recipe is not None
    yield recipe.note
    epochs = retraining.recipe.epochs
    if epochs < recipe.epochs:
        yield f"retrained for {epochs:g} of {recipe.epochs:g} epochs"
    if seeds_agree is None:
        yield ONE_SEED
    elif math.isnan(seeds_agree.value):
        yield ALL_ALIKE
    elif not seeds_agree.low > 0:
        yield MOSTLY_NOISE


@torch.inference_mode(False)  # also where the caller switched it on
def validate(
    task: Task,
    posterior: Posterior | Sequence[Posterior] | None = None,
    test_task: Task | None = None,
    *,
    scores: Mapping[str, Any] | None = None,
    halves: int = 20,
    seeds: int = 2,
    passes: int | None = None,
    keep: str | os.PathLike[str] | None = None,
) -> Validation:
    """Compare influence, and any other method's scores, with retraining on random halves.

        score = mean_j  rank correlation over halves S of  −Σ_{i∈S} a_ij  and  ℓ_j(S)

    ℓ_j(S) is the loss of test example j after retraining on S, a mean over seeds. It costs
    ``halves`` × ``seeds`` trainings on half of the data. Their time is printed first (on standard
    error), unless the task's ``progress`` is False.

    Args:
        task: the model, the data it was trained on, and its recipe.
        posterior: learned on those data, or a list of those of several runs, whose influence is
            compared; None: the methods in ``scores`` alone.
        test_task: the examples whose losses are asked about, under the same likelihood.
        scores: the scores of other methods by name, each a matrix ``[N_train, N_test]`` (tensor,
            array, or the path of a ``.npy`` or ``.parquet`` file). A score is the larger, the more
            training on i lowers the loss of j.
        halves: how many random halves, at least 4.
        seeds: trainings of each half; a single one gives no ceiling.
        passes: epochs of each retraining, of a shortened recipe; None: those of the recipe.
        keep: a ``.safetensors`` file for the retrained losses. Losses that it holds already are not
            computed again, so a killed study continues, and another method costs nothing.

    Returns:
        A :class:`~blr_analysis.sensitivity.Validation`: ``.table``, ``.plot()``, ``.ceiling``,
        ``.score(name)``, ``.against(name, matrix)``.

    Raises:
        InputError: no recipe, no test data, scores of another shape or with NaN, too few halves.
        StorageError: ``keep`` is of another recipe or other data; scores that cannot be read.
        ModelError: a retraining that diverges.
        PosteriorError: a posterior of another model or number of examples.

    Source: Park et al., "TRAK", ICML 2023, Definition 2.3 (the score); Spearman, 1910, and Brown,
    1910 (the ceiling).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> recipe = blr.Recipe("adam", lr=1e-2, epochs=2, batch_size=20)
        >>> model = torch.nn.Linear(2, 3)
        >>> task = blr.Task(model, (X[:40], y[:40]), recipe=recipe, progress=False)
        >>> test, q = blr.Task(model, (X[40:], y[40:])), blr.fit_laplace(task)
        >>> alike = y[:40, None] == y[40:]
        >>> result = validate(task, q, test, scores={"same class": alike}, halves=4)
        >>> result.table.columns.tolist()
        ['method', 'score', 'low', 'high', 'of_ceiling']
    """
    study = Study.of(task, test_task, scores, halves, seeds, passes, keep)
    if posterior is None and not study.scores:
        raise InputError("nothing to compare: give a posterior, scores=, or both")
    if task.progress is not False:
        announce(study.cost)
    return study.run(posterior)
