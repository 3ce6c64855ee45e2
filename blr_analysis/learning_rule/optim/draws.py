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
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.blocks import PIECE, Buffers, for_blocks, group_by

GIVEN = ("ggn", "abs", "hutchinson")
"""Methods whose curvature estimate is not made of gradient and noise, but comes with the draw."""


def state_dtype(param: Tensor) -> torch.dtype:
    """Precision, momentum and noise are float32 where the weights are float16 or bfloat16.

    A step moves the precision by some 1e-5 of itself, which half precision cannot represent.

        >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16)), state_dtype(torch.zeros(1).double())
        (torch.float32, torch.float64)
    """
    return torch.float32 if param.dtype in (torch.float16, torch.bfloat16) else param.dtype


Group = Mapping[str, Any]
Look = Callable[[Tensor, Group, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(θ, group, generator) → what the loss sees, and the factor of its gradient (None: 1)."""


@dataclass
class Draw:
    """The weights that the loss sees, and what undoes them.

    With ``noisy`` they are θ = m + ε, ε ~ N(0, 1/S), S = ess·(hess + weight_decay); ``look`` makes
    other weights of these; with neither they are the mean itself.

    ``train`` says whether the gradients there belong to the next step. ``adoptable`` marks the draw
    that ``step(closure)`` makes before it calls the closure: a context that the closure opens takes
    that draw instead of making its own. The loss was divided by ``divided_by``. ``given`` holds
    curvature estimates that are not made of gradient and noise. ``taken``: a parameter has left it.
    """

    train: bool
    adoptable: bool = False
    noisy: bool = True
    look: Look | None = None
    given: dict[Tensor, Tensor] = field(default_factory=dict)
    divided_by: float = 1.0
    closed: bool = False
    taken: bool = False
    generator: torch.Generator | None = None
    params: list[Tensor] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    noises: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    factors: dict[Tensor, Tensor] = field(default_factory=dict)
    noise_buffers: list[Tensor] = field(default_factory=list)
    mean_buffers: list[Tensor] = field(default_factory=list)

    def fill(
        self,
        groups: Iterable[Group],
        state: Mapping[Tensor, Mapping[str, Any]],
        buffers: Buffers,
        generator: torch.Generator | None,
    ) -> None:
        """Draw the noise and remember the means; nothing is perturbed yet."""
        self.generator = generator
        for group in groups:
            params = [p for p in group["params"] if p.requires_grad]
            if self.noisy:
                alike = group_by(params, lambda p: (p.device, state_dtype(p))).values()
                for some in alike:
                    flats, noises = buffers.take(some, state_dtype(some[0]))
                    self.noise_buffers += flats
                    _fill_normal(flats[0], noises, some, group, state, generator)
                    self.noises += noises
                params = [p for some in alike for p in some]
            self.params += params
            self.groups += [group] * len(params)
        if self.noisy or self.look is not None:
            self._remember(buffers)

    def _remember(self, buffers: Buffers) -> None:
        means: dict[Tensor, Tensor] = {}
        for params in group_by(self.params, lambda p: (p.device, p.dtype)).values():
            flats, views = buffers.take(params, params[0].dtype)
            self.mean_buffers += flats
            for_blocks(torch._foreach_copy_, [views, params])
            means.update(zip(params, views, strict=True))
        self.means = [means[p] for p in self.params]

    def evidence(self) -> list[tuple[Tensor, str, Tensor | None]]:
        """Parameter, method, and what the curvature estimate needs beside the gradient."""
        noises = dict(zip(self.params, self.noises, strict=False))
        evidence = []
        for param, group in zip(self.params, self.groups, strict=True):
            method = group["hess_approx"]
            source = self.given.get(param) if method in GIVEN else None
            evidence.append((param, method, noises[param] if method == "price" else source))
        return evidence

    def take(self, param: Tensor) -> Draw:
        """The draw of one parameter, which is at its mean again and belongs to this one no more."""
        place = next(k for k, p in enumerate(self.params) if p is param)
        own = Draw(True, noisy=self.noisy, look=self.look, divided_by=self.divided_by)
        for name in ("params", "groups", "noises", "means"):
            if held := getattr(self, name):
                setattr(own, name, [held.pop(place)])
        if param in self.factors:
            own.factors[param] = self.factors.pop(param)
        if own.means:
            param.copy_(own.means[0])
        own.carry_gradients()
        self.taken = True
        return own

    @property
    def numel(self) -> int:
        """Weights drawn."""
        return sum(noise.numel() for noise in self.noise_buffers)

    def perturb(self) -> None:
        """m → m + ε, in place, rounded once to the dtype of the weights; then what a look makes."""
        if self.noisy:
            _on_each_device(torch._foreach_add_, self.params, self.noises)
        if self.look is None:
            return
        for param, group in zip(self.params, self.groups, strict=True):
            seen, factor = self.look(param, group, self.generator)
            param.copy_(seen)
            if factor is not None:
                self.factors[param] = factor

    def restore(self, buffers: Buffers) -> None:
        """Put the means back; once more does no harm, when an interrupt came in between."""
        if self.closed:
            return
        if self.means:
            _on_each_device(torch._foreach_copy_, self.params, self.means)
        self.closed = True
        freed, self.mean_buffers, self.means = self.mean_buffers, [], []
        buffers.give(freed)

    def carry_gradients(self) -> None:
        """From the weights that the loss saw to θ; the squares g_i² of examples as well."""
        for param, factor in self.factors.items():
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad.mul_(factor)
            if param in self.given:
                self.given[param] = self.given[param] * factor
        if self.divided_by != 1:
            for param in self.params:
                if param.grad is not None:
                    param.grad.mul_(self.divided_by)


def _on_each_device(
    rule: Callable[..., object], targets: list[Tensor], sources: list[Tensor]
) -> None:
    pairs = zip(targets, sources, strict=True)
    for alike in group_by(pairs, lambda pair: pair[0].device).values():
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


DEGREES = {"price": 1, "abs": 1, "gradsq": 2, "ggn": 2, "none": 2, "hutchinson": 1}
"""By method: the power of the gradient's scale in the curvature estimate."""

NO_GRADIENT = (
    "no parameter has a gradient after sampled_params(train=True): call loss.backward() inside "
    "it, or evaluate inside sampled_params()"
)


class NoGradient(OptimizerError):
    """A draw without a backward pass."""


ROOM = 0.3
"""A gradient's norm stays below the largest number to this power (4e11 in single precision), so
that curvature estimates, which are squared and multiplied by ess, do not overflow."""


@dataclass
class GradientEstimate:
    """Of one parameter. ``curvature`` is the mean of noise·gradient, of gradient², or of what came
    along with the draws."""

    method: str
    grad: Tensor
    shown: Tensor
    """What ``p.grad`` was at the end of the last context; after one draw the same as ``grad``."""
    noise: Tensor | None = None
    curvature: Tensor | None = None
    version: int = -1

    @property
    def is_changed(self) -> bool:
        """Whether someone wrote to ``shown`` since."""
        return self.shown._version != self.version

    def source(self, noisy: bool) -> list[Tensor]:
        """What the curvature is made from beside the mean gradient: noise, or a mean of estimates.

        Nothing for squared gradients of one draw, and of draws at the mean (not ``noisy``), which
        are parts of one larger minibatch.
        """
        if not noisy and self.method not in GIVEN:
            return []
        source = self.noise if self.curvature is None else self.curvature
        return [] if source is None else [source]

    def scale_by(self, factor: float) -> None:
        """Multiply the curvature as it depends on a gradient that is ``factor`` times as long."""
        assert self.curvature is not None
        self.curvature.mul_(factor ** DEGREES[self.method])


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
        if self.count == 1 and _all_were_zeroed(self.estimates.values()):
            self.clear()
            raise OptimizerError(
                "the first sample's gradients were zeroed in place: zero_grad(set_to_none=True)"
            )
        self.settle()
        for param, estimate in self.estimates.items():
            if param.grad is estimate.shown:
                param.grad = None

    @property
    def is_settled(self) -> bool:
        """Whether the means own their memory."""
        return any(e.curvature is not None for e in self.estimates.values())

    def adopt(self) -> None:
        """Gradients that someone put in the place of the shown ones, zeros excepted, hold."""
        for param, estimate in self.estimates.items():
            given = param.grad
            if given is not None and given is not estimate.shown and bool(given.any()):
                estimate.shown, estimate.version = given, -1
                if estimate.curvature is None:
                    estimate.grad = given

    def settle(self) -> None:
        """Let the means own their memory, and carry over what was done to ``p.grad``."""
        settled = [e for e in self.estimates.values() if e.curvature is not None]
        for estimate, ratio in zip(settled, _ratios(settled), strict=True):
            _carry_over(estimate, ratio)
        for param, estimate in self.estimates.items():
            if estimate.curvature is None:
                estimate.grad = estimate.shown.to(state_dtype(param), copy=True)
                estimate.curvature = _first(estimate)
                estimate.noise = None
            estimate.version = estimate.shown._version

    def add(self, draw: Draw) -> None:
        """The gradients now in ``p.grad`` are those at ``draw``."""
        got = [
            (p, p.grad.detach(), method, source)
            for p, method, source in draw.evidence()
            if p.grad is not None
        ]
        _check_gradients(got)
        if self.count == 0:
            for param, _, method, source in got:
                assert param.grad is not None
                estimate = GradientEstimate(
                    method, param.grad, param.grad, version=param.grad._version
                )
                estimate.noise = source
                self.estimates[param] = estimate
            self._held, draw.noise_buffers = draw.noise_buffers, []
            if any(method in GIVEN for _, _, method, _ in got):
                self.settle()
        else:
            self._average(got)
            self._buffers.give(draw.noise_buffers)
        self.count += 1

    def _average(self, got: list[tuple[Tensor, Tensor, str, Tensor | None]]) -> None:
        """mean ← mean + (new − mean)/k; a parameter without a gradient contributes zeros."""
        weight = 1.0 / (self.count + 1)
        for param, _, method, _ in got:
            if param not in self.estimates:
                self.add_zeros(param, method)
        for rows in group_by(got, lambda row: (row[0].device, row[0].dtype, row[2])).values():
            params, grads, methods, sources = zip(*rows, strict=True)
            means = [self.estimates[p].grad for p in params]
            curvatures = [c for p in params if (c := self.estimates[p].curvature) is not None]
            rule = partial(_move_means, weight=weight, method=methods[0])
            if sources[0] is None:
                sources = grads
            for_blocks(rule, [grads, sources, means, curvatures])
        seen = {param for param, *_ in got}
        for param, estimate in self.estimates.items():
            if param not in seen:
                estimate.grad.mul_(1 - weight)
                assert estimate.curvature is not None
                estimate.curvature.mul_(1 - weight)
        self.show()

    def add_zeros(self, param: Tensor, method: str) -> GradientEstimate:
        """A settled estimate of zero, for a parameter that had no gradient so far."""
        zeros = torch.zeros_like(param, dtype=state_dtype(param))
        estimate = GradientEstimate(method, zeros, zeros, curvature=torch.zeros_like(zeros))
        self.estimates[param] = estimate
        return estimate

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
        """The body of ``draw`` failed: the gradients go back to those of the earlier draws."""
        for param in draw.params:
            param.grad = None
        self._buffers.give(draw.noise_buffers)
        draw.noise_buffers = []
        self.show()

    def keep_zeros_apart(self) -> None:
        """Before ``zero_grad(set_to_none=False)``: let it not write into an estimate."""
        for param, estimate in self.estimates.items():
            if param.grad is estimate.shown:
                param.grad = torch.zeros_like(estimate.shown)

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
            if not bool((norms * inverse_scale < most).all()):
                for (param, _), norm in zip(alike, norms.tolist(), strict=True):
                    if not norm * inverse_scale < most:
                        return param
        return None

    def average_over_ranks(self, methods: Mapping[Tensor, str]) -> None:
        """Mean gradient and curvature over the processes of ``torch.distributed``, once settled.

        ``methods`` holds the same parameters on every process. One that has a gradient on some
        processes only counts as zero on the others.
        """
        params = list(methods)
        reduced: list[Tensor] = []
        flags = true_on_any_rank([p in self.estimates for p in params], params[0].device)
        for param, needed in zip(params, flags, strict=True):
            if needed:
                estimate = self.estimates.get(param) or self.add_zeros(param, methods[param])
                assert estimate.curvature is not None
                reduced += [estimate.grad, estimate.curvature]
        for handle in [dist.all_reduce(tensor, async_op=True) for tensor in reduced]:
            handle.wait()  # type: ignore[union-attr]
        torch._foreach_div_(reduced, dist.get_world_size())

    def pack(self, param: Tensor) -> dict[str, Tensor]:
        """What a checkpoint needs of ``param`` to go on from here."""
        estimate = self.estimates.get(param)
        if estimate is None:
            return {}
        packed = {"sample_grad": estimate.grad.detach().clone()}
        if estimate.noise is not None:
            packed["sample_noise"] = estimate.noise.clone()
        if estimate.curvature is not None:
            packed["sample_curvature"] = estimate.curvature.clone()
        return packed

    def unpack(self, param: Tensor, method: str, packed: dict[str, Any]) -> None:
        """The reverse of :meth:`pack`; :attr:`count` is set by the caller."""
        if "sample_grad" not in packed:
            return
        wide = {"device": param.device, "dtype": state_dtype(param), "copy": True}
        curvature, noise = packed.get("sample_curvature"), packed.get("sample_noise")
        if curvature is None:
            grad = packed["sample_grad"].to(device=param.device, dtype=param.dtype, copy=True)
            estimate = GradientEstimate(method, grad, grad)
            estimate.noise = None if noise is None else noise.to(**wide)
        else:
            grad = packed["sample_grad"].to(**wide)
            shown = grad.to(param.dtype, copy=True)
            estimate = GradientEstimate(method, grad, shown, curvature=curvature.to(**wide))
        param.grad = estimate.shown
        estimate.version = estimate.shown._version
        self.estimates[param] = estimate


def _first(estimate: GradientEstimate) -> Tensor:
    """The curvature estimate of a first draw, in memory of its own."""
    if estimate.noise is None:
        return estimate.grad.square()
    return estimate.noise if estimate.method in GIVEN else estimate.noise.mul_(estimate.grad)


def _move_means(
    grad: list[Tensor],
    source: list[Tensor],
    mean: list[Tensor],
    curvature: list[Tensor],
    *,
    weight: float,
    method: str,
) -> None:
    new = [g.to(m.dtype) for g, m in zip(grad, mean, strict=True)]
    torch._foreach_lerp_(mean, new, weight)
    if method in GIVEN:
        estimate = source
    else:
        estimate = torch._foreach_mul(new, source if method == "price" else new)
    torch._foreach_lerp_(curvature, estimate, weight)


def _ratios(estimates: Sequence[GradientEstimate]) -> list[float]:
    """By which factor the norm of each shown mean has changed.

    Values are compared because ``unscale_`` and ``p.grad.data`` do not count as writing.
    """
    ratios: dict[int, float] = {}
    for alike in group_by(estimates, lambda e: (e.shown.device, e.shown.dtype)).values():
        dtype = state_dtype(alike[0].shown)
        before = torch._foreach_norm([e.grad.to(e.shown.dtype) for e in alike], 2, dtype)
        now = torch._foreach_norm([e.shown.detach() for e in alike], 2, dtype)
        changes = torch.stack(now) / torch.stack(before)
        ratios.update(zip(map(id, alike), changes.tolist(), strict=True))
    return [ratios[id(estimate)] for estimate in estimates]


def _carry_over(estimate: GradientEstimate, ratio: float) -> None:
    """A change of the shown mean reaches the means; zeros in place of gradients do not."""
    if abs(ratio - 1) < 1e-6:  # the same up to the order of summation, or masked
        ratio = 1.0
    if 0 < ratio < math.inf and (ratio != 1 or estimate.is_changed):
        estimate.grad.copy_(estimate.shown)
        estimate.scale_by(ratio)


def _all_were_zeroed(estimates: Any) -> bool:
    estimates = list(estimates)
    return all(e.is_changed for e in estimates) and not any(e.shown.any() for e in estimates)


def _check_gradients(got: Sequence[tuple[Tensor, Tensor, str, Tensor | None]]) -> None:
    if not got:
        raise NoGradient(NO_GRADIENT)
    for param, grad, _, _ in got:
        if grad.layout is not torch.strided:
            raise OptimizerError(
                f"a gradient of shape {tuple(param.shape)} is sparse: build with sparse=False"
            )


def is_distributed() -> bool:
    """Whether there is anyone to average with."""
    return dist.is_available() and dist.is_initialized()


def true_on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    """Elementwise "or" over the processes."""
    ours = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(ours, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in ours.tolist()]


def mean_over_ranks(numbers: Sequence[float], device: torch.device) -> list[float]:
    """The processes' mean of each number."""
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()
