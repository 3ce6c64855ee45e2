"""Rows of texts as ids, of unequal length, as one batch: what transformers' collators make of them.

A short row's ``input_ids`` are filled up with the model's padding token, its labels with the one
that is ignored, everything else with 0; ``attention_mask`` says what is no padding. Rows that
pack several texts, and bring ``position_ids``, have none: transformers tells these texts apart by
their positions. A causal language model's labels, where a data set has none, are its ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from blr_analysis.errors import DataError
from blr_analysis.likelihoods import CausalLM, Likelihood

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
POSITIONS = "position_ids"
IGNORED = -100


@dataclass(frozen=True)
class Padding:
    """Makes a batch of rows; of rows that are no mappings, as torch does.

    Attributes:
        token: fills up ``input_ids``.
        ignored: fills up labels.
        masked: whether the model takes an ``attention_mask``.
        predicts_ids: whether labels that are missing are the ids.

    >>> Padding(token=9)([{"input_ids": [5, 6], "labels": 1}, {"input_ids": [7], "labels": 0}])
    {'input_ids': tensor([[5, 6],
            [7, 9]]), 'labels': tensor([1, 0])}
    """

    token: int = 0
    ignored: int = IGNORED
    masked: bool = False
    predicts_ids: bool = False

    def __call__(self, rows: Sequence[Any]) -> Any:
        if not all(isinstance(row, Mapping) for row in rows):
            return default_collate(list(rows))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        if self.predicts_ids and LABELS not in columns and IDS in columns:
            columns[LABELS] = columns[IDS]
        ids = columns.get(IDS)
        is_packed = POSITIONS in columns  # transformers then keeps texts apart, without a mask
        if self.masked and MASK not in columns and ids is not None and not is_packed:
            columns[MASK] = [torch.ones(len(x), dtype=torch.long) for x in ids]
        return {name: self._column(name, values) for name, values in columns.items()}

    def _column(self, name: str, values: list[Any]) -> Any:
        if not all(_is_of_numbers(value) for value in values):
            return default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        shapes = {tuple(x.shape[1:]) for x in tensors}
        if len({x.ndim for x in tensors}) > 1 or len(shapes) > 1:
            found = sorted({str([*x.shape]) for x in tensors})
            raise DataError(f"column {name!r} has rows of shapes {', '.join(found[:4])}; pad them")
        if tensors[0].ndim == 0 or not _lengths_differ(tensors):
            return torch.stack(tensors)
        fill = {IDS: self.token, LABELS: self.ignored}.get(name, 0)
        return pad_sequence(tensors, batch_first=True, padding_value=fill)


def padding_of(model: nn.Module, likelihood: Likelihood) -> Padding:
    """How the rows of a model's data are filled up."""
    config = getattr(model, "config", None)
    named = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    token = next((i for i in named if isinstance(i, int) and i >= 0), 0)
    ignored = getattr(likelihood.kind, "ignore_index", None)
    return Padding(
        token=token,
        ignored=IGNORED if ignored is None else ignored,
        masked=MASK in arguments_of(model),
        predicts_ids=isinstance(likelihood.kind, CausalLM),
    )


def arguments_of(model: nn.Module) -> set[str]:
    """The names of what a model takes; of an adapter its base's."""
    base = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    try:
        return set(inspect.signature(inner.forward).parameters)
    except ValueError:  # TorchScript compiled it, and keeps no signature
        return set()


def aside(model: nn.Module, columns: Sequence[str]) -> list[str]:
    """The columns that a transformers' model has no argument for, which Trainer leaves out too."""
    if not hasattr(model, "main_input_name"):
        return []
    taken = arguments_of(model)
    return [name for name in columns if name not in taken and name != LABELS]


def _is_of_numbers(value: Any) -> bool:
    """Whether it is a tensor, an array or a list of numbers; of a single one torch knows best."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple):
        return all(isinstance(x, bool | int | float) or _is_of_numbers(x) for x in value)
    return hasattr(value, "__array__") and value.dtype.kind in "biuf"


def _lengths_differ(values: Sequence[Any]) -> bool:
    return len({len(value) for value in values}) > 1
