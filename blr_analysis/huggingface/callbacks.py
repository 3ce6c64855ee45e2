"""Callbacks of Hugging Face's Trainer: precisions, checkpoints and recipes, and a monitor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import TrainerCallback

from blr_analysis.data.batches import to_device
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import drafted
from blr_analysis.files.headers import record_text
from blr_analysis.huggingface.recording import (
    MonitoredTraining,
    RecordedTraining,
    factors_of,
    length_of,
    recipe_of,
)
from blr_analysis.models import unwrapped
from blr_analysis.modes import modes_of
from blr_analysis.posterior import KroneckerRecorder, Posterior, write_captured
from blr_analysis.posterior.capture import from_optimizer, reader_of, unwrap
from blr_analysis.recipe import Recipe
from blr_analysis.runs import POSTERIOR, READING, RECIPE, RUN
from blr_analysis.sensitivity import Monitor
from blr_analysis.snapshots import note_weights
from blr_analysis.task import Task

# Arguments of the Trainer whose effect a recipe does not repeat.
UNREPEATED = (
    "label_smoothing_factor",
    "label_smoothing",
    "neftune_noise_alpha",
    "fp16",
    "bf16",
    "packing",
)
ID_COLUMNS = ("input_ids", "chosen_ids", "rejected_ids")  # of texts, and of TRL's pairs
ENDS_LOOKED_AT = 32  # texts that show whether the end token stands behind texts
# TRL's names of the losses that a task of a language model has.
KNOWN_LOSSES = ("nll", "chunked_nll", "sigmoid")
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")  # schedules that depend on losses
RECORDED = "blr_recorded.safetensors"  # in a checkpoint: the sums of recorded factors
SAVED = "blr_analysis.Monitor"  # the monitor's name among the callbacks in trainer_state.json


class TrainerPrecision(TrainerCallback):
    """Write the precision that the optimizer has learned into each ``checkpoint-*/precision``.

    Models are merged by these precisions: the data's part N·√v̂ of Adam and its relatives, IVON's S
    with its prior.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[TrainerPrecision()])
        trainer.train()                    # checkpoint-500/precision, checkpoint-1000/precision …

    Args:
        n_data: N, if it is not the length of the training data: the data have no length, or
            the loss is a mean over tokens (N is then the number of tokens).

    Raises:
        OptimizerError: when training begins, if the optimizer keeps no precision; at a save, if
            the precision cannot be read.
    """

    def __init__(self, *, n_data: int | None = None) -> None:
        self.n_data = n_data

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse an optimizer or data that no precision could be written of."""
        reader_of(unwrap(kwargs["optimizer"]))
        if self.n_data is None and length_of(kwargs["train_dataloader"]) is None:
            raise InputError("the training data have no length: pass n_data=, their number")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the precision beside what the Trainer has just saved."""
        optimizer = unwrap(kwargs["optimizer"])
        captured = from_optimizer(
            optimizer,
            kwargs["model"],
            n_data=self.n_data or length_of(kwargs["train_dataloader"]),
            scaling="ess" if reader_of(optimizer).scaled else "sqrt",
            bare=True,
        )
        recipe = _recipe(args, state, state.global_step, **kwargs)
        if not args.should_save:
            return
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        has_model = any(folder.glob("model.safetensors*"))  # an adapter's folder has none
        write_captured(
            folder / "precision",
            captured,
            model=folder if has_model else None,
            source="training",
            recipe=None if recipe is None else recipe.record,
        )


class CheckpointsCallback(RecordedTraining, TrainerCallback):
    """Keep a training's checkpoints and its recipe, for its :class:`blr_analysis.Task`.

    The checkpoints are the first weights and the weights after about 1/8, 1/4 and 1/2 of the steps,
    with the precision that was learned by then. They are written to ``_run`` in the Trainer's
    output folder, where ``blr-analysis`` finds them; with ``save_strategy="no"`` they stay in
    memory. The recipe, ``recipe.json``, is written there and into each ``checkpoint-*``. An
    :class:`IVONTrainer` has this callback already.

    Where a training has several processes, the first one keeps the checkpoints. None are kept of
    weights that are divided among processes.

        callback = CheckpointsCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
        task = blr.Task(model, data, checkpoints=callback.checkpoints, recipe=callback.recipe)

    Args:
        checkpoints: your own; None: the callback makes them.
        structure: "kron": Kronecker factors are recorded while it trains.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the first weights, or find those of the run that is resumed."""
        if not state.is_world_process_zero:
            return
        if self.structure is not None and flattens(kwargs["train_dataloader"]):
            self.record_none("batches pack several texts into one row")
        folder = None if args.save_strategy == "no" else Path(args.output_dir, RUN)
        self.begin(
            kwargs["model"],
            kwargs["optimizer"],
            state.global_step,
            steps=state.max_steps,
            folder=folder,
        )
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            run = self.checkpoints.folder
            for name in (READING, RECIPE, POSTERIOR):
                (run / name).unlink(missing_ok=True)
            self._note_weights(state.global_step)
            reading = reading_of(args, **kwargs)
            if reading:
                _write_record(reading, run / READING)
        recordings = self.checkpoints.recordings if self.checkpoints is not None else None
        recorded = _checkpoint_folder(args, state) / RECORDED
        if recordings is not None and state.global_step > 0 and recorded.exists():
            recordings.resume(recorded, state.global_step)

    def record_none(self, fault: str) -> None:
        """Record no factors, and warn of it."""
        warnings.warn(f"no factors are recorded: {fault}", stacklevel=3)
        self.structure = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the learning rate; not every schedule is a formula of the step."""
        self.record_rate(kwargs["optimizer"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the optimizer's step; the checkpoints that are due are taken."""
        if self.checkpoints is not None:
            self.checkpoints.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the recipe so far, and the recorded factors, into the Trainer's checkpoint."""
        folder = _checkpoint_folder(args, state)
        if self.checkpoints is None or not folder.is_dir():
            return
        if self.checkpoints.recordings is not None:
            self.checkpoints.recordings.keep(folder / RECORDED)
        rate_factors = self.rate_factors(state.global_step)
        recipe = _recipe(args, state, state.global_step, recorded_factors=rate_factors, **kwargs)
        _write_recipe(recipe, folder)
        self._note_weights(state.global_step)

    def _note_weights(self, step: int) -> None:
        """Note in the folder of the run that the model has these weights after a step."""
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            note_weights(self.checkpoints.folder, self.checkpoints.model, step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the recipe of the weights that the Trainer ends with."""
        step = state.global_step
        if args.load_best_model_at_end and state.best_model_checkpoint:
            step = int(state.best_model_checkpoint.rpartition("-")[2])
        rate_factors = self.rate_factors(step)
        recipe = _recipe(args, state, step, recorded_factors=rate_factors, **kwargs)
        self.end(recipe)
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            _write_recipe(recipe, self.checkpoints.folder)
        if step == state.global_step:  # an earlier one was noted when it was saved
            self._note_weights(step)


def _checkpoint_folder(args: Any, state: Any) -> Path:
    """Where the Trainer writes the checkpoint of this step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _write_recipe(recipe: Recipe | None, folder: Path) -> None:
    """Write a recipe that can be written; others are left out."""
    record = None if recipe is None else recipe.record
    if record is not None:
        _write_record(record, folder / RECIPE)


def _write_record(record: dict[str, Any], file: Path) -> None:
    with drafted(file) as draft:
        draft.write_text(record_text(record), encoding="utf-8")


def reading_of(
    args: Any, *, train_dataloader: Any, processing_class: Any = None, **_: Any
) -> dict[str, Any]:
    """How a trainer reads its texts: "eos" where the end token ends them, and DPO's "beta"."""
    reading: dict[str, Any] = {}
    end_token = getattr(processing_class, "eos_token_id", None)
    if end_with(train_dataloader, end_token):
        reading["eos"] = True
    beta = getattr(args, "beta", None)
    if isinstance(beta, float) and beta > 0:
        reading["beta"] = beta
    return reading


def end_with(loader: Any, token: int | None) -> bool:
    """Whether a token stands at the end of texts, as the first of them show.

    Padding does not count, and texts that were cut to the largest length may lack the token.
    """
    n_data = length_of(loader)
    if token is None or not n_data:
        return False
    with torch.random.fork_rng(devices=[]):
        rows = [loader.dataset[i] for i in range(min(ENDS_LOOKED_AT, n_data))]
    if not all(isinstance(row, Mapping) for row in rows):
        return False
    texts = [_without_padding(row, name) for row in rows for name in ID_COLUMNS if name in row]
    texts = [ids for ids in texts if ids]
    longest = max(map(len, texts), default=0)
    have_token = [ids[-1] == token for ids in texts]
    may_be_cut = [len(ids) == longest for ids in texts]
    return any(have_token) and all(map(or_, have_token, may_be_cut))


def _without_padding(row: Mapping[str, Any], name: str) -> list[int]:
    """The ids of a row that its attention mask does not hide."""
    ids = [int(i) for i in row[name]]
    mask = row.get("attention_mask")
    if name != "input_ids" or mask is None or len(mask) != len(ids):
        return ids
    return [i for i, is_shown in zip(ids, mask, strict=True) if is_shown]


def _recipe(
    args: Any,
    state: Any,
    step: int,
    *,
    optimizer: Any,
    model: nn.Module,
    train_dataloader: Any,
    lr_scheduler: Any = None,
    recorded_factors: list[float] | None = None,
    **_: Any,
) -> Recipe | None:
    """The recipe of a Trainer's training up to a step.

    Args:
        recorded_factors: the factor of the learning rate at each step; None where some step was
            not recorded.
    """
    microbatch = getattr(state, "train_batch_size", None) or args.train_batch_size
    missing = [name for name in UNREPEATED if getattr(args, name, None)]
    missing += [f"loss_type={name}" for name in losses_of(args) if name not in KNOWN_LOSSES]
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    factors = factors_of(lr_scheduler, step)
    if factors is None and (recorded_factors is None or schedule in BY_EVALUATION):
        missing.append(f"lr_scheduler_type={schedule}")
    return recipe_of(
        optimizer,
        model,
        steps=step,
        epochs=state.epoch * step / max(1, state.global_step),
        batch_size=microbatch * args.gradient_accumulation_steps * args.world_size,
        factors=factors or recorded_factors,
        max_grad_norm=args.max_grad_norm or None,
        n_data=length_of(train_dataloader),
        missing=missing,
    )


def losses_of(args: Any) -> list[str]:
    """The names of the losses in the arguments of TRL's trainers; none in those of others."""
    names = getattr(args, "loss_type", None) or []
    return [names] if isinstance(names, str) else list(names)


class BLRCallback(CheckpointsCallback):
    """Keep all that an analysis needs to know of a training. It works with any Trainer, TRL's too.

    It keeps checkpoints and the recipe, and records Kronecker factors while the model trains, so
    that no posterior has to be fitted.

        callback = BLRCallback()
        trainer = SFTTrainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
        task = callback.task(data, likelihood="causal_lm")
        blr.influence(task, callback.posterior(), test_task)

    Where checkpoints are written, the posterior is too, as ``_run/posterior.safetensors``, for
    ``blr-analysis index OUTPUT DATA -p OUTPUT/_run/posterior.safetensors``.

    Args:
        structure: "kron", or None: no factors are recorded.
        prior_precision: δ of the posterior; None: the evidence chooses it.
    """

    def __init__(self, *, structure: str | None = "kron", prior_precision: Any = None) -> None:
        super().__init__(structure=structure)
        self.prior_precision = prior_precision
        self._n_data: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the first weights; warn where factors cannot be recorded, and train all the same."""
        if self.structure is not None:
            fault = fault_of_recording(kwargs["model"], kwargs["train_dataloader"])
            if fault:
                self.record_none(fault)
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the recipe, and write the posterior where checkpoints are written."""
        super().on_train_end(args, state, control, **kwargs)
        self._n_data = length_of(kwargs["train_dataloader"])
        checkpoints = self.checkpoints
        if checkpoints is None or checkpoints.recordings is None or self._n_data is None:
            return
        if checkpoints.folder is not None:
            self.posterior().save(checkpoints.folder / POSTERIOR)

    def task(self, data: Any, **settings: Any) -> Task:
        """The task of the model that was trained, with its checkpoints and recipe.

        Args:
            settings: further arguments of :class:`blr_analysis.Task`.

        Raises:
            InputError: nothing was trained yet.
        """
        if self.checkpoints is None:
            raise InputError("nothing was trained yet: call trainer.train() first")
        settings.setdefault("checkpoints", self.checkpoints)
        settings.setdefault("recipe", self.recipe)
        return Task(self.checkpoints.model, data, **settings)

    def posterior(self, n_data: int | None = None) -> Posterior:
        """The posterior that was learned while the model trained, with the earlier posteriors.

        Args:
            n_data: N, where the training data have no length.

        Raises:
            InputError: nothing was trained yet, no factors were recorded, or N is missing.
        """
        if self.checkpoints is None:
            raise InputError("nothing was trained yet: call trainer.train() first")
        if self.structure is None:
            raise InputError("no factors were recorded: fit_laplace(callback.task(data))")
        n_data = n_data or self._n_data
        if n_data is None:
            raise InputError("the training data have no length: pass n_data=, their number")
        q = self.checkpoints.posterior(n_data=n_data, prior_precision=self.prior_precision)
        if self.recipe is not None:
            q = q.changed(record={**q.record, "recipe": self.recipe.record})
        return q


class MonitorCallback(MonitoredTraining, TrainerCallback):
    """Let a :class:`blr_analysis.Monitor` look at the model after every epoch.

    Its rows are in ``monitor.table``; their losses and accuracies (``loo_nll`` and the like) are
    also in the Trainer's ``log_history``. The monitor's task must be that of the trained model.

    The training itself is not changed. The monitor's state is saved in every checkpoint's
    ``trainer_state.json``. A run that is resumed goes on from there, and ends with the same bits.

        monitor = blr.Monitor(blr.Task(model, data), test=test_task, examples=200)
        trainer = IVONTrainer(model, args, train_dataset=data, callbacks=[MonitorCallback(monitor)])

    With the Trainer's ``log`` they also reach TensorBoard, Weights & Biases and the like:

        trainer.add_callback(MonitorCallback(monitor, log=trainer.log))

    Args:
        monitor: made with a task of the model that is trained.
        log: a function of a row, such as ``trainer.log``. None: an :class:`IVONTrainer` uses its
            own ``log``; with other trainers the rows go to ``log_history`` alone.
        posterior_settings: without any, the monitor fits a posterior after every epoch, whose
            estimate follows the loss on new data. With further arguments of
            :meth:`blr_analysis.Posterior.from_optimizer` (``n_data``, ``prior_precision``), and for
            sequences always, it looks at the optimizer's posterior, which costs no pass over the
            data and ranks examples.

    Raises:
        InputError: when training begins, if the monitor has watched another run.
    """

    def __init__(
        self,
        monitor: Monitor,
        *,
        log: Callable[[dict[str, float]], None] | None = None,
        **posterior_settings: Any,
    ) -> None:
        super().__init__(monitor, **posterior_settings)
        self.log = log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the monitor of a resumed run; refuse one that has watched another run."""
        saved = state.stateful_callbacks.get(SAVED)
        if saved:
            self.monitor.load_state_dict(json.loads(saved))
        self.monitor.check_epoch(int(state.epoch or 0) + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a row to the monitor at the end of an epoch that is due, before the Trainer saves."""
        is_end_of_epoch = state.epoch == round(state.epoch)
        if not is_end_of_epoch:
            return
        row = self.look(kwargs["optimizer"], round(state.epoch))
        if row and self.log is not None:
            self.log(row)
        elif row:
            state.log_history.append({**row, "epoch": state.epoch, "step": state.global_step})
        monitor_state = self.monitor.state_dict()
        state.stateful_callbacks[SAVED] = json.dumps(monitor_state, default=Tensor.tolist)


def flattens(loader: Any) -> bool:
    """Whether a loader packs several examples into one row, as two of them show."""
    n_data = length_of(loader)
    if n_data is None or n_data < 2:
        return False
    with torch.random.fork_rng(devices=[]):
        batch = loader.collate_fn([loader.dataset[i] for i in range(2)])
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return isinstance(ids, Tensor) and len(ids) == 1


def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The loss that a model computes of a batch.

    Raises:
        ModelError: it computes none; the trainer has a loss of its own, as for DPO.
    """
    try:
        loss = model(**batch)["loss"]
    except (KeyError, TypeError):
        loss = None
    if loss is None:
        raise ModelError("the loss is computed by the trainer, not by the model")
    return loss


def fault_of_recording(model: nn.Module, loader: Any) -> str:
    """Why factors cannot be recorded, as a forward and backward pass of two examples shows.

    Returns:
        The fault; "" where they can be recorded, or where the data have no length.
    """
    n_data = length_of(loader)
    if n_data is None:
        return ""
    rows = [loader.dataset[i] for i in range(min(2, n_data))]
    device = next(model.parameters()).device
    modes = modes_of(model)
    recorder = None
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            batch = to_device(loader.collate_fn(rows), device)
            for module in model.modules():
                module.training = not isinstance(module, _NormBase)  # running statistics stay
            recorder = KroneckerRecorder(unwrapped(model), every=1, labels="drawn")
            loss_of(model, batch).backward()
            recorder.state_dict()
    except ModelError as error:
        return str(error)
    finally:
        if recorder is not None:
            recorder.remove()
        model.zero_grad()
        for name, module in model.named_modules():
            module.training = modes[name]
    return ""
