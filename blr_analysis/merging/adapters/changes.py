"""What a LoRA adapter does to each tensor of its base, decided from names and shapes alone.

Every tensor of the adapter's file is used, and used once, or the adapter is refused: the
matrices A and B of a module, DoRA's magnitudes, biases and whole modules that were trained
beside them, and single rows of an embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.files import Source
from blr_analysis.merging.adapters.checks import (
    check_floats,
    check_settings,
    check_whole,
    token_rows,
)
from blr_analysis.merging.adapters.config import AdapterConfig, ends_with
from blr_analysis.merging.adapters.names import WRAPPED, Grouped, group, near, translate
from blr_analysis.merging.adapters.shapes import LowRank, fitting, stored_transposed
from blr_analysis.merging.adapters.ties import Said, drop_tied_heads, refuse_tied, same


@dataclass(frozen=True)
class Change:
    """What happens to one tensor of the base; names are those of the adapter's file.

    Attributes:
        whole: the tensor that stands for the base's, before anything is added.
        low_rank: what is added.
        shift: a vector and the factor with which it is added (the bias of B).
        tokens: new rows, and the indices of the rows that they replace.
    """

    whole: str | None = None
    low_rank: LowRank | None = None
    shift: tuple[str, float] | None = None
    tokens: tuple[str, tuple[int, ...]] | None = None

    @property
    def words(self) -> str:
        """What happens, in a few words, for tables."""
        parts = ["the adapter's own"] if self.whole else []
        if self.low_rank:
            kind = "DoRA" if self.low_rank.magnitude else "LoRA"
            parts.append(f"{kind}, r={self.low_rank.rank}, scaling {self.low_rank.scale:.4g}")
        parts += ["bias of B added"] if self.shift else []
        parts += [f"{len(self.tokens[1])} rows replaced"] if self.tokens else []
        return ", ".join(parts)


def changes_of(config: AdapterConfig, adapter: Source, base: Source) -> dict[str, Change]:
    """The change of every base tensor that the adapter changes, by the base's names.

    Raises:
        ModelError: the adapter does not fit the base, or its effect cannot be told exactly.
    """
    found = group(adapter.specs, adapter.name)
    for name, key in found.copies.items():
        if not same(adapter, key, found.whole[name]):
            raise ModelError(
                f"{adapter.name!r} holds {key!r} and {found.whole[name]!r}, two versions of one "
                "tensor that differ: save the adapter again with a current PEFT."
            )
    tied = drop_tied_heads(config, found, adapter, base)
    parameters = _parameters(config, found, base)
    wanted = [*(name for names in parameters.values() for name in names), *found.whole]
    wanted += [f"{module}.weight" for module in found.tokens]
    wanted += [f"{module}.bias" for module, parts in found.low_rank.items() if "bias" in parts]
    own = translate(wanted, base.specs, config.folder)
    check_floats(own, adapter, base)
    check_settings(config, found, parameters, own, base)
    refuse_tied(config, found, own, tied, base, Said.of(base))
    changes: dict[str, Change] = {}

    def change(name: str, **what: Any) -> None:
        changes[own[name]] = replace(changes.get(own[name], Change()), **what)

    for name, key in found.whole.items():
        check_whole(key, own[name], adapter, base)
        change(name, whole=key)
    for module, names in parameters.items():
        for name, low_rank in _place(config, found, module, names, own, adapter, base):
            change(name, low_rank=low_rank)
    for module, parts in found.low_rank.items():
        if "bias" in parts:
            check_whole(parts["bias"], own[f"{module}.bias"], adapter, base)
            change(f"{module}.bias", shift=(parts["bias"], config.scaling(module)))
    for module, key in found.tokens.items():
        rows = token_rows(config, module, key, own[f"{module}.weight"], adapter, base)
        change(f"{module}.weight", tokens=(key, rows))
    return changes


def _parameters(config: AdapterConfig, found: Grouped, base: Source) -> dict[str, list[str]]:
    """The tensors that each adapted module's matrices are for: its weight, or what
    ``target_parameters`` names on it."""
    wrapped = [module.replace(WRAPPED, "") for module in found.low_rank]
    parameters = {}
    for module in dict.fromkeys(wrapped):
        each = {
            f"{module}.{target.rpartition('.')[2]}": target for target in config.target_parameters
        }
        names = [n for n, target in each.items() if ends_with(n, target) and near(n, base.specs)]
        if not names and not config.targets(module):
            raise ModelError(
                f"{config.folder!r} holds matrices for {module!r}, which neither target_modules "
                "nor target_parameters names (or the base has no such parameter): PEFT would not "
                "use them."
            )
        if len(names or [module]) != wrapped.count(module):
            raise ModelError(
                f"{config.folder!r} holds {wrapped.count(module)} pairs of matrices for "
                f"{module!r}, but target_parameters names {some(names)} there."
            )
        parameters[module] = names or [f"{module}.weight"]
    return parameters


def _place(
    config: AdapterConfig,
    found: Grouped,
    module: str,
    names: list[str],
    own: Mapping[str, str],
    adapter: Source,
    base: Source,
) -> list[tuple[str, LowRank]]:
    """Which pair of matrices is for which parameter of a module, and how it is added.

    The file numbers the pairs by nesting, in an order that only the model's code knows; shapes
    tell them apart.
    """
    levels = [m for m in found.low_rank if m.replace(WRAPPED, "") == module]
    targeted = bool(config.target_parameters) and names != [f"{module}.weight"]
    targeted = targeted or any(ends_with(names[0], target) for target in config.target_parameters)
    orders = []
    for order in itertools.permutations(names):
        each = []
        for level, name in zip(levels, order, strict=True):
            pattern = name if targeted else module
            shapes = fitting(
                found.low_rank[level],
                config.rank(pattern),
                config.scaling(pattern),
                base.specs[own[name]].shape,
                adapter.specs,
                parameter=targeted,
            )
            if len(shapes) == 2 and not targeted:
                shapes = [shapes[stored_transposed(own[name], base.specs, config)]]
            each.append([(name, low_rank) for low_rank in shapes])
        orders += itertools.product(*each)
    if len(orders) != 1:
        held = [
            f"{k} {list(adapter.specs[k].shape)}"
            for m in levels
            for k in found.low_rank[m].values()
        ]
        there = ", ".join(f"{own[n]} {list(base.specs[own[n]].shape)}" for n in names)
        ranks = sorted({config.rank(n if targeted else module) for n in names})
        raise ModelError(
            f"the adapter {config.folder!r} holds {', '.join(held)} for {there} of the base, with "
            f"r = {', '.join(map(str, ranks))} by its configuration: "
            + (
                "these shapes fit in more than one way, and the file does not say which. "
                if orders
                else "these shapes do not fit. "
            )
            + "Name the folder of a merged model instead, or an adapter trained on this base."
        )
    return list(orders[0])
