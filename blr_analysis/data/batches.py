"""What a batch holds: its tensors, its labels, which of its positions are padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from blr_analysis.errors import DataError

MAX_PARTS = 8  # of a list or a tuple that a message describes


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device: every tensor in lists, tuples and mappings, and whatever has ``.to``.

    Mappings of any class become dicts.
    """

    def send(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {name: to_device(value, device) for name, value in part.items()}
        return part.to(device) if callable(getattr(part, "to", None)) else part

    return tree_map(send, batch, is_leaf=lambda part: isinstance(part, Mapping))


def mask_and_labels(batch: Any) -> tuple[Tensor | None, Any]:
    """The attention mask and the labels of a batch.

    Returns:
        The mask ``[B, T]`` of booleans, False at padding, or None where the batch has no such mask;
        and the entry ``labels`` of its mappings, or else its last part.
    """
    parts = batch if isinstance(batch, tuple | list) else [batch]
    entries: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, Mapping):
            entries.update(part)
    labels = entries.get("labels", parts[-1])
    mask = entries.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None, labels
    return mask.bool(), labels


def padded_behind(batch: Any, ignored: int) -> Any:
    """The batch with the padding before each sequence moved behind it.

    The moved labels become ``ignored``. A causal model then reads a sequence as it reads the
    sequence alone, whatever else is in the batch.

    >>> ids, mask = torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])
    >>> turned = padded_behind({"labels": ids, "attention_mask": mask}, -100)
    >>> turned["labels"], turned["attention_mask"]
    (tensor([[   5,    6, -100]]), tensor([[1, 1, 0]]))
    """
    mask, labels = mask_and_labels(batch)
    if mask is None or bool(mask[:, 0].all()):
        return batch
    is_before = mask.cumsum(1) == 0  # [B, T], the padding before a sequence
    positions = torch.arange(mask.shape[1], device=mask.device)
    new_order = (positions + is_before.sum(1, keepdim=True)) % mask.shape[1]
    rows = torch.arange(len(mask), device=mask.device).unsqueeze(1)

    def turn(part: Any) -> Any:
        if not isinstance(part, Tensor) or part.shape[:2] != mask.shape:
            return part
        if part is labels:
            part = part.masked_fill(is_before, ignored)
        return part[rows, new_order]

    return tree_map(turn, batch)


def describe(batch: Any) -> str:
    """Shapes and dtypes of a batch, for messages.

    >>> describe((torch.zeros(2, 3), [torch.zeros(2)]))
    '((2, 3) float32, ((2,) float32))'
    """
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        entries = [f"{name}: {describe(value)}" for name, value in batch.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(batch, (list, tuple)):
        return "(" + ", ".join(describe(part) for part in batch[:MAX_PARTS]) + ")"
    return type(batch).__name__


def has_labels(batch: Any) -> bool:
    """Whether a batch has labels; a tensor, a tuple of one part and a dict without "labels" do not.

    >>> has_labels((torch.zeros(2, 3), torch.zeros(2))), has_labels(torch.zeros(2, 3))
    (True, False)
    """
    if isinstance(batch, Mapping):
        return "labels" in batch
    has_one_part = isinstance(batch, tuple | list) and len(batch) == 1
    return not (has_one_part or isinstance(batch, Tensor))


def refuse_unlabelled(batch: Any) -> NoReturn:
    """Raise :class:`DataError` for a batch of inputs without labels."""
    if isinstance(batch, Mapping):
        raise DataError(f"a dict batch needs 'labels', found {sorted(batch)}; see forward=")
    raise DataError(
        f"the data have no labels ({describe(batch)}); only posterior.predict and acquire accept "
        "that"
    )


def write_counts(batch: Any) -> list[int]:
    """How often each tensor of a batch was written to, −1 where torch does not count."""
    tensors = [part for part in tree_leaves(batch) if isinstance(part, Tensor)]
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]
