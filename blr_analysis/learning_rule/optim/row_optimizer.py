"""The rows of the table that train networks, once: settings, draws, closures, loss scales, states.

A draw shows the loss other weights than the mean, and puts the mean back bit for bit. After one
draw nothing is copied: the gradient is ``p.grad`` itself, and the noise is kept until the step
multiplies the two. So whatever happens to ``p.grad`` in between (``GradScaler.unscale_``,
``clip_grad_norm_``) holds for the curvature estimate noise·gradient as well. From the second draw
on there are means of their own, ``p.grad`` shows a copy of the mean gradient, and a change of that
copy before the step is carried over: the gradient as it stands, the curvature by the factor by
which the norm of that parameter's gradient changed, to the power in which the estimate depends on
the gradient (:data:`DEGREES`). An estimate that the draw brings along (:data:`GIVEN`) has its own
memory from the first draw on.

The arithmetic of a step is :func:`blr_analysis.learning_rule.moves.step`. On a CPU it runs block by
block, all operations on one block, which stays in the cache, then the next (:func:`for_blocks`); an
accelerator gets everything at once. A class that derives from :class:`RowOptimizer` names its row
and the signature that users type; the rest of the signature becomes the settings of the groups.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from blr_analysis import ranks
from blr_analysis.checks import instance, positive_int, positive_number
from blr_analysis.errors import InputError, OptimizerError, told_as
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import AT_ADVERSARY, GAUSS_NEWTON, NO_CURVATURE
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim.per_example import NO_GRADIENT, NoGradient, PerExampleSquares
from blr_analysis.learning_rule.table import Row, row, runs_elementwise

HINT = "load a state_dict() of this class, made with the same parameters in the same order"
ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by so much."""

SETTINGS = {
    "beta1": "[0, 1)",
    "beta2": "[0, 1]",
    "keep": "(0, 1]",
    **dict.fromkeys(("ess", "temperature"), "(0, inf)"),
    **dict.fromkeys(("clip", "clip_radius"), "(0, inf]"),
    **dict.fromkeys(("lr", "weight_decay", "hess_init", "eps"), "[0, inf)"),
    **dict.fromkeys(("radius", "damping", "floor", "noise"), "[0, inf)"),
}
"""Numbers of a parameter group, and where they lie."""
GROUPED = (*SETTINGS, "hess_approx", "debias", "rescale_lr", "dim", "prior")
DEFAULTS = {
    "ess": 1.0,
    "weight_decay": 0.0,
    "hess_init": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}

PIECE = 1 << 15
"""Elements of a tensor that torch works on without splitting them over threads, where it would
wait for the slowest one some thousand times a step."""
BLOCK = 1 << 17
"""Elements per block on a CPU."""
THREADS = 8
"""At most so many: beyond it they wait for Python's lock."""

GIVEN = ("ggn", "abs")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""
DEGREES = {"price": 1, "abs": 1, "gradsq": 2, "ggn": 2, "none": 2}
"""By method: the power of the gradient's scale in the curvature estimate."""
ROOM = 0.3
"""A gradient's norm stays below the largest number to this power (4e11 in single precision), so
that curvature estimates, which are squared and multiplied by ess, do not overflow."""
KEPT = ("hess", "momentum", "moved")
"""Tensors in the state of a parameter, where its row needs them."""

Group = Mapping[str, Any]
Law = tuple[Any, Move, Group]
"""What moves a group: curvature, move, and the settings that both read."""
Tensors = dict[Tensor, Tensor]
"""By parameter."""
Seen = tuple[Tensor, Tensor | None]
"""What the loss sees in the place of θ, and the factor of its gradient (None: 1)."""
Look = Callable[[Tensor, Group, torch.Generator | None], Seen]
Context = AbstractContextManager[None]
Item = TypeVar("Item")


def check_setting(name: str, value: Any, interval: str) -> None:
    """Raise :class:`InputError` unless the number lies in the interval, up to rounding: a schedule
    that ends at 0 may miss it."""
    low, high = map(float, interval[1:-1].split(","))
    try:
        x = float(value)
    except (TypeError, ValueError, RuntimeError):
        x = math.nan
    above = x > low if interval[0] == "(" else x >= low - ROUNDING
    if not above or not (x < high if interval[-1] == ")" else x <= high):
        raise InputError(f"{name} must be a number in {interval}, not {value!r}")


def groups_of(params: Any) -> list[dict[str, Any]]:
    """What an optimizer is given, as torch reads it: groups."""
    with told_as(InputError, "params cannot be trained", "pass model.parameters() or groups"):
        if isinstance(params, set):
            raise TypeError("a set has no order")
        return torch.optim.Optimizer(params, {}).param_groups


@contextmanager
def plain_tensors() -> Iterator[None]:
    """What is made inside has no graph and serves in training, also under inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# Blocks ---------------------------------------------------------------------------------------


def group_by(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items with equal ``key(item)`` together, in their order.

    >>> group_by([1, 2, 3, 4], lambda number: number % 2)
    {1: [1, 3], 0: [2, 4]}
    """
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def for_blocks(rule: Callable[..., object], columns: Sequence[Sequence[Tensor]]) -> None:
    """Call ``rule(*block)`` for every block of ``columns``, on torch's number of threads.

    ``columns[j][i]`` is the ``j``-th quantity (weight, gradient, …) of the ``i``-th parameter; all
    tensors of one parameter have its shape and device. ``rule`` gets as many lists as there are
    columns, and writes to their tensors elementwise and in place; call it without gradients.

        >>> x = [torch.zeros(3), torch.ones(2)]
        >>> for_blocks(lambda tensors: torch._foreach_add_(tensors, 1), [x])
        >>> x
        [tensor([1., 1., 1.]), tensor([2., 2.])]
    """
    waiting = list(blocks(columns))
    threads = min(torch.get_num_threads(), THREADS, len(waiting))
    if threads < 2:
        for block in waiting:
            rule(*block)
        return
    apart = torch.no_grad()(rule)  # which each thread has its own of
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda block: apart(*block), waiting))


def blocks(
    columns: Sequence[Sequence[Tensor]], size: int = BLOCK, piece: int = PIECE
) -> Iterator[list[list[Tensor]]]:
    """Yield ``columns`` in blocks of about ``size`` elements, each of one device and dtype.

    On a CPU, contiguous tensors are cut into views of at most ``piece`` elements; elsewhere the
    columns come back as one block. Writing to a view writes to the tensor.

        >>> x = [torch.zeros(5), torch.zeros(2), torch.zeros(1)]
        >>> [[view.numel() for view in block[0]] for block in blocks([x], size=4, piece=3)]
        [[3], [2, 2], [1]]
    """
    rows = zip(*columns, strict=True)
    for (device, _), alike in group_by(rows, lambda row: (row[0].device, row[0].dtype)).items():
        block: list[tuple[Tensor, ...]] = []
        filled = 0
        for tensors in alike:
            pieces: Iterable[tuple[Tensor, ...]] = [tensors]
            large = device.type == "cpu" and tensors[0].numel() > piece
            if large and all(t.is_contiguous() for t in tensors):
                pieces = zip(*(t.detach().view(-1).split(piece) for t in tensors), strict=True)
            for views in pieces:
                if block and filled + views[0].numel() > size and device.type == "cpu":
                    yield [list(column) for column in zip(*block, strict=True)]
                    block, filled = [], 0
                block.append(views)
                filled += views[0].numel()
        yield [list(column) for column in zip(*block, strict=True)]


class Scratch(dict[Any, Tensor]):
    """Large tensors that are used again at the next draw.

    A fresh 40 MB tensor costs the operating system ten thousand page faults, more than the
    arithmetic done in it. Only CPU memory is kept; accelerators have an allocator that does this.
    """

    def take(
        self, use: str, like: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, list[Tensor]]:
        """One flat tensor, and its views shaped as ``like`` (one device); what was taken before
        for the same ``use`` is used up.

        >>> flat, views = Scratch().take("noise", [torch.zeros(2, 3), torch.zeros(4)], torch.half)
        >>> flat.shape, [tuple(view.shape) for view in views]
        (torch.Size([10]), [(2, 3), (4,)])
        """
        counts, device = [tensor.numel() for tensor in like], like[0].device
        flat = self.get((use, like[0])) if device.type == "cpu" else None
        if flat is None or len(flat) != sum(counts):
            flat = torch.empty(sum(counts), dtype=dtype, device=device)
            self.update({(use, like[0]): flat} if device.type == "cpu" else {})
        pieces = flat.split(counts)
        return flat, [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]


def fill_normal(
    flat: Tensor, noises: list[Tensor], hess: list[Tensor], group: Group, generator: Any
) -> None:
    """ε ~ N(0, 1 / (ess·(hess + weight_decay))) into ``noises``, the views of ``flat``.

    torch draws on one thread. Large noise on a CPU is therefore drawn in streams, one for each
    piece of memory, whose seeds the generator gives: the same for any number of threads.
    """
    std, decay = group["ess"] ** -0.5, group["weight_decay"]
    seed = None
    if flat.device.type == "cpu" and flat.numel() > PIECE:
        where = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**32, (), generator=generator, device=where))
    elif generator is None or generator.device == flat.device:
        flat.normal_(0.0, std, generator=generator)
    else:  # one generator for parameters on several devices
        there = torch.empty(flat.shape, dtype=flat.dtype, device=generator.device)
        flat.copy_(there.normal_(0.0, std, generator=generator))

    def scale(noise: list[Tensor], hess: list[Tensor]) -> None:
        if seed is not None:
            stream = torch.Generator()
            for piece in noise:  # a CPU generator takes 32 bits of a seed
                stream.manual_seed((seed + piece.storage_offset()) % 2**32)
                piece.normal_(0.0, std, generator=stream)
        root = torch._foreach_add(hess, decay)
        torch._foreach_rsqrt_(root)  # torch would split a square root over its threads
        torch._foreach_mul_(noise, root)

    for_blocks(scale, [noises, hess])


# One draw, and the draws gathered -------------------------------------------------------------


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them; all by parameter.

    With ``noisy`` they are a draw of q; ``look`` makes other weights of these; with neither they
    are the mean itself. ``train`` says whether the gradients there belong to the next step.
    ``adoptable`` marks the draw that ``step(closure)`` makes before it calls the closure: a context
    that the closure opens takes that draw instead of making its own. ``given`` holds curvature that
    is not made of gradient and noise. The loss was divided by ``divided_by``.
    """

    train: bool
    noisy: bool = False
    look: Look | None = None
    adoptable: bool = False
    divided_by: float = 1.0
    groups: dict[Tensor, Group] = field(default_factory=dict)
    noises: Tensors = field(default_factory=dict)
    means: Tensors = field(default_factory=dict)
    factors: Tensors = field(default_factory=dict)
    given: Tensors = field(default_factory=dict)

    def perturb(self, scratch: Scratch, generator: torch.Generator | None) -> None:
        """Keep the means; m → m + ε, in place, rounded once to the dtype of the weights; then what
        a look makes of that."""
        if self.noisy or self.look is not None:
            for params in group_by(self.groups, lambda p: (p.device, p.dtype)).values():
                _, means = scratch.take("mean", params, params[0].dtype)
                for_blocks(torch._foreach_copy_, [means, params])
                self.means.update(zip(params, means, strict=True))
        for_blocks(torch._foreach_add_, [[*self.noises], [*self.noises.values()]])
        for param, group in self.groups.items() if self.look is not None else ():
            seen, factor = self.look(param, group, generator)  # type: ignore[misc]
            param.copy_(seen)
            if factor is not None:
                self.factors[param] = factor

    def restore(self) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        for_blocks(torch._foreach_copy_, [[*self.means], [*self.means.values()]])
        self.means = {}

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ, and from its part of the loss to the whole; the
        squares g_i² of examples as well."""
        for param in self.groups:
            factor = self.factors.get(param, 1.0)
            if param in self.given and param in self.factors:
                self.given[param] = self.given[param] * factor
            if param.grad is not None and param.grad.layout is torch.strided:
                for by in (factor, self.divided_by):
                    if isinstance(by, Tensor) or by != 1:
                        param.grad.mul_(by)


class Gathered:
    """The gradients and curvatures of all draws since the last step, by parameter.

    Of one draw ``grads`` are ``p.grad`` itself and ``sources`` the noise; once ``averaged`` both
    are means with memory of their own, of noise·gradient, gradient², or of what came along with the
    draws, and ``p.grad`` shows a copy. ``method`` says what the curvature is made of.
    """

    def __init__(self, method: str) -> None:
        self.count, self.method, self.averaged = 0, method, False
        self.grads: dict[Tensor, Tensor] = {}
        self.sources: dict[Tensor, Tensor] = {}
        self._versions: list[int] = []  # of the gradients of one draw

    def begin(self) -> None:
        """Before another draw: what ``p.grad`` shows of the earlier ones makes room."""
        held = zip(self.grads.values(), self._versions, strict=False)
        if self.count == 1 and all(g._version != version and not g.any() for g, version in held):
            raise OptimizerError("gradients were zeroed in place: zero_grad(set_to_none=True)")
        self.settle()
        for param in self.grads:
            param.grad = None

    def settle(self, one_too: bool = True) -> None:
        """Carry over what was done to ``p.grad``: gradients that someone put in its place, zeros
        excepted, hold as well. With ``one_too`` a single draw becomes a mean of its own memory.

        Values are compared because ``unscale_`` and ``p.grad.data`` do not count as writing.
        """
        shown = {p: p.grad.detach() for p in self.grads if p.grad is not None}
        if not self.averaged:
            new = {p: g for p, g in shown.items() if p.grad is not self.grads[p] and bool(g.any())}
            self.grads |= new
            if one_too:
                self.grads = {p: g.to(working(p.dtype), copy=True) for p, g in self.grads.items()}
                self.sources = self._curvatures(self.grads, self.sources)
                self.averaged = bool(self.grads)
            return
        for (_, dtype), alike in group_by(shown, lambda p: (p.device, p.dtype)).items():
            held = [self.grads[p].to(dtype) for p in alike]
            before = torch._foreach_norm(held, 2, working(dtype))
            now = torch._foreach_norm([shown[p] for p in alike], 2, working(dtype))
            for param, ratio in zip(
                alike, (torch.stack(now) / torch.stack(before)).tolist(), strict=True
            ):
                if 0 < ratio < math.inf and abs(ratio - 1) >= 1e-6:  # no order of summation
                    self.grads[param].copy_(shown[param])
                    self._scale_curvature(param, ratio)

    def _scale_curvature(self, param: Tensor, factor: float) -> None:
        """As it depends on a gradient that is ``factor`` times as long."""
        if param in self.sources:
            self.sources[param].mul_(factor ** DEGREES[self.method])

    def _curvatures(self, grads: Tensors, sources: Tensors) -> Tensors:
        """The estimates of one draw."""
        if self.method == "gradsq":
            return {p: g * g for p, g in grads.items()}
        return {p: g * sources[p] for p, g in grads.items()} if self.method == "price" else sources

    def add(self, draw: Draw) -> None:
        """The gradients now in ``p.grad`` are those at ``draw``."""
        got = {p: p.grad for p in draw.groups if p.grad is not None}
        if not got:
            raise NoGradient(NO_GRADIENT)
        if any(g.layout is not torch.strided for g in got.values()):
            raise OptimizerError("a gradient is sparse: build the layer with sparse=False")
        sources = draw.noises if self.method == "price" else draw.given
        if self.count:
            self._average(got, sources)
        else:
            self.grads, self._versions = got, [g._version for g in got.values()]
            self.sources = {p: sources[p] for p in got if p in sources}
            if self.method in GIVEN:
                self.settle()
        self.count += 1

    def _average(self, got: Tensors, sources: Tensors) -> None:
        """mean ← mean + (new − mean)/k; a parameter without a gradient contributes zeros."""
        grads = {p: g.detach().to(working(p.dtype)) for p, g in got.items()}
        curvatures = self._curvatures(grads, sources)
        for param in {**got, **self.grads}:
            self.add_zeros(param)
            for means, new in ((self.grads, grads), (self.sources, curvatures)):
                if param in means:
                    value = new[param] if param in new else torch.zeros_like(means[param])
                    means[param].lerp_(value, 1 / (self.count + 1))
        self.show()

    def add_zeros(self, param: Tensor) -> None:
        """For a parameter that had no gradient so far."""
        if param not in self.grads:
            self.grads[param] = torch.zeros_like(param, dtype=working(param.dtype))
            if self.method != "none":
                self.sources[param] = torch.zeros_like(self.grads[param])

    def show(self) -> None:
        """Let ``p.grad`` hold the mean gradient, for ``unscale_`` and ``clip_grad_norm_``."""
        for param, grad in self.grads.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            if param.grad is not grad:
                param.grad.detach().copy_(grad)

    def drop(self, draw: Draw) -> None:
        """The body of ``draw`` failed: the gradients go back to those of the earlier draws."""
        if draw.train:
            for param in draw.groups:
                param.grad = None
            self.show()

    def check(self, inverse_scale: float) -> None:
        """Refuse a gradient that is not finite, or larger than :data:`ROOM` allows."""
        for (_, dtype), alike in group_by(self.grads, lambda p: (p.device, p.dtype)).items():
            grads, wide = [self.grads[p].detach() for p in alike], working(dtype)
            norms = torch.stack(torch._foreach_norm(grads, 2, wide)) * inverse_scale
            usable = (norms < torch.finfo(wide).max ** ROOM).tolist()
            if not all(usable):
                said = f"the gradient of shape {tuple(alike[usable.index(False)].shape)} holds NaN"
                raise OptimizerError(f"{said} or inf, or may overflow: lower lr, or clip")

    def average_over_ranks(self, params: Sequence[Tensor], inverse_scale: float) -> None:
        """Mean gradient and curvature over the processes, once averaged over the draws.

        ``params`` are the same on every process. One that has a gradient on some processes only
        counts as zero on the others.
        """
        shares = mean_over_ranks([p in self.grads for p in params], params[0].device)
        reduced: list[Tensor] = []
        for param in compress(params, shares):
            self.add_zeros(param)
            self.grads[param].mul_(inverse_scale)
            self._scale_curvature(param, inverse_scale)
            reduced += [held[param] for held in (self.grads, self.sources) if param in held]
        ranks.total(reduced)
        torch._foreach_div_(reduced, ranks.count())


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The processes' mean of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks.total([sums])
    return (sums / ranks.count()).tolist()


# The optimizer --------------------------------------------------------------------------------


class RowOptimizer(torch.optim.Optimizer):
    r"""Run a row of Table 1 over Gaussians: gradient descent to IVON, by the row's own words.

    :class:`IVON`, :class:`VOGN`, :class:`OGN`, :class:`Vadam`, :class:`Vprop` and :class:`BSAM` are
    this class with their row, their defaults and what they need beside it; where torch has an
    optimizer of the name, that is the better tuned code, and equal to it.

        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> models = [nn.Linear(3, 1), nn.Linear(3, 1)]
        >>> _ = models[1].load_state_dict(models[0].state_dict())
        >>> ours = RowOptimizer(models[0].parameters(), "Adam", lr=0.01)
        >>> torchs = torch.optim.Adam(models[1].parameters(), lr=0.01)
        >>> for model, optimizer in zip(models, (ours, torchs)):
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        >>> torch.testing.assert_close(models[0].weight, models[1].weight)

    The loss is a mean over the examples of a minibatch. Rows that look at samples of q, and OGN,
    take their gradients inside ``with optimizer.sampled_params(train=True):`` as IVON does; the
    others may, or call ``backward`` and ``step`` as with any optimizer. All of ``lr`` to
    ``eps`` below can be set per group, and torch's schedulers change ``lr``; ``OneCycleLR`` and
    ``CyclicLR`` with ``cycle_momentum=False``, for they know no ``beta1``.

    Args:
        params: parameters, named parameters or groups; any mix of devices and dtypes.
        row: a row of :data:`~blr_analysis.learning_rule.table.ROWS`, or its name.
        lr: step size of the mean.
        ess: N, the number of training examples (the effective sample size).
        weight_decay: δ/ess for prior precision δ; in SGD and Adam the usual L2 penalty.
        hess_init: ``hess`` before the first step.
        beta1: decay of the momentum, in [0, 1), for rows with momentum.
        beta2: 1 − step size of ``hess``, in [0, 1]; RMSprop's ``alpha``.
        eps: added to the root, for AdaGrad, RMSprop, Adam, AdamW; inside it, for AdaDelta.
        mc_samples: how often ``step(closure)`` calls the closure.
        sync: average gradients and curvature over the processes of ``torch.distributed``.
        generator: draws the noise and is saved with the state; None: torch's global ones.
        model: the model that is called in training; only for rows that need the gradient of each
            example (OGN, VOGN), which they read from it.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a minibatch;
            of a sum the gradients are divided by the number of examples. Only with ``model``.
        foreach: taken as by torch's optimizers, and nothing hangs on it: tensors always move
            together, in blocks.

    Raises:
        InputError: a row that is not elementwise; a setting or parameter out of range; no model
            where one is needed.
        OptimizerError: as :class:`IVON`; and a layer whose per-example gradients cannot be read.
    """

    _ranges: ClassVar[Mapping[str, str]] = {}  # narrower than those of every optimizer
    _unscales = True  # whether gradients of a scaled loss can be used
    _look: Any = None  # a Look: what the loss sees in training in the place of the parameters
    _sample: Any = None  # and as a draw of the posterior

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def __init__(
        self, params: Any, row: Row | str, lr: float, ess: float = 1.0, **settings: Any
    ) -> None:
        self._set_up(self._accepted(row), params, lr=lr, ess=ess, **settings)

    def _set_up(
        self,
        row: Row,
        params: Any,
        *,
        model: Any = None,
        loss_reduction: str = "mean",
        mc_samples: int = 1,
        sync: bool = False,
        generator: torch.Generator | None = None,
        foreach: bool | None = None,
        **settings: Any,
    ) -> None:
        """Begin: what every signature ends in."""
        self.row, self.algorithm, self.sync = row, row.algorithm, sync
        if unknown := [name for name in settings if name not in GROUPED]:
            raise TypeError(f"{self.algorithm} has no argument {unknown[0]!r}")
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator or None")
        self.generator, self.mc_samples = generator, positive_int("mc_samples", mc_samples)
        self.examples = self._reader(model, loss_reduction)
        own = {"hess_approx": row.curvature.method, "algorithm": self.algorithm}
        super().__init__(groups_of(params), {**DEFAULTS, **own, **settings})
        self._begin_fresh()

    def _accepted(self, given: Row | str) -> Row:
        accepted = given if isinstance(given, Row) else row(given)
        if accepted.look == AT_ADVERSARY:
            raise InputError(f"{accepted.algorithm} takes two gradients a step: use BSAM")
        if not runs_elementwise(accepted):
            raise InputError(f"{accepted.algorithm} is no elementwise row: {accepted.runs} runs it")
        return accepted

    def _reader(self, model: Any, reduction: str) -> Any:
        """What reads more than gradients in the passes of a draw; None: nothing does."""
        if self.row.curvature == GAUSS_NEWTON:
            instance(f"{self.algorithm}'s model", model, nn.Module, "the module that is trained")
            return PerExampleSquares(model, self.algorithm, reduction)
        if model is not None:
            raise InputError(f"{self.algorithm} reads nothing from the model: leave it out")

    def _begin_fresh(self) -> None:
        self._scratch, self._open = Scratch(), None
        self._forget()

    # What the row asks for -------------------------------------------------------------------

    @property
    def _kept(self) -> tuple[str, ...]:
        """The tensors in the state of each parameter."""
        held = (self.row.curvature != NO_CURVATURE, self.row.move.momentum != "none")
        return tuple(compress(KEPT, (*held, self.row.move.rescaled)))

    @property
    def _own_scale(self) -> bool:
        """Whether ess·(hess + weight_decay) is the precision of a posterior."""
        return self.row.look.noisy or self.examples is not None

    def _is_noisy(self, train: bool) -> bool:
        """Whether the weights are drawn from q."""
        return self.row.look.noisy if train else self._own_scale

    @property
    def _needs_draw(self) -> bool:
        """Whether a plain backward pass, outside of a draw, is no look."""
        return self.row.look.noisy or self._look is not None or self.examples is not None

    # Groups ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every setting and parameter checked (:class:`InputError`)."""
        with told_as(InputError, "a group of parameters is a dictionary with 'params'"):
            super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group) -> None:
        """Raise :class:`InputError` for a group that cannot be used."""
        for name, interval in {**SETTINGS, **self._ranges}.items():
            if name in group:
                check_setting(name, group[name], interval)
        if odd := [p for p in group["params"] if not p.is_floating_point()]:
            raise InputError(f"a parameter is {odd[0].dtype}: give real numbers")
        if self._own_scale and group["hess_init"] + group["weight_decay"] <= 0:
            raise InputError("the precision starts at 0: give weight_decay or hess_init")

    def _check_groups(self) -> None:
        """What was sound when it was given may have been changed since."""
        for group in self.param_groups:
            self._check_group(group)

    # Drawing ---------------------------------------------------------------------------------

    def sampled_params(self, train: bool = False, *, divided_by: float = 1.0) -> Context:
        """The model with weights drawn from q inside the context, and with their mean after it.

        With ``train=True`` the gradients at the end of the context are one draw of the next
        :meth:`step`. The mean comes back bit for bit, also when the body raises; then the draw
        and its gradients are dropped. Several draws are averaged: where every microbatch has a
        context of its own and its loss was divided by their number, as training loops do that
        accumulate gradients, say so with ``divided_by``.

            >>> from blr_analysis.learning_rule.optim import IVON
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = IVON(model.parameters(), lr=0.1, ess=10)
            >>> x = torch.ones(1, 2)
            >>> with torch.no_grad():
            ...     predictions = []
            ...     for _ in range(8):
            ...         with optimizer.sampled_params():
            ...             predictions.append(model(x))
            >>> torch.cat(predictions).std() > 0
            tensor(True)
        """
        return self._at(self._draw(train), divided_by)

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if self._open is not None and self._open.adoptable and train:
            self._open.adoptable = False
            return self._open
        if not train and not self._own_scale and self._sample is None:
            raise OptimizerError(f"{self.algorithm} learns no posterior: fit_laplace makes one")
        look = self._look if train else self._sample
        return Draw(train, self._is_noisy(train), look, adoptable)

    def _shown(self, look: Look) -> Context:
        """The model with the weights that ``look`` makes of the parameters."""
        return self._at(Draw(False, look=look))

    @contextmanager
    def _at(self, draw: Draw, divided_by: float = 1.0) -> Iterator[None]:
        """The model at the weights of ``draw``."""
        draw.divided_by = positive_number("divided_by", divided_by)
        if draw is self._open:  # a closure opens the context that it is called in
            yield
            return
        self._refuse_inside("another context")
        try:
            self._begin(draw)
            yield
            self._finish(draw)
        except BaseException:  # also an interrupt while the means are put back
            if self.examples is not None:
                self.examples.stop()
            if draw is self._open:
                with plain_tensors():
                    draw.restore()
                    self._gathered.drop(draw)
                    self._open = None
            raise

    def _begin(self, draw: Draw) -> None:
        self._check_groups()
        with plain_tensors():
            if draw.train:
                self._gathered.begin()
            draw.groups = self._trained()
            if draw.noisy:
                self._fill(draw)
            self._open = draw
            draw.perturb(self._scratch, self.generator)
            if draw.train and self.examples is not None:
                self.examples.start([*draw.groups])

    def _trained(self) -> dict[Tensor, Group]:
        return {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}

    def _fill(self, draw: Draw) -> None:
        """ε ~ N(0, 1/S), S = ess·(hess + weight_decay), group by group."""
        kinds = group_by(draw.groups, lambda p: (id(draw.groups[p]), p.device, working(p.dtype)))
        use = "noise" if draw.train or not self._gathered.count else "noise beside the draw's"
        for (_, device, dtype), params in kinds.items():
            group = draw.groups[params[0]]
            flat, noises = self._scratch.take(use, params, dtype)
            start = torch.full((), float(group["hess_init"]), dtype=dtype, device=device)
            # before its first step a parameter has the precision it was given
            held = [(p, self.state.get(p)) for p in params]
            hess = [own["hess"] if own else start.expand(p.shape) for p, own in held]
            fill_normal(flat, noises, hess, group, self.generator)
            draw.noises.update(zip(params, noises, strict=True))

    def _finish(self, draw: Draw) -> None:
        with plain_tensors():
            if draw.train and self.examples is not None:
                scale = draw.divided_by ** DEGREES[self.examples.method]
                draw.given = {p: s * scale for p, s in self.examples.finish().items()}
            draw.restore()
            if draw.train:
                draw.carry_gradients()
                self._gather(draw)
            self._open = None

    def _gather(self, draw: Draw) -> None:
        self._gathered.add(draw)

    def drop_draws(self) -> None:
        """Forget the draws since the last step: of a minibatch that is to be skipped, say."""
        self._refuse_inside("drop_draws()")
        self._forget()

    def _forget(self) -> None:
        """After a step, a skipped step, or a failed one: nothing of its draws is left. Of draws at
        the mean no squares are averaged, for these are parts of one larger minibatch."""
        method = self.param_groups[0]["hess_approx"]
        at_mean = method == "gradsq" and not self._is_noisy(train=True)
        self._gathered = Gathered("none" if at_mean else method)

    def _refuse_inside(self, what: str) -> None:
        if self._open is not None:
            raise OptimizerError(f"{what} inside sampled_params(): leave the first context")

    # Stepping --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move mean and precision by the draws since the last step.

        A ``closure`` clears the gradients, computes the loss, calls ``backward`` and returns the
        loss. It is called ``mc_samples`` times, each time with newly drawn weights, whether or
        not it opens ``sampled_params(train=True)`` itself; the mean loss is returned.

        Raises:
            OptimizerError: there is no draw; a gradient is not finite; inside ``sampled_params``.
        """
        self._refuse_inside("step()")
        if closure is not None and not callable(closure):
            raise OptimizerError(f"step(closure) takes a function of the loss, not {closure!r}")
        with plain_tensors():
            try:
                losses = [] if closure is None else self._losses(closure)
                self._check_groups()
                self._check_draws()
                if (inverse_scale := self._settled()) is not None:
                    self._update(inverse_scale)
            finally:
                self._forget()
        return sum(losses) / len(losses) if losses and losses[0] is not None else None

    def _losses(self, closure: Callable[[], Any]) -> list[Any]:
        """Where draws are there already, a closure may be empty: Lightning passes such a one."""
        drawn = self._gathered.count
        try:
            return [self._loss_at(self._draw(True, True), closure) for _ in range(self.mc_samples)]
        except NoGradient:
            if not drawn:
                raise
            return []

    def _loss_at(self, draw: Draw, closure: Callable[[], Any]) -> Any:
        with self._at(draw), torch.enable_grad():
            held = [(p, p.grad, p.grad._version) for p in draw.groups if p.grad is not None]
            loss = closure()
            if self._needs_draw and any(p.grad is g and g._version != v for p, g, v in held):
                warnings.warn(
                    "the closure adds to gradients of other weights than this draw's: clear them, "
                    "or in Lightning accumulate with callbacks=[VariationalSteps()]",
                    stacklevel=3,
                )
            return loss

    def _check_draws(self) -> None:
        if not self._unscales and getattr(self, "found_inf", None) is not None:
            raise OptimizerError(f"{self.algorithm} takes no GradScaler: train in bfloat16")
        if self._gathered.count:
            return
        if self._needs_draw:
            raise OptimizerError("step() without a draw: use sampled_params(train=True)")
        self._gathered.add(Draw(True, groups=self._trained()))  # a plain backward pass at the mean

    def _settled(self) -> float | None:
        """What the gradients are still to be multiplied by; None if the step is skipped.

        GradScaler lends the optimizer ``found_inf`` and ``grad_scale`` for the time of the call;
        the latter is None after ``unscale_``.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        skip = found_inf is not None and bool(found_inf > 0)
        params = [p for group in self.param_groups for p in group["params"]]
        together = self.sync and ranks.count() > 1
        if together:
            skip = mean_over_ranks([skip], params[0].device)[0] > 0
        if skip:
            return None
        self._gathered.settle(together)
        if together:
            self._gathered.average_over_ranks(params, inverse_scale)
            inverse_scale = 1.0
        if found_inf is None:
            self._gathered.check(inverse_scale)
        return inverse_scale

    def _update(self, inverse_scale: float) -> None:
        """Move every parameter that has an estimate; the others stay.

        ``inverse_scale`` undoes a loss scale that still multiplies the gradients.
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p in self._gathered.grads]
            self._move_group(group, params, inverse_scale)

    def _move_group(self, group: Group, params: list[Tensor], inverse_scale: float) -> None:
        for param in params:
            self._counted(param, group)
        alike = group_by(params, lambda p: (p.device, p.dtype, self.state[p]["step"]))
        for batch in alike.values():
            self._move(batch, self._law(group), inverse_scale)

    def _counted(self, param: Tensor, group: Group) -> dict[str, Any]:
        """The state for one more step; before the first one ``hess`` is ``hess_init``."""
        if not (state := self.state[param]):
            like = {"dtype": working(param.dtype), "memory_format": torch.preserve_format}
            state["step"] = 0
            for name in self._kept:
                start = group["hess_init"] if name == "hess" else 0.0
                state[name] = torch.full_like(param, start, **like)
        state["step"] += 1
        return state

    def _law(self, group: Group) -> Law:
        return self.row.curvature, self.row.move, group

    def _move(self, params: Sequence[Tensor], law: Law, inverse_scale: float) -> None:
        """One step of parameters that are alike in device, dtype and count."""
        curvature, move, settings = law
        count, dtype = self.state[params[0]]["step"], working(params[0].dtype)
        columns: dict[str, Sequence[Tensor]] = {
            "theta": params,
            "grad": [self._gathered.grads[p].detach() for p in params],
            **{name: [self.state[p][name] for p in params] for name in self._kept},
        }
        if self._gathered.sources:
            columns["evidence"] = [self._gathered.sources[p] for p in params]
        factor = inverse_scale ** DEGREES[self._gathered.method]

        def work(*block: list[Tensor]) -> None:
            named = dict(zip(columns, block, strict=True))
            named["grad"] = _scaled([g.to(dtype) for g in named["grad"]], inverse_scale)
            if self._gathered.averaged:
                named["evidence"] = _scaled(named.get("evidence", []), factor)
            elif "evidence" in named:  # noise, of one draw
                torch._foreach_mul_(named["evidence"], named["grad"])
            step(Block(**named), curvature, move, settings, count)

        for_blocks(work, list(columns.values()))

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, and the state of
        ``generator``. Take it after a step: draws since the last one are in it as little as
        gradients are in the state of any optimizer.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are not the mean.
        """
        self._refuse_inside("state_dict()")
        drawing = {} if self.generator is None else {"generator": self.generator.get_state()}
        return {**super().state_dict(), "sampling": drawing}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, which is copied. A generator's state in it is used if
        this optimizer has a ``generator``.

        Raises:
            OptimizerError: another optimizer's state, or of other parameters; nothing is loaded.
        """
        self._refuse_inside("load_state_dict()")
        given: dict[str, Any] = {}

        def take(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            if wrong := self._what_differs(loaded):
                raise OptimizerError(f"{wrong}; {HINT}")
            given.update(loaded)
            return {**loaded, "state": {}}  # which torch would alias, or round

        handle = self.register_load_state_dict_pre_hook(take)  # after the user's own
        try:
            with told_as(OptimizerError, "this is no optimizer state", HINT):
                super().load_state_dict(state_dict)
        finally:
            handle.remove()
        with plain_tensors():
            for key, param, _ in self._places(given):
                if held := given["state"].get(key):
                    self.state[param] = {n: _moved(held[n], param) for n in ("step", *self._kept)}
        state = given.get("sampling", {}).get("generator")
        if self.generator is not None and state is not None:
            self.generator.set_state(state.cpu())

    def _what_differs(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why this is no state of this class, or of other parameters."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if others := {g.get("algorithm", "another optimizer") for g in groups} - {self.algorithm}:
            return f"this is the state of {', '.join(others)}, not of {self.algorithm}"
        for key, param, decay in self._places(state_dict):
            entry, shape = state.get(key, {}), self._shape(param)
            shapes = {n: getattr(entry.get(n), "shape", None) for n in self._kept}
            if entry and ("step" not in entry or any(found != shape for found in shapes.values())):
                return f"of parameter {key} it holds {shapes}, which does not fit {shape}"
            precision = entry.get("hess", torch.ones(())) + decay
            if self._own_scale and not ((precision > 0) & precision.isfinite()).all():
                return f"hess + weight_decay of parameter {key} is not positive and finite"
        return None

    def _shape(self, param: Tensor) -> torch.Size:
        """Of what is kept for a parameter."""
        return param.shape

    def _places(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor, float]]:
        """(key in the state dict, parameter, weight decay in the state dict), in order."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                yield key, param, saved["weight_decay"]

    def __getstate__(self) -> dict[str, Any]:
        if self._open is not None or self._gathered.count:
            raise OptimizerError("copy the optimizer after step(), or use state_dict()")
        public = {n: value for n, value in vars(self).items() if not n.startswith("_")}
        public.pop("step", None)  # that a scheduler put there
        return public

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_fresh()


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return tensors if factor == 1 or not tensors else list(torch._foreach_mul(tensors, factor))


def _moved(value: Any, param: Tensor) -> Any:
    wide = {"device": param.device, "dtype": working(param.dtype), "copy": True}
    return value.to(**wide) if isinstance(value, Tensor) else value
