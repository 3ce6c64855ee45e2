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
from functools import partial
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
    tensors of one parameter have its shape, all tensors one device. ``rule`` gets as many lists as
    there are columns, and writes to their tensors elementwise and in place, without gradients.

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
    """Yield ``columns`` in blocks of about ``size`` elements.

    On a CPU, contiguous tensors are cut into views of at most ``piece`` elements; elsewhere the
    columns come back as one block. Writing to a view writes to the tensor.

        >>> x = [torch.zeros(5), torch.zeros(2), torch.zeros(1)]
        >>> [[view.numel() for view in block[0]] for block in blocks([x], size=4, piece=3)]
        [[3], [2, 2], [1]]
    """
    if not columns or not columns[0]:
        return
    if columns[0][0].device.type != "cpu":
        yield [list(column) for column in columns]
        return
    block: list[tuple[Tensor, ...]] = []
    filled = 0
    for row in zip(*columns, strict=True):
        pieces: Iterable[tuple[Tensor, ...]] = [row]
        if row[0].numel() > piece and all(tensor.is_contiguous() for tensor in row):
            pieces = zip(*(tensor.detach().view(-1).split(piece) for tensor in row), strict=True)
        for views in pieces:
            count = views[0].numel()
            if block and filled + count > size:
                yield [list(column) for column in zip(*block, strict=True)]
                block, filled = [], 0
            block.append(views)
            filled += count
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

    def give(self, flats: Iterable[Tensor]) -> None:
        """Take ``flats`` back. Nothing else may use them from here on."""
        for flat in flats:
            if flat.device.type == "cpu":
                self._free.setdefault((flat.numel(), flat.dtype), []).append(flat)


# One draw -------------------------------------------------------------------------------------


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them; all by parameter.

    With ``noisy`` they are θ = m + ε, ε ~ N(0, 1/S), S = ess·(hess + weight_decay); ``look`` makes
    other weights of these; with neither they are the mean itself.

    ``train`` says whether the gradients there belong to the next step. ``adoptable`` marks the draw
    that ``step(closure)`` makes before it calls the closure: a context that the closure opens takes
    that draw instead of making its own. The loss was divided by ``divided_by``. ``given`` holds
    curvature estimates that are not made of gradient and noise.
    """

    train: bool
    noisy: bool = False
    look: Look | None = None
    adoptable: bool = False
    divided_by: float = 1.0
    closed: bool = False
    given: dict[Tensor, Tensor] = field(default_factory=dict)
    groups: dict[Tensor, Group] = field(default_factory=dict)
    noises: dict[Tensor, Tensor] = field(default_factory=dict)
    means: dict[Tensor, Tensor] = field(default_factory=dict)
    factors: dict[Tensor, Tensor] = field(default_factory=dict)
    noise_flats: list[Tensor] = field(default_factory=list)
    mean_flats: list[Tensor] = field(default_factory=list)

    def fill(
        self,
        groups: Iterable[Group],
        state: Mapping[Tensor, Mapping[str, Any]],
        buffers: Buffers,
        generator: torch.Generator | None,
    ) -> None:
        """Draw the noise and remember the means; nothing is perturbed yet."""
        for group in groups:
            params = [p for p in group["params"] if p.requires_grad]
            for alike in group_by(params, lambda p: (p.device, state_dtype(p))).values():
                self.groups.update(dict.fromkeys(alike, group))
                if self.noisy:
                    flat, noises = buffers.take(alike, state_dtype(alike[0]))
                    self.noise_flats.append(flat)
                    _fill_normal(flat, noises, alike, group, state, generator)
                    self.noises.update(zip(alike, noises, strict=True))
        if self.noisy or self.look is not None:
            for params in group_by(self.groups, lambda p: (p.device, p.dtype)).values():
                flat, means = buffers.take(params, params[0].dtype)
                self.mean_flats.append(flat)
                for_blocks(torch._foreach_copy_, [means, params])
                self.means.update(zip(params, means, strict=True))

    def perturb(self, generator: torch.Generator | None) -> None:
        """m → m + ε, in place, rounded once to the dtype of the weights; then what a look makes."""
        _on_each_device(torch._foreach_add_, self.noises)
        if self.look is None:
            return
        for param, group in self.groups.items():
            seen, factor = self.look(param, group, generator)
            param.copy_(seen)
            if factor is not None:
                self.factors[param] = factor

    def restore(self, buffers: Buffers) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        _on_each_device(torch._foreach_copy_, self.means)
        freed, self.mean_flats, self.means = self.mean_flats, [], {}
        buffers.give(freed)

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ; the squares g_i² of examples as well."""
        for param, factor in self.factors.items():
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad.mul_(factor)
            if param in self.given:
                self.given[param] = self.given[param] * factor
        if self.divided_by != 1:
            for param in self.groups:
                if param.grad is not None:
                    param.grad.mul_(self.divided_by)

    def take(self, param: Tensor) -> Draw:
        """The draw of one parameter, which is at its mean again and belongs to this one no more."""
        own = Draw(True, self.noisy, self.look, divided_by=self.divided_by)
        for name in ("groups", "noises", "means", "factors"):
            if param in (held := getattr(self, name)):
                getattr(own, name)[param] = held.pop(param)
        own.restore(Buffers())
        own.carry_gradients()
        return own

    def evidence(self, param: Tensor) -> tuple[str, Tensor | None]:
        """The method, and what its curvature estimate needs beside the gradient."""
        method = method_of(self.groups[param], self.noisy)
        if method in GIVEN:
            return method, self.given.get(param)
        return method, self.noises[param] if method == "price" else None


def method_of(group: Group, noisy: bool) -> str:
    """What is averaged over draws; of draws at the mean no squares, for these are the parts of one
    larger minibatch, whose gradient is squared."""
    method = group["hess_approx"]
    return "none" if method == "gradsq" and not noisy else method


def _on_each_device(rule: Callable[..., object], pairs: Mapping[Tensor, Tensor]) -> None:
    for alike in group_by(pairs.items(), lambda pair: pair[0].device).values():
        for_blocks(rule, [*zip(*alike, strict=True)])


def _fill_normal(
    flat: Tensor,
    noises: list[Tensor],
    params: list[Tensor],
    group: Group,
    state: Mapping[Tensor, Mapping[str, Any]],
    generator: torch.Generator | None,
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

    first = torch.full((), float(group["hess_init"]), dtype=flat.dtype, device=flat.device)
    # before its first step a parameter has the precision it was given
    hess = [held["hess"] if (held := state.get(p)) else first.expand(p.shape) for p in params]
    for_blocks(scale, [noises, hess])


# Draws gathered -------------------------------------------------------------------------------


@dataclass
class GradientEstimate:
    """Of one parameter: its mean gradient, and what its curvature is made from.

    Before it is ``settled`` ``source`` is the noise of the one draw, after it the mean of
    noise·gradient, of gradient², or of what came along with the draws; None where there is none.
    """

    method: str
    grad: Tensor
    shown: Tensor
    """What ``p.grad`` was at the end of the last context; after one draw the same as ``grad``."""
    source: Tensor | None = None
    settled: bool = False
    version: int = -1

    @property
    def is_changed(self) -> bool:
        """Whether someone wrote to ``shown`` since."""
        return self.shown._version != self.version

    def settle(self, dtype: torch.dtype) -> None:
        """Let the mean own its memory."""
        self.grad, self.settled = self.shown.to(dtype, copy=True), True
        if self.method not in GIVEN and self.method != "none":
            (self.source,) = _products(self.method, [self.grad], [self.source])

    def scale_by(self, factor: float) -> None:
        """Multiply the curvature as it depends on a gradient that is ``factor`` times as long."""
        if self.source is not None:
            self.source.mul_(factor ** DEGREES[self.method])


class Gathered:
    """The estimates of all parameters that got a gradient, and the number of draws in them."""

    def __init__(self, buffers: Buffers) -> None:
        self.count = 0
        self.estimates: dict[Tensor, GradientEstimate] = {}
        self._buffers = buffers
        self._held: list[Tensor] = []

    def clear(self) -> None:
        """Forget everything: after a step, a skipped step, or a failed one."""
        self._buffers.give(self._held)
        self.count, self.estimates, self._held = 0, {}, []

    def begin(self) -> None:
        """Before another draw: what ``p.grad`` shows of the earlier ones makes room."""
        held = self.estimates.values()
        if self.count == 1 and all(e.is_changed and not e.shown.any() for e in held):
            self.clear()
            raise OptimizerError(
                "the first sample's gradients were zeroed in place: zero_grad(set_to_none=True)"
            )
        self.settle()
        for param, estimate in self.estimates.items():
            if param.grad is estimate.shown:
                param.grad = None

    def collect(self, own_memory: bool) -> None:
        """Before a step: gradients that someone put in the place of the shown ones, zeros excepted,
        hold, and so does what was done to these."""
        for param, estimate in self.estimates.items():
            given = param.grad
            if given is not None and given is not estimate.shown and bool(given.any()):
                estimate.shown, estimate.version = given, -1
                if not estimate.settled:
                    estimate.grad = given
        if own_memory or self.count > 1 or any(e.settled for e in self.estimates.values()):
            self.settle()

    def settle(self) -> None:
        """Let the means own their memory, and carry over what was done to ``p.grad``.

        Values are compared because ``unscale_`` and ``p.grad.data`` do not count as writing.
        """
        settled = [e for e in self.estimates.values() if e.settled]
        for alike in group_by(settled, lambda e: (e.shown.device, e.shown.dtype)).values():
            dtype = state_dtype(alike[0].shown)
            before = torch._foreach_norm([e.grad.to(e.shown.dtype) for e in alike], 2, dtype)
            now = torch._foreach_norm([e.shown.detach() for e in alike], 2, dtype)
            changes = (torch.stack(now) / torch.stack(before)).tolist()
            for estimate, ratio in zip(alike, changes, strict=True):
                if abs(ratio - 1) < 1e-6:  # the same up to the order of summation, or masked
                    ratio = 1.0
                if 0 < ratio < math.inf and (ratio != 1 or estimate.is_changed):
                    estimate.grad.copy_(estimate.shown)
                    estimate.scale_by(ratio)
        for param, estimate in self.estimates.items():
            if not estimate.settled:
                estimate.settle(state_dtype(param))
            estimate.version = estimate.shown._version

    def add(self, draw: Draw) -> None:
        """The gradients now in ``p.grad`` are those at ``draw``."""
        got = {p: draw.evidence(p) for p in draw.groups if p.grad is not None}
        if not got:
            raise NoGradient(NO_GRADIENT)
        if sparse := [p for p in got if p.grad is not None and p.grad.layout is not torch.strided]:
            raise OptimizerError(
                f"a gradient of shape {tuple(sparse[0].shape)} is sparse: build with sparse=False"
            )
        if self.count:
            self._average(got)
            self._buffers.give(draw.noise_flats)
        else:
            for param, (method, source) in got.items():
                assert param.grad is not None
                self.estimates[param] = GradientEstimate(
                    method, param.grad, param.grad, source, version=param.grad._version
                )
            self._held, draw.noise_flats = draw.noise_flats, []
            if any(method in GIVEN for method, _ in got.values()):
                self.settle()
        self.count += 1

    def _average(self, got: Mapping[Tensor, tuple[str, Tensor | None]]) -> None:
        """mean ← mean + (new − mean)/k; a parameter without a gradient contributes zeros."""
        rows = []
        for param in [*got, *(p for p in self.estimates if p not in got)]:
            estimate = self.estimates.get(param) or self.add_zeros(param, got[param][0])
            grad, source = torch.zeros_like(estimate.grad), None
            if param in got:
                assert param.grad is not None
                grad, source = param.grad.detach(), got[param][1]
            rows.append((estimate, grad, grad if source is None else source))
        for alike in group_by(
            rows, lambda row: (row[1].device, row[1].dtype, row[0].method)
        ).values():
            estimates, grads, sources = zip(*alike, strict=True)
            rule = partial(_move_means, weight=1 / (self.count + 1), method=estimates[0].method)
            held = [e.source for e in estimates if e.source is not None]
            columns = [grads, [e.grad for e in estimates]]
            for_blocks(rule, [*columns, sources, held] if held else columns)
        self.show()

    def add_zeros(self, param: Tensor, method: str) -> GradientEstimate:
        """A settled estimate of zero, for a parameter that had no gradient so far."""
        zeros = torch.zeros_like(param, dtype=state_dtype(param))
        source = None if method == "none" else torch.zeros_like(zeros)
        self.estimates[param] = GradientEstimate(method, zeros, zeros, source, settled=True)
        return self.estimates[param]

    def show(self) -> None:
        """Let ``p.grad`` hold the mean gradient, for ``unscale_`` and ``clip_grad_norm_``."""
        for param, estimate in self.estimates.items():
            if param.grad is None:
                param.grad = estimate.grad.to(param.dtype, copy=True)
            else:
                param.grad.detach().copy_(estimate.grad)
            assert param.grad is not None
            estimate.shown, estimate.version = param.grad, param.grad._version

    def drop(self, draw: Draw) -> None:
        """The body of ``draw`` failed, or was none of training: the gradients of training go back
        to those of the earlier draws."""
        freed, draw.noise_flats = draw.noise_flats, []
        self._buffers.give(freed)
        if draw.train:
            for param in draw.groups:
                param.grad = None
            self.show()

    def scale_by(self, factor: float) -> None:
        """Multiply the settled gradients, and the curvature as it depends on them."""
        for estimate in self.estimates.values():
            estimate.grad.mul_(factor)
            estimate.scale_by(factor)

    def find_unusable(self, inverse_scale: float) -> Tensor | None:
        """The first parameter whose gradient is not finite, or larger than :data:`ROOM` allows."""
        rows = [(p, e.grad.detach()) for p, e in self.estimates.items()]
        for alike in group_by(rows, lambda row: (row[0].device, row[0].dtype)).values():
            dtype = state_dtype(alike[0][0])
            most = torch.finfo(dtype).max ** ROOM
            norms = torch.stack(torch._foreach_norm([g for _, g in alike], 2, dtype))
            usable = norms * inverse_scale < most
            if not bool(usable.all()):
                return alike[usable.tolist().index(False)][0]
        return None

    def average_over_ranks(self, methods: Mapping[Tensor, str]) -> None:
        """Mean gradient and curvature over the processes, once settled.

        ``methods`` holds the same parameters on every process. One that has a gradient on some
        processes only counts as zero on the others.
        """
        reduced: list[Tensor] = []
        shares = mean_over_ranks([p in self.estimates for p in methods], next(iter(methods)).device)
        for (param, method), share in zip(methods.items(), shares, strict=True):
            if share > 0:
                estimate = self.estimates.get(param) or self.add_zeros(param, method)
                reduced += [t for t in (estimate.grad, estimate.source) if t is not None]
        ranks.total(reduced)
        torch._foreach_div_(reduced, ranks.count())

    def pack(self, param: Tensor) -> dict[str, Tensor]:
        """What a checkpoint needs of ``param`` to go on from here."""
        if (estimate := self.estimates.get(param)) is None:
            return {}
        source = "sample_curvature" if estimate.settled else "sample_noise"
        packed = {"sample_grad": estimate.grad, source: estimate.source}
        return {name: t.detach().clone() for name, t in packed.items() if t is not None}

    def unpack(self, param: Tensor, method: str, packed: Mapping[str, Any]) -> None:
        """The reverse of :meth:`pack`, once :attr:`count` is set."""
        if "sample_grad" not in packed:
            return
        settled = self.count > 1 or "sample_curvature" in packed
        source = packed.get("sample_curvature", packed.get("sample_noise"))
        wide = {"device": param.device, "dtype": state_dtype(param), "copy": True}
        grad = packed["sample_grad"].to(**(wide if settled else {**wide, "dtype": param.dtype}))
        shown = param.grad = grad.to(param.dtype, copy=True) if settled else grad
        source = None if source is None else source.to(**wide)
        self.estimates[param] = GradientEstimate(
            method, grad, shown, source, settled, shown._version
        )


def _products(method: str, grads: list[Tensor], sources: Sequence[Any]) -> Any:
    """The curvature estimates of one draw."""
    if method in GIVEN:
        return sources
    return torch._foreach_mul(grads, grads if method == "gradsq" else list(sources))


def _move_means(
    grads: list[Tensor],
    means: list[Tensor],
    sources: Sequence[Tensor] = (),
    curvatures: Sequence[Tensor] = (),
    *,
    weight: float,
    method: str,
) -> None:
    new = [g.to(m.dtype) for g, m in zip(grads, means, strict=True)]
    torch._foreach_lerp_(means, new, weight)
    if curvatures:
        torch._foreach_lerp_(list(curvatures), _products(method, new, sources), weight)


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The processes' mean of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    ranks.total([sums])
    return (sums / ranks.count()).tolist()
