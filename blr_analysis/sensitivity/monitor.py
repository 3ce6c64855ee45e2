"""The memory-perturbation equation while a model trains.

At chosen epochs a :class:`Monitor` records the leave-one-out loss, which estimates the loss on new
data from the training data alone,

    1/N Σ_i ℓ(y_i, f_i^{\\i}),    f_i^{\\i} ≈ f_i + τ V_i ē_i

and how much each example shapes the model. For a fitted posterior V and ē come from the run so far
(:mod:`blr_analysis.sensitivity.run_so_far`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Integral
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.backprop.engine import chunks, n_outputs
from blr_analysis.backprop.loss import Evaluation, evaluated
from blr_analysis.checks import at_least, instance, one_of, positive_int
from blr_analysis.data import chosen_indices
from blr_analysis.errors import DataError, InitialPrecisionWarning, InputError, PosteriorError
from blr_analysis.likelihoods import Likelihood
from blr_analysis.posterior.laplace import fit_laplace
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.sensitivity.corrections import self_influence
from blr_analysis.sensitivity.door import check_test, checked_posterior
from blr_analysis.sensitivity.leave_one_out import CORRECTIONS
from blr_analysis.sensitivity.run_so_far import RunSoFar
from blr_analysis.sensitivity.selection import each_once
from blr_analysis.sensitivity.subjects.network import MOST_OUTPUTS, moves_at
from blr_analysis.sensitivity.subjects.tokens import sequence_scores
from blr_analysis.sensitivity.training_errors import Errors, mean_errors
from blr_analysis.task import Task
from blr_analysis.views import Plottable, make_table

COLUMNS = (
    "epoch",
    "train_nll",
    "train_accuracy",
    "loo_nll",
    "loo_accuracy",
    "test_nll",
    "test_accuracy",
    "mean_deviation",
    "mean_self_influence",
    "max_leverage",
    "seconds",
)
MEASURES = ("deviation", "self_influence", "leverage", "loss", "left_out_loss")
DEFAULT_MEASURES = ("deviation", "self_influence")
Source = Posterior | Callable[[], Posterior]


class Monitor(Plottable):
    """Leave-one-out estimate, deviations and test loss at chosen epochs of a training run.

    Build it before training, because it measures how far the weights move from the first ones.
    Call it after each epoch: with the present posterior and the number of finished epochs, or as
    ``monitor(None, epoch)``, which fits a Kronecker posterior. It returns the recorded row, or None
    if the epoch is not to be recorded.

    A fitted posterior gets the damping of a run that stops now, and errors that are averaged over
    the epochs recorded so far. The estimate then follows the loss on data like the training data,
    including wrong labels (``python -m benchmarks.overfitting``: correlation .89 to .98, best epoch
    within two in four of six runs). A posterior of an optimizer is taken as it is; its estimates
    rank examples.

    A record takes as long as :func:`blr_analysis.leave_one_out`: a forward pass and C backward
    passes over the watched examples, and a forward pass over ``test``. The column ``seconds`` has
    the time; ``examples=`` bounds it.

    Model, optimizer and random generators stay as they are, so that a watched run takes the same
    steps as another one. A model in training mode is measured in eval mode, with the running
    statistics of its BatchNorm layers.

    Args:
        task: the model that is being trained, and its training data.
        every: record the epochs that this number divides, including 0, before training.
        test: further examples to measure, for comparison, under ``task``'s model.
        examples: the training examples to watch: None for all, a number of random ones, indices,
            or a boolean mask. Estimates are means over these; the posterior is always that of all
            ``n_data`` examples.
        keep: the measures to store for every watched example and epoch: any of "deviation",
            "self_influence", "leverage", "loss", "left_out_loss"; they take 4 bytes each.
        correction: that of :func:`blr_analysis.leave_one_out`.
        seed: draws the random examples.

    Attributes:
        rows: one mapping per recorded epoch, with losses in nats per example. A number that does
            not exist is NaN (without a test task, or the accuracy of a regression).
        indices: the watched examples, ``[n]``.

    Raises:
        InputError: ``every`` is below 1, a measure or correction is unknown, there are no such
            examples, or the test task has another likelihood.
        PosteriorError: the model of the test task has other parameters.
        DataError: the model has no outputs for some test targets.

    Source: Nickl et al., "The Memory-Perturbation Equation", NeurIPS 2023, section 4 (sensitivity
    and generalisation during training).

    Example:
        >>> import torch, blr_analysis as blr
        >>> X, y = torch.randn(60, 2), torch.randint(3, (60,))
        >>> model = torch.nn.Linear(2, 3)
        >>> optimizer = blr.IVON(model.parameters(), lr=0.1, ess=60, weight_decay=1 / 60)
        >>> monitor = Monitor(blr.Task(model, (X, y)), every=2)
        >>> for epoch in range(1, 7):
        ...     with optimizer.sampled_params(train=True):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(X), y).backward()
        ...     optimizer.step()
        ...     row = monitor(lambda: blr.Posterior.from_optimizer(optimizer, model), epoch)
        >>> monitor.epochs, monitor.deviations.shape, row["loo_nll"] > row["train_nll"]
        ([2, 4, 6], torch.Size([3, 60]), True)
    """

    @torch.inference_mode(False)  # also where the caller switched it on
    def __init__(
        self,
        task: Task,
        *,
        every: int = 1,
        test: Task | None = None,
        examples: int | Sequence[int] | Tensor | None = None,
        keep: Sequence[str] = DEFAULT_MEASURES,
        correction: str = "auto",
        seed: int = 0,
    ) -> None:
        instance("task", task, Task, "a blr_analysis.Task")
        self.task = task
        self.every = positive_int("every", every)
        at_least(0, "seed", seed)
        self.test = None if test is None else _test_task(test, task)
        self.indices = _watched(examples, task, seed)
        names = (keep,) if isinstance(keep, str) else tuple(keep)
        self.keep = tuple(dict.fromkeys(one_of("keep", name, MEASURES) for name in names))
        self.correction = one_of("correction", correction, CORRECTIONS)
        self._run = RunSoFar(task, self.indices)
        self.rows: list[dict[str, float]] = []
        self._history: dict[str, list[Tensor]] = {name: [] for name in self.keep}
        self._note = ""
        self._last = -1  # the last epoch of a call, recorded or not

    def due(self, epoch: int) -> bool:
        """Whether :meth:`__call__` would record this epoch."""
        return at_least(0, "epoch", epoch) % self.every == 0

    def check_epoch(self, epoch: int) -> int:
        """This epoch, if it can follow the last one.

        Raises:
            InputError: it does not rise, as in a second training run.
        """
        if at_least(0, "epoch", epoch) <= self._last:
            raise InputError(
                f"epoch {epoch} does not follow epoch {self._last}; build a new Monitor"
            )
        return int(epoch)

    @torch.inference_mode(False)  # also where the caller switched it on
    def __call__(self, posterior: Source | None, epoch: int) -> dict[str, float] | None:
        """Record one epoch.

        Args:
            posterior: learned on the task's data so far; or a function without arguments that
                returns it, which is called only for epochs that are recorded, and whose time is
                part of ``seconds``; or None for ``fit_laplace(task)``.
            epoch: the number of finished epochs; it must rise from call to call.

        Returns:
            The row, or None if the epoch is not to be recorded.

        Raises:
            InputError: the epoch does not rise, or the posterior is no posterior.
            PosteriorError: the posterior is of another model or number of examples, or has NaN or
                inf.
            ModelError: outputs are not finite.

        After an error the recorded rows are as before, and the same epoch can be tried again.
        """
        epoch = self.check_epoch(epoch)
        if epoch % self.every:
            if not callable(posterior) and posterior is not None:
                instance("posterior", posterior, Posterior, "a blr_analysis.Posterior")
            self._last = epoch
            return None
        start = perf_counter()
        with _in_eval_mode(self.task.model):
            q = self._posterior(posterior)
            row, measures = self._observed(q)
            row |= {"epoch": epoch, "test_nll": math.nan, "test_accuracy": math.nan}
            if self.test is not None:
                row |= evaluated(self.test, q.mean)[0].row("test")
        row["seconds"] = perf_counter() - start
        for name in self.keep:
            self._history[name].append(measures[name].float())
        self.rows.append({name: row[name] for name in COLUMNS})
        self._last = epoch
        return dict(self.rows[-1])

    def _observed(self, q: Posterior) -> tuple[dict[str, float], dict[str, Tensor]]:
        """The row and the measures, from the run so far if it has a better scale than q."""
        is_sequence = self.task.likelihood.is_sequence
        if is_sequence or n_outputs(self.task, q.mean) > MOST_OUTPUTS:
            return observed(self.task, q, self.indices, self.correction)
        damped = self._run.damped(q) if self._run.applies_to(q) else None
        if damped is None:
            return observed(self.task, q, self.indices, self.correction)
        self._note = ""
        self._run.begin()
        row_and_measures = _with_variance(
            self.task, damped, self.indices, self.correction, self._run.errors
        )
        self._run.finish()
        return row_and_measures

    def _posterior(self, source: Source | None) -> Posterior:
        """The checked posterior of the moment."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InitialPrecisionWarning)  # expected in early epochs
            if source is None:
                source = partial(fit_laplace, self.task.quiet)
            posterior = source() if callable(source) else source
        q = checked_posterior(self.task, posterior)
        self._note = f"; {q.note}" if q.note else ""
        for name, mean in q.mean.items():
            if not bool(torch.isfinite(mean).all()):
                raise PosteriorError(f"the mean of {name!r} holds NaN or inf; is training stable?")
        return q

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        watched = f"{len(self.indices):,} of {self.task.n_data:,} examples"
        if not self.rows:
            return f"Monitor({watched}, nothing recorded yet)"
        last = self.rows[-1]
        facts = [f"{watched}, {len(self)} epochs"]
        losses = f"epoch {self.epochs[-1]}: LOO NLL {last['loo_nll']:.4f}"
        if not math.isnan(last["test_nll"]):
            losses += f", test NLL {last['test_nll']:.4f}"
        facts.append(losses)
        facts.append(f"{self.seconds:.1f} s in all{self._note}")
        return f"Monitor({'; '.join(facts)})"

    @property
    def epochs(self) -> list[int]:
        """The recorded epochs, ``[E]``."""
        return [int(row["epoch"]) for row in self.rows]

    @property
    def seconds(self) -> float:
        """The time that the monitor has taken so far, in seconds."""
        return sum(row["seconds"] for row in self.rows)

    @property
    def best_epoch(self) -> int:
        """The recorded epoch with the smallest leave-one-out NLL, at which to stop the training.

        Raises:
            InputError: no recorded epoch has a finite estimate.
        """
        usable = [row for row in self.rows if math.isfinite(row["loo_nll"])]
        if not usable:
            raise InputError("the monitor has recorded no epoch with a finite estimate yet")
        return int(min(usable, key=lambda row: row["loo_nll"])["epoch"])

    @property
    def deviations(self) -> Tensor:
        """How far each watched example's prediction would move without it, ``[E, n]``."""
        return self.history("deviation")

    @torch.inference_mode(False)  # also where the caller switched it on
    def history(self, measure: str) -> Tensor:
        """A stored measure, by epoch and watched example, ``[E, n]``.

        Raises:
            InputError: it is not among ``keep``.
        """
        epochs = self._history[one_of("measure", measure, self.keep)]
        return torch.stack(epochs) if epochs else torch.empty(0, len(self.indices))

    @property
    def table(self) -> Any:
        """A DataFrame with one row per recorded epoch; ``table.to_csv(path)`` saves it.

        Columns: epoch, train_nll, train_accuracy, loo_nll, loo_accuracy, test_nll, test_accuracy,
        mean_deviation, mean_self_influence, max_leverage, seconds.
        """
        return make_table(self)

    @torch.inference_mode(False)  # also where the caller switched it on
    def state_dict(self) -> dict[str, Any]:
        """The records as tensors and numbers, for ``torch.save`` with the optimizer's state.

        ``torch.load(..., weights_only=True)`` reads them. :meth:`load_state_dict` also takes lists
        in place of tensors.
        """
        return {
            "last_epoch": self._last,
            "n_data": self.task.n_data,
            "note": self._note,
            "indices": self.indices.clone(),
            "rows": {name: [row[name] for row in self.rows] for name in COLUMNS},
            "kept": {name: self.history(name) for name in self.keep},
            "run": self._run.state_dict(),
        }

    @torch.inference_mode(False)  # also where the caller switched it on
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the records of :meth:`state_dict`, which replace the present ones.

        Raises:
            InputError: this is no such state, or it has other data, examples or measures. The
                present records stay.
        """
        try:
            rows = _rows_of(state["rows"])
            history = {
                name: [torch.as_tensor(values).float() for values in epochs]
                for name, epochs in state["kept"].items()
            }
            last_epoch = int(state["last_epoch"])
            note = str(state["note"])
            indices = torch.as_tensor(state["indices"])
            n_data = state["n_data"]
            run = RunSoFar(self.task, self.indices)
            run.load_state_dict(state["run"])
            n_epochs = {len(epochs) for epochs in history.values()}
            n_examples = {len(values) for epochs in history.values() for values in epochs}
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise InputError(f"this is no state_dict() of a Monitor ({error!r})") from error
        if n_data != self.task.n_data or not torch.equal(indices, self.indices):
            raise InputError("the state is of other data or examples: use the same task")
        is_complete = n_epochs <= {len(rows)} and n_examples <= {len(indices)}
        if set(history) != set(self.keep) or not is_complete:
            raise InputError(f"the state keeps {sorted(history)} of every example: give keep=")
        self.rows = rows
        self._run = run
        self._history = history
        self._last = last_epoch
        self._note = note


def _rows_of(table: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """One mapping per epoch, from the columns of a state."""
    columns = [[float(value) for value in table[name]] for name in COLUMNS]
    rows: list[dict[str, float]] = []
    for values in zip(*columns, strict=True):
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    for row in rows:
        row["epoch"] = int(row["epoch"])
    return rows


def observed(
    task: Task, q: Posterior, indices: Tensor, correction: str
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The row of an epoch, and the measures of the watched examples by name ``[n]``.

    For sequences, and for too many outputs to compute V_i, the left-out loss is the first order
    ℓ_i + ē_iᵀ τV_i ē_i. Then there is no left-out accuracy, and deviation and leverage are NaN.
    """
    if task.likelihood.is_sequence:
        scores = sequence_scores(task, q, indices=indices)
        assert scores.self_influence is not None
        influence = scores.self_influence
        before = Evaluation(scores.losses, None)
    elif n_outputs(task, q.mean) > MOST_OUTPUTS:
        before, influence = _first_order(task, q, indices)
    else:
        return _with_variance(task, q, indices, correction)
    unknown = torch.full_like(influence, torch.nan)
    after = Evaluation(before.losses + influence, None)
    return _row_and_measures(before, after, unknown, influence, unknown)


def _with_variance(
    task: Task, q: Posterior, indices: Tensor, correction: str, errors: Errors | None = None
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The row and the measures from V_i; ``errors`` are ē, by default of the posterior's run."""
    moves = moves_at(task, q, correction, indices, errors)
    likelihood = task.likelihood.at(indices)
    left_out = likelihood.moved(moves.outputs, moves.move)
    return _row_and_measures(
        _evaluation(likelihood, moves.outputs, moves.targets),
        _evaluation(likelihood, left_out, moves.targets),
        likelihood.distance(moves.outputs, left_out),
        moves.self_influence,
        moves.leverage,
    )


def _evaluation(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Evaluation:
    """Losses and correctness of these outputs."""
    losses = likelihood.nll(outputs, targets)
    return Evaluation(losses, likelihood.correct(outputs, targets))


def _first_order(task: Task, q: Posterior, indices: Tensor) -> tuple[Evaluation, Tensor]:
    """Losses and correctness, and the self-influences ``[n]``, without V_i."""
    errors = mean_errors(task, q)
    outputs: list[Tensor] = []
    targets: list[Tensor] = []
    influences: list[Tensor] = []
    for chunk in chunks(task, q.mean, columns=1, indices=indices, label="monitor"):
        influence = q.temperature * self_influence(q, chunk, errors(task, chunk), last=True)
        outputs.append(chunk.outputs.cpu())
        targets.append(chunk.targets.cpu())
        influences.append(influence.cpu())
    likelihood = task.likelihood.at(indices)
    evaluation = _evaluation(likelihood, torch.cat(outputs), torch.cat(targets))
    return evaluation, torch.cat(influences)


def _row_and_measures(
    before: Evaluation, after: Evaluation, deviation: Tensor, influence: Tensor, leverage: Tensor
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The row and the measures from evaluations with each example (before) and without (after)."""
    measures = {
        "deviation": deviation,
        "self_influence": influence,
        "leverage": leverage,
        "loss": before.losses,
        "left_out_loss": after.losses,
    }
    row = before.row("train") | after.row("loo")
    # ``correct`` says which examples count, also where the left-out predictions are unknown.
    row["loo_nll"] = replace(after, correct=before.correct).nll
    row["mean_deviation"] = float(deviation.double().mean())
    row["mean_self_influence"] = float(influence.double().mean())
    row["max_leverage"] = float(leverage.max())
    return row, measures


def _watched(examples: Any, task: Task, seed: int) -> Tensor:
    """The indices of the watched examples, sorted."""
    n_data = task.n_data
    if examples is None:
        return torch.arange(n_data)
    if isinstance(examples, Integral) and not isinstance(examples, bool):
        count = positive_int("examples", examples)
        if count > n_data:
            raise InputError(f"examples={count}, but the task has only {n_data}; None takes all")
        order = torch.randperm(n_data, generator=torch.Generator().manual_seed(seed))
        return order[:count].sort().values
    return each_once(chosen_indices(examples, n_data, "examples"), n_data, "examples")


def _test_task(test: Any, task: Task) -> Task:
    """The test examples under the trained model, after one trial, which may save hours."""
    test = check_test(test, task)
    try:
        with _in_eval_mode(task.model):
            evaluated(test, task.parameters())
    except DataError as error:
        raise DataError(f"the test task does not fit the model: {error}") from error
    return test


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode; afterwards each returns to its former mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
