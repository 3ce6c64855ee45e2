"""Hugging Face's Trainer with IVON, and callbacks that write precisions or watch a training."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import Trainer, TrainerCallback

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.checks import at_least
from blr_analysis.data.batches import to_device
from blr_analysis.errors import InputError, ModelError
from blr_analysis.files import drafted
from blr_analysis.files.headers import record_text
from blr_analysis.huggingface.chats import IGNORED
from blr_analysis.huggingface.evaluation import BY_TOKEN, averaged_loss, perplexity
from blr_analysis.huggingface.recording import (
    Kept,
    Watching,
    factors_of,
    length_of,
    recipe_of,
)
from blr_analysis.learning_rule.optim import BSAM, IVON
from blr_analysis.models import unwrapped
from blr_analysis.modes import modes_of
from blr_analysis.posterior import (
    KroneckerRecorder,
    Posterior,
    is_recordable,
    write_captured,
)
from blr_analysis.posterior.capture import from_optimizer, reader_of, unwrap
from blr_analysis.recipe import Recipe
from blr_analysis.runs import RECIPE, RUN
from blr_analysis.sensitivity import Monitor
from blr_analysis.task import Task

SMALL = 1e-3  # a learning rate below is not meant for IVON
BY_OUTPUT = {f"For{kind}Classification" for kind in ("Sequence", "Image", "Video", "Audio")}
UNREPEATED = ("label_smoothing_factor", "neftune_noise_alpha", "fp16", "bf16")
OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")  # not of IVON
RECORDED = "blr_recorded.safetensors"  # in a checkpoint: the sums of recorded factors
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


class CheckpointsCallback(Kept, TrainerCallback):
    """Keep a training's checkpoints and its recipe, for its :class:`blr_analysis.Task`.

    They are written to ``_run`` in the Trainer's output folder, where ``blr-analysis`` finds them,
    or stay in memory with ``save_strategy="no"``: the first weights, those of about 1/8, 1/4 and
    1/2 of the steps
    with the precision learned by then, and ``recipe.json``, which is in each ``checkpoint-*`` too.
    :class:`IVONTrainer` has one. Of several processes the first keeps them; of divided weights none
    are kept.

        callback = CheckpointsCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
        task = blr.Task(model, data, checkpoints=callback.checkpoints, recipe=callback.recipe)

    Args:
        checkpoints: your own.
        structure: "kron": Kronecker factors are recorded while it trains.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the first weights, or find those of the run that is resumed."""
        if not state.is_world_process_zero:
            return
        folder = None if args.save_strategy == "no" else Path(args.output_dir, RUN)
        self.begin(
            kwargs["model"],
            kwargs["optimizer"],
            state.global_step,
            steps=state.max_steps,
            folder=folder,
        )
        recordings = self.checkpoints.recordings if self.checkpoints is not None else None
        recorded = _checkpoint_folder(args, state) / RECORDED
        if recordings is not None and state.global_step > 0 and recorded.exists():
            recordings.resume(recorded, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the rate, whose schedule may be no formula of the step."""
        self.record_rate(kwargs["optimizer"], state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the checkpoints of each step of the optimizer."""
        if self.checkpoints is not None:
            self.checkpoints.step()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the recipe so far into the checkpoint, and what was recorded."""
        folder = _checkpoint_folder(args, state)
        if self.checkpoints is not None and folder.is_dir():
            if self.checkpoints.recordings is not None:
                self.checkpoints.recordings.keep(folder / RECORDED)
            factors = self.rate_factors(state.global_step)
            recipe = _recipe(args, state, state.global_step, recorded_factors=factors, **kwargs)
            _write_recipe(recipe, folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the recipe of the weights that the Trainer ends with."""
        step = state.global_step
        if args.load_best_model_at_end and state.best_model_checkpoint:
            step = int(state.best_model_checkpoint.rpartition("-")[2])
        factors = self.rate_factors(step)
        recipe = _recipe(args, state, step, recorded_factors=factors, **kwargs)
        self.end(recipe)
        if self.checkpoints is not None and self.checkpoints.folder is not None:
            _write_recipe(recipe, self.checkpoints.folder)


def _checkpoint_folder(args: Any, state: Any) -> Path:
    """Where the Trainer writes the checkpoint of this step."""
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def _write_recipe(recipe: Recipe | None, folder: Path) -> None:
    record = None if recipe is None else recipe.record
    if record is not None:
        with drafted(folder / RECIPE) as draft:
            draft.write_text(record_text(record), encoding="utf-8")


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
        recorded_factors: by what the rate was multiplied at each step, where all were seen.
    """
    microbatch = getattr(state, "train_batch_size", None) or args.train_batch_size
    missing = [name for name in UNREPEATED if getattr(args, name, None)]
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


class BLRCallback(CheckpointsCallback):
    """All that an analysis asks of a training, of any Trainer, TRL's too: checkpoints, the recipe,
    and the Kronecker factors that are recorded while it trains, so that nothing need be fitted.

        callback = BLRCallback()
        trainer = SFTTrainer(model, args, train_dataset=data, callbacks=[callback])
        trainer.train()
        task = callback.task(data, likelihood="causal_lm")
        blr.influence(task, callback.posterior(), test_task)

    Where checkpoints are written, the posterior is too, as ``_run/posterior.safetensors``, for
    ``blr-analysis index OUTPUT DATA -p OUTPUT/_run/posterior.safetensors``.

    Args:
        structure: "kron", or None: no factors are recorded.
        prior_precision: δ of the posterior; None: it is found by the evidence.
    """

    def __init__(self, *, structure: str | None = "kron", prior_precision: Any = None) -> None:
        super().__init__(structure=structure)
        self.prior_precision = prior_precision
        self._n_data: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the first weights; a model that cannot be recorded is trained all the same."""
        if self.structure is not None:
            fault = fault_of_recording(kwargs["model"], kwargs["train_dataloader"])
            if fault:
                warnings.warn(f"no factors are recorded: {fault}", stacklevel=2)
                self.structure = None
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the recipe, and write the posterior where checkpoints are written."""
        super().on_train_end(args, state, control, **kwargs)
        self._n_data = length_of(kwargs["train_dataloader"])
        checkpoints = self.checkpoints
        if checkpoints is None or checkpoints.recordings is None or self._n_data is None:
            return
        if checkpoints.folder is not None:
            self.posterior().save(checkpoints.folder / "posterior.safetensors")

    def task(self, data: Any, **settings: Any) -> Task:
        """The task of the model that was trained, with its checkpoints and recipe.

        Args:
            settings: what else :class:`blr_analysis.Task` takes.

        Raises:
            InputError: nothing was trained yet.
        """
        if self.checkpoints is None:
            raise InputError("nothing was trained yet: call trainer.train() first")
        settings.setdefault("checkpoints", self.checkpoints)
        settings.setdefault("recipe", self.recipe)
        return Task(self.checkpoints.model, data, **settings)

    def posterior(self, n_data: int | None = None) -> Posterior:
        """What was learned while it trained, with the earlier posteriors.

        Args:
            n_data: N, where the training data have no length.

        Raises:
            InputError: nothing was trained yet, no factors were recorded, or N is not known.
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


class MonitorCallback(Watching, TrainerCallback):
    """Let a :class:`blr_analysis.Monitor` look at the model after every epoch.

    What it finds is in ``monitor.table`` and, as ``loo_nll`` and the like, in the Trainer's
    ``log_history``. The task is that of the model that is trained. It disturbs nothing: a run that
    is resumed ends with the same bits. What the monitor holds is in every checkpoint's
    ``trainer_state.json``, and a run that is resumed goes on from there.

        monitor = blr.Monitor(blr.Task(model, data), test=test_task, examples=200)
        trainer = IVONTrainer(model, args, train_dataset=data, callbacks=[MonitorCallback(monitor)])

    Through a Trainer's ``log`` they get to TensorBoard, Weights & Biases and the like, too:

        trainer.add_callback(MonitorCallback(monitor, log=trainer.log))

    Args:
        monitor: made with a task of the model that is trained.
        log: takes each row, ``trainer.log``; None: an :class:`IVONTrainer`'s own.
        posterior_settings: what :meth:`blr_analysis.Posterior.from_optimizer` asks for beside
            optimizer and model: ``n_data`` and ``prior_precision`` of Adam; nothing of IVON.

    Raises:
        InputError: when training begins, of a monitor that has watched another run.
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
        """Go on where a resumed run was; refuse a monitor that has watched another run."""
        saved = state.stateful_callbacks.get(SAVED)
        if saved:
            self.monitor.load_state_dict(json.loads(saved))
        self.monitor.check_epoch(int(state.epoch or 0) + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a row to the monitor where an epoch ends and is due, before the Trainer saves."""
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


class VariationalTrainer:
    """For any Trainer, before it in the bases: ``class Mine(VariationalTrainer, SFTTrainer): ...``

    Draws weights for each microbatch, and keeps the gradient's scale: the Trainer divides each
    loss by the number of microbatches. Clipping, mixed precision and evaluation, which is at the
    mean, are the Trainer's own. The optimizer is any of ``blr_analysis.learning_rule.optim`` that
    has ``sampled_params``, given as ``optimizers=(optimizer, None)``.
    """

    optimizer: Any
    accelerator: Any
    current_gradient_accumulation_steps: int

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with ``eval_perplexity`` where the loss is a mean over tokens."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        model: Any = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        if getattr(model, "loss_type", "") not in BY_TOKEN:
            return output
        losses = {k: v for k, v in (output.metrics or {}).items() if k.endswith("_loss")}
        for name, loss in losses.items():
            output.metrics[f"{name.removesuffix('_loss')}_perplexity"] = perplexity(loss)
        return output

    def evaluate(self, *args: Any, draws: int = 0, **kwargs: Any) -> dict[str, float]:
        """The Trainer's evaluation at the mean; with ``draws``, ``eval_averaged_loss`` too, the
        loss of predictions that are averaged over so many draws of the weights, and its perplexity.

        Raises:
            InputError: with ``draws``, of several processes, of a model whose answers are no
                classes or tokens, or of several evaluation sets at once.
        """
        at_least(0, "draws", draws)
        metrics = super().evaluate(*args, **kwargs)  # type: ignore[misc]
        if draws:
            data = args[0] if args else kwargs.get("eval_dataset")
            prefix = kwargs.get("metric_key_prefix", "eval")
            averaged = self._averaged(data, draws, prefix)
            self.log(averaged)  # type: ignore[attr-defined]
            metrics = {**metrics, **averaged}
        return metrics

    def _averaged(self, data: Any, draws: int, prefix: str) -> dict[str, float]:
        """The loss of averaged predictions, and of tokens its perplexity."""
        optimizer = self._drawing_optimizer()
        if self.accelerator.num_processes > 1:
            raise InputError("draws= evaluates in one process: leave it out under torchrun")
        data = self.eval_dataset if data is None else data  # type: ignore[attr-defined]
        if isinstance(data, Mapping):
            raise InputError("draws= takes one evaluation set: pass eval_dataset=")
        batches = self.get_eval_dataloader(data)  # type: ignore[attr-defined]
        model = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        was_training = model.training
        model.eval()
        try:
            loss = averaged_loss(model, batches, optimizer.sampled_params, draws)
        finally:
            model.train(was_training)
        averaged = {f"{prefix}_averaged_loss": loss}
        if getattr(model, "loss_type", "") in BY_TOKEN:
            averaged[f"{prefix}_averaged_perplexity"] = perplexity(loss)
        return averaged

    def _drawing_optimizer(self) -> Any:
        optimizer: Any = unwrap(self.optimizer)
        if not hasattr(optimizer, "sampled_params"):
            name = type(optimizer).__name__
            raise InputError(f"{name} draws no weights; give IVON, VOGN or Vadam")
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """A forward and backward pass at drawn weights, of the microbatch's own mean loss.

        ``num_items_in_batch`` is not handed on: not every model that takes it divides by it.
        """
        optimizer = self._drawing_optimizer()
        divided_by = self._loss_divisor()
        with optimizer.sampled_params(train=True, divided_by=divided_by):
            loss = super().training_step(model, inputs)  # type: ignore[misc]
        if isinstance(optimizer, BSAM):
            with optimizer.adversarial_params(divided_by=divided_by):
                super().training_step(model, inputs)  # type: ignore[misc]
        return loss

    def _loss_divisor(self) -> int:
        """The number by which the Trainer divides each microbatch's loss."""
        loss_is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if loss_is_scaled is None:  # earlier releases of transformers
            loss_is_scaled = getattr(self, "compute_loss_func", None) is not None
        return 1 if loss_is_scaled else self.current_gradient_accumulation_steps


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
        posterior = trainer.checkpoints.posterior(n_data=len(data))  # with Kronecker factors

    Where every trained layer has Kronecker factors they are recorded too; a
    ``CheckpointsCallback()`` of your own in ``callbacks=`` records none.

    Raises:
        InputError: when training begins, of data without a length.
    """

    _n_terms: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        callbacks = [
            callback
            for callback in self.callback_handler.callbacks
            if isinstance(callback, CheckpointsCallback)
        ]
        if not callbacks:
            can_be_recorded = self.model is not None and is_recordable(self.model)
            structure = "kron" if can_be_recorded else None
            callbacks = [CheckpointsCallback(structure=structure)]
            self.add_callback(callbacks[0])
        self.kept = callbacks[0]
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MonitorCallback) and callback.log is None:
                callback.log = self.log

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
        n_terms = self._terms()
        if n_terms is None:
            raise InputError(
                "the training data have no length: give optimizers=(IVON(..., ess=N), None)"
            )
        rate = self.args.learning_rate
        self._warn_of_arguments()
        trained: Any = model or self.model
        self.optimizer = IVON(
            [p for p in trained.parameters() if p.requires_grad],
            lr=rate,
            ess=n_terms,
            hess_init="weights",
            weight_decay=self.args.weight_decay or 1 / n_terms,
            steps=self._steps(),
        )
        return self.optimizer

    def _warn_of_arguments(self) -> None:
        """Name the arguments that somebody wrote and that do not suit IVON."""
        defaults = {field.name: field.default for field in fields(self.args)}
        rate = self.args.learning_rate
        if rate == defaults["learning_rate"]:
            warnings.warn(
                f"learning_rate is not set, and its default {rate:g} is Adam's; IVON's are 0.01 "
                "to 0.5",
                stacklevel=3,
            )
        elif rate < SMALL:
            warnings.warn(f"learning_rate={rate:g} is Adam's; IVON's are 0.01 to 0.5", stacklevel=3)
        for name in OF_ADAM:
            value = getattr(self.args, name, None)
            if name in defaults and not is_default(value, defaults[name]):
                text = getattr(value, "value", value)
                warnings.warn(f"{name}={text} has no effect: IVON trains", stacklevel=3)

    def _steps(self) -> int:
        """How many steps the training takes."""
        args: Any = self.args
        if args.max_steps > 0:
            return args.max_steps
        minibatches = len(self.get_train_dataloader())
        steps_an_epoch = math.ceil(minibatches / args.gradient_accumulation_steps)
        return max(1, math.ceil(args.num_train_epochs * steps_an_epoch))

    def _terms(self) -> int | None:
        """How many labels the mean of the loss is over; None of data without a length."""
        if self._n_terms is None and hasattr(self.train_dataset, "__len__"):
            self._n_terms = self._count_terms()
        return self._n_terms

    def _count_terms(self) -> int:
        model: Any = self.accelerator.unwrap_model(self.model)
        loss_type = getattr(model, "loss_type", "")
        n_data = len(self.train_dataset)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]):  # so that training draws what it would have drawn
            batches = self.get_eval_dataloader(self.train_dataset)  # type: ignore[arg-type]
            if loss_type in BY_OUTPUT:
                first_labels = next(iter(batches))["labels"][0]
                return n_data * first_labels.numel()
            if loss_type in BY_TOKEN:
                first = BY_TOKEN[loss_type]
                count = sum((batch["labels"][:, first:] != IGNORED).sum() for batch in batches)
                return int(self.accelerator.reduce(count))  # type: ignore[arg-type]
        return n_data

    def posterior(self) -> Posterior:
        """The diagonal posterior that training has learned, with the earlier ones and its recipe;
        after ``load_best_model_at_end`` that of the best checkpoint.

        Raises:
            StorageError: that checkpoint has no optimizer's state any more.
            OptimizerError: nothing is trained yet, there is no optimizer.
        """
        optimizer = unwrap(self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        sizes = self._sizes(optimizer)

        def posterior_now() -> Posterior:
            return Posterior.from_optimizer(optimizer, model, **sizes)

        best = self.args.load_best_model_at_end and self.state.best_model_checkpoint
        if best:
            posterior = Posterior.from_checkpoint(best, model, **sizes)
        else:
            posterior = posterior_now()
        if self.checkpoints is not None:
            posterior = self.checkpoints.before(posterior, posterior_now)
        if self.recipe is not None:
            record = {**posterior.record, "recipe": self.recipe.record}
            posterior = posterior.changed(record=record)
        return posterior

    def _sizes(self, optimizer: Any) -> dict[str, Any]:
        """The numbers of examples and of tokens, where the optimizer's ``ess`` is that of tokens;
        an ``ess`` that the user chose speaks for itself."""
        n_terms = self._terms()
        ess = optimizer.param_groups[0].get("ess", math.nan)
        if n_terms is None or not math.isclose(ess, n_terms, rel_tol=1e-6):
            return {}
        n_data = len(self.train_dataset)  # type: ignore[arg-type]
        if n_data == n_terms:
            return {"n_data": n_data}
        return {"n_data": n_data, "tokens": n_terms}


def fault_of_recording(model: nn.Module, loader: Any) -> str:
    """Why factors cannot be recorded, as a pass of two examples shows; "" where they can, or where
    the data have no examples by number."""
    if length_of(loader) is None:
        return ""
    rows = [loader.dataset[i] for i in range(min(2, length_of(loader) or 0))]
    device = next(model.parameters()).device
    modes = modes_of(model)
    recorder = None
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            batch = to_device(loader.collate_fn(rows), device)
            for module in model.modules():
                module.training = not isinstance(module, _NormBase)  # whose statistics stay
            recorder = KroneckerRecorder(unwrapped(model), every=1)
            model(**batch)["loss"].backward()
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


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument has its default, which an enumeration may hold as its value."""
    if default is MISSING:  # made by a factory, such as the optimizer's name of this torch
        return str(getattr(value, "value", value)).startswith("adamw_torch")
    return getattr(value, "value", value) == getattr(default, "value", default)
