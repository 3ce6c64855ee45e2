"""Squared gradients of every example, read from the user's own forward and backward pass.

The gradient of one example's loss is, layer by layer, a function of the layer's input and of the
gradient at its output; both pass by in training. The rules of
:mod:`blr_analysis.backprop.layers` turn them into Σ_i g_i². Nothing is computed twice, but for
layers without a rule, which are differentiated by themselves.

What is read is checked, on the first passes and ever more seldom after them (on the 1st, 2nd,
4th, 8th, …): Σ_i g_i against the gradient that autograd left in ``p.grad``; and whether an
example's outputs depend on its own row of every layer alone.

A :class:`Listener` catches both: forward hooks keep every layer's inputs, hooks on its outputs the
gradients that come back to them. Hooks stand from :meth:`Listener.start` to :meth:`Listener.stop`.

:class:`HessianDiagonal` reads the graph that a backward pass leaves behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map

from blr_analysis.backprop.layers import Axis, rule_for
from blr_analysis.backprop.reading import names_of, read
from blr_analysis.backprop.record import Unit, Visit, counted, warn_of_uncounted
from blr_analysis.backprop.terms import Term, merged
from blr_analysis.checks import one_of, some
from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.families.drawing import uniform
from blr_analysis.learning_rule.optim.draws import NO_GRADIENT, NoGradient, state_dtype


class PerExampleSquares:
    """Reads the mean of g_i² over the examples seen between :meth:`start` and :meth:`finish`.

    Args:
        model: the module that is called in training.
        reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a batch.
        algorithm: who asks, for messages.
    """

    def __init__(self, model: nn.Module, reduction: str, algorithm: str) -> None:
        self.model = model
        self.reduction = one_of("loss_reduction", reduction, ("mean", "sum"))
        self.algorithm = algorithm
        self._contexts = 0
        self._warned = self._told = False
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("model", "reduction", "algorithm", "_contexts", "_warned", "_told")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.stop()

    def start(self, params: Sequence[Tensor]) -> None:
        """Listen to every layer that owns one of ``params``.

        Raises:
            OptimizerError: a parameter is not the model's, or a layer is of a kind that is known
                not to work.
        """
        self._contexts += 1
        names = {id(p): name for name, p in self.model.named_parameters()}
        foreign = [tuple(p.shape) for p in params if id(p) not in names]
        if foreign:
            raise OptimizerError(
                f"parameters of shapes {foreign[:5]} are not in model=: pass theirs"
            )
        self._params = {names[id(p)]: p for p in params}
        self._listener = Listener(self.model, self._check_modes, self._check_pass)
        self._listener.start({id(p): name for name, p in self._params.items()})

    def stop(self) -> None:
        """Listen no more, and forget what was heard."""
        if getattr(self, "_listener", None) is not None:
            self._listener.stop()
        self._listener: Any = None
        self._params: dict[str, Tensor] = {}

    def finish(self) -> dict[Tensor, Tensor]:
        """The mean over examples of g_i² by parameter; of a loss that is a sum, ``p.grad``
        becomes the mean over examples as well.

        Raises:
            OptimizerError: some parameter's per-example gradients cannot be read.
        """
        self._listener.stop()
        try:
            return self._read(self._listener.passes)
        finally:
            self.stop()

    # Reading ---------------------------------------------------------------------------------

    def _read(self, heard: Sequence[Pass]) -> dict[Tensor, Tensor]:
        if all(p.grad is None for p in self._params.values()):
            raise NoGradient(NO_GRADIENT)
        passes = [p for p in heard if any(s.got_gradient for s in p.seen)]
        if any(a.tasks & b.tasks for i, a in enumerate(passes) for b in passes[:i]):
            raise OptimizerError(
                f"{self.algorithm} needs one backward per call of the model: join the batches"
            )
        values = {name: p.detach() for name, p in self.model.named_parameters()}
        names = names_of(self.model)
        squares: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        for passed in passes:
            each = (self._terms(s, passed.batch, values, names) for s in passed.seen)
            terms = merged([term for terms in each for term in terms])
            for term in terms:
                _accumulate(squares, term.square_sum())
                if self._is_due:
                    _accumulate(sums, term.sum())
        got = {name: p for name, p in self._params.items() if p.grad is not None}
        if unseen := [name for name in got if name not in squares]:
            raise self._unreadable(unseen, "no layer that owns it was called with it")
        if self._is_due:
            self._check_sums(got, sums, passes)
        n, mean = sum(p.batch for p in passes), self.reduction == "mean"
        if mean:
            counts = torch.cat([_counted(p) for p in passes])
            if not bool(counts.all()):
                self._told = self._told or warn_of_uncounted(counts)
                n = int(counts.sum())
        means = {}
        for name, param in got.items():
            square = squares[name].to(state_dtype(param)).view_as(param)
            means[param] = square.mul_(n if mean else 1 / n)
            if not mean and param.grad is not None:
                param.grad.div_(n)
        return means

    def _terms(
        self, seen: Seen, batch: int, values: dict[str, Tensor], names: dict[int, str]
    ) -> list[Term]:
        """G_i of one call of a layer, for every example."""
        if not seen.got_gradient:
            return []
        visit, unit = seen.visit, seen.visit.unit
        leaves = tree_flatten((visit.args, visit.kwargs))[0]
        inputs = [_axis(leaf, batch) for leaf in leaves]
        outputs = [_place(x, batch, g) for x, g in zip(visit.outputs, seen.grads, strict=True)]
        axes = [axis for axis in outputs if axis is not None]
        lost = unit.rule is not None and (not inputs or inputs[0] is None)
        if lost or len(axes) < len(outputs):
            shapes = [tuple(x.shape) for x in visit.outputs]
            why = f"its layer's outputs {shapes} or inputs do not start with the {batch} examples"
            raise self._unreadable(unit.names.values(), why)
        wide = state_dtype(values[next(iter(unit.names.values()))])
        visit.args, visit.kwargs = tree_map(lambda x: _widened(x, wide), (visit.args, visit.kwargs))
        grads = [
            [torch.zeros_like(leaf, dtype=wide) if g is None else _widened(g, wide)]
            for g, leaf in zip(seen.grads, visit.outputs, strict=True)
        ]
        try:
            return read(names, values, visit, (inputs, axes), grads, batch)
        except Exception as error:  # whatever a layer makes of one example at a time
            reason = f"differentiating {type(unit.module).__name__} by itself failed ({error})"
            raise self._unreadable(unit.names.values(), reason) from error

    # Checking --------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        return self._contexts & (self._contexts - 1) == 0

    def _check_modes(self) -> None:
        for path, module in self.model.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise OptimizerError(
                    f"{type(module).__name__} {path!r} mixes the examples in training mode: use "
                    "GroupNorm or LayerNorm, eval(), or IVON"
                )

    def _check_pass(self, passed: Pass, output: Any) -> None:
        if not self._is_due or not passed.seen:
            return
        leaves = [x for x in tree_flatten(output)[0] if carries_gradient(x)]
        rows = [x for x in leaves if x.shape[:1] == (passed.batch,)]
        if rows:
            names = mixed(passed, rows)
            passed.forget_gradients()
            if names:
                raise self._unreadable(names, "the model mixes the examples of a batch there")
        elif not self._warned:
            self._warned = True
            warnings.warn(
                f"the model returns no outputs with one row per example, so {self.algorithm} "
                "cannot check that no layer mixes examples",
                stacklevel=4,
            )

    def _check_sums(
        self, got: dict[str, Tensor], sums: dict[str, Tensor], passes: Sequence[Pass]
    ) -> None:
        """Σ_i g_i is p.grad, up to the rounding of the coarsest type on the way."""
        truths = {name: p.grad.detach() for name, p in got.items() if p.grad is not None}
        if not all(bool(g.isfinite().all()) for g in truths.values()):
            return  # step() refuses it, or a GradScaler skips it
        kinds = {x.dtype for p in passes for s in p.seen for x in s.visit.outputs}
        eps = max(torch.finfo(kind).eps for kind in kinds | {g.dtype for g in truths.values()})
        norms = {name: float(torch.linalg.vector_norm(g)) for name, g in truths.items()}
        floor = eps**0.85 * max(norms.values(), default=0.0)
        for name, truth in truths.items():
            gap = torch.linalg.vector_norm(sums[name].view_as(truth).to(truth.dtype) - truth)
            if float(gap) > eps**0.6 * norms[name] + floor:
                raise self._unreadable(
                    [name],
                    "those of the examples do not add up to p.grad: call zero_grad() first; use "
                    "the weight in its layer only",
                )

    def _unreadable(self, names: Iterable[str], why: str) -> OptimizerError:
        return OptimizerError(
            f"{self.algorithm} cannot read the gradient of each example for {some([*names])}: "
            f"{why}. Freeze it, give it another optimizer, or train with IVON"
        )


def mixed(passed: Pass, outputs: Sequence[Tensor]) -> list[str]:
    """The parameters of a layer with a row on which another example's outputs depend.

    Where every example's cotangent is multiplied by a number of its own, so must be the
    gradients of its rows: two backward passes, no deeper than the first layer.
    """
    edges = [edge for s in passed.seen for edge in s.visit.edges]
    leaves = [(s.visit.unit, leaf) for s in passed.seen for leaf in s.visit.outputs]
    steps = torch.arange(passed.batch, dtype=torch.float64) * 0.6180339887498949
    scales = 1 + steps.frac()
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    scaled = [c * _column(scales, c) for c in plain]
    before, after = (
        torch.autograd.grad(outputs, edges, c, retain_graph=True, allow_unused=True)
        for c in (plain, scaled)
    )
    kinds = {x.dtype for x in outputs} | {leaf.dtype for _, leaf in leaves}
    coarsest = max((torch.finfo(kind) for kind in kinds), key=lambda kind: kind.eps)
    for (unit, leaf), g, h in zip(leaves, before, after, strict=True):
        if g is None or h is None or leaf.shape[:1] != (passed.batch,):
            continue
        rows = (g.double() * _column(scales, g.double())).flatten(1)
        gap = torch.linalg.vector_norm(h.double().flatten(1) - rows, dim=1)
        bound = coarsest.eps**0.6 * torch.linalg.vector_norm(rows, dim=1) + coarsest.tiny
        if bool((gap > bound).any()):
            return list(unit.names.values())
    return []


def _counted(passed: Pass) -> Tensor:
    grads = [g for s in reversed(passed.seen) for g in s.grads if g is not None]
    return counted([g for g in grads if g.shape[:1] == (passed.batch,)], passed.batch)


def _accumulate(into: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        into[name] = into[name] + value if name in into else value


def _axis(leaf: Any, batch: int) -> Axis | None:
    """Examples first; None: no tensor, or one that all examples share."""
    return Axis() if isinstance(leaf, Tensor) and leaf.shape[:1] == (batch,) else None


def _place(leaf: Tensor, batch: int, grad: Tensor | None) -> Axis | None:
    """Where the examples are in an output: first, or anywhere if nothing depends on it."""
    if leaf.shape[:1] == (batch,):
        return Axis()
    dims = [d for d, size in enumerate(leaf.shape) if size == batch]
    return Axis(dim=dims[0]) if dims and grad is None else None


def _widened(leaf: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.to(dtype) if floating else leaf


def _column(scales: Tensor, like: Tensor) -> Tensor:
    return scales.to(like).view(-1, *[1] * (like.ndim - 1))


# Listening -----------------------------------------------------------------------------------


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

    def forget_gradients(self) -> None:
        """Those that came back to no backward pass of the user's."""
        self.tasks.clear()
        for seen in self.seen:
            seen.grads[:] = [None] * len(seen.grads)


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

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not self.model or not torch.is_grad_enabled():
            return
        self._before()
        leaves = tree_flatten((args, kwargs))[0]
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
        if not sizes:
            raise OptimizerError("the model was called without a tensor of examples: pass one")
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
            if ours and torch.is_grad_enabled() and not _in_backward():
                self._catch(unit, args, kwargs, output)

        return hook

    def _catch(self, unit: Unit, args: Any, kwargs: Any, output: Any) -> None:
        passed = self._current
        if passed is None:
            raise OptimizerError(
                f"layer {unit.path!r} was called outside of model='s forward: pass what is called"
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
            leaf.register_hook(_receiver(seen.grads, position, passed.tasks))
        passed.seen.append(seen)


def _receiver(grads: list[Tensor | None], position: int, tasks: set[int]) -> Any:
    """A hook that adds up what comes back to an output. It holds nothing that leads back to the
    graph: a graph whose hooks know it is never freed."""

    def receive(grad: Tensor) -> None:
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
                f"embedding {path!r} changes its gradients: no max_norm and scale_grad_by_freq"
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


class HessianDiagonal:
    """z ∘ (∇²ℓ z) for one draw of signs z: unbiased for the diagonal (Hutchinson).

    Of the gradients in ``p.grad``, made by ``loss.backward(create_graph=True)``; they are
    detached, so that the graph is freed (torch warns of a cycle that this breaks).
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._params: list[Tensor] = []

    def start(self, params: Sequence[Tensor]) -> None:
        """Gradients of ``params`` come next."""
        self._params = list(params)

    def stop(self) -> None:
        """Forget what was started, and free the graph."""
        for p in self._params:
            if p.grad is not None:
                p.grad = p.grad.detach()
        self._params = []

    def finish(self) -> dict[Tensor, Tensor]:
        """The estimates by parameter, 0 where the loss is linear.

        Raises:
            OptimizerError: the gradients have no graph.
        """
        params = [p for p in self._params if p.grad is not None]
        grads = [p.grad for p in params if p.grad is not None]
        if params and not any(g.requires_grad for g in grads):
            raise OptimizerError("call zero_grad(), then loss.backward(create_graph=True)")
        z = [2 * (uniform(p, self._generator) < 0.5).to(p) - 1 for p in params]
        curved = [(g, s.to(g)) for g, s in zip(grads, z, strict=True) if g.requires_grad]
        self.stop()
        if not curved:
            return {}
        with torch.enable_grad():
            bends = torch.autograd.grad(
                [g for g, _ in curved], params, [s for _, s in curved], materialize_grads=True
            )
        return {p: (s * b).to(state_dtype(p)) for p, s, b in zip(params, z, bends, strict=True)}
