"""Hugging Face's Trainer with IVON, and any other Trainer with weights that are drawn.

The callbacks, which any Trainer takes, are in :mod:`~blr_analysis.huggingface.callbacks`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.checks import at_least
from blr_analysis.errors import InputError
from blr_analysis.huggingface.callbacks import CheckpointsCallback, MonitorCallback
from blr_analysis.huggingface.chats import IGNORED
from blr_analysis.huggingface.evaluation import BY_TOKEN, averaged_loss, perplexity
from blr_analysis.learning_rule.optim import BSAM, IVON
from blr_analysis.posterior import Posterior, is_recordable
from blr_analysis.posterior.capture import unwrap
from blr_analysis.recipe import Recipe

SMALLEST_RATE = 5e-3  # a smaller learning rate is one for Adam, not for IVON
# Losses that are a mean over examples and, of several labels or targets, over these too.
BY_OUTPUT = {f"For{kind}Classification" for kind in ("Sequence", "Image", "Video", "Audio")}
# Arguments of the Trainer that IVON does not use.
OF_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
ESS_TOLERANCE = 1e-6  # relative; an ess further from the Trainer's count was chosen by the user


class VariationalTrainer:
    """A mixin for any Trainer; name it first: ``class Mine(VariationalTrainer, SFTTrainer): ...``

    Weights are drawn for each microbatch. The Trainer divides each loss by the number of
    microbatches; this class tells the optimizer, so that gradients keep their scale. Clipping and
    mixed precision are the Trainer's own, and so is evaluation, which is at the mean. The optimizer
    is any of ``blr_analysis.learning_rule.optim`` that has ``sampled_params``, given as
    ``optimizers=(optimizer, None)``.
    """

    optimizer: Any
    accelerator: Any
    current_gradient_accumulation_steps: int

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, with ``eval_perplexity`` where the loss is a mean over tokens."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        model: Any = self.accelerator.unwrap_model(self.model)  # type: ignore[attr-defined]
        if getattr(model, "loss_type", "") not in BY_TOKEN:
            return output
        metrics = output.metrics or {}
        names = [name for name in metrics if name.endswith("_loss")]
        for name in names:
            prefix = name.removesuffix("_loss")
            metrics[f"{prefix}_perplexity"] = perplexity(metrics[name])
        return output

    def evaluate(self, *args: Any, draws: int = 0, **kwargs: Any) -> dict[str, float]:
        """The Trainer's evaluation at the mean, and the loss of averaged predictions.

        Args:
            draws: average the predictions over so many draws of the weights. Their loss is
                ``eval_averaged_loss``, and ``eval_averaged_perplexity`` its perplexity where it is
                a mean over tokens. 0: the evaluation at the mean alone.

        Raises:
            InputError: ``draws`` is given, and the training has several processes, the model's
                answers are no classes or tokens, or there are several evaluation sets.
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
        """The loss of averaged predictions and, where it is by token, its perplexity."""
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
        """The optimizer, or an error if it draws no weights."""
        optimizer: Any = unwrap(self.optimizer)
        if not hasattr(optimizer, "sampled_params"):
            name = type(optimizer).__name__
            raise InputError(f"{name} draws no weights; give IVON, VOGN or Vadam")
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """A forward and backward pass at drawn weights, of the microbatch's own mean loss.

        ``num_items_in_batch`` is not passed to the Trainer: some models accept it and do not
        divide by it.
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
    """A ``Trainer`` that trains with IVON. In a script, change its name and the learning rate.

    The optimizer is made from the Trainer's arguments (see the guide to IVON):

    * ``lr`` is ``learning_rate``. It is as large as SGD's: 0.01 to 0.5, not the default of 5e-5;
    * ``ess`` is the number of terms in the mean loss: training examples; or tokens that count,
      which one pass over the data counts; or examples times outputs (several labels or targets);
    * ``weight_decay`` is the Trainer's, or 1/ess where that is 0;
    * ``hess_init`` is "weights", so that few examples suffice to fine-tune;
    * ``steps`` is the length of the training.

        from blr_analysis.huggingface import IVONTrainer
        trainer = IVONTrainer(model, TrainingArguments(out, learning_rate=0.1), train_dataset=data)
        trainer.train()
        posterior = trainer.posterior()
        task = blr.Task(model, data, checkpoints=trainer.checkpoints, recipe=trainer.recipe)
        posterior = trainer.checkpoints.posterior(n_data=len(data))  # with Kronecker factors

    Kronecker factors are recorded too, where every trained layer has them. To record none, give a
    ``CheckpointsCallback()`` of your own in ``callbacks=``.

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
        self._give_log()
        self.recorder = callbacks[0]

    def add_callback(self, callback: Any) -> None:
        """The Trainer's own; a monitor's rows go to the Trainer's log."""
        super().add_callback(callback)
        self._give_log()

    def _give_log(self) -> None:
        """Let the monitors that have no log of their own use the Trainer's."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MonitorCallback) and callback.log is None:
                callback.log = self.log

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The training's checkpoints, for :class:`blr_analysis.Task`."""
        return self.recorder.checkpoints

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the training, up to the weights it ends with, for a Task."""
        return self.recorder.recipe

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
            batch_size=self._terms_of_a_step(n_terms),
        )
        return self.optimizer

    def _terms_of_a_step(self, n_terms: int) -> int:
        """The number of labels that the loss of a step is a mean over, with accumulation and all
        processes; for tokens, the number that a step has on average."""
        args: Any = self.args
        n_data = len(self.train_dataset)  # type: ignore[arg-type]
        examples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return max(1, round(min(examples, n_data) * n_terms / n_data))

    def _warn_of_arguments(self) -> None:
        """Warn of arguments that the user has set and that do not suit IVON."""
        defaults = {field.name: field.default for field in fields(self.args)}
        rate = self.args.learning_rate
        if rate == defaults["learning_rate"]:
            warnings.warn(
                f"learning_rate is not set, and its default {rate:g} is Adam's; IVON's are 0.01 "
                "to 0.5",
                stacklevel=3,
            )
        elif rate < SMALLEST_RATE:
            warnings.warn(f"learning_rate={rate:g} is Adam's; IVON's are 0.01 to 0.5", stacklevel=3)
        for name in OF_ADAM:
            value = getattr(self.args, name, None)
            if name in defaults and not is_default(value, defaults[name]):
                text = getattr(value, "value", value)
                warnings.warn(f"{name}={text} has no effect: IVON trains", stacklevel=3)

    def _steps(self) -> int:
        """The number of optimizer steps of the training."""
        args: Any = self.args
        if args.max_steps > 0:
            return args.max_steps
        minibatches = len(self.get_train_dataloader())
        steps_an_epoch = math.ceil(minibatches / args.gradient_accumulation_steps)
        return max(1, math.ceil(args.num_train_epochs * steps_an_epoch))

    def _terms(self) -> int | None:
        """The number of terms in the mean loss of all data; None for data without a length."""
        if self._n_terms is None and hasattr(self.train_dataset, "__len__"):
            self._n_terms = self._count_terms()
        return self._n_terms

    def _count_terms(self) -> int:
        """The number of examples, of examples times outputs, or of the tokens that count."""
        model: Any = self.accelerator.unwrap_model(self.model)
        loss_type = getattr(model, "loss_type", "")
        n_data = len(self.train_dataset)  # type: ignore[arg-type]
        with torch.random.fork_rng(devices=[]):  # so that training draws what it would have drawn
            batches = self.get_eval_dataloader(self.train_dataset)  # type: ignore[arg-type]
            if loss_type in BY_OUTPUT:
                first_labels = next(iter(batches))["labels"][0]
                return n_data * first_labels.numel()
            if loss_type in BY_TOKEN:
                first_label = BY_TOKEN[loss_type]
                count = sum(
                    (batch["labels"][:, first_label:] != IGNORED).sum() for batch in batches
                )
                return int(self.accelerator.reduce(count))  # type: ignore[arg-type]
        return n_data

    def posterior(self) -> Posterior:
        """The diagonal posterior that training has learned, with the earlier ones and its recipe.

        After ``load_best_model_at_end`` it is that of the best checkpoint.

        Raises:
            StorageError: the best checkpoint does not hold the optimizer's state.
            OptimizerError: nothing is trained yet, so that there is no optimizer.
        """
        optimizer = unwrap(self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        sizes = self._sizes(optimizer)

        def posterior_now() -> Posterior:
            return Posterior.from_optimizer(optimizer, model, **sizes)

        best_checkpoint = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best_checkpoint:
            posterior = Posterior.from_checkpoint(best_checkpoint, model, **sizes)
        else:
            posterior = posterior_now()
        if self.checkpoints is not None:
            posterior = self.checkpoints.before(posterior, posterior_now)
        if self.recipe is not None:
            record = {**posterior.record, "recipe": self.recipe.record}
            posterior = posterior.changed(record=record)
        return posterior

    def _sizes(self, optimizer: Any) -> dict[str, Any]:
        """What a posterior is told of the data: ``n_data``, and ``tokens`` where they are counted.

        Nothing where the user chose another ``ess``, which the posterior reads off the optimizer.
        """
        n_terms = self._terms()
        ess = optimizer.param_groups[0].get("ess", math.nan)
        if n_terms is None or not math.isclose(ess, n_terms, rel_tol=ESS_TOLERANCE):
            return {}
        n_data = len(self.train_dataset)  # type: ignore[arg-type]
        if n_data == n_terms:
            return {"n_data": n_data}
        return {"n_data": n_data, "tokens": n_terms}


def is_default(value: Any, default: Any) -> bool:
    """Whether an argument has its default value; either may be a member of an enumeration."""
    if default is MISSING:  # a factory makes it: the name of AdamW that suits this torch
        return str(getattr(value, "value", value)).startswith("adamw_torch")
    return getattr(value, "value", value) == getattr(default, "value", default)
