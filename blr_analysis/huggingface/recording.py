"""What a training run knows and its optimizer's state does not: names, sizes, a recipe.

Callbacks take it down while a run goes on.
"""

from __future__ import annotations

import copy
import os
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blr_analysis.checkpoints import Checkpoints
from blr_analysis.checks import some
from blr_analysis.errors import InputError, ModelError, OptimizerError
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_json
from blr_analysis.half import HALF
from blr_analysis.posterior import Posterior, write_captured
from blr_analysis.posterior.capture import (
    HALF_REASON,
    Captured,
    from_optimizer,
    parameter_order,
    reader_of,
    unwrap,
)
from blr_analysis.ranks import is_sharded
from blr_analysis.recipe import Recipe

FOLDER = "precision"  # beside the weights
RUN = "_run"  # in the output folder, what callbacks keep; not pushed to a hub, by its first letter
TOLD = "recipe.json"
PLAIN = (bool, int, float, str, list, tuple)
SPEED = {"foreach", "fused", "capturable", "differentiable"}  # settings that change no step
DECOUPLED = (
    "n_data * weight_decay; decoupled (AdamW): the optimizer shrinks the weights by learning rate "
    "times weight_decay, not divided by sqrt(v_hat), so it is no L2 penalty of the loss exactly"
)
LOGGED = ("loo_nll", "loo_accuracy", "test_nll", "test_accuracy")  # of a monitor, for trainers
SHARDED = (
    "no precision can be written while training. Export the whole optimizer state after it and "
    "read that with Posterior.from_checkpoint."
)
COUPLED = "n_data * weight_decay, an L2 penalty on the mean loss; its gradient is in v_hat too"


class Kept:
    """What callbacks keep of a training: its checkpoints, and the recipe of the weights it ends
    with."""

    def __init__(self, checkpoints: Checkpoints | None = None) -> None:
        super().__init__()
        self.checkpoints = self._given = checkpoints
        self._told: Recipe | None = None

    @property
    def recipe(self) -> Recipe | None:
        """The training up to the weights that were kept; None of an optimizer without a name."""
        recipe = copy.copy(self._told)
        if recipe is not None and self.checkpoints is not None:
            recipe.initial = self.checkpoints.first
        return recipe

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        steps: int | None,
        done: int,
        folder: Path | None = None,
    ) -> None:
        """Before the first step, or the first that is resumed; of divided weights none are kept."""
        self._told, self.checkpoints = None, None
        if not any(map(is_sharded, model.parameters())):
            how: Any = {"steps": steps, "folder": folder, "optimizer": unwrap(optimizer)}
            self.checkpoints = self._given or Checkpoints(model, **how)
            self.checkpoints.begin(done)

    def end(self, recipe: Recipe | None) -> None:
        """After the last step."""
        self._told = recipe
        if self.checkpoints is not None:
            self.checkpoints.settle()


def check_learns(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Refuse now what no precision could be read from at the end.

    Raises:
        OptimizerError: no precision in this optimizer, one of another model, sharded or
            half-precision parameters.
    """
    scaled = reader_of(optimizer).scaled
    held = {name for names in parameter_order(optimizer, model) for name in names}
    for name, p in model.named_parameters():
        if name in held and is_sharded(p):
            raise OptimizerError(f"parameter {name!r} is sharded over devices: {SHARDED}")
        if name in held and p.requires_grad and p.dtype in HALF and not scaled:
            raise OptimizerError(
                f"parameter {name!r} and its second moment are in {p.dtype}: {HALF_REASON}. "
                "Train with bf16=True, or with IVON."
            )


def write_learned(
    path: Path, optimizer: torch.optim.Optimizer, model: nn.Module, n_data: int, **about: Any
) -> None:
    """The precision as it is now to ``path``, beside the weights.

    Raises:
        OptimizerError: no step was taken, or weights are a sample now.
        ModelError: the weights beside it have other names or shapes.
        StorageError: the place cannot be written.
    """
    scaled = reader_of(optimizer).scaled
    captured = from_optimizer(
        optimizer, model, n_data=n_data, scaling="ess" if scaled else "sqrt", bare=True
    )
    about |= {} if scaled else _weight_decay(optimizer, model, n_data)
    about |= {"source": "training", "parameter_order": parameter_order(optimizer, model)}
    weights = path.parent if any(path.parent.glob("model.safetensors*")) else None
    if weights is not None:
        _check_names(captured, weights)
    write_captured(path, captured, model=weights, **about)


def _weight_decay(
    optimizer: torch.optim.Optimizer, model: nn.Module, n_data: int
) -> dict[str, Any]:
    """δ = N·weight_decay by name, outside the stored data part; nothing where there is none."""
    groups = zip(optimizer.param_groups, parameter_order(optimizer, model), strict=True)
    decay = {n: n_data * float(g.get("weight_decay", 0.0)) for g, names in groups for n in names}
    trained = {n: decay[n] for n, p in model.named_parameters() if n in decay and p.requires_grad}
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    told = {"prior_outside": trained, "prior_from": DECOUPLED if decoupled else COUPLED}
    return told if any(trained.values()) else {}


def _check_names(captured: Captured, folder: Path) -> None:
    """Every precision stands beside a tensor of the same name, or a tied one, and shape."""
    specs = Folder.open(folder).specs
    tied: dict[str, list[str]] = captured.record["tied"]
    odd = [
        name
        for name, m in captured.mean.items()
        if not any(n in specs and specs[n].shape == m.shape for n in (name, *tied.get(name, [])))
    ]
    if odd:
        raise ModelError(
            f"the weights in {str(folder)!r} (an adapter, or converted?) have other names or "
            f"shapes than {some(odd)}"
        )


def recipe_of(
    optimizer: Any,
    *,
    epochs: float,
    batch_size: int,
    schedule: str | None = None,
    n_data: int | None = None,
) -> Recipe | None:
    """The recipe of a training, its settings read off its optimizer, which they are a further
    argument of where they are not its default; None of an optimizer that recipes have no name for.

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)], lr=0.01, weight_decay=0.1)
    >>> recipe_of(optimizer, epochs=3, batch_size=8, schedule="linear")
    Recipe('adamw', lr=0.01, epochs=3, batch_size=8, schedule='linear', weight_decay=0.1)
    """
    own = unwrap(optimizer)
    group = own.param_groups[0]
    left_out, more = {"params", "lr", *SPEED}, {}
    if steps := getattr(own, "steps", None):  # by which these are set
        left_out, more = left_out | {"beta2", "clip_radius"}, {"steps": steps}
    if n_data == group.get("ess"):
        left_out |= {"ess"}
    for name, parameter in signature(type(own)).parameters.items():
        value = group.get(name, parameter.default)
        if name not in left_out and value != parameter.default and isinstance(value, PLAIN):
            more[name] = value
    told = {"lr": float(group.get("initial_lr", group["lr"])), "schedule": schedule}
    told |= {"epochs": max(1, round(epochs)), "batch_size": batch_size}
    try:
        return Recipe(type(own).__name__.lower(), **told, **more)
    except InputError:
        return None


def training_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``checkpoints`` and ``recipe`` for the Task of a model that a trainer left in this folder:
    its output, or one of the ``checkpoint-*`` there. Nothing that is pickled is read.

    The recipe is that of :class:`~blr_analysis.huggingface.CheckpointsCallback`, with the first
    weights where these are beside it.
    """
    place = Path(folder).absolute()
    home = place.parent if place.name.startswith("checkpoint-") else place
    beside = [*home.glob("checkpoint-*")]
    found: dict[str, Any] = {}
    if [*(home / RUN).glob("step-*.safetensors")]:
        found["checkpoints"] = home / RUN
    elif beside and all([*one.glob("*.safetensors")] for one in beside):
        found["checkpoints"] = home
    told = next((p for p in (place / TOLD, home / RUN / TOLD) if p.is_file()), None)
    if told is not None:
        first = home / RUN / "step-00000000.safetensors"
        initial = Folder.open(first).tensors() if first.is_file() else None
        found["recipe"] = Recipe(**read_json(told), initial=initial)
    return found


def look(monitor: Any, optimizer: Any, epoch: int, known: dict[str, Any]) -> dict[str, float]:
    """The monitor's losses and accuracies after this epoch; nothing where it is not due."""
    model = monitor.task.model
    row = monitor(lambda: Posterior.from_optimizer(optimizer, model, **known), epoch)
    return {k: row[k] for k in LOGGED if row[k] == row[k]} if row else {}
