"""What layers see: second moments of their inputs, from forward passes alone.

For a layer that multiplies its inputs a with a matrix, A = Σ a aᵀ over examples and positions, with
a 1 joined to a for the bias; for an embedding how often each row was looked up, which is the same
matrix of its one-hot inputs. Padding does not count: what a batch's ``attention_mask`` hides, or,
without one, what follows the last label that counts of a causal language model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blr_analysis import ranks
from blr_analysis.backprop.layers import (
    convolution,
    embedding,
    linear,
    transposed_linear,
    unfold,
    upcast,
)
from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.record import Unit, shared, watched
from blr_analysis.data import padding
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import CausalLM, Likelihood
from blr_analysis.progress import track
from blr_analysis.task import Task


class _Enough(BaseException):
    """Ends a forward pass of which the rest is not looked at."""


@dataclass
class InputMoments:
    """Sums over the data: A ``[g, I', I']`` by the layer's joint matrix, look-ups by embedding.

    ``spread`` holds Σ over the rows of Σ_{i≠j} (a_i a_j)², and the number of rows, by layer.
    """

    moments: dict[str, tuple[Joint, Tensor]] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """A forward pass begins."""

    def tensors(self) -> dict[str, Tensor]:
        """All sums by a name."""
        moments = {f"moments of {key}": total for key, (_, total) in self.moments.items()}
        moments |= {f"spread of {key}": total for key, total in self.spread.items()}
        return moments | {f"counts of {key}": total for key, total in self.counts.items()}

    def noise(self, key: str, *, whole: bool = False) -> float:
        """The part of A's off-diagonals, squared and summed, that is chance, were the rows drawn
        one by one: Σ Var(Ā_ij) / Σ Ā_ij² over i ≠ j, at most 1; or their part of the whole of A,
        which is small for inputs that have no correlations, too, if only there are enough of them.

        Source: Schäfer & Strimmer, "A shrinkage approach to large-scale covariance matrix
        estimation", 2005.
        """
        fourth, count = self.spread[key].tolist()
        total = self.moments[key][1] / count
        off = float(total.square().sum() - total.diagonal(dim1=-2, dim2=-1).square().sum())
        if count == 1:  # of which no variance is known
            return float(off > 0)
        size = float(total.square().sum()) if whole else off
        return min(1.0, max(0.0, (fourth / count - off) / (count - 1) / size)) if off else 0.0

    def singular(self, key: str) -> bool:
        """Whether A is of fewer rows than it has columns."""
        return float(self.spread[key][1]) < self.moments[key][1].shape[-1]

    def looked_up(self, joint: Joint) -> Tensor | None:
        """How often each row of a table was, ``[1, O, 1]``, that is a layer's matrix as well; None
        beside a bias, which no row of an embedding has."""
        counts = None if joint.bias is not None else self.counts.get(joint.key)
        return None if counts is None else counts.double().cpu()[None, :, None]

    def add(self, joint: Joint, rows: Tensor, times: int, given: Tensor) -> None:
        """Add Σ a aᵀ of the rows a ``[g, R, I]`` of the tensor that a layer is given, so many
        times."""
        g, _, i = rows.shape
        size = i + (joint.bias is not None)
        if joint.key not in self.moments:
            self.moments[joint.key] = joint, rows.new_zeros(g, size, size, dtype=torch.float64)
            self.spread[joint.key] = rows.new_zeros(2, dtype=torch.float64)
        squares = rows.square()
        powers = [squares.square().sum(-1).double(), squares.sum(-1).double()]  # Σ a⁴, Σ a²
        if joint.bias is not None:
            powers = [p + 1 for p in powers]
        fourth = times * (powers[1].square() - powers[0]).sum()
        self.spread[joint.key] += torch.stack([fourth, fourth.new_tensor(rows.shape[1] * times)])
        total, rows = self.moments[joint.key][1], rows * times**0.5
        total[:, :i, :i] += rows.mT @ rows
        if joint.bias is not None:
            sums = rows.sum(1).double() * times**0.5
            total[:, :i, i] += sums
            total[:, i, :i] += sums
            total[:, i, i] += rows.shape[1] * times


@dataclass
class FirstMoments(InputMoments):
    """The sums of layers each of which runs once: a forward pass ends after the last of them."""

    layers: frozenset[str] = frozenset()
    left: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.left = set(self.layers)

    def add(self, joint: Joint, rows: Tensor, times: int, given: Tensor) -> None:
        super().add(joint, rows, times, given)
        self.left.discard(joint.key)
        if not self.left:
            raise _Enough


@dataclass
class RunOrder(InputMoments):
    """No sums, but in what order layers run.

    Attributes:
        layers: by key, in the order of their first runs.
        repeated: keys of those that run more than once in a forward pass.
        apart: keys of those that were ever given another tensor than the layer that ran before.
    """

    layers: dict[str, Joint] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    _ran: set[str] = field(default_factory=set)
    _before: tuple[Tensor, int] | None = None

    def begin(self) -> None:
        self._ran, self._before = set(), None

    def add(self, joint: Joint, rows: Tensor, times: int, given: Tensor) -> None:
        self.layers.setdefault(joint.key, joint)
        if joint.key in self._ran:
            self.repeated.add(joint.key)
        self._ran.add(joint.key)
        now = None if given.is_inference() else (given, given._version)
        before, self._before = self._before, now
        if now is None or before is None or now[0] is not before[0] or now[1] != before[1]:
            self.apart.add(joint.key)


Sums = TypeVar("Sums", bound=InputMoments)


def input_moments(
    task: Task, params: Mapping[str, Tensor], *, kept: Unfinished | None = None
) -> InputMoments:
    """:func:`swept` for the moments of all layers with a matrix."""
    return swept(task, params, InputMoments(), label="layer inputs", kept=kept)


@torch.no_grad()
def swept(
    task: Task,
    params: Mapping[str, Tensor],
    sums: Sums,
    *,
    only: Collection[str] | None = None,
    label: str = "",
    kept: Unfinished | None = None,
) -> Sums:
    """One sweep of forward passes over the task's data, at ``params``.

    Args:
        sums: what is told of the layers.
        label: of a progress bar; none without.
        only: parameters whose layers are looked at; None: all layers with a matrix.
        kept: where the sums are kept meanwhile, and taken up from.

    Raises:
        ModelError, DataError: see :meth:`Task.run`.
    """
    wanted = set(params) if only is None else set(only)
    units = [u for u in units_of(task.model, set(params)) if wanted & set(u.names.values())]
    params = task.cast(params)
    own = shared(task, params)
    count = -(-len(own) // task.batch_size)
    shown = task.progress if label else False
    batches = track(task.batches(indices=own), total=count, label=label, show=shown)
    for number, (indices, batch) in enumerate(batches):
        if kept is not None and number < kept.done:
            continue
        mask = _mask(batch, task.likelihood.kind)
        sums.begin()
        see = partial(_see, sums, mask, len(indices))
        with watched(units, see), task.evaluation(), suppress(_Enough):
            task.run(batch, params, indices)
        if kept is not None:
            kept.follow(sums.tensors())
    ranks.total(sums.tensors().values())
    return sums


def _see(sums: InputMoments, mask: Tensor | None, batch: int, unit: Unit, *call: Any) -> None:
    module: Any = unit.module
    names, (args, kwargs, _) = unit.names, call
    given = [*args, *kwargs.values()]
    times = batch if len(given[0]) == 1 else 1  # one row that all examples share
    if isinstance(unit.module, nn.MultiheadAttention) and "in_proj_weight" in names:
        e = module.embed_dim
        layout = MatrixShape(3, e, e, (3 * e, e))
        rows = torch.stack([upcast(x).reshape(-1, e) for x in given[:3]])
        joint = Joint(names["in_proj_weight"], names.get("in_proj_bias"), layout)
        sums.add(joint, rows, times, given[0])
    if "weight" not in names:
        return
    shape = tuple(module.weight.shape)
    if unit.rule is embedding:
        own, size = names["weight"], shape[0]
        seen = torch.bincount(_rows(given[0].unsqueeze(-1), mask).flatten(), minlength=size)
        if module.padding_idx is not None:
            seen[module.padding_idx] = 0  # which never learns
        sums.counts[own] = sums.counts.get(own, torch.zeros_like(seen)) + times * seen
        return
    if unit.rule is convolution:
        patches = unfold(upcast(given[0]), module)  # [R, g, I, T]
        rows = patches.permute(1, 0, 3, 2).flatten(1, 2)
        layout = MatrixShape(len(rows), shape[0] // len(rows), rows.shape[-1], shape)
    elif unit.rule in (linear, transposed_linear):
        rows = _rows(upcast(given[0]), mask).unsqueeze(0)
        swapped = unit.rule is transposed_linear
        o, i = shape[::-1] if swapped else shape
        layout = MatrixShape(1, o, i, shape, swapped)
    else:
        return
    sums.add(Joint(names["weight"], names.get("bias"), layout), rows, times, given[0])


def _mask(batch: Any, likelihood: Likelihood) -> Tensor | None:
    """Which positions ``[B, T]`` of a batch are no padding, where it says so."""
    mask, labels = padding(batch)
    if mask is not None:
        return mask
    if not isinstance(likelihood, CausalLM) or not isinstance(labels, Tensor) or labels.ndim != 2:
        return None
    return likelihood.counted(labels).flip(1).cumsum(1).flip(1) > 0


def _rows(x: Tensor, mask: Tensor | None) -> Tensor:
    """``[B, T, ..., I]`` as ``[R, I]``, without padding."""
    if mask is not None and x.ndim > 2 and x.shape[:2] == mask.shape:
        x = x[mask]
    return x.reshape(-1, x.shape[-1])
