"""One draw of the weights, and what the draws since the last step have gathered.

A draw shows the loss others than the mean, and puts that back bit for bit.

After one draw nothing is copied: the gradient is ``p.grad`` itself, and the noise is kept until
the step multiplies the two. So whatever happens to ``p.grad`` in between (``GradScaler.unscale_``,
``clip_grad_norm_``) holds for the curvature estimate noise·gradient as well. From the second draw
on there are means of their own, ``p.grad`` shows a copy of the mean gradient, and a change of that
copy before the step is carried over: the gradient as it stands, the curvature by the factor by
which the norm of that parameter's gradient changed, to the power in which the estimate depends on
the gradient (:data:`DEGREES`). An estimate that the draw brings along (:data:`GIVEN`) has its own
memory from the first draw on.

On a CPU elementwise rules run block by block, all operations on one block, which stays in the
cache, then the next (:func:`for_blocks`); an accelerator gets everything at once.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.errors import OptimizerError

PIECE = 1 << 15
"""Elements of a tensor that torch works on without splitting them over threads, where it would
wait for the slowest one some thousand times a step."""

BLOCK = 1 << 17
"""Elements per block on a CPU."""

THREADS = 8
"""At most so many: beyond it they wait for Python's lock."""

GIVEN = ("ggn", "abs", "hutchinson")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""

DEGREES = {"price": 1, "abs": 1, "gradsq": 2, "ggn": 2, "none": 2, "hutchinson": 1}
"""By method: the power of the gradient's scale in the curvature estimate."""

ROOM = 0.3
"""A gradient's norm stays below the largest number to this power (4e11 in single precision), so
that curvature estimates, which are squared and multiplied by ess, do not overflow."""

NO_GRADIENT = (
    "no parameter has a gradient after sampled_params(train=True): call loss.backward() inside "
    "it, or evaluate inside sampled_params()"
)

Group = Mapping[str, Any]
Look = Callable[[Tensor, Group, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(θ, group, generator) → what the loss sees, and the factor of its gradient (None: 1)."""

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class NoGradient(OptimizerError):
    """A draw without a backward pass."""


def state_dtype(param: Tensor) -> torch.dtype:
    """Precision, momentum and noise are float32 where the weights are float16 or bfloat16.

    A step moves the precision by some 1e-5 of itself, which half precision cannot represent.

        >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16)), state_dtype(torch.zeros(1).double())
        (torch.float32, torch.float64)
    """
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


@contextmanager
def plain_tensors() -> Iterator[None]:
    """What is made inside has no graph and serves in training, also under inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


# Blocks ---------------------------------------------------------------------------------------


def for_blocks(rule: Callable[..., object], columns: Sequence[Sequence[Tensor]]) -> None:
    """Call ``rule(*block)`` for every block of ``columns``, on torch's number of threads.

    ``columns[j][i]`` is the ``j``-th quantity (weight, gradient, …) of the ``i``-th parameter; all
    tensors of one parameter have its shape and device. ``rule`` gets as many lists as there are
    columns, and writes to their tensors elementwise and in place, without gradients.

        >>> x = [torch.zeros(3), torch.ones(2)]
        >>> for_blocks(lambda tensors: torch._foreach_add_(tensors, 1), [x])
        >>> x
        [tensor([1., 1., 1.]), tensor([2., 2.])]
    """

    def work(block: list[list[Tensor]]) -> None:
        with torch.no_grad():  # which each thread has its own of
            rule(*block)

    waiting = list(blocks(columns))
    threads = min(torch.get_num_threads(), THREADS, len(waiting))
    if threads < 2:
        for block in waiting:
            work(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, waiting))


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
        for row in alike:
            pieces: Iterable[tuple[Tensor, ...]] = [row]
            large = device.type == "cpu" and row[0].numel() > piece
            if large and all(tensor.is_contiguous() for tensor in row):
                pieces = zip(*(t.detach().view(-1).split(piece) for t in row), strict=True)
            for views in pieces:
                if block and filled + views[0].numel() > size and device.type == "cpu":
                    yield [list(column) for column in zip(*block, strict=True)]
                    block, filled = [], 0
                block.append(views)
                filled += views[0].numel()
        yield [list(column) for column in zip(*block, strict=True)]


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items with equal ``key(item)`` together, in their order.

    >>> group_by([1, 2, 3, 4], lambda number: number % 2)
    {1: [1, 3], 0: [2, 4]}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class Buffers:
    """Large scratch tensors that are used again at the next step.

    A fresh 40 MB tensor costs the operating system ten thousand page faults, more than the
    arithmetic done in it. Only CPU memory is kept; accelerators have an allocator that does this.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, like: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """One flat tensor, and its views shaped as ``like`` (one device).

        >>> flat, views = Buffers().take([torch.zeros(2, 3), torch.zeros(4)], torch.float64)
        >>> flat.shape, [tuple(view.shape) for view in views]
        (torch.Size([10]), [(2, 3), (4,)])
        """
        counts, device = [tensor.numel() for tensor in like], like[0].device
        free = self._free.get((sum(counts), dtype), []) if device.type == "cpu" else []
        if not free:
            self._free.clear()  # of other sizes: something was frozen or added
        flat = free.pop() if free else torch.empty(sum(counts), dtype=dtype, device=device)
        pieces = flat.split(counts)
        return flat, [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]

    def give(self, flats: list[Tensor]) -> None:
        """Take ``flats`` back, and empty the list. Nothing else may use them from here on."""
        freed = [flats.pop() for _ in range(len(flats))]
        for flat in freed:
            if flat.device.type == "cpu":
                self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)


# One draw -------------------------------------------------------------------------------------


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them; all by parameter.

    With ``noisy`` they are a draw of q; ``look`` makes other weights of these; with neither they
    are the mean itself. ``train`` says whether the gradients there belong to the next step.
    ``adoptable`` marks the draw that ``step(closure)`` makes before it calls the closure: a context
    that the closure opens takes that draw instead of making its own. ``method`` says what the
    curvature is made of, ``given`` holds it where that is not gradient and noise. The loss was
    divided by ``divided_by``.
    """

    train: bool
    noisy: bool = False
    look: Look | None = None
    adoptable: bool = False
    method: str = "none"
    divided_by: float = 1.0
    groups: dict[Tensor, Group] = field(default_factory=dict)
    noises: dict[Tensor, Tensor] = field(default_factory=dict)
    means: dict[Tensor, Tensor] = field(default_factory=dict)
    factors: dict[Tensor, Tensor] = field(default_factory=dict)
    given: dict[Tensor, Tensor] = field(default_factory=dict)
    noise_flats: list[Tensor] = field(default_factory=list)
    mean_flats: list[Tensor] = field(default_factory=list)

    def perturb(self, buffers: Buffers, generator: torch.Generator | None) -> None:
        """Keep the means; m → m + ε, in place, rounded once to the dtype of the weights; then what
        a look makes of that."""
        if self.noisy or self.look is not None:
            for params in group_by(self.groups, lambda p: (p.device, p.dtype)).values():
                flat, means = buffers.take(params, params[0].dtype)
                self.mean_flats.append(flat)
                for_blocks(torch._foreach_copy_, [means, params])
                self.means.update(zip(params, means, strict=True))
        for_blocks(torch._foreach_add_, [[*self.noises], [*self.noises.values()]])
        for param, group in self.groups.items():
            if self.look is not None:
                seen, factor = self.look(param, group, generator)
                param.copy_(seen)
                if factor is not None:
                    self.factors[param] = factor

    def restore(self, buffers: Buffers) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        for_blocks(torch._foreach_copy_, [[*self.means], [*self.means.values()]])
        self.means = {}
        buffers.give(self.mean_flats)

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

    def take(self, param: Tensor) -> Draw:
        """The draw of one parameter, which is at its mean again and belongs to this one no more."""
        own = Draw(True, self.noisy, self.look, method=self.method, divided_by=self.divided_by)
        for name in ("groups", "noises", "means", "factors"):
            if param in (held := getattr(self, name)):
                getattr(own, name)[param] = held.pop(param)
        own.restore(Buffers())
        own.carry_gradients()
        return own

    def source(self, param: Tensor) -> Tensor | None:
        """What the curvature estimate needs beside the gradient."""
        if self.method in GIVEN:
            return self.given.get(param)
        return self.noises[param] if self.method == "price" else None


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


# Draws gathered -------------------------------------------------------------------------------


@dataclass
class Estimate:
    """Of one parameter: its mean gradient, and what its curvature is made from.

    Of one draw ``grad`` is ``p.grad`` itself and ``source`` the noise; once ``averaged`` both are
    means with memory of their own, of noise·gradient, gradient², or of what came along with the
    draws, and ``p.grad`` shows a copy; ``source`` is None where there is none.
    """

    grad: Tensor
    source: Tensor | None
    version: int = 0
    averaged: bool = False


class Gathered:
    """The estimates of all parameters that got a gradient, and the number of draws in them."""

    def __init__(self, buffers: Buffers) -> None:
        self.count, self.method = 0, "none"
        self.estimates: dict[Tensor, Estimate] = {}
        self._buffers = buffers
        self._held: list[Tensor] = []

    def clear(self) -> None:
        """Forget everything: after a step, a skipped step, or a failed one."""
        self._buffers.give(self._held)
        self.count, self.estimates = 0, {}

    def begin(self) -> None:
        """Before another draw: what ``p.grad`` shows of the earlier ones makes room."""
        held = self.estimates.values()
        if self.count == 1 and all(e.grad._version != e.version and not e.grad.any() for e in held):
            self.clear()
            raise OptimizerError("gradients were zeroed in place: zero_grad(set_to_none=True)")
        self.settle()
        for param in self.estimates:
            param.grad = None

    def settle(self, one_too: bool = True) -> None:
        """Carry over what was done to ``p.grad``: gradients that someone put in its place, zeros
        excepted, hold as well. With ``one_too`` a single draw becomes a mean of its own memory.

        Values are compared because ``unscale_`` and ``p.grad.data`` do not count as writing.
        """
        shown = {p: p.grad.detach() for p in self.estimates if p.grad is not None}
        averaged = [p for p in shown if self.estimates[p].averaged]
        for alike in group_by(averaged, lambda p: (p.device, p.dtype)).values():
            dtype, held = state_dtype(alike[0]), [self.estimates[p] for p in alike]
            before = torch._foreach_norm([e.grad.to(alike[0].dtype) for e in held], 2, dtype)
            now = torch._foreach_norm([shown[p] for p in alike], 2, dtype)
            changes = (torch.stack(now) / torch.stack(before)).tolist()
            for param, estimate, ratio in zip(alike, held, changes, strict=True):
                if 0 < ratio < math.inf and abs(ratio - 1) >= 1e-6:  # no order of summation
                    estimate.grad.copy_(shown[param])
                    self.scale_curvature(estimate, ratio)
        for param, estimate in self.estimates.items():
            if estimate.averaged:
                continue
            if param.grad is not estimate.grad and param in shown and bool(shown[param].any()):
                estimate.grad = shown[param]
            if one_too:
                estimate.grad = estimate.grad.to(state_dtype(param), copy=True)
                estimate.source = self._curvature(estimate.grad, estimate.source)
                estimate.averaged = True

    def scale_curvature(self, estimate: Estimate, factor: float) -> None:
        """As it depends on a gradient that is ``factor`` times as long."""
        if estimate.source is not None:
            estimate.source.mul_(factor ** DEGREES[self.method])

    def _curvature(self, grad: Tensor, source: Tensor | None) -> Tensor | None:
        """The estimate of one draw."""
        if self.method == "gradsq":
            return grad * grad
        return grad * source if self.method == "price" and source is not None else source

    def add(self, draw: Draw) -> None:
        """The gradients now in ``p.grad`` are those at ``draw``."""
        got = {p: p.grad for p in draw.groups if p.grad is not None}
        if not got:
            raise NoGradient(NO_GRADIENT)
        if any(g.layout is not torch.strided for g in got.values()):
            raise OptimizerError("a gradient is sparse: build the layer with sparse=False")
        if self.count:
            self._average(got, draw)
            self._buffers.give(draw.noise_flats)
        else:
            self.method = draw.method
            for param, grad in got.items():
                self.estimates[param] = Estimate(grad, draw.source(param), grad._version)
            self._held, draw.noise_flats = draw.noise_flats, []
            if self.method in GIVEN:
                self.settle()
        self.count += 1

    def _average(self, got: Mapping[Tensor, Tensor], draw: Draw) -> None:
        """mean ← mean + (new − mean)/k; a parameter without a gradient contributes zeros."""
        weight = 1 / (self.count + 1)
        for param in {**got, **self.estimates}:
            estimate = self.estimates.get(param) or self.add_zeros(param)
            grad, curvature = torch.zeros_like(estimate.grad), None
            if param in got:
                grad = got[param].detach().to(estimate.grad.dtype)
                curvature = self._curvature(grad, draw.source(param))
            estimate.grad.lerp_(grad, weight)
            if estimate.source is not None:
                estimate.source.lerp_(grad if curvature is None else curvature, weight)
        self.show()

    def add_zeros(self, param: Tensor) -> Estimate:
        """An estimate of zero, for a parameter that had no gradient so far."""
        zeros = torch.zeros_like(param, dtype=state_dtype(param))
        source = None if self.method == "none" else torch.zeros_like(zeros)
        self.estimates[param] = Estimate(zeros, source, averaged=True)
        return self.estimates[param]

    def show(self) -> None:
        """Let ``p.grad`` hold the mean gradient, for ``unscale_`` and ``clip_grad_norm_``."""
        for param, estimate in self.estimates.items():
            if param.grad is None:
                param.grad = torch.empty_like(param)
            if param.grad is not estimate.grad:
                param.grad.detach().copy_(estimate.grad)

    def drop(self, draw: Draw) -> None:
        """The body of ``draw`` failed, or was none of training: the gradients of training go back
        to those of the earlier draws."""
        self._buffers.give(draw.noise_flats)
        if draw.train:
            for param in draw.groups:
                param.grad = None
            self.show()

    def find_unusable(self, inverse_scale: float) -> Tensor | None:
        """The first parameter whose gradient is not finite, or larger than :data:`ROOM` allows."""
        for alike in group_by(self.estimates, lambda p: (p.device, p.dtype)).values():
            dtype = state_dtype(alike[0])
            grads = [self.estimates[p].grad.detach() for p in alike]
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype))
            usable = norms * inverse_scale < torch.finfo(dtype).max ** ROOM
            if not bool(usable.all()):
                return alike[usable.tolist().index(False)]
        return None

    def average_over_ranks(self, params: Sequence[Tensor], inverse_scale: float) -> None:
        """Mean gradient and curvature over the processes, once averaged over the draws.

        ``params`` are the same on every process. One that has a gradient on some processes only
        counts as zero on the others.
        """
        reduced: list[Tensor] = []
        shares = mean_over_ranks([p in self.estimates for p in params], params[0].device)
        for param in compress(params, shares):
            estimate = self.estimates.get(param) or self.add_zeros(param)
            estimate.grad.mul_(inverse_scale)
            self.scale_curvature(estimate, inverse_scale)
            reduced += [t for t in (estimate.grad, estimate.source) if t is not None]
        ranks.total(reduced)
        torch._foreach_div_(reduced, ranks.count())


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The processes' mean of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks.total([sums])
    return (sums / ranks.count()).tolist()
