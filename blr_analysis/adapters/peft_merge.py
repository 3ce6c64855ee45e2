"""Adapters that hold more than plain LoRA: PEFT merges them, with the whole model in memory."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis.adapters.base_names import translate
from blr_analysis.adapters.products import PREFIX
from blr_analysis.checks import install, some
from blr_analysis.errors import ModelError, told_as
from blr_analysis.files import Folder, Source, same_bytes
from blr_analysis.files.names import TOKEN_TABLES, module_word


class Merged(NamedTuple):
    """The tensors that PEFT changed.

    Attributes:
        changed: the new values of all tensors that differ from the base's, by name.
        untied: changed tensors that the base stores only under the name of a tensor they are tied
            to: the tied name by the tensor's own name.
    """

    changed: dict[str, Tensor]
    untied: dict[str, str]


def merge_and_unload(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> Merged:
    """The tensors of the base that an adapter changes, as PEFT merges them, in float32 at least.

    Raises:
        ModelError: PEFT is not installed or refuses the adapter, the base is in memory or no
            transformers model, or the merged model has other tensors than the base.
    """
    if not isinstance(base, Folder):
        raise ModelError(
            f"{str(folder)!r} is more than plain LoRA: PEFT needs its base on disk; "
            f"name the folder of {base.name!r}"
        )
    fault = f"{str(folder)!r} is more than plain LoRA, and PEFT cannot merge it"
    remedy = "save what merge_and_unload() gives, and name that folder"
    with told_as(ModelError, fault, remedy), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors, untied = _merge_by_peft(folder, entries, base, file)
    untied_tensors = {name: tensors.pop(name) for name in untied}
    names = translate(tensors, base.specs, str(folder))
    _check_shapes(tensors, names, base)
    changed = {
        names[key]: tensor
        for key, tensor in tensors.items()
        if not torch.equal(tensor, base.tensor(names[key]).to(tensor.dtype))
    }
    _check_stored_once(changed, base.specs.keys() - names.values(), base, folder)
    untied_in_base = {name: names.get(twin, twin) for name, twin in untied.items()}
    return Merged(changed | untied_tensors, untied_in_base)


def _check_shapes(tensors: Mapping[str, Tensor], names: Mapping[str, str], base: Source) -> None:
    """Raise :class:`ModelError` where a tensor that is no table of tokens has another shape."""
    for key, tensor in tensors.items():
        shape = base.specs[names[key]].shape
        if tensor.shape != shape and module_word(key) not in TOKEN_TABLES:
            raise ModelError(f"{key!r} becomes {list(tensor.shape)} from {list(shape)}")


def _check_stored_once(
    changed: Collection[str], unmerged: Collection[str], base: Source, folder: Path
) -> None:
    """Raise :class:`ModelError` where the base holds a changed tensor a second time.

    transformers saves tied tensors once, so that the merged model lacks the second name. The base's
    tensor of that name would stay as it was.
    """
    for name in unmerged:
        for twin in changed:
            if same_bytes(base, name, base, twin):
                raise ModelError(
                    f"{str(folder)!r} changes {twin!r}, which the base stores again as {name!r}: "
                    f"leave {name!r} out"
                )


def _merge_by_peft(
    folder: Path, entries: Mapping[str, Any], base: Source, file: Source
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors of the merged model, under the names that files have, and the untied ones."""
    try:
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
    model = _load_base(base)
    _resize(model, file)
    untied = _untie(model, entries, base)
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


def _load_base(base: Source) -> Any:
    """The base as a transformers model, in float32 (float64 where one of its tensors is)."""
    import transformers

    place = Path(base.name).expanduser()
    architectures = transformers.AutoConfig.from_pretrained(place).architectures
    class_name = architectures[0] if architectures else "AutoModel"
    model_class = getattr(transformers, class_name)
    is_double = any(spec.dtype == torch.float64 for spec in base.specs.values())
    return model_class.from_pretrained(
        place,
        dtype=torch.float64 if is_double else torch.float32,
        local_files_only=True,
        use_safetensors=True,
    )


def _resize(model: Any, file: Source) -> None:
    """Give the model as many tokens as the table that an adapter's file holds.

    PEFT saves the whole table and head beside an adapter whose model had tokens added.
    """
    table = model.get_input_embeddings()
    if table is None:
        return
    (module,) = [name for name, part in model.named_modules() if part is table][:1]
    spec = file.specs.get(f"{PREFIX}{module}.weight")
    if spec is not None and spec.shape[0] != table.weight.shape[0]:
        model.resize_token_embeddings(spec.shape[0], mean_resizing=False)


def _untie(model: Any, entries: Mapping[str, Any], base: Source) -> dict[str, str]:
    """Give tied layers separate weights where the adapter saves one of them whole.

    PEFT trains a copy of it then, and leaves the other layer as it was. With
    ``ensure_weight_tying`` it ties the copies too.

    Returns:
        The names of the tensors that the base's file does not have, and the names of those that
        they were tied to.
    """
    saved_modules = entries.get("modules_to_save") or ()
    untied: dict[str, str] = {}
    if entries.get("ensure_weight_tying"):
        return untied
    for stored_name, *tied_names in _tied_groups(model):
        modules = [name.split(".")[-2] for name in (stored_name, *tied_names)]
        if not any(module in saved_modules for module in modules):
            continue
        for name in tied_names:
            module = model.get_submodule(name.rpartition(".")[0])
            module.weight = torch.nn.Parameter(module.weight.detach().clone())
            if name not in base.specs:
                untied[name] = stored_name
        model.config.tie_word_embeddings = False
    return untied


def _tied_groups(model: Any) -> list[list[str]]:
    """The names of parameters that share one tensor, a list for each such tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter.data_ptr(), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _check_ties(model: Any, file: Source) -> None:
    """Raise where the adapter changes one of two tied layers: PEFT merges that into both."""
    tied = [name for group in _tied_groups(model) for name in group]
    copies = [key for name in tied if (key := f"{PREFIX}{name}") in file.specs]
    are_alike = all(same_bytes(file, copies[0], file, key) for key in copies)
    if len(copies) == len(tied) and are_alike:
        return  # the whole table, under each of its names
    layers = {name.removesuffix(".weight").removesuffix(".base_layer") for name in tied}
    for key in file.specs:
        changes_some_tokens_only = "token_adapter" in key
        is_of_tied_layer = any(f".{layer}." in key for layer in layers)
        if is_of_tied_layer and not changes_some_tokens_only:
            raise ValueError(f"{key!r} adapts one of two tied layers")
