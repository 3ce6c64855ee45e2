"""Any elementwise row of the table as a ``torch.optim.Optimizer``.

The arithmetic is :func:`blr_analysis.learning_rule.moves.step` for all rows. A class that derives
from :class:`RowOptimizer` names its row and the signature that users type; what the signature
holds beside the parameters becomes the settings of the groups.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import instance
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.expectations import (
    AT_ADVERSARY,
    DIAGONAL_MAGNITUDE,
    GAUSS_NEWTON,
    NO_CURVATURE,
    HessianEstimate,
)
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim.base import RuleOptimizer
from blr_analysis.learning_rule.optim.draws import (
    DEGREES,
    Group,
    for_blocks,
    group_by,
    plain_tensors,
    state_dtype,
)
from blr_analysis.learning_rule.optim.per_example import HessianDiagonal, PerExampleSquares
from blr_analysis.learning_rule.table import Row, row, runs_elementwise

KEPT = ("hess", "momentum", "moved")
Law = tuple[HessianEstimate, Move, Mapping[str, Any]]
"""What moves a group: curvature, move, and the settings that both read."""


class RowOptimizer(RuleOptimizer):
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
    ``damping`` below can be set per group, and torch's schedulers change ``lr``; ``OneCycleLR`` and
    ``CyclicLR`` with ``cycle_momentum=False``, for they know no ``beta1``. "diagonal Newton" takes
    its gradients in that context by ``backward(create_graph=True)``.

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
        radius: how far bSAM's adversary goes (ρ of its paper).
        damping: added to bSAM's estimate of the Hessian (γ of its paper).
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

    def __init__(
        self, params: Any, row: Row | str, lr: float, ess: float = 1.0, **settings: Any
    ) -> None:
        settings = {"eps": 1e-8, "radius": 0.05, "damping": 0.1, **settings}
        self._begin_row(self._accepted(row), params, lr=lr, ess=ess, **settings)

    def _begin_row(
        self,
        row: Row,
        params: Any,
        *,
        model: Any = None,
        loss_reduction: str = "mean",
        **settings: Any,
    ) -> None:
        self.row, algorithm = row, row.algorithm
        if row.curvature == GAUSS_NEWTON:
            instance(f"{algorithm}'s model", model, nn.Module, "the module that is trained")
            self.examples = PerExampleSquares(model, algorithm, loss_reduction)
        elif model is not None:
            raise InputError(f"{algorithm} reads nothing from the model: leave it out")
        elif row.curvature == DIAGONAL_MAGNITUDE:
            self.examples = HessianDiagonal(settings.get("generator"))
        unused = () if row.move.damping.startswith("eps") else ("eps",)
        unused += () if row.look == AT_ADVERSARY else ("radius", "damping")
        settings = {name: value for name, value in settings.items() if name not in unused}
        self._set_up(algorithm, params, **{"hess_approx": row.curvature.method, **settings})

    def _accepted(self, given: Row | str) -> Row:
        accepted = given if isinstance(given, Row) else row(given)
        if accepted.look == AT_ADVERSARY:
            raise InputError(f"{accepted.algorithm} takes two gradients a step: use BSAM")
        if not runs_elementwise(accepted):
            raise InputError(f"{accepted.algorithm} is no elementwise row: {accepted.runs} runs it")
        return accepted

    @property
    def _kept(self) -> tuple[str, ...]:
        """The tensors in the state of each parameter."""
        held = (self.row.curvature != NO_CURVATURE, self.row.move.momentum != "none")
        return tuple(compress(KEPT, (*held, self.row.move.rescaled)))

    @property
    def _own_scale(self) -> bool:
        return self.row.look.noisy or self.examples is not None

    def _is_noisy(self, train: bool) -> bool:
        return self.row.look.noisy if train else self._own_scale

    @property
    def _needs_draw(self) -> bool:
        return self.row.look.noisy or self._look is not None or self.examples is not None

    @property
    def _needs_all_gradients(self) -> bool:
        """Whether no parameter can be moved before the others have their gradients."""
        return self.examples is not None or self.row.look == AT_ADVERSARY

    def _law(self, group: Group) -> Law:
        return self.row.curvature, self.row.move, group

    def step_param(self, param: Tensor, group: Group | None = None) -> None:
        """Move one parameter as soon as its gradient is there, and free the gradient.

        For backward passes that never hold all gradients at once. :meth:`step` then moves what is
        left, or nothing. One context a step; neither clipping by the whole norm, nor GradScaler.

            >>> from blr_analysis.learning_rule.optim import IVON
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = IVON(model.parameters(), lr=0.1, ess=10)
            >>> for p in model.parameters():
            ...     _ = p.register_post_accumulate_grad_hook(optimizer.step_param)
            >>> with optimizer.sampled_params(train=True):
            ...     model(torch.ones(1, 2)).sum().backward()
            >>> model.weight.grad is None, optimizer.state[model.weight]["step"]
            (True, 1)

        Raises:
            OptimizerError: outside of a draw, after another draw since the last step, for rows that
                read single examples or take two passes; a gradient that is not finite.
        """
        draw = self._open
        if draw is None or not draw.train or self._gathered.count or self.sync:
            raise OptimizerError("step_param() belongs inside the one draw of a step, without sync")
        if self._needs_all_gradients:
            raise OptimizerError(f"{self.algorithm} needs all gradients before it steps")
        if param.grad is None:
            return
        with plain_tensors():
            group = draw.groups[param]
            self._gathered.add(draw.take(param))
            try:
                if self._gathered.find_unusable(1.0) is not None:
                    raise OptimizerError(f"{self._describe(param)} got NaN or inf: lower lr")
                self._move_group(group, [param], 1.0)
            finally:
                self._gathered.clear()
        param.grad = None
        self._fused = True

    def _update(self, inverse_scale: float) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p in self._gathered.estimates]
            self._move_group(group, params, inverse_scale)

    def _move_group(self, group: Group, params: list[Tensor], inverse_scale: float) -> None:
        """Move parameters of a group; before their first step ``hess`` is ``hess_init``."""
        for param in params:
            if not self.state.get(param):
                like = {"dtype": state_dtype(param), "memory_format": torch.preserve_format}
                values = {"hess": group["hess_init"], "momentum": 0.0, "moved": 0.0}
                full = {name: torch.full_like(param, values[name], **like) for name in self._kept}
                self.state[param] = {"step": 0, **full}
            self.state[param]["step"] += 1
        alike = group_by(params, lambda p: (p.device, p.dtype, self.state[p]["step"]))
        for batch in alike.values():
            self._move(batch, self._law(group), inverse_scale)

    def _move(self, params: Sequence[Tensor], law: Law, inverse_scale: float) -> None:
        """One step of parameters that are alike in device, dtype and count."""
        curvature, move, settings = law
        estimates = [self._gathered.estimates[p] for p in params]
        count, dtype = self.state[params[0]]["step"], state_dtype(params[0])
        columns = {
            "theta": list(params),
            "grad": [e.grad.detach() for e in estimates],
            **{name: [self.state[p][name] for p in params] for name in self._kept},
        }
        if sources := [e.source for e in estimates if e.source is not None]:
            columns["source"] = sources
        averaged = estimates[0].averaged
        factor = inverse_scale ** DEGREES[self._gathered.method]

        def work(*block: list[Tensor]) -> None:
            named = dict(zip(columns, block, strict=True))
            grad = _scaled([g.to(dtype) for g in named["grad"]], inverse_scale)
            evidence = named.get("source", [])
            if averaged:
                evidence = _scaled(evidence, factor)
            elif evidence:  # noise, of one draw
                torch._foreach_mul_(evidence, grad)
            held = [named.get(name, []) for name in KEPT]
            step(Block(named["theta"], grad, evidence, *held), curvature, move, settings, count)

        for_blocks(work, list(columns.values()))


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return tensors if factor == 1 or not tensors else list(torch._foreach_mul(tensors, factor))
