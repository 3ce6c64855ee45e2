"""The folder of a training, as a trainer leaves it: checkpoints along the way, and the recipe.

    OUTPUT/checkpoint-500/recipe.json                      the training up to that step
    OUTPUT/_run/recipe.json, step-00000000.safetensors …   the training up to its final weights

No pickle is read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from blr_analysis.errors import BLRError, StorageError, told_as
from blr_analysis.files import Folder
from blr_analysis.files.headers import read_record
from blr_analysis.recipe import Recipe
from blr_analysis.snapshots import checked_state, equal, read, state_of

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


def training_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments for the Task of a model in a trainer's output folder, or in a ``checkpoint-*``.

    The recipe was written by :class:`~blr_analysis.huggingface.CheckpointsCallback`; it has the
    first weights if they are beside it.

    Returns:
        ``checkpoints`` and ``recipe``; an entry is missing where the folder has none.
    """
    home = home_of(folder)
    arguments: dict[str, Any] = {}
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


def reading_in(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """How a trainer read its texts, as its callback recorded it in the output folder.

    Returns:
        "eos", whether the end token stands behind them, and "beta" of preference pairs; empty
        where nothing is recorded.

    Raises:
        StorageError: a damaged file.
    """
    file = home_of(folder) / RUN / READING
    return read_record(file) if file.is_file() else {}


def recipe_of_weights(checkpoints: Any, model: nn.Module) -> Recipe | None:
    """The recipe of the training up to a model's weights, from the folder of its checkpoints.

    It is that of the checkpoint that has these weights, or else that of the whole run; None where
    ``checkpoints`` is no folder.
    """
    if not isinstance(checkpoints, str | os.PathLike):
        return None
    home = home_of(checkpoints)
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
