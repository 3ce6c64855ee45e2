"""Is this a task, is that its posterior? Checked once, before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from blr_analysis.checks import instance, some
from blr_analysis.data import chosen_indices
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.recognition import met, recognised
from blr_analysis.posterior.stationarity import with_stationarity
from blr_analysis.task import Task

Run = tuple[Task, Posterior]  # a posterior, and the task with its buffers


def checked_posterior(task: Task, posterior: Posterior, *, own_weights: bool = True) -> Posterior:
    """The posterior on the task's device, which knows whether it is at a minimum.

    Of one that an optimizer of the rule learned it is the distribution that the network was trained
    under, :attr:`~blr_analysis.Posterior.as_drawn`: without its start, V is far wider than any
    weights that training saw (``python -m benchmarks.start_of_ivon``).

    What its fit did not measure is measured here, once, and kept beside the user's posterior.

    Args:
        own_weights: whether the model should stand at the posterior's mean.

    Raises:
        InputError: something else than a posterior, or none.
        PosteriorError: a posterior of another model, or of another number of examples.

    Warns:
        PosteriorWarning: it was learned with another model or other data; with ``own_weights``
            also where the model does not stand at its mean.
    """
    if posterior is None and not isinstance(task, Task):
        got = type(task).__name__
        raise InputError(f"give a Task and its Posterior; got {got} and no posterior")
    wanted = "a blr_analysis.Posterior (from_optimizer, from_checkpoint, load, or fit_laplace)"
    instance("posterior", posterior, Posterior, wanted)
    on_task = posterior.on(task).as_drawn
    on_task = recognised(task, posterior, on_task, own_weights=own_weights)
    if on_task.stationarity is None and not task.likelihood.is_sequence:
        on_task = with_stationarity(task, posterior, on_task)
    met(task, on_task)
    return on_task


def checked_runs(task: Task, posterior: Any) -> list[Run]:
    """The posteriors of one or several runs, each checked, and the task with its buffers.

    Raises:
        InputError, PosteriorError: an empty list; as :func:`checked_posterior`, naming which of
            them it is.
    """
    posteriors = list(posterior) if isinstance(posterior, list | tuple) else [posterior]
    if not posteriors:
        raise InputError("posterior is an empty list; give that of one run or more")
    runs = []
    for k, q in enumerate(posteriors):
        try:
            runs.append(_checked_run(task, q, alone=len(posteriors) == 1))
        except (InputError, PosteriorError) as error:
            place = f"posterior[{k}]: " if len(posteriors) > 1 else ""
            raise type(error)(f"{place}{error}") from error
    return runs


def _checked_run(task: Task, posterior: Any, *, alone: bool) -> Run:
    if not (isinstance(posterior, Posterior) and isinstance(task, Task)):
        return task, checked_posterior(task, posterior)
    with_buffers = task.holding(posterior.buffers)
    own_weights = alone and posterior.rerun is None
    return with_buffers, checked_posterior(with_buffers, posterior, own_weights=own_weights)


def check_test(test: Any, task: Task, name: str = "test") -> Task:
    """The held-out examples under the trained model (buffers, frozen weights and all).

    Raises:
        InputError: no task, or one of another likelihood.
        PosteriorError: its model has other parameters.
    """
    instance(name, test, Task, "a blr_analysis.Task with the held-out examples")
    shapes, test_shapes = (
        {n: p.shape for n, p in at.model.named_parameters()} for at in (task, test)
    )
    if shapes != test_shapes:
        raise PosteriorError(f"{name} is of another model, with other parameters")
    test = test.with_model(task)
    if not task.likelihood.judged_by(test.likelihood):
        raise InputError(
            f"{name} has the likelihood {test.likelihood!r}, the training task {task.likelihood!r}"
        )
    return test


def checked_evaluation(evaluate: Any, task: Task, posterior: Posterior) -> Task:
    """The examples to measure on, under the trained model (buffers, frozen weights and all)."""
    instance("evaluate", evaluate, Task, "a blr_analysis.Task with the examples to measure on")
    posterior.on(evaluate, same_data=False)
    return evaluate.with_model(task)


def checked_addition(add: Any, task: Task) -> Task:
    """The new examples under the old task's model."""
    instance("add", add, Task, "a blr_analysis.Task with the new examples")
    under_model = add.with_model(task)
    if not under_model.likelihood.same(task.likelihood):
        raise InputError(
            f"the added examples have the likelihood {under_model.likelihood!r}, the task "
            f"{task.likelihood!r}; take one for both"
        )
    return under_model


def checked_labels(relabel: Any, task: Task, leaving: Tensor) -> dict[int, Any]:
    """Index → new target with plain integers as indices.

    Raises:
        InputError: no mapping, sequences, an example named twice or removed too, an unknown word.
    """
    if relabel is None:
        return {}
    try:
        named = relabel.keys()
        labels = [relabel[index] for index in named]
    except (AttributeError, TypeError, KeyError) as error:
        got = type(relabel).__name__
        raise InputError(f"relabel must be a dict from index to new target, got {got}") from error
    if task.likelihood.is_sequence:
        raise InputError("relabel= takes one target per example; use remove= and add=")
    is_pandas_index = hasattr(named, "get_indexer")  # which holds row labels
    indices = named if is_pandas_index else list(named)
    chosen = []
    if labels:
        chosen = chosen_indices(indices, task.n_data, "relabel", task.examples.labels)
    if len(set(chosen)) < len(labels):
        raise InputError("relabel names an example more than once, or by booleans; use its index")
    both = set(chosen) & set(leaving.tolist())
    if both:
        raise InputError(f"example {min(both)} is both removed and relabelled; choose one")
    numbers = [_class_number(label, task.examples.classes or ()) for label in labels]
    return dict(zip(chosen, numbers, strict=True))


def _class_number(label: Any, classes: Sequence[Any]) -> Any:
    """The number of a class that is named by a word; other targets as they are."""
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
