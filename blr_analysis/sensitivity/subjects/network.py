"""A network with one output vector per example.

    V_i = J_i Σ J_iᵀ,    ē_i = mean_t ∂ℓ_i/∂f (t)

V_i is the prediction variance. ē_i is the prediction error, averaged over the posteriors t of the
run: those at the checkpoints of the training, and the last. Without example i its output would move
by τ V_i ē_i, with τ the posterior's temperature (Nickl et al., NeurIPS 2023). Where there are
several runs, the answers are averaged over them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks, n_outputs, predict
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.errors import InputError
from blr_analysis.likelihoods import Gaussian, Likelihood
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.predictive import scored_by
from blr_analysis.sensitivity.corrections import (
    CORRECTION_NAMES,
    DESCENT,
    HIGH,
    correction_for,
    highest_leverage,
    left_out_moves,
    prediction_variances,
    self_influence,
)
from blr_analysis.sensitivity.door import (
    checked_addition,
    checked_evaluation,
    checked_labels,
    checked_runs,
)
from blr_analysis.sensitivity.influence.between import influence_between
from blr_analysis.sensitivity.labels import best_label
from blr_analysis.sensitivity.removal import PASSES, descended_removals
from blr_analysis.sensitivity.results import LeaveOneOut, Scores, WhatIf
from blr_analysis.sensitivity.selection import select
from blr_analysis.sensitivity.solvers import Change, Settings, Solvers
from blr_analysis.sensitivity.subjects.contract import Subject, Suspects, first_by
from blr_analysis.sensitivity.training_errors import Errors, losses_at, mean_errors, mean_losses
from blr_analysis.sensitivity.twins import responses_of
from blr_analysis.sensitivity.wrong_labels import chance_of_wrong_labels
from blr_analysis.task import Task

BELOW_CHANCE = (
    "no estimate: left-out predictions are below chance, with leverages of 1 or "
    "more; calibrate, or pass refine="
)
# By default V_i is computed if C is at most MOST_OUTPUTS, because it takes C backward passes, and
# if N·C² is at most MOST_NUMBERS, which are 1 GiB in float32.
MOST_OUTPUTS = 256
MOST_NUMBERS = 2**28


class Network(Subject):
    """A network and its data under the posteriors of one or several runs.

    Attributes:
        runs: the posterior of each run, with the task under the model with its buffers.
        task, posterior: those of the last run.
    """

    kind = "a network"
    likelihood: Likelihood

    def __init__(self, task: Task, posterior: Any) -> None:
        self.runs = checked_runs(task, posterior)
        self.task, self.posterior = self.runs[-1]
        self.n = self.task.n_data
        self.metadata = self.task.metadata
        self.likelihood = self.task.likelihood
        self.progress = self.task.progress
        self.note = self.posterior.note

    def scores(self, variance: bool | None = None) -> Scores:
        """The scores, averaged over the runs; outputs, targets and losses are the last run's."""
        first_task, first_posterior = self.runs[0]
        scores = self._scores_at(first_task, first_posterior, variance)
        n_runs = len(self.runs)
        if n_runs == 1:
            return scores
        error = scores.error
        prediction_variance = scores.variance
        deviation = scores.deviation
        self_influence = scores.self_influence
        for task, posterior in self.runs[1:]:
            scores = self._scores_at(task, posterior, variance)
            error = _sum_in_place(error, scores.error)
            prediction_variance = _sum_in_place(prediction_variance, scores.variance)
            deviation = _sum_in_place(deviation, scores.deviation)
            self_influence = _sum_in_place(self_influence, scores.self_influence)
        return replace(
            scores,
            error=_quotient_in_place(error, n_runs),
            variance=_quotient_in_place(prediction_variance, n_runs),
            deviation=_quotient_in_place(deviation, n_runs),
            self_influence=_quotient_in_place(self_influence, n_runs),
        )

    def _scores_at(self, task: Task, posterior: Posterior, variance: bool | None) -> Scores:
        """The scores of one run: τ V at the posterior's mean, errors averaged over its run."""
        if variance is None:
            outputs_per_example = n_outputs(task, posterior.mean)
            fits_in_memory = task.n_data * outputs_per_example**2 <= MOST_NUMBERS
            variance = outputs_per_example <= MOST_OUTPUTS and fits_in_memory
        columns = scores_by_chunk(task, posterior, variance)
        outputs = columns["outputs"]
        targets = columns["targets"]
        deviation = None
        if "move" in columns:
            deviation = task.likelihood.distance(outputs, outputs + columns.pop("move"))
        return Scores(
            error=columns["error"],
            variance=columns.get("variance"),
            self_influence=columns["self_influence"],
            deviation=deviation,
            outputs=outputs,
            targets=targets,
            losses=task.likelihood.nll(outputs, targets),
            predictions=task.likelihood.prediction(outputs),
            likelihood=task.likelihood,
            metadata=task.metadata,
            note=posterior.note,
        )

    def left_out(self, correction: str = "auto", refine: int = 0) -> LeaveOneOut:
        if refine and len(self.runs) > 1:
            raise InputError("refine= takes one posterior; use refine=0")
        moves = [moves_at(task, posterior, correction) for task, posterior in self.runs]
        last = moves[-1]
        likelihood = self.likelihood
        mean_move = torch.stack([moves_of_run.move for moves_of_run in moves]).mean(0)
        left_out = likelihood.moved(last.outputs, mean_move)
        if refine:
            self._refine(left_out, last, refine)
        result = LeaveOneOut(
            logits=left_out,
            losses=likelihood.nll(left_out, last.targets),
            losses_before=likelihood.nll(last.outputs, last.targets),
            predictions=likelihood.prediction(left_out),
            predictions_before=likelihood.prediction(last.outputs),
            targets=last.targets,
            deviation=likelihood.distance(last.outputs, left_out),
            leverage=last.leverage,
            unfamiliarity=last.unfamiliarity,
            correction=[CORRECTION_NAMES[number] for number in last.correction.tolist()],
            likelihood=likelihood,
            metadata=self.metadata,
            note=self._left_out_note(last),
        )
        if not result.is_below_chance:
            return result
        return replace(result, note=_joined(BELOW_CHANCE, self.note))

    def _refine(self, left_out: Tensor, moves: Moves, count: int) -> None:
        """Replace the outputs ``left_out`` of ``count`` examples by those of descents.

        These are the examples whose loss is estimated to change most. ``left_out`` and
        ``moves.correction`` change in place.
        """
        likelihood = self.likelihood
        losses_before = likelihood.nll(moves.outputs, moves.targets)
        change = (likelihood.nll(left_out, moves.targets) - losses_before).abs()
        rows = change.argsort(descending=True, stable=True)[:count].sort().values
        removals = descended_removals(self.task, self.posterior, rows, passes=PASSES)
        solved = rows[~removals.lost]
        left_out[solved] = torch.cat(removals.outputs)[~removals.lost]
        moves.correction[solved] = DESCENT
        if len(solved) < count:
            warnings.warn(
                f"{count - len(solved)} of {count} examples keep their estimate: the model is "
                "too far from its minimum to solve them; train longer",
                RuntimeWarning,
                stacklevel=5,
            )

    def _left_out_note(self, moves: Moves) -> str:
        """The subject's note, and a line on estimates at high leverage that refine= would solve."""
        is_rough = (moves.leverage > HIGH) & (moves.correction != DESCENT)
        n_rough = int(is_rough.sum())
        is_exact = isinstance(self.likelihood.kind, Gaussian)  # whose curvature is constant
        if n_rough == 0 or is_exact or not self.posterior.at_minimum:
            return self.note
        estimates = "1 left-out loss is a rough estimate"
        if n_rough > 1:
            estimates = f"{n_rough} left-out losses are rough estimates"
        remedy = f"refine={n_rough} solves them exactly"
        return _joined(self.note, f"{estimates} (leverage above {HIGH}); {remedy}")

    def influence_on(self, test: Any, measure: Any, normalize: Any, k: int | None) -> Any:
        return influence_between(self, test, measure=measure, normalize=normalize, k=k)

    def change(self, remove: Any, add: Any, relabel: Any) -> Change:
        leaving = torch.empty(0, dtype=torch.long)
        if remove is not None:
            leaving = self.select(remove)
        if len(leaving) == self.n and add is None:
            raise InputError(
                f"remove selects all {self.n} examples; leave at least one, or add others"
            )
        new = None if add is None else checked_addition(add, self.task)
        change = Change(leaving, new, checked_labels(relabel, self.task, leaving))
        if change.count == 0:
            raise InputError("nothing to change: give remove=, add= or relabel=")
        return change

    def answering(self, settings: Settings) -> Callable[[Change], WhatIf]:
        evaluation = self.task
        if settings.evaluate is not None:
            evaluation = checked_evaluation(settings.evaluate, self.task, self.posterior)
        return Solvers(self.runs, evaluation, settings)

    def suspects(self, left_out: LeaveOneOut, share: float) -> Suspects:
        assert left_out.logits is not None and left_out.targets is not None
        losses = torch.stack([mean_losses(self.task, q) for _, q in self.runs]).mean(0)
        contradicted = first_by(losses, share)  # of a regression: the largest losses
        wrong = None
        if self.likelihood.is_classification:
            contradicted, wrong = self._against_the_label(left_out.logits, left_out.targets)
        _, proposed = best_label(self.likelihood.plain, left_out.logits, left_out.targets)
        return Suspects(
            losses=losses,
            training=self._last_losses(),
            left_out=scored_by(self.likelihood).nll(left_out.logits, left_out.targets),
            contradicted=contradicted,
            wrong=wrong,
            unfamiliarity=left_out.unfamiliarity,
            proposed=proposed,
            targets=left_out.targets,
            predictions=left_out.predictions_before,
        )

    def _last_losses(self) -> Tensor:
        """The unweighted losses at the end of the run, ``[N]``."""
        return losses_at(self.task, {**self.posterior.mean, **self.posterior.buffers})

    def _against_the_label(self, left_out: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which labels are contradicted, and P(y_i is wrong), ``[N]`` each.

        A label is contradicted if another label fits better, by the left-out prediction or by most
        of the run's predictions. P is computed from the left-out predictions if their scale was
        measured, else from their mean with the predictions of the checkpoints.
        """
        plain = self.likelihood.plain

        def prefers_another(outputs: Tensor) -> Tensor:
            gain, _ = best_label(plain, outputs, targets)
            return gain > 0

        run_outputs = []
        for q in self.posterior.run:
            outputs, _ = predict(self.task.holding(q.buffers), q.mean)
            run_outputs.append(outputs)
        votes = torch.stack([prefers_another(outputs) for outputs in run_outputs])
        contradicted_by_run = votes.double().mean(0) > 0.5
        scale_is_measured = self.posterior.at_minimum or self.posterior.calibration is not None
        logits = left_out
        if not scale_is_measured:
            logits = torch.stack([*run_outputs[:-1], left_out]).mean(0)
        wrong = chance_of_wrong_labels(plain, logits, targets)
        return contradicted_by_run | prefers_another(left_out), wrong

    def responses(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        return responses_of(self.task, self.posterior, samples=samples, seed=seed)

    def cheap_columns(self) -> dict[str, Tensor]:
        """The columns of the scores' table that take only forward passes."""
        outputs, targets = predict(self.task, self.posterior.mean)
        return {
            "index": torch.arange(self.n),
            "target": targets,
            "prediction": self.likelihood.prediction(outputs),
            "loss": self.likelihood.nll(outputs, targets),
        }

    def described(self, indices: Tensor, test: Any = None) -> dict[str, Tensor]:
        task = self.task if test is None else test
        if len(indices) == 0:
            return {}
        unique_indices, rows = indices.unique(return_inverse=True)
        outputs, targets = predict(task.subset(unique_indices), self.posterior.mean)
        predictions = task.likelihood.prediction(outputs)
        return {"target": targets[rows], "prediction": predictions[rows]}

    def select(self, selection: Any, name: str = "remove") -> Tensor:
        return select(selection, self, name=name, labels=self.task.examples.labels)


def _joined(*notes: str) -> str:
    """The notes in one line, without those that are empty."""
    return "; ".join(note for note in notes if note)


def _sum_in_place(total: Tensor | None, values: Tensor | None) -> Tensor | None:
    """The sum, in the memory of ``total``; None where the quantity was not computed."""
    if total is None or values is None:
        return None
    return total.add_(values)


def _quotient_in_place(total: Tensor | None, count: int) -> Tensor | None:
    """The total over the count, in its own memory; None where it was not computed."""
    if total is None:
        return None
    return total.div_(count)


@dataclass(frozen=True)
class Moves:
    """The output of every example, and how far it moves without the example; on the CPU.

    Attributes:
        outputs, targets: f_i ``[N, C]`` and y_i.
        move: f_i^{\\i} − f_i ``[N, C]``.
        leverage: the largest eigenvalue of τ V_i Λ_i ``[N]``.
        correction: how the move was computed, as an index into CORRECTION_NAMES ``[N]``.
        unfamiliarity: tr Λ_i V_i ``[N]``.
        self_influence: ē_iᵀ τ V_i ē_i ``[N]``.
    """

    outputs: Tensor
    targets: Tensor
    move: Tensor
    leverage: Tensor
    correction: Tensor
    unfamiliarity: Tensor
    self_influence: Tensor

    def converted(self, function: Callable[[Tensor], Tensor]) -> Moves:
        """The moves with a function applied to every column."""
        return Moves(
            outputs=function(self.outputs),
            targets=function(self.targets),
            move=function(self.move),
            leverage=function(self.leverage),
            correction=function(self.correction),
            unfamiliarity=function(self.unfamiliarity),
            self_influence=function(self.self_influence),
        )

    @classmethod
    def joined(cls, parts: Sequence[Moves]) -> Moves:
        """The moves of all parts, one part after the other."""
        return cls(
            outputs=torch.cat([part.outputs for part in parts]),
            targets=torch.cat([part.targets for part in parts]),
            move=torch.cat([part.move for part in parts]),
            leverage=torch.cat([part.leverage for part in parts]),
            correction=torch.cat([part.correction for part in parts]),
            unfamiliarity=torch.cat([part.unfamiliarity for part in parts]),
            self_influence=torch.cat([part.self_influence for part in parts]),
        )


def moves_at(
    task: Task,
    posterior: Posterior,
    correction: str,
    indices: Tensor | None = None,
    errors: Errors | None = None,
) -> Moves:
    """How far the output of each example moves without this example.

    Args:
        correction: "first_order", "cavity" or "auto".
        indices: the examples; None: all of them.
        errors: a function that returns ē of a chunk; None: averaged over the posterior's run.
    """
    is_share_of_rank = indices is None
    order = indices_of_rank(task, posterior.mean) if indices is None else indices
    errors_of = mean_errors(task, posterior) if errors is None else errors
    method = correction_for(posterior, correction)
    bound = highest_leverage(posterior)
    parts: list[Moves] = []
    for chunk in chunks(task, posterior.mean, by_parts=True, indices=order, label="leave one out"):
        error = errors_of(task, chunk)
        for rows, v in prediction_variances(posterior, chunk):
            likelihood = task.likelihood.at(chunk.indices[rows])
            f = chunk.outputs[rows]
            y = chunk.targets[rows]
            e = error[rows]
            unfamiliarity = (likelihood.hessian(f, y) * v).sum((1, 2))
            v.mul_(posterior.temperature)
            move, leverage, corrections = left_out_moves(method, f, y, e, v, likelihood, bound)
            self_influences = torch.einsum("nc,ncd,nd->n", e, v, e)
            part = Moves(f, y, move, leverage, corrections, unfamiliarity, self_influences)
            parts.append(part.converted(Tensor.cpu))
    moves = Moves.joined(parts)
    lacks_examples = is_share_of_rank and len(order) < task.n_data
    if not lacks_examples:
        return moves
    return moves.converted(lambda column: ranks.gathered(column, order, task.n_data))


def scores_by_chunk(task: Task, posterior: Posterior, variance: bool) -> dict[str, Tensor]:
    """The columns of all examples, by name.

    They are ``error``, ``outputs``, ``targets``, ``self_influence`` and, with ``variance``,
    ``variance`` = τ V and ``move`` = τ V ē. They are filled chunk by chunk, because chunks that are
    joined at the end would take twice the memory.
    """
    indices_of_this_rank = indices_of_rank(task, posterior.mean)
    errors_of = mean_errors(task, posterior)
    # With several ranks, each has zeros in the rows of the others, and their columns are summed.
    is_only_rank = len(indices_of_this_rank) == task.n_data
    new_column = torch.empty if is_only_rank else torch.zeros
    columns: dict[str, Tensor] = {}
    sweep = chunks(
        task,
        posterior.mean,
        columns=None if variance else 1,
        by_parts=variance,
        indices=indices_of_this_rank,
        label="sensitivity",
    )
    for chunk in sweep:
        for indices, values in _chunk_scores(posterior, chunk, errors_of(task, chunk), variance):
            if not columns:
                columns = {
                    name: new_column(task.n_data, *value.shape[1:], dtype=value.dtype)
                    for name, value in values.items()
                }
            rows = ranks.rows(indices)
            for name, value in values.items():
                columns[name][rows] = value
    ranks.total(list(columns.values()))
    return columns


def _chunk_scores(
    posterior: Posterior, chunk: Chunk, error: Tensor, variance: bool
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The columns of a chunk, a few examples at a time.

    Yields:
        The indices of these examples, and their columns by name.
    """
    temperature = posterior.temperature
    if not variance:
        influence = temperature * self_influence(posterior, chunk, error, last=True)
        columns = {
            "error": error,
            "outputs": chunk.outputs,
            "targets": chunk.targets,
            "self_influence": influence,
        }
        yield chunk.indices, columns
        return
    for rows, v in prediction_variances(posterior, chunk):
        v.mul_(temperature)
        e = error[rows]
        move = torch.bmm(v, e.unsqueeze(-1)).squeeze(-1)
        columns = {
            "error": e,
            "outputs": chunk.outputs[rows],
            "targets": chunk.targets[rows],
            "self_influence": (move * e).sum(-1),
            "variance": v,
            "move": move,
        }
        yield chunk.indices[rows], columns
