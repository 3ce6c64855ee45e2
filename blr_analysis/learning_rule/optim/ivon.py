"""IVON, the improved variational online Newton method, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blr_analysis.errors import InputError, OptimizerError
from blr_analysis.learning_rule.optim.blocks import Buffers, group_by
from blr_analysis.learning_rule.optim.draws import Draw, state_dtype
from blr_analysis.learning_rule.optim.gathered import Gathered
from blr_analysis.learning_rule.optim.ivon_checks import (
    check_hyperparameters,
    check_loadable,
    check_mc_samples,
    check_parameters,
)
from blr_analysis.learning_rule.optim.ivon_rule import start_state, update_group


class IVON(torch.optim.Optimizer):
    r"""Learn a Gaussian q(θ) = N(m, 1/S) over the weights at about the cost of AdamW.

    The weights of the model are the mean m. The precision is

        S = ess · (hess + weight_decay),

    one number per weight, with ``hess`` in ``state[p]["hess"]``, ``ess`` the number N of training
    examples and ``weight_decay`` = δ/N for prior precision δ, when the loss is a mean over
    examples. Each step averages, over the draws θ = m + ε since the last step, the gradient and
    the curvature estimate ess·(hess + weight_decay)·ε·gradient (``"price"``) or ess·gradient²
    (``"gradsq"``), and moves ``hess`` and m (:mod:`~blr_analysis.learning_rule.optim.ivon_rule`
    has the equations).

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1)
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = IVON(model.parameters(), lr=0.1, ess=50)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # weights drawn from q
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(model(x), y)
        ...         loss.backward()
        ...     optimizer.step()                               # weights are the mean again
        >>> optimizer.state[model.weight]["hess"].shape
        torch.Size([1, 3])

    Arguments and defaults are those of the package ``ivon-opt``, with the same noise the results
    too; all but ``params``, ``mc_samples``, ``sync`` and ``generator`` can be set per group.

    Args:
        params: parameters, named parameters or groups, real and floating-point; any mix of
            devices and dtypes.
        lr: step size; multiplied by ``hess_init + weight_decay`` if ``rescale_lr``.
        ess: effective sample size λ, usually the number of training examples.
        hess_init: ``hess`` before the first step. The hyperparameter to tune.
        beta1: decay of the momentum, in [0, 1).
        beta2: 1 − step size of ``hess``, in [0, 1].
        weight_decay: δ/ess, added to ``hess`` and pulling m to zero.
        mc_samples: how often ``step(closure)`` calls the closure. Without a closure every
            ``sampled_params(train=True)`` since the last step counts as one draw.
        hess_approx: ``"price"`` or ``"gradsq"``.
        clip_radius: bound on each element of the step before ``lr``.
        sync: average gradient and curvature estimates over all processes of
            ``torch.distributed`` in ``step`` (nothing happens if it is not initialised). Seed
            each process differently, so that they draw different weights.
        debias: divide the momentum by 1 − beta1^t, t the steps of that parameter.
        rescale_lr: see ``lr``.
        generator: draws the noise, on its own device, and is saved and restored with the state.
            By default torch's global generators, which are the user's to save.

    Behaviour:

    * *Accumulation.* Several backward passes in one context add up, as always in torch: divide
      their losses by their number. Several contexts are averaged. What stood in ``p.grad`` when
      the first context of a step began counts as its first backward pass, so call ``zero_grad``
      inside or before it.
    * *Changing gradients.* After a context ``p.grad`` holds the mean gradient over the draws.
      ``clip_grad_norm_`` and the like act on it and, by the same factor, on the curvature.
    * *Mixed precision.* ``scaler.step(optimizer)`` with a ``torch.amp.GradScaler``, with or
      without ``scaler.unscale_(optimizer)`` after the last context: gradient and curvature are
      unscaled before they are used, and a step that the scaler skips changes nothing and drops
      its draws. A scale must not change (``scaler.update()``) between the draws of one step.
    * *Half-precision weights* keep ``hess``, ``momentum`` and the noise in float32; the weights
      are rounded once when perturbed and once when updated.
    * *Left alone:* frozen parameters are neither perturbed nor updated, parameters without a
      gradient not updated. State is made at the first step of a parameter.
    * *Failures.* If the body of a context raises, the weights come back bit for bit, and that
      draw and its gradients are dropped. A gradient with NaN or inf makes ``step`` raise and drop
      its draws; weights and state stay. (On a GPU this check waits for the gradients.)
    * *Resuming.* ``state_dict()`` holds everything, draws gathered for the next step included,
      and ``load_state_dict`` copies it: training goes on with the same bits.

    Raises:
        InputError: a hyperparameter or parameter is out of range.
        OptimizerError: no draw before ``step``; nested contexts; a sparse or non-finite gradient;
            a state that does not fit.

    Source: Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
    Algorithm 1; the curvature step is from Lin et al., ICML 2020.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to step()

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        hess_init: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        weight_decay: float = 1e-4,
        mc_samples: int = 1,
        hess_approx: str = "price",
        clip_radius: float = math.inf,
        sync: bool = False,
        debias: bool = True,
        rescale_lr: bool = True,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "ess": ess,
            "hess_init": hess_init,
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": weight_decay,
            "hess_approx": hess_approx,
            "clip_radius": clip_radius,
            "debias": debias,
            "rescale_lr": rescale_lr,
        }
        check_hyperparameters(defaults)
        check_mc_samples(mc_samples)
        if not isinstance(params, Tensor):
            params = list(params)
            if not params:
                raise InputError("params is empty; pass model.parameters()")
        self.mc_samples = mc_samples
        self.sync = sync
        self.generator = generator
        self._begin_fresh()
        super().__init__(params, defaults)

    def _begin_fresh(self) -> None:
        self._buffers = Buffers()
        self._gathered = Gathered(self._buffers)
        self._open: Draw | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with every hyperparameter and parameter checked (:class:`InputError`)."""
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), set):
            params = param_group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            param_group = {**param_group, "params": params}
            check_parameters(params)
            check_hyperparameters({**self.defaults, **param_group})
        self._buffers.clear()
        super().add_param_group(param_group)

    # Drawing ---------------------------------------------------------------------------------

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """The model with weights drawn from q inside the context, and with their mean after it.

        With ``train=True`` the gradients at the end of the context are one draw of the next
        :meth:`step`. The mean comes back bit for bit, also when the body raises; then the draw
        and its gradients are dropped.

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
        except BaseException:
            self._abandon(draw)
            raise
        self._finish(draw)

    def _draw(self, train: bool, adoptable: bool = False) -> Draw:
        if self._open is not None:
            if not (self._open.adoptable and train):
                raise OptimizerError(
                    "sampled_params() inside sampled_params(): leave the first context before "
                    "the weights are drawn again"
                )
            self._open.adoptable = False
            return self._open
        with torch.inference_mode(False), torch.no_grad():
            if train:
                self._gathered.begin()
            draw = Draw(train, adoptable)
            draw.fill(self.param_groups, self.state, self._buffers, self.generator)
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
        if not draw.closed:
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
            OptimizerError: there is no draw; a gradient is not finite; ``unscale_`` was called
                between the draws of the step; inside ``sampled_params``.
        """
        if self._open is not None:
            raise OptimizerError("step() inside sampled_params(): leave the context first")
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
            except BaseException:
                self._abandon(draw)
                raise
            self._finish(draw)
        return None if losses[0] is None else sum(losses) / len(losses)

    def _step(self) -> None:
        gathered = self._gathered
        if not gathered.count:
            raise OptimizerError(
                "step() without a draw: run the forward and backward pass inside "
                "`with optimizer.sampled_params(train=True):`, or pass a closure"
            )
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        together = self.sync and dist.is_available() and dist.is_initialized()
        skip = found_inf is not None and bool(found_inf > 0)
        if (self._any_rank([skip])[0] if together else skip):
            return
        if together or gathered.count > 1:
            gathered.settle()
        if found_inf is not None and scale is None and gathered.count > 1 and not gathered.rescaled:
            raise OptimizerError(
                "scaler.unscale_(optimizer) was called before the last draw of this step, whose "
                "gradients are therefore scaled unlike the others; call it after the last draw"
            )
        inverse_scale = 1.0 if scale is None else 1.0 / float(scale)
        if together:
            gathered.scale_by(inverse_scale)
            inverse_scale = 1.0
            self._average_over_ranks()
        if found_inf is None:
            self._check_finite()
        for group in self.param_groups:
            for param in group["params"]:
                if param in gathered.estimates and param not in self.state:
                    self.state[param] = start_state(param, group["hess_init"])
            update_group(group, self.state, gathered.estimates, inverse_scale)
