"""Small models in folders, with precisions beside them, for the tests of merging."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

State = dict[str, Tensor]
SHAPES = {
    "embed.weight": (11, 6),
    "layers.0.mlp.weight": (6, 6),
    "layers.0.norm.weight": (6,),
    "layers.1.mlp.weight": (6, 6),
    "layers.1.norm.weight": (6,),
    "scale": (),
}


def state(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def copied(model: nn.Module) -> State:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def examples(seed: int, n: int = 17) -> tuple[Tensor, Tensor]:
    """Of three classes, four inputs each."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def near(base: Mapping[str, Tensor], seed: int) -> State:
    """A fine-tune of ``base``."""
    noise = state(seed, torch.float64)
    return {n: (b.double() + 0.1 * noise[n]).to(b.dtype) for n, b in base.items()}


def curved(seed: int) -> State:
    return {n: t.abs() * 10 for n, t in state(1000 + seed).items()}


def record(**fields: Any) -> dict[str, Any]:
    base = {"format": "blr_analysis.precision", "version": 1, "kind": "fisher_mc"}
    return {**base, "structure": "diag", "n_data": 100, "prior_precision": 0.0, **fields}


def write_model(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    precision: Mapping[str, Tensor] | None = None,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """A model folder; with ``precision`` also its precision folder, with ``fields`` on record."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, "model", tensors, shards)
    settings = {"model_type": "tiny", "dtype": "float32", **(config or {})}
    (folder / "config.json").write_text(json.dumps(settings))
    vocab = {f"w{k}": k for k in range(len(tensors.get("embed.weight", (0,))))}
    document = {"of": folder.name, "model": {"vocab": vocab}}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "README.md").write_text("# a card")
    if precision is not None:
        write_precision(folder / "precision", precision, **fields)
    return folder


def write_precision(folder: Path, precision: Mapping[str, Tensor], **fields: Any) -> None:
    """A precision folder as it was written by hand; its record has these ``fields``."""
    folder.mkdir(exist_ok=True)
    write_tensors(folder, "precision", precision, 1)
    document = record(parameters=list(precision), **fields)
    (folder / "precision_config.json").write_text(json.dumps(document))


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor], shards: int) -> None:
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), folder / f"{stem}.safetensors")
        return
    weight_map = {}
    for k in range(shards):
        file = f"{stem}-{k + 1:05d}-of-{shards:05d}.safetensors"
        part = names[k::shards]
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_family(root: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> dict[str, Any]:
    """A base and two fine-tunes with precisions: the arguments of ``merge`` for folders."""
    base = state(0, dtype)
    folders = [
        write_model(root / f"ft{t}", near(base, t), precision=curved(t), shards=t, **fields)
        for t in (1, 2)
    ]
    first = write_model(root / "base", base, precision=curved(0), shards=3, **fields)
    return {
        "base": first,
        "models": folders,
        "precisions": [f / "precision" for f in folders],
        "base_precision": first / "precision",
    }


def family_in_memory(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same family as state dicts."""
    base = state(0, dtype)
    return {
        "base": base,
        "models": [near(base, t) for t in (1, 2)],
        "precisions": [curved(t) for t in (1, 2)],
        "base_precision": curved(0),
    }
