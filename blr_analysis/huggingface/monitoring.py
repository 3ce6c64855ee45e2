"""A monitor that watches a Hugging Face Trainer."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from blr_analysis.huggingface.recording import look
from blr_analysis.sensitivity import Monitor

SAVED = "blr_analysis.Monitor"
"""Its name among the states of callbacks in ``trainer_state.json``."""


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
    """

    def __init__(self, monitor: Monitor, **known: Any) -> None:
        self.monitor = monitor
        self.known = known

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The epochs before, where this run is resumed."""
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """One row of the monitor, where an epoch ends and is due; before the Trainer saves."""
        if state.epoch != round(state.epoch):
            return
        row = look(self.monitor, kwargs["optimizer"], round(state.epoch), self.known)
        if row:
            state.log_history.append({**row, "epoch": state.epoch, "step": state.global_step})
        recorded = self.monitor.state_dict()
        state.stateful_callbacks[SAVED] = json.dumps(recorded, default=Tensor.tolist)
