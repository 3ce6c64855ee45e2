"""Checkpoints of a chosen size to merge: made on the spot, of the shape of a small Llama.

A base and fine-tunes in bfloat16 and a precision set in float32 for each of them, as a Hugging
Face folder and a precision folder hold them. The numbers are uniform noise (weights), and noise
to the fourth power, over ten decades (precisions): a merge takes as long with them as with any.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = (0.5, 0.3, 0.2)  # α_t, one per fine-tune
DELTA = 1e-8
LAYERS = 16
N_DATA = 1000
TOKENIZER = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


@dataclass(frozen=True)
class Shape:
    """The widths of a Llama.

    Attributes:
        hidden: numbers between layers.
        intermediate: numbers inside an MLP.
        layers: the number of layers.
        vocabulary: the number of tokens.
        heads: heads of the attention.
        positions: tokens of a text at most.
    """

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int
    positions: int = 2048

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        h = self.hidden
        f = self.intermediate
        v = self.vocabulary
        yield "model.embed_tokens.weight", (v, h)
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield from ((f"{at}.self_attn.{part}_proj.weight", (h, h)) for part in "qkvo")
            yield from ((f"{at}.mlp.{part}_proj.weight", (f, h)) for part in ("gate", "up"))
            yield f"{at}.mlp.down_proj.weight", (h, f)
            yield from (
                (f"{at}.{part}_layernorm.weight", (h,)) for part in ("input", "post_attention")
            )
        yield "model.norm.weight", (h,)
        yield "lm_head.weight", (v, h)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        """The ``config.json`` of transformers."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": False,
        }


def scaled(scale: int) -> Shape:
    """A Llama of 16 layers whose widths are all proportional to ``scale`` (32: 551 million)."""
    return Shape(
        hidden=48 * scale,
        intermediate=128 * scale,
        layers=LAYERS,
        vocabulary=1000 * scale,
        heads=scale,
    )


@dataclass(frozen=True)
class Checkpoints:
    """Where they are.

    Attributes:
        root: the folder of all.
        shape: of every model.
    """

    root: Path
    shape: Shape

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def models(self) -> tuple[Path, ...]:
        return tuple(self.root / f"tuned{t}" for t in range(1, len(WEIGHTS) + 1))

    def precision(self, model: Path) -> Path:
        """The precision folder of a model."""
        return model / "precision"

    def as_model(self, model: Path) -> Path:
        """The same precisions where only whole models are read: a folder with a link to them."""
        return self.root / f"{model.name}_precision_as_model"

    def inputs(self, precisions: bool) -> tuple[Path, ...]:
        """All files with numbers, with the precisions or without them."""
        folders = (self.base, *self.models)
        found = [folder / "model.safetensors" for folder in folders]
        if precisions:
            found += [self.precision(f) / "precision.safetensors" for f in folders]
        return tuple(found)


def shape_of(parameters: int) -> Shape:
    """The shape whose number of parameters is nearest."""
    near = max(1, round(math.sqrt(parameters / 551e6) * 32))
    options = [scaled(s) for s in range(max(1, near - 1), near + 2)]
    return min(options, key=lambda s: abs(s.parameters - parameters))


def bytes_needed(shape: Shape) -> int:
    """Bytes on disk of everything that :func:`make` writes."""
    return shape.parameters * (1 + len(WEIGHTS)) * (2 + 4)


def make(root: Path, parameters: int, seed: int = 0, *, precisions: bool = True) -> Checkpoints:
    """Write them all, or all but the precisions, one at a time in memory."""
    made = Checkpoints(root, shape_of(parameters))
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=generator)

    shapes = dict(made.shape.tensors())
    base = {n: noise(s).sub_(0.5).mul_(0.08).bfloat16() for n, s in shapes.items()}
    _save_model(made.base, base, made.shape)
    for folder in made.models:
        tuned = {n: (noise(s).sub_(0.5).mul_(0.01) + base[n]).bfloat16() for n, s in shapes.items()}
        _save_model(folder, tuned, made.shape)
    base.clear()
    if not precisions:
        return made
    for folder in (made.base, *made.models):
        _save_precision(folder, {n: noise(s).pow_(4).mul_(100) for n, s in shapes.items()}, made)
    return made


def _save_model(folder: Path, tensors: dict[str, Tensor], shape: Shape) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _save_config(folder, shape)


def _save_config(folder: Path, shape: Shape) -> None:
    texts = {"config": shape.config(), "tokenizer": TOKENIZER, "tokenizer_config": {}}
    for name, document in texts.items():
        (folder / f"{name}.json").write_text(json.dumps(document))


def _save_precision(model: Path, tensors: dict[str, Tensor], made: Checkpoints) -> None:
    folder = made.precision(model)
    folder.mkdir()
    save_file(tensors, folder / "precision.safetensors", metadata={"format": "pt"})
    record = {
        "format": "blr_analysis.precision",
        "version": 1,
        "structure": "diag",
        "kind": "fisher_mc",
        "n_data": N_DATA,
        "prior_precision": 0.0,
        "parameters": list(tensors),
    }
    (folder / "precision_config.json").write_text(json.dumps(record))
    other = made.as_model(model)
    other.mkdir()
    os.symlink(folder.absolute() / "precision.safetensors", other / "model.safetensors")
    _save_config(other, made.shape)
