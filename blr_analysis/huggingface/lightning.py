"""Callbacks of Lightning's Trainer: drawn weights for every microbatch, a monitor, checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from inspect import signature
from typing import TYPE_CHECKING, Any

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.errors import InputError
from blr_analysis.huggingface.recording import (
    LOGGED,
    MonitoredTraining,
    RecordedTraining,
    length_of,
    recipe_of,
)
from blr_analysis.learning_rule.optim import BSAM

if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback

FULL = ("32", "32-true", "64", "64-true")  # floating-point precisions that recipes repeat


class LightningCheckpoints(RecordedTraining, Callback):
    """Keep a training's checkpoints and its recipe, for its :class:`blr_analysis.Task`::

        callback = LightningCheckpoints(submodule="net")
        lightning.Trainer(callbacks=[callback]).fit(module, loader)
        task = blr.Task(
            module.net, data, checkpoints=callback.checkpoints, recipe=callback.recipe
        )

    Args:
        checkpoints: your own, for instance with a ``folder``. None: the callback makes them, and
            they stay in memory.
        submodule: the name of the part of the LightningModule that is the task's model; "": all.
    """

    def __init__(self, checkpoints: Checkpoints | None = None, *, submodule: str = "") -> None:
        super().__init__(checkpoints)
        self._submodule = submodule

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the first weights, or find those of the run that is resumed."""
        steps = trainer.estimated_stepping_batches
        self.begin(
            pl_module.get_submodule(self._submodule),
            trainer.optimizers[0],
            trainer.global_step,
            steps=int(steps) if math.isfinite(steps) else None,
        )

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Record the learning rate of the step."""
        self.record_rate(trainer.optimizers[0], trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Count the optimizer's step, if the batch has ended with one."""
        if self.checkpoints is not None and trainer.global_step > self.checkpoints.done:
            self.checkpoints.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the recipe of the weights that the training ends with."""
        loader = trainer.train_dataloader
        microbatch = getattr(loader, "batch_size", None) or 1
        steps = trainer.global_step
        factors = self.rate_factors(steps)
        recipe = recipe_of(
            trainer.optimizers[0],
            pl_module.get_submodule(self._submodule),
            steps=steps,
            epochs=trainer.current_epoch,
            batch_size=microbatch * trainer.accumulate_grad_batches * trainer.world_size,
            factors=factors,
            max_grad_norm=None if _clips_values(trainer) else trainer.gradient_clip_val,
            n_data=length_of(loader),
            missing=_missing(trainer, factors),
        )
        self.end(recipe)


def _clips_values(trainer: Any) -> bool:
    """Whether gradients are clipped entry by entry, not by their norm."""
    return str(trainer.gradient_clip_algorithm or "norm").endswith("value")


def _missing(trainer: Any, factors: Any) -> list[str]:
    """What a trainer has done and a recipe does not repeat, a phrase each."""
    missing = []
    if factors is None:
        missing.append("the schedule of the rate")
    if trainer.gradient_clip_val and _clips_values(trainer):
        missing.append("gradient_clip_algorithm='value'")
    if str(trainer.precision) not in FULL:
        missing.append(f"precision={str(trainer.precision)!r}")
    if len(trainer.optimizers) > 1:
        missing.append("further optimizers")
    return missing


class _Unused(Exception):
    """Ends the context of a draw whose batch had no backward pass."""


class VariationalSteps(Callback):
    """Draw weights for each microbatch, in automatic optimisation.

    A module whose ``configure_optimizers`` returns ``blr.IVON(...)`` also trains without this
    callback, with one draw for each step. With it, gradients accumulate over draws and keep their
    scale; clipping and loss scaling (``precision="16-mixed"``) act on the mean over the draws:

        trainer = lightning.Trainer(accumulate_grad_batches=4, callbacks=[VariationalSteps()])

    Every optimizer of ``blr_analysis.learning_rule.optim`` that draws weights works. bSAM calls
    ``training_step`` twice for each batch, the second time at the adversary. For manual
    optimisation leave this out, and write
    ``with self.optimizers().sampled_params(train=True):`` around forward and ``manual_backward``.

    Raises:
        InputError: when training begins, if optimisation is manual, there are several optimizers,
            or the optimizer draws no weights.
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[None] | None = None
        self._optimizer: Any = None
        self._step_of_schedule: Callable[..., Any] | None = None
        self._batch: tuple[Any, int] = (None, 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the optimizer's step by one that runs Lightning's closure first.

        The closure makes the forward and backward pass, during which weights are drawn.
        """
        if not pl_module.automatic_optimization:
            raise InputError(
                "with manual optimisation leave VariationalSteps out: "
                "with self.optimizers().sampled_params(train=True):"
            )
        optimizer = trainer.optimizers[0]
        if len(trainer.optimizers) > 1 or not hasattr(optimizer, "sampled_params"):
            names = ", ".join(type(o).__name__ for o in trainer.optimizers)
            raise InputError(f"VariationalSteps takes one optimizer that draws, not {names}")
        self._optimizer = optimizer
        self._step_of_schedule = vars(optimizer).get("step")
        step = optimizer.step

        def after_closure(closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else closure()
            if closure is not None and loss is None:  # training_step skipped this batch
                self._leave()
                optimizer.drop_draws()
                return None
            step()
            return loss

        optimizer.step = after_closure
        scales_loss = getattr(trainer.precision_plugin, "scaler", None) is not None
        if not scales_loss:
            # Lightning would refuse to clip (bf16-mixed): it takes step() for one that unscales.
            optimizer._step_supports_amp_scaling = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw the weights of this microbatch."""
        self._leave()
        self._batch = (batch, batch_idx)
        if self._optimizer is not None:
            n_microbatches = trainer.accumulate_grad_batches  # Lightning divides each loss by it
            context = self._optimizer.sampled_params(train=True, divided_by=n_microbatches)
            context.__enter__()
            self._context = context

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Put the mean back and record the gradient; bSAM then computes its second gradient."""
        if self._context is None:
            return
        context = self._context
        self._context = None
        context.__exit__(None, None, None)
        if isinstance(self._optimizer, BSAM):
            self._backward_at_adversary(trainer, pl_module)

    def _backward_at_adversary(self, trainer: Any, pl_module: Any) -> None:
        """The second forward and backward pass of bSAM, on the same batch."""
        n_microbatches = trainer.accumulate_grad_batches
        n_arguments = len(signature(pl_module.training_step).parameters)
        with self._optimizer.adversarial_params(divided_by=n_microbatches):
            output = trainer.strategy.training_step(*self._batch[:n_arguments])
            loss = output["loss"] if isinstance(output, Mapping) else output
            trainer.strategy.backward(loss / n_microbatches, self._optimizer)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Drop the draw of a batch that had no backward pass."""
        self._leave()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the optimizer its own step again."""
        self._leave()
        if self._optimizer is None:
            return
        optimizer = self._optimizer
        self._optimizer = None
        del optimizer.step
        vars(optimizer).pop("_step_supports_amp_scaling", None)
        if self._step_of_schedule is not None:
            optimizer.step = self._step_of_schedule

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the mean back, and give the optimizer its own step again."""
        self.on_train_end(trainer, pl_module)

    def _leave(self) -> None:
        """Drop a draw that no backward pass has used."""
        if self._context is not None:
            context = self._context
            self._context = None
            context.__exit__(_Unused, _Unused(), None)


class LightningMonitor(MonitoredTraining, Callback):
    """Let a :class:`blr_analysis.Monitor` look at the model after every epoch.

    Its rows are in ``monitor.table``. Their losses and accuracies are logged as ``loo_nll`` and the
    like; loggers read them, and so does ``EarlyStopping(monitor="loo_nll")`` if it is behind the
    monitor in ``callbacks``. A ``Monitor(every=2)`` logs nothing in the epochs between:
    ``EarlyStopping("loo_nll", strict=False)`` and
    ``ModelCheckpoint(monitor="loo_nll", every_n_epochs=2)`` wait for the next row, and patience
    counts rows. The monitor is saved and restored with Lightning's checkpoints.

        monitor = blr.Monitor(blr.Task(module.net, data), test=test_task, examples=200)
        trainer = lightning.Trainer(callbacks=[LightningMonitor(monitor)])

    Args:
        monitor: made with a task of the module that is trained, or of a part of it.
        posterior_settings: as in :class:`blr_analysis.huggingface.MonitorCallback`.

    Raises:
        InputError: when training begins, if the monitor has watched another run.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse a monitor that has watched another run."""
        self.monitor.check_epoch(trainer.current_epoch + 1)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Remove the values that an earlier epoch has logged."""
        for name in LOGGED:
            trainer.callback_metrics.pop(name, None)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Add a row to the monitor and log it, if this epoch is due."""
        pl_module.log_dict(self.look(trainer.optimizers[0], trainer.current_epoch + 1))

    def state_dict(self) -> dict[str, Any]:
        """The state of the monitor."""
        return self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the monitor."""
        self.monitor.load_state_dict(state_dict)
