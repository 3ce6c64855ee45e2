"""The objective F that a model minimises when it is retrained on changed data, and its posterior.

    F(θ) = Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

The sum is over the examples that stay, are added, or have new labels. Where a group G of examples
leaves, the posterior is

    λ^{\\G} = λ − Σ_{i∈G} λ̃_i:    S^{\\G} = S − S_G,    m^{\\G} = m + (S^{\\G})⁻¹ Σ_{i∈G} J_iᵀ e_i

with S_G = Σ_{i∈G} J_iᵀ Λ_i J_i in the posterior's structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, StackDataset

from blr_analysis.backprop.engine import chunks
from blr_analysis.backprop.loss import loss_and_gradient
from blr_analysis.backprop.tree import add, norm
from blr_analysis.data import Examples
from blr_analysis.errors import DataError, PosteriorError
from blr_analysis.posterior.fit import curvature_root
from blr_analysis.posterior.posterior import Posterior, made_of
from blr_analysis.posterior.prior import Prior
from blr_analysis.posterior.structures import Structure, Tree
from blr_analysis.task import Task


@dataclass(frozen=True)
class Point:
    """F and its gradient at some weights.

    Attributes:
        params: the weights θ.
        value: F(θ), in nats.
        gradient: ∇F(θ).
        prior: the prior, with precision δ and mean θ₀.
    """

    params: Tree
    value: float
    gradient: Tree
    prior: Prior

    @property
    def residual(self) -> float:
        """‖∇F‖ / (‖gradient of the losses‖ + ‖gradient of the prior‖), which is 0 at an optimum.

        It is 1 at most.
        """
        prior_gradient = self.prior.times(self.prior.gap(self.params))
        data_gradient = {name: g - prior_gradient[name] for name, g in self.gradient.items()}
        size = norm(data_gradient) + norm(prior_gradient)
        if size == 0:
            return 0.0
        return norm(self.gradient) / size


@dataclass(frozen=True)
class Objective:
    """F(θ) = Σ_parts Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀).

    Attributes:
        parts: pairs of a task and the indices of its examples in the sum.
        prior: the prior, with precision δ and mean θ₀.
        places: where the data were changed: the places of each part's examples in the data before
            the change. Added examples have places behind all others.
    """

    parts: tuple[tuple[Task, Tensor], ...]
    prior: Prior
    places: tuple[Tensor, ...] = ()

    @property
    def n_data(self) -> int:
        return sum(len(indices) for _, indices in self.parts)

    def at(self, params: Tree) -> Point:
        """F and its gradient at these weights, by one forward and backward pass over the data.

        Raises:
            ModelError, DataError: the errors of :meth:`Task.run`.
        """
        value = self.prior.penalty(params)
        gradient = {name: torch.zeros_like(p) for name, p in params.items()}
        for task, indices in self.parts:
            part_gradient, loss = loss_and_gradient(task, params, indices)
            gradient = add(gradient, 1.0, part_gradient)
            value += loss
        prior_gradient = self.prior.times(self.prior.gap(params))
        gradient = add(gradient, 1.0, prior_gradient)
        return Point(params, value, gradient, self.prior)


def whole_objective(task: Task, prior: Prior) -> Objective:
    """The objective of all examples of a task."""
    every_example = torch.arange(task.n_data)
    return Objective(((task, every_example),), prior)


def objective_after(
    task: Task,
    prior: Prior,
    *,
    leaving: Tensor,
    added: Task | None = None,
    labels: Mapping[int, Any] | None = None,
) -> Objective:
    """The objective of a task after a change of its data.

    Args:
        leaving: the indices of examples that are removed.
        added: a task with the examples that are added.
        labels: the new targets by index.
    """
    relabelled = torch.tensor(list(labels or {}), dtype=torch.long)
    stays = torch.ones(task.n_data, dtype=torch.bool)
    stays[leaving] = False
    stays[relabelled] = False
    parts: list[tuple[Task, Tensor]] = []
    places: list[Tensor] = []
    if bool(stays.any()):
        staying = stays.nonzero().flatten()
        parts.append((task, staying))
        places.append(staying)
    if added is not None:
        every_new_example = torch.arange(added.n_data)
        parts.append((added, every_new_example))
        places.append(task.n_data + every_new_example)
    if labels:
        parts.append((with_labels(task, labels), torch.arange(len(labels))))
        places.append(relabelled)
    return Objective(tuple(parts), prior, places=tuple(places))


def with_labels(task: Task, labels: Mapping[int, Any]) -> Task:
    """The examples of a task that have new targets, in the order of ``labels``.

    A batch of this task is the pair of an original batch and the new targets.
    """
    indices = list(labels)
    try:
        targets = torch.stack([as_target(labels[i]) for i in indices])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"relabel must map indices to targets: {error}") from error
    part = task.subset(indices)

    def collate(pairs: list[Any]) -> tuple[Any, Tensor]:
        original = part.examples.collate([example for example, _ in pairs])
        return original, torch.stack([target for _, target in pairs])

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        original, new_targets = batch
        outputs, _ = task.forward(model, original)
        return outputs, new_targets

    return Task(
        task.model,
        Examples(Labelled(part.dataset, targets), collate),  # type: ignore[arg-type]
        likelihood=part.likelihood,
        forward=forward,
        batch_size=task.chunk_size,
        device=task.device,
    )


class Labelled(StackDataset[Any]):
    """Pairs of an item and a new target.

    >>> Labelled([("x", 3)], torch.tensor([5])).inside[0]
    ('x', 5)
    """

    @property
    def inside(self) -> Relabelled:
        """The items with the new targets in place of the old ones, for a user's training."""
        items, targets = self.datasets
        return Relabelled(items, targets)


class Relabelled(Dataset[Any]):
    """Items (x, y), or dicts with "labels" or "label", with new targets in place of theirs."""

    def __init__(self, items: Any, targets: Tensor) -> None:
        self.items = items
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        example = self.items[index]
        target = self.targets[index]
        try:
            if isinstance(example, Mapping):
                name = "labels" if "labels" in example else "label"
                return dict(example) | {name: _in_form_of(example[name], target)}
            x, old_target = example
            return x, _in_form_of(old_target, target)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                "no target in the items: relabel= takes (x, y) or a dict's 'labels'"
            ) from error


def _in_form_of(old: Any, new: Tensor) -> Any:
    """The new target as a tensor, an array or a number, whichever the old one is."""
    if isinstance(old, Tensor):
        return new.to(old).reshape(old.shape)
    if isinstance(old, np.ndarray | np.generic):
        return new.numpy().astype(old.dtype).reshape(old.shape)[()]
    return type(old)(new.tolist())


@dataclass(frozen=True)
class Share:
    """What a group of examples contributes to a posterior: the sum of their sites.

    Attributes:
        gradient: Σ J_iᵀ e_i.
        curvature: Σ J_iᵀ Λ_i J_i, in the posterior's structure.
        count: the number of examples.
    """

    gradient: Tree
    curvature: Structure
    count: int


def share(task: Task, q: Posterior, indices: Tensor | None = None) -> Share:
    """The share of some examples in the posterior, at the posterior's mean.

    Args:
        indices: the indices of the examples; None: all of them.
    """
    curvature = q.form.zeros()
    for chunk in chunks(task.quiet, q.mean, indices=indices):
        curvature = curvature.add(chunk.terms(curvature_root(chunk)))
    gradient, _ = loss_and_gradient(task, q.mean, indices)
    count = task.n_data if indices is None else len(indices)
    return Share(gradient, curvature, count)


def as_target(value: Any) -> Tensor:
    """A label as a tensor on the CPU; a Python float becomes float64."""
    try:
        return value.cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{value!r} is no number; give that of its class") from error


def posterior_after(q: Posterior, changes: Sequence[tuple[int, Share]]) -> Posterior:
    """The posterior λ ± Σ λ̃ after shares are added or removed.

    Its precision is nowhere below the prior's.

    Args:
        changes: pairs of a sign and a share; +1 adds the share, −1 removes it.

    Raises:
        PosteriorError: the new mean is not finite, or the new precision not positive.
    """
    form = q.form
    n_data = q.n_data
    negative_gradient = {name: torch.zeros_like(m) for name, m in q.mean.items()}
    for sign, change in changes:
        form = form.plus(change.curvature, sign)
        n_data += sign * change.count
        negative_gradient = add(negative_gradient, -sign, change.gradient)
    form, _ = form.floored(q.prior)
    mean = add(q.mean, 1.0, form.solve(negative_gradient))
    is_finite = all(bool(torch.isfinite(m).all()) for m in mean.values())
    if not is_finite:
        raise PosteriorError("the step is not finite: raise prior_precision, or remove fewer")
    return made_of(q, mean, form, n_data=n_data, kind="what_if")
