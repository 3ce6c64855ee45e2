"""A callback for Lightning that writes a precision folder beside every checkpoint."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blr_analysis.errors import BLRError, OptimizerError
from blr_analysis.files import storage
from blr_analysis.huggingface.recording import SHARDED, Recorder

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback

PIECES = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


class LightningPrecision(Callback):
    """Write the precision that the optimizer has learned beside each ``.ckpt``.

    ``epoch=0-step=9.ckpt`` gets the folder ``epoch=0-step=9.precision``, which is removed with
    its checkpoint. What is stored, and when it is refused, is as with
    :class:`~blr_analysis.huggingface.trainer.TrainerPrecision`. Works with the packages
    ``lightning`` and ``pytorch_lightning``.

    Args:
        n_data: N, where it is not the length of the training data.
        scaling: ``"sqrt"`` or ``"squared"``.
        dtype: float32 or bfloat16.
        submodule: the part of the LightningModule whose parameters' names are stored, for
            instance ``"model"`` where ``self.model`` is what you save for use; it must hold
            everything that is trained.

    Raises:
        OptimizerError, InputError: when training begins.

    Example::

        trainer = lightning.Trainer(callbacks=[LightningPrecision(submodule="model")])
        trainer.fit(module, loader)
        trainer.save_checkpoint("last.ckpt")        # and last.precision
    """

    def __init__(
        self,
        *,
        n_data: int | None = None,
        scaling: str = "sqrt",
        dtype: torch.dtype | None = torch.float32,
        submodule: str = "",
    ) -> None:
        super().__init__()
        self._submodule = submodule
        self._recorder = Recorder(n_data, scaling, dtype, sha256=False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take down names, sizes and settings, and listen to what is saved."""
        strategy = type(trainer.strategy).__name__
        if any(word in strategy for word in PIECES):
            raise OptimizerError(f"with {strategy} the optimizer's state is in pieces: {SHARDED}")
        if len(trainer.optimizers) != 1:
            raise OptimizerError(
                f"the module has {len(trainer.optimizers)} optimizers: a precision is that of one"
            )
        loader = trainer.train_dataloader
        clip = trainer.gradient_clip_val
        self._recorder.begin(
            trainer.optimizers[0],
            self._part(pl_module),
            data=getattr(loader, "dataset", None),
            per_device=_batch_size(loader),
            accumulation=trainer.accumulate_grad_batches,
            world_size=trainer.world_size,
            clipping={trainer.gradient_clip_algorithm or "norm": float(clip)} if clip else None,
        )
        if not isinstance(trainer.strategy.checkpoint_io, _Beside):
            trainer.strategy.checkpoint_io = _Beside(trainer.strategy.checkpoint_io)
        trainer.strategy.checkpoint_io.recorder = self._recorder

    def _part(self, module: Any) -> torch.nn.Module:
        try:
            return module.get_submodule(self._submodule)
        except AttributeError as error:
            names = [name for name, _ in module.named_children()]
            raise OptimizerError(
                f"the module has no part {self._submodule!r}; it has {names}"
            ) from error


class _Beside:
    """A trainer's ``checkpoint_io`` that writes and removes the precision with each file."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.recorder: Recorder | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        place = _beside(path)
        if place is None:
            warnings.warn(
                f"no precision was written: {os.fspath(path)!r} is not on this machine",
                stacklevel=2,
            )
        elif self.recorder is not None:
            self.recorder.try_to_write(place, None)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)
        place = _beside(path)
        if place is not None and place.is_dir():
            try:
                storage.remove(place)
            except BLRError as error:
                warnings.warn(str(error), stacklevel=2)


def _beside(path: Any) -> Path | None:
    text = os.fspath(path)
    if "://" in text:
        return None
    place = Path(text)
    stem = place.stem if place.suffix == ".ckpt" else place.name
    return place.with_name(f"{stem}.precision")


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return int(size) if isinstance(size, int) else None
