"""Whether an adapter's file holds what its configuration promises, in the sizes of its base."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.files import Source
from blr_analysis.merging.adapters.config import AdapterConfig, ends_with
from blr_analysis.merging.adapters.names import Grouped

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_floats(own: Mapping[str, str], adapter: Source, base: Source) -> None:
    for source, names in ((base, own.values()), (adapter, adapter.specs)):
        wrong = [n for n in names if source.specs[n].dtype not in FLOATS]
        if wrong:
            raise ModelError(
                f"{some(wrong)} of {source.name!r} {'is' if len(wrong) == 1 else 'are'} stored as "
                f"{source.specs[wrong[0]].dtype}: expected weights in float64, float32, float16 or "
                "bfloat16, not quantized."
            )


def check_settings(
    config: AdapterConfig,
    found: Grouped,
    parameters: Mapping[str, list[str]],
    own: Mapping[str, str],
    base: Source,
) -> None:
    """That the file holds what its configuration promises, and nothing that it does not."""
    for part, setting in (("magnitude", "use_dora"), ("bias", "lora_bias")):
        have = [m for m, parts in found.low_rank.items() if part in parts]
        if (getattr(config, setting) and len(have) < len(found.low_rank)) or (
            have and not getattr(config, setting)
        ):
            lacking = have or list(found.low_rank)
            raise ModelError(
                f"{config.folder!r} has {setting}={getattr(config, setting)}, but its tensors for "
                f"{some(lacking)} {'hold' if have else 'lack'} a {part}: the file and its "
                "configuration do not belong together."
            )
    if config.use_dora and config.lora_bias:
        raise ModelError(f"{config.folder!r} sets both use_dora and lora_bias, which PEFT refuses.")
    if config.bias != "none":
        for module, names in parameters.items():
            weight = own[names[0]]
            there = weight.removesuffix("weight") + "bias"
            if (
                weight.endswith(".weight")
                and there in base.specs
                and f"{module}.bias" not in found.whole
            ):
                raise ModelError(
                    f"{config.folder!r} has bias={config.bias!r}, but holds no bias of {module!r}, "
                    "which the base has: save the adapter again."
                )
    both = sorted(found.tokens.keys() & parameters.keys())
    if both:
        raise ModelError(
            f"{config.folder!r} adds matrices to {some(both)} and replaces rows of it: PEFT does "
            "not define the sum. Name the folder of a merged model instead."
        )
    saved = [m for m in config.modules_to_save if any(_inside(n, m) for n in base.specs)]
    lost = [m for m in saved if not any(_inside(n, m) for n in found.whole)]
    if lost:
        raise ModelError(
            f"{config.folder!r} names {some(lost)} in modules_to_save, but its file holds no "
            "tensor of it: save the adapter again."
        )


def _inside(name: str, module: str) -> bool:
    return f".{module}." in f".{name}"


def check_whole(key: str, name: str, adapter: Source, base: Source) -> None:
    mine, theirs = adapter.specs[key].shape, base.specs[name].shape
    if mine != theirs:
        raise ModelError(
            f"{key!r} of {adapter.name!r} has shape {list(mine)}, but {name!r} of the base "
            f"{list(theirs)}: a vocabulary or a set of labels of another size cannot be merged. "
            "Resize the base first, as it was for training, and save it."
        )


def token_rows(
    config: AdapterConfig, module: str, key: str, name: str, adapter: Source, base: Source
) -> tuple[int, ...]:
    """The rows of an embedding that single tokens' tensors replace."""
    setting = config.trainable_token_indices
    if isinstance(setting, Mapping):
        fits = [rows for ending, rows in setting.items() if ends_with(module, ending)]
    else:
        fits = [] if setting is None else [setting]
    shape, whole = adapter.specs[key].shape, base.specs[name].shape
    if len(fits) != 1 or len(whole) != 2 or shape != (len(fits[0]), whole[1]):
        raise ModelError(
            f"{key!r} {list(shape)} of {adapter.name!r} replaces rows of {name!r} {list(whole)}, "
            f"but trainable_token_indices is {setting!r}: expected one index for each row."
        )
    if max(fits[0], default=0) >= whole[0]:
        raise ModelError(
            f"trainable_token_indices of {config.folder!r} names token {max(fits[0])}, but "
            f"{name!r} of the base has {whole[0]} rows: resize the base first, as it "
            "was for training."
        )
    return fits[0]
