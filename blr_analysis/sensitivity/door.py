"""Checks of the arguments of analyses: a task and its posterior, test data, changes of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blr_analysis.checks import instance, some
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recognition import mark_compared, recognised
from blr_analysis.posterior.stationarity import with_stationarity
from blr_analysis.task import Task

Run = tuple[Task, Posterior]  # a posterior, and the task under the model with its buffers


def checked_posterior(task: Task, posterior: Posterior, *, own_weights: bool = True) -> Posterior:
    """The posterior on the task's device, with a measurement of whether it is at a minimum.

    For a posterior that an optimizer of the rule learned, it is the distribution under which the
    network was trained, :attr:`~blr_analysis.Posterior.as_drawn`. It contains the precision that
    the optimizer started from; without it, V would be far wider than the weights that the training
    saw (``python -m benchmarks.start_of_ivon``).

    If the fit did not measure whether it is at a minimum, it is measured here, once for each
    posterior of the user.

    Args:
        own_weights: whether the model's weights should be the posterior's mean.

    Raises:
        InputError: this is no posterior.
        PosteriorError: the posterior is of another model, or of another number of examples.

    Warns:
        PosteriorWarning: it was learned with another model or other data, or, with
            ``own_weights``, the model's weights are not its mean.
    """
    if posterior is None and not isinstance(task, Task):
        kind = type(task).__name__
        raise InputError(f"give a Task and its Posterior; got {kind} and no posterior")
    remedy = "a blr_analysis.Posterior (from_optimizer, from_checkpoint, load, or fit_laplace)"
    instance("posterior", posterior, Posterior, remedy)
    on_task = posterior.on(task).as_drawn
    on_task = recognised(task, posterior, on_task, own_weights=own_weights)
    if on_task.stationarity is None and not task.likelihood.is_sequence:
        on_task = with_stationarity(task, posterior, on_task)
    mark_compared(task, on_task)
    return on_task


def checked_runs(task: Task, posterior: Any) -> list[Run]:
    """The checked posterior of each of one or several runs, with the task under its buffers.

    Raises:
        InputError, PosteriorError: the list is empty, or the errors of :func:`checked_posterior`,
            which name the posterior's place in the list.
    """
    posteriors = list(posterior) if isinstance(posterior, list | tuple) else [posterior]
    if not posteriors:
        raise InputError("posterior is an empty list; give that of one run or more")
    is_single = len(posteriors) == 1
    runs = []
    for k, q in enumerate(posteriors):
        try:
            runs.append(_checked_run(task, q, is_single=is_single))
        except (InputError, PosteriorError) as error:
            place = "" if is_single else f"posterior[{k}]: "
            raise type(error)(f"{place}{error}") from error
    return runs


def _checked_run(task: Task, posterior: Any, *, is_single: bool) -> Run:
    """The task and the posterior of one run, checked.

    The model's weights should be the mean of a single posterior, unless it comes from a rerun.
    """
    if not (isinstance(posterior, Posterior) and isinstance(task, Task)):
        return task, checked_posterior(task, posterior)  # which raises
    with_buffers = task.holding(posterior.buffers)
    own_weights = is_single and posterior.rerun is None
    return with_buffers, checked_posterior(with_buffers, posterior, own_weights=own_weights)


def check_test(test: Any, task: Task, name: str = "test") -> Task:
    """The held-out examples under the trained model, with its buffers and frozen weights.

    Raises:
        InputError: this is no task, or a task with another likelihood.
        PosteriorError: its model has other parameters.
    """
    instance(name, test, Task, "a blr_analysis.Task with the held-out examples")
    if _parameter_shapes(test) != _parameter_shapes(task):
        raise PosteriorError(f"{name} is of another model, with other parameters")
    test = test.with_model(task)
    if not task.likelihood.judged_by(test.likelihood):
        raise InputError(
            f"{name} has the likelihood {test.likelihood!r}, the training task {task.likelihood!r}"
        )
    return test


def _parameter_shapes(task: Task) -> dict[str, torch.Size]:
    return {name: p.shape for name, p in task.model.named_parameters()}


def checked_evaluation(evaluate: Any, task: Task, posterior: Posterior) -> Task:
    """The examples to measure on, under the trained model, with its buffers and frozen weights."""
    instance("evaluate", evaluate, Task, "a blr_analysis.Task with the examples to measure on")
    posterior.on(evaluate, same_data=False)
    return evaluate.with_model(task)


def checked_addition(add: Any, task: Task) -> Task:
    """The new examples under the task's model, or an InputError for another likelihood."""
    instance("add", add, Task, "a blr_analysis.Task with the new examples")
    under_model = add.with_model(task)
    if not under_model.likelihood.same(task.likelihood):
        raise InputError(
            f"the added examples have the likelihood {under_model.likelihood!r}, the task "
            f"{task.likelihood!r}; take one for both"
        )
    return under_model


def checked_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """The new targets by the indices of examples, as plain integers.

    Args:
        relabel: a mapping from indices, or a pandas Series from row labels, to targets; or None.
        leaving: indices of examples that are removed.

    Raises:
        InputError: this is no mapping, the task has sequences, an example is named twice or also
            removed, or a class has an unknown name.
    """
    if relabel is None:
        return {}
    try:
        keys = relabel.keys()
        labels = [relabel[key] for key in keys]
    except (AttributeError, TypeError, KeyError) as error:
        kind = type(relabel).__name__
        raise InputError(f"relabel must be a dict from index to new target, got {kind}") from error
    if task.likelihood.is_sequence:
        raise InputError("relabel= takes one target per example; use remove= and add=")
    if not labels:
        return {}
    is_pandas_index = hasattr(keys, "get_indexer")  # its keys are row labels
    if not is_pandas_index:
        keys = list(keys)
    indices = chosen_indices(keys, task.n_data, "relabel", task.examples.labels)
    if len(set(indices)) < len(labels):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    also_removed = set(indices) & set(leaving.tolist())
    if also_removed:
        raise InputError(f"example {min(also_removed)} is both removed and relabelled; choose one")
    targets = [_class_number(label, task.examples.classes or ()) for label in labels]
    return dict(zip(indices, targets, strict=True))


def _class_number(label: Any, classes: Sequence[Any]) -> Any:
    """The number of a class that is given by its name; other targets as they are."""
    if not isinstance(label, str):
        return label
    if label not in classes:
        reason = f"none of {some(classes)}" if classes else "no number"
        raise InputError(f"relabel: {label!r} is {reason}")
    return classes.index(label)


def check_outputs(task: Any, who: str) -> None:
    """Raise :class:`InputError` unless this is a task with one output vector per example."""
    instance("task", task, Task, "a blr_analysis.Task")
    if task.likelihood.is_sequence:
        name = task.likelihood.name
        raise InputError(f"{who} takes one output vector per example, {name!r} has one per token")
