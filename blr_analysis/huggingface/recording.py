"""What a training run knows and its optimizer's state does not, kept to write precision files.

An optimizer's state has no names, no batch size and no number of examples. While a run goes on
all of them are at hand; :class:`Recorder` takes them down at its start, refuses what could not
be written at the end, and writes a precision folder at each save.
:func:`checkpoint_precision` writes that of a run that had no callback.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blr_analysis.checks import instance, one_of, path_of, some
from blr_analysis.errors import BLRError, InputError, ModelError, OptimizerError, StorageError
from blr_analysis.files import Folder, storage
from blr_analysis.files.headers import read_json
from blr_analysis.half import HALF
from blr_analysis.huggingface.models import read_config
from blr_analysis.posterior import Posterior, check_dtype, n_data_of, write_captured
from blr_analysis.posterior.capture import (
    HALF_REASON,
    Captured,
    from_checkpoint,
    from_optimizer,
    parameter_order,
    reader_of,
    unwrap,
)
from blr_analysis.recipe import Recipe

FOLDER = "precision"  # beside the weights
RUN, TOLD = "run", "recipe.json"  # what callbacks keep of a training, in its output folder
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


class Recorder:
    """One run's optimizer and what is known about it.

    Args:
        n_data: N; None takes the length of the training data.
        scaling: ``"sqrt"`` or ``"squared"``, as in
            :func:`~blr_analysis.posterior.capture.from_optimizer`; IVON has its own scale.
        dtype: float32 or bfloat16, in which precisions are stored.
        sha256: record the sha256 of the model's safetensors beside a precision.
    """

    def __init__(
        self, n_data: int | None, scaling: str, dtype: torch.dtype | None, sha256: bool
    ) -> None:
        self.n_data = None if n_data is None else n_data_of(n_data)
        self.scaling = one_of("scaling", scaling, ("sqrt", "squared"))
        self.dtype = check_dtype(dtype)
        self.sha256 = sha256
        self._run: tuple[torch.optim.Optimizer, nn.Module, int, dict[str, Any]] | None = None

    def begin(
        self,
        optimizer: Any,
        model: nn.Module,
        *,
        data: Any,
        per_device: int | None,
        accumulation: int,
        world_size: int,
        **about: Any,
    ) -> None:
        """Take down a run; whatever could not be written later is refused now.

        Raises:
            OptimizerError: no precision in this optimizer, one of another model, sharded or
                half-precision parameters.
            InputError: the number of examples, or the batch size that ``scaling="squared"``
                needs, is not known.
        """
        inner = unwrap(optimizer)
        reader = reader_of(inner)
        order = parameter_order(inner, model)
        _check_parameters(model, {n for run in order for n in run}, reader.scaled)
        batch = None if per_device is None else per_device * accumulation * world_size
        if self.scaling == "squared" and batch is None and not reader.scaled:
            raise InputError(
                "scaling='squared' needs the batch size, unknown here: use scaling='sqrt'"
            )
        record = {
            "source": "training",
            "parameter_order": order,
            "batch_size": batch,
            "per_device_batch_size": per_device,
            "gradient_accumulation_steps": accumulation,
            "world_size": world_size,
            **about,
        }
        self._run = (inner, model, self.n_data or _length(data), record)

    def write(self, path: Path, model_folder: Path | None, recipe: Recipe | None = None) -> None:
        """Write the precision as it is now to ``path``; ``model_folder`` holds the weights.

        Raises:
            OptimizerError: no run has begun, no step was taken, or weights are a sample now.
            ModelError: the weights in ``model_folder`` have other names or shapes.
            StorageError: the place cannot be written.
        """
        if self._run is None:
            raise OptimizerError(
                "no training has begun: give the callback to the trainer, train, then save"
            )
        optimizer, model, n_data, record = self._run
        scaled = reader_of(optimizer).scaled
        squared = self.scaling == "squared" and not scaled
        captured = from_optimizer(
            optimizer,
            model,
            n_data=n_data,
            scaling="ess" if scaled else self.scaling,
            batch_size=record["batch_size"] if squared else None,
            bare=True,
        )
        about = {**record, **({} if scaled else _weight_decay(optimizer, model, n_data))}
        about |= {} if recipe is None else {"recipe": recipe.record}
        model_path = None
        if model_folder is not None and any(model_folder.glob("model.safetensors*")):
            _check_names(captured, model_folder)
            model_path = model_folder if self.sha256 else None
        write_captured(path, captured, model=model_path, dtype=self.dtype, **about)

    def try_to_write(
        self, path: Path, model_folder: Path | None, recipe: Recipe | None = None
    ) -> None:
        """The same, for the middle of a run: what goes wrong is a warning and training goes on."""
        try:
            self.write(path, model_folder, recipe)
        except BLRError as error:
            warnings.warn(f"no precision was written to {os.fspath(path)!r}: {error}", stacklevel=2)


def _check_parameters(model: nn.Module, held: set[str], scaled: bool) -> None:
    for name, p in model.named_parameters():
        if name not in held or not p.requires_grad:
            continue
        if hasattr(p, "full_tensor"):
            raise OptimizerError(f"parameter {name!r} is sharded over devices: {SHARDED}")
        if p.dtype in HALF and not scaled:
            raise OptimizerError(
                f"parameter {name!r} and its second moment are in {p.dtype}: {HALF_REASON}. "
                "Train with bf16=True, or with IVON."
            )


def _length(data: Any) -> int:
    try:
        n = len(data)
    except TypeError:
        n = 0
    if n < 1:
        raise InputError("the training data have no length: pass n_data=, the number of examples")
    return n


def _weight_decay(
    optimizer: torch.optim.Optimizer, model: nn.Module, n_data: int
) -> dict[str, Any]:
    """δ = N·weight_decay by name, outside the stored data part; nothing where there is none."""
    decay: dict[str, float] = {}
    order = parameter_order(optimizer, model)
    for group, names in zip(optimizer.param_groups, order, strict=True):
        decay |= dict.fromkeys(names, n_data * float(group.get("weight_decay", 0.0)))
    trained = {n: decay[n] for n, p in model.named_parameters() if n in decay and p.requires_grad}
    if not any(trained.values()):
        return {}
    decoupled = isinstance(optimizer, torch.optim.AdamW) or any(
        group.get("decoupled_weight_decay") for group in optimizer.param_groups
    )
    return {"prior_outside": trained, "prior_from": DECOUPLED if decoupled else COUPLED}


def _check_names(captured: Captured, folder: Path) -> None:
    """Every precision stands beside a tensor of the same name, or a tied one, and shape."""
    specs = Folder.open(folder).specs
    tied: dict[str, list[str]] = captured.record["tied"]
    odd = [
        name
        for name, s in captured.precision.items()
        if not any(n in specs and specs[n].shape == s.shape for n in (name, *tied.get(name, [])))
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


def checkpoint_precision(
    checkpoint: str | os.PathLike[str],
    *,
    n_data: int,
    model: nn.Module | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    scaling: str = "sqrt",
    batch_size: int | None = None,
    names: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> Path:
    """Write ``checkpoint/precision`` from the ``optimizer.pt`` of a Hugging Face Trainer.

    The state numbers its parameters and names none; see
    :func:`~blr_analysis.posterior.capture.from_checkpoint` for how they are named, and when
    that is refused. What is stored is the data's part H alone, N·√v̂ or N·B·v̂.

    Args:
        checkpoint: the folder, with ``optimizer.pt``, ``config.json`` and the weights.
        n_data: N, the number of training examples (the file does not know it).
        model: the model that was trained, on any device, the meta device too; None builds it from
            ``config.json`` without weights, all of it trainable. Pass it where parameters were
            frozen.
        prior_precision: δ to record beside H (``prior_outside``), which ``Posterior.load`` adds.
        scaling, batch_size: "sqrt", or "squared" with the examples of one step.
        names: see ``from_checkpoint``.
        out: where to write; default ``checkpoint/precision``.
        force: replace a precision that is there.
        dtype: float32 or bfloat16.

    Returns:
        Where it was written.

    Raises:
        OptimizerError: the state fits the model in no way, or in several; bfloat16 states.
        StorageError: files that are missing, damaged, or pickles that hold more than tensors;
            ``out`` is there.
        ModelError: weights of another model; a ``config.json`` of no known architecture.
        InputError: transformers is not installed.

    Example:
        >>> checkpoint_precision("no-run/checkpoint-500", n_data=8000)
        Traceback (most recent call last):
            ...
        blr_analysis.errors.StorageError: there is no folder 'no-run/checkpoint-500': ...
    """
    place = Path(path_of(checkpoint)).expanduser()
    if not place.is_dir():
        raise StorageError(
            f"there is no folder {str(place)!r}: name one checkpoint of a Trainer's output"
        )
    target = place / FOLDER if out is None else Path(path_of(out)).expanduser()
    storage.check_target(target, force=force)
    if model is not None:
        instance("model", model, nn.Module, "the torch.nn.Module that was trained")
    captured = from_checkpoint(
        place,
        empty_model(place) if model is None else model,
        n_data=n_data,
        prior_precision=prior_precision,
        scaling=scaling,
        batch_size=batch_size,
        names=names,
        bare=True,
    )
    safe = any(place.glob("model*.safetensors"))
    write_captured(target, captured, model=place if safe else None, dtype=dtype)
    return target


def empty_model(folder: Path) -> Any:
    """The model that ``config.json`` describes, on the meta device: names and shapes, no weights.

    Raises:
        ModelError: no ``config.json``, or an architecture that transformers does not have.
        InputError: transformers is not installed.
    """
    advice = "pass model=, the model that was trained (on the meta device, it needs no memory)"
    try:
        config = read_config(folder)
    except (StorageError, ModelError) as error:
        raise ModelError(f"{error}; {advice}") from error
    import transformers

    wanted = (config.architectures or [""])[0]
    kind = getattr(transformers, wanted, None) if wanted else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ModelError(
            f"transformers does not have {wanted!r}, the architecture of {str(folder)!r}: {advice}"
        )
    with torch.device("meta"):
        return kind(config)
