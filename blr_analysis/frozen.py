"""Frozen layers run once: what they give for an example is kept for the next pass over the data.

A layer whose parameters are all frozen, and which has run before anything that trains is read,
gives the same for an example at any weights that an analysis tries. Where half of a model's layers
are such, the outputs of the outermost of them are kept in memory, a row for each example.

A pass takes kept rows only where they stand for its own: in eval mode, at the same frozen numbers,
buffers and settings, for the same inputs in batches of the same shape (padding counts). A change
that nobody announces (by ``.data``, of a plain attribute, of a row of the data) is noticed by
fingerprints; not one inside of an object that a module refers to. Before the first
one, passes with and without kept rows are compared, bit for bit, at other weights of the layers
that train; a model that they differ for (it is random, keeps state, or is watched by hooks) runs
whole every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import Subset

SHARE = 0.5  # of the layers' calls that must be of frozen ones, else nothing is kept
LEAST_MEMORY = 64 * 2**20  # bytes that rows may take where the user names no bound
PROBE = 3  # examples that are run to find the layers
MOVED = 0.5  # times a parameter's own size: how far it is moved to see that rows stay
OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # attributes
WORD = 8  # bytes
CONSTANTS = (type(None), bool, int, float, str)  # outputs beside tensors that may be kept

Run = Callable[[Any, Mapping[str, Tensor]], Any]  # a batch, at these parameters → what comes out
Row = tuple[Any, ...]  # of one example: a tensor of each output, or the shape of an unused one


@dataclass(frozen=True)
class Layer:
    """A frozen module, and the form of what it gives.

    Attributes:
        outputs: the form of its outputs.
        leaves: what they hold where they are no tensors, else a tensor of no numbers.
        used: whether the model looks at each of them.
    """

    module: nn.Module
    outputs: TreeSpec
    leaves: tuple[Any, ...]
    used: tuple[bool, ...]

    def rows(self, leaves: Sequence[Any]) -> list[Row]:
        """One for each example of a batch."""
        columns: list[Sequence[Any]] = []
        for leaf, is_used in zip(leaves, self.used, strict=True):
            if isinstance(leaf, Tensor):
                columns.append(leaf.unbind() if is_used else [leaf.shape[1:]] * len(leaf))
        return list(zip(*columns, strict=True))

    def batch(self, rows: Sequence[Row]) -> Any:
        """The outputs of a batch of these rows; unused ones are zeros."""
        columns = iter(zip(*rows, strict=True))
        leaves = []
        for leaf, is_used in zip(self.leaves, self.used, strict=True):
            if not isinstance(leaf, Tensor):
                leaves.append(leaf)
            elif is_used:
                leaves.append(torch.stack(list(next(columns))))
            else:
                leaves.append(leaf.new_zeros(()).expand(len(rows), *next(columns)[0]))
        return tree_unflatten(leaves, self.outputs)


@dataclass
class FrozenOutputs:
    """The rows of a model's frozen layers, for the examples of one data set.

    Attributes:
        dataset, collate: whose examples are numbered here; subsets of it are counted as it is.
        layers: whose outputs are kept; None: nobody has looked for them yet.
    """

    dataset: Any
    collate: Any
    layers: tuple[Layer, ...] | None = None
    _state: Any = None  # of the frozen layers, at which the rows are right
    _rows: dict[Any, tuple[Row, ...]] = field(default_factory=dict)
    _bytes: int = 0
    _is_off: bool = False

    def of_other_model(self) -> FrozenOutputs:
        """None yet, for these examples under another model."""
        return FrozenOutputs(self.dataset, self.collate)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Every pass runs the whole model inside."""
        before = self._is_off
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = before

    def look(self, task: Any, params: Mapping[str, Tensor]) -> None:
        """Find the frozen layers of the task's model, once, where these parameters train.

        To be called where no hook of a sweep watches the model.
        """
        if self.layers is not None:
            return
        self.layers = ()
        try:
            with self.off(), task.evaluation():
                self.layers = frozen_layers(task, params)
        except Exception:  # a model, or data, that cannot be looked at so: every pass is whole
            return

    @contextmanager
    def reused(
        self, task: Any, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> Iterator[bool]:
        """Around one pass of the model: its frozen layers give kept rows, or rows that are kept.
        Yields whether they run.

        Args:
            task: whose model runs.
            params: at which it runs.
            indices: of the examples in the batch; None: they are not known.
        """
        keys = self._keys(task, batch, params, indices)
        if keys is None or not self.layers or not self._stands(task.model, params):
            yield True
            return
        rows = [self._rows.get(key) for key in keys]
        known_rows = [row for row in rows if row is not None]
        if len(known_rows) == len(keys):
            with given(self.layers, list(zip(*known_rows, strict=True))):
                yield False
            return
        if self._bytes >= _most_bytes(task):
            yield True
            return
        with watched(self.layers) as calls:
            yield True
        self._keep(keys, calls, _most_bytes(task))

    def _keys(
        self, task: Any, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> list[Any] | None:
        """What each example's row is kept under; None: this pass has nothing to do with rows."""
        if self._is_off or indices is None or not self.layers:
            return None
        if any(module.training for module in task.model.modules()):
            return None
        leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
            return None
        if any(map(is_functorch_wrapped_tensor, (*leaves, *params.values()))):
            return None
        places = self._places(task.examples, indices)
        if places is None or any(len(leaf) != len(places) for leaf in leaves):
            return None
        shapes = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves)
        kind = task.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        inputs = zip(*(_fingerprints(leaf) for leaf in leaves), strict=True)
        return [
            (place, numbers, shapes, autocast)
            for place, numbers in zip(places.tolist(), inputs, strict=True)
        ]

    def _places(self, examples: Any, indices: Tensor) -> Tensor | None:
        """Where examples stand in the data set; None of those that are read in another way."""
        dataset = examples.dataset
        places = indices.cpu()
        while dataset is not self.dataset:
            if type(dataset) is not Subset:
                return None
            places = torch.as_tensor(dataset.indices)[places]
            dataset = dataset.dataset
        return places if examples.collate is self.collate else None

    def _stands(self, model: nn.Module, params: Mapping[str, Tensor]) -> bool:
        """Whether rows may be used in this pass; those of other frozen numbers are let go."""
        assert self.layers is not None
        modules = {m: None for layer in self.layers for m in layer.module.modules()}
        if any(is_watched(module) for module in modules):
            return False
        own = {id(t) for m in modules for t in m._parameters.values() if t is not None}
        own_buffers = {id(t) for m in modules for t in m._buffers.values() if t is not None}
        for name, parameter in model.named_parameters():
            if id(parameter) in own and name in params:
                return False
        buffers = {n: b for n, b in model.named_buffers() if id(b) in own_buffers and n in params}
        if any(not torch.equal(params[n].to(b), b) for n, b in buffers.items()):
            return False
        state = _numbers(list(modules))
        if state != self._state:
            self._rows.clear()
            self._bytes = 0
            self._state = state
        return True

    def _keep(
        self, keys: Sequence[Any], calls: Sequence[list[Sequence[Any]]], most_bytes: int
    ) -> None:
        """Keep the rows of a pass in which every layer was called once, as it is known to be."""
        assert self.layers is not None
        if any(len(outputs) != 1 for outputs in calls):
            return
        rows_by_layer = []
        for layer, ((leaves, form),) in zip(self.layers, calls, strict=True):
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            if form != layer.outputs or any(len(leaf) != len(keys) for leaf in tensors):
                return
            rows_by_layer.append(layer.rows(leaves))
        for key, rows in zip(keys, zip(*rows_by_layer, strict=True), strict=True):
            if key not in self._rows and self._bytes < most_bytes:
                self._rows[key] = rows
                tensors = [leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)]
                self._bytes += sum(t.nbytes for t in tensors)


def _most_bytes(task: Any) -> int:
    """What rows may take: the user's bound, else what the model's weights take."""
    if task.memory_budget is not None:
        return task.memory_budget
    return max(LEAST_MEMORY, sum(p.nbytes for p in task.model.parameters()))


def is_watched(module: nn.Module) -> bool:
    """Whether somebody's hook looks at the module's calls."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _numbers(modules: Sequence[nn.Module]) -> Any:
    """What tells the frozen layers' present numbers and settings from others."""
    settings = [(name, leaf) for module in modules for name, leaf in _settings(module)]
    plain_tensors = [leaf for _, leaf in settings if isinstance(leaf, Tensor)]
    tensors = [
        tensor
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    ]
    tensors += plain_tensors
    places = tuple((id(t), t.data_ptr(), t._version, t.dtype) for t in tensors)
    sketches = tuple(_sketch(t.detach()) for t in tensors if t.numel())
    constants = tuple(
        (name, type(leaf), leaf if isinstance(leaf, CONSTANTS) else id(leaf))
        for name, leaf in settings
    )
    return tuple(map(id, modules)), places, sketches, constants


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's own attributes beside those that every module has, and what lists and dicts of
    them hold."""
    for name, value in vars(module).items():
        if name in OF_EVERY_MODULE:
            continue
        if isinstance(value, CONSTANTS):
            yield name, value
        else:
            for leaf in tree_leaves(value):
                yield name, leaf


def _sketch(tensor: Tensor) -> float:
    """A number that changes with a tensor's entries, their signs and their order."""
    if not tensor.is_floating_point():
        return float(_fingerprints(tensor.unsqueeze(0))[0])
    if tensor.ndim < 2:
        entries = tensor.reshape(-1)
    else:
        rows = tensor.flatten(1)
        entries = rows @ _directions(rows.shape[1]).to(rows)
    return float(entries @ _directions(len(entries)).to(entries))


@lru_cache(maxsize=256)
def _directions(n: int) -> Tensor:
    """``[n]`` fixed random numbers between 0.5 and 1.5."""
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5


def _fingerprints(inputs: Tensor) -> list[int]:
    """One for each row: Σ_j c_j (w_j xor w_j / 2²⁹) modulo 2⁶⁴, of its words w_j of 64 bits; exact,
    so that it does not depend on the other rows. Without the xor, signs turned in pairs cancel."""
    if not inputs.numel():
        return [0] * len(inputs)
    rows = inputs.detach().reshape(len(inputs), prod(inputs.shape[1:])).contiguous()
    octets = rows.view(torch.uint8)
    missing = -octets.shape[1] % WORD
    if missing:
        octets = nn.functional.pad(octets, (0, missing))
    elif octets.storage_offset() % WORD:
        octets = octets.clone()
    words = octets.reshape(-1).view(torch.int64).view(len(rows), -1)
    mixed = words >> 29
    mixed ^= words
    mixed *= _factors(words.shape[1]).to(words)
    return mixed.sum(1).tolist()


@lru_cache(maxsize=16)
def _factors(n: int) -> Tensor:
    """``[n]`` fixed random odd integers."""
    generator = torch.Generator().manual_seed(n)
    return torch.randint(-(2**62), 2**62, (n,), generator=generator) | 1


@contextmanager
def replaced(
    modules: Sequence[nn.Module], forwards: Sequence[Callable[..., Any]]
) -> Iterator[None]:
    """The modules run these functions inside."""
    with ExitStack() as stack:
        for module, forward in zip(modules, forwards, strict=True):
            attributes = vars(module)
            if "forward" in attributes:
                stack.callback(attributes.__setitem__, "forward", attributes["forward"])
            else:
                stack.callback(attributes.pop, "forward")
            attributes["forward"] = forward
        yield


@contextmanager
def given(layers: Sequence[Layer], rows: Sequence[Sequence[Row]]) -> Iterator[None]:
    """The layers give these rows, layer by layer, whatever they are asked."""

    def giving(layer: Layer, own_rows: Sequence[Row]) -> Callable[..., Any]:
        return lambda *args, **kwargs: layer.batch(own_rows)

    forwards = [giving(layer, own) for layer, own in zip(layers, rows, strict=True)]
    with replaced([layer.module for layer in layers], forwards):
        yield


@contextmanager
def watched(layers: Sequence[Layer]) -> Iterator[list[list[Any]]]:
    """What each of the layers gives at each call: copies of the outputs that are used, and their
    form."""
    calls: list[list[Any]] = [[] for _ in layers]

    def watching(layer: Layer, outputs: list[Any]) -> Callable[..., Any]:
        forward = layer.module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            leaves, form = tree_flatten(output)
            if len(leaves) == len(layer.used):
                leaves = [
                    leaf.detach().clone() if used and isinstance(leaf, Tensor) else leaf
                    for leaf, used in zip(leaves, layer.used, strict=True)
                ]
            outputs.append((leaves, form))
            return output

        return call

    forwards = [watching(layer, own) for layer, own in zip(layers, calls, strict=True)]
    with replaced([layer.module for layer in layers], forwards):
        yield calls


def frozen_layers(task: Any, params: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """The outermost frozen layers that have run before anything that trains is read; none where
    they are less than half of the model's layers, or where a comparison finds a difference."""
    if task.n_data < PROBE or not _has_frozen(task.model, params):
        return ()
    params = {name: p.detach().clone() for name, p in task.cast(params).items()}
    run = task.run_model
    with torch.inference_mode(False), torch.no_grad():
        single = task.fetch(torch.zeros(1, dtype=torch.long))
        calls = _calls(task.model, params, lambda: run(single, params))
        candidates = _called_first(task.model, params, calls)
        if not candidates:
            return ()
        probe = task.fetch(torch.arange(PROBE))
        calls_of_probe = _calls(task.model, params, lambda: run(probe, params))
        layers = _with_rows(candidates, calls, calls_of_probe)
        if _count(calls, layers) < SHARE * _count(calls, None):
            return ()
        return _compared(layers, probe, single, params, run)


def _has_frozen(model: nn.Module, params: Mapping[str, Tensor]) -> bool:
    return any(name not in params for name, _ in model.named_parameters())


@dataclass(frozen=True)
class Call:
    """One call of a module, and the form of what it gave.

    Attributes:
        leaves: of its outputs; tensors of no numbers, and whatever else.
        is_first: whether nothing that trains was read before its end.
    """

    module: nn.Module
    form: TreeSpec
    leaves: tuple[Any, ...]
    is_first: bool


class _Reading(TorchDispatchMode):
    """Notices the first operation that reads one of these tensors, or a view of it."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.places = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        self.has_begun = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_begun:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            read = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
            self.has_begun = not self.places.isdisjoint(read)
        return func(*args, **(kwargs or {}))


def _calls(model: nn.Module, params: Mapping[str, Tensor], run: Callable[[], Any]) -> list[Call]:
    """The calls of the model's modules in one pass; none where what trains is never read."""
    own = set(model.modules())
    calls: list[Call] = []
    reading = _Reading(params.values())

    def end(module: nn.Module, args: Any, output: Any) -> None:
        if module in own:
            leaves, form = tree_flatten(output)
            shapes = tuple(_shape(leaf) for leaf in leaves)
            calls.append(Call(module, form, shapes, not reading.has_begun))

    handle = register_module_forward_hook(end)
    try:
        with reading:
            run()
    finally:
        handle.remove()
    return calls if reading.has_begun else []


def _shape(leaf: Any) -> Any:
    """A tensor without its numbers."""
    return leaf.detach().new_zeros(()).expand(leaf.shape) if isinstance(leaf, Tensor) else leaf


def _called_first(
    model: nn.Module, params: Mapping[str, Tensor], calls: Sequence[Call]
) -> list[nn.Module]:
    """The modules that hold frozen parameters alone, and are called once, before anything that
    trains is read; outer ones first."""
    trains = {id(p) for name, p in model.named_parameters() if name in params}
    modules = [call.module for call in calls]
    first = {call.module for call in calls if call.is_first}
    return [
        module
        for module in model.modules()
        if module in first
        and modules.count(module) == 1
        and any(True for _ in module.parameters())
        and not any(id(p) in trains for p in module.parameters())
        and not any(map(_must_run, module.modules()))
    ]


def _must_run(module: nn.Module) -> bool:
    """Whether somebody looks at its calls, or they cannot be replaced."""
    return is_watched(module) or isinstance(module, torch.jit.ScriptModule)


def _with_rows(
    candidates: Sequence[nn.Module], calls: Sequence[Call], calls_of_probe: Sequence[Call]
) -> tuple[Layer, ...]:
    """The outermost candidates that give a row for each example, of one and of several."""
    alone = {call.module: call for call in calls}
    together = {call.module: call for call in calls_of_probe}
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    for module in candidates:
        if module in inside or module not in together:
            continue
        one = alone[module]
        several = together[module]
        if one.form == several.form and _are_rows(one.leaves, several.leaves):
            used = tuple(isinstance(leaf, Tensor) for leaf in several.leaves)
            layers.append(Layer(module, several.form, several.leaves, used))
            inside.update(module.modules())
    return tuple(layers)


def _are_rows(one: Sequence[Any], several: Sequence[Any]) -> bool:
    """Whether all outputs have a row an example, or are constants."""
    for a, b in zip(one, several, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if not (a.ndim and b.ndim and len(a) == 1 and len(b) == PROBE):
                return False
        elif not (isinstance(a, CONSTANTS) and type(a) is type(b) and a == b):
            return False
    return True


def _count(calls: Sequence[Call], layers: Sequence[Layer] | None) -> int:
    """Calls of modules with parameters of their own, inside of these layers or in all."""
    inside = {m for layer in layers or () for m in layer.module.modules()}
    return sum(
        any(p is not None for p in call.module._parameters.values())
        for call in calls
        if layers is None or call.module in inside
    )


def _compared(
    layers: tuple[Layer, ...], probe: Any, other: Any, params: Mapping[str, Tensor], run: Run
) -> tuple[Layer, ...]:
    """The layers, with the outputs that the model looks at; none where a pass with kept rows
    differs from one without, at other weights and after a pass of other examples."""
    with watched(layers) as calls:
        run(probe, params)
    rows = [layer.rows(leaves) for layer, ((leaves, _),) in zip(layers, calls, strict=True)]
    moved = _moved(params)
    expected = run(probe, moved)
    run(other, moved)

    def is_same(changed: tuple[Layer, ...], rows: Sequence[Sequence[Row]]) -> bool:
        with given(changed, rows):
            return _equal(run(probe, moved), expected)

    if not is_same(layers, rows):
        return ()
    for number, layer in enumerate(layers):
        for place, leaf in enumerate(layer.leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            spoilt = [*rows]
            spoilt[number] = _spoilt(layer, rows[number], place)
            if is_same(layers, spoilt):
                layer = replace(layer, used=_without(layer.used, place))
        layers = (*layers[:number], layer, *layers[number + 1 :])
    with watched(layers) as calls:
        run(probe, params)
    rows = [layer.rows(leaves) for layer, ((leaves, _),) in zip(layers, calls, strict=True)]
    return layers if is_same(layers, rows) else ()


def _without(used: tuple[bool, ...], place: int) -> tuple[bool, ...]:
    return (*used[:place], False, *used[place + 1 :])


def _spoilt(layer: Layer, rows: Sequence[Row], place: int) -> list[Row]:
    """Rows with NaN at one of the outputs."""
    column = sum(isinstance(leaf, Tensor) for leaf in layer.leaves[:place])
    return [
        (*row[:column], torch.full_like(row[column], torch.nan), *row[column + 1 :]) for row in rows
    ]


def _moved(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other weights, of about the same size."""
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, p in params.items():
        noise = torch.randn(p.shape, generator=generator).to(p)
        size = p.square().mean().sqrt() if p.numel() else 0.0
        moved[name] = p + MOVED * (size + MOVED) * noise if p.is_floating_point() else p
    return moved


def _equal(outputs: Any, expected: Any) -> bool:
    """Whether all tensors are finite and the same, bit for bit."""
    pairs = list(zip(tree_leaves(outputs), tree_leaves(expected), strict=True))
    tensors = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    return all(bool(a.isfinite().all()) and torch.equal(a, b) for a, b in tensors)
