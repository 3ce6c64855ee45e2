"""The precision that a Trainer's checkpoint holds, written into it: for runs without a callback."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blr_analysis.checks import instance, path_of
from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files import storage
from blr_analysis.huggingface.models import read_config
from blr_analysis.posterior import write_captured
from blr_analysis.posterior.capture import from_checkpoint

FOLDER = "precision"


def checkpoint_precision(
    checkpoint: str | os.PathLike[str],
    *,
    n_data: int,
    model: nn.Module | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    scaling: str = "sqrt",
    batch_size: int | None = None,
    names: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> Path:
    """Write ``checkpoint/precision`` from the ``optimizer.pt`` of a Hugging Face Trainer.

    The state numbers its parameters and names none; see
    :func:`~blr_analysis.posterior.capture.from_checkpoint` for how they are named, and when
    that is refused. What is stored is the data's part H alone, N·√v̂ or N·B·v̂.

    Args:
        checkpoint: the folder, with ``optimizer.pt``, ``config.json`` and the weights.
        n_data: N, the number of training examples (the file does not know it).
        model: the model that was trained, on any device, the meta device too; None builds it from
            ``config.json`` without weights, all of it trainable. Pass it where parameters were
            frozen.
        prior_precision: δ to record beside H (``prior_outside``), which ``Posterior.load`` adds.
        scaling, batch_size: "sqrt", or "squared" with the examples of one step.
        names: see ``from_checkpoint``.
        out: where to write; default ``checkpoint/precision``.
        force: replace a precision that is there.
        dtype: float32 or bfloat16.

    Returns:
        Where it was written.

    Raises:
        OptimizerError: the state fits the model in no way, or in several; bfloat16 states.
        StorageError: files that are missing, damaged, or pickles that hold more than tensors;
            ``out`` is there.
        ModelError: weights of another model; a ``config.json`` of no known architecture.
        InputError: transformers is not installed.

    Example:
        >>> checkpoint_precision("no-run/checkpoint-500", n_data=8000)
        Traceback (most recent call last):
            ...
        blr_analysis.errors.StorageError: there is no folder 'no-run/checkpoint-500': ...
    """
    place = Path(path_of(checkpoint)).expanduser()
    if not place.is_dir():
        raise StorageError(
            f"there is no folder {str(place)!r}: name one checkpoint of a Trainer's output"
        )
    target = place / FOLDER if out is None else Path(path_of(out)).expanduser()
    storage.check_target(target, force=force)
    if model is not None:
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
    captured = from_checkpoint(
        place,
        empty_model(place) if model is None else model,
        n_data=n_data,
        prior_precision=prior_precision,
        scaling=scaling,
        batch_size=batch_size,
        names=names,
        bare=True,
    )
    safe = any(place.glob("model*.safetensors"))
    write_captured(target, captured, model=place if safe else None, dtype=dtype)
    return target


def empty_model(folder: Path) -> Any:
    """The model that ``config.json`` describes, on the meta device: names and shapes, no weights.

    Raises:
        ModelError: no ``config.json``, or an architecture that transformers does not have.
        InputError: transformers is not installed.
    """
    import transformers

    advice = "pass model=, the model that was trained (on the meta device, it needs no memory)"
    try:
        config = read_config(folder)
    except (StorageError, ModelError) as error:
        raise ModelError(f"{error}; {advice}") from error
    wanted = (config.architectures or [""])[0]
    kind = getattr(transformers, wanted, None) if wanted else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelError(
            f"transformers does not have {wanted!r}, the architecture of {str(folder)!r}: {advice}"
        )
    with torch.device("meta"):
        return kind(config)
