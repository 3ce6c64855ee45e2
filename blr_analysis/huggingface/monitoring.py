"""A monitor that watches a Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from blr_analysis.huggingface.recording import look
from blr_analysis.sensitivity import Monitor


class MonitorCallback(TrainerCallback):
    """Let a :class:`blr_analysis.Monitor` look at the model after every epoch.

    What it finds is in ``monitor.table`` and, as ``loo_nll`` and the like, in the Trainer's
    ``log_history``. The task is that of the model that is trained. It disturbs nothing: a run that
    is resumed ends with the same bits; the monitor then holds the epochs since.

        monitor = blr.Monitor(blr.Task(model, data), test=test_task, examples=200)
        trainer = IVONTrainer(model, args, train_dataset=data, callbacks=[MonitorCallback(monitor)])

    Args:
        monitor: made with a task of the model that is trained.
        known: what :meth:`blr_analysis.Posterior.from_optimizer` asks for beside optimizer and
            model: ``n_data`` and ``prior_precision`` of Adam; nothing of IVON.
    """

    def __init__(self, monitor: Monitor, **known: Any) -> None:
        self.monitor = monitor
        self.known = known

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row of the monitor, where this epoch is due."""
        row = look(self.monitor, kwargs["optimizer"], round(state.epoch), self.known)
        if row:
            state.log_history.append({**row, "epoch": state.epoch, "step": state.global_step})
