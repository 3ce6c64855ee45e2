"""A batch of tokenised texts of unequal length, as transformers' collators make it.

The ``input_ids`` of a short row are filled up with the model's padding token, its labels with the
label that a loss ignores, everything else with 0. The ``attention_mask`` is 0 at padding. Rows that
pack several texts and have ``position_ids`` get no mask: transformers separates these texts by
their positions. A causal language model's ids are its labels too, where a data set has no labels.
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

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
POSITIONS = "position_ids"
IGNORED = -100  # the label that losses of torch and transformers ignore


@dataclass(frozen=True)
class Padding:
    """Makes a batch of rows by name; any other rows are collated as torch does.

    Attributes:
        token: fills up ``input_ids``.
        ignored: fills up labels.
        masked: whether the model takes an ``attention_mask``.
        predicts_ids: whether the ids are the labels of rows without labels.

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
        is_packed = POSITIONS in columns  # transformers then separates texts without a mask
        needs_mask = self.masked and MASK not in columns and not is_packed
        if needs_mask and ids is not None:
            columns[MASK] = [torch.ones(len(row), dtype=torch.long) for row in ids]
        return {name: self._column(name, values) for name, values in columns.items()}

    def _column(self, name: str, values: list[Any]) -> Any:
        """The values of a column as one tensor, filled up where their lengths differ.

        Raises:
            DataError: values of different shapes beyond their lengths.
        """
        if not all(_is_of_numbers(value) for value in values):
            return default_collate(values)
        tensors = [torch.as_tensor(value) for value in values]
        shapes = {tuple(x.shape[1:]) for x in tensors}
        if len({x.ndim for x in tensors}) > 1 or len(shapes) > 1:
            texts = sorted({str([*x.shape]) for x in tensors})
            raise DataError(f"column {name!r} has rows of shapes {', '.join(texts[:4])}; pad them")
        are_numbers = tensors[0].ndim == 0
        if are_numbers or len({len(tensor) for tensor in tensors}) == 1:
            return torch.stack(tensors)
        fill = {IDS: self.token, LABELS: self.ignored}.get(name, 0)
        return pad_sequence(tensors, batch_first=True, padding_value=fill)


def padding_of(model: nn.Module, likelihood: Likelihood) -> Padding:
    """The padding of a model's data, from its config and its likelihood."""
    config = getattr(model, "config", None)
    candidates = [getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")]
    token = next((i for i in candidates if isinstance(i, int) and i >= 0), 0)
    ignored = getattr(likelihood.kind, "ignore_index", None)
    return Padding(
        token=token,
        ignored=IGNORED if ignored is None else ignored,
        masked=MASK in arguments_of(model),
        predicts_ids=isinstance(likelihood.kind, CausalLM),
    )


def arguments_of(model: nn.Module) -> set[str]:
    """The names of the arguments of a model's forward function; of an adapter, its base's."""
    base = getattr(model, "get_base_model", None)
    inner: Any = base() if callable(base) else model
    try:
        return set(inspect.signature(inner.forward).parameters)
    except ValueError:  # TorchScript compiled it, and keeps no signature
        return set()


def aside(model: nn.Module, columns: Sequence[str]) -> list[str]:
    """The columns for which a transformers model has no argument; Trainer leaves them out too."""
    if not hasattr(model, "main_input_name"):
        return []
    arguments = arguments_of(model)
    return [name for name in columns if name not in arguments and name != LABELS]


def _is_of_numbers(value: Any) -> bool:
    """Whether a value is a tensor, an array of numbers, or a list of numbers, nested or not."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple):
        return all(isinstance(x, bool | int | float) or _is_of_numbers(x) for x in value)
    return hasattr(value, "__array__") and value.dtype.kind in "biuf"
