"""A LoRA adapter as a fine-tuned model: the base's tensors, with the adapter added.

    W = W_0 + s·B·A,      s = α/r, or α/√r where rank-stabilised,

and with DoRA's magnitudes m (one for each output j)  W_j = m_j (W_0 + s·B·A)_j / ‖(W_0 + s·B·A)_j‖.
Adapters are so merged as weights: the sum of two adapters holds B₁A₁ + B₂A₂ and none of the
cross terms B₁A₂ that adding A to A and B to B brings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from blr_analysis.checks import some
from blr_analysis.errors import StorageError
from blr_analysis.files import Folder, Loaded, Source
from blr_analysis.merging.adapters.changes import changes_of
from blr_analysis.merging.adapters.config import CONFIG, PICKLE, TENSORS, AdapterConfig, read_config
from blr_analysis.merging.adapters.source import Adapter


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the folder of a PEFT adapter.

    >>> is_adapter("no/such/folder")
    False
    """
    return (Path(path).expanduser() / CONFIG).is_file()


def open_adapter(
    path: str | os.PathLike[str], base: Source, *, dtype: torch.dtype | None = None
) -> Adapter:
    """The model that a PEFT LoRA adapter makes of ``base``, as a source of tensors.

    It has the base's names, shapes and dtypes; a precision that goes with it is one of the
    merged weights, under those names. Nothing is loaded yet, but all is checked: every tensor of
    the adapter is used, or it is refused.

    Args:
        path: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.
        base: the model that the adapter was trained on.
        dtype: in which changed tensors are answered, at least; None: as the base stores them. A
            bfloat16 base keeps 8 bits of each weight, so that a small s·B·A is mostly rounded
            away: ``torch.float32`` keeps it for a merge.

    Raises:
        StorageError: files are missing, damaged or pickles.
        ModelError: the adapter does not fit the base, or is of a kind whose weights cannot be
            told exactly (another PEFT method than LoRA, aLoRA, PiSSA not converted, …).

    Example:
        >>> import json, tempfile
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
        ...     print(model.tensor("fc.weight"), model.changes["fc.weight"].words)
        tensor([[ 3.,  1.,  5.],
                [ 7.,  1., 13.]]) LoRA, r=1, scaling 2

    Source: Hu et al. 2021, "LoRA", Eq. 3; Kalajdzievski 2023, rank stabilisation; Liu et al.
    2024, "DoRA", Eq. 5; layouts as PEFT 0.21 writes them.
    """
    folder = Path(path).expanduser()
    if not (folder / CONFIG).is_file():
        raise StorageError(
            f"{str(path)!r} holds no {CONFIG}: expected the folder of a PEFT adapter."
        )
    config = read_config(folder)
    if not (folder / TENSORS).is_file():
        raise StorageError(
            f"{str(path)!r} holds no {TENSORS}"
            + (
                f", but {PICKLE}: a pickle can run code when it is read, and none is read here. "
                "Load the adapter once where you trust it, and save it again with "
                "save_pretrained(folder)."
                if (folder / PICKLE).is_file()
                else ": expected the tensors of the adapter beside its configuration."
            )
        )
    models = sorted(p.name for p in folder.glob("model*.safetensors"))
    if models:
        raise StorageError(
            f"{str(path)!r} holds both an adapter and {some(models)}: name the adapter's folder or "
            "the model's, one without the other."
        )
    file = Folder.open(folder / TENSORS)
    changes = changes_of(config, file, base)
    return Adapter(config.folder, changes, file, base, dtype=dtype, notes=_notes(config, base))


def apply_adapter(base: Mapping[str, Tensor], path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """A state dict with a PEFT adapter added; tensors that it does not change are the base's own.

    Raises:
        InputError: no state dict.
        StorageError, ModelError: as :func:`open_adapter`.
    """
    model = open_adapter(path, Loaded("the base", base))
    return {n: model.tensor(n).to(t.device) if n in model.changes else t for n, t in base.items()}


def _notes(config: AdapterConfig, base: Source) -> tuple[str, ...]:
    trained, here = Path(config.base or "").name, Path(base.name).expanduser().resolve().name
    if trained in ("", here) or not Path(base.name).expanduser().exists():
        return ()
    return (
        f"{config.folder!r} was trained on {config.base!r} by its own record, and is added to "
        f"{base.name!r}: only names and shapes say that they are the same.",
    )
