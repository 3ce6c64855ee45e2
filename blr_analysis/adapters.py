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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis.checks import install, some
from blr_analysis.errors import ModelError, StorageError, told_as
from blr_analysis.files import Folder, Owned, Scratch, Source, Spec, same_bytes
from blr_analysis.files.headers import read_json
from blr_analysis.files.names import TOKEN_TABLES

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
PAIR = re.compile(rf"(?P<module>{re.escape(PREFIX)}.+)\.lora_(?P<letter>[AB])\.weight")
BLOCK = 2**16  # elements of W that are computed at a time, in whole rows
# Settings of plain LoRA: either this module applies them, or they do not change the weights.
PLAIN_SETTINGS = {
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_rslora",
}
# Settings of adapters that no weights of the stored base can express: they act on some tokens
# only, or on another base.
INEXPRESSIBLE_SETTINGS = {
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "megatron_config",
    "use_qalora",
}
# Initialisations that leave the base's weights as they were.
INITIALISATIONS = ("gaussian", "orthogonal", "eva", "mica")


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is the folder of a PEFT adapter.

    >>> is_adapter("no/such/folder")
    False
    """
    return (Path(path).expanduser() / CONFIG).is_file()


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
    unusable = [name for name, spec in file.specs.items() if not spec.dtype.is_floating_point]
    if unusable:
        raise ModelError(
            f"{some(unusable)} of {str(path)!r} must be of a floating dtype, not "
            f"{file.specs[unusable[0]].dtype}: save the adapter without quantization"
        )
    products = products_of(entries, file, base, str(folder))
    if products is not None:
        return Adapted(str(folder), base, file, products, dtype)
    merged = merge_and_unload(folder, entries, base, file)
    return Adapted(str(folder), base, file, merged.changed, dtype, merged.untied)


def read_entries(folder: Path) -> dict[str, Any]:
    """What is switched on in ``adapter_config.json``.

    Raises:
        StorageError: the file is damaged.
        ModelError: no weight of this base says what the adapter does.
    """
    entries = {key: value for key, value in read_json(folder / CONFIG).items() if value}
    inexpressible = sorted(INEXPRESSIBLE_SETTINGS & entries.keys())
    initialisation = entries.get("init_lora_weights")
    is_named = isinstance(initialisation, str)
    if is_named and initialisation.lower() not in INITIALISATIONS:
        inexpressible.append(f"init_lora_weights={initialisation}")
    if inexpressible:
        raise ModelError(
            f"{str(folder / CONFIG)!r} sets {some(inexpressible)}, which this base's weights "
            "cannot express: save the adapter with path_initial_model_for_weight_conversion, or "
            "name a folder of what merge_and_unload() gives"
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
    pairs = _pairs(file)
    if pairs is None or not _is_plain(entries, base):
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
    """The names of A and B, by module; None where there is anything else in the file."""
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


def _is_plain(entries: Mapping[str, Any], base: Source) -> bool:
    """Whether an adapter's settings say that it adds s·B·A to weights [out, in], and no more."""
    trains_biases = entries.get("bias") not in (None, "none")
    settings = {key for key, value in entries.items() if value} - {"bias"}
    is_lora = entries["peft_type"] == "LORA" and settings <= PLAIN_SETTINGS
    return is_lora and not trains_biases and not stores_transposed(base.specs)


def _check_product(product: Product, name: str, file: Source, base: Source, folder: str) -> None:
    """Raise :class:`ModelError` where B·A has another shape than the base's weight."""
    spec = base.specs[name]
    a = file.specs[product.a].shape
    b = file.specs[product.b].shape
    rank = product.rank
    rows = spec.shape[:1]
    columns = spec.shape[1:]
    fits = (*b,) == (*rows, rank) and (*a,) == (rank, *columns)
    if not fits or not spec.dtype.is_floating_point:
        raise ModelError(
            f"the adapter {folder!r} has B {list(b)} and A {list(a)} (r = {rank}) for {name!r} "
            f"{list(spec.shape)} of {spec.dtype}: name the base that it was trained on, "
            "not quantized"
        )


def stores_transposed(base: Mapping[str, Spec]) -> bool:
    """Whether a layer's bias has the size of its weight's columns: it is stored as [in, out]."""
    for name, spec in base.items():
        bias = base.get(f"{name.removesuffix('weight')}bias")
        if len(spec.shape) != 2 or bias is None:
            continue
        rows, columns = spec.shape
        is_transposed = rows != columns and bias.shape[0] == columns
        if is_transposed:
            return True
    return False


def scaling_of(entries: Mapping[str, Any], module: str, folder: str) -> tuple[int, float]:
    """r of a module and s."""
    with told_as(StorageError, f"{folder!r} has an impossible setting"):
        rank = _of_module(entries, "rank_pattern", module, entries.get("r"))
        alpha = _of_module(entries, "alpha_pattern", module, entries.get("lora_alpha"))
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise StorageError(f"{folder!r} has an impossible setting: r={rank}, alpha={alpha!r}")
        divisor = math.sqrt(rank) if entries.get("use_rslora") else rank
        return rank, alpha / divisor


def _of_module(entries: Mapping[str, Any], key: str, module: str, default: Any) -> Any:
    """A setting by the first pattern that fits the end of a module's name."""
    for pattern, value in entries.get(key, {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


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
    translations = _translations(names, base)
    unknown_names = [
        [name for name in names if translation[name] not in base] for translation in translations
    ]
    fitting = [
        translation
        for translation, unknown in zip(translations, unknown_names, strict=True)
        if not unknown
    ]
    if not fitting:
        unknown = min(unknown_names, key=len)
        raise ModelError(
            f"the adapter {folder!r} changes {some(sorted(unknown))}, which the base does not have "
            "(a tied layer is stored once): name the base that it was trained on"
        )
    chosen = fitting[0]
    others = [translation for translation in fitting if translation != chosen]
    changes_names = any(chosen[name] != name for name in names)
    if changes_names and others:
        ambiguous = next(name for name in names if chosen[name] != others[0][name])
        raise ModelError(
            f"the adapter {folder!r} may mean {chosen[ambiguous]!r} or {others[0][ambiguous]!r}: "
            "rename the base's tensors"
        )
    return chosen


def _translations(names: Sequence[str], base: Collection[str]) -> list[dict[str, str]]:
    """The names as they are, without a prefix, and with a prefix of the base's names."""
    candidates = [{name: name for name in names}]
    for prefix in _prefixes(names):
        candidates.append({name: name.removeprefix(prefix) for name in names})
    for prefix in _prefixes(base):
        candidates.append({name: prefix + name for name in names})
    # Two different names must stay different.
    return [candidate for candidate in candidates if len({*candidate.values()}) == len(names)]


def _prefixes(names: Iterable[str]) -> list[str]:
    """The first one or two words of the names' modules."""
    prefixes = set()
    for name in names:
        modules = name.split(".")[:-1]
        for count in range(1, 1 + min(2, len(modules))):
            prefixes.add(".".join(modules[:count]) + ".")
    return sorted(prefixes)


class Adapted(Source):
    """A base and what an adapter changes of it.

    Attributes:
        changes: by the base's names, what happens to a tensor, in words; those not named are the
            base's.
        untied: tensors that the base stores once, with another that it is tied to, and the adapter
            trains apart: their names, and the names of the others.
    """

    def __init__(
        self,
        name: str,
        base: Source,
        file: Source,
        changed: Mapping[str, Product | Tensor],
        dtype: torch.dtype | None,
        untied: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.base = base
        self.origin = file
        self.untied = dict(untied or {})
        self._file = file
        self._changed = changed
        self.changes = {key: _description(change) for key, change in changed.items()}
        self.specs = dict(base.specs)
        for key in changed:
            spec = base.specs[self.untied.get(key, key)]
            wider_dtype = torch.promote_types(dtype or spec.dtype, spec.dtype)
            self.specs[key] = Spec(spec.shape, wider_dtype)

    def words(self, name: str) -> str:
        return self.changes.get(name, "")

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        change = self._changed.get(name)
        if change is None:
            return self.base.read(name, start, stop, Owned(scratch, (self, "base")))
        piece = scratch.array((self, "piece"), stop - start, self.specs[name].dtype)
        if isinstance(change, Tensor):
            return piece.copy_(change.view(-1)[start:stop])
        self._add(name, change, start, piece, scratch)
        return piece

    def _add(
        self, name: str, product: Product, start: int, piece: Tensor, scratch: Scratch
    ) -> None:
        """W_0 + s·B·A in float32 (float64 where the base is), rounded once, in blocks of whole rows
        whose edges do not depend on what is asked for."""
        stop = start + len(piece)
        if start == stop:
            return
        rows, columns = self.specs[name].shape
        dtype = torch.promote_types(torch.float32, self.base.specs[name].dtype)
        rows_per_block = max(1, BLOCK // columns)
        first_row = start // columns
        last_row = (stop - 1) // columns
        top = first_row // rows_per_block * rows_per_block
        blocks = range(top, last_row + 1, rows_per_block)
        bottom = min(rows, blocks[-1] + rows_per_block)
        rank = product.rank
        right = self._file.tensor(product.a).to(dtype)
        file_scratch = Owned(scratch, (self, "file"))
        left = self._file.read(product.b, top * rank, bottom * rank, file_scratch)
        left = left.view(-1, rank).to(dtype)
        for row in blocks:
            # A copy has the same alignment whatever the piece, and so the same rounding.
            left_block = left[row - top : row - top + rows_per_block].clone()
            block = torch.mm(left_block, right).mul_(product.scale)
            block_start = row * columns
            block_stop = (row + len(left_block)) * columns
            base_scratch = Owned(scratch, (self, "base"))
            weights = self.base.read(name, block_start, block_stop, base_scratch)
            flat = block.add_(weights.to(block).view_as(block)).view(-1)
            low = max(start, block_start)
            high = min(stop, block_stop)
            piece[low - start : high - start] = flat[low - block_start : high - block_start]


def _description(change: Product | Tensor) -> str:
    """What happens to a tensor."""
    if isinstance(change, Tensor):
        return "by PEFT"
    return f"LoRA, r={change.rank}, scaling {change.scale:.4g}"


class Untied(Source):
    """A model whose tied tensors are stored twice, as an adapter needs that trains them apart."""

    def __init__(self, source: Source, untied: Mapping[str, str]) -> None:
        self._source = source
        self._untied = {name: twin for name, twin in untied.items() if name not in source.specs}
        self.name = source.name
        self.origin = source.origin
        self.whole = source.whole or source
        self.specs = dict(source.specs)
        for name, twin in self._untied.items():
            self.specs[name] = source.specs[twin]

    def words(self, name: str) -> str:
        return self._source.words(self._untied.get(name, name))

    def read(self, name: str, start: int, stop: int, scratch: Scratch) -> Tensor:
        stored_name = self._untied.get(name, name)
        return self._source.read(stored_name, start, stop, Owned(scratch, (self, name)))


class Merged(NamedTuple):
    """What PEFT makes of a base.

    Attributes:
        changed: the tensors that are others than the base's.
        untied: those of them that the base stores with another only, and that other's name.
    """

    changed: dict[str, Tensor]
    untied: dict[str, str]


def merge_and_unload(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> Merged:
    """The tensors of the base that an adapter changes, as PEFT merges them, in float32 at least.

    Raises:
        ModelError: PEFT is not installed or refuses the adapter, the base is no transformers
            model, or the merged model has other tensors than the base.
    """
    fault = f"{str(folder)!r} is more than plain LoRA, and PEFT cannot merge it"
    remedy = "save what merge_and_unload() gives, and name that folder"
    with told_as(ModelError, fault, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors, untied = _by_peft(folder, entries, base, file)
    untied_tensors = {name: tensors.pop(name) for name in untied}
    names = translate(tensors, base.specs, str(folder))
    changed = {
        names[key]: tensor
        for key, tensor in tensors.items()
        if not torch.equal(tensor, base.tensor(names[key]).to(tensor.dtype))
    }
    for name in base.specs.keys() - names.values():
        for twin in changed:
            if same_bytes(base, name, base, twin):
                raise ModelError(
                    f"{str(folder)!r} changes {twin!r}, which the base stores again as {name!r}: "
                    f"leave {name!r} out"
                )
    return Merged(
        changed | untied_tensors, {name: names.get(twin, twin) for name, twin in untied.items()}
    )


def _by_peft(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of the merged model, under the names that files have, and those untied."""
    try:
        import transformers
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    except ImportError as fault:
        raise ModelError(
            f"{str(folder)!r} is more than plain LoRA, and only PEFT can merge it: "
            f"{install('peft')}"
        ) from fault

    config = PeftConfig.from_pretrained(str(folder))
    ignored = [key for key in entries if not hasattr(config, key)]
    if ignored:
        raise ValueError(f"the installed PEFT does not know {some(ignored)}")
    place = Path(base.name).expanduser()
    architectures = transformers.AutoConfig.from_pretrained(place).architectures
    class_name = architectures[0] if architectures else "AutoModel"
    model_class = getattr(transformers, class_name)
    is_double = any(spec.dtype == torch.float64 for spec in base.specs.values())
    model = model_class.from_pretrained(
        place,
        dtype=torch.float64 if is_double else torch.float32,
        local_files_only=True,
        use_safetensors=True,
    )
    untied = _untie(model, file, entries, base)
    tuned = PeftModel.from_pretrained(model, str(folder), config=config)
    unmatched = get_peft_model_state_dict(tuned).keys() ^ file.specs.keys()
    if unmatched:
        raise ValueError(
            f"{some(sorted(unmatched))} is in the file or in PEFT's adapter, not in both"
        )
    _check_ties(model, file)
    with tempfile.TemporaryDirectory() as saved:
        tuned.merge_and_unload().save_pretrained(saved)
        return Folder.open(saved).tensors(), untied


def _untie(model: Any, file: Source, entries: Mapping[str, Any], base: Source) -> dict[str, str]:
    """Give tied layers weights of their own where an adapter holds all of them whole.

    Returns:
        The names of the tensors that the base's file does not have, and those they were tied to.
    """
    saved = entries.get("modules_to_save") or ()
    untied = {}
    for first, *others in _tied_groups(model):
        are_saved = all(name.split(".")[-2] in saved for name in (first, *others))
        if not are_saved:
            continue
        for name in others:
            module = model.get_submodule(name.rpartition(".")[0])
            module.weight = torch.nn.Parameter(module.weight.detach().clone())
            if name not in base.specs:
                untied[name] = first
        model.config.tie_word_embeddings = False
    return untied


def _tied_groups(model: Any) -> list[list[str]]:
    """The names of parameters that are one tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter.data_ptr(), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _check_ties(model: Any, file: Source) -> None:
    """Raise where one of two tied layers is adapted: PEFT merges that into both."""
    tied = [name for group in _tied_groups(model) for name in group]
    layers = {name.removesuffix(".weight").removesuffix(".base_layer") for name in tied}
    for key in file.specs:
        changes_some_tokens_only = "token_adapter" in key
        is_of_tied_layer = any(f".{layer}." in key for layer in layers)
        if is_of_tied_layer and not changes_some_tokens_only:
            raise ValueError(f"{key!r} adapts one of two tied layers")
