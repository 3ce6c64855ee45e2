"""The data after a change, the objective that a model retrained on them would minimise, and the
posterior without the group's share.

    F(θ) = Σ_{i kept, added, relabelled} ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)

    λ^{\\G} = λ − Σ_{i∈G} λ̃_i:    S^{\\G} = S − S_G,    m^{\\G} = m + (S^{\\G})⁻¹ Σ_{i∈G} J_iᵀ e_i

with S_G = Σ_{i∈G} J_iᵀ Λ_i J_i in the posterior's own structure.
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
    """F at some weights: its value in nats, and its gradient."""

    params: Tree
    value: float
    gradient: Tree
    prior: Prior

    @property
    def residual(self) -> float:
        """The gradient's size relative to that of the data's and the prior's part, which cancel
        in it at an optimum."""
        pull = self.prior.times(self.prior.gap(self.params))
        size = norm({n: g - pull[n] for n, g in self.gradient.items()}) + norm(pull)
        return norm(self.gradient) / size if size > 0 else 0.0


@dataclass(frozen=True)
class Objective:
    """F(θ) = Σ_parts Σ_i ℓ_i(θ) + ½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀).

    Attributes:
        parts: pairs of a task and the examples of it that count.
        prior: δ, and θ₀, its mean.
        places: of changed data, where its examples stood before, by part; added ones behind.
    """

    parts: tuple[tuple[Task, Tensor], ...]
    prior: Prior
    places: tuple[Tensor, ...] = ()

    @property
    def n_data(self) -> int:
        return sum(len(indices) for _, indices in self.parts)

    def at(self, params: Tree) -> Point:
        """F and its gradient at these weights: one forward and backward pass over the data.

        Raises:
            ModelError, DataError: as :meth:`Task.run`.
        """
        value = self._penalty(params)
        gradient = {name: torch.zeros_like(p) for name, p in params.items()}
        for task, indices in self.parts:
            part_gradient, loss = loss_and_gradient(task, params, indices)
            gradient = {name: g + part_gradient[name] for name, g in gradient.items()}
            value += loss
        prior_pull = self.prior.times(self.prior.gap(params))
        gradient = {name: g + prior_pull[name] for name, g in gradient.items()}
        return Point(params, value, gradient, self.prior)

    def _penalty(self, params: Tree) -> float:
        """½ (θ − θ₀)ᵀ diag(δ) (θ − θ₀)."""
        return self.prior.penalty(params)


def whole(task: Task, prior: Prior) -> Objective:
    """The objective of a task as it is."""
    return Objective(((task, torch.arange(task.n_data)),), prior)


def changed(
    task: Task,
    prior: Prior,
    *,
    leaving: Tensor,
    added: Task | None = None,
    labels: Mapping[int, Any] | None = None,
) -> Objective:
    """The objective of a task without ``leaving``, with ``added``, with other labels for some."""
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
        new = torch.arange(added.n_data)
        parts.append((added, new))
        places.append(task.n_data + new)
    if labels:
        parts.append((with_labels(task, labels), torch.arange(len(labels))))
        places.append(relabelled)
    return Objective(tuple(parts), prior, places=tuple(places))


def with_labels(task: Task, labels: Mapping[int, Any]) -> Task:
    """Some examples of a task, each batch wrapped with other targets, in the order given."""
    chosen = list(labels)
    try:
        targets = torch.stack([as_target(labels[i]) for i in chosen])
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"relabel must map indices to targets: {error}") from error
    part = task.subset(chosen)

    def collate(pairs: list[Any]) -> tuple[Any, Tensor]:
        return part.examples.collate([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        return task.forward(model, batch[0])[0], batch[1]

    return Task(
        task.model,
        Examples(Labelled(part.dataset, targets), collate),  # type: ignore[arg-type]
        likelihood=part.likelihood,
        forward=forward,
        batch_size=task.chunk_size,
        device=task.device,
    )


class Labelled(StackDataset[Any]):
    """Items, and beside each another target.

    >>> Labelled([("x", 3)], torch.tensor([5])).inside[0]
    ('x', 5)
    """

    @property
    def inside(self) -> Relabelled:
        """The items with the new targets in the place of theirs, as a user's own training takes
        them."""
        return Relabelled(*self.datasets)


class Relabelled(Dataset[Any]):
    """Items (x, y), or dicts with "labels" or "label", each with another target inside."""

    def __init__(self, items: Any, targets: Tensor) -> None:
        self.items = items
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        target = self.targets[index]
        try:
            if isinstance(item, Mapping):
                name = "labels" if "labels" in item else "label"
                return dict(item) | {name: _in_form_of(item[name], target)}
            x, old = item
            return x, _in_form_of(old, target)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                "no target in the items: relabel= takes (x, y) or a dict's 'labels'"
            ) from error


def _in_form_of(old: Any, new: Tensor) -> Any:
    """A new target as a tensor, an array or a number, as the old one was."""
    if isinstance(old, Tensor):
        return new.to(old).reshape(old.shape)
    if isinstance(old, np.ndarray | np.generic):
        return new.numpy().astype(old.dtype).reshape(old.shape)[()]
    return type(old)(new.tolist())


@dataclass(frozen=True)
class Share:
    """A group's share of the posterior: Σ J_iᵀ e_i and Σ J_iᵀ Λ_i J_i."""

    gradient: Tree
    curvature: Structure
    count: int


def share(task: Task, q: Posterior, indices: Tensor | None = None) -> Share:
    """Σ_{i∈G} J_iᵀ e_i and S_G in the posterior's structure, at the posterior's mean."""
    curvature = q.form.zeros()
    for chunk in chunks(task.quiet, q.mean, indices=indices):
        curvature = curvature.add(chunk.terms(curvature_root(chunk)))
    count = task.n_data if indices is None else len(indices)
    return Share(loss_and_gradient(task, q.mean, indices)[0], curvature, count)


def as_target(value: Any) -> Tensor:
    """A label as a tensor; Python's floats keep their 64 bits."""
    try:
        return value.cpu() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{value!r} is no number; give that of its class") from error


def step(q: Posterior, changes: Sequence[tuple[int, Share]]) -> Posterior:
    """λ ∓ Σ λ̃: the posterior with the shares taken out (−1) or put in (+1), its precision nowhere
    below the prior's.

    Raises:
        PosteriorError: the new mean is not finite, the new precision not positive.
    """
    form = q.form
    n_data = q.n_data
    pull = {name: torch.zeros_like(m) for name, m in q.mean.items()}
    for sign, group in changes:
        form = form.plus(group.curvature, sign)
        n_data += sign * group.count
        pull = add(pull, -sign, group.gradient)
    form, _ = form.floored(q.prior)
    mean = add(q.mean, 1.0, form.solve(pull))
    if not all(bool(torch.isfinite(m).all()) for m in mean.values()):
        raise PosteriorError("the step is not finite: raise prior_precision, or remove fewer")
    return made_of(q, mean, form, n_data=n_data, kind="what_if")
