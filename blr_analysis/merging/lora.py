"""A LoRA adapter as a fine-tuned model: the base's tensors, with the adapter added.

    W = W_0 + s·B·A,      s = α/r, or α/√r where rank-stabilised.

Adapters are so merged as weights: the sum of two adapters holds B₁A₁ + B₂A₂ and none of the
cross terms B₁A₂ that adding A to A and B to B brings. Pairs of matrices of linear layers are added
as they are read. Whatever is more than that (DoRA, convolutions, embeddings, biases, whole modules,
other methods than LoRA) PEFT merges, with the whole model in memory.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import install, some
from blr_analysis.errors import InputError, ModelError, StorageError, told_as
from blr_analysis.files import Folder, Loaded, Owned, Scratch, Source, Spec
from blr_analysis.files.headers import read_json
from blr_analysis.merging.sources import TABLES, same_bytes
from blr_analysis.task import unwrapped

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PAIR = re.compile(rf"(?P<module>{re.escape(PREFIX)}.+)\.lora_(?P<letter>[AB])\.weight")
BLOCK = 2**16  # elements of W that are computed at a time, in whole rows
# Settings of LoRA whose meaning is known here, or that say nothing about which weights come out.
PLAIN = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
    *("target_modules", "task_type", "base_model_name_or_path", "auto_mapping", "peft_type"),
    *("peft_version", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "qalora_group_size"),
    *("revision", "runtime_config"),
}
# What acts on some tokens only, or on a base that is not the one that is stored.
NO_WEIGHTS = {
    *("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"),
    *("megatron_config", "use_qalora"),
}
# The base's weights are what they were; everything that was learned is in the adapter's tensors.
INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the folder of a PEFT adapter.

    >>> is_adapter("no/such/folder")
    False
    """
    return (Path(path).expanduser() / CONFIG).is_file()


def is_place(given: Any) -> bool:
    """Whether a model or a precision is the name of a folder or file."""
    return isinstance(given, str | os.PathLike)


def open_model(given: Any, name: str, base: Source | None = None) -> Source:
    """A folder's tensors, an adapter's added to ``base``, or those of a state dict or module."""
    if isinstance(given, nn.Module):
        return Loaded(name, unwrapped(given).state_dict())
    if not is_place(given):
        return Loaded(name, given)
    if not is_adapter(given):
        return Folder.open(given)
    if base is None:
        raise InputError(f"{str(given)!r} is an adapter: name its base model")
    return open_adapter(given, base, dtype=torch.float32)


def open_adapter(
    path: str | os.PathLike[str], base: Source, *, dtype: torch.dtype | None = None
) -> Adapted:
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
        >>> import json
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
        raise StorageError(f"{str(path)!r} holds no {CONFIG}, and is no PEFT adapter.")
    entries = read_entries(folder)
    file = Folder.open(folder, stem="adapter_model")
    odd = [n for n, spec in file.specs.items() if not _real(spec)]
    if odd:
        raise ModelError(
            f"{some(odd)} of {str(path)!r} are of {file.specs[odd[0]].dtype}: no numbers"
        )
    changed: Any = products_of(entries, file, base, str(folder))
    if changed is None:
        changed = merge_and_unload(folder, entries, base, file)
    return Adapted(str(folder), base, file, changed, dtype)


def read_entries(folder: Path) -> dict[str, Any]:
    """What is switched on in ``adapter_config.json``.

    Raises:
        StorageError: the file is damaged.
        ModelError: no weight of this base says what the adapter does.
    """
    entries = {key: value for key, value in read_json(folder / CONFIG).items() if value}
    odd = sorted(NO_WEIGHTS & entries.keys())
    start = entries.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in INITIALISATIONS:
        odd.append(f"init_lora_weights={start}")
    if odd:
        raise ModelError(
            f"{str(folder / CONFIG)!r} sets {some(odd)}: no weights of this base say that; save it "
            "with path_initial_model_for_weight_conversion, or name what merge_and_unload() gives"
        )
    return entries


@dataclass(frozen=True)
class Product:
    """s·B·A, [out, in]; ``a`` and ``b`` are names in the adapter's file."""

    a: str
    b: str
    rank: int
    scale: float


def products_of(
    entries: Mapping[str, Any], file: Source, base: Source, folder: str
) -> dict[str, Product] | None:
    """What plain LoRA adds, by the base's names; None where an adapter is more than pairs of
    matrices of linear layers, or the base stores [in, out], as Conv1D does.

    Raises:
        StorageError: an impossible setting.
        ModelError: the adapter does not fit the base.
    """
    pairs: dict[str, dict[str, str]] = {}
    for key in file.specs:
        part = PAIR.fullmatch(key)
        if part is None or part["module"].rpartition(".")[2] in TABLES:
            return None
        pairs.setdefault(part["module"].removeprefix(PREFIX), {})[part["letter"]] = key
    settings = {**entries, "bias": entries.get("bias") not in (None, "none")}
    plain = {key for key, value in settings.items() if value} <= PLAIN and not _conv1d(base.specs)
    if not plain or entries["peft_type"] != "LORA" or any(len(p) < 2 for p in pairs.values()):
        return None
    own = translate([f"{module}.weight" for module in pairs], base.specs, folder)
    products = {}
    for module, pair in pairs.items():
        rank, scale = _scaling(entries, module, folder)
        name = own[f"{module}.weight"]
        spec, (a, b) = base.specs[name], (file.specs[pair[x]].shape for x in "AB")
        if len(spec.shape) > 2 or len(a) > 2:
            return None
        if (*b, *a) != (*spec.shape[:1], rank, rank, *spec.shape[1:]) or not _real(spec):
            raise ModelError(
                f"the adapter {folder!r} has B {list(b)} and A {list(a)} (r = {rank}) for {name!r} "
                f"{list(spec.shape)} of {spec.dtype}: was it trained on this base, not quantized?"
            )
        products[name] = Product(pair["A"], pair["B"], rank, scale)
    return products


def _real(spec: Spec) -> bool:
    return spec.dtype.is_floating_point


def _conv1d(base: Mapping[str, Spec]) -> bool:
    """Whether a layer's bias has the size of its weight's columns: it is stored as [in, out]."""
    weights = {n.removesuffix("weight"): s.shape for n, s in base.items() if len(s.shape) == 2}
    biases = {n: base[f"{n}bias"].shape for n in weights if f"{n}bias" in base}
    return any(weights[n][0] != weights[n][1] == bias[0] for n, bias in biases.items())


def _scaling(entries: Mapping[str, Any], module: str, folder: str) -> tuple[int, float]:
    """r of a module and s, by the first pattern that fits the end of its name."""

    def own(patterns: str, usual: str) -> Any:
        found = entries.get(patterns, {}).items()
        fits = (v for p, v in found if re.match(rf"(.*\.)?({p})$", module))
        return next(fits, entries.get(usual))

    with told_as(StorageError, f"{folder!r} has an impossible setting"):
        rank, alpha = own("rank_pattern", "r"), own("alpha_pattern", "lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise StorageError(f"{folder!r} has an impossible setting: r={rank}, alpha={alpha!r}")
        return rank, alpha / (math.sqrt(rank) if entries.get("use_rslora") else rank)


def translate(wanted: Iterable[str], base: Collection[str], folder: str) -> dict[str, str]:
    """The base's name of every tensor that an adapter names: files may name modules with or
    without the prefix of the task's class (``bert.encoder…``), one for the whole adapter.

    Raises:
        ModelError: no one prefix brings all of them to names of the base, or several do.

    Example:
        >>> translate(["bert.pooler.weight"], {"pooler.weight": 1, "x": 2}, "./lora")
        {'bert.pooler.weight': 'pooler.weight'}
    """
    names = list(dict.fromkeys(wanted))

    def prefixes(many: Iterable[str]) -> list[str]:
        words = {tuple(n.split(".")[:-1][:count]) for n in many for count in (1, 2)}
        return sorted(".".join(w) + "." for w in words if w)

    ways = [{n: n for n in names}]
    ways += [{n: n.removeprefix(p) for n in names} for p in prefixes(names)]
    ways += [{n: p + n for n in names} for p in prefixes(base)]
    ways = [way for way in ways if len({*way.values()}) == len(names)]  # two never become one
    fits = [way for way in ways if all(own in base for own in way.values())]
    if not fits:
        lost = min(([n for n in names if way[n] not in base] for way in ways), key=len)
        raise ModelError(
            f"the adapter {folder!r} changes {some(sorted(lost))}, which the base has not (a tied "
            "layer is saved once): was it trained on this base?"
        )
    others = [way for way in fits if way != fits[0]]
    if fits[0] != ways[0] and others:
        name = next(n for n in names if fits[0][n] != others[0][n])
        raise ModelError(
            f"the adapter {folder!r} may mean {fits[0][name]!r} or {others[0][name]!r}: rename "
            "the base's tensors"
        )
    return fits[0]


class Adapted(Source):
    """A base and what an adapter changes of it.

    Attributes:
        changes: by the base's names, what happens to a tensor, in words; those not named are the
            base's.
    """

    def __init__(
        self, name: str, base: Source, file: Source, changed: Mapping[str, Product | Tensor],
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        self.name, self.base, self._changed = name, base, changed
        self.origin = self._file = file
        self.changes = {
            n: f"LoRA, r={p.rank}, scaling {p.scale:.4g}" if isinstance(p, Product) else "by PEFT"
            for n, p in changed.items()
        }
        own = {n: base.specs[n] for n in changed}
        wide = {n: torch.promote_types(dtype or s.dtype, s.dtype) for n, s in own.items()}
        self.specs = {**base.specs, **{n: Spec(s.shape, wide[n]) for n, s in own.items()}}

    def words(self, name: str) -> str:
        return self.changes.get(name, "")

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        spec, change = self.specs[name], self._changed.get(name)
        if change is None:
            return self.base.read(name, start, stop, Owned(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, spec.dtype)
        if isinstance(change, Tensor):
            return piece.copy_(change.view(-1)[start:stop])
        self._add(name, change, start, piece, scratch)
        return piece

    def _add(self, name: str, p: Product, start: int, piece: Tensor, scratch: Scratch) -> None:
        """W_0 + s·B·A in float32 (float64 where the base is), rounded once, in blocks of whole rows
        whose edges do not depend on what is asked for."""
        stop, (rows, cols) = start + len(piece), self.specs[name].shape
        if start == stop:
            return
        real = torch.promote_types(torch.float32, self.base.specs[name].dtype)
        step, right = max(1, BLOCK // cols), self._file.tensor(p.a).to(real)
        edges = range(start // cols // step * step, min(rows, -(-stop // cols)), step)
        top, bottom = edges[0], min(rows, edges[-1] + step)
        own = Owned(scratch, (self, "file"))
        left = self._file.read(p.b, top * p.rank, bottom * p.rank, own).view(-1, p.rank).to(real)
        for row in edges:
            part = left[row - top : row - top + step].clone()  # placed alike for all pieces
            block = torch.mm(part, right).mul_(p.scale)
            first, end = row * cols, (row + len(part)) * cols
            there = self.base.read(name, first, end, Owned(scratch, (self, "base")))
            flat = block.add_(there.to(block).view_as(block)).view(-1)
            low, high = max(start, first), min(stop, end)
            piece[low - start : high - start] = flat[low - first : high - first]


def merge_and_unload(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> dict[str, Tensor]:
    """The tensors of the base that an adapter changes, as PEFT merges them, in float32 at least.

    Raises:
        ModelError: PEFT is not installed or refuses the adapter, the base is no transformers
            model, or the merged model has other tensors than the base.
    """
    what = f"{str(folder)!r} is more than plain LoRA, and PEFT cannot merge it"
    remedy = "name what merge_and_unload() gives, saved"
    with told_as(ModelError, what, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = _by_peft(folder, entries, base, file)
    own = translate(tensors, base.specs, str(folder))
    changed = {
        own[name]: tensor
        for name, tensor in tensors.items()
        if not torch.equal(tensor, base.tensor(own[name]).to(tensor.dtype))
    }
    for name in base.specs.keys() - own.values():
        for twin in changed:
            if same_bytes(base, name, base, twin):
                raise ModelError(
                    f"{str(folder)!r} changes {twin!r}, which the base stores again as {name!r}: "
                    f"leave {name!r} out"
                )
    return changed


def _by_peft(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> dict[str, Tensor]:
    """All tensors of the merged model, under the names that files have."""
    try:
        import transformers
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as fault:
        raise ModelError(
            f"{str(folder)!r} is more than plain LoRA, which PEFT merges: {install('peft')}"
        ) from fault

    place = Path(base.name).expanduser()
    config = PeftConfig.from_pretrained(str(folder))
    ignored = [key for key in entries if not hasattr(config, key)]
    if ignored:
        raise ValueError(f"the installed PEFT does not know {some(ignored)}")
    kind = transformers.AutoConfig.from_pretrained(place)
    wide = any(s.dtype == torch.float64 for s in base.specs.values())
    built = getattr(transformers, (kind.architectures or ["AutoModel"])[0])
    model = built.from_pretrained(
        place,
        dtype=torch.float64 if wide else torch.float32,
        local_files_only=True,
        use_safetensors=True,
    )
    tuned = PeftModel.from_pretrained(model, str(folder), config=config)
    odd = get_peft_model_state_dict(tuned).keys() ^ file.specs.keys()
    if odd:
        raise ValueError(f"{some(sorted(odd))} is of the file or of the adapter alone")
    _check_ties(model, file)
    with tempfile.TemporaryDirectory() as saved:
        tuned.merge_and_unload().save_pretrained(saved)
        return Folder.open(saved).tensors()


def _check_ties(model: Any, file: Source) -> None:
    """Raise where one of two tied layers is adapted: PEFT merges that into both."""
    weights: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        weights.setdefault(parameter.data_ptr(), []).append(name)
    tied = [name for names in weights.values() if len(names) > 1 for name in names]
    layers = {name.removesuffix(".weight").removesuffix(".base_layer") for name in tied}
    for key in file.specs:
        if "token_adapter" not in key and any(f".{layer}." in key for layer in layers):
            raise ValueError(f"{key!r} adapts one of two tied layers")
