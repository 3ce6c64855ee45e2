"""Hugging Face's Trainer with IVON: training steps run at weights drawn from the posterior."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from blr_analysis.errors import InputError
from blr_analysis.huggingface.tokens import IGNORED
from blr_analysis.learning_rule.optim import BSAM, IVON
from blr_analysis.posterior import Posterior

SMALL = 1e-3
BY_TOKEN = {"ForCausalLM": 1, "ForMaskedLM": 0, "ForTokenClassification": 0}  # first label counted


class VariationalSteps:
    """For any Trainer, before it in the bases: ``class Mine(VariationalSteps, SFTTrainer): ...``

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


class IVONTrainer(VariationalSteps, Trainer):
    """``Trainer`` that trains with IVON: two lines of a script change, this name and the rate.

    The optimizer is made from the arguments: ``lr=learning_rate`` (as SGD's: 0.01 to 0.5, not the
    default of 5e-5), ``ess`` the number of training examples, or of the tokens that count where the
    loss is a mean over tokens (one pass over the data counts them), ``weight_decay``, or 1/ess
    where it is 0, ``hess_init="weights"``, so that few examples suffice to fine-tune, and ``steps``
    the length of the training, see the guide to IVON.

        from blr_analysis.huggingface import IVONTrainer
        trainer = IVONTrainer(model, TrainingArguments(out, learning_rate=0.1), train_dataset=data)
        trainer.train()
        posterior = trainer.posterior()

    Raises:
        InputError: when training begins, of data without a length.
    """

    _best: str | None = None
    _counted: int | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own; the best checkpoint is remembered where its weights are taken."""
        self._best = self._counted = None
        done = super().train(*args, **kwargs)
        if self.args.load_best_model_at_end:
            self._best = self.state.best_model_checkpoint
        return done

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """IVON over the parameters that are trained, unless an optimizer was given."""
        if self.optimizer is not None:
            return self.optimizer
        try:
            n = len(self.train_dataset)  # type: ignore[arg-type]
        except TypeError as error:
            given = "optimizers=(IVON(..., ess=N), None)"
            raise InputError(f"the training data have no length: give {given}") from error
        n = self._tokens() or n
        args: Any = self.args
        if args.learning_rate < SMALL:
            warnings.warn(
                f"learning_rate={args.learning_rate:g} is Adam's; IVON's are 0.01 to 0.5",
                stacklevel=2,
            )
        trained = [p for p in (model or self.model).parameters() if p.requires_grad]  # type: ignore[union-attr]
        decay = args.weight_decay or 1 / n
        self.optimizer = IVON(
            trained,
            lr=args.learning_rate,
            ess=n,
            hess_init="weights",
            weight_decay=decay,
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

    def _tokens(self) -> int | None:
        """How many labels the mean of the loss is over; None where it is over examples."""
        first = BY_TOKEN.get(getattr(self.accelerator.unwrap_model(self.model), "loss_type", ""))
        if first is None or not hasattr(self.train_dataset, "__len__"):
            return None
        if self._counted is None:
            count = torch.zeros((), dtype=torch.long, device=self.args.device)
            with torch.random.fork_rng(devices=[]):  # so that training draws what it would have
                for batch in self.get_eval_dataloader(self.train_dataset):  # type: ignore[arg-type]
                    count += (batch["labels"][:, first:] != IGNORED).sum()
            self._counted = int(self.accelerator.reduce(count))  # type: ignore[arg-type]
        return self._counted

    def posterior(self) -> Posterior:
        """The diagonal posterior that training has learned; after ``load_best_model_at_end`` that
        of the best checkpoint.

        Raises:
            StorageError: that checkpoint has no optimizer's state any more.
        """
        own: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        model = self.accelerator.unwrap_model(self.model)
        size, tokens = own.param_groups[0].get("ess"), self._tokens()
        by: dict[str, Any] = {}
        if tokens is not None and size is not None and math.isclose(size, tokens, rel_tol=1e-6):
            by = {"n_data": len(self.train_dataset), "tokens": tokens}  # type: ignore[arg-type]
        if self._best is not None:
            return Posterior.from_checkpoint(self._best, model, **by)
        return Posterior.from_optimizer(own, model, **by)
