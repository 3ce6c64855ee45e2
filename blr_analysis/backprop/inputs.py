"""Second moments of the layers' inputs, from forward passes alone.

For a layer that multiplies its inputs a with a matrix, A = Σ a aᵀ over examples and positions, with
a 1 joined to a for the bias. For an embedding, whose inputs are one-hot, A is diagonal: how often
each row was looked up.

Padding does not count. It is what a batch's ``attention_mask`` hides. Without a mask it is, in a
causal language model or in a decoder, what follows the last label that counts. Where all examples
share a row (that of a position), it counts once for each example that has a token there. If the
shape of a layer's input does not tell which rows are padding, padded examples are read one by one.
Rows that are as many with a token less, such as learned latents, are no tokens: all of them count.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

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
from blr_analysis.backprop.record import Unit, indices_of_rank, watched
from blr_analysis.checks import some
from blr_analysis.data.batches import mask_and_labels
from blr_analysis.errors import DataError, ModelError, warn_user
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import CausalLM
from blr_analysis.progress import track
from blr_analysis.task import ModelAt, Task

Times = int | Tensor  # how often each of R rows counts: one number, ``[R]`` or ``[g, R]``


class _PassIsDone(BaseException):
    """Ends a forward pass whose remaining layers are of no interest."""


@dataclass
class InputMoments:
    """Sums over the data, by the name of a layer's weight.

    Attributes:
        moments: the layer's joint matrix, and A ``[g, I', I']`` in float64.
        counts: how often each row of an embedding was looked up.
        spread: Σ_{i≠j} (a_i a_j)² summed over the input rows a of a layer, and their number.
    """

    moments: dict[str, tuple[Joint, Tensor]] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    spread: dict[str, Tensor] = field(default_factory=dict)

    def begin(self) -> None:
        """Called before every forward pass."""

    def tensors(self) -> dict[str, Tensor]:
        """All sums by a name of their own."""
        moments = {f"moments of {key}": total for key, (_, total) in self.moments.items()}
        spread = {f"spread of {key}": total for key, total in self.spread.items()}
        counts = {f"counts of {key}": total for key, total in self.counts.items()}
        return moments | spread | counts

    def noise(self, key: str, *, whole: bool = False) -> float:
        """How much of A's off-diagonals is chance: Σ Var(Ā_ij) / Σ Ā_ij² over i ≠ j, at most 1.

        Ā is the mean over the rows, which count as independent draws. ``whole`` divides by the sum
        over all i and j instead: that ratio is small for many rows of uncorrelated inputs, too.

        Source: Schäfer & Strimmer, "A shrinkage approach to large-scale covariance matrix
        estimation", 2005.
        """
        fourth, n_rows = self.spread[key].tolist()
        mean = self.moments[key][1] / n_rows
        squares = mean.square()
        all_squares = float(squares.sum())
        off_diagonal = float(squares.sum() - squares.diagonal(dim1=-2, dim2=-1).sum())
        if off_diagonal == 0:
            return 0.0
        if n_rows == 1:  # one row shows no variance
            return 1.0
        variance = (fourth / n_rows - off_diagonal) / (n_rows - 1)
        ratio = variance / (all_squares if whole else off_diagonal)
        return min(1.0, max(0.0, ratio))

    def singular(self, key: str) -> bool:
        """Whether A was summed over fewer rows than it has columns."""
        _, n_rows = self.spread[key].tolist()
        return n_rows < self.moments[key][1].shape[-1]

    def looked_up(self, joint: Joint) -> Tensor | None:
        """How often each row of a layer's matrix was looked up, ``[1, O, 1]``.

        None where the matrix is not the table of an embedding as well, or is joined to a bias: an
        embedding has none.
        """
        if joint.bias is not None or joint.key not in self.counts:
            return None
        return self.counts[joint.key].double().cpu()[None, :, None]

    def add(self, joint: Joint, rows: Tensor, times: Times, tensor: Tensor) -> None:
        """Add Σ a aᵀ over a layer's input rows.

        Args:
            joint: the layer's matrix.
            rows: the input rows a, ``[g, R, I]``.
            times: how often each row counts; ``[g, R]`` where the groups' rows differ.
            tensor: the layer's argument that the rows were read from.
        """
        g, _, i = rows.shape
        counts = torch.as_tensor(times, dtype=rows.dtype, device=rows.device).expand(rows.shape[:2])
        has_bias = joint.bias is not None
        if joint.key not in self.moments:
            size = i + 1 if has_bias else i
            self.moments[joint.key] = (joint, rows.new_zeros(g, size, size, dtype=torch.float64))
            self.spread[joint.key] = rows.new_zeros(2, dtype=torch.float64)
        fourth = (counts.double() * _off_diagonal_squares(rows, has_bias)).sum()
        totals = counts.double().sum(1)
        self.spread[joint.key] += torch.stack([fourth, totals.max()])
        _, moments = self.moments[joint.key]
        weighted = rows * counts.sqrt().unsqueeze(-1)
        moments[:, :i, :i] += weighted.mT @ weighted
        if has_bias:
            sums = (weighted * counts.sqrt().unsqueeze(-1)).sum(1).double()
            moments[:, :i, i] += sums
            moments[:, i, :i] += sums
            moments[:, i, i] += totals


def _off_diagonal_squares(rows: Tensor, has_bias: bool) -> Tensor:
    """Σ_{i≠j} (a_i a_j)² = (Σ_i a_i²)² − Σ_i a_i⁴ of each row a, ``[g, R]``.

    A 1 is joined to every row where there is a bias.
    """
    squares = rows.square()
    second = squares.sum(-1).double()
    fourth = squares.square().sum(-1).double()
    if has_bias:
        second = second + 1
        fourth = fourth + 1
    return second.square() - fourth


@dataclass
class FirstMoments(InputMoments):
    """The sums of some layers alone, each of which runs once; a pass ends after the last of them.

    Attributes:
        layers: the layers' names, like those of the sums.
        waiting: the layers that have not run yet in this pass.
    """

    layers: frozenset[str] = frozenset()
    waiting: set[str] = field(default_factory=set)

    def begin(self) -> None:
        self.waiting = set(self.layers)

    def add(self, joint: Joint, rows: Tensor, times: Times, tensor: Tensor) -> None:
        super().add(joint, rows, times, tensor)
        self.waiting.discard(joint.key)
        if not self.waiting:
            raise _PassIsDone


@dataclass
class RunOrder(InputMoments):
    """The order in which layers run, without any sums.

    Attributes:
        layers: the layers' matrices by key, in the order of their first runs.
        repeated: keys of layers that run more than once in a forward pass.
        apart: keys of layers whose input, at least once, was not the input of the layer before.
    """

    layers: dict[str, Joint] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    _ran: set[str] = field(default_factory=set)
    _input_before: tuple[Tensor, int] | None = None  # the last layer's input and its version

    def begin(self) -> None:
        self._ran = set()
        self._input_before = None

    def add(self, joint: Joint, rows: Tensor, times: Times, tensor: Tensor) -> None:
        self.layers.setdefault(joint.key, joint)
        if joint.key in self._ran:
            self.repeated.add(joint.key)
        self._ran.add(joint.key)
        if not self._is_input_before(tensor):
            self.apart.add(joint.key)
        self._input_before = None if tensor.is_inference() else (tensor, tensor._version)

    def _is_input_before(self, tensor: Tensor) -> bool:
        """Whether the layer that ran before had this tensor as its input, with the same numbers."""
        if self._input_before is None or tensor.is_inference():
            return False
        before, version = self._input_before
        return tensor is before and tensor._version == version


Sums = TypeVar("Sums", bound=InputMoments)


def input_moments(
    task: Task, params: Mapping[str, Tensor], *, unfinished: Unfinished | None = None
) -> InputMoments:
    """The moments of all layers with a matrix, by :func:`swept`."""
    return swept(task, params, InputMoments(), label="layer inputs", unfinished=unfinished)


@torch.no_grad()
def swept(
    task: Task,
    params: Mapping[str, Tensor],
    sums: Sums,
    *,
    only: Collection[str] | None = None,
    label: str = "",
    unfinished: Unfinished | None = None,
) -> Sums:
    """One sweep of forward passes over the task's data, at ``params``.

    Args:
        sums: what the layers' inputs are added to; it is returned.
        only: parameters whose layers are watched; None: all layers with a matrix.
        label: of a progress bar; without a label there is none.
        unfinished: a file for the sums so far, from which an interrupted run goes on.

    Raises:
        ModelError, DataError: see :meth:`Task.run`.
    """
    units = units_of(task.model, set(params))
    if only is not None:
        units = [unit for unit in units if not set(only).isdisjoint(unit.names.values())]
    model = task.at(task.cast(params))
    order = indices_of_rank(task, model.params)
    n_batches = math.ceil(len(order) / task.batch_size)
    show = task.progress if label else False
    batches = track(task.batches(indices=order), total=n_batches, label=label, show=show)
    alone: bool | None = None  # not known before the first padded batch
    unclear_layers: set[str] = set()
    fixed_layers: set[str] = set()
    for number, (indices, batch) in enumerate(batches):
        # The number of passes that are done rises when the first one is added to the sums.
        is_done = unfinished is not None and number < unfinished.done
        if is_done:
            continue
        if alone is None and _are_padded(_masks(task, batch)):
            fixed_layers = _layers_of_fixed_rows(model, units, indices, batch)
            alone = _has_unclear_rows(model, units, indices, batch, fixed_layers)
        for part, part_of_batch in _unambiguous(task, indices, batch, alone=bool(alone)):
            masks = _masks(task, part_of_batch)
            padding = _Padding(len(part), masks, unclear_layers, fixed_layers)
            sums.begin()
            with watched(units, partial(_see, sums, padding)), suppress(_PassIsDone):
                model.run_batch(part_of_batch, part)
        if unfinished is not None:
            unfinished.follow(sums.tensors())
    if unclear_layers:
        warn_user(
            f"layers ({some(sorted(unclear_layers))}) read rows that may be padding, and they "
            "count: give batches of texts of one length"
        )
    ranks.total(sums.tensors().values())
    return sums


def _layers_of_fixed_rows(
    model: ModelAt, units: list[Unit], indices: Tensor, batch: Any
) -> set[str]:
    """The layers whose inputs have as many rows as tokens, and as many in a batch of a token less.

    Empty where the batch has nothing beside its mask to make shorter, or its model needs it whole.
    """
    mask, _ = mask_and_labels(batch)
    if mask is None or not isinstance(batch, Mapping) or bool(mask.all()):
        return set()
    padded_column = int((~mask).any(0).nonzero()[0])
    kept = torch.arange(mask.shape[1]) != padded_column
    shorter = {
        name: x[:, kept] if isinstance(x, Tensor) and x.shape == mask.shape else x
        for name, x in batch.items()
    }
    shapes: list[dict[str, list[torch.Size]]] = []
    for batch_of_shapes in (batch, shorter):
        seen: dict[str, list[torch.Size]] = {}
        with watched(units, partial(_see_shape, seen)), suppress(ModelError, DataError):
            model.run_batch(batch_of_shapes, indices)
        shapes.append(seen)
    of_batch, of_shorter = shapes
    size = len(indices)
    return {
        path
        for path, shapes_of_calls in of_batch.items()
        if shapes_of_calls == of_shorter.get(path)
        and all(shape[0] == size and mask.shape[1] in shape[1:-1] for shape in shapes_of_calls)
    }


def _see_shape(
    seen: dict[str, list[torch.Size]],
    unit: Unit,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Note the shape of the input of one call of a layer."""
    x = _arguments(unit.module, args, kwargs)[0]
    seen.setdefault(unit.path, []).append(x.shape)


def _has_unclear_rows(
    model: ModelAt, units: list[Unit], indices: Tensor, batch: Any, fixed_layers: set[str]
) -> bool:
    """Whether a layer reads rows of which a padded batch does not say what is padding.

    Examples by themselves have no padding, where the collate function fills up to the longest.
    """
    unclear_layers: set[str] = set()
    for part, part_of_batch in _unambiguous(model.task, indices, batch):
        masks = _masks(model.task, part_of_batch)
        if len(part) > 1 and _are_padded(masks):
            padding = _Padding(len(part), masks, unclear_layers, fixed_layers)
            with watched(units, partial(_see, InputMoments(), padding)):
                model.run_batch(part_of_batch, part)
            break
    return bool(unclear_layers)


@dataclass(frozen=True)
class _Padding:
    """Which rows of a layer's input count, in one batch.

    Attributes:
        n_examples: B, the size of the batch.
        masks: tables ``[B, T]``, False at padding: of the tokens, and of a decoder's labels.
        unclear_layers: gets the name of each layer that reads rows which may be padding, and count.
        fixed_layers: names of the layers whose rows are no tokens: they all count.
    """

    n_examples: int
    masks: list[Tensor]
    unclear_layers: set[str]
    fixed_layers: set[str]

    def counts(self, shape: torch.Size, layer: str, *, are_ids: bool = False) -> Tensor:
        """How many examples each input row stands for, in a shape that broadcasts to ``shape``.

        Args:
            shape: the dimensions of an input before its features, see :func:`counts_under`.
            layer: the layer's name.
            are_ids: whether the input holds the ids of an embedding.
        """
        if layer in self.fixed_layers:
            return torch.tensor(1)
        for mask in self.masks:
            counts = counts_under(mask, shape, are_ids=are_ids)
            if counts is not None:
                return counts
        has_row_per_example = shape == (self.n_examples,)
        if _are_padded(self.masks) and not has_row_per_example:
            self.unclear_layers.add(layer)
        is_shared = shape[0] == 1 or (are_ids and shape[0] % self.n_examples != 0)
        return torch.tensor(self.n_examples if is_shared else 1)


def counts_under(mask: Tensor, shape: torch.Size, *, are_ids: bool) -> Tensor | None:
    """How many examples each row of an input stands for; None where that is not clear.

    An input may have a row for every token: ``[B, T, ...]``, ``[B, ..., T]``, ``[T, B, ...]`` or
    ``[B·T]``. Or all examples share it: it is ``[1, T]``, and ids may be ``[T]``, or ``[T, T]`` for
    the distances of tokens. A shared row counts once for each example that has tokens there.

    Args:
        mask: ``[B, T]``, False at padding; T is not B, or B is 1.

    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> counts_under(mask, torch.Size([1, 3]), are_ids=True)
    tensor([[2, 2, 1]])
    """
    n_examples, length = mask.shape
    counts = mask.long()
    places = [place for place, size in enumerate(shape) if size == length]
    sizes = [length if place in places else 1 for place in range(len(shape))]
    if shape[0] == n_examples and len(places) == 1:
        return counts.reshape(n_examples, *sizes[1:])
    if shape[:2] == (length, n_examples):
        return counts.mT.reshape(length, n_examples, *sizes[2:])
    if shape == (n_examples * length,):
        return counts.flatten()
    is_shared = shape[0] != n_examples and (shape[0] == 1 or are_ids)
    if is_shared and len(places) == 1:
        return counts.sum(0).reshape(sizes)
    if is_shared and shape == (length, length):
        return (mask.double().mT @ mask.double()).long()
    return None


def _unambiguous(
    task: Task, indices: Tensor, batch: Any, *, alone: bool = False
) -> Iterator[tuple[Tensor, Any]]:
    """The batch, in parts where it has as many examples as tokens.

    A dimension of that size could be either.

    Args:
        alone: whether the examples of a padded batch come one by one.
    """
    batch = _told_apart(task, batch)
    masks = _masks(task, batch)
    if len(indices) == 1:
        yield indices, batch
        return
    if alone and _are_padded(masks):
        sizes = [1] * len(indices)
    elif any(len(indices) == mask.shape[1] for mask in masks):
        sizes = [1, len(indices) - 1]
    else:
        yield indices, batch
        return
    for part in indices.split(sizes):
        yield from _unambiguous(task, part, task.fetch(part), alone=alone)


def _are_padded(masks: Sequence[Tensor]) -> bool:
    return any(not bool(mask.all()) for mask in masks)


def _see(
    sums: InputMoments,
    padding: _Padding,
    unit: Unit,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Add the inputs of one call of a layer to the sums."""
    module: Any = unit.module
    arguments = _arguments(module, args, kwargs)
    if isinstance(unit.module, nn.MultiheadAttention) and "in_proj_weight" in unit.names:
        _see_attention(sums, padding, unit, arguments[:3])
    first = arguments[0]
    if "weight" not in unit.names:
        return
    if unit.rule is embedding:
        counts = padding.counts(first.shape, unit.path, are_ids=True).expand(first.shape)
        _count(sums, module, unit.names["weight"], first.flatten(), counts.flatten())
        return
    layout_and_rows = _matrix_rows(module, unit, first)
    if layout_and_rows is not None:
        layout, rows = layout_and_rows
        joint = Joint(unit.names["weight"], unit.names.get("bias"), layout)
        _add(sums, joint, rows, padding.counts(rows.shape[1:-1], unit.path), first)


def _add(sums: InputMoments, joint: Joint, rows: Tensor, counts: Tensor, tensor: Tensor) -> None:
    """Add the rows ``[g, ..., I]`` that count to the sums.

    Args:
        counts: how many examples each row stands for; it broadcasts to ``[...]``.
    """
    counts = counts.to(rows.device)
    if counts.ndim == 0:
        sums.add(joint, rows.flatten(1, -2), int(counts), tensor)
        return
    times = counts.expand(rows.shape[1:-1]).flatten()
    flat_rows = rows.flatten(1, -2)
    does_count = times > 0
    if not bool(does_count.all()):
        flat_rows = flat_rows[:, does_count]
        times = times[does_count]
    sums.add(joint, flat_rows, times, tensor)


def _see_attention(
    sums: InputMoments, padding: _Padding, unit: Unit, inputs: Sequence[Tensor]
) -> None:
    """Add the queries, keys and values of attention, each to a third of the projection's rows.

    Keys may be more or fewer than queries: shorter ones are filled up with rows that do not count.
    """
    module: Any = unit.module
    e = module.embed_dim
    layout = MatrixShape(3, e, e, (3 * e, e))
    joint = Joint(unit.names["in_proj_weight"], unit.names.get("in_proj_bias"), layout)
    rows = []
    times = []
    for x in inputs:
        counts = padding.counts(x.shape[:-1], unit.path).to(x.device)
        counts = counts.expand(x.shape[:-1]).flatten()
        rows.append(upcast(x).flatten(0, -2)[counts > 0])
        times.append(counts[counts > 0])
    sums.add(
        joint,
        pad_sequence(rows, batch_first=True),
        pad_sequence(times, batch_first=True),
        inputs[0],
    )


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the module's signature, however they were passed."""
    if not kwargs:
        return list(args)
    return list(inspect.signature(module.forward).bind(*args, **kwargs).arguments.values())


def _count(sums: InputMoments, module: Any, name: str, ids: Tensor, times: Tensor) -> None:
    """Add how often each row of an embedding was looked up."""
    looked_up = torch.bincount(
        ids, weights=times.to(ids.device).double(), minlength=len(module.weight)
    )
    counts = looked_up.long()
    if module.padding_idx is not None:
        counts[module.padding_idx] = 0  # the padding row never learns
    sums.counts[name] = counts + sums.counts.get(name, torch.zeros_like(counts))


def _matrix_rows(module: Any, unit: Unit, x: Tensor) -> tuple[MatrixShape, Tensor] | None:
    """A layer's matrix and the rows ``[g, ..., I]`` that it multiplies.

    None where the layer has no matrix.
    """
    shape = tuple(module.weight.shape)
    if unit.rule is convolution:
        patches = unfold(upcast(x), module)  # [R, g, I, T]
        rows = patches.permute(1, 0, 3, 2)
        g = len(rows)
        return MatrixShape(g, shape[0] // g, rows.shape[-1], shape), rows
    if unit.rule is linear:
        o, i = shape
        return MatrixShape(1, o, i, shape), upcast(x).unsqueeze(0)
    if unit.rule is transposed_linear:
        i, o = shape
        return MatrixShape(1, o, i, shape, transposed=True), upcast(x).unsqueeze(0)
    return None


def _masks(task: Task, batch: Any) -> list[Tensor]:
    """Tables ``[B, T]``, False at padding: of the inputs, and of the labels of a decoder.

    Empty where the batch does not say what is padding.
    """
    mask, labels = mask_and_labels(batch)
    masks = [] if mask is None else [mask]
    has_labels = isinstance(labels, Tensor) and labels.ndim == 2
    likelihood = task.likelihood.kind
    counted = likelihood.counted(labels) if has_labels else None
    if counted is None:
        return masks
    is_causal = mask is None and isinstance(likelihood, CausalLM)
    have_other_length = mask is not None and labels.shape != mask.shape
    if is_causal or have_other_length or _has_decoder(task.model):
        counted_from_here = counted.flip(1).cumsum(1).flip(1)
        masks.append(counted_from_here > 0)
    return masks


def _has_decoder(model: Any) -> bool:
    """Whether a transformers model reads its inputs by an encoder and its labels by a decoder."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _told_apart(task: Task, batch: Any) -> Any:
    """The batch, whose labels get one more column of padding where a decoder reads as many tokens
    as its encoder: a layer's rows are told apart by their number."""
    if not _has_decoder(task.model) or not isinstance(batch, Mapping):
        return batch
    inputs = batch.get("attention_mask", batch.get("input_ids"))
    labels = batch.get("labels")
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        return batch
    if inputs.shape != labels.shape:
        return batch
    ignored = getattr(task.likelihood.kind, "ignore_index", None)
    if ignored is None:
        return batch
    fills = {"labels": ignored, "decoder_input_ids": 0, "decoder_attention_mask": 0}
    longer = {name: pad(batch[name], (0, 1), value=fills[name]) for name in fills if name in batch}
    return {**batch, **longer}
