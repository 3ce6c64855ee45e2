"""A recipe that is read off a Trainer's run: a training by it ends where the Trainer ended, of
every schedule and setting that is carried; of the others the recipe says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from transformers import Trainer, TrainingArguments

import blr_analysis as blr
from blr_analysis.huggingface import CheckpointsCallback
from blr_analysis.sensitivity.training import trained, whole_data
from blr_analysis.snapshots import state_of

N = 8
STEPS = 12
IDS = torch.randint(4, 12, (N, 4), generator=torch.Generator().manual_seed(0))
DATA: list[dict[str, Tensor]] = [
    {"input_ids": ids, "labels": torch.tensor(i % 2)} for i, ids in enumerate(IDS)
]
MIN_LR = {"lr_scheduler_kwargs": {"min_lr": 1e-3}}
STABLE = {"lr_scheduler_kwargs": {"num_decay_steps": 4}}
CARRIED: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine": {"warmup_steps": 3},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 3}, "warmup_steps": 0.25},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-3}},
    "constant": {},
    "constant_with_warmup": {"warmup_steps": 0.25},
    "inverse_sqrt": {"warmup_steps": 2},
    "cosine_with_min_lr": {**MIN_LR, "warmup_steps": 2},
    "cosine_warmup_with_min_lr": {**MIN_LR, "warmup_steps": 2},
    "warmup_stable_decay": {**STABLE, "warmup_steps": 3},
}
LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
        "lr_scheduler_type=reduce_lr_on_plateau",
    ),
    "smoothing": ({"label_smoothing_factor": 0.2}, "label_smoothing_factor"),
    "dropped minibatches": (
        {"per_device_train_batch_size": 3, "dataloader_drop_last": True},
        r"minibatches \(12 steps in 6 epochs of 3\)",
    ),
}


def model() -> nn.Module:
    sure = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tiny.build("bert", num_labels=2, **sure)


def run(folder: Path, net: nn.Module, optimizers: Any = (None, None), **settings: Any) -> Any:
    """The recipe of a Trainer's run, all examples in every step."""
    callback = CheckpointsCallback()
    arguments: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": N,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = Trainer(
        net,  # type: ignore[arg-type]
        TrainingArguments(str(folder), **arguments | settings),
        train_dataset=DATA,  # type: ignore[arg-type]
        eval_dataset=DATA,  # type: ignore[arg-type]
        callbacks=[callback],
        optimizers=optimizers,
    )
    trainer.train()
    return callback.recipe


def way_off(net: nn.Module, recipe: Any) -> float:
    """How far a training by the recipe ends from the model, of the way that the model went."""
    written = blr.Recipe(**json.loads(json.dumps(recipe.record)), initial=recipe.initial)
    task = blr.Task(net.eval(), DATA, recipe=written, progress=False)
    actual = trained(task, whole_data(task), written, seed=0)
    ended = state_of(net)
    names = [name for name, _ in net.named_parameters()]
    gap = torch.cat([(actual[n] - ended[n]).flatten() for n in names]).norm()
    way = torch.cat([(recipe.initial[n] - ended[n]).flatten() for n in names]).norm()
    return float(gap / way)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", CARRIED)
def test_every_schedule_is_carried(schedule: str, tmp_path: Path) -> None:
    """With weight decay, of which Trainer takes out biases and norms, and with clipping."""
    net = model()
    arguments = {"weight_decay": 5.0, "max_grad_norm": 0.05, **CARRIED[schedule]}
    recipe = run(tmp_path, net, lr_scheduler_type=schedule, **arguments)
    assert recipe.known
    assert not recipe.note
    assert way_off(net, recipe) < 1e-3


@pytest.mark.slow
def test_accumulation_groups_and_other_schedules_are_carried(tmp_path: Path) -> None:
    net = model()
    head = [p for n, p in net.named_parameters() if n.startswith("classifier")]
    body = [p for n, p in net.named_parameters() if not n.startswith("classifier")]
    groups = [{"params": body}, {"params": head, "lr": 0.1, "momentum": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    cycle = OneCycleLR(optimizer, [0.02, 0.1], total_steps=STEPS, cycle_momentum=False)
    arguments = {"per_device_train_batch_size": N // 4, "gradient_accumulation_steps": 4}
    recipe = run(tmp_path, net, (optimizer, cycle), **arguments)
    assert recipe.known
    assert recipe.batch_size == N
    assert way_off(net, recipe) < 1e-3


@pytest.mark.slow
def test_a_run_that_ends_within_an_epoch(tmp_path: Path) -> None:
    recipe = run(tmp_path, model(), per_device_train_batch_size=3, max_steps=5)
    assert recipe.known
    assert recipe.steps(N) == 5


@pytest.mark.slow
@pytest.mark.parametrize("case", LACKING)
def test_what_is_not_carried_is_named(case: str, tmp_path: Path) -> None:
    settings, words = LACKING[case]
    net = model()
    recipe = run(tmp_path, net, **settings)
    assert not recipe.known
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(recipe.note)
    task = blr.Task(net.eval(), DATA, recipe=recipe, progress=False)
    q = blr.fit_laplace(task, structure="diag", prior_precision=1.0)
    result = blr.what_if(task, q, remove=[0, 1, 2], solver="replay", seeds=1, passes=1)
    assert recipe.note in result.note


class AdamW(torch.optim.AdamW):
    """Another optimizer of the same name."""


@pytest.mark.slow
def test_an_optimizer_of_ones_own_has_no_recipe(tmp_path: Path) -> None:
    net = model()
    assert run(tmp_path, net, (AdamW(net.parameters(), lr=0.01), None)) is None
