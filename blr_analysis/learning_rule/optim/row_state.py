"""A row's settings and the state of its parameters: checked, stored, saved and loaded.

:class:`RowState` is the part of :class:`~blr_analysis.learning_rule.optim.RowOptimizer` that a
drawing or a step reads: what the row asks for, the settings of each group, and the tensors
(``hess``, ``momentum``, …) of each parameter.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance, positive_int
from blr_analysis.errors import InputError, OptimizerError, told_as
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import (
    AT_ADVERSARY,
    AT_NEIGHBOUR,
    GAUSS_NEWTON,
    NO_CURVATURE,
)
from blr_analysis.learning_rule.optim.blocks import plain_tensors
from blr_analysis.learning_rule.optim.draws import Draw, Group
from blr_analysis.learning_rule.optim.per_example import PerExampleSquares
from blr_analysis.learning_rule.optim.plain import PlainOptimizer
from blr_analysis.learning_rule.optim.settings import (
    DEFAULTS,
    INTERVALS,
    NAMES,
    check_setting,
    groups_of,
)
from blr_analysis.learning_rule.optim.weight_prior import TENSORS, WeightPrior, typical_decay
from blr_analysis.learning_rule.table import Row, row, runs_elementwise

HINT = "load a state_dict() of this class, made with the same parameters in the same order"


class RowState(PlainOptimizer):
    """The settings of a row's groups, and the state of its parameters."""

    _ranges: ClassVar[Mapping[str, str]] = {}  # intervals narrower than those of every optimizer
    _grouped: ClassVar[tuple[str, ...]] = NAMES

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
        """What every constructor ends with; ``settings`` are those of the groups."""
        self.row = row
        self.algorithm = row.algorithm
        self._refuse_unknown(settings)
        if generator is not None:
            instance("generator", generator, torch.Generator, "a torch.Generator or None")
        self.sync = sync
        self.generator = generator
        self.mc_samples = positive_int("mc_samples", mc_samples)
        self.examples = self._reader(model, loss_reduction)
        defaults = {**DEFAULTS, "hess_approx": row.curvature.method, "algorithm": self.algorithm}
        defaults |= settings
        groups = groups_of(params)
        if earlier is not None:
            for group in groups:
                group["prior_decay"] = _first_decay(earlier, {**defaults, **group})
        super().__init__(groups, defaults)
        self._begin_fresh()
        if earlier is not None:
            self._start_from_prior(earlier)

    def _refuse_unknown(self, settings: Mapping[str, Any]) -> None:
        """Raise TypeError, as a call does, for an argument that the optimizer does not have."""
        for name in settings:
            if name not in self._grouped:
                raise TypeError(f"{self.algorithm} has no argument {name!r}")

    def _begin_fresh(self) -> None:
        """Set what is not saved: no draw is open."""
        self._open: Draw | None = None

    def _refuse_inside(self, call: str) -> None:
        """Raise :class:`OptimizerError` where the context of a draw is open."""
        if self._open is not None:
            raise OptimizerError(f"{call} inside sampled_params(): leave the first context")

    def _accepted(self, row_or_name: Row | str) -> Row:
        """The row that the user names, where this class can run it."""
        accepted = row_or_name if isinstance(row_or_name, Row) else row(row_or_name)
        if accepted.look in (AT_ADVERSARY, AT_NEIGHBOUR):
            name = accepted.algorithm
            raise InputError(f"{name} takes two gradients a step: use {name.upper()}")
        if not runs_elementwise(accepted):
            raise InputError(f"{accepted.algorithm} is no elementwise row: {accepted.runs} runs it")
        return accepted

    def _reader(self, model: Any, reduction: str) -> Any:
        """What reads the examples' gradients from the model's passes; None where the row needs no
        such gradients."""
        if self.row.curvature == GAUSS_NEWTON:
            instance(f"{self.algorithm}'s model", model, nn.Module, "the module that is trained")
            return PerExampleSquares(model, self.algorithm, reduction)
        if model is not None:
            raise InputError(f"{self.algorithm} reads nothing from the model: leave it out")
        return None

    # What the row asks for ------------------------------------------------------------------------

    @property
    def _state_names(self) -> tuple[str, ...]:
        """The names of the tensors that the state of every parameter has."""
        names = []
        if self.row.curvature != NO_CURVATURE:
            names.append("hess")
        if self.row.move.momentum != "none":
            names.append("momentum")
        if self.row.move.rescaled:
            names.append("moved")
        return tuple(names)

    def _state_names_of(self, group: Group) -> tuple[str, ...]:
        """The names of the tensors in the state of a group's parameters.

        A group may ask for the mean of squared gradients, and may have a prior.
        """
        names = self._state_names
        if group.get("squares"):
            names = (*names, "squares")
        if "prior_decay" in group:
            names = (*names, *TENSORS)
        return names

    @property
    def _hess_is_precision(self) -> bool:
        """Whether ess·(hess + weight_decay) is the precision of a posterior."""
        return self.row.look.noisy or self.examples is not None

    # Groups ---------------------------------------------------------------------------------------

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
        for name, interval in {**INTERVALS, **self._ranges}.items():
            if name in group:
                check_setting(name, group[name], interval)
        for param in group["params"]:
            if not param.is_floating_point():
                raise InputError(f"a parameter is {param.dtype}: give real numbers")
        if self._hess_is_precision and group["hess_init"] + typical_decay(group) <= 0:
            raise InputError("the precision starts at 0: give weight_decay or hess_init")
        has_prior = "prior_decay" in group
        if has_prior and group["weight_decay"]:
            raise InputError("prior= has its own precision: leave weight_decay out")
        if has_prior != ("prior_decay" in self.param_groups[0]):
            raise InputError("prior= is of all parameters: make a new optimizer with these too")

    def _check_groups(self) -> None:
        """Check all groups again: the user or a scheduler may have changed their settings."""
        for group in self.param_groups:
            self._check_group(group)

    def _trained(self) -> dict[Tensor, Group]:
        """The settings of every parameter that is trained."""
        return {p: g for g in self.param_groups for p in g["params"] if p.requires_grad}

    # The state of a parameter ---------------------------------------------------------------------

    def _start_from_prior(self, prior: WeightPrior) -> None:
        """Give every parameter its first state, with its prior."""
        with plain_tensors():
            for param, group in self._trained().items():
                self.state[param] = {**self._first_state(param, group), **prior.state_of(param)}

    def _hess_of(self, param: Tensor, start: Tensor) -> Tensor:
        """A parameter's ``hess``; before the first step it is ``start`` in every entry."""
        state = self.state.get(param)
        return state["hess"] if state else start.expand(param.shape)

    def _decay_of(self, param: Tensor, group: Group) -> Any:
        """δ/ess of one parameter: a number, or with ``prior=`` a tensor.

        Raises:
            OptimizerError: the parameter was frozen when the prior was given.
        """
        if "prior_decay" not in group:
            return group["weight_decay"]
        state = self.state.get(param)
        if not state:
            shape = tuple(param.shape)
            raise OptimizerError(f"prior= has no {shape} that was frozen: make a new optimizer")
        return state["prior_precision"] / group["ess"]

    def _next_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        """The parameter's state for its next step, whose number is counted."""
        state = self.state[param]
        if not state:
            self._decay_of(param, group)  # refuses a parameter without its prior
            state.update(self._first_state(param, group))
        state["step"] += 1
        return state

    def _first_state(self, param: Tensor, group: Group) -> dict[str, Any]:
        """The state before the first step, without the prior: ``hess`` is ``hess_init``."""
        state: dict[str, Any] = {"step": 0}
        for name in self._state_names_of(group):
            start = group["hess_init"] if name == "hess" else 0.0
            state[name] = torch.full_like(
                param, start, dtype=working(param.dtype), memory_format=torch.preserve_format
            )
        return state

    def _state_shape(self, param: Tensor) -> torch.Size:
        """The shape of every tensor in the state of a parameter."""
        return param.shape

    # Saving ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, and the state of
        ``generator``. Take it after a step: it does not hold the draws since the last one, as no
        optimizer's state holds gradients.

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
            OptimizerError: the state is of another optimizer or of other parameters; then nothing
                is loaded.
        """
        self._refuse_inside("load_state_dict()")
        checked: dict[str, Any] = {}

        def check(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            difference = self._what_differs(loaded)
            if difference is not None:
                raise OptimizerError(f"{difference}; {HINT}")
            checked.update(loaded)
            return {**loaded, "state": {}}  # torch would share the tensors' memory, or round them

        handle = self.register_load_state_dict_pre_hook(check)  # it runs after the user's hooks
        try:
            with told_as(OptimizerError, "this is no optimizer state", HINT):
                super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self._copy_state(checked)
        generator_state = checked.get("sampling", {}).get("generator")
        if self.generator is not None and generator_state is not None:
            self.generator.set_state(generator_state.cpu())

    def _copy_state(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the state of every parameter from a state dict that was checked."""
        with plain_tensors():
            for key, param, group in self._entries(state_dict):
                entry = state_dict["state"].get(key)
                if entry:
                    names = ("step", *self._state_names_of(group))
                    self.state[param] = {name: _copied(entry[name], param) for name in names}

    def _what_differs(self, state_dict: Mapping[str, Any]) -> str | None:
        """Why this state cannot be loaded, in words; None where it can."""
        algorithms = {g.get("algorithm", "another optimizer") for g in state_dict["param_groups"]}
        foreign = algorithms - {self.algorithm}
        if foreign:
            return f"this is the state of {', '.join(foreign)}, not of {self.algorithm}"
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            if ("prior_decay" in saved) != ("prior_decay" in group):
                return "one of the state and this optimizer has a prior=, the other none"
        for key, param, group in self._entries(state_dict):
            entry = state_dict["state"].get(key, {})
            difference = self._entry_differs(key, entry, self._state_shape(param), group)
            if difference is not None:
                return difference
        return None

    def _entry_differs(
        self, key: Any, entry: Mapping[str, Any], shape: torch.Size, group: Group
    ) -> str | None:
        """Why this is no state of a parameter, in words; None where it is.

        ``shape``: what the tensors of its state must have.
        """
        names = self._state_names_of(group)
        shapes = {name: getattr(entry.get(name), "shape", None) for name in names}
        fits = "step" in entry and all(size == shape for size in shapes.values())
        if entry and not fits:
            return f"of parameter {key} it holds {shapes}, which does not fit {shape}"
        if not self._hess_is_precision:
            return None
        decay = group["weight_decay"]
        if "prior_precision" in entry:
            decay = entry["prior_precision"] / group["ess"]
        precision = entry.get("hess", torch.ones(())) + decay
        if not bool(((precision > 0) & precision.isfinite()).all()):
            return f"hess + weight_decay of parameter {key} is not positive and finite"
        return None

    def _entries(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor, Group]]:
        """For every parameter: its key in the state dict, itself, its group in the state dict."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                yield key, param, saved


def _copied(value: Any, param: Tensor) -> Any:
    """A copy of a tensor on the parameter's device; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device=param.device, dtype=working(param.dtype), copy=True)


def _first_decay(prior: WeightPrior, group: Group) -> float:
    """The typical δ/ess of a group, whose settings are checked first."""
    check_setting("ess", group["ess"], INTERVALS["ess"])
    check_setting("hess_init", group["hess_init"], INTERVALS["hess_init"])
    return prior.decay(group["params"], group["ess"], group["hess_init"])
