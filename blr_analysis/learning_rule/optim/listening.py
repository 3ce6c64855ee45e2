"""What a model's layers see in the user's own forward and backward pass, caught by hooks.

Forward hooks keep every layer's inputs, hooks on its outputs the gradients that come back to
them. Hooks stand from :meth:`Listener.start` to :meth:`Listener.stop` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map

from blr_analysis.backprop.layers import rule_for
from blr_analysis.backprop.record import Unit, Visit
from blr_analysis.errors import OptimizerError


@dataclass
class Seen:
    """One call of a layer, and the gradients that came back to its outputs."""

    visit: Visit
    grads: list[Tensor | None]

    @property
    def got_gradient(self) -> bool:
        return any(g is not None for g in self.grads)


@dataclass
class Pass:
    """One call of the model on ``batch`` examples; ``tasks`` tells the backward passes apart that
    came to it."""

    batch: int
    tasks: set[int] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Ears:
    """Whether hooks listen. They hold this and a list of gradients, nothing that leads back to the
    graph: a graph whose hooks know it is never freed."""

    deaf: bool = False


class Listener:
    """Hooks on a model and on those of its layers that own certain parameters.

    Args:
        model: the module that is called in training.
        before: called as the model's forward begins, when it is differentiated.
        after: called with the pass and the model's output as it ends.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Callable[[], None],
        after: Callable[[Pass, Any], None],
    ) -> None:
        self.model = model
        self.passes: list[Pass] = []
        self._before, self._after = before, after
        self._handles: list[Any] = []
        self._current: Pass | None = None
        self._ears = Ears()

    def start(self, wanted: Mapping[int, str]) -> None:
        """Put hooks on every layer with a parameter whose id is a key of ``wanted``."""
        units = units_of(self.model, wanted)
        keep = self._handles.append  # one by one: an interrupt leaves none behind
        keep(self.model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
        for unit in units:
            keep(unit.module.register_forward_hook(self._hook(unit), with_kwargs=True))
        keep(self.model.register_forward_hook(self._leave, always_call=True))

    def stop(self) -> None:
        """Take the hooks off; what was caught stays in :attr:`passes`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """What runs inside is not listened to."""
        self._ears.deaf = True
        try:
            yield
        finally:
            self._ears.deaf = False

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.model or not torch.is_grad_enabled():
            return
        self._before()
        leaves = tree_flatten((args, kwargs))[0]
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not sizes:
            raise OptimizerError("the model was called without a tensor that holds the examples")
        self._current = Pass(sizes[0])
        self.passes.append(self._current)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        passed = self._current
        if module is self.model and passed is not None:
            self._current = None
            self._after(passed, output)

    def _hook(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            ours = module is unit.module  # a copy of the model has copies of its hooks
            if ours and torch.is_grad_enabled() and not self._ears.deaf and not _in_backward():
                self._catch(unit, args, kwargs, output)

        return hook

    def _catch(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        passed = self._current
        if passed is None:
            raise OptimizerError(
                f"layer {unit.path!r} was called outside of the model's own forward: is "
                f"{type(self.model).__name__} (model=) the module that is called in training?"
            )
        leaves = [x for x in tree_flatten(output)[0] if carries_gradient(x)]
        edges = [get_gradient_edge(leaf) for leaf in leaves]
        occurrence = passed.counts.get(unit.path, 0)
        passed.counts[unit.path] = occurrence + 1
        args, kwargs = tree_map(
            lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs)
        )
        values = [leaf.detach() for leaf in leaves]
        seen = Seen(Visit(unit, occurrence, args, kwargs, values, edges), [None] * len(leaves))
        for position, leaf in enumerate(leaves):
            leaf.register_hook(_receiver(seen.grads, position, self._ears, passed.tasks))
        passed.seen.append(seen)


def _receiver(grads: list[Tensor | None], position: int, ears: Ears, tasks: set[int]) -> Any:
    """A hook that adds up what comes back to an output."""

    def receive(grad: Tensor) -> None:
        if not ears.deaf:
            tasks.add(torch._C._current_graph_task_id())
            before = grads[position]
            grads[position] = grad.detach() if before is None else before + grad.detach()

    return receive


def units_of(model: nn.Module, wanted: Mapping[int, str]) -> list[Unit]:
    """Every module with parameters of its own among ``wanted``, and its rule if it has one.

    Raises:
        OptimizerError: an embedding whose gradients are not those of the loss.
    """
    units: list[Unit] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        whole = isinstance(module, nn.MultiheadAttention)  # which never calls its out_proj
        if whole:
            inside.update(id(inner) for inner in module.modules())
        named = module.named_parameters(recurse=whole)
        own = {attribute: wanted[id(p)] for attribute, p in named if id(p) in wanted}
        if not own:
            continue
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (
            module.max_norm is not None or module.scale_grad_by_freq
        ):
            raise OptimizerError(
                f"embedding {path!r} renormalises rows (max_norm) or scales gradients "
                "(scale_grad_by_freq), so that its gradients are not those of the loss: build it "
                "without"
            )
        rule = rule_for(module) if set(own) <= {"weight", "bias"} else None
        units.append(Unit(path, module, own, rule))
    return units


def carries_gradient(leaf: Any) -> bool:
    """Whether a leaf of an output is differentiated."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _in_backward() -> bool:
    """Whether this is a backward pass, in which activation checkpointing calls layers again."""
    return torch._C._current_graph_task_id() != -1
