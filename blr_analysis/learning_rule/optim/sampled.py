"""What an optimizer needs that takes its gradients at weights drawn from its posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from blr_analysis.errors import OptimizerError
from blr_analysis.learning_rule.optim.blocks import Buffers
from blr_analysis.learning_rule.optim.checkpoint import (
    STEADY,
    add_gathered,
    check_loadable,
    restore,
    without_gathered,
)
from blr_analysis.learning_rule.optim.draws import Draw
from blr_analysis.learning_rule.optim.gathered import Gathered
from blr_analysis.learning_rule.optim.ranks import (
    average_over_ranks,
    is_distributed,
    true_on_any_rank,
)
from blr_analysis.learning_rule.optim.settings import check_closure


class SampledOptimizer(torch.optim.Optimizer):
    """Draws, the estimates gathered from them, loss scales, processes, checkpoints.

    A rule derives from it and writes :meth:`_update`, which moves mean and state by the estimates
    in ``self._gathered``. Groups have ``ess``, ``weight_decay``, ``hess_init`` and ``hess_approx``.
    ``_steady`` names what it keeps of each parameter; ``_own_scale`` says whether
    ess·(hess + weight_decay) is a precision, which is positive.
    """

    _steady: tuple[str, ...] = STEADY
    _own_scale = True

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        mc_samples: int,
        sync: bool,
        generator: torch.Generator | None,
    ) -> None:
        self.mc_samples = mc_samples
        self.sync = sync
        self.generator = generator
        self._begin_fresh()
        super().__init__(params, defaults)

    def _begin_fresh(self) -> None:
        self._buffers = Buffers()
        self._gathered = Gathered(self._buffers)
        self._open: Draw | None = None
        self._drawn = 0

    def _update(self, inverse_scale: float) -> None:
        """Move every parameter that has an estimate; gradients still to be multiplied."""
        raise NotImplementedError

    # Drawing ---------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """The model with weights drawn from q inside the context, and with their mean after it.

        With ``train=True`` the gradients at the end of the context are one draw of the next
        :meth:`step`. The mean comes back bit for bit, also when the body raises; then the draw
        and its gradients are dropped.

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
        try:
            yield
            self._finish(draw)
        except BaseException:  # also an interrupt while the means are put back
            self._abandon(draw)
            raise

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if self._open is not None:
            if not (self._open.adoptable and train):
                raise OptimizerError(
                    "sampled_params() inside sampled_params(): leave the first context before "
                    "the weights are drawn again"
                )
            self._open.adoptable = False
            return self._open
        return self._begin(self._new_draw(train, adoptable))

    def _new_draw(self, train: bool, adoptable: bool) -> Draw:
        return Draw(train, adoptable)

    def _begin(self, draw: Draw) -> Draw:
        with torch.inference_mode(False), torch.no_grad():
            if draw.train:
                self._gathered.begin()
            draw.fill(self.param_groups, self.state, self._buffers, self.generator)
            if draw.numel != self._drawn:  # something was frozen or added: other sizes from now on
                self._buffers.clear()
                self._drawn = draw.numel
            self._open = draw
            try:
                draw.perturb()
            except BaseException:
                self._abandon(draw)
                raise
        return draw

    def _restore(self, draw: Draw) -> None:
        draw.restore(self._buffers)
        self._open = None

    def _abandon(self, draw: Draw) -> None:
        if self._open is draw or not draw.closed:
            with torch.inference_mode(False), torch.no_grad():
                self._restore(draw)
                self._drop(draw)

    def _drop(self, draw: Draw) -> None:
        if draw.train:
            self._gathered.drop(draw)
        else:
            self._buffers.give(draw.noise_buffers)

    def _finish(self, draw: Draw) -> None:
        if draw.closed:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._restore(draw)
            if not draw.train:
                self._drop(draw)
                return
            try:
                self._gathered.add(draw)
            except BaseException:
                self._drop(draw)
                raise

    # Stepping --------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move mean and precision by the draws since the last step.

        A ``closure`` clears the gradients, computes the loss, calls ``backward`` and returns the
        loss. It is called ``mc_samples`` times, each time with newly drawn weights, whether or
        not it opens ``sampled_params(train=True)`` itself; the mean loss is returned.

        Raises:
            OptimizerError: there is no draw; a gradient is not finite; inside ``sampled_params``.
        """
        if self._open is not None:
            raise OptimizerError("step() inside sampled_params(): leave the context first")
        check_closure(closure)
        with torch.inference_mode(False), torch.no_grad():
            try:
                loss = None if closure is None else self._evaluate(closure)
                self._step()
            finally:
                self._gathered.clear()
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        losses = []
        for _ in range(self.mc_samples):
            draw = self._draw(True, adoptable=True)
            try:
                with torch.enable_grad():
                    losses.append(closure())
                self._finish(draw)
            except BaseException:
                self._abandon(draw)
                raise
        return None if losses[0] is None else sum(losses) / len(losses)

    def _step(self) -> None:
        gathered = self._gathered
        if not gathered.count:
            raise OptimizerError(
                "step() without a draw: run the forward and backward pass inside "
                "`with optimizer.sampled_params(train=True):`, or pass a closure"
            )
        # GradScaler lends these two for the time of the call; the scale is None after unscale_.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        skip = found_inf is not None and bool(found_inf > 0)
        methods = {p: group["hess_approx"] for group in self.param_groups for p in group["params"]}
        together = self.sync and is_distributed()
        if true_on_any_rank([skip], next(iter(methods)).device)[0] if together else skip:
            return
        gathered.adopt()
        if together or gathered.count > 1 or gathered.is_settled:
            gathered.settle()
        if together:
            gathered.scale_by(inverse_scale)
            inverse_scale = 1.0
            average_over_ranks(gathered, list(methods), list(methods.values()))
        if found_inf is None and (bad := gathered.find_unusable(inverse_scale)) is not None:
            raise OptimizerError(
                f"the gradient of {self._describe(bad)} holds NaN or inf, or is so large that its "
                "square might overflow; weights and state are as before the step. Look for the "
                "cause in loss or data, lower lr, raise hess_init, clip gradients, or use a "
                "GradScaler, which skips such steps"
            )
        self._update(inverse_scale)

    def _describe(self, param: Tensor) -> str:
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is param:
                    name = group.get("param_names", {index: f"parameter {index}"})[index]
                    return f"{name} of group {number} (shape {tuple(param.shape)})"
        return f"a parameter of shape {tuple(param.shape)}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. The draws gathered for the next step stay; see :meth:`drop_draws`."""
        if not set_to_none:
            self._gathered.keep_zeros_apart()
        super().zero_grad(set_to_none)

    def drop_draws(self) -> None:
        """Forget the draws since the last step: of a minibatch that is to be skipped, say."""
        if self._open is not None:
            raise OptimizerError("drop_draws() inside sampled_params(): leave the context first")
        self._gathered.clear()

    # Saving ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with ``hess``, ``momentum`` and ``step`` of each parameter, the draws
        gathered for the next step, and the state of ``generator``.

        Raises:
            OptimizerError: inside ``sampled_params``, where the weights are not the mean.
        """
        if self._open is not None:
            raise OptimizerError("state_dict() inside sampled_params(): leave the context first")
        with torch.inference_mode(False), torch.no_grad():
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
        if self._open is not None:
            raise OptimizerError("load_state_dict() inside sampled_params(): leave it first")
        if not isinstance(state_dict, Mapping):
            raise OptimizerError(
                f"this is no optimizer state: {state_dict!r}; load a state_dict() of this class"
            )
        hooked: dict[str, Any] = {}

        def split(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            check_loadable(loaded, self.param_groups, self._steady, positive=self._own_scale)
            hooked.update(loaded)
            return without_gathered(loaded)

        handle = self.register_load_state_dict_pre_hook(split)  # after the user's own
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        with torch.inference_mode(False), torch.no_grad():
            self._gathered.clear()
            restore(hooked, self.param_groups, self.state, self._gathered, self.generator)

    def __getstate__(self) -> dict[str, Any]:
        if self._open is not None or self._gathered.count:
            raise OptimizerError("copy the optimizer after step(), or use state_dict()")
        kept = ("mc_samples", "sync", "generator")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_gathered" not in self.__dict__:  # a copy, not load_state_dict
            self._begin_fresh()
