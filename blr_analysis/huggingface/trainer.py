"""Hugging Face's Trainer with IVON, and callbacks that write precisions or watch a training."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.errors import BLRError, InputError, OptimizerError, StorageError
from blr_analysis.files import drafted
from blr_analysis.huggingface.questions import IGNORED
from blr_analysis.huggingface.recording import (
    FOLDER,
    RUN,
    SHARDED,
    TOLD,
    Kept,
    check_learns,
    look,
    recipe_of,
    write_learned,
)
from blr_analysis.learning_rule.optim import BSAM, IVON
from blr_analysis.posterior import Posterior, n_data_of
from blr_analysis.posterior.capture import unwrap
from blr_analysis.recipe import Recipe
from blr_analysis.sensitivity import Monitor

SMALL = 1e-3  # a learning rate below is not meant for IVON
BY_TOKEN = {"ForCausalLM": 1, "ForMaskedLM": 0, "ForTokenClassification": 0}  # first label counted
BY_OUTPUT = {f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio")}
SCHEDULES = {"constant": None, "constant_with_warmup": None, "cosine": "cosine"}
SAVED = "blr_analysis.Monitor"
"""Its name among the states of callbacks in ``trainer_state.json``."""


class TrainerPrecision(TrainerCallback):
    """Write the precision that the optimizer has learned into each ``checkpoint-*/precision``.

    What is stored is the data's part H, N·√v̂ for Adam and its relatives, as bare numbers to merge
    models with; for IVON its S with the prior in it. The record has the recipe and the parameters'
    names in the optimizer's order. ``Posterior.load(precision, model=checkpoint)`` makes a
    posterior of it, with δ = N·weight_decay, which AdamW's decoupled decay is not exactly (the
    record's ``prior_from`` says so).

    What cannot work is refused when training begins. What goes wrong at a save is a warning, and
    training goes on.

    Args:
        n_data: N, where it is not the length of the training data: a dataset without a length,
            or a loss that is a mean over tokens (then N is the number of tokens).

    Raises:
        OptimizerError, InputError: when training begins, see above.

    Example::

        callback = TrainerPrecision()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()                    # checkpoint-500/precision, checkpoint-1000/precision …
        trainer.save_model("fine-tuned")
        callback.save("fine-tuned")        # fine-tuned/precision
    """

    def __init__(self, *, n_data: int | None = None) -> None:
        self.n_data = None if n_data is None else n_data_of(n_data)
        self._best: str | None = None
        self._run: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what could not be written later."""
        self._best = None
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise OptimizerError(
                f"with FSDP or DeepSpeed the optimizer's state is in pieces: {SHARDED}"
            )
        optimizer, data = unwrap(kwargs["optimizer"]), kwargs["train_dataloader"].dataset
        if self.n_data is None and not hasattr(data, "__len__"):
            raise InputError("the training data have no length: pass n_data=, their number")
        check_learns(optimizer, kwargs["model"])
        n = self.n_data or len(data)
        self._run = {"optimizer": optimizer, "model": kwargs["model"], "n_data": n}
        self._run["batch_size"] = batch_size_of(args)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write beside what the Trainer has just saved."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._tell(_recipe(args, state, state.global_step, **kwargs))
        try:
            if args.should_save:
                self.save(folder)
        except BLRError as error:
            said = f"no precision was written to {str(folder)!r}: {error}"
            warnings.warn(said, stacklevel=2)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note whether the weights are the best checkpoint's from here on."""
        self._tell(_recipe(args, state, state.global_step, **kwargs))
        if args.load_best_model_at_end and state.best_model_checkpoint:
            self._best = state.best_model_checkpoint

    def _tell(self, recipe: Recipe | None) -> None:
        if recipe is not None and self._run is not None:
            self._run["recipe"] = recipe.record

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``folder/precision``, for a model that was saved to ``folder`` after training.

        Raises:
            OptimizerError: no training has begun, or the weights are no longer those that the
                optimizer left (``load_best_model_at_end``).
            StorageError: the place cannot be written.
        """
        place = Path(folder).expanduser() / FOLDER
        if not place.parent.is_dir():
            raise StorageError(f"there is no folder {str(folder)!r}: save the model there first.")
        if self._run is None:
            raise OptimizerError("no training has begun: give the callback to the trainer, train")
        if self._best is not None:
            raise OptimizerError(
                f"the weights are those of {self._best!r} (load_best_model_at_end), the "
                f"optimizer's state is later: copy {str(Path(self._best) / FOLDER)!r} instead."
            )
        write_learned(place, **self._run)
        return place


class CheckpointsCallback(Kept, TrainerCallback):
    """Keep a training's checkpoints and its recipe, for its :class:`blr_analysis.Task`.

    They are written to ``_run`` in the Trainer's output folder, where ``blr-analysis`` finds them,
    unless ``save_strategy="no"``: the first weights, those of about 1/8, 1/4 and 1/2 of the steps
    with the precision learned by then, and ``recipe.json``, which is in each ``checkpoint-*`` too.
    :class:`IVONTrainer` has one. Of several processes the first keeps them; of divided weights none
    are kept.

        callback = CheckpointsCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
        task = blr.Task(model, data, checkpoints=callback.checkpoints, recipe=callback.recipe)

    Args:
        checkpoints: your own, for instance with ``structure="kron"``.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first weights, or where a run is resumed."""
        if state.is_world_process_zero:
            folder = None if args.save_strategy == "no" else Path(args.output_dir, RUN)
            known: Any = {"steps": state.max_steps, "done": state.global_step, "folder": folder}
            self.begin(kwargs["model"], kwargs["optimizer"], **known)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each step of the optimizer."""
        if self.checkpoints is not None:
            self.checkpoints.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The recipe so far, into the checkpoint."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if self.checkpoints is not None and folder.is_dir():
            _tell(_recipe(args, state, state.global_step, **kwargs), folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The recipe, and no more checkpoints than are wanted."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        step = int(best.rpartition("-")[2]) if best else state.global_step
        self.end(_recipe(args, state, step, **kwargs))
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            _tell(self._told, self.checkpoints.folder)


def _tell(recipe: Recipe | None, folder: Path) -> None:
    if recipe is not None:
        with drafted(folder / TOLD) as draft:
            draft.write_text(json.dumps(recipe.record), encoding="utf-8")


def batch_size_of(args: Any) -> int:
    """Examples of a Trainer's step."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def _recipe(args: Any, state: Any, step: int, **known: Any) -> Recipe | None:
    """The recipe of a Trainer's training up to a step."""
    data: Any = getattr(known["train_dataloader"], "dataset", None)
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    return recipe_of(
        known["optimizer"],
        epochs=state.epoch * step / max(1, state.global_step),
        batch_size=batch_size_of(args),
        schedule=SCHEDULES.get(schedule, "linear"),
        n_data=len(data) if hasattr(data, "__len__") else None,
    )


class MonitorCallback(TrainerCallback):
    """Let a :class:`blr_analysis.Monitor` look at the model after every epoch.

    What it finds is in ``monitor.table`` and, as ``loo_nll`` and the like, in the Trainer's
    ``log_history``. The task is that of the model that is trained. It disturbs nothing: a run that
    is resumed ends with the same bits. What the monitor holds is in every checkpoint's
    ``trainer_state.json``, and a run that is resumed goes on from there.

        monitor = blr.Monitor(blr.Task(model, data), test=test_task, examples=200)
        trainer = IVONTrainer(model, args, train_dataset=data, callbacks=[MonitorCallback(monitor)])

    Args:
        monitor: made with a task of the model that is trained.
        known: what :meth:`blr_analysis.Posterior.from_optimizer` asks for beside optimizer and
            model: ``n_data`` and ``prior_precision`` of Adam; nothing of IVON.

    Raises:
        InputError: when training begins, of a monitor that has watched another run.
    """

    def __init__(self, monitor: Monitor, **known: Any) -> None:
        self.monitor = monitor
        self.known = known

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The epochs before, where this run is resumed; another run's monitor is refused."""
        saved = state.stateful_callbacks.get(SAVED)
        if saved is not None:
            known = json.loads(saved)
            known["indices"] = torch.tensor(known["indices"])
            for name, column in known["rows"].items():
                known["rows"][name] = torch.tensor(column, dtype=torch.float64)
            for name, values in known["kept"].items():
                kept = torch.tensor(values, dtype=torch.float32)
                known["kept"][name] = kept.reshape(-1, len(known["indices"]))
            self.monitor.load_state_dict(known)
        self.monitor.check_epoch(int(state.epoch or 0) + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row of the monitor, where an epoch ends and is due; before the Trainer saves."""
        if state.epoch != round(state.epoch):
            return
        row = look(self.monitor, kwargs["optimizer"], round(state.epoch), self.known)
        if row:
            state.log_history.append({**row, "epoch": state.epoch, "step": state.global_step})
        recorded = self.monitor.state_dict()
        state.stateful_callbacks[SAVED] = json.dumps(recorded, default=Tensor.tolist)


class VariationalTrainer:
    """For any Trainer, before it in the bases: ``class Mine(VariationalTrainer, SFTTrainer): ...``

    Draws weights for each microbatch, and keeps the gradient's scale: the Trainer divides each
    loss by the number of microbatches. Clipping, mixed precision and evaluation, which is at the
    mean, are the Trainer's own. The optimizer is any of ``blr_analysis.learning_rule.optim`` that
    has ``sampled_params``, given as ``optimizers=(optimizer, None)``.
    """

    optimizer: Any
    current_gradient_accumulation_steps: int

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """A forward and backward pass at drawn weights, of the microbatch's own mean loss.

        ``num_items_in_batch`` is not handed on: not every model that takes it divides by it.
        """
        own = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        if not hasattr(own, "sampled_params"):
            raise InputError(f"{type(own).__name__} draws no weights; give IVON, VOGN or Vadam")
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = getattr(self, "compute_loss_func", None) is not None
        count = 1 if scaled else self.current_gradient_accumulation_steps
        with own.sampled_params(train=True, divided_by=count):
            loss = super().training_step(model, inputs)  # type: ignore[misc]
        if isinstance(own, BSAM):
            with own.adversarial_params(divided_by=count):
                super().training_step(model, inputs)  # type: ignore[misc]
        return loss


class IVONTrainer(VariationalTrainer, Trainer):
    """``Trainer`` that trains with IVON: two lines of a script change, this name and the rate.

    The optimizer is made from the arguments: ``lr=learning_rate`` (as SGD's: 0.01 to 0.5, not the
    default of 5e-5), ``ess`` the number of training examples, or of the tokens that count where the
    loss is a mean over tokens (one pass over the data counts them), or of examples times outputs
    where it is one over both (several labels or targets), ``weight_decay``, or 1/ess
    where it is 0, ``hess_init="weights"``, so that few examples suffice to fine-tune, and ``steps``
    the length of the training, see the guide to IVON.

        from blr_analysis.huggingface import IVONTrainer
        trainer = IVONTrainer(model, TrainingArguments(out, learning_rate=0.1), train_dataset=data)
        trainer.train()
        posterior = trainer.posterior()
        task = blr.Task(model, data, checkpoints=trainer.checkpoints, recipe=trainer.recipe)

    Raises:
        InputError: when training begins, of data without a length.
    """

    _counted: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = self.callback_handler.callbacks
        own = next((c for c in given if isinstance(c, CheckpointsCallback)), None)
        self.kept = own or CheckpointsCallback()
        if own is None:
            self.add_callback(self.kept)

    @property
    def checkpoints(self) -> Checkpoints | None:
        """Those of the training, for :class:`blr_analysis.Task`."""
        return self.kept.checkpoints

    @property
    def recipe(self) -> Recipe | None:
        """That of the training up to the weights that were kept, for :class:`blr_analysis.Task`."""
        return self.kept.recipe

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """IVON over the parameters that are trained, unless an optimizer was given."""
        if self.optimizer is not None:
            return self.optimizer
        data, args = self.train_dataset, self.args
        if not hasattr(data, "__len__"):
            given = "optimizers=(IVON(..., ess=N), None)"
            raise InputError(f"the training data have no length: give {given}")
        n = self._terms() or len(data)  # type: ignore[arg-type]
        if args.learning_rate < SMALL:
            warnings.warn(
                f"learning_rate={args.learning_rate:g} is Adam's; IVON's are 0.01 to 0.5",
                stacklevel=2,
            )
        trained: Any = model or self.model
        self.optimizer = IVON(
            [p for p in trained.parameters() if p.requires_grad],
            lr=args.learning_rate,
            ess=n,
            hess_init="weights",
            weight_decay=args.weight_decay or 1 / n,
            steps=self._length(),
        )
        return self.optimizer

    def _length(self) -> int:
        """How many steps the training takes."""
        args: Any = self.args
        if args.max_steps > 0:
            return args.max_steps
        each = math.ceil(len(self.get_train_dataloader()) / args.gradient_accumulation_steps)
        return max(1, math.ceil(args.num_train_epochs * each))

    def _terms(self) -> int | None:
        """How many labels the mean of the loss is over; None where it is over examples."""
        model: Any = self.accelerator.unwrap_model(self.model)
        data, kind = self.train_dataset, getattr(model, "loss_type", "")
        outputs = kind in BY_OUTPUT and model.config.num_labels > 1
        if not hasattr(data, "__len__") or not (outputs or kind in BY_TOKEN):
            return None
        with torch.random.fork_rng(devices=[]):  # so that training draws what it would have
            batches = self.get_eval_dataloader(data)  # type: ignore[arg-type]
            if outputs:
                problem = model.config.problem_type
                if problem is None:  # as the model's first batch will tell
                    several = next(iter(batches))["labels"].is_floating_point()
                else:
                    several = problem != "single_label_classification"
                return len(data) * model.config.num_labels if several else None  # type: ignore[arg-type]
            if self._counted is None:
                labels = (batch["labels"][:, BY_TOKEN[kind] :] for batch in batches)
                count = sum((y != IGNORED).sum() for y in labels)
                self._counted = int(self.accelerator.reduce(count))  # type: ignore[arg-type]
        return self._counted

    def posterior(self) -> Posterior:
        """The diagonal posterior that training has learned, with the earlier ones and its recipe;
        after ``load_best_model_at_end`` that of the best checkpoint.

        Raises:
            StorageError: that checkpoint has no optimizer's state any more.
            OptimizerError: nothing is trained yet.
        """
        if self.optimizer is None:
            raise OptimizerError("nothing is trained yet: call train() first")
        own: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        size, terms = own.param_groups[0].get("ess"), self._terms()
        by: dict[str, Any] = {}
        if terms is not None and size is not None and math.isclose(size, terms, rel_tol=1e-6):
            by = {"n_data": len(self.train_dataset), "tokens": terms}  # type: ignore[arg-type]
        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint

        def now() -> Posterior:
            return Posterior.from_optimizer(own, model, **by)

        q = Posterior.from_checkpoint(best, model, **by) if best else now()
        if self.checkpoints is not None:
            q = self.checkpoints.before(q, now)
        if (recipe := self.recipe) is not None:
            q.record["recipe"] = recipe.record
        return q
