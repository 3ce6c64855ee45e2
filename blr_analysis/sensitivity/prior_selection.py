"""Choose the prior precision with the smallest leave-one-out loss, without held-out data.

For each δ of a grid a model is trained, and its leave-one-out loss is estimated from the training
data (Nickl et al., NeurIPS 2023, Fig. 4).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blr_analysis.backprop.loss import evaluated
from blr_analysis.checks import one_of, positive_number
from blr_analysis.errors import BLRError, InputError, ModelError
from blr_analysis.posterior.laplace import STRUCTURES, fit_laplace
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import Prior
from blr_analysis.progress import track
from blr_analysis.sensitivity.corrections import HIGH
from blr_analysis.sensitivity.door import check_outputs, check_test
from blr_analysis.sensitivity.leave_one_out import leave_one_out
from blr_analysis.sensitivity.minimise import on_a_copy, train
from blr_analysis.task import Task
from blr_analysis.views import Plottable, Tabular

ROUNDS = 50  # posteriors that a training to the optimum may fit
SMALL = 4_096  # parameters, up to which "auto" takes the full structure
TOLERANCE = 1e-8  # residual at which a training ends, in double precision
TOLERANCE_SINGLE = 1e-4  # the same in single precision
Fit = Callable[[Task, float], Posterior]


@dataclass(frozen=True)
class PriorSelection(Tabular, Plottable):
    """The result of :func:`select_prior_precision`.

    Attributes:
        best: the δ with the smallest leave-one-out NLL.
        posterior: the posterior of the model that was trained with it; its mean are the weights.
        at_edge: whether ``best`` is the first or last of the grid, so that a wider grid may have a
            better one.
        rows: one mapping per δ, in rising order; losses in nats per example.
        table: the rows as a DataFrame: prior_precision, train_nll, train_accuracy, loo_nll,
            loo_accuracy, max_leverage, rough (the number of examples whose estimate is of first
            order and inaccurate, as their leverage is above 0.5), test_nll, test_accuracy, seconds,
            and for the default fit residual and converged.
    """

    best: float
    posterior: Posterior
    rows: Sequence[Mapping[str, Any]]

    @property
    def at_edge(self) -> bool:
        return self.best in (self.rows[0]["prior_precision"], self.rows[-1]["prior_precision"])

    def __len__(self) -> int:
        return len(self.rows)

    def __float__(self) -> float:
        """The best δ."""
        return float(self.best)

    def __repr__(self) -> str:
        (best_row,) = (row for row in self.rows if row["prior_precision"] == self.best)
        losses = f"LOO NLL {best_row['loo_nll']:.4f}"
        if not math.isnan(best_row["test_nll"]):
            losses += f", test NLL {best_row['test_nll']:.4f}"
        facts = [f"best {self.best:g} of {len(self)}: {losses}"]
        if self.at_edge:
            facts.append("at the edge of the grid: try a wider one")
        n_unfinished = sum(row.get("converged") is False for row in self.rows)
        if n_unfinished > 0:
            facts.append(f"{n_unfinished} of the fits did not converge")
        n_rough = sum(row["rough"] > 0 for row in self.rows)
        if n_rough > 0:
            facts.append(f"leverages too high for first order at {n_rough} of them")
        return f"PriorSelection({'; '.join(facts)})"


@torch.inference_mode(False)  # also where the caller switched it on
def select_prior_precision(
    task: Task,
    grid: Sequence[float] | Tensor | None = None,
    *,
    fit: Fit | None = None,
    initial: Mapping[str, Tensor] | None = None,
    structure: str = "auto",
    test: Task | None = None,
) -> PriorSelection:
    """The prior precision δ with the smallest leave-one-out loss, and its curve over the grid.

    For each δ, a copy of the model is trained on Σ_i ℓ_i(θ) + δ/2 ‖θ − θ₀‖² and

        LOO(δ) = 1/N Σ_i ℓ(y_i, f_i^{\\i})

    is estimated from its posterior. For linear regression it is exact (PRESS).

    Args:
        task: model and training data. The model is not changed, because copies are trained.
        grid: the positive δ to try, in any order. δ belongs to the SUM of the losses: a weight
            decay on their mean over N examples is δ/N. None: nine values, from a hundredth to a
            hundred times the δ that :func:`blr_analysis.fit_laplace` finds at the present weights.
        fit: your own training: ``fit(task, delta)`` gets the task under a copy of the model, may
            train the copy in place, and returns its posterior. None: full-batch quasi-Newton moves
            and :func:`blr_analysis.fit_laplace`. The moves start from the model's present weights,
            then from those of the next smaller δ. They find the optimum of a generalised linear
            model, and a local optimum of a network. The table has their distance from it,
            ‖∇‖ / (‖Σ_i ∇ℓ_i‖ + δ‖θ‖).
        initial: θ₀: the state dict of the first weights, or of the base model of a fine-tune;
            None: 0. A ``fit`` of your own has to penalise θ − θ₀ itself.
        structure: the structure of the default fit's posterior: "diag", "kron", "lowrank", "full",
            or "auto": "full" up to 4,096 parameters, else "kron".
        test: further examples, for comparison only.

    Raises:
        InputError: the task has sequences, the grid is empty or has a δ that is not positive and
            finite, the fit returns no posterior or one of another δ, or the test task has another
            likelihood.
        PosteriorError: ``initial`` is of another model, or no δ is found where ``grid`` is None.
        ModelError: the model cannot be copied, or no leave-one-out loss on the grid is finite.
        PosteriorError, DataError: the errors of :func:`blr_analysis.leave_one_out`.

    Source: Nickl et al., "The Memory-Perturbation Equation", NeurIPS 2023, Fig. 4; Allen, 1974
    (PRESS).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X = torch.randn(30, 5, dtype=torch.float64); y = X[:, 0] + torch.randn(30)
        >>> model = torch.nn.Linear(5, 1, bias=False).double()
        >>> task = blr.Task(model, (X, y), likelihood="gaussian")
        >>> choice = select_prior_precision(task, [0.1, 1.0, 10.0, 100.0])
        >>> choice.best in (0.1, 1.0, 10.0, 100.0), len(choice.table)
        (True, 4)
    """
    check_outputs(task, "select_prior_precision")
    if grid is None:
        delta = fit_laplace(task.quiet, initial=initial).prior_precision
        grid = [delta * 10 ** (k / 2) for k in range(-4, 5)]
    deltas = checked_grid(grid)
    one_of("structure", structure, ("auto", *STRUCTURES))
    if fit is not None and not callable(fit):
        raise InputError(f"fit must be a function (task, delta) -> posterior, got {fit!r}")
    if test is not None:
        check_test(test, task)
    first_weights = Prior({}).around(initial, task.parameters()).mean
    if fit:
        training = _training_by_user(fit, task)
    else:
        training = _training_by_moves(task, first_weights, structure)
    return _curve(task, deltas, training, test)


# δ → the task under the trained model, its posterior, and further columns of the table
Training = Callable[[float], tuple[Task, Posterior, dict[str, Any]]]


def _curve(
    task: Task, deltas: list[float], training: Training, test: Task | None
) -> PriorSelection:
    """Train with each δ, measure, and choose the best."""
    rows: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    best_posterior: Posterior | None = None
    for delta in track(deltas, total=len(deltas), label="prior precision", show=task.progress):
        start = time.perf_counter()
        try:
            under, q, fit_columns = training(delta)
            measures = _measured(under.quiet, q, test)
        except BLRError as error:
            raise type(error)(f"with prior_precision {delta:g} of the grid: {error}") from error
        row: dict[str, Any] = {"prior_precision": delta}
        row |= measures
        row["seconds"] = time.perf_counter() - start
        row |= fit_columns
        rows.append(row)
        is_better = best is None or row["loo_nll"] < best["loo_nll"]
        if math.isfinite(row["loo_nll"]) and is_better:
            best = row
            best_posterior = q
    if best is None or best_posterior is None:
        raise ModelError("no δ of the grid has a finite leave-one-out loss; try larger ones")
    return PriorSelection(best=best["prior_precision"], posterior=best_posterior, rows=rows)


def _training_by_moves(
    task: Task, initial: Mapping[str, Tensor] | None, structure: str
) -> Training:
    """Quasi-Newton moves on one copy of the model, from one δ to the next."""
    params = task.parameters()
    is_double = not params or task.check_parameters(params) == torch.float64
    tolerance = TOLERANCE if is_double else TOLERANCE_SINGLE
    if structure == "auto":
        is_small = sum(p.numel() for p in params.values()) <= SMALL
        structure = "full" if is_small else "kron"
    under = on_a_copy(task.quiet)

    def training(delta: float) -> tuple[Task, Posterior, dict[str, Any]]:
        prior = Prior({None: delta}, initial)
        end = train(under, prior, structure=structure, tolerance=tolerance, rounds=ROUNDS)
        q = fit_laplace(under, structure=structure, prior_precision=prior)
        residual = end.residual
        return under, q, {"residual": residual, "converged": residual <= tolerance}

    return training


def _training_by_user(fit: Fit, task: Task) -> Training:
    """The user's training, each time on a fresh copy of the model."""

    def training(delta: float) -> tuple[Task, Posterior, dict[str, Any]]:
        under = on_a_copy(task)
        q = fit(under, delta)
        if not isinstance(q, Posterior):
            raise InputError(f"fit must return a Posterior, got {type(q).__name__}")
        stated = q.prior.entries.get(None, delta)
        if not math.isclose(float(stated), delta, rel_tol=1e-3):
            raise InputError(
                f"fit returned prior_precision={float(stated):g} for δ={delta:g}; state "
                "weight_decay = δ / N"
            )
        return under, q, {}

    return training


def _measured(under: Task, q: Posterior, test: Task | None) -> dict[str, float]:
    """The table's columns for one δ, from the posterior of the model that was trained with it."""
    loo = leave_one_out(under, q)
    assert loo.leverage is not None
    is_first_order = torch.tensor([correction == "first_order" for correction in loo.correction])
    mean = q.on(under).mean
    columns = evaluated(under, mean)[0].row("train")
    columns["loo_nll"] = loo.nll
    columns["loo_accuracy"] = math.nan if loo.accuracy is None else loo.accuracy
    columns["max_leverage"] = float(loo.leverage.max())
    columns["rough"] = int((is_first_order & (loo.leverage > HIGH)).sum())
    if test is None:
        return columns | {"test_nll": math.nan, "test_accuracy": math.nan}
    return columns | evaluated(test.with_model(under), mean)[0].row("test")


def checked_grid(grid: Any) -> list[float]:
    """The δ of a grid, in rising order, without repetition.

    Raises:
        InputError: the grid is empty, or some δ is not positive and finite.
    """
    try:
        values = [positive_number("grid", value) for value in grid]
    except TypeError as error:
        raise InputError(f"grid must be a sequence of numbers, got {grid!r}") from error
    if not values:
        raise InputError("grid is empty; give prior precisions, such as 0.1, 1, 10")
    return sorted(set(values))
