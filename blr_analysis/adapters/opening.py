"""An adapter's folder, opened as the fine-tuned model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from blr_analysis.adapters.peft_merge import merge_and_unload
from blr_analysis.adapters.products import products_of
from blr_analysis.adapters.settings import CONFIG, is_adapter, read_entries
from blr_analysis.adapters.sources import Adapted
from blr_analysis.checks import some
from blr_analysis.errors import ModelError, StorageError
from blr_analysis.files import Folder, Source


def open_adapter(
    path: str | os.PathLike[str], base: Source, *, dtype: torch.dtype | None = None
) -> Adapted:
    """The model that a PEFT adapter makes of ``base``, as a source of tensors.

    The model has the base's names, shapes and dtypes. A precision of it is a precision of the
    merged weights, under the base's names. Tensors of plain LoRA are computed when they are read,
    but all are checked now: an adapter with a tensor that is not used is refused. PEFT merges any
    other adapter now; its base must be the folder of a transformers model that fits into memory.

    Args:
        path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: the model that the adapter was trained on.
        dtype: the least dtype of changed tensors; None: the dtype that the base stores. A
            bfloat16 base keeps 8 bits of each weight, so that a small s·B·A is mostly rounded
            away: ``torch.float32`` keeps it for a merge.

    Raises:
        StorageError: files are missing, damaged or pickles.
        ModelError: the adapter does not fit the base, or is of a kind that PEFT cannot merge.

    Example:
        >>> import json, tempfile
        >>> from blr_analysis.files import Loaded
        >>> from safetensors.torch import save_file
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
    folder = Path(path).expanduser()
    if not is_adapter(folder):
        raise StorageError(f"{str(path)!r} is no PEFT adapter: it has no {CONFIG}.")
    entries = read_entries(folder)
    file = Folder.open(folder, stem="adapter_model")
    not_floating = [name for name, spec in file.specs.items() if not spec.dtype.is_floating_point]
    if not_floating:
        raise ModelError(
            f"{some(not_floating)} of {str(path)!r} must be of a floating dtype, not "
            f"{file.specs[not_floating[0]].dtype}: save the adapter without quantization"
        )
    products = products_of(entries, file, base, str(folder))
    if products is not None:
        return Adapted(str(folder), base, file, products, dtype)
    merged = merge_and_unload(folder, entries, base, file)
    return Adapted(str(folder), base, file, merged.changed, dtype, merged.untied)
