"""The rows of the table that train networks, once: settings, closures, loss scales, states.

What a step does with a draw's weights stands in :mod:`~blr_analysis.learning_rule.optim.draws`,
what it does with gradients in :mod:`~blr_analysis.learning_rule.optim.gathered`; its arithmetic is
:func:`blr_analysis.learning_rule.moves.step`, block by block
(:mod:`~blr_analysis.learning_rule.optim.blocks`). A class that derives from :class:`RowOptimizer`
names its row and the signature that users type; the rest of the signature becomes the settings of
the groups.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blr_analysis import ranks
from blr_analysis.checks import instance, positive_int, positive_number
from blr_analysis.errors import InputError, OptimizerError, told_as
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import (
    AT_ADVERSARY,
    AT_NEIGHBOUR,
    GAUSS_NEWTON,
    NO_CURVATURE,
)
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim.blocks import (
    Scratch,
    average_squares,
    for_blocks,
    group_by,
    plain_tensors,
    scaled,
)
from blr_analysis.learning_rule.optim.draws import Context, Draw, Group, Look, fill_normal
from blr_analysis.learning_rule.optim.gathered import DEGREES, Gathered, mean_over_ranks
from blr_analysis.learning_rule.optim.per_example import NoGradient, PerExampleSquares
from blr_analysis.learning_rule.optim.weight_prior import TENSORS, WeightPrior, typical_decay
from blr_analysis.learning_rule.table import Row, row, runs_elementwise

HINT = "load a state_dict() of this class, made with the same parameters in the same order"
ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by so much."""

SETTINGS = {
    "beta1": "[0, 1)",
    "beta2": "[0, 1]",
    "keep": "(0, 1]",
    "keep_prior": "(0, 1)",
    **dict.fromkeys(("ess", "temperature"), "(0, inf)"),
    **dict.fromkeys(("clip", "clip_radius"), "(0, inf]"),
    **dict.fromkeys(("lr", "weight_decay", "hess_init", "eps"), "[0, inf)"),
    **dict.fromkeys(("radius", "damping", "floor", "noise", "keep_lr"), "[0, inf)"),
}
"""Numbers of a parameter group, and where they lie."""
GROUPED = (
    *SETTINGS, "hess_approx", "debias", "rescale_lr", "dim", "squares", "batch_size",
)  # fmt: skip
DEFAULTS = {
    "ess": 1.0,
    "weight_decay": 0.0,
    "hess_init": 0.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
}


Law = tuple[Any, Move, Group]
"""What moves a group: curvature, move, and the settings that both read."""


def check_setting(name: str, value: Any, interval: str) -> None:
    """Raise :class:`InputError` unless the number lies in the interval, up to rounding: a schedule
    that ends at 0 may miss it."""
    low, high = map(float, interval[1:-1].split(","))
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    is_above = number > low if interval[0] == "(" else number >= low - ROUNDING
    is_below = number < high if interval[-1] == ")" else number <= high
    if not (is_above and is_below):
        raise InputError(f"{name} must be a number in {interval}, not {value!r}")


def groups_of(params: Any) -> list[dict[str, Any]]:
    """The groups of parameters that torch reads in what a user passes."""
    with told_as(InputError, "params cannot be trained", "pass model.parameters() or groups"):
        if isinstance(params, set):
            raise TypeError("a set has no order")
        return torch.optim.Optimizer(params, {}).param_groups


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
    _grouped: ClassVar[tuple[str, ...]] = GROUPED
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
        earlier: WeightPrior | None = None,
        **settings: Any,
    ) -> None:
        """Begin: what every signature ends in."""
        self.row = row
        self.algorithm = row.algorithm
        unknown = [name for name in settings if name not in self._grouped]
        if unknown:
            raise TypeError(f"{self.algorithm} has no argument {unknown[0]!r}")
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator or None")
        self.sync = sync
        self.generator = generator
        self.mc_samples = positive_int("mc_samples", mc_samples)
        self.examples = self._reader(model, loss_reduction)
        of_row = {"hess_approx": row.curvature.method, "algorithm": self.algorithm}
        defaults = {**DEFAULTS, **of_row, **settings}
        groups = groups_of(params)
        if earlier is not None:
            for group in groups:
                group["prior_decay"] = _first_decay(earlier, {**defaults, **group})
        super().__init__(groups, defaults)
        self._begin_fresh()
        if earlier is not None:
            self._begin_at(earlier)

    def _accepted(self, row_or_name: Row | str) -> Row:
        accepted = row_or_name if isinstance(row_or_name, Row) else row(row_or_name)
        if accepted.look in (AT_ADVERSARY, AT_NEIGHBOUR):
            name = accepted.algorithm
            raise InputError(f"{name} takes two gradients a step: use {name.upper()}")
        if not runs_elementwise(accepted):
            raise InputError(f"{accepted.algorithm} is no elementwise row: {accepted.runs} runs it")
        return accepted

    def _reader(self, model: Any, reduction: str) -> Any:
        """The reader of the examples' gradients in the passes of a draw; None where the row needs
        none of them."""
        if self.row.curvature == GAUSS_NEWTON:
            instance(f"{self.algorithm}'s model", model, nn.Module, "the module that is trained")
            return PerExampleSquares(model, self.algorithm, reduction)
        if model is not None:
            raise InputError(f"{self.algorithm} reads nothing from the model: leave it out")
        return None

    def _begin_at(self, prior: WeightPrior) -> None:
        """Give every parameter its state, with its prior, before the first step."""
        with plain_tensors():
            for param, group in self._trained().items():
                self.state[param] = {**self._first_state(param, group), **prior.state_of(param)}

    def _begin_fresh(self) -> None:
        self._scratch = Scratch()
        self._open: Draw | None = None
        self._forget()

    # What the row asks for -------------------------------------------------------------------

    @property
    def _kept(self) -> tuple[str, ...]:
        """The tensors in the state of each parameter."""
        names = []
        if self.row.curvature != NO_CURVATURE:
            names.append("hess")
        if self.row.move.momentum != "none":
            names.append("momentum")
        if self.row.move.rescaled:
            names.append("moved")
        return tuple(names)

    def _kept_of(self, group: Group) -> tuple[str, ...]:
        """The same, with the mean of squared gradients where a group asks for it."""
        names = self._kept
        if group.get("squares"):
            names = (*names, "squares")
        if "prior_decay" in group:
            names = (*names, *TENSORS)
        return names

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
        for param in group["params"]:
            if not param.is_floating_point():
                raise InputError(f"a parameter is {param.dtype}: give real numbers")
        if self._own_scale and group["hess_init"] + typical_decay(group) <= 0:
            raise InputError("the precision starts at 0: give weight_decay or hess_init")
        has_prior = "prior_decay" in group
        if has_prior and group["weight_decay"]:
            raise InputError("prior= has its own precision: leave weight_decay out")
        if has_prior != ("prior_decay" in self.param_groups[0]):
            raise InputError("prior= is of all parameters: make a new optimizer with these too")

    def _check_groups(self) -> None:
        """Settings may have been changed since they were checked."""
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
        """The settings of every parameter that is trained."""
        return {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}

    def _fill(self, draw: Draw) -> None:
        """ε ~ N(0, 1/S), S = ess·(hess + weight_decay), group by group."""
        is_beside = not draw.train and self._gathered.count > 0
        use = "noise beside the draw's" if is_beside else "noise"
        alike = group_by(draw.groups, lambda p: (id(draw.groups[p]), p.device, working(p.dtype)))
        for (_, device, dtype), params in alike.items():
            group = draw.groups[params[0]]
            flat, noises = self._scratch.take(use, params, dtype)
            start = torch.full((), float(group["hess_init"]), dtype=dtype, device=device)
            hess = [self._hess_of(param, start) for param in params]
            if "prior_decay" in group:
                decays = [self._decay_of(param, group) for param in params]
                hess = list(torch._foreach_add(hess, decays))
            fill_normal(flat, noises, hess, group, self.generator)
            draw.noises.update(zip(params, noises, strict=True))

    def _hess_of(self, param: Tensor, start: Tensor) -> Tensor:
        """What was learned; before its first step a parameter has ``start`` in every entry."""
        state = self.state.get(param)
        return state["hess"] if state else start.expand(param.shape)

    def _decay_of(self, param: Tensor, group: Group) -> Any:
        """δ/ess of one parameter: a number, or with ``prior=`` one for each weight.

        Raises:
            OptimizerError: it was frozen when the prior was given.
        """
        if "prior_decay" not in group:
            return group["weight_decay"]
        state = self.state.get(param)
        if not state:
            shape = tuple(param.shape)
            raise OptimizerError(f"prior= has no {shape} that was frozen: make a new optimizer")
        return state["prior_precision"] / group["ess"]

    def _finish(self, draw: Draw) -> None:
        with plain_tensors():
            if draw.train and self.examples is not None:
                scale = draw.divided_by ** DEGREES[self.examples.method]
                squares = self.examples.finish()
                draw.estimates = {p: square * scale for p, square in squares.items()}
            draw.restore()
            if draw.train:
                draw.carry_gradients()
                self._gather(draw)
            self._open = None

    def _gather(self, draw: Draw) -> None:
        self._gathered.add(draw)

    def drop_draws(self) -> None:
        """Forget the draws since the last step, as where a minibatch is skipped."""
        self._refuse_inside("drop_draws()")
        self._forget()

    def _forget(self) -> None:
        """After a step, a skipped step, or a failed one: nothing of its draws is left. Of draws at
        the mean no squares are averaged, for these are parts of one larger minibatch."""
        method = self.param_groups[0]["hess_approx"]
        squares_at_mean = method == "gradsq" and not self._is_noisy(train=True)
        squares_of_step = squares_at_mean or method == "fisher"
        self._gathered = Gathered("none" if squares_of_step else method)

    def _refuse_inside(self, call: str) -> None:
        if self._open is not None:
            raise OptimizerError(f"{call} inside sampled_params(): leave the first context")

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
                inverse_scale = self._settled()
                if inverse_scale is not None:
                    self._update(inverse_scale)
            finally:
                self._forget()
        if not losses or losses[0] is None:
            return None
        return sum(losses) / len(losses)

    def _losses(self, closure: Callable[[], Any]) -> list[Any]:
        """After draws of the caller's own, a closure may be empty: Lightning passes such a one."""
        has_draws = self._gathered.count > 0
        losses = []
        try:
            for _ in range(self.mc_samples):
                draw = self._draw(train=True, adoptable=True)
                losses.append(self._loss_at(draw, closure))
        except NoGradient:
            if not has_draws:
                raise
            return []
        return losses

    def _loss_at(self, draw: Draw, closure: Callable[[], Any]) -> Any:
        with self._at(draw), torch.enable_grad():
            before = [(p, p.grad, p.grad._version) for p in draw.groups if p.grad is not None]
            loss = closure()
            adds = any(p.grad is grad and grad._version != version for p, grad, version in before)
            if self._needs_draw and adds:
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
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        is_skipped = found_inf is not None and bool(found_inf > 0)
        params = [p for group in self.param_groups for p in group["params"]]
        in_parallel = self.sync and ranks.count() > 1
        if in_parallel:
            is_skipped = mean_over_ranks([is_skipped], params[0].device)[0] > 0
        if is_skipped:
            return None
        self._gathered.settle(in_parallel)
        if in_parallel:
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
        state = self.state[param]
        if not state:
            self._decay_of(param, group)  # refuses a parameter without its prior
            state.update(self._first_state(param, group))
        state["step"] += 1
        return state

    def _first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Before the first step, without the prior."""
        state: dict[str, Any] = {"step": 0}
        for name in self._kept_of(group):
            start = group["hess_init"] if name == "hess" else 0.0
            state[name] = torch.full_like(
                param, start, dtype=working(param.dtype), memory_format=torch.preserve_format
            )
        return state

    def _law(self, group: Group) -> Law:
        return self.row.curvature, self.row.move, group

    def _move(self, params: Sequence[Tensor], law: Law, inverse_scale: float) -> None:
        """One step of parameters that are alike in device, dtype and count."""
        curvature, move, settings = law
        count = self.state[params[0]]["step"]
        dtype = working(params[0].dtype)
        gathered = self._gathered
        columns: dict[str, Sequence[Tensor]] = {
            "theta": params,
            "grad": [gathered.grads[p].detach() for p in params],
        }
        for name in self._kept_of(settings):
            columns[name] = [self.state[p][name] for p in params]
        if gathered.sources:
            columns["evidence"] = [gathered.sources[p] for p in params]
        curvature_scale = inverse_scale ** DEGREES[gathered.method]

        def move_block(*block: list[Tensor]) -> None:
            tensors = dict(zip(columns, block, strict=True))
            tensors["grad"] = scaled([g.to(dtype) for g in tensors["grad"]], inverse_scale)
            if gathered.averaged:
                tensors["evidence"] = scaled(tensors.get("evidence", []), curvature_scale)
            elif "evidence" in tensors:  # the noise of one draw
                torch._foreach_mul_(tensors["evidence"], tensors["grad"])
            if "squares" in tensors:
                average_squares(tensors.pop("squares"), tensors["grad"], settings["beta2"])
            if "prior_precision" in tensors:
                precision = tensors.pop("prior_precision")
                tensors["decay"] = list(torch._foreach_div(precision, settings["ess"]))
                tensors["center"] = tensors.pop("prior_mean")
            step(Block(**tensors), curvature, move, settings, count)

        for_blocks(move_block, list(columns.values()))

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, and the state of
        ``generator``. Take it after a step: draws since the last one are in it as little as
        gradients are in the state of any optimizer.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are not the mean.
        """
        self._refuse_inside("state_dict()")
        sampling = {}
        if self.generator is not None:
            sampling["generator"] = self.generator.get_state()
        return {**super().state_dict(), "sampling": sampling}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, which is copied. A generator's state in it is used if
        this optimizer has a ``generator``.

        Raises:
            OptimizerError: another optimizer's state, or of other parameters; nothing is loaded.
        """
        self._refuse_inside("load_state_dict()")
        checked: dict[str, Any] = {}

        def check(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            difference = self._what_differs(loaded)
            if difference is not None:
                raise OptimizerError(f"{difference}; {HINT}")
            checked.update(loaded)
            return {**loaded, "state": {}}  # torch would alias the tensors, or round them

        handle = self.register_load_state_dict_pre_hook(check)  # after the user's own
        try:
            with told_as(OptimizerError, "this is no optimizer state", HINT):
                super().load_state_dict(state_dict)
        finally:
            handle.remove()
        with plain_tensors():
            for key, param, group in self._places(checked):
                entry = checked["state"].get(key)
                if entry:
                    names = ("step", *self._kept_of(group))
                    self.state[param] = {name: _moved(entry[name], param) for name in names}
        drawn = checked.get("sampling", {}).get("generator")
        if self.generator is not None and drawn is not None:
            self.generator.set_state(drawn.cpu())

    def _what_differs(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why this is no state of this class, or of other parameters."""
        algorithms = {g.get("algorithm", "another optimizer") for g in state_dict["param_groups"]}
        foreign = algorithms - {self.algorithm}
        if foreign:
            return f"this is the state of {', '.join(foreign)}, not of {self.algorithm}"
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            if ("prior_decay" in saved) != ("prior_decay" in group):
                return "one of the state and this optimizer has a prior=, the other none"
        for key, param, group in self._places(state_dict):
            entry = state_dict["state"].get(key, {})
            difference = self._entry_differs(key, entry, self._shape(param), group)
            if difference is not None:
                return difference
        return None

    def _entry_differs(
        self, key: Any, entry: Mapping[str, Any], shape: torch.Size, group: Group
    ) -> str | None:
        """Why this is no state of a parameter whose tensors have this shape."""
        names = self._kept_of(group)
        shapes = {name: getattr(entry.get(name), "shape", None) for name in names}
        fits = "step" in entry and all(size == shape for size in shapes.values())
        if entry and not fits:
            return f"of parameter {key} it holds {shapes}, which does not fit {shape}"
        if not self._own_scale:
            return None
        decay = group["weight_decay"]
        if "prior_precision" in entry:
            decay = entry["prior_precision"] / group["ess"]
        precision = entry.get("hess", torch.ones(())) + decay
        if not bool(((precision > 0) & precision.isfinite()).all()):
            return f"hess + weight_decay of parameter {key} is not positive and finite"
        return None

    def _shape(self, param: Tensor) -> torch.Size:
        """Of every tensor in the state of a parameter."""
        return param.shape

    def _places(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor, Group]]:
        """(key in the state dict, parameter, its group in the state dict), in order."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                yield key, param, saved

    def __getstate__(self) -> dict[str, Any]:
        if self._open is not None or self._gathered.count:
            raise OptimizerError("copy the optimizer after step(), or use state_dict()")
        public = {n: value for n, value in vars(self).items() if not n.startswith("_")}
        public.pop("step", None)  # a scheduler's wrapper
        return public

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_fresh()


def _moved(value: Any, param: Tensor) -> Any:
    """A copy beside the parameter, of a tensor."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=param.device, dtype=working(param.dtype), copy=True)


def _first_decay(prior: WeightPrior, group: Group) -> float:
    """The typical δ/ess of a group, whose settings are checked first."""
    check_setting("ess", group["ess"], SETTINGS["ess"])
    check_setting("hess_init", group["hess_init"], SETTINGS["hess_init"])
    return prior.decay(group["params"], group["ess"], group["hess_init"])
