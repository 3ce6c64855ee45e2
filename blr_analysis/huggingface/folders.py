"""What a Hugging Face folder says about its model, before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blr_analysis.errors import ModelError, StorageError

TASKS = ("classification", "causal_lm")
ENDINGS = {
    "ForSequenceClassification": "classification",
    "ForCausalLM": "causal_lm",
    "LMHeadModel": "causal_lm",
}


def read_config(folder: Path) -> dict[str, Any]:
    """The model's configuration, as it stands in the folder.

    Raises:
        StorageError: no such folder, no ``config.json``, or one that cannot be read.
        ModelError: an adapter, or quantised weights.
    """
    if not folder.is_dir():
        raise StorageError(
            f"there is no folder {str(folder)!r}: expected a Hugging Face model on this machine, "
            "such as model.save_pretrained(folder) or `hf download` leaves."
        )
    path = folder / "config.json"
    if not path.is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{str(folder)!r} is a PEFT adapter, not a model: merge it into its base first "
                "(model.merge_and_unload() and save_pretrained), or fine-tune without it"
            )
        raise StorageError(f"{str(folder)!r} is no Hugging Face model: it holds no config.json.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {str(path)!r}: {error}.") from error
    if not isinstance(config, dict):
        raise StorageError(f"{str(path)!r} holds no configuration but a {type(config).__name__}.")
    if config.get("quantization_config"):
        raise ModelError(
            f"the weights of {str(folder)!r} are quantised, and have no gradient: use the model "
            "as it was before"
        )
    return config


def task_in(config: Mapping[str, Any], folder: Path) -> str:
    """The task that the configuration's architectures were built for.

    Raises:
        ModelError: no architecture, or one for another task; it is named.
    """
    named = config.get("architectures") or []
    tasks = {kind for a in named for ending, kind in ENDINGS.items() if str(a).endswith(ending)}
    if len(tasks) == 1:
        return tasks.pop()
    said = ", ".join(map(str, named)) or "no architecture"
    raise ModelError(
        f"{str(folder)!r} is {said}: expected a sequence classifier (…ForSequenceClassification) "
        "or a causal language model (…ForCausalLM); if it is one of them, say which with "
        "task='classification' or task='causal_lm'"
    )
