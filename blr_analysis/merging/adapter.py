"""LoRA adapters merged into one LoRA adapter, by their products, cut to a rank.

Adapter t adds ΔW_t = s_t B_t A_t to a layer's weight. The merge

    ΔW = Σ_t α_t ΔW_t,   or with moments of inputs (Σ_t α_t ΔW_t M_t)(Σ_t α_t M_t)⁻¹      (RegMean)

has all of its columns in the span of the B_t: with L = [B_1 … B_T] and R the matching rows,
ΔW = L R. No matrix of the size of W is formed. QR decompositions of L and R leave a small matrix,
as large as the sum of the ranks. Its singular values σ_i give the nearest ΔW of any rank r (Eckart
and Young, 1936), and the share of the squared size that it keeps, Σ_{i≤r} σ_i² / Σ σ_i². Adding A
to A and B to B instead would bring in cross terms B_1 A_2, which no model has.

A DoRA adapter also scales the rows of the weight, W_t = D_t (W_0 + ΔW_t). D_t is diagonal: for each
row the magnitude m_t over the norm of W_0 + ΔW_t. A weighted sum of such models is a DoRA adapter
again, D̄ (W_0 + Σ_t α_t (D_t / D̄) ΔW_t) with D̄ = 1 + Σ_t α_t (D_t − 1). Its rank is the sum of the
ranks, its magnitudes are D̄ times the norms of the rows.

Modules that adapters hold whole (``modules_to_save``) are averaged. An adapter that is merged
alone is copied as it is, of whatever kind it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis.adapters import (
    PREFIX,
    is_adapter,
    scaling_of,
    stores_transposed,
    translate,
)
from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Folder, read_config
from blr_analysis.files.placing import check_free
from blr_analysis.merging.adapter_files import (
    MAGNITUDE,
    Adapter,
    copy_adapter,
    open_adapter,
    read_adapter,
    write_adapter,
)
from blr_analysis.merging.job import Job
from blr_analysis.merging.layers import SINGULAR
from blr_analysis.merging.precisions import StoredPrecision, open_precision
from blr_analysis.merging.tensor_plans import number

SMALLEST = 1e-30  # a sum of weights or of squares up to this one divides nothing


@dataclass(frozen=True)
class AdapterReport:
    """The adapter that :func:`merge_adapters` has written.

    Attributes:
        folder: the merged adapter, or where it would be written.
        rank: the largest rank of its layers.
        shares: by layer, the share of ‖ΔW‖² that the rank keeps.
        averaged: the names of the tensors of whole modules, which are averaged.
    """

    folder: Path
    rank: int
    shares: Mapping[str, float]
    averaged: tuple[str, ...]

    @property
    def share(self) -> float:
        """The smallest of the shares; 1 where there are no layers."""
        return min(self.shares.values(), default=1.0)

    def __repr__(self) -> str:
        return (
            f"AdapterReport({str(self.folder)!r}: {len(self.shares)} layers of rank {self.rank} at "
            f"most, which keeps {self.share:.1%} of every merge or more)"
        )


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    weights: Sequence[float] | None = None,
    precisions: Sequence[Any] | None = None,
    base: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
) -> AdapterReport:
    """Merge LoRA adapters of one base into a LoRA adapter.

    Args:
        adapters: folders as PEFT writes them: plain, rank-stabilised or DoRA, of any ranks and
            scalings by layer, of Linear layers or Conv1D, with or without whole modules.
        out: the folder to write, new or empty.
        rank: the largest rank of a layer; None: the sum of the adapters' ranks, which keeps all.
        weights: α_t; None: 1/T each.
        precisions: M_t, one of structure "gram" for each adapter: the moments of the layers'
            inputs, fitted on the base with the adapter. None: the weighted sum.
        base: the folder of the base, whose weights DoRA needs.
        dry_run: whether the merge is computed and not written.

    Returns:
        The folder, and how much of the merge its rank keeps.

    Raises:
        InputError: no adapters, or not as many weights or precisions as adapters.
        ModelError: adapters of other bases or shapes, or that are more than products (embeddings,
            convolutions, biases): merge these into a model.
        PosteriorError: precisions that have no moments of a layer.
        StorageError: files that are damaged, or ``out`` that is not empty.

    Source: Hu et al., "LoRA", 2021; Liu et al., "DoRA", 2024; Jin et al., "RegMean", ICLR 2023.

    Example:
        >>> import json, tempfile
        >>> from safetensors.torch import save_file
        >>> def write(folder, a, b):
        ...     Path(folder).mkdir()
        ...     pair = {"A": torch.tensor([a]), "B": torch.tensor([[x] for x in b])}
        ...     names = {f"base_model.model.fc.lora_{x}.weight": t for x, t in pair.items()}
        ...     save_file(names, f"{folder}/adapter_model.safetensors")
        ...     config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["fc"]}
        ...     _ = Path(f"{folder}/adapter_config.json").write_text(json.dumps(config))
        >>> with tempfile.TemporaryDirectory() as place:
        ...     write(f"{place}/one", [1.0, 0.0], [2.0, 0.0])
        ...     write(f"{place}/two", [0.0, 1.0], [0.0, 1.0])
        ...     report = merge_adapters([f"{place}/one", f"{place}/two"], f"{place}/both", rank=1)
        ...     report.rank, round(report.share, 3)
        (1, 0.8)
    """
    target = Path(out).expanduser()
    if not dry_run:
        check_free(target)
    if not adapters:
        raise InputError("adapters is empty: name at least one")
    alphas = _weights_of(adapters, weights)
    places = _one_per_adapter("precisions", precisions, adapters)
    is_copy = alphas == [1] and precisions is None and rank is None
    if is_copy:
        adapter = read_adapter(adapters[0])
        if not dry_run:
            copy_adapter(adapter, target)
        return _report_of_copy(adapter, target)
    opened = [open_adapter(place) for place in adapters]
    if rank is not None:
        positive_int("rank", rank)
    grams = None if places is None else _opened_grams(places)
    merge = _AdapterMerge.of(opened, alphas, grams, base)
    products = {module: merge.product(module, rank) for module in merge.modules}
    whole_modules = _averaged(opened, alphas)
    tensors = {**_stored_base_weights(opened), **whole_modules, **merge.tensors(products)}
    ranks = {module: len(product.right) for module, product in products.items()}
    if not dry_run:
        write_adapter(target, opened[0], tensors, ranks, use_dora=bool(merge.bases))
    return AdapterReport(
        folder=target,
        rank=max(ranks.values(), default=0),
        shares={module: product.share for module, product in products.items()},
        averaged=tuple(whole_modules),
    )


def merge_adapters_of(
    job: Job, out: str | os.PathLike[str], rank: int | None, *, dry_run: bool = False
) -> AdapterReport:
    """:func:`merge_adapters` of the adapters that a recipe names.

    Raises:
        InputError: a method that is no sum of products, weights that differ by layer, or models
            that are no adapters.
    """
    if job.method not in ("linear", "task_arithmetic", "fisher"):
        raise InputError(
            f"out_adapter: {job.method} makes no adapter: use linear, task_arithmetic, or fisher "
            "with gram"
        )
    places = [member.model for member in job.members]
    models = [str(place) for place in places if not is_adapter(place)]
    if models:
        raise InputError(f"out_adapter: {some(models)} is no adapter")
    weights = []
    for member in job.members:
        if callable(member.weight):
            raise InputError("out_adapter: weights must be numbers, the same for all layers")
        weights.append(float(member.weight))
    if job.divides:
        total = sum(weights)
        if not abs(total) > SMALLEST:
            raise InputError(f"the weights sum to {total:g}: change them")
        weights = [weight / total for weight in weights]
    precisions = None
    if job.method == "fisher":
        precisions = [member.precision for member in job.members]
    return merge_adapters(
        places,
        out,
        rank=rank,
        weights=weights,
        precisions=precisions,
        base=job.base,
        dry_run=dry_run,
    )


def _weights_of(adapters: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
    """α_t of every adapter; 1/T each where the user has given none."""
    alphas = _one_per_adapter("weights", weights, adapters)
    if alphas is None:
        return [1 / len(adapters)] * len(adapters)
    return [number(alpha, "every layer", "weight") for alpha in alphas]


def _one_per_adapter(
    name: str, values: Sequence[Any] | None, adapters: Sequence[Any]
) -> list[Any] | None:
    """The values of an argument, which must be as many as adapters; None where it is left out."""
    if values is None:
        return None
    if len(values) != len(adapters):
        raise InputError(f"{name} must be {len(adapters)}, one for each adapter: got {len(values)}")
    return list(values)


def _opened_grams(places: Sequence[Any]) -> list[StoredPrecision]:
    """The precisions, which must all be there and of structure "gram"."""
    if any(place is None for place in places):
        raise PosteriorError("some adapters have no precision: give one for each, or none")
    grams = [open_precision(place) for place in places]
    if any(gram.structure != "gram" for gram in grams):
        raise PosteriorError("adapters are merged by precisions of structure 'gram' alone")
    return grams


def _report_of_copy(adapter: Adapter, target: Path) -> AdapterReport:
    """The report of an adapter that was merged alone."""
    ranks = [
        scaling_of(adapter.entries, module, str(adapter.folder))[0] for module in adapter.pairs
    ]
    shares = dict.fromkeys(adapter.pairs, 1.0)
    return AdapterReport(target, max(ranks, default=0), shares, adapter.whole)


@dataclass(frozen=True)
class _AdapterMerge:
    """The merge of the modules of some adapters.

    Attributes:
        adapters: the adapters.
        weights: α_t.
        modules: the modules that some adapter changes.
        grams: the precisions with M_t; None: the weighted sum.
        layers: by module, the name of its weight in the precisions.
        scales: by module, D_t and D̄ of DoRA.
        bases: by module, W_0 in float64 where an adapter is DoRA; otherwise empty.
    """

    adapters: Sequence[Adapter]
    weights: Sequence[float]
    modules: Sequence[str]
    grams: Sequence[StoredPrecision] | None
    layers: Mapping[str, str]
    scales: Mapping[str, _RowScales]
    bases: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        adapters: Sequence[Adapter],
        weights: Sequence[float],
        grams: Sequence[StoredPrecision] | None,
        base: str | os.PathLike[str] | None,
    ) -> _AdapterMerge:
        """A merge of these adapters, checked.

        Args:
            base: the folder of the base, which DoRA needs.
        """
        modules = sorted({module for adapter in adapters for module in adapter.pairs})
        layers = {}
        if grams is not None:
            layers = _names_of_layers(modules, grams, str(adapters[0].folder))
        bases = {}
        if any(adapter.magnitudes for adapter in adapters):
            bases = _base_weights(adapters, base, modules, has_precisions=grams is not None)
        scales = {
            module: _RowScales.of(adapters, weights, module, bases.get(module))
            for module in modules
        }
        return cls(adapters, weights, modules, grams, layers, scales, bases)

    def product(self, module: str, rank: int | None) -> _Product:
        """ΔW of a module as a product of a rank; None: of its full rank."""
        scales = self.scales[module]
        moments = None
        if self.grams is not None:
            moments = [_moments(gram, self.layers[module]) for gram in self.grams]
        lefts = []
        rights = []
        for t, (adapter, weight) in enumerate(zip(self.adapters, self.weights, strict=True)):
            if module not in adapter.pairs:
                continue  # the adapter leaves the layer as it is
            left, right = adapter.product(module)
            if moments is not None:
                right = right @ moments[t]
            lefts.append(scales.single[t] / scales.total * left)
            rights.append(weight * right)
        _check_shapes(module, lefts, rights)
        left = torch.cat(lefts, 1)
        right = torch.cat(rights, 0)
        if moments is not None:
            terms = [alpha * matrix for alpha, matrix in zip(self.weights, moments, strict=True)]
            right = right @ _inverse(torch.stack(terms).sum(0))
        return _cut(left, right, rank)

    def tensors(self, products: Mapping[str, _Product]) -> dict[str, Tensor]:
        """A, B and, of DoRA, the magnitudes of every module, by their names in the file."""
        tensors = {}
        for module, product in products.items():
            tensors[f"{PREFIX}{module}.lora_A.weight"] = product.right.float().contiguous()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = product.left.float().contiguous()
        for module, base in self.bases.items():
            product = products[module]
            norms = (base + product.left @ product.right).norm(dim=1)
            magnitudes = self.scales[module].total.flatten() * norms
            tensors[f"{PREFIX}{module}{MAGNITUDE}"] = magnitudes.float()
        return tensors


def _names_of_layers(
    modules: Sequence[str], grams: Sequence[StoredPrecision], folder: str
) -> dict[str, str]:
    """By module, the name of its weight in the precisions."""
    weights = [f"{module}.weight" for module in modules]
    names = translate(weights, grams[0].layers, folder)
    return {module: names[f"{module}.weight"] for module in modules}


def _base_weights(
    adapters: Sequence[Adapter],
    base: str | os.PathLike[str] | None,
    modules: Sequence[str],
    *,
    has_precisions: bool,
) -> dict[str, Tensor]:
    """W_0 of every module in float64, ``[O, I]``, for DoRA.

    Raises:
        InputError: no base, or precisions.
        ModelError: a quantised base, or a weight of another shape than the adapters' products.
    """
    if base is None:
        raise InputError("DoRA adapters are merged by their base's weights: give base=")
    if has_precisions:
        raise InputError("DoRA adapters are merged without precisions: leave them out")
    if read_config(Path(base).expanduser()).get("quantization_config"):
        raise ModelError(f"{str(base)!r} is quantised: DoRA needs the weights before that")
    source = Folder.open(base)
    names = translate(
        [f"{module}.weight" for module in modules], source.specs, str(adapters[0].folder)
    )
    is_conv1d = stores_transposed(source.specs) or any(
        adapter.entries.get("fan_in_fan_out") for adapter in adapters
    )
    weights = {}
    for module in modules:
        name = names[f"{module}.weight"]
        shape = next(a.shape_of(module) for a in adapters if module in a.pairs)
        weights[module] = _of_shape(name, source.tensor(name).double(), shape, is_conv1d)
    return weights


def _of_shape(name: str, weight: Tensor, shape: tuple[int, int], is_conv1d: bool) -> Tensor:
    """A weight ``[O, I]`` of this shape, which Conv1D stores as ``[I, O]``.

    Args:
        is_conv1d: whether square weights are stored as ``[I, O]``.

    Raises:
        ModelError: the weight has another shape.
    """
    is_square = shape[0] == shape[1]
    if weight.shape == shape and not (is_square and is_conv1d):
        return weight
    if weight.mT.shape == shape:
        return weight.mT
    raise ModelError(
        f"{name!r} is {list(weight.shape)}, in the adapters {list(shape)}: name their base"
    )


@dataclass(frozen=True)
class _RowScales:
    """The factors by which DoRA multiplies the rows of a module, ``[O, 1]``; ``[[1.]]`` without it.

    Attributes:
        single: D_t of every adapter.
        total: D̄ of the merge.
    """

    single: Sequence[Tensor]
    total: Tensor

    @classmethod
    def of(
        cls,
        adapters: Sequence[Adapter],
        weights: Sequence[float],
        module: str,
        base: Tensor | None,
    ) -> _RowScales:
        """The factors of adapters with these weights.

        Args:
            base: W_0 of the module; None: no adapter is DoRA.

        Raises:
            InputError: the weights leave nothing of a row, or turn its sign.
        """
        if base is None:
            unscaled = torch.ones(1, 1, dtype=torch.float64)
            return cls([unscaled] * len(adapters), unscaled)
        single = [adapter.row_scales(module, base) for adapter in adapters]
        terms = [weight * (scale - 1) for weight, scale in zip(weights, single, strict=True)]
        total = 1 + torch.stack(terms).sum(0)
        if not bool((total > 0).all()):
            raise InputError(f"the weights leave nothing of a row of {module!r}: use smaller ones")
        return cls(single, total)


def _moments(precision: StoredPrecision, layer: str) -> Tensor:
    """M = Σ a aᵀ of a layer's inputs a, ``[I, I]``, without the 1 that stands for the bias."""
    if layer not in precision.layers:
        raise PosteriorError(f"{precision.name!r} has no moments of {layer!r}: fit it again")
    joint, _ = precision.layers[layer]
    matrix = precision.factors(layer).matrix()[0]
    n_inputs = len(matrix)
    if joint.bias is not None:
        n_inputs -= 1
    return matrix[:n_inputs, :n_inputs]


def _inverse(matrix: Tensor) -> Tensor:
    """The inverse along the directions that inputs of some task have; 0 along the others."""
    values, vectors = torch.linalg.eigh(matrix)
    is_defined = values > SINGULAR * values.abs().max()
    return (vectors * torch.where(is_defined, 1 / values, 0.0)) @ vectors.mT


def _check_shapes(module: str, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    """Raise where the adapters' layers of one name have different shapes."""
    shapes = {(len(left), right.shape[1]) for left, right in zip(lefts, rights, strict=True)}
    if len(shapes) > 1:
        raise ModelError(f"{module!r} is {sorted(shapes)} in the adapters: they are of other bases")


class _Product(NamedTuple):
    """ΔW = B A of some rank r.

    Attributes:
        left: B, ``[O, r]``.
        right: A, ``[r, I]``.
        share: the share of ‖ΔW‖² that remains of the product before it was cut to this rank.
    """

    left: Tensor
    right: Tensor
    share: float


def _cut(left: Tensor, right: Tensor, rank: int | None) -> _Product:
    """The product of a rank that is nearest to L R; None: of full rank.

    B and A share the singular values equally: each has their square roots.
    """
    left_basis, left_triangle = torch.linalg.qr(left)
    right_basis, right_triangle = torch.linalg.qr(right.mT)
    left_vectors, values, right_vectors = torch.linalg.svd(left_triangle @ right_triangle.mT)
    count = len(values) if rank is None else min(rank, len(values))
    squared_size = float(values.square().sum())
    share = 1.0
    if squared_size > SMALLEST:
        share = float(values[:count].square().sum()) / squared_size
    roots = values[:count].sqrt()
    new_left = left_basis @ left_vectors[:, :count] * roots
    new_right = roots[:, None] * (right_vectors[:count] @ right_basis.mT)
    return _Product(new_left, new_right, share)


def _averaged(adapters: Sequence[Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted averages of whole modules, which all adapters must have, by tensor."""
    names = {name for adapter in adapters for name in adapter.whole}
    in_all = set(names).intersection(*(adapter.whole for adapter in adapters))
    if in_all != names:
        missing = sorted(names - in_all)
        raise ModelError(f"only some adapters hold {some(missing)}: merge them into a model")
    total = sum(weights)
    if names and not total > 0:
        raise InputError("the weights must sum to more than 0, or whole modules have no average")
    averaged = {}
    for name in sorted(names):
        tensors = [adapter.tensor(name) for adapter in adapters]
        shapes = {tuple(tensor.shape) for tensor in tensors}
        if len(shapes) > 1:
            raise ModelError(
                f"{name!r} is {sorted(shapes)} in the adapters: add the same tokens to all of them"
            )
        terms = [w / total * t.double() for w, t in zip(weights, tensors, strict=True)]
        averaged[name] = torch.stack(terms).sum(0).to(tensors[0].dtype).contiguous()
    return averaged


def _stored_base_weights(adapters: Sequence[Adapter]) -> dict[str, Tensor]:
    """The weights of the base that adapters hold, which must be the same in all of them.

    PEFT saves the whole head or token table of the base beside an adapter of it.
    """
    weights: dict[str, Tensor] = {}
    for adapter in adapters:
        for name in adapter.base_weights:
            weight = adapter.tensor(name)
            if not torch.equal(weights.setdefault(name, weight), weight):
                raise ModelError(
                    f"{name!r} of the base differs between the adapters: they are of other bases"
                )
    return weights
