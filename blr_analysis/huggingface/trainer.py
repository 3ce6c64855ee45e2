"""Hugging Face's Trainer with IVON, and callbacks that write precisions or watch a training."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.errors import InputError
from blr_analysis.files import drafted
from blr_analysis.files.headers import record_text
from blr_analysis.huggingface.questions import IGNORED
from blr_analysis.huggingface.recording import (
    Kept,
    Watching,
    factors_of,
    length_of,
    recipe_of,
)
from blr_analysis.learning_rule.optim import BSAM, IVON
from blr_analysis.posterior import Posterior, write_captured
from blr_analysis.posterior.capture import from_optimizer, reader_of, unwrap
from blr_analysis.recipe import Recipe
from blr_analysis.runs import RUN, TOLD

SMALL = 1e-3  # a learning rate below is not meant for IVON
BY_TOKEN = {"ForCausalLM": 1, "ForMaskedLM": 0, "ForTokenClassification": 0}  # first label counted
BY_OUTPUT = {f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio")}
UNREPEATED = ("label_smoothing_factor", "neftune_noise_alpha", "fp16", "bf16")
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")  # schedules that look at losses
SAVED = "blr_analysis.Monitor"
"""Its name among the states of callbacks in ``trainer_state.json``."""


class TrainerPrecision(TrainerCallback):
    """Write the precision that the optimizer has learned into each ``checkpoint-*/precision``, to
    merge models with: the data's part N·√v̂ of Adam and its relatives, IVON's S with its prior.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[TrainerPrecision()])
        trainer.train()                    # checkpoint-500/precision, checkpoint-1000/precision …

    Args:
        n_data: N, where it is not the length of the training data: a dataset without a length,
            or a loss that is a mean over tokens (then N is the number of tokens).

    Raises:
        OptimizerError: when training begins, of an optimizer that keeps no precision; at a save,
            of one that no precision can be read from.
    """

    def __init__(self, *, n_data: int | None = None) -> None:
        self.n_data = n_data

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what could not be written later."""
        reader_of(unwrap(kwargs["optimizer"]))
        if self.n_data is None and length_of(kwargs["train_dataloader"]) is None:
            raise InputError("the training data have no length: pass n_data=, their number")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write beside what the Trainer has just saved."""
        optimizer = unwrap(kwargs["optimizer"])
        how: Any = {"n_data": self.n_data or length_of(kwargs["train_dataloader"]), "bare": True}
        how["scaling"] = "ess" if reader_of(optimizer).scaled else "sqrt"
        captured = from_optimizer(optimizer, kwargs["model"], **how)
        recipe = _recipe(args, state, state.global_step, **kwargs)
        about = {"source": "training", "recipe": recipe and recipe.record}
        if args.should_save:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            beside = folder if any(folder.glob("model.safetensors*")) else None  # none of adapters
            write_captured(folder / "precision", captured, model=beside, **about)


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
            known: Any = {"steps": state.max_steps, "folder": folder}
            self.begin(kwargs["model"], kwargs["optimizer"], state.global_step, **known)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rate, of schedules that are no formula of the step."""
        self.look_at_rate(kwargs["optimizer"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After each step of the optimizer."""
        if self.checkpoints is not None:
            self.checkpoints.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The recipe so far, into the checkpoint."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if self.checkpoints is not None and folder.is_dir():
            seen = self.factors(state.global_step)
            _tell(_recipe(args, state, state.global_step, seen=seen, **kwargs), folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The recipe, and no more checkpoints than are wanted."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        step = int(best.rpartition("-")[2]) if best else state.global_step
        self.end(_recipe(args, state, step, seen=self.factors(step), **kwargs))
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            _tell(self._told, self.checkpoints.folder)


def _tell(recipe: Recipe | None, folder: Path) -> None:
    record = None if recipe is None else recipe.record
    if record is not None:
        with drafted(folder / TOLD) as draft:
            draft.write_text(record_text(record), encoding="utf-8")


def _recipe(
    args: Any, state: Any, step: int, *, seen: list[float] | None = None, **known: Any
) -> Recipe | None:
    """The recipe of a Trainer's training up to a step; ``seen``: the factor of the rate before."""
    microbatch = getattr(state, "train_batch_size", None) or args.train_batch_size
    factors = factors_of(known.get("lr_scheduler"), step)
    missing = [name for name in UNREPEATED if getattr(args, name, None)]
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if factors is None and (seen is None or schedule in BY_EVALUATION):
        missing.append(f"lr_scheduler_type={schedule}")
    return recipe_of(
        known["optimizer"],
        known["model"],
        steps=step,
        epochs=state.epoch * step / max(1, state.global_step),
        batch_size=microbatch * args.gradient_accumulation_steps * args.world_size,
        factors=factors or seen,
        max_grad_norm=args.max_grad_norm or None,
        n_data=length_of(known["train_dataloader"]),
        missing=missing,
    )


class MonitorCallback(Watching, TrainerCallback):
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The epochs before, where this run is resumed; another run's monitor is refused."""
        if saved := state.stateful_callbacks.get(SAVED):
            self.monitor.load_state_dict(json.loads(saved))
        self.monitor.check_epoch(int(state.epoch or 0) + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row of the monitor, where an epoch ends and is due; before the Trainer saves."""
        if state.epoch != round(state.epoch):
            return
        if row := self.look(kwargs["optimizer"], round(state.epoch)):
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
        own: Any = unwrap(self.optimizer)
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
        args, n = self.args, self._terms()
        if n is None:
            given = "optimizers=(IVON(..., ess=N), None)"
            raise InputError(f"the training data have no length: give {given}")
        if args.learning_rate < SMALL:
            said = f"learning_rate={args.learning_rate:g} is Adam's; IVON's are 0.01 to 0.5"
            warnings.warn(said, stacklevel=2)
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
        """How many labels the mean of the loss is over; None of data without a length."""
        model: Any = self.accelerator.unwrap_model(self.model)
        data, kind = self.train_dataset, getattr(model, "loss_type", "")
        if self._counted is None and hasattr(data, "__len__"):
            self._counted = len(data)  # type: ignore[arg-type]
            with torch.random.fork_rng(devices=[]):  # so that training draws what it would have
                batches = self.get_eval_dataloader(data)  # type: ignore[arg-type]
                if kind in BY_OUTPUT:
                    self._counted *= next(iter(batches))["labels"][0].numel()
                elif kind in BY_TOKEN:
                    labels = (batch["labels"][:, BY_TOKEN[kind] :] for batch in batches)
                    count = sum((y != IGNORED).sum() for y in labels)
                    self._counted = int(self.accelerator.reduce(count))  # type: ignore[arg-type]
        return self._counted

    def posterior(self) -> Posterior:
        """The diagonal posterior that training has learned, with the earlier ones and its recipe;
        after ``load_best_model_at_end`` that of the best checkpoint.

        Raises:
            StorageError: that checkpoint has no optimizer's state any more.
            OptimizerError: nothing is trained yet, there is no optimizer.
        """
        own = unwrap(self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        size, terms = own.param_groups[0].get("ess", math.nan), self._terms()
        by: dict[str, Any] = {}
        if terms is not None and math.isclose(size, terms, rel_tol=1e-6):
            n = len(self.train_dataset)  # type: ignore[arg-type]
            by = {"n_data": n} if n == terms else {"n_data": n, "tokens": terms}
        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint

        def now() -> Posterior:
            return Posterior.from_optimizer(own, model, **by)

        q = Posterior.from_checkpoint(best, model, **by) if best else now()
        if self.checkpoints is not None:
            q = self.checkpoints.before(q, now)
        if self.recipe is not None:
            q = q.changed(record={**q.record, "recipe": self.recipe.record})
        return q
