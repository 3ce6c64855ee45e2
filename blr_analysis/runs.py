"""What a trainer left in its folder of a training: checkpoints along the way, and the recipe.

    OUTPUT/checkpoint-500/recipe.json                      up to that step
    OUTPUT/_run/recipe.json, step-00000000.safetensors …   up to the weights that were kept

Nothing that is pickled is read.
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

RUN = "_run"  # in the output folder, what callbacks keep; not pushed to a hub, by its first letter
TOLD = "recipe.json"
FIRST = "step-00000000.safetensors"  # the first weights


def home_of(folder: str | os.PathLike[str]) -> Path:
    """A trainer's output folder, of itself, of a checkpoint in it, or of what callbacks keep."""
    place = Path(folder).expanduser().absolute()
    is_inside = place.name.startswith("checkpoint-") or place.name == RUN
    return place.parent if is_inside else place


def training_of(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """``checkpoints`` and ``recipe`` for the Task of a model that a trainer left in this folder:
    its output, or one of the ``checkpoint-*`` there.

    The recipe is that of :class:`~blr_analysis.huggingface.CheckpointsCallback`, with the first
    weights where these are beside it.
    """
    home = home_of(folder)
    beside = [*home.glob("checkpoint-*")]
    found: dict[str, Any] = {}
    if [*(home / RUN).glob("step-*.safetensors")]:
        found["checkpoints"] = home / RUN
    elif beside and all([*one.glob("*.safetensors")] for one in beside):
        found["checkpoints"] = home
    if (recipe := recipe_in(folder)) is not None:
        found["recipe"] = recipe
    return found


def recipe_of_weights(checkpoints: Any, model: nn.Module) -> Recipe | None:
    """The recipe beside the checkpoints of a folder, up to a model's weights: of the checkpoint
    that has them, else of the whole run. None of anything but a folder."""
    if not isinstance(checkpoints, str | os.PathLike):
        return None
    home = home_of(checkpoints)
    own = state_of(model)
    for place in home.glob(f"checkpoint-*/{TOLD}"):
        with suppress(BLRError):  # of weights that are not kept as safetensors
            state = checked_state(read(place.parent), model, place.parent.name)
            if equal(state, own):
                return recipe_in(place.parent)
    return recipe_in(home)


def recipe_in(folder: str | os.PathLike[str]) -> Recipe | None:
    """The recipe that callbacks kept in a checkpoint, or of the whole run; None where none is.

    Raises:
        StorageError: a file that is no recipe.
    """
    home = home_of(folder)
    places = (Path(folder).expanduser() / TOLD, home / RUN / TOLD)
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        return None
    first = home / RUN / FIRST
    initial = Folder.open(first).tensors() if first.is_file() else None
    with told_as(StorageError, f"{str(place)!r} holds no recipe"):
        return Recipe(**read_record(place), initial=initial)
