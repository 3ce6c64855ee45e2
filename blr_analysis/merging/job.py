"""What to merge with what, after all parsing: what recipes and calls both lead to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from blr_analysis.merging.methods import Method, method_of
from blr_analysis.merging.vocabularies import Vocabulary

MISSING = ("error", "base", "zero")
Weight = float | Callable[[str], float]


@dataclass(frozen=True)
class Member:
    """One fine-tuned model of a merge.

    Attributes:
        model: its folder (or ``.safetensors`` file), or the folder of a LoRA adapter.
        precision: where its precision is stored; None where the method needs none, or where
            :attr:`Job.missing_precision` says what stands for it.
        weight: α_t, a number or a function of the tensor's name.
        n_data: N_t, the number of examples that a per-example precision is multiplied by; only
            for files that do not know their own.
        density: the share of θ_t − θ_0 that stays, a number or a function of the tensor's name.
        data: the examples that its statistics are taken of on the way, in a precision's place.
    """

    model: Path
    precision: Path | None = None
    weight: Weight = 1.0
    n_data: int | None = None
    density: Weight = 1.0
    data: Path | None = None


@dataclass(frozen=True)
class MergeSettings:
    """How to merge.

    Attributes:
        method: a name of :data:`blr_analysis.merging.methods.METHODS`.
        delta: δ, added to every entry of H_0.
        missing_precision: what stands for a precision that is not there: ``"error"`` refuses,
            ``"base"`` takes the base's (δ included), ``"zero"`` takes 0.
        normalize: divide the weights by their sum; None: as the method does by itself.
        dtype: in which the formula is computed, float32 or float64.
        out_dtype: in which the merged tensors are written; None: each as in the base.
        shrink, power, damping: of precisions with factors, see :mod:`blr_analysis.merging.layers`
            (shrink None: 1, or as measured where moments are singular or taken on the way);
            ``power`` also of diagonals, every number of them.
        trust: take precisions that were recorded for other weights.
        scale: λ of task arithmetic and of methods that leave a part of θ_t − θ_0 out, a number or a
            function of the name.
        seed: of what is left out by chance.
        rescale: what stays by chance is divided by its share.
    """

    method: str
    delta: float = 0.0
    missing_precision: str = "error"
    normalize: bool | None = None
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    shrink: float | None = None
    power: float = 1.0
    damping: float | None = None
    trust: bool = False
    scale: Weight = 1.0
    seed: int = 0
    rescale: bool = True

    @property
    def row(self) -> Method:
        """The method's row of the registry."""
        return method_of(self.method)

    @property
    def divides(self) -> bool:
        """Whether the weights are divided by their sum."""
        return self.row.normalize if self.normalize is None else self.normalize


@dataclass(frozen=True, kw_only=True)
class Job(MergeSettings):
    """A merge of folders.

    Attributes:
        members: the fine-tuned models, in order.
        base: θ_0, the model that they started from; None only for ``linear`` and ``fisher``.
        base_precision: H_0 without δ; None: 0.
        tokenizer_source: ``"base"``, or the folder whose tokenizer is copied.
        vocabulary: the tokens of the result, where the models have not all the same.
    """

    members: tuple[Member, ...]
    base: Path | None = None
    base_precision: Path | None = None
    tokenizer_source: str | Path = "base"
    vocabulary: Vocabulary | None = None
