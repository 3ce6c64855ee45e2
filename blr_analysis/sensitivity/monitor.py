"""The memory-perturbation equation while a model trains.

At chosen epochs the leave-one-out loss, an estimate of the loss on new data from the training
data alone,

    1/N Σ_i ℓ(y_i, f_i^{\\i}),    f_i^{\\i} ≈ f_i + τ V_i ē_i

stands beside the training loss, and the examples that shape the model show themselves. Of fits V
and ē are those of the run so far (:mod:`blr_analysis.sensitivity.run_so_far`).
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

    Build it before training: first weights tell how far the run has gone. By ``monitor(None,
    epoch)`` it fits a Kronecker posterior itself, whose damping is that of a run stopped now, with
    errors that are averaged over the epochs recorded so far. Then the estimate follows the loss on
    data like the training's, wrong labels and all (``python -m benchmarks.overfitting``: r .89 to
    .98, best epoch within two in four of six runs); a posterior of an optimizer is taken as it is,
    and ranks examples.

    Call it with the posterior of the moment and the number of epochs done; the row it records
    comes back (None where the epoch is not due). It costs what :func:`blr_analysis.leave_one_out`
    costs: a forward pass and C backward passes over the watched examples, and a forward pass over
    ``test``; the column ``seconds`` says how long that took, ``examples=`` bounds it.

    Model, optimizer and random generators are left as they are: a run that is watched takes the
    same steps as one that is not. A model in training mode is watched in eval mode, its
    BatchNorm layers with their running statistics.

    Args:
        task: the model that is being trained, and its training data.
        every: record every so many epochs: those that it divides (0, before training, too).
        test: further examples to measure, for comparison; they are run under ``task``'s model.
        examples: which training examples to watch: None for all, a number of them drawn at
            random with ``seed``, or indices or a boolean mask. The estimates are then means over
            those; the posterior stays that of all ``n_data`` examples.
        keep: what to keep of every watched example at every epoch: any of "deviation",
            "self_influence", "leverage", "loss", "left_out_loss"; 4 bytes each.
        correction: as in :func:`blr_analysis.leave_one_out`.

    Attributes:
        rows: what was recorded, one mapping per epoch; NaN where a number does not exist (no test
            task, the accuracy of a regression). Losses in nats per example.
        indices: the watched examples, ``[n]``.

    Raises:
        InputError: ``every`` below 1, an unknown measure or correction,
            impossible examples, a test task of another likelihood.
        PosteriorError: a test task of a model with other parameters.
        DataError: test targets that the model has no outputs for.

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
        self._last = -1  # the last epoch that was passed in, recorded or not

    def due(self, epoch: int) -> bool:
        """Whether :meth:`__call__` would record this epoch."""
        return at_least(0, "epoch", epoch) % self.every == 0

    def check_epoch(self, epoch: int) -> int:
        """This epoch, where it may come next.

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
                makes it, called only where the epoch is due and counted in ``seconds``; None:
                ``fit_laplace(task)``. Of a fit that found its prior off the minimum, the run so
                far knows the scale and the errors (see the class).
            epoch: how many epochs are done; it must rise from call to call.

        Returns:
            The row, or None where the epoch is not due.

        Raises:
            InputError: an epoch that does not rise, or something else than a posterior.
            PosteriorError: a posterior of another model or number of examples, or one with NaN
                or inf.
            ModelError: outputs that are not finite. Whatever is raised, what was recorded stays,
                and the same epoch can be tried again.
        """
        epoch = self.check_epoch(epoch)
        if epoch % self.every:
            if not callable(posterior) and posterior is not None:
                instance("posterior", posterior, Posterior, "a blr_analysis.Posterior")
            self._last = epoch
            return None
        start = perf_counter()
        with _resting(self.task.model):
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
        """The row and the measures, by the run so far where that knows more than the posterior."""
        is_sequence = self.task.likelihood.is_sequence
        if is_sequence or n_outputs(self.task, q.mean) > MOST_OUTPUTS:
            return observed(self.task, q, self.indices, self.correction)
        damped = self._run.damped(q) if self._run.applies_to(q) else None
        if damped is None:
            return observed(self.task, q, self.indices, self.correction)
        self._note = ""
        self._run.begin()
        found = _with_variance(self.task, damped, self.indices, self.correction, self._run.errors)
        self._run.keep()
        return found

    def _posterior(self, source: Source | None) -> Posterior:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InitialPrecisionWarning)  # it is early
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
        tested = "" if math.isnan(last["test_nll"]) else f", test NLL {last['test_nll']:.4f}"
        return (
            f"Monitor({watched}, {len(self)} epochs; epoch {self.epochs[-1]}: LOO NLL "
            f"{last['loo_nll']:.4f}{tested}; {self.seconds:.1f} s in all{self._note})"
        )

    @property
    def epochs(self) -> list[int]:
        """The recorded epochs, ``[E]``."""
        return [int(row["epoch"]) for row in self.rows]

    @property
    def seconds(self) -> float:
        """What the monitor has cost so far, in seconds."""
        return sum(row["seconds"] for row in self.rows)

    @property
    def best_epoch(self) -> int:
        """The recorded epoch with the smallest leave-one-out NLL: where to stop, without test data.

        Raises:
            InputError: nothing recorded, or no finite estimate.
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
        """A measure that is kept, by epoch and watched example, ``[E, n]``.

        Raises:
            InputError: not among ``keep``.
        """
        epochs = self._history[one_of("measure", measure, self.keep)]
        return torch.stack(epochs) if epochs else torch.empty(0, len(self.indices))

    @property
    def table(self) -> Any:
        """DataFrame: one row per recorded epoch; ``table.to_csv(path)`` saves it.

        epoch, train_nll, train_accuracy, loo_nll, loo_accuracy, test_nll, test_accuracy,
        mean_deviation, mean_self_influence, max_leverage, seconds.
        """
        return make_table(self)

    @torch.inference_mode(False)  # also where the caller switched it on
    def state_dict(self) -> dict[str, Any]:
        """What was recorded, in tensors and numbers: ``torch.save`` it with the optimizer's state.

        ``torch.load(..., weights_only=True)`` reads it back, and tensors may come back as lists.
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
        """Go on from what :meth:`state_dict` gave; what was recorded here is replaced.

        Raises:
            InputError: no such state, or one of other data, examples or kept measures; what was
                recorded here stays.
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
    """The row of an epoch, and the measures ``[n]`` of these examples, as the analyses find them.

    Of sequences, and where there are too many outputs for V_i, deviation and leverage are NaN, and
    the left-out loss is ℓ_i + ē_iᵀ τV_i ē_i, to first order, without hits.
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
    losses = likelihood.nll(outputs, targets)
    return Evaluation(losses, likelihood.correct(outputs, targets))


def _first_order(task: Task, q: Posterior, indices: Tensor) -> tuple[Evaluation, Tensor]:
    """Losses and hits, and the self-influences, without V_i."""
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
    measures = {
        "deviation": deviation,
        "self_influence": influence,
        "leverage": leverage,
        "loss": before.losses,
        "left_out_loss": after.losses,
    }
    row = before.row("train") | after.row("loo")
    row["loo_nll"] = replace(after, correct=before.correct).nll  # of the examples that count
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
    """The test examples under the model that is trained, tried once, before hours of training."""
    test = check_test(test, task)
    try:
        with _resting(task.model):
            evaluated(test, task.parameters())
    except DataError as error:
        raise DataError(f"the test task does not fit the model: {error}") from error
    return test


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode, also BatchNorm; then each returns to its own mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
