"""Any elementwise row of the table as a ``torch.optim.Optimizer``: draws, steps, checkpoints.

The arithmetic is :func:`blr_analysis.learning_rule.moves.step` for all rows. A class that derives
from :class:`RowOptimizer` names its row and the signature that users type; what the signature
holds beside the parameters becomes the settings of the groups (:mod:`.settings`).
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from blr_analysis import ranks
from blr_analysis.checks import positive_number
from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.expectations import (
    AT_ADVERSARY,
    DIAGONAL_MAGNITUDE,
    GAUSS_NEWTON,
    NO_CURVATURE,
    HessianEstimate,
)
from blr_analysis.learning_rule.moves import Block, Move, step
from blr_analysis.learning_rule.optim.checkpoint import (
    HINT,
    KEPT,
    add_gathered,
    check_loadable,
    restore,
    steady,
)
from blr_analysis.learning_rule.optim.draws import (
    DEGREES,
    Buffers,
    Draw,
    Gathered,
    Group,
    Look,
    NoGradient,
    for_blocks,
    group_by,
    mean_over_ranks,
    method_of,
    plain_tensors,
    state_dtype,
)
from blr_analysis.learning_rule.optim.per_example import HessianDiagonal, PerExampleSquares
from blr_analysis.learning_rule.optim.settings import (
    Setting,
    check_arguments,
    check_closure,
    check_group,
    group_defaults,
    listed,
    read_group,
)
from blr_analysis.learning_rule.table import Row, row, runs_elementwise

Law = tuple[HessianEstimate, Move, Mapping[str, Any]]
"""What moves a group: curvature, move, and the settings that both read."""


class RowOptimizer(torch.optim.Optimizer):
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

    _ranges: ClassVar[Mapping[str, Setting]] = {}  # narrower than those of every row
    _two_looks = False
    _look: Any = None  # a Look: what the loss sees in training in the place of the parameters
    _sample: Any = None  # and as a draw of the posterior

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

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
        foreach: bool | None = None,
        model: nn.Module | None = None,
        loss_reduction: str = "mean",
    ) -> None:
        self._set_up(self._accepted(row), locals())

    def _set_up(self, row: Row, given: Mapping[str, Any]) -> None:
        """Begin with the arguments of a signature, by name."""
        self.row = row
        self.mc_samples, self.sync = given["mc_samples"], given["sync"]
        self.generator = given.get("generator")
        check_arguments(self.mc_samples, self.generator)
        self.examples = self._reader(given.get("model"), given.get("loss_reduction", "mean"))
        self._begin_fresh()
        super().__init__(listed(given["params"]), group_defaults(row, given))

    def _accepted(self, given: Row | str) -> Row:
        accepted = given if isinstance(given, Row) else row(given)
        if accepted.look == AT_ADVERSARY and not self._two_looks:
            raise InputError(f"{accepted.algorithm} takes two gradients a step: use BSAM")
        if not runs_elementwise(accepted):
            raise InputError(f"{accepted.algorithm} is no elementwise row: {accepted.runs} runs it")
        return accepted

    def _reader(
        self, model: nn.Module | None, reduction: str
    ) -> PerExampleSquares | HessianDiagonal | None:
        algorithm, needed = self.row.algorithm, self.row.curvature == GAUSS_NEWTON
        if needed and not isinstance(model, nn.Module):
            raise InputError(f"{algorithm} needs the gradient of each example: pass model=model")
        if not needed and model is not None:
            raise InputError(f"{algorithm} reads nothing from the model: leave it out")
        if self.row.curvature == DIAGONAL_MAGNITUDE:
            return HessianDiagonal(self.generator)
        return PerExampleSquares(model, reduction, algorithm) if model is not None else None

    def _begin_fresh(self) -> None:
        self._buffers = Buffers()
        self._gathered = Gathered(self._buffers)
        self._open: Draw | None = None
        self._fused = False  # parameters were moved by step_param since the last step
        self._cleared = False  # zero_grad was called since the draw

    # Settings --------------------------------------------------------------------------------

    @property
    def _kept(self) -> tuple[str, ...]:
        """The tensors in the state of each parameter."""
        held = (self.row.curvature != NO_CURVATURE, self.row.move.momentum != "none")
        return tuple(compress(KEPT, (*held, self.row.move.rescaled)))

    @property
    def _own_scale(self) -> bool:
        """Whether ess·(hess + weight_decay) is the precision of a posterior."""
        return self.row.look.noisy or self.row.curvature in (GAUSS_NEWTON, DIAGONAL_MAGNITUDE)

    def _is_noisy(self, train: bool) -> bool:
        """Whether Gaussian noise is added to the parameters."""
        return self.row.look.noisy if train else self._own_scale

    @property
    def _needs_draw(self) -> bool:
        """Whether a plain backward pass, outside of a draw, is no look at the loss."""
        return self.row.look.noisy or self._look is not None or self.examples is not None

    @property
    def _needs_all_gradients(self) -> bool:
        """Whether no parameter can be moved before the others have their gradients."""
        return self.examples is not None or self._two_looks

    def _check_group(self, group: Group) -> None:
        """Raise :class:`InputError` for a group that cannot be used."""
        check_group(group, self.row.algorithm, self._ranges, samples=self._own_scale)

    def _check_groups(self) -> None:
        """What was sound when it was given may have been changed since."""
        for group in self.param_groups:
            self._check_group(group)

    def _law(self, group: Group) -> Law:
        return self.row.curvature, self.row.move, group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every setting and parameter checked (:class:`InputError`)."""
        group = read_group(param_group, self.row.algorithm)
        self._check_group({**self.defaults, **group})
        super().add_param_group(group)

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
            raise OptimizerError(
                f"{self.row.algorithm} learns no posterior to draw from; fit_laplace makes one"
            )
        look = self._look if train else self._sample
        return Draw(train, self._is_noisy(train), look, adoptable)

    def _shown(self, look: Look) -> AbstractContextManager[None]:
        """The model with the weights that ``look`` makes of the parameters."""
        return self._at(Draw(False, look=look))

    @contextmanager
    def _at(self, draw: Draw) -> Iterator[None]:
        """The model at the weights of ``draw``, which may be open already."""
        if draw is not self._open:
            self._begin(draw)
        try:
            yield
            self._finish(draw)
        except BaseException:  # also an interrupt while the means are put back
            self._abandon(draw)
            raise

    def _begin(self, draw: Draw) -> None:
        self._refuse_inside("another context")
        self._check_groups()
        with plain_tensors():
            if draw.train:
                self._gathered.begin()
            draw.fill(self.param_groups, self.state, self._buffers, self.generator)
            self._open = draw
            try:
                draw.perturb(self.generator)
                if draw.train and self.examples is not None:
                    self.examples.start([*draw.groups])
            except BaseException:
                self._abandon(draw)
                raise

    def _finish(self, draw: Draw) -> None:
        if draw.closed:  # by a context inside the closure
            return
        with plain_tensors():
            moved = self._fused and all(p.grad is None for p in draw.groups)
            if draw.train and self.examples is not None:
                draw.given = self.examples.finish()
                if draw.divided_by != 1:
                    scale = draw.divided_by ** DEGREES[self.row.curvature.method]
                    draw.given = {p: s * scale for p, s in draw.given.items()}
            draw.restore(self._buffers)
            self._close(draw)
            if moved or not draw.train:
                self._gathered.drop(draw)
                return
            try:
                draw.carry_gradients()
                self._gather(draw)
            except BaseException:
                self._gathered.drop(draw)
                raise

    def _gather(self, draw: Draw) -> None:
        self._gathered.add(draw)

    def _close(self, draw: Draw) -> None:
        self._open, draw.closed = None, True

    def _abandon(self, draw: Draw) -> None:
        if self.examples is not None:
            self.examples.stop()
        if not draw.closed:
            with plain_tensors():
                draw.restore(self._buffers)
                self._gathered.drop(draw)
                self._close(draw)

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
        check_closure(closure)
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
            raise OptimizerError(
                "step_param() belongs inside the one sampled_params(train=True), without sync"
            )
        if self._needs_all_gradients:
            raise OptimizerError(f"{self.row.algorithm} needs all gradients before it steps")
        if param.grad is None:
            return
        if group is None:
            group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        with plain_tensors():
            self._gathered.add(draw.take(param))
            try:
                if self._gathered.find_unusable(1.0) is not None:
                    raise OptimizerError(
                        f"the gradient of {self._describe(param)} holds NaN or inf: lower lr"
                    )
                self.state[param] = self.state.get(param) or self._start(param, group)
                self.state[param]["step"] += 1
                self._move([param], self._law(group), 1.0)
            finally:
                self._gathered.clear()
        param.grad = None
        self._fused = True

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
            self._cleared = not self._needs_draw
            loss = closure()
            if not self._cleared and any(p.grad is g and g._version != v for p, g, v in held):
                warnings.warn(
                    "the closure adds to gradients of other weights than this draw's: clear them, "
                    "or in Lightning accumulate with callbacks=[VariationalSteps()]",
                    stacklevel=3,
                )
            return loss

    def _check_draws(self) -> None:
        if self._gathered.count:
            return
        if self._needs_draw:
            raise OptimizerError(
                "step() without a draw: use sampled_params(train=True), or pass a closure"
            )
        draw = Draw(True)  # a plain backward pass was one look at the mean
        draw.fill(self.param_groups, self.state, self._buffers, self.generator)
        self._gathered.add(draw)

    def _settled(self) -> float | None:
        """What the gradients are still to be multiplied by; None if the step is skipped.

        GradScaler lends the optimizer ``found_inf`` and ``grad_scale`` for the time of the call;
        the latter is None after ``unscale_``.
        """
        gathered = self._gathered
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        skip = found_inf is not None and bool(found_inf > 0)
        together = self.sync and ranks.count() > 1
        if together:
            skip = mean_over_ranks([skip], self.param_groups[0]["params"][0].device)[0] > 0
        if skip:
            return None
        gathered.collect(own_memory=together)
        if together:
            gathered.scale_by(inverse_scale)
            inverse_scale = 1.0
            gathered.average_over_ranks(self._methods())
        if found_inf is None and (bad := gathered.find_unusable(inverse_scale)) is not None:
            raise OptimizerError(
                f"the gradient of {self._describe(bad)} holds NaN or inf, or its square might "
                "overflow: nothing was changed; lower lr, or clip"
            )
        return inverse_scale

    def _methods(self) -> dict[Tensor, str]:
        """What is averaged over the draws, by parameter."""
        noisy = self._is_noisy(train=True)
        return {p: method_of(group, noisy) for group in self.param_groups for p in group["params"]}

    def _describe(self, param: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    name = group.get("param_names", {index: f"parameter {index}"})[index]
                    return f"{name} of group {number} (shape {tuple(param.shape)})"
        return f"a parameter of shape {tuple(param.shape)}"

    def _update(self, inverse_scale: float) -> None:
        """Move every parameter that has an estimate; the others stay.

        ``inverse_scale`` undoes a loss scale that still multiplies the gradients.
        """
        estimates = self._gathered.estimates
        for group in self.param_groups:
            params = [p for p in group["params"] if p in estimates]
            for param in params:
                self.state[param] = self.state.get(param) or self._start(param, group)
                self.state[param]["step"] += 1
            alike = group_by(params, lambda p: (p.device, p.dtype, self.state[p]["step"]))
            for batch in alike.values():
                self._move(batch, self._law(group), inverse_scale)

    def _start(self, param: Tensor, group: Group) -> dict[str, Any]:
        """Before the first step: ``hess`` = ``hess_init``, no momentum."""
        like: dict[str, Any] = {"dtype": state_dtype(param), "memory_format": torch.preserve_format}
        values = {"hess": group["hess_init"], "momentum": 0.0, "moved": 0.0}
        full = {name: torch.full_like(param, values[name], **like) for name in self._kept}
        return {"step": 0, **full}

    def _move(self, params: Sequence[Tensor], law: Law, inverse_scale: float) -> None:
        """One step of parameters that are alike in device, dtype, count and evidence."""
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
        settled = estimates[0].settled
        factor = inverse_scale ** DEGREES[estimates[0].method]

        def work(*block: list[Tensor]) -> None:
            named = dict(zip(columns, block, strict=True))
            grad = _scaled([g.to(dtype) for g in named["grad"]], inverse_scale)
            evidence = named.get("source", [])
            if settled:
                evidence = _scaled(evidence, factor)
            elif evidence:  # noise, of one draw
                torch._foreach_mul_(evidence, grad)
            held = [named.get(name, []) for name in KEPT]
            step(
                Block(named["theta"], grad, evidence, *held),
                curvature,
                move,
                settings,
                count,
            )

        for_blocks(work, list(columns.values()))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. The draws gathered for the next step stay; see :meth:`drop_draws`."""
        self._cleared = True
        if not set_to_none:  # no zeros are written into an estimate
            for param, estimate in self._gathered.estimates.items():
                if param.grad is estimate.shown:
                    param.grad = torch.zeros_like(estimate.shown)
        super().zero_grad(set_to_none)

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, the draws
        gathered for the next step, and the state of ``generator``.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are not the mean.
        """
        self._refuse_inside("state_dict()")
        with plain_tensors():
            if self._gathered.count > 1:
                self._gathered.settle()
            return add_gathered(
                super().state_dict(), self.param_groups, self._gathered, self.generator
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, which is copied. A generator's state in it is used if
        this optimizer has a ``generator``.

        Raises:
            OptimizerError: another optimizer's state, or of other parameters; nothing is loaded.
        """
        self._refuse_inside("load_state_dict()")
        if not isinstance(state_dict, Mapping):
            raise OptimizerError(f"{state_dict!r} is no optimizer state; {HINT}")
        hooked: dict[str, Any] = {}

        def split(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            check_loadable(loaded, self.param_groups, self._kept, positive=self._own_scale)
            hooked.update(loaded)
            return steady(loaded)

        handle = self.register_load_state_dict_pre_hook(split)  # after the user's own
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        with plain_tensors():
            self._forget()
            restore(
                hooked,
                self.param_groups,
                self.state,
                self._gathered,
                self._methods(),
                self.generator,
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._open is not None or self._gathered.count:
            raise OptimizerError("copy the optimizer after step(), or use state_dict()")
        kept = ("mc_samples", "sync", "generator", "row", "examples")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_gathered" not in self.__dict__:  # a copy, not load_state_dict
            self._begin_fresh()


def _scaled(tensors: list[Tensor], factor: float) -> list[Tensor]:
    return tensors if factor == 1 or not tensors else list(torch._foreach_mul(tensors, factor))
