"""A callback for Hugging Face's Trainer that writes ``precision/`` into every checkpoint."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from blr_analysis.errors import OptimizerError, StorageError
from blr_analysis.huggingface.recording import SHARDED, Recorder

FOLDER = "precision"


class TrainerPrecision(TrainerCallback):
    """Write the precision that the optimizer has learned into each ``checkpoint-*/precision``.

    What is stored is the data's part H, N·√v̂ for Adam and its relatives (N·B·v̂ with
    ``scaling="squared"``), as bare numbers to merge models with; for IVON its S with the prior in
    it. The record has the parameters' names in the optimizer's order, the batch size (per device
    × accumulation × world size), clipping, and N. ``Posterior.load(precision, model=checkpoint)``
    makes a posterior of it, with δ = N·weight_decay, which AdamW's decoupled decay is not exactly
    (the record's ``prior_from`` says so).

    What cannot work is refused when training begins. What goes wrong at a save is a warning, and
    training goes on.

    Args:
        n_data: N, where it is not the length of the training data: a dataset without a length,
            or a loss that is a mean over tokens (then N is the number of tokens).
        scaling: ``"sqrt"`` or ``"squared"``.
        dtype: float32 or bfloat16.
        sha256: record the fingerprint of the checkpoint's weights, which reads them once.

    Raises:
        OptimizerError, InputError: when training begins, see above.

    Example::

        callback = TrainerPrecision()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()                    # checkpoint-500/precision, checkpoint-1000/precision …
        trainer.save_model("fine-tuned")
        callback.save("fine-tuned")        # fine-tuned/precision
    """

    def __init__(
        self,
        *,
        n_data: int | None = None,
        scaling: str = "sqrt",
        dtype: torch.dtype | None = torch.float32,
        sha256: bool = True,
    ) -> None:
        self._recorder = Recorder(n_data, scaling, dtype, sha256)
        self._best: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take down names, sizes and settings."""
        self._best = None
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise OptimizerError(
                f"with FSDP or DeepSpeed the optimizer's state is in pieces: {SHARDED}"
            )
        self._recorder.begin(
            kwargs["optimizer"],
            kwargs["model"],
            data=getattr(kwargs["train_dataloader"], "dataset", None),
            per_device=state.train_batch_size or args.train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            world_size=args.world_size,
            clipping={"norm": args.max_grad_norm} if args.max_grad_norm else None,
        )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write beside what the Trainer has just saved."""
        if not args.should_save:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not folder.is_dir():
            warnings.warn(
                f"no precision was written: there is no checkpoint {str(folder)!r}",
                stacklevel=2,
            )
            return
        self._recorder.try_to_write(folder / FOLDER, folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note whether the weights are the best checkpoint's from here on."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._best = state.best_model_checkpoint

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``folder/precision``, for a model that was saved to ``folder`` after training.

        Raises:
            OptimizerError: no training has begun, or the weights are no longer those that the
                optimizer left (``load_best_model_at_end``).
            StorageError: the place cannot be written.
        """
        place = Path(folder).expanduser()
        if not place.is_dir():
            raise StorageError(f"there is no folder {str(place)!r}: save the model there first.")
        if self._best is not None:
            raise OptimizerError(
                f"the weights are those of {self._best!r} (load_best_model_at_end), the "
                f"optimizer's state is later: copy {str(Path(self._best) / FOLDER)!r} instead."
            )
        self._recorder.write(place / FOLDER, place)
        return place / FOLDER
