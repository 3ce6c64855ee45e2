"""Which layers of a model are frozen, and whether their rows can stand in for their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from blr_analysis.frozen.fingerprints import CONSTANTS
from blr_analysis.frozen.layers import Layer, Row, is_watched, recording, replaying
from blr_analysis.ranks import is_sharded

MIN_FROZEN_SHARE = 0.5  # of the layers' calls; with fewer the rows save too little time
PROBE_EXAMPLES = 3  # that are run to find the layers
MOVE = 0.5  # how far a parameter is moved in a comparison, in units of its own size

Run = Callable[[Any, Mapping[str, Tensor]], Any]  # a batch and parameters → the model's answer


def frozen_layers(task: Any, params: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """The outermost frozen layers of the task's model, where these parameters train.

    They hold frozen parameters alone and run before anything that trains is read.

    Returns:
        No layers where fewer than half of the model's layers are frozen, or where a pass with kept
        rows differs from one without. None either where weights are offloaded or divided among
        processes: whether they change cannot be seen.
    """
    frozen = [p for name, p in task.model.named_parameters() if name not in params]
    are_here = not any(parameter.is_meta or is_sharded(parameter) for parameter in frozen)
    if task.n_data < PROBE_EXAMPLES or not frozen or not are_here:
        return ()
    params = {name: p.detach().clone() for name, p in task.cast(params).items()}
    run = task.run_model
    with torch.inference_mode(False), torch.no_grad():
        single = task.fetch(torch.zeros(1, dtype=torch.long))
        calls = _calls_of(task.model, params, lambda: run(single, params))
        candidates = _called_first(task.model, params, calls)
        if not candidates or _are_watched(candidates):
            return ()
        probe = task.fetch(torch.arange(PROBE_EXAMPLES))
        calls_of_probe = _calls_of(task.model, params, lambda: run(probe, params))
        layers = _with_rows(candidates, calls, calls_of_probe)
        if not _save_time(layers, calls):
            return ()
        return _compared(layers, probe, single, params, run)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, and the form of its outputs.

    Attributes:
        module: the module.
        structure: the lists, tuples and dicts that the outputs stand in.
        leaves: the outputs, flat; a tensor stands here without its numbers.
        is_first: whether the call ended before anything that trains was read.
    """

    module: nn.Module
    structure: TreeSpec
    leaves: tuple[Any, ...]
    is_first: bool


class _ReadDetector(TorchDispatchMode):
    """Notices the first operation that reads one of these tensors, or a view of it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.addresses = _addresses(tensors)
        self.has_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_read:
            leaves = tree_leaves((args, kwargs))
            addresses = _addresses(leaf for leaf in leaves if isinstance(leaf, Tensor))
            self.has_read = not self.addresses.isdisjoint(addresses)
        return func(*args, **(kwargs or {}))


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Where the storages of these tensors are in memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _calls_of(
    model: nn.Module, params: Mapping[str, Tensor], run: Callable[[], Any]
) -> list[ModuleCall]:
    """The calls of the model's modules in one pass; none where no parameter is read."""
    modules = set(model.modules())
    calls: list[ModuleCall] = []
    detector = _ReadDetector(params.values())

    def note_call(module: nn.Module, args: Any, output: Any) -> None:
        if module in modules:
            leaves, structure = tree_flatten(output)
            shapes = tuple(map(_without_numbers, leaves))
            calls.append(ModuleCall(module, structure, shapes, not detector.has_read))

    handle = register_module_forward_hook(note_call)
    try:
        with detector:
            run()
    finally:
        handle.remove()
    if not detector.has_read:
        return []
    return calls


def _without_numbers(leaf: Any) -> Any:
    """A tensor of the same shape that stores one zero; anything else as it is."""
    if isinstance(leaf, Tensor):
        return leaf.detach().new_zeros(()).expand(leaf.shape)
    return leaf


def _called_first(
    model: nn.Module, params: Mapping[str, Tensor], calls: Sequence[ModuleCall]
) -> list[nn.Module]:
    """The frozen modules that are called once, before anything that trains is read; outer first."""
    trained = {id(p) for name, p in model.named_parameters() if name in params}
    called = [call.module for call in calls]
    called_first = {call.module for call in calls if call.is_first}

    def can_be_frozen(module: nn.Module) -> bool:
        parameters = list(module.parameters())
        is_frozen = bool(parameters) and not any(id(p) in trained for p in parameters)
        is_scripted = any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())
        return is_frozen and not is_scripted  # the forward of a script cannot be replaced

    return [
        module
        for module in model.modules()
        if module in called_first and called.count(module) == 1 and can_be_frozen(module)
    ]


def _are_watched(modules: Sequence[nn.Module]) -> bool:
    """Whether a hook looks at the calls of one of these modules, or of a module inside."""
    return any(is_watched(part) for module in modules for part in module.modules())


def _with_rows(
    candidates: Sequence[nn.Module],
    calls: Sequence[ModuleCall],
    calls_of_probe: Sequence[ModuleCall],
) -> tuple[Layer, ...]:
    """The outermost candidates whose outputs have a row for each example.

    Args:
        calls: in a pass of one example.
        calls_of_probe: in a pass of :data:`PROBE_EXAMPLES` examples.
    """
    call_of_single = {call.module: call for call in calls}
    call_of_probe = {call.module: call for call in calls_of_probe}
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    for module in candidates:
        if module in inside or module not in call_of_probe:
            continue
        single = call_of_single[module]
        probe = call_of_probe[module]
        if single.structure == probe.structure and _are_rows(single.leaves, probe.leaves):
            used = tuple(isinstance(leaf, Tensor) for leaf in probe.leaves)
            layers.append(Layer(module, probe.structure, probe.leaves, used))
            inside.update(module.modules())
    return tuple(layers)


def _are_rows(single: Sequence[Any], probe: Sequence[Any]) -> bool:
    """Whether every output has a row for each example, or is a constant.

    Args:
        single: the outputs for one example.
        probe: the outputs for :data:`PROBE_EXAMPLES` examples.
    """
    return all(map(_is_row_or_constant, single, probe))


def _is_row_or_constant(single: Any, probe: Any) -> bool:
    if isinstance(single, Tensor) and isinstance(probe, Tensor):
        have_rows = single.ndim > 0 and probe.ndim > 0
        return have_rows and len(single) == 1 and len(probe) == PROBE_EXAMPLES
    return isinstance(single, CONSTANTS) and type(single) is type(probe) and single == probe


def _save_time(layers: Sequence[Layer], calls: Sequence[ModuleCall]) -> bool:
    """Whether enough of the calls of modules with parameters are inside of these layers."""
    inside = {module for layer in layers for module in layer.module.modules()}
    with_parameters = [
        call.module
        for call in calls
        if any(p is not None for p in call.module._parameters.values())
    ]
    n_frozen = sum(module in inside for module in with_parameters)
    return n_frozen >= MIN_FROZEN_SHARE * len(with_parameters)


def _compared(
    layers: tuple[Layer, ...], probe: Any, other: Any, params: Mapping[str, Tensor], run: Run
) -> tuple[Layer, ...]:
    """The layers, each with the outputs that the model uses; none where rows change an output.

    Passes with rows and without are compared at other weights, after a pass of other examples.

    Args:
        probe: the batch that is compared.
        other: a batch of other examples.
    """
    moved = _moved(params)
    outputs = _recorded(layers, lambda: run(probe, params))
    rows = [layer.rows(leaves) for layer, leaves in zip(layers, outputs, strict=True)]
    expected = run(probe, moved)
    run(other, moved)  # a model that keeps state answers in another way from here on

    def gives_expected(rows: Sequence[Sequence[Row]]) -> bool:
        with replaying(layers, rows):
            return _equal(run(probe, moved), expected)

    if not gives_expected(rows):
        return ()
    for number, layer in enumerate(layers):
        used = list(layer.used)
        for place, leaf in enumerate(layer.leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            spoilt = _spoilt(layer, rows[number], place)
            used[place] = not gives_expected([*rows[:number], spoilt, *rows[number + 1 :]])
        layer = replace(layer, used=tuple(used))
        rows[number] = layer.rows(outputs[number])
        layers = (*layers[:number], layer, *layers[number + 1 :])
    outputs = _recorded(layers, lambda: run(probe, params))
    rows = [layer.rows(leaves) for layer, leaves in zip(layers, outputs, strict=True)]
    if not gives_expected(rows):
        return ()
    return layers


def _recorded(layers: Sequence[Layer], run: Callable[[], Any]) -> list[Sequence[Any]]:
    """The outputs of each layer, flat, in a pass in which each of them is called once."""
    with recording(layers) as calls:
        run()
    return [call.leaves for (call,) in calls]


def _spoilt(layer: Layer, rows: Sequence[Row], place: int) -> list[Row]:
    """The rows with NaN in the tensor that is leaf ``place`` of the layer's outputs."""
    column = sum(isinstance(leaf, Tensor) for leaf in layer.leaves[:place])
    return [
        (*row[:column], torch.full_like(row[column], torch.nan), *row[column + 1 :]) for row in rows
    ]


def _moved(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other weights, of about the same size."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, parameter in params.items():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        if not parameter.is_floating_point():
            moved[name] = parameter
            continue
        size = parameter.square().mean().sqrt() if parameter.numel() else 0.0
        moved[name] = parameter + MOVE * (size + MOVE) * noise
    return moved


def _equal(outputs: Any, expected: Any) -> bool:
    """Whether all tensors are finite and the same, bit for bit."""
    pairs = list(zip(tree_leaves(outputs), tree_leaves(expected), strict=True))
    tensors = [pair for pair in pairs if isinstance(pair[0], Tensor)]
    return all(bool(a.isfinite().all()) and torch.equal(a, b) for a, b in tensors)
