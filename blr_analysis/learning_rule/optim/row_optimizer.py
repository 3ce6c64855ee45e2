"""Any elementwise row of the table as a ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.curvature import GAUSS_NEWTON, NO_CURVATURE
from blr_analysis.learning_rule.expectations import AT_ADVERSARY
from blr_analysis.learning_rule.optim.draws import Draw
from blr_analysis.learning_rule.optim.per_example import PerExample
from blr_analysis.learning_rule.optim.sampled import SampledOptimizer
from blr_analysis.learning_rule.optim.settings import (
    check_generator,
    check_mc_samples,
    check_parameters,
    check_settings,
    listed,
    read_group,
)
from blr_analysis.learning_rule.optim.update import Law, start_state, update_group
from blr_analysis.learning_rule.table import Row, row, runs_elementwise


class MeanDraw(Draw):
    """The mean itself, for rows that look there: nothing is perturbed."""

    def fill(
        self,
        groups: Any,
        state: Any,
        buffers: Any,
        generator: torch.Generator | None,
    ) -> None:
        for group in groups:
            trainable = [p for p in group["params"] if p.requires_grad]
            self.params += trainable
            self.methods += [group["hess_approx"]] * len(trainable)

    def perturb(self) -> None:
        pass

    def restore(self, buffers: Any) -> None:
        self.closed = True


class RowOptimizer(SampledOptimizer):
    r"""Run a row of Table 1 over Gaussians: gradient descent to IVON, by the row's own words.

    The arithmetic is :func:`blr_analysis.learning_rule.moves.step` for all of them. :class:`IVON`,
    :class:`VOGN`, :class:`OGN`, :class:`Vadam`, :class:`Vprop` and :class:`BSAM` are this class
    with their row, their defaults and what they need beside it; where torch has an optimizer of
    the name, that is the better tuned code, and equal to it.

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
    ``damping`` can be set per group, and torch's schedulers change ``lr``; ``OneCycleLR`` and
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
        eps: added to the root, for RMSprop, Adam, AdamW.
        radius: how far bSAM's adversary goes (ρ of its paper).
        damping: added to bSAM's estimate of the Hessian (γ of its paper).
        mc_samples: how often ``step(closure)`` calls the closure.
        sync: average gradients and curvature over the processes of ``torch.distributed``.
        generator: draws the noise and is saved with the state; None: torch's global ones.
        model: the model that is called in training; only for rows that need the gradient of each
            example (OGN, VOGN), which they read from it.
        loss_reduction: ``"mean"`` or ``"sum"``: how the loss combines the examples of a minibatch;
            of a sum the gradients are divided by the number of examples. Only with ``model``.

    Raises:
        InputError: a row that is not elementwise; a setting or parameter out of range; no model
            where one is needed.
        OptimizerError: as :class:`IVON`; and a layer whose per-example gradients cannot be read.
    """

    _two_looks = False
    examples: PerExample | None = None

    def __init__(
        self,
        params: Any,
        row: Row | str,
        lr: float,
        ess: float = 1.0,
        *,
        weight_decay: float = 0.0,
        hess_init: float = 0.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        radius: float = 0.05,
        damping: float = 0.1,
        mc_samples: int = 1,
        sync: bool = False,
        generator: torch.Generator | None = None,
        model: nn.Module | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        accepted = self._accepted(row)
        settings = {
            "lr": lr,
            "ess": ess,
            "weight_decay": weight_decay,
            "hess_init": hess_init,
            "beta1": beta1,
            "beta2": beta2,
            "hess_approx": accepted.curvature.method,
        }
        if accepted.move.damping == "eps":
            settings["eps"] = eps
        if accepted.look == AT_ADVERSARY:
            settings |= {"radius": radius, "damping": damping}
        self.examples = self._reader(accepted, model, loss_reduction)
        self._set_up(params, accepted, settings, mc_samples, sync, generator)

    def _set_up(
        self,
        params: Any,
        row: Row,
        settings: dict[str, Any],
        mc_samples: int,
        sync: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.row = row
        check_mc_samples(mc_samples)
        check_generator(generator)
        defaults = {**settings, "algorithm": row.algorithm}
        self._check_settings(defaults)
        super().__init__(listed(params), defaults, mc_samples, sync, generator)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` for a setting out of its range."""
        check_settings(settings, self.row.algorithm, samples=self._own_scale)

    def _accepted(self, given: Row | str) -> Row:
        found = given if isinstance(given, Row) else row(given)
        if found.look == AT_ADVERSARY and not self._two_looks:
            raise InputError(f"{found.algorithm} takes two gradients a step: use BSAM")
        if not runs_elementwise(found):
            raise InputError(
                f"{found.algorithm} ({found.family}, curvature {found.curvature.name}) is no "
                f"elementwise row: {found.runs} runs it"
            )
        return found

    def _reader(self, row: Row, model: nn.Module | None, reduction: str) -> PerExample | None:
        needed = row.curvature == GAUSS_NEWTON
        if needed and not isinstance(model, nn.Module):
            raise InputError(
                f"{row.algorithm} needs the gradient of each example: pass model=model, the "
                "module that is called in training"
            )
        if not needed and model is not None:
            raise InputError(f"{row.algorithm} reads nothing from the model: leave it out")
        return PerExample(model, reduction, row.algorithm) if model is not None else None

    # What the base class asks ----------------------------------------------------------------

    @property
    def _steady(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("step", *self._kept)

    @property
    def _kept(self) -> tuple[str, ...]:
        hess = () if self.row.curvature == NO_CURVATURE else ("hess",)
        return (*hess, "momentum") if self.row.move.momentum != "none" else hess

    @property
    def _own_scale(self) -> bool:  # type: ignore[override]
        """Whether ess·(hess + weight_decay) is the precision of a posterior."""
        return self.row.look.noisy or self.row.curvature == GAUSS_NEWTON

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every setting and parameter checked (:class:`InputError`)."""
        param_group = read_group(param_group)
        check_parameters(param_group["params"], self.row.algorithm)
        self._check_settings({**self.defaults, **param_group})
        self._buffers.clear()
        super().add_param_group(param_group)

    def _new_draw(self, train: bool, adoptable: bool) -> Draw:
        if train:
            return Draw(True, adoptable) if self.row.look.noisy else MeanDraw(True, adoptable)
        if not self._own_scale:
            raise OptimizerError(
                f"{self.row.algorithm} learns no posterior to draw weights from; "
                "Posterior.from_optimizer or fit_laplace makes one"
            )
        return Draw(False)

    def _check_groups(self) -> None:
        """What was sound when it was given may have been changed since."""
        for group in self.param_groups:
            self._check_settings(group)

    def _begin(self, draw: Draw) -> Draw:
        self._check_groups()
        draw = super()._begin(draw)
        if draw.train and self.examples is not None:
            try:
                self.examples.start(draw.params)
            except BaseException:
                self._abandon(draw)
                raise
        return draw

    def _abandon(self, draw: Draw) -> None:
        if self.examples is not None:
            self.examples.stop()
        super()._abandon(draw)

    def _finish(self, draw: Draw) -> None:
        if draw.train and not draw.closed and self.examples is not None:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    draw.given = self.examples.finish()
            except BaseException:
                self._abandon(draw)
                raise
        super()._finish(draw)

    def _step(self) -> None:
        self._check_groups()
        if not self._gathered.count and not self.row.look.noisy and self.examples is None:
            draw = MeanDraw(True)
            draw.fill(self.param_groups, self.state, self._buffers, self.generator)
            self._gathered.add(draw)  # a plain backward pass was one look at the mean
        super()._step()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "row": self.row, "examples": self.examples}

    def _law(self, group: Mapping[str, Any]) -> Law:
        """What moves this group."""
        row = self.row
        return Law(row.curvature, row.move, group, self._kept, row.look.noisy)

    def _update(self, inverse_scale: float) -> None:
        estimates = self._gathered.estimates
        for group in self.param_groups:
            law = self._law(group)
            for param in group["params"]:
                if param in estimates and param not in self.state:
                    self.state[param] = start_state(param, law)
            update_group(group["params"], law, self.state, estimates, inverse_scale)
