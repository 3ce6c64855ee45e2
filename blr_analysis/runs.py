"""The folder of a training, as a trainer leaves it: checkpoints along the way, and the recipe.

    OUTPUT/checkpoint-500/recipe.json                      the training up to that step
    OUTPUT/_run/recipe.json, step-00000000.safetensors …   the training up to its final weights
    OUTPUT/_run/weights.json                               some numbers of the weights at its saves

A model that is trained once more without a callback has another run's ``_run`` beside it: its
weights are not among those noted there. No pickle is read.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from blr_analysis.errors import BLRError, InputError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_record
from blr_analysis.recipe import Recipe
from blr_analysis.snapshots import checked_state, equal, noted_step, read, state_of

RUN = "_run"  # the callbacks' folder in the output; hubs skip names that begin with "_"
RECIPE = "recipe.json"
READING = "reading.json"  # in RUN: how the trainer read its texts
POSTERIOR = "posterior.safetensors"  # in RUN: the posterior that the training recorded
FIRST_WEIGHTS = "step-00000000.safetensors"


def home_of(folder: str | os.PathLike[str]) -> Path:
    """A trainer's output folder: the folder itself, or the one around a checkpoint or ``_run``."""
    place = Path(folder).expanduser().absolute()
    is_inside = place.name.startswith("checkpoint-") or place.name == RUN
    return place.parent if is_inside else place


def training_of(folder: str | os.PathLike[str], model: nn.Module) -> dict[str, Any]:
    """Arguments for the Task of a model in a trainer's output folder, or in a ``checkpoint-*``.

    The recipe was written by :class:`~blr_analysis.huggingface.CheckpointsCallback`; it has the
    first weights if they are beside it.

    Returns:
        ``checkpoints`` and ``recipe``; an entry is missing where the folder has none. Empty, with
        a warning, where another training recorded them.
    """
    home = home_of(folder)
    arguments: dict[str, Any] = {}
    try:
        noted_step(home / RUN, model)
    except InputError:
        warnings.warn(
            f"{str(home / RUN)!r} was recorded by another training than that of these weights: "
            "its checkpoints and recipe are not used",
            stacklevel=2,
        )
        return arguments
    folders = [*home.glob("checkpoint-*")]
    have_weights = [any(path.glob("*.safetensors")) for path in folders]
    if any((home / RUN).glob("step-*.safetensors")):
        arguments["checkpoints"] = home / RUN
    elif folders and all(have_weights):
        arguments["checkpoints"] = home
    recipe = recipe_in(folder)
    if recipe is not None:
        arguments["recipe"] = recipe
    return arguments


def reading_in(folder: str | os.PathLike[str], model: nn.Module) -> dict[str, Any]:
    """How a trainer read its texts, as its callback recorded it in the output folder.

    Returns:
        "eos", whether the end token stands behind them, and "beta" of preference pairs; empty
        where nothing is recorded, or where another training recorded it.

    Raises:
        StorageError: a damaged file.
    """
    run = home_of(folder) / RUN
    with suppress(InputError):
        noted_step(run, model)
        if (run / READING).is_file():
            return read_record(run / READING)
    return {}


def recipe_of_weights(checkpoints: Any, model: nn.Module) -> Recipe | None:
    """The recipe of the training up to a model's weights, from the folder of its checkpoints.

    It is that of the checkpoint that has these weights, or else that of the whole run; None where
    ``checkpoints`` is no folder.

    Raises:
        InputError: another training recorded the folder.
    """
    if not isinstance(checkpoints, str | os.PathLike):
        return None
    home = home_of(checkpoints)
    noted_step(home / RUN, model)
    final_state = state_of(model)
    for file in home.glob(f"checkpoint-*/{RECIPE}"):
        folder = file.parent
        with suppress(BLRError):  # the weights are in another format than safetensors
            state = checked_state(read(folder), model, folder.name)
            if equal(state, final_state):
                return recipe_in(folder)
    return recipe_in(home)


def recipe_in(folder: str | os.PathLike[str]) -> Recipe | None:
    """The recipe in a checkpoint's folder, or that of the whole run; None without either.

    Raises:
        StorageError: a file that is no recipe.
    """
    home = home_of(folder)
    candidates = (Path(folder).expanduser() / RECIPE, home / RUN / RECIPE)
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        return None
    weights = home / RUN / FIRST_WEIGHTS
    initial = Folder.open(weights).tensors() if weights.is_file() else None
    with told_as(StorageError, f"{str(file)!r} holds no recipe"):
        return Recipe(**read_record(file), initial=initial)
