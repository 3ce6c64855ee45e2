"""What comes out of a dataset and goes into a likelihood: read, run, and checked batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.data import describe
from blr_analysis.errors import DataError, ModelError
from blr_analysis.likelihoods import Likelihood

Forward = Callable[[nn.Module, Any], tuple[Any, Tensor]]


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """``(x, y)`` pairs, and dict batches with ``labels`` as Hugging Face models take them."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"a dict batch needs a 'labels' entry, found {sorted(batch)}; rename the target "
                "column or pass forward= to Task"
            )
        return model(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
        if isinstance(x, Tensor) and x.is_floating_point():
            first = next((p for p in model.parameters() if p.is_floating_point()), None)
            if first is not None:
                x = x.to(first.dtype)
        return model(x), y
    raise DataError(
        f"cannot read a batch of type {type(batch).__name__}; give (x, y) pairs, dict batches "
        "with 'labels', or forward=(model, batch) -> (outputs, targets)"
    )


def check_inputs(batch: Any, indices: Tensor | None) -> None:
    """Refuse NaN and inf in the x of (x, y) pairs, which a saturated layer would hide."""
    x = batch[0] if isinstance(batch, (tuple, list)) and batch else None
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0:
        return
    if bool(torch.isfinite(x.sum())):
        return
    bad = (~torch.isfinite(x)).flatten(1).any(1) if x.ndim > 1 else ~torch.isfinite(x)
    if bool(bad.any()):
        raise DataError(
            f"the inputs hold NaN or inf {where(bad, indices)}; drop or mend those examples (a "
            "model that takes them needs its own forward=)"
        )


def where(bad: Tensor, indices: Tensor | None) -> str:
    rows = bad.nonzero().flatten().cpu()
    named = rows if indices is None or len(indices) != len(bad) else indices.cpu()[rows]
    return f"in {len(rows)} examples, the first at index {int(named[0])}"


def checked(
    outputs: Any, targets: Any, likelihood: Likelihood, indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What a forward pass returned as outputs ``[B, C]`` and targets, or an error saying why not.

    Raises:
        ModelError: no tensor of floats, not one row per example, NaN or inf.
        DataError: targets of another length, shape or dtype, out of range, or all ignored.
    """
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor) or outputs.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            "the model must return a float32 or float64 tensor (or an object with .logits), "
            f"got {describe(outputs)}; pick or convert it in Task(..., forward=...)"
        )
    if outputs.ndim == 1 and not likelihood.integer_targets:
        outputs = outputs.unsqueeze(-1)
    likelihood.check_outputs(outputs)
    if indices is not None and len(outputs) != len(indices):
        raise ModelError(
            f"the model returned {len(outputs)} rows of outputs for {len(indices)} examples; "
            "return one row per example (forward= can reshape)"
        )
    try:
        targets = torch.as_tensor(targets, device=outputs.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the targets must be a tensor of numbers, got {describe(targets)}: {error}"
        ) from error
    if targets.ndim == 0 or len(targets) != len(outputs):
        raise DataError(
            f"{len(outputs)} rows of outputs but targets of shape {tuple(targets.shape)} in "
            "one batch; give one output row and one target per example"
        )
    outputs, targets = likelihood.prepare(outputs, targets)
    _check_counted(likelihood, targets, indices)
    bad = ~torch.isfinite(outputs.detach()).flatten(1).all(-1)
    if bool(bad.any()):
        raise ModelError(
            f"the model's outputs are NaN or inf {where(bad, indices)}; check the weights "
            "and those inputs"
        )
    return outputs, targets


def _check_counted(likelihood: Likelihood, targets: Tensor, indices: Tensor | None) -> None:
    """Refuse sequences without a single token to score, which would have no loss at all."""
    counted = likelihood.counted(targets)
    if counted is None:
        return
    bad = ~counted.any(-1)
    if bool(bad.any()):
        raise DataError(
            f"every label is ignored {where(bad, indices)}; drop sequences without a token to score"
        )


def versions(batch: Any) -> list[int]:
    """A count for every tensor of a batch, which rises when the tensor is written to."""
    tensors = [x for x in tree_leaves(batch) if isinstance(x, Tensor)]
    return [-1 if x.is_inference() else x._version for x in tensors]
