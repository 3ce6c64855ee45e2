"""The products s·B·A that plain LoRA adds to the weights of linear layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blr_analysis.adapters.base_names import translate
from blr_analysis.adapters.settings import is_plain_lora, scaling_of
from blr_analysis.errors import ModelError
from blr_analysis.files import Source, Spec
from blr_analysis.files.names import TOKEN_TABLES

PREFIX = "base_model.model."
PAIR = re.compile(rf"(?P<module>{re.escape(PREFIX)}.+)\.lora_(?P<letter>[AB])\.weight")


@dataclass(frozen=True)
class Product:
    """s·B·A, ``[out, in]``; ``a`` and ``b`` are the names of A and B in the adapter's file."""

    a: str
    b: str
    rank: int
    scale: float


def products_of(
    entries: Mapping[str, Any], file: Source, base: Source, folder: str
) -> dict[str, Product] | None:
    """The product that plain LoRA adds to each weight, by the base's names.

    Returns:
        None where the adapter holds more than pairs of matrices of linear layers, or where the base
        stores its weights as ``[in, out]``, as Conv1D does.

    Raises:
        StorageError: an impossible setting.
        ModelError: the adapter does not fit the base.
    """
    pairs = _pairs(file)
    if pairs is None or not is_plain_lora(entries) or stores_transposed(base.specs):
        return None
    names = translate([f"{module}.weight" for module in pairs], base.specs, folder)
    products = {}
    for module, pair in pairs.items():
        name = names[f"{module}.weight"]
        rank, scale = scaling_of(entries, module, folder)
        product = Product(pair["A"], pair["B"], rank, scale)
        is_convolution = len(base.specs[name].shape) > 2 or len(file.specs[product.a].shape) > 2
        if is_convolution:
            return None
        _check_product(product, name, file, base, folder)
        products[name] = product
    return products


def _pairs(file: Source) -> dict[str, dict[str, str]] | None:
    """The names of A and B by module; None where the file holds any other tensor."""
    pairs: dict[str, dict[str, str]] = {}
    for key in file.specs:
        match = PAIR.fullmatch(key)
        if match is None:
            return None
        module = match["module"].removeprefix(PREFIX)
        is_token_table = module.rpartition(".")[2] in TOKEN_TABLES
        if is_token_table:
            return None
        pair = pairs.setdefault(module, {})
        pair[match["letter"]] = key
    all_complete = all(len(pair) == 2 for pair in pairs.values())
    return pairs if all_complete else None


def _check_product(product: Product, name: str, file: Source, base: Source, folder: str) -> None:
    """Raise :class:`ModelError` where B·A has another shape than the base's weight."""
    weight = base.specs[name]
    a_shape = tuple(file.specs[product.a].shape)
    b_shape = tuple(file.specs[product.b].shape)
    rank = product.rank
    a_fits = a_shape == (rank, *weight.shape[1:])
    b_fits = b_shape == (*weight.shape[:1], rank)
    if not (a_fits and b_fits and weight.dtype.is_floating_point):
        raise ModelError(
            f"the adapter {folder!r} has B {list(b_shape)} and A {list(a_shape)} (r = {rank}) for "
            f"{name!r} {list(weight.shape)} of {weight.dtype}: name the base that it was trained "
            "on, not quantized"
        )


def stores_transposed(base: Mapping[str, Spec]) -> bool:
    """Whether some bias is as long as a row of its weight: the base stores ``[in, out]``."""
    for name, spec in base.items():
        bias = base.get(f"{name.removesuffix('weight')}bias")
        if len(spec.shape) != 2 or bias is None:
            continue
        rows, columns = spec.shape
        is_transposed = rows != columns and bias.shape[0] == columns
        if is_transposed:
            return True
    return False
