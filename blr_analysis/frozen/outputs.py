"""The outputs of a model's frozen layers, kept by example and used again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from blr_analysis.frozen.finding import frozen_layers
from blr_analysis.frozen.fingerprints import fingerprints, state_of
from blr_analysis.frozen.layers import Call, Layer, Row, is_watched, recording, replaying

MIN_BYTES = 64 * 2**20  # that rows may take where the user names no bound


@dataclass
class FrozenOutputs:
    """The rows of a model's frozen layers, for the examples of one data set.

    Attributes:
        dataset: the data set by whose indices rows are kept; a subset of it shares its rows.
        collate: the function that makes its batches.
        layers: the layers whose outputs are kept; None: :meth:`look` has not run yet.
    """

    dataset: Any
    collate: Any
    layers: tuple[Layer, ...] | None = None
    _state: Any = None  # of the frozen layers; the rows are right at this state alone
    _rows: dict[Any, tuple[Row, ...]] = field(default_factory=dict)  # a row of each layer
    _bytes: int = 0
    _is_off: bool = False

    def of_other_model(self) -> FrozenOutputs:
        """The same examples under another model: nothing is kept yet."""
        return FrozenOutputs(self.dataset, self.collate)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the whole model runs in every pass."""
        was_off = self._is_off
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = was_off

    def look(self, task: Any, params: Mapping[str, Tensor]) -> None:
        """Find the frozen layers of the task's model where these parameters train, once.

        Call this where no hook of a sweep watches the model.
        """
        if self.layers is not None:
            return
        self.layers = ()
        try:
            with self.off(), task.evaluation():
                self.layers = frozen_layers(task, params)
        except Exception:  # the model cannot run this way, so that all of it runs in every pass
            return

    @contextmanager
    def reused(
        self, task: Any, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> Iterator[bool]:
        """Inside, the frozen layers return kept rows, or run and their rows are kept.

        Args:
            task: its model runs.
            params: the parameters at which the model runs.
            indices: of the examples in the batch; None: they are not known.

        Yields:
            Whether the frozen layers run.
        """
        keys = self._keys(task, batch, params, indices)
        if keys is None or not self.layers or not self._is_usable(task.model, params):
            yield True
            return
        kept_rows = [self._rows[key] for key in keys if key in self._rows]
        if len(kept_rows) == len(keys):
            rows_by_layer = list(zip(*kept_rows, strict=True))
            with replaying(self.layers, rows_by_layer):
                yield False
            return
        max_bytes = _max_bytes(task)
        if self._bytes >= max_bytes:
            yield True
            return
        with recording(self.layers) as calls:
            yield True
        self._keep(keys, calls, max_bytes)

    def _keys(
        self, task: Any, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> list[Any] | None:
        """The key of each example's rows: its index, its inputs, and what else outputs depend on.

        None: this pass neither uses rows nor keeps them.
        """
        if self._is_off or indices is None or not self.layers:
            return None
        if any(module.training for module in task.model.modules()):
            return None
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
            return None
        if any(map(is_functorch_wrapped_tensor, (*leaves, *params.values()))):
            return None
        dataset_indices = self._dataset_indices(task.examples, indices)
        if dataset_indices is None or any(len(leaf) != len(dataset_indices) for leaf in leaves):
            return None
        shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        device = task.device.type
        autocast_dtype = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        inputs = zip(*(fingerprints(leaf) for leaf in leaves), strict=True)
        return [
            (index, numbers, shapes, autocast_dtype)
            for index, numbers in zip(dataset_indices.tolist(), inputs, strict=True)
        ]

    def _dataset_indices(self, examples: Any, indices: Tensor) -> Tensor | None:
        """The indices in :attr:`dataset` of a task's examples; None where they are other data."""
        dataset = examples.dataset
        dataset_indices = indices.cpu()
        while dataset is not self.dataset:
            if type(dataset) is not Subset:
                return None
            dataset_indices = torch.as_tensor(dataset.indices)[dataset_indices]
            dataset = dataset.dataset
        return dataset_indices if examples.collate is self.collate else None

    def _is_usable(self, model: nn.Module, params: Mapping[str, Tensor]) -> bool:
        """Whether a pass at these parameters may use rows.

        It may not where ``params`` holds a parameter of a frozen layer, or another value of its
        buffers. Rows of other frozen numbers are dropped here.
        """
        assert self.layers is not None
        modules = list(dict.fromkeys(m for layer in self.layers for m in layer.module.modules()))
        if any(is_watched(module) for module in modules):
            return False
        frozen_ids = {id(p) for module in modules for p in module._parameters.values()}
        buffer_ids = {id(b) for module in modules for b in module._buffers.values()}
        if any(name in params and id(p) in frozen_ids for name, p in model.named_parameters()):
            return False
        for name, buffer in model.named_buffers():
            is_replaced = name in params and id(buffer) in buffer_ids
            if is_replaced and not torch.equal(params[name].to(buffer), buffer):
                return False
        state = state_of(modules)
        if state != self._state:
            self._rows.clear()
            self._bytes = 0
            self._state = state
        return True

    def _keep(self, keys: Sequence[Any], calls: Sequence[Sequence[Call]], max_bytes: int) -> None:
        """Keep the rows of a pass, if every layer was called once and gave a row an example."""
        assert self.layers is not None
        if any(len(calls_of_layer) != 1 for calls_of_layer in calls):
            return
        rows_by_layer = []
        for layer, (call,) in zip(self.layers, calls, strict=True):
            tensors = [leaf for leaf in call.leaves if isinstance(leaf, Tensor)]
            has_rows = all(len(tensor) == len(keys) for tensor in tensors)
            if call.structure != layer.structure or not has_rows:
                return
            rows_by_layer.append(layer.rows(call.leaves))
        for key, rows in zip(keys, zip(*rows_by_layer, strict=True), strict=True):
            if key not in self._rows and self._bytes < max_bytes:
                self._rows[key] = rows
                tensors = [leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)]
                self._bytes += sum(tensor.nbytes for tensor in tensors)


def _max_bytes(task: Any) -> int:
    """The bytes that rows may take: the user's bound, or those of the model's weights."""
    if task.memory_budget is not None:
        return task.memory_budget
    return max(MIN_BYTES, sum(p.nbytes for p in task.model.parameters()))
