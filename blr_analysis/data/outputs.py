"""A forward pass: how a model takes a batch, and checks of its inputs, outputs and targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.data.batches import describe, refuse_unlabelled
from blr_analysis.errors import BLRError, DataError, ModelError, told_as
from blr_analysis.half import HALF
from blr_analysis.likelihoods import Likelihood
from blr_analysis.likelihoods.tokens import pixels_as_tokens

Forward = Callable[[nn.Module, Any], tuple[Any, Tensor]]
INPUTS_NOT_FINITE = "the inputs hold NaN or inf {}; drop or mend those"
OUTPUTS_NOT_FINITE = "the model's outputs are NaN or inf {}; check weights and inputs"
# Such a sequence has no loss at all.
ALL_IGNORED = "every label is ignored {}; drop those sequences"


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """The model's outputs and the targets of a batch.

    The batch is a pair ``(x, y)``, x a tensor or a dict of arguments, or a dict with ``labels``. A
    decoder that answers an encoder reads the labels, each behind the one before it.

    Raises:
        DataError: another batch.
    """
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            refuse_unlabelled(batch)
        return model(**_arguments_of(model, batch)), batch["labels"]
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(f"a batch must be (x, y) or a dict, got {describe(batch)}; give forward=")
    x, y = batch
    return forward_of_inputs(model, x), y


def _arguments_of(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is called with, for a batch with ``labels``."""
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    shifted = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    has_input = "decoder_input_ids" in batch or "decoder_inputs_embeds" in batch
    if shifted is not None and not has_input:
        arguments["decoder_input_ids"] = shifted(labels=batch["labels"])
    return arguments


def forward_of_inputs(model: nn.Module, x: Any) -> Any:
    """The model's outputs for inputs without labels, which are read in the model's dtype."""
    if isinstance(x, tuple | list) and len(x) == 1:
        x = x[0]
    if isinstance(x, Mapping):
        return model(**x)
    if isinstance(x, Tensor) and x.is_floating_point():
        x = x.to(_input_dtype(model, x.dtype))
    return model(x)


def _input_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model takes inputs of this dtype.

    It is that of the model's first parameter of real numbers. Inputs in half precision stay so
    where some parameter has their dtype: the model was trained on them.
    """
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    is_trained_in_half = dtype in HALF and dtype in dtypes
    if is_trained_in_half or not dtypes:
        return dtype
    return dtypes[0]


def check_inputs(batch: Any, indices: Tensor | None) -> None:
    """Raise :class:`DataError` for NaN and inf in the x of (x, y); a saturated layer hides them.

    Args:
        indices: of the examples, ``[B]``, for the message.
    """
    x = batch[0] if isinstance(batch, tuple | list) and batch else None
    if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0:
        _check_finite(x, indices, DataError, INPUTS_NOT_FINITE)


def checked(
    outputs: Any, targets: Any, likelihood: Likelihood, indices: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs ``[B, C]`` and targets of a forward pass, as the likelihood takes them.

    Args:
        indices: of the examples, ``[B]``; None where the batch is none of the task's own.

    Raises:
        ModelError: no tensor of floats, not one row per example, NaN or inf.
        DataError: targets of another length, shape or dtype, out of range, or all ignored.
    """
    outputs = _real_outputs(outputs, likelihood)
    with told_as(DataError, "the targets must be a tensor of numbers"):
        targets = torch.as_tensor(targets, device=outputs.device)
    outputs, targets = likelihood.by_token(outputs, targets)
    likelihood.check_outputs(outputs)
    if indices is not None:
        check_rows(outputs, len(indices))
    if targets.ndim == 0 or len(targets) != len(outputs):
        raise DataError(f"targets {[*targets.shape]} for {len(outputs)} outputs; give one each")
    outputs, targets = likelihood.prepare(outputs, targets)
    counted = likelihood.counted(targets)
    if counted is not None:
        _check_rows_are(counted.any(-1), indices, DataError, ALL_IGNORED)
    _check_finite(outputs.detach(), indices, ModelError, OUTPUTS_NOT_FINITE)
    return outputs, targets


def checked_outputs(outputs: Any, likelihood: Likelihood, indices: Tensor | None) -> Tensor:
    """The outputs ``[B, C]`` for inputs without labels; of images with a class per pixel, the
    outputs ``[B, H·W, C]``.

    Raises:
        ModelError: as :func:`checked`.
    """
    outputs = _real_outputs(outputs, likelihood)
    if likelihood.is_sequence and outputs.ndim >= 4:
        outputs = pixels_as_tokens(outputs)
    likelihood.check_outputs(outputs)
    if indices is not None:
        check_rows(outputs, len(indices))
    _check_finite(outputs.detach(), indices, ModelError, OUTPUTS_NOT_FINITE)
    return outputs


def _real_outputs(outputs: Any, likelihood: Likelihood) -> Tensor:
    """The tensor in what a model returned, half precision as float32.

    Raises:
        ModelError: no tensor of floats.
    """
    if isinstance(outputs, Mapping) and "logits" in outputs:
        outputs = outputs["logits"]
    outputs = likelihood.join(getattr(outputs, "logits", outputs))
    if isinstance(outputs, Tensor) and outputs.dtype in HALF:
        outputs = outputs.float()
    if not isinstance(outputs, Tensor) or outputs.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"the model must return real numbers, got {describe(outputs)}; pick them by forward="
        )
    if outputs.ndim == 1 and not likelihood.integer_targets:
        outputs = outputs.unsqueeze(-1)
    return outputs


def check_rows(outputs: Tensor, size: int) -> None:
    """Raise :class:`ModelError` unless there is one row of outputs per example."""
    if len(outputs) != size:
        fault = f"the model returned {len(outputs)} rows of outputs for {size} examples"
        if len(outputs) == 1:
            fault += "; texts that are packed into one row are one example: pack them in the data"
        raise ModelError(fault)


def _check_finite(x: Tensor, indices: Tensor | None, error: type[BLRError], message: str) -> None:
    """Raise the error where a row of ``x`` ``[B, ...]`` holds NaN or inf."""
    sum_is_finite = bool(torch.isfinite(x.sum()))  # the quicker question
    if not sum_is_finite:
        rows_are_finite = torch.isfinite(x).reshape(len(x), -1).all(1)
        _check_rows_are(rows_are_finite, indices, error, message)


def _check_rows_are(
    good: Tensor, indices: Tensor | None, error: type[BLRError], message: str
) -> None:
    """Raise the error where an entry of ``good`` ``[B]`` is False, and name the first example."""
    bad_rows = (~good).nonzero().flatten().cpu()
    if not len(bad_rows):
        return
    if indices is not None and len(indices) == len(good):
        bad_rows = indices.cpu()[bad_rows]
    first = int(bad_rows[0])
    examples = f"in {len(bad_rows)} examples, the first at index {first}"
    if len(bad_rows) == 1:
        examples = f"in the example at index {first}"
    raise error(message.format(examples))
