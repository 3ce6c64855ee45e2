"""How a pair of LoRA matrices is added to a tensor of the base: rank, groups and orientation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from blr_analysis.errors import ModelError
from blr_analysis.files import Spec
from blr_analysis.merging.adapters.config import AdapterConfig


@dataclass(frozen=True)
class LowRank:
    """scale·B·A as it is added to a base tensor of ``groups`` × ``rows`` × ``cols`` elements.

    ``b`` is [out, r·groups] and ``a`` [r·groups, in] (kernels of a convolution flattened into
    ``in``). Expert e takes the rows e·r … of A and every ``groups``-th column of B, from e on, as
    PEFT lays them out. ``transposed``: the base stores [in, out] (Conv1D, Embedding, some
    experts), and gets (B·A)ᵀ. ``magnitude``: DoRA's m, one number for each output.
    """

    a: str
    b: str
    rank: int
    scale: float
    rows: int
    cols: int
    groups: int = 1
    transposed: bool = False
    magnitude: str | None = None

    @property
    def outputs(self) -> int:
        """The length of ``magnitude``."""
        return self.cols if self.transposed else self.rows


def fitting(
    parts: Mapping[str, str],
    rank: int,
    scale: float,
    shape: tuple[int, ...],
    specs: Mapping[str, Spec],
    *,
    parameter: bool,
) -> list[LowRank]:
    """The ways in which one pair of matrices fits a tensor of this shape: none, one, or for
    squares two (as stored, then transposed).

    Args:
        parts: the pair's names in the adapter's file.
        specs: shapes in that file.
        parameter: whether the pair is for a bare parameter ([out, in], or experts × two sizes)
            and not for a layer.
    """
    embedding = "A of embedding" in parts
    names = (
        (parts["A of embedding"], parts["B of embedding"])
        if embedding
        else (parts["A"], parts["B"])
    )
    a, b = (specs[name].shape for name in names)
    experts = parameter and len(shape) == 3
    groups = shape[0] if experts else 1
    found, rows, cols = [], 0, 0
    if len(shape) == 2 or experts:
        rows, cols = shape[-2:]
        straight = (a, b) == ((rank * groups, cols), (rows, rank * groups))
        turned = (a, b) == ((rank * groups, rows), (cols, rank * groups))
        # PEFT turns no parameter of two dimensions, and gives one expert alone no turned form
        turned = turned and not (parameter and groups == 1)
        found = [t for t, fits in ((False, straight and not embedding), (True, turned)) if fits]
    elif 3 <= len(shape) <= 5 and not (parameter or embedding):
        rows, cols = shape[0], math.prod(shape[1:])
        ones = (1,) * (len(shape) - 2)
        found = [False] if (a, b) == ((rank, *shape[1:]), (rows, rank, *ones)) else []
    if not found:
        return []
    every = [
        LowRank(*names, rank, scale, rows, cols, groups, turned, parts.get("magnitude"))
        for turned in found
    ]
    return [each for each in every if _magnitude_fits(each, specs, len(shape))]


def _magnitude_fits(low_rank: LowRank, specs: Mapping[str, Spec], ndim: int) -> bool:
    if low_rank.magnitude is None:
        return True
    flat, kernel = (low_rank.outputs,), (1, low_rank.outputs, *(1,) * (ndim - 2))
    return specs[low_rank.magnitude].shape in (flat, kernel)


def stored_transposed(name: str, base: Mapping[str, Spec], config: AdapterConfig) -> bool:
    """Whether a square weight is stored as [in, out], which its own shape cannot tell.

    The layers of Conv1D models store [in, out] and have biases. A layer without one is no Conv1D;
    for others the base's weights that are not square tell, by which of their sizes the bias has.
    (``fan_in_fan_out`` in the adapter's configuration only says what PEFT's last layer was.)

    Raises:
        ModelError: the base has layers of both kinds.
    """

    def bias(weight: str) -> tuple[int, ...]:
        spec = base.get(weight.removesuffix("weight") + "bias")
        return spec.shape if spec is not None and weight.endswith(".weight") else ()

    if not bias(name):
        return False
    sizes = [(spec.shape, bias(n)) for n, spec in base.items() if len(spec.shape) == 2 and bias(n)]
    straight = any(shape[0] != shape[1] and (shape[0],) == size for shape, size in sizes)
    turned = any(shape[0] != shape[1] and (shape[1],) == size for shape, size in sizes)
    if straight and turned:
        raise ModelError(
            f"{name!r} of the base is square, and the base has layers that store [in, out] and "
            f"layers that store [out, in]: the adapter {config.folder!r} does not say which this "
            "is. Name the folder of a merged model instead."
        )
    return turned if straight or turned else config.fan_in_fan_out
