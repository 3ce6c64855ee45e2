"""The rows of the table that train networks: weights are drawn, gradients gathered, steps made.

Each part stands in a module of its own:

* :mod:`~blr_analysis.learning_rule.optim.draws`: weights that the loss sees, and the mean again;
* :mod:`~blr_analysis.learning_rule.optim.gathered`: gradients and curvatures of all draws;
* :func:`blr_analysis.learning_rule.moves.step`: the arithmetic of a step, which is called block by
  block (:mod:`~blr_analysis.learning_rule.optim.blocks`);
* :class:`~blr_analysis.learning_rule.optim.row_state.RowState`: settings and state.

A class that derives from :class:`RowOptimizer` names its row and the arguments that users type;
the other arguments become settings of the groups.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.checks import positive_number
from blr_analysis.errors import OptimizerError
from blr_analysis.half import working
from blr_analysis.learning_rule.expectations import HessianEstimate
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
from blr_analysis.learning_rule.optim.per_example import NoGradient
from blr_analysis.learning_rule.optim.row_state import RowState
from blr_analysis.learning_rule.table import Row


class Law(NamedTuple):
    """What moves a group: its curvature, its move, and the settings that both read."""

    curvature: HessianEstimate
    move: Move
    settings: Group


class RowOptimizer(RowState):
    r"""Run a row of Table 1 over Gaussians, from gradient descent to IVON.

    :class:`IVON`, :class:`VOGN`, :class:`OGN`, :class:`Vadam`, :class:`Vprop` and :class:`BSAM`
    derive from this class and add their row, their defaults and what else they need. Where torch
    has an optimizer of the row's name, its steps are the same, and its code is tuned better.

        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(20, 3), torch.randn(20, 1)
        >>> models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
        >>> _ = models[1].load_state_dict(models[0].state_dict())
        >>> ours = RowOptimizer(models[0].parameters(), "Adam", lr=0.01)
        >>> torchs = torch.optim.Adam(models[1].parameters(), lr=0.01)
        >>> for model, optimizer in zip(models, (ours, torchs)):
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...         optimizer.step()
        >>> torch.testing.assert_close(models[0].weight, models[1].weight)

    The loss is a mean over the examples of a minibatch. Rows that look at samples of q, and OGN,
    take their gradients inside ``with optimizer.sampled_params(train=True):`` as IVON does. The
    others may do so, or call ``backward`` and ``step`` as with any optimizer. All of ``lr`` to
    ``eps`` below can be set per group. torch's schedulers change ``lr``; ``OneCycleLR`` and
    ``CyclicLR`` need ``cycle_momentum=False``, because they do not know ``beta1``.

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
        foreach: accepted as by torch's optimizers, and without effect: tensors always move
            together, in blocks.

    Raises:
        InputError: the row is not elementwise; a setting or parameter is out of range; the row
            needs a model.
        OptimizerError: as :class:`IVON`; and a layer whose per-example gradients cannot be read.
    """

    _takes_scaler = True  # whether a GradScaler may scale the loss
    _training_look: Any = None  # a Look: what it makes of the weights, the loss sees in training
    _posterior_look: Any = None  # a Look: the same for a draw of the posterior

    _step_supports_amp_scaling = True  # tells GradScaler that step() unscales gradients itself

    def __init__(
        self, params: Any, row: Row | str, lr: float, ess: float = 1.0, **settings: Any
    ) -> None:
        self._set_up(self._accepted(row), params, lr=lr, ess=ess, **settings)

    def _begin_fresh(self) -> None:
        super()._begin_fresh()
        self._scratch = Scratch()
        self._forget_draws()

    def _is_noisy(self, train: bool) -> bool:
        """Whether noise is added to the weights: in training, or in a draw of the posterior."""
        return self.row.look.noisy if train else self._hess_is_precision

    @property
    def _needs_draw(self) -> bool:
        """Whether gradients count only inside of ``sampled_params(train=True)``."""
        return self.row.look.noisy or self._training_look is not None or self.examples is not None

    # Drawing --------------------------------------------------------------------------------------

    def sampled_params(self, train: bool = False, *, divided_by: float = 1.0) -> Context:
        """The model with weights drawn from q inside the context, and with their mean after it.

        With ``train=True`` the gradients at the end of the context are one draw of the next
        :meth:`step`. The mean comes back bit for bit, also when the body raises; then the draw
        and its gradients are dropped. Several draws are averaged: where every microbatch has a
        context of its own and its loss was divided by their number (training loops that accumulate
        gradients do so), give this number as ``divided_by``.

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
        return self._context_of(self._draw(train), divided_by)

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        """A new draw, or the open one where a closure opens the context that it is called in.

        Args:
            adoptable: whether a training context that opens inside takes this draw as its own.
        """
        if self._open is not None and self._open.adoptable and train:
            self._open.adoptable = False
            return self._open
        has_posterior = self._hess_is_precision or self._posterior_look is not None
        if not train and not has_posterior:
            raise OptimizerError(f"{self.algorithm} learns no posterior: use fit_laplace")
        return Draw(
            train=train,
            noisy=self._is_noisy(train),
            look=self._training_look if train else self._posterior_look,
            adoptable=adoptable,
        )

    def _context_of_look(self, look: Look) -> Context:
        """A context in which the model has the weights that ``look`` makes of the parameters."""
        return self._context_of(Draw(train=False, look=look))

    @contextmanager
    def _context_of(self, draw: Draw, divided_by: float = 1.0) -> Iterator[None]:
        """A context in which the model has the weights of ``draw``.

        Only one context is open at a time, but for a closure that opens the one it is called in.
        """
        draw.divided_by = positive_number("divided_by", divided_by)
        is_opened_by_closure = draw is self._open
        if is_opened_by_closure:
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
        """Put the weights of the draw in the place of the means."""
        self._check_groups()
        with plain_tensors():
            if draw.train:
                self._gathered.begin()
            draw.groups = self._trained()
            if draw.noisy:
                self._draw_noise(draw)
            self._open = draw
            draw.perturb(self._scratch, self.generator)
            if draw.train and self.examples is not None:
                self.examples.start([*draw.groups])

    def _draw_noise(self, draw: Draw) -> None:
        """Draw the noise ε ~ N(0, 1/S), S = ess·(hess + weight_decay), group by group."""
        memory = "noise"
        if self._gathered.count and not draw.train:
            memory = "noise of a prediction"  # the step still needs the noise of the last draw
        by_kind = group_by(draw.groups, lambda p: (id(draw.groups[p]), p.device, working(p.dtype)))
        for (_, device, dtype), params in by_kind.items():
            group = draw.groups[params[0]]
            flat, noises = self._scratch.take(memory, params, dtype)
            first_hess = torch.full((), float(group["hess_init"]), dtype=dtype, device=device)
            hess = [self._hess_of(param, first_hess) for param in params]
            if "prior_decay" in group:
                decays = [self._decay_of(param, group) for param in params]
                hess = list(torch._foreach_add(hess, decays))
            fill_normal(flat, noises, hess, group, self.generator)
            draw.noises.update(zip(params, noises, strict=True))

    def _finish(self, draw: Draw) -> None:
        """Put the means back, and gather the gradients of a training draw."""
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
        """Take the gradients that the draw left in ``p.grad``; subclasses take more or others."""
        self._gathered.add(draw)

    def drop_draws(self) -> None:
        """Forget the draws since the last step, for example to skip a minibatch."""
        self._refuse_inside("drop_draws()")
        self._forget_draws()

    def _forget_draws(self) -> None:
        """Begin to gather for a new step; the draws before it are forgotten.

        Where the curvature is the square of the step's gradient, no curvature is gathered. This
        holds for "fisher", and for "gradsq" at the mean: draws there are parts of one larger
        minibatch, whose gradient is squared.
        """
        method = self.param_groups[0]["hess_approx"]
        is_gradsq_at_mean = method == "gradsq" and not self._is_noisy(train=True)
        if is_gradsq_at_mean or method == "fisher":
            method = "none"
        self._gathered = Gathered(method)

    # Stepping -------------------------------------------------------------------------------------

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
        losses: list[Any] = []
        with plain_tensors():
            try:
                if closure is not None:
                    losses = self._losses(closure)
                self._check_groups()
                self._check_draws()
                if not self._gathered.count:
                    self._gather_plain_pass()
                if not self._is_skipped():
                    self._update(self._settle_gradients())
            finally:
                self._forget_draws()
        has_losses = bool(losses) and losses[0] is not None  # a closure may return nothing
        if not has_losses:
            return None
        return sum(losses) / len(losses)

    def _losses(self, closure: Callable[[], Any]) -> list[Any]:
        """The closure's loss at each of ``mc_samples`` draws.

        Where the caller has made draws before, the closure may do nothing (Lightning's does not);
        then there are no losses.
        """
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
        """The closure's loss at one draw, with a warning where it does not clear the gradients."""
        with self._context_of(draw), torch.enable_grad():
            # A gradient that was not cleared is the same tensor, with a higher count of writes.
            earlier = {p: (p.grad, p.grad._version) for p in draw.groups if p.grad is not None}
            loss = closure()
            adds_to_gradient = any(
                p.grad is grad and grad._version != version
                for p, (grad, version) in earlier.items()
            )
            if self._needs_draw and adds_to_gradient:
                warnings.warn(
                    "the closure adds to gradients of other weights than this draw's: clear them, "
                    "or in Lightning accumulate with callbacks=[VariationalSteps()]",
                    stacklevel=3,
                )
            return loss

    def _check_draws(self) -> None:
        """Raise :class:`OptimizerError` where a step needs a draw and there is none."""
        if not self._takes_scaler and getattr(self, "found_inf", None) is not None:
            raise OptimizerError(f"{self.algorithm} takes no GradScaler: train in bfloat16")
        if self._needs_draw and not self._gathered.count:
            raise OptimizerError("step() without a draw: use sampled_params(train=True)")

    def _gather_plain_pass(self) -> None:
        """Take the gradients of a backward pass at the mean, outside of any context."""
        self._gathered.add(Draw(train=True, groups=self._trained()))

    @property
    def _in_parallel(self) -> bool:
        """Whether gradients are averaged over several processes."""
        return self.sync and ranks.count() > 1

    def _all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _is_skipped(self) -> bool:
        """Whether the scaled gradients overflow, in this process or in another one.

        GradScaler sets ``found_inf`` on the optimizer for the time of the step.
        """
        found_inf = getattr(self, "found_inf", None)
        overflows = found_inf is not None and bool(found_inf > 0)
        if not self._in_parallel:
            return overflows
        device = self._all_params()[0].device
        return mean_over_ranks([overflows], device)[0] > 0

    def _settle_gradients(self) -> float:
        """Finish the gathered gradients, and return the factor that undoes their loss scale.

        GradScaler sets ``grad_scale`` on the optimizer for the time of the step; it is None after
        ``unscale_``. GradScaler has checked its gradients by itself.
        """
        grad_scale = getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        self._gathered.settle(self._in_parallel)
        if self._in_parallel:
            self._gathered.average_over_ranks(self._all_params(), inverse_scale)
            inverse_scale = 1.0
        has_scaler = getattr(self, "found_inf", None) is not None
        if not has_scaler:
            self._gathered.check(inverse_scale)
        return inverse_scale

    def _update(self, inverse_scale: float) -> None:
        """Move every parameter that has a gradient; the others stay.

        Args:
            inverse_scale: a factor that undoes the loss scale of the gradients.
        """
        for group in self.param_groups:
            params = [p for p in group["params"] if p in self._gathered.grads]
            self._move_group(group, params, inverse_scale)

    def _move_group(self, group: Group, params: list[Tensor], inverse_scale: float) -> None:
        """Move these parameters of a group; those that are alike move together."""
        for param in params:
            self._next_state(param, group)
        by_kind = group_by(params, lambda p: (p.device, p.dtype, self.state[p]["step"]))
        for same_kind in by_kind.values():
            self._move_alike(same_kind, self._law(group), inverse_scale)

    def _law(self, group: Group) -> Law:
        """The row's law; a subclass may change it by settings of the group."""
        return Law(self.row.curvature, self.row.move, group)

    def _move_alike(self, params: Sequence[Tensor], law: Law, inverse_scale: float) -> None:
        """One step of parameters that are alike in device, dtype and number of the step."""
        step_number = self.state[params[0]]["step"]
        dtype = working(params[0].dtype)
        columns = self._columns(params, law.settings)

        def move_block(*lists: list[Tensor]) -> None:
            tensors = dict(zip(columns, lists, strict=True))
            block = self._block(tensors, law.settings, inverse_scale, dtype)
            step(block, law.curvature, law.move, law.settings, step_number)

        for_blocks(move_block, list(columns.values()))

    def _columns(self, params: Sequence[Tensor], settings: Group) -> dict[str, Sequence[Tensor]]:
        """What a step reads and changes, by name: one tensor for each parameter.

        "evidence" is what the curvature is estimated from.
        """
        gathered = self._gathered
        columns: dict[str, Sequence[Tensor]] = {
            "theta": params,
            "grad": [gathered.grads[p].detach() for p in params],
        }
        for name in self._state_names_of(settings):
            columns[name] = [self.state[p][name] for p in params]
        if gathered.sources:
            columns["evidence"] = [gathered.sources[p] for p in params]
        return columns

    def _block(
        self,
        tensors: dict[str, list[Tensor]],
        settings: Group,
        inverse_scale: float,
        dtype: torch.dtype,
    ) -> Block:
        """A block for :func:`~blr_analysis.learning_rule.moves.step`, from the columns' tensors.

        Gradients and curvatures are unscaled, squares averaged, and the prior divided by ess.
        """
        gathered = self._gathered
        grad = scaled([g.to(dtype) for g in tensors["grad"]], inverse_scale)
        tensors["grad"] = grad
        if gathered.averaged:
            curvature_scale = inverse_scale ** DEGREES[gathered.method]
            tensors["evidence"] = scaled(tensors.get("evidence", []), curvature_scale)
        elif "evidence" in tensors:  # of one draw it is the noise; noise · gradient is the estimate
            torch._foreach_mul_(tensors["evidence"], grad)
        if "squares" in tensors:
            average_squares(tensors.pop("squares"), grad, settings["beta2"])
        if "prior_precision" in tensors:
            precision = tensors.pop("prior_precision")
            tensors["decay"] = list(torch._foreach_div(precision, settings["ess"]))
            tensors["center"] = tensors.pop("prior_mean")
        return Block(**tensors)

    # Copying --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no draws, no memory for them, and no scheduler's wrapper of ``step``."""
        if self._open is not None or self._gathered.count:
            raise OptimizerError("copy the optimizer after step(), or use state_dict()")
        attributes = vars(self).items()
        return {n: value for n, value in attributes if not n.startswith("_") and n != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_fresh()
