"""What every optimizer of the rule shares: settings, draws, closures, loss scales, checkpoints.

A class that derives from :class:`RuleOptimizer` says what a step makes of the gradients that were
gathered (``_update``), and what it draws from (``_fill``).
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.checks import instance, positive_int, positive_number
from blr_analysis.errors import InputError, OptimizerError, told_as
from blr_analysis.learning_rule.optim.draws import (
    DEGREES,
    Buffers,
    Draw,
    Gathered,
    Group,
    Look,
    NoGradient,
    fill_normal,
    group_by,
    mean_over_ranks,
    plain_tensors,
    state_dtype,
)

HINT = "load a state_dict() of this class, made with the same parameters in the same order"
ROUNDING = 1e-12
"""A schedule that ends at 0 may miss it by so much."""


SETTINGS = {
    "lr": "[0, inf)",
    "ess": "(0, inf)",
    "beta1": "[0, 1)",
    "temperature": "(0, inf)",
    **dict.fromkeys(("beta2", "keep_lr"), "[0, 1]"),
    **dict.fromkeys(("keep", "keep_prior"), "(0, 1]"),
    **dict.fromkeys(("clip", "clip_radius"), "(0, inf]"),
    **dict.fromkeys(("weight_decay", "hess_init", "eps", "radius"), "[0, inf)"),
    **dict.fromkeys(("damping", "floor", "noise"), "[0, inf)"),
}
"""Numbers of a parameter group, and where they lie."""
GROUPED = (*SETTINGS, "hess_approx", "debias", "rescale_lr", "dim", "prior")
DEFAULTS = {"ess": 1.0, "weight_decay": 0.0, "hess_init": 0.0, "beta1": 0.9, "beta2": 0.999}


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
    """What an optimizer is given, as torch reads it: groups, in dictionaries of their own."""
    with told_as(InputError, "params cannot be trained", "pass model.parameters() or groups"):
        if isinstance(params, set):
            raise TypeError("a set has no order")
        items = [dict(item) if isinstance(item, Mapping) else item for item in params]
        return torch.optim.Optimizer(items, {}).param_groups


class RuleOptimizer(torch.optim.Optimizer):
    """Draws of the weights, steps by the gradients there, and checkpoints; see :class:`IVON`."""

    _ranges: ClassVar[Mapping[str, str]] = {}  # narrower than those of every optimizer
    _kept: Any = ("momentum",)  # tensors in the state of each parameter
    _own_scale: Any = True  # whether ess·(hess + weight_decay) is the precision of a posterior
    _needs_draw: Any = True  # whether a plain backward pass, outside of a draw, is no look
    _unscales = True  # whether gradients of a scaled loss can be used
    _look: Any = None  # a Look: what the loss sees in training in the place of the parameters
    _sample: Any = None  # and as a draw of the posterior
    examples: Any  # reads what the passes of a draw tell of single examples; or None

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def _set_up(
        self,
        algorithm: str,
        params: Any,
        *,
        mc_samples: int = 1,
        sync: bool = False,
        generator: torch.Generator | None = None,
        foreach: bool | None = None,
        **settings: Any,
    ) -> None:
        """Begin: what every signature ends in."""
        if unknown := [name for name in settings if name not in GROUPED]:
            raise TypeError(f"{algorithm} has no argument {unknown[0]!r}")
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator or None")
        self.algorithm, self.sync, self.generator = algorithm, sync, generator
        self.mc_samples = positive_int("mc_samples", mc_samples)
        vars(self).setdefault("examples", None)
        self._begin_fresh()
        defaults = {**DEFAULTS, "hess_approx": "none", **settings, "algorithm": algorithm}
        super().__init__(groups_of(params), defaults)

    def _begin_fresh(self) -> None:
        self._buffers = Buffers()
        self._gathered = Gathered(self._buffers)
        self._open: Draw | None = None
        self._fused = False  # parameters were moved by step_param since the last step

    # Groups ----------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every setting and parameter checked (:class:`InputError`)."""
        with told_as(InputError, "a group of parameters is a dictionary with 'params'"):
            super().add_param_group(param_group)
        try:
            if odd := [p for p in self.param_groups[-1]["params"] if not p.is_floating_point()]:
                raise InputError(f"a parameter is {odd[0].dtype}: give real numbers")
            self._check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group) -> None:
        """Raise :class:`InputError` for a group that cannot be used."""
        for name, interval in {**SETTINGS, **self._ranges}.items():
            if name in group:
                check_setting(name, group[name], interval)
        if self._own_scale and group["hess_init"] + group["weight_decay"] <= 0:
            raise InputError("the precision starts at 0: give weight_decay or hess_init")

    def _check_groups(self) -> None:
        """What was sound when it was given may have been changed since."""
        for group in self.param_groups:
            self._check_group(group)

    def _is_noisy(self, train: bool) -> bool:
        """Whether the weights are drawn from q."""
        return bool(self._own_scale)

    @property
    def _method(self) -> str:
        """What is averaged over draws; of draws at the mean no squares, for these are the parts of
        one larger minibatch, whose gradient is squared."""
        method = self.param_groups[0]["hess_approx"]
        return "none" if method == "gradsq" and not self._is_noisy(train=True) else method

    # Drawing ---------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, train: bool = False, *, divided_by: float = 1.0) -> Iterator[None]:
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
        draw = self._draw(train)
        draw.divided_by = positive_number("divided_by", divided_by)
        with self._at(draw):
            yield

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if self._open is not None and self._open.adoptable and train:
            self._open.adoptable = False
            return self._open
        self._refuse_inside("sampled_params()")
        if not train and not self._own_scale and self._sample is None:
            raise OptimizerError(f"{self.algorithm} learns no posterior: fit_laplace makes one")
        look = self._look if train else self._sample
        return Draw(train, self._is_noisy(train), look, adoptable, self._method)

    def _shown(self, look: Look) -> AbstractContextManager[None]:
        """The model with the weights that ``look`` makes of the parameters."""
        return self._at(Draw(False, look=look))

    @contextmanager
    def _at(self, draw: Draw) -> Iterator[None]:
        """The model at the weights of ``draw``, which may be open already."""
        is_open = draw is self._open
        if not is_open:
            self._refuse_inside("another context")
        try:
            if not is_open:
                self._begin(draw)
            yield
            if draw is self._open:  # no context inside the closure has closed it
                self._finish(draw)
        except BaseException:  # also an interrupt while the means are put back
            self._abandon(draw)
            raise

    def _begin(self, draw: Draw) -> None:
        self._check_groups()
        with plain_tensors():
            if draw.train:
                self._gathered.begin()
            self._take_params(draw)
            if draw.noisy:
                self._fill(draw)
            self._open = draw
            draw.perturb(self._buffers, self.generator)
            if draw.train and self.examples is not None:
                self.examples.start([*draw.groups])

    def _take_params(self, draw: Draw) -> None:
        draw.groups = {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}

    def _fill(self, draw: Draw) -> None:
        """ε ~ N(0, 1/S), S = ess·(hess + weight_decay), group by group."""
        kinds = group_by(
            draw.groups.items(), lambda item: (id(item[1]), item[0].device, state_dtype(item[0]))
        )
        for (_, device, dtype), items in kinds.items():
            params, group = [p for p, _ in items], items[0][1]
            flat, noises = self._buffers.take(params, dtype)
            draw.noise_flats.append(flat)
            start = torch.full((), float(group["hess_init"]), dtype=dtype, device=device)
            # before its first step a parameter has the precision it was given
            held = [(self.state.get(p), start.expand(p.shape)) for p in params]
            hess = [own["hess"] if own else given for own, given in held]
            fill_normal(flat, noises, hess, group, self.generator)
            draw.noises.update(zip(params, noises, strict=True))

    def _finish(self, draw: Draw) -> None:
        with plain_tensors():
            moved = self._fused and all(p.grad is None for p in draw.groups)
            if draw.train and self.examples is not None:
                scale = draw.divided_by ** DEGREES[self.examples.method]
                draw.given = {p: s * scale for p, s in self.examples.finish().items()}
            draw.restore(self._buffers)
            if moved or not draw.train:
                self._gathered.drop(draw)
            else:
                draw.carry_gradients()
                self._gather(draw)
            self._open = None

    def _gather(self, draw: Draw) -> None:
        self._gathered.add(draw)

    def _abandon(self, draw: Draw) -> None:
        if self.examples is not None:
            self.examples.stop()
        if draw is self._open:
            with plain_tensors():
                draw.restore(self._buffers)
                self._gathered.drop(draw)
                self._open = None

    def drop_draws(self) -> None:
        """Forget the draws since the last step: of a minibatch that is to be skipped, say."""
        self._refuse_inside("drop_draws()")
        self._forget()

    def _forget(self) -> None:
        """After a step, a skipped step, or a failed one: nothing of its draws is left."""
        self._gathered.clear()

    def _refuse_inside(self, what: str) -> None:
        if self._open is not None:
            raise OptimizerError(f"{what} inside sampled_params(): leave the first context")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. The draws gathered for the next step stay; see :meth:`drop_draws`."""
        for param, estimate in self._gathered.estimates.items():
            if param.grad is estimate.grad:  # no zeros are written into an estimate
                param.grad = None if set_to_none else torch.zeros_like(estimate.grad)
        super().zero_grad(set_to_none)

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
                if self._fused and not self._gathered.count:
                    self._fused = False
                    return None
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
            held = [(p.grad, p.grad._version) for p in draw.groups if p.grad is not None]
            loss = closure()
            now = {id(p.grad) for p in draw.groups}
            if self._needs_draw and any(g._version != v and id(g) in now for g, v in held):
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
        draw = Draw(True, method=self._method)  # a plain backward pass was one look at the mean
        self._take_params(draw)
        self._gathered.add(draw)

    def _settled(self) -> float | None:
        """What the gradients are still to be multiplied by; None if the step is skipped.

        GradScaler lends the optimizer ``found_inf`` and ``grad_scale`` for the time of the call;
        the latter is None after ``unscale_``.
        """
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        skip = found_inf is not None and bool(found_inf > 0)
        together = self.sync and ranks.count() > 1
        if together:
            skip = mean_over_ranks([skip], self.param_groups[0]["params"][0].device)[0] > 0
        if skip:
            return None
        self._gathered.settle(together)
        if together:
            params = [p for group in self.param_groups for p in group["params"]]
            self._gathered.average_over_ranks(params, inverse_scale)
            inverse_scale = 1.0
        bad = None if found_inf is not None else self._gathered.find_unusable(inverse_scale)
        if bad is not None:
            said = f"the gradient of {self._describe(bad)} holds NaN or inf, or may overflow"
            raise OptimizerError(f"{said}: nothing was changed; lower lr, or clip")
        return inverse_scale

    def _describe(self, param: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    name = group.get("param_names", {index: f"parameter {index}"})[index]
                    return f"{name} of group {number} (shape {tuple(param.shape)})"
        return str(tuple(param.shape))

    def _update(self, inverse_scale: float) -> None:
        """Move every parameter that has an estimate; the others stay.

        ``inverse_scale`` undoes a loss scale that still multiplies the gradients.
        """
        raise NotImplementedError

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, the draws
        gathered for the next step (``sample_grad``, ``sample_curvature``; their number is in
        ``"sampling"``), and the state of ``generator``.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are not the mean.
        """
        self._refuse_inside("state_dict()")
        with plain_tensors():
            self._gathered.settle()
            found = super().state_dict()
            state = dict(found["state"])
            for key, param, _ in self._places(found):
                if estimate := self._gathered.estimates.get(param):
                    drawn = {"sample_grad": estimate.grad, "sample_curvature": estimate.source}
                    drawn = {n: t.detach().clone() for n, t in drawn.items() if t is not None}
                    state[key] = {**state.get(key, {}), **drawn}
        sampling: dict[str, Any] = {"count": self._gathered.count}
        if self.generator is not None:
            sampling["generator"] = self.generator.get_state()
        return {**found, "state": state, "sampling": sampling}

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
            self._forget()
            self._restore(given)

    def _what_differs(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why this is no state of this class, or of other parameters."""
        groups, state = state_dict["param_groups"], state_dict["state"]
        if others := {g.get("algorithm", "another optimizer") for g in groups} - {self.algorithm}:
            return f"this is the state of {', '.join(others)}, not of {self.algorithm}"
        sizes, own = ([len(g["params"]) for g in gs] for gs in (groups, self.param_groups))
        if sizes != own:
            return f"the state has groups of {sizes} parameters, this optimizer of {own}"
        for key, param, decay in self._places(state_dict):
            entry = state.get(key, {})
            if entry and not {"step", *self._kept} <= {*entry} and "sample_grad" not in entry:
                return f"the state of parameter {key} holds {sorted(entry)}"
            for name in {*entry} - {"step"}:
                shape = getattr(entry[name], "shape", entry[name])
                if shape != param.shape:
                    return f"{name} of parameter {key} is {shape}, the parameter {param.shape}"
            precision = entry.get("hess", torch.ones(())) + decay
            if self._own_scale and not ((precision > 0) & precision.isfinite()).all():
                return f"hess + weight_decay of parameter {key} is not positive and finite"
        return None

    def _restore(self, given: Mapping[str, Any]) -> None:
        sampling = given.get("sampling", {})
        self._gathered.method = self._method
        for key, param, _ in self._places(given):
            held = given["state"].get(key, {})
            if own := {name: held[name] for name in ("step", *self._kept) if name in held}:
                self.state[param] = {name: _moved(value, param) for name, value in own.items()}
            if "sample_grad" in held:
                estimate = self._gathered.add_zeros(param)
                estimate.grad.copy_(held["sample_grad"])
                if estimate.source is not None:
                    estimate.source.copy_(held["sample_curvature"])
        self._gathered.count = sampling.get("count", 0) if self._gathered.estimates else 0
        self._gathered.show()
        if self.generator is not None and "generator" in sampling:
            self.generator.set_state(sampling["generator"].cpu())

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
        if "_gathered" not in self.__dict__:  # a copy, not load_state_dict
            self._begin_fresh()


def _moved(value: Any, param: Tensor) -> Any:
    wide = {"device": param.device, "dtype": state_dtype(param), "copy": True}
    return value.to(**wide) if isinstance(value, Tensor) else value
