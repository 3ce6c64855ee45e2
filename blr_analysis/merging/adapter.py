"""LoRA adapters merged into one LoRA adapter, by their products, cut to a rank.

Adapter t adds ΔW_t = s_t B_t A_t to a layer's weight. The merge

    ΔW = Σ_t α_t ΔW_t,   or with moments of inputs (Σ_t α_t ΔW_t M_t)(Σ_t α_t M_t)⁻¹      (RegMean)

has all of its columns in the span of the B_t, so that no matrix of the size of W is formed: with
L = [B_1 … B_T] and R the matching rows, ΔW = L R. QR of both and the singular values of a matrix as
large as the ranks' sum give the nearest ΔW of any rank r (Eckart and Young, 1936), and how much of
its square is kept, Σ_{i≤r} σ_i² / Σ σ_i². Adding A to A and B to B instead would bring cross terms
B_1 A_2 that no model has.

DoRA scales the rows of what it makes, W_t = D_t (W_0 + ΔW_t), D_t = m_t / ‖W_0 + ΔW_t‖ by the row.
A sum of these is D̄ (W_0 + Σ_t α_t (D_t / D̄) ΔW_t), D̄ = 1 + Σ_t α_t (D_t − 1): a DoRA adapter
again, of the ranks' sum, exactly, with magnitudes D̄ times the rows' norms.

Modules that adapters hold whole (``modules_to_save``) are averaged. An adapter that is merged
alone is copied as it is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from blr_analysis.adapters import (
    CONFIG,
    PAIR,
    PREFIX,
    TENSORS,
    is_adapter,
    read_entries,
    scaling_of,
    translate,
)
from blr_analysis.checks import positive_int, some
from blr_analysis.errors import InputError, ModelError, PosteriorError
from blr_analysis.files import Folder, drafted
from blr_analysis.files.placing import check_free
from blr_analysis.merging.job import Job
from blr_analysis.merging.layers import SINGULAR
from blr_analysis.merging.precisions import StoredPrecision, open_precision
from blr_analysis.merging.tensor_plans import number

# Settings that say which layers an adapter is of; those of a merged one name every layer.
PER_LAYER = ("rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern")
OTHER_THAN_PRODUCTS = ("lora_bias", "trainable_token_indices", "velora_config")
MAGNITUDE = ".lora_magnitude_vector"
SMALLEST = 1e-30


@dataclass(frozen=True)
class AdapterReport:
    """What :func:`merge_adapters` wrote.

    Attributes:
        folder: the merged adapter.
        rank: of its layers, at most.
        shares: by layer, the share of the square of ΔW that the rank keeps.
        averaged: the tensors of whole modules.
    """

    folder: Path
    rank: int
    shares: Mapping[str, float]
    averaged: tuple[str, ...]

    @property
    def share(self) -> float:
        """The smallest of the shares."""
        return min(self.shares.values(), default=1.0)

    def __repr__(self) -> str:
        return (
            f"AdapterReport({str(self.folder)!r}: {len(self.shares)} layers of rank {self.rank} at "
            f"most, which keeps {self.share:.1%} of every merge or more)"
        )


@dataclass(frozen=True)
class _Adapter:
    """One adapter, opened.

    Attributes:
        folder: where it is.
        entries: its settings that are switched on.
        file: its tensors.
        pairs: the names of A and B, by module.
        whole: the names of tensors of whole modules.
        magnitudes: of DoRA, the name of each module's.
    """

    folder: Path
    entries: Mapping[str, Any]
    file: Folder
    pairs: Mapping[str, Mapping[str, str]]
    whole: tuple[str, ...]
    magnitudes: Mapping[str, str]

    def row_scales(self, module: str, base: Tensor) -> Tensor:
        """D of a module, ``[O, 1]``: what DoRA multiplies the rows of W_0 + ΔW by; 1 without."""
        if module not in self.magnitudes:
            return torch.ones(len(base), 1, dtype=torch.float64)
        left, right = self.product(module)
        magnitude = self.tensor(self.magnitudes[module]).double().reshape(-1, 1)
        return magnitude / (base + left @ right).norm(dim=1, keepdim=True)

    def product(self, module: str) -> tuple[Tensor, Tensor]:
        """s B and A of a module, in float64."""
        pair = self.pairs[module]
        rank, scale = scaling_of(self.entries, module, str(self.folder))
        left = self.tensor(pair["B"]).double()
        right = self.tensor(pair["A"]).double()
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != rank or right.shape[0] != rank:
            raise ModelError(
                f"{module!r} of {str(self.folder)!r} is no pair of matrices of rank {rank}: merge "
                "it into a model"
            )
        return scale * left, right

    def tensor(self, name: str) -> Tensor:
        """A tensor of the adapter, or an error where it holds NaN or inf."""
        tensor = self.file.tensor(name)
        if not bool(tensor.isfinite().all()):
            raise ModelError(
                f"{name!r} of {str(self.folder)!r} holds NaN or inf: the training diverged, or the "
                "file is damaged"
            )
        return tensor


def merge_adapters(
    adapters: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    rank: int | None = None,
    weights: Sequence[float] | None = None,
    precisions: Sequence[Any] | None = None,
    base: str | os.PathLike[str] | None = None,
) -> AdapterReport:
    """Merge LoRA adapters of one base into a LoRA adapter.

    Args:
        adapters: folders as PEFT writes them: plain, rank-stabilised or DoRA, of any ranks and
            scalings by layer, of Linear layers or Conv1D, with or without whole modules.
        out: the folder to write, new or empty.
        rank: of every layer, at most; None: the sum of the adapters' ranks, which keeps all.
        weights: α_t; None: 1/T each.
        precisions: of structure "gram", one for each adapter: the moments of the inputs of the
            layers, of the base with the adapter; None: the sum of products.
        base: the folder of the base, whose weights DoRA needs.

    Raises:
        InputError: no adapters, other numbers of weights or precisions than adapters.
        ModelError: adapters of other bases or shapes, or that are more than products (embeddings,
            convolutions, biases): merge these into a model.
        PosteriorError: precisions that have no moments of a layer.
        StorageError: files that are damaged, or ``out`` that is not empty.

    Source: Hu et al., "LoRA", 2021; Liu et al., "DoRA", 2024; Jin et al., "RegMean", ICLR 2023.

    Example:
        >>> import tempfile
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
    check_free(target)
    opened = [_opened(place) for place in adapters]
    if not opened:
        raise InputError("adapters is empty: name at least one")
    shares_of = _per_adapter("weights", weights, [1 / len(opened)] * len(opened))
    shares_of = [number(weight, "every layer", "weight") for weight in shares_of]
    precision_of = _per_adapter("precisions", precisions, [None] * len(opened))
    if len(opened) == 1 and precisions is None and rank is None and shares_of == [1]:
        return _copied(opened[0], target)
    modules = sorted({module for adapter in opened for module in adapter.pairs})
    grams = [None if place is None else open_precision(place) for place in precision_of]
    names = _names_of_layers(modules, grams, str(opened[0].folder))
    if rank is not None:
        positive_int("rank", rank)
    bases = _base_weights(opened, base, precisions, modules)
    products = {}
    scales = {}
    for module in modules:
        scales[module] = _RowScales.of(opened, shares_of, module, bases.get(module))
        left, right = _merged(opened, shares_of, module, grams, names, scales[module])
        products[module] = _cut(left, right, rank)
    tensors = _averaged(opened, shares_of)
    averaged = tuple(tensors)
    for module, product in products.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = product.right.float().contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = product.left.float().contiguous()
    for module, weight in bases.items():
        product = products[module]
        norms = (weight + product.left @ product.right).norm(dim=1)
        magnitude = scales[module].total.flatten() * norms
        tensors[f"{PREFIX}{module}{MAGNITUDE}"] = magnitude.float()
    ranks = {module: len(product.right) for module, product in products.items()}
    shares = {module: product.share for module, product in products.items()}
    _write(target, opened[0], tensors, ranks, use_dora=bool(bases))
    return AdapterReport(target, max(ranks.values(), default=0), shares, averaged)


def merge_adapters_of(job: Job, out: str | os.PathLike[str], rank: int | None) -> AdapterReport:
    """:func:`merge_adapters` of what a recipe names.

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
        places, out, rank=rank, weights=weights, precisions=precisions, base=job.base
    )


def _per_adapter(name: str, values: Sequence[Any] | None, default: list[Any]) -> list[Any]:
    if values is None:
        return default
    if len(values) != len(default):
        raise InputError(f"{name} must be {len(default)}, one for each adapter: got {len(values)}")
    return list(values)


def _opened(place: str | os.PathLike[str]) -> _Adapter:
    """An adapter whose tensors are pairs of matrices and whole modules, or an error."""
    folder = Path(place).expanduser()
    if not is_adapter(folder):
        raise InputError(f"{str(place)!r} is no PEFT adapter: it has no {CONFIG}")
    entries = read_entries(folder)
    file = Folder.open(folder, stem="adapter_model")
    pairs: dict[str, dict[str, str]] = {}
    whole = []
    magnitudes: dict[str, str] = {}
    foreign = _foreign_settings(entries)
    for name in file.specs:
        match = PAIR.fullmatch(name)
        if match is not None:
            module = match["module"].removeprefix(PREFIX)
            pairs.setdefault(module, {})[match["letter"]] = name
        elif name.endswith(MAGNITUDE):
            module = name.removeprefix(PREFIX).removesuffix(MAGNITUDE)
            magnitudes[module] = name
        elif _is_of_module(name, entries.get("modules_to_save") or ()):
            whole.append(name)
        else:
            foreign.append(name)
    if foreign:
        raise ModelError(
            f"{str(folder)!r} has {some(foreign)}, which no product of matrices says: merge it "
            "into a model (blr.merge with its base)"
        )
    incomplete = [module for module, pair in pairs.items() if len(pair) < 2]
    if incomplete:
        raise ModelError(f"{str(folder)!r} lacks A or B of {some(incomplete)}: save it again")
    return _Adapter(folder, entries, file, pairs, tuple(whole), magnitudes)


def _foreign_settings(entries: Mapping[str, Any]) -> list[str]:
    """Settings of an adapter that is more than products."""
    foreign = [name for name in OTHER_THAN_PRODUCTS if entries.get(name)]
    if entries.get("peft_type") != "LORA":
        foreign.append(f"peft_type {entries.get('peft_type')}")
    if entries.get("bias") not in (None, "none"):
        foreign.append("bias")
    return foreign


def _is_of_module(name: str, modules: Sequence[str]) -> bool:
    """Whether a tensor belongs to one of these modules."""
    parts = name.split(".")[:-1]
    return any(module in ".".join(parts).split(".") or module in parts for module in modules)


def _copied(adapter: _Adapter, target: Path) -> AdapterReport:
    """The same adapter in another place."""
    for name in adapter.file.specs:
        adapter.tensor(name)
    with drafted(target) as draft:
        draft.mkdir()
        for file in (CONFIG, TENSORS):
            shutil.copyfile(adapter.folder / file, draft / file)
    ranks = [scaling_of(adapter.entries, m, str(adapter.folder))[0] for m in adapter.pairs]
    shares = dict.fromkeys(adapter.pairs, 1.0)
    return AdapterReport(target, max(ranks, default=0), shares, adapter.whole)


def _names_of_layers(
    modules: Sequence[str], grams: Sequence[StoredPrecision | None], folder: str
) -> dict[str, str]:
    """By module, the name of its weight in the precisions."""
    precision = grams[0] if grams else None
    if precision is None:
        return {}
    if any(gram is None or gram.structure != "gram" for gram in grams):
        raise PosteriorError("adapters are merged by precisions of structure 'gram' alone")
    weights = [f"{module}.weight" for module in modules]
    names = translate(weights, precision.layers, folder)
    return {module: names[f"{module}.weight"] for module in modules}


def _base_weights(
    adapters: Sequence[_Adapter],
    base: str | os.PathLike[str] | None,
    precisions: Sequence[Any] | None,
    modules: Sequence[str],
) -> dict[str, Tensor]:
    """W_0 of every module in float64, where some adapter is DoRA; else nothing."""
    if not any(adapter.magnitudes for adapter in adapters):
        return {}
    if base is None:
        raise InputError("DoRA adapters are merged by their base's weights: give base=")
    if precisions is not None:
        raise InputError("DoRA adapters are merged without precisions: leave them out")
    if any(adapter.entries.get("fan_in_fan_out") for adapter in adapters):
        raise ModelError("DoRA adapters of Conv1D are merged into a model only (blr.merge)")
    source = Folder.open(base)
    weights = [f"{module}.weight" for module in modules]
    names = translate(weights, source.specs, str(adapters[0].folder))
    return {module: source.tensor(names[f"{module}.weight"]).double() for module in modules}


@dataclass(frozen=True)
class _RowScales:
    """What DoRA multiplies the rows of a module by, ``[O, 1]``, or 1.

    Attributes:
        single: D_t of every adapter.
        total: D̄ of the merge.
    """

    single: Sequence[Tensor]
    total: Tensor

    @classmethod
    def of(
        cls,
        adapters: Sequence[_Adapter],
        weights: Sequence[float],
        module: str,
        base: Tensor | None,
    ) -> _RowScales:
        """Of adapters with these weights.

        Raises:
            InputError: weights that turn a row around, or leave nothing of it.
        """
        one = torch.ones(1, 1, dtype=torch.float64)
        if base is None:
            return cls([one] * len(adapters), one)
        single = [adapter.row_scales(module, base) for adapter in adapters]
        terms = [weight * (scale - 1) for weight, scale in zip(weights, single, strict=True)]
        total = 1 + torch.stack(terms).sum(0)
        if not bool((total > 0).all()):
            raise InputError(f"the weights leave nothing of a row of {module!r}: use smaller ones")
        return cls(single, total)


def _merged(
    adapters: Sequence[_Adapter],
    weights: Sequence[float],
    module: str,
    grams: Sequence[StoredPrecision | None],
    names: Mapping[str, str],
    scales: _RowScales,
) -> tuple[Tensor, Tensor]:
    """L and R of one module's ΔW = L R."""
    lefts = []
    rights = []
    total: Tensor | None = None
    models = zip(adapters, weights, grams, scales.single, strict=True)
    for adapter, weight, gram, scale in models:
        moments = None
        if gram is not None:
            moments = _moments(gram, names[module])
            total = weight * moments if total is None else total + weight * moments
        if module not in adapter.pairs:
            continue  # the adapter leaves the layer as it is
        left, right = adapter.product(module)
        lefts.append(scale / scales.total * left)
        rights.append(weight * (right if moments is None else right @ moments))
    _check_shapes(module, lefts, rights)
    left = torch.cat(lefts, 1)
    right = torch.cat(rights, 0)
    if total is None:
        return left, right
    return left, right @ _inverse(total)


def _moments(precision: StoredPrecision, layer: str) -> Tensor:
    """Σ a aᵀ of a layer's inputs, without the 1 of its bias."""
    if layer not in precision.layers:
        raise PosteriorError(f"{precision.name!r} has no moments of {layer!r}: fit it again")
    joint, _ = precision.layers[layer]
    matrix = precision.factors(layer).matrix()[0]
    inputs = len(matrix) - (joint.bias is not None)
    return matrix[:inputs, :inputs]


def _inverse(matrix: Tensor) -> Tensor:
    """Of the directions that have a precision; 0 for the others, which no task's inputs have."""
    values, vectors = torch.linalg.eigh(matrix)
    is_defined = values > SINGULAR * values.abs().max()
    return (vectors * torch.where(is_defined, 1 / values, 0.0)) @ vectors.mT


def _check_shapes(module: str, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    """Raise where adapters are of layers of other shapes."""
    shapes = {(len(left), right.shape[1]) for left, right in zip(lefts, rights, strict=True)}
    if len(shapes) > 1:
        raise ModelError(f"{module!r} is {sorted(shapes)} in the adapters: they are of other bases")


class _Product(NamedTuple):
    """B A of a rank.

    Attributes:
        left, right: B and A, each with the roots of the singular values.
        share: of the square of what was cut.
    """

    left: Tensor
    right: Tensor
    share: float


def _cut(left: Tensor, right: Tensor, rank: int | None) -> _Product:
    """The nearest product of a rank."""
    outer, upper = torch.linalg.qr(left)
    inner, lower = torch.linalg.qr(right.mT)
    vectors, values, turned = torch.linalg.svd(upper @ lower.mT)
    count = len(values) if rank is None else min(rank, len(values))
    total = float(values.square().sum())
    share = float(values[:count].square().sum()) / total if total > SMALLEST else 1.0
    roots = values[:count].sqrt()
    new_left = outer @ vectors[:, :count] * roots
    new_right = roots[:, None] * (turned[:count] @ inner.mT)
    return _Product(new_left, new_right, share)


def _averaged(adapters: Sequence[_Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """Whole modules, which all adapters must have, by their weights' shares."""
    names = {name for adapter in adapters for name in adapter.whole}
    absent = [name for name in names if any(name not in a.whole for a in adapters)]
    if absent:
        raise ModelError(f"only some adapters hold {some(sorted(absent))}: merge them into a model")
    total = sum(weights)
    if names and not total > 0:
        raise InputError("the weights must sum to more than 0, or whole modules have no average")
    averaged = {}
    for name in sorted(names):
        tensors = [adapter.tensor(name) for adapter in adapters]
        terms = [w / total * t.double() for w, t in zip(weights, tensors, strict=True)]
        averaged[name] = torch.stack(terms).sum(0).to(tensors[0].dtype).contiguous()
    return averaged


def _write(
    target: Path,
    first: _Adapter,
    tensors: Mapping[str, Tensor],
    ranks: Mapping[str, int],
    *,
    use_dora: bool,
) -> None:
    """The adapter as PEFT reads it: the first one's settings, every layer with a scaling of 1."""
    settings = json.loads((first.folder / CONFIG).read_text(encoding="utf-8"))
    rank = max(ranks.values(), default=1)
    patterns = {f"^{module}": r for module, r in ranks.items() if r != rank}
    settings |= {
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        "use_dora": use_dora,
        "target_modules": sorted(ranks),
        **dict.fromkeys(PER_LAYER),
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "init_lora_weights": True,
    }
    with drafted(target) as draft:
        draft.mkdir()
        save_file(dict(tensors), draft / TENSORS, metadata={"format": "pt"})
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (draft / CONFIG).write_text(f"{text}\n", encoding="utf-8")
