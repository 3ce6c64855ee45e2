"""A LoRA adapter as a fine-tuned model: the base's tensors, with the adapter added.

    W = W_0 + s·B·A,      s = α/r, or α/√r where rank-stabilised.

Adapters are so merged as weights: the sum of two adapters holds B₁A₁ + B₂A₂ and none of the
cross terms B₁A₂ that adding A to A and B to B brings. A convolution is a matrix [out, in · kernel].
Adapters of any other kind (DoRA, grouped convolutions, experts, other methods than LoRA) are merged
by PEFT.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blr_analysis.checks import some
from blr_analysis.errors import StorageError
from blr_analysis.files import Folder, Source

if TYPE_CHECKING:
    from blr_analysis.merging.lora.source import AdaptedBase

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
__all__ = ["is_adapter", "open_adapter"]


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the folder of a PEFT adapter.

    >>> is_adapter("no/such/folder")
    False
    """
    return (Path(path).expanduser() / CONFIG).is_file()


def open_adapter(
    path: str | os.PathLike[str], base: Source, *, dtype: torch.dtype | None = None
) -> AdaptedBase:
    """The model that a PEFT adapter makes of ``base``, as a source of tensors.

    It has the base's names, shapes and dtypes; a precision that goes with it is one of the
    merged weights, under those names. Of plain LoRA nothing is loaded yet, but all is checked:
    every tensor of the adapter is used, or it is refused. Any other adapter is merged by PEFT
    now, and the base must be the folder of a transformers model that fits into memory.

    Args:
        path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: the model that the adapter was trained on.
        dtype: in which changed tensors are answered, at least; None: as the base stores them. A
            bfloat16 base keeps 8 bits of each weight, so that a small s·B·A is mostly rounded
            away: ``torch.float32`` keeps it for a merge.

    Raises:
        StorageError: files are missing, damaged or pickles.
        ModelError: the adapter does not fit the base, or is of a kind that PEFT cannot merge.

    Example:
        >>> import json, tempfile
        >>> from safetensors.torch import save_file
        >>> from blr_analysis.files import Loaded
        >>> pair = {"A": torch.tensor([[1.0, 0.0, 2.0]]), "B": torch.tensor([[1.0], [3.0]])}
        >>> config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["fc"]}
        >>> base = Loaded("base", {"fc.weight": torch.ones(2, 3), "fc.bias": torch.zeros(2)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file(
        ...         {f"base_model.model.fc.lora_{x}.weight": t for x, t in pair.items()},
        ...         f"{folder}/adapter_model.safetensors",
        ...     )
        ...     _ = Path(f"{folder}/adapter_config.json").write_text(json.dumps(config))
        ...     model = open_adapter(folder, base)
        ...     print(model.tensor("fc.weight"), model.changes["fc.weight"])
        tensor([[ 3.,  1.,  5.],
                [ 7.,  1., 13.]]) LoRA, r=1, scaling 2

    Source: Hu et al. 2021, "LoRA", Eq. 3; Kalajdzievski 2023, rank stabilisation; layouts as
    PEFT 0.21 writes them.
    """
    # here, since only adapters need pydantic
    from blr_analysis.merging.lora.changes import (
        PICKLE,
        are_products,
        changes_of,
        is_plain,
        read_entries,
        read_settings,
    )
    from blr_analysis.merging.lora.source import ByPeft, Streamed, merge_and_unload

    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        raise StorageError(f"{str(path)!r} holds no {CONFIG}, and is no PEFT adapter.")
    entries = read_entries(folder)
    if not (folder / TENSORS).is_file():
        pickled = (folder / PICKLE).is_file()
        why = f" but the pickle {PICKLE}: save it again as safetensors." if pickled else "."
        raise StorageError(f"{str(path)!r} holds no {TENSORS}{why}")
    models = sorted(p.name for p in folder.glob("model*.safetensors"))
    if models:
        raise StorageError(f"{str(path)!r} holds both an adapter and {some(models)}: take one out.")
    file = Folder.open(folder / TENSORS)
    trained = str(entries.get("base_model_name_or_path") or "")
    notes = _notes(str(folder), trained, base)
    if is_plain(entries) and are_products(file):
        changes = changes_of(read_settings(entries, folder), file, base, str(folder))
        return Streamed(str(folder), base, file, changes, dtype, notes)
    return ByPeft(str(folder), base, merge_and_unload(folder, entries, base, file), dtype, notes)


def _notes(folder: str, trained: str, base: Source) -> tuple[str, ...]:
    here = Path(base.name).expanduser()
    if Path(trained).name in ("", here.resolve().name) or not here.exists():
        return ()
    return (
        f"{folder!r} was trained on {trained!r} by its own record, and is added to "
        f"{base.name!r}: only names and shapes say that they are the same.",
    )
