"""IVON, the improved variational online Newton method, as a ``torch.optim.Optimizer``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.checks import one_of, positive_int
from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import FISHER, PRICE, SQUARED_TIMES_ESS
from blr_analysis.learning_rule.optim.draws import Group
from blr_analysis.learning_rule.optim.row_optimizer import Law, RowOptimizer
from blr_analysis.learning_rule.optim.settings import INTERVALS, check_setting, groups_of
from blr_analysis.learning_rule.optim.weight_prior import WeightPrior, typical_decay
from blr_analysis.learning_rule.table import ROWS
from blr_analysis.posterior.posterior import Posterior

DEFAULT_BETA2 = 0.99999
DEFAULT_DECAY = 1e-4
WIDEST = 0.05
"""With ``steps``: the largest standard deviation of q, reached where the data say nothing."""
FEWEST_FOLDS = 1.0
MOST_FOLDS = 5.0
"""With ``steps``: h forgets its start by a factor e^c, with c between these two."""
LONGEST_STEP = 0.05
"""With ``steps``: the largest distance by which a step moves a weight."""
FIRST_RELATIVE_WIDTH = 0.05
"""With ``hess_init="weights"``: the largest standard deviation of q before the first step, divided
by the size of the weights."""
WIDEST_RELATIVE = 0.15
"""With ``hess_init="weights"``: :data:`WIDEST`, divided by the size of the weights."""
CURVATURES = {"price": PRICE, "gradsq": SQUARED_TIMES_ESS, "fisher": FISHER}


def size_of(groups: list[dict[str, Any]]) -> float:
    """The root mean square of the weights; of the matrices alone, where there are any.

    Raises:
        InputError: all weights are 0.
    """
    tensors = [p.detach() for group in groups for p in group["params"]]
    weights = [p for p in tensors if p.ndim > 1] or tensors
    sum_of_squares = sum(float(p.double().square().sum()) for p in weights)
    if sum_of_squares == 0:
        raise InputError('hess_init="weights" needs trained weights; these are all 0')
    return math.sqrt(sum_of_squares / sum(p.numel() for p in weights))


def root_mean_square(gradients: Sequence[Tensor]) -> float:
    """Of the entries that are not 0: embeddings of words that a minibatch lacks have none.

    >>> root_mean_square([torch.tensor([0.0, 3.0]), torch.tensor([4.0, 0.0])]) ** 2
    12.5
    """
    sum_of_squares = sum(float(ranks.whole(g.double().square().sum())) for g in gradients)
    n_entries = sum(int(ranks.whole((g != 0).sum())) for g in gradients)
    return math.sqrt(sum_of_squares / n_entries) if n_entries else 0.0


def hess_init_for(size: float, ess: float) -> float:
    """The ``hess_init`` with which the first draws differ from the weights by 5 % at most.

    The standard deviation of the first draws is about (ess · hess_init)^−½.

    Args:
        size: the size of the weights; see :func:`size_of`.

    Returns:
        1, or more.
    """
    width = FIRST_RELATIVE_WIDTH * size
    return max(1.0, 1 / (ess * width**2))


def beta2_for(
    steps: int | None, ess: float, hess_init: float = 1.0, widest: float = WIDEST
) -> float:
    r"""The β₂ with which h forgets its start in ``steps``: 1 − β₂ = c / steps leaves e^−c of it.

    The larger c is, the more h depends on the data. But where the data say nothing h falls to
    hess_init·e^−c, and the standard deviation of the draws grows to (ess · hess_init · e^−c)^−½. It
    is to stay below ``widest``, which is smaller than the weights: c = log(ess · hess_init ·
    widest²), but at least 1 and at most 5. The relative error of the estimate of h is
    √(c / (2 · epochs)).

    Raises:
        InputError: ``steps`` is no positive whole number.

    Example:
        >>> [round(1000 * (1 - beta2_for(1000, ess)), 2) for ess in (100, 10_000, 1_000_000)]
        [1.0, 3.22, 5.0]
    """
    if steps is None:
        return DEFAULT_BETA2
    n_steps = positive_int("steps", steps)
    c = math.log(float(ess) * float(hess_init) * widest**2)
    c = min(max(c, FEWEST_FOLDS), MOST_FOLDS, n_steps)
    return 1 - c / n_steps


def radius_for(steps: int | None, first_lr: float) -> float:
    """The ``clip_radius`` with which no step moves a weight by more than 0.05.

    Where h of a weight falls faster than its gradient, its steps grow without bound. With the bound
    a larger ``lr`` can be used, with which the other weights learn faster.

    Args:
        first_lr: the factor of the clipped step at the start: ``lr``, or lr · (hess_init +
            weight_decay) with ``rescale_lr``.

    Returns:
        ∞ without ``steps``.

    Example:
        >>> radius_for(1000, 20.0), radius_for(None, 20.0)
        (0.0025, inf)
    """
    if steps is None or first_lr == 0:
        return math.inf
    return LONGEST_STEP / first_lr


class IVON(RowOptimizer):
    r"""Learn a Gaussian q(θ) = N(m, 1/S) over the weights in 1.1 to 2 times the time of AdamW.

    The weights of the model are the mean m. The precision is

        S = ess · (hess + weight_decay),

    one number per weight, with ``hess`` in ``state[p]["hess"]``, ``ess`` the number N of training
    examples and ``weight_decay`` = δ/N for prior precision δ, when the loss is a mean over
    examples. Each step averages, over the draws θ = m + ε since the last step, the gradient and
    the curvature estimate ess·(hess + weight_decay)·ε·gradient (``"price"``) or ess·gradient²
    (``"gradsq"``), and moves ``hess`` = h and m. With the mean gradient ĝ over the draws ε,
    ρ₁ = 1 − beta1, ρ₂ = 1 − beta2, δ = weight_decay, s = h + δ and B = batch_size:

        ĥ = ess · s · mean(ε · gradient)      "price"  (reparameterisation)
        ĥ = ess · mean(gradient²)             "gradsq"
        ĥ = B · ĝ²                            "fisher"
        h ← h + ρ₂ (ĥ − h) + ρ₂² (ĥ − h)² / (2 s)         keeps h + δ at s/2 or more
        v ← v + ρ₂ (ĝ² − v)                   in ``state[p]["squares"]``, beside "price"
        u ← u + ρ₁ (ĝ − u)
        m ← m − lr · clip( (u / (1 − beta1^t) + δ m) / (h + δ) )

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

    *What to set* (docs/ivon.md has the reasons and figures): ``ess`` the number of training
    examples (of a loss averaged over tokens: of tokens), ``steps`` the number of steps, and ``lr``:
    with ``rescale_lr="gradient"`` AdamW's, 0.003 from fresh weights, or 0.0003 with
    ``hess_init="weights"``; without it 0.3 or 0.1. Then try a third and three times of it. At the
    start ``lr`` acts as in ``torch.optim.SGD(momentum=0)`` (with ``"gradient"``, divided by the
    size of the first gradient); later the step size is lr·(hess_init + δ)/(h + δ), and no weight
    moves further than 0.05 in a step. Without ``steps``
    or a ``beta2`` of your own h hardly moves in trainings of less than 100,000 steps: the width of
    the draws then comes from ``hess_init``, not from the data.

    Arguments and defaults are those of the package ``ivon-opt``; without ``steps``, and with the
    same noise, so are the results. All but ``params``, ``mc_samples``, ``hess_approx``, ``sync``,
    ``generator``, ``steps``, ``squares`` and ``prior`` can be set per group.

    Args:
        params: parameters, named parameters or groups, real and floating-point; any mix of
            devices and dtypes.
        lr: step size; multiplied by ``hess_init + weight_decay`` if ``rescale_lr``.
        ess: effective sample size λ, usually the number of training examples.
        hess_init: ``hess`` before the first step; or "weights", to fine-tune: 1, or more, so that
            the noise of the first draws is at most 0.05 of the weights' root mean square (and,
            with ``steps``, 0.15 of it where the data say nothing).
        beta1: decay of the momentum, in [0, 1).
        beta2: 1 − step size of ``hess``, in [0, 1].
        weight_decay: δ/ess; it is added to ``hess``, and pulls m to zero.
        mc_samples: how often ``step(closure)`` calls the closure. Without a closure every
            ``sampled_params(train=True)`` since the last step counts as one draw.
        hess_approx: ``"price"``, ``"gradsq"`` or ``"fisher"``, which needs ``batch_size``.
        clip_radius: bound on each element of the step before ``lr``, set by ``steps`` if inf; with
            ``rescale_lr="gradient"`` in units of the first gradient's size.
        sync: average gradient and curvature estimates over all processes of
            ``torch.distributed`` in ``step`` (nothing happens if it is not initialised). Seed
            each process differently, so that they draw different weights.
        debias: divide the momentum by 1 − beta1^t, t the steps of that parameter.
        rescale_lr: see ``lr``. ``"gradient"``: ``lr`` is also divided by the root mean square of
            the first step's gradient, over its entries that are not 0 (``gradient_size`` of a
            group, which ``state_dict`` saves). So the first step moves a weight by ``lr`` in the
            root mean square, as Adam's does, and rates as Adam's suit: without it, the best rate
            depends on how large the loss's gradients are.
        generator: draws the noise, on its own device, and is saved and restored with the state.
            By default torch's global generators, which are the user's to save.
        steps: how many steps the training will have (epochs · batches): sets ``beta2`` where that
            is left at its default, see :func:`beta2_for`, and ``clip_radius``, see
            :func:`radius_for`, by the ``lr`` given here.
        foreach: accepted as by torch's optimizers, and without effect.
        squares: whether v, the mean of squared gradients, is averaged beside h. It takes as much
            memory as h and up to an eighth of a step's time. ``Posterior.from_optimizer`` computes
            the precision from v where h is too noisy.
        batch_size: B, the examples of a step (of a loss averaged over tokens: its tokens), with
            accumulation and all processes; the scale of v and of ``"fisher"``. None: v gets its
            scale from h.
        prior: the posterior of earlier data, in the place of ``weight_decay`` (K&R, section 5). It
            has the mean m₀ and the precision S₀, of which the diagonal is used. The objective is
            Σ_i ℓ_i + ½ (m − m₀)ᵀ S₀ (m − m₀) and the precision S = ess·hess + S₀: in the equations
            above, δ is S₀/ess for each weight, and δ m is δ (m − m₀). The ``lr`` is rescaled by the
            δ of a typical weight (``prior_decay`` of a group). Parameters are matched by name: pass
            ``model.named_parameters()``. Without names they are matched by shape, if all shapes
            differ. The optimizer's state has m₀ and S₀, and so has ``state_dict``; load it into an
            optimizer that was made with a ``prior``. ``Posterior.from_optimizer`` takes them as its
            prior.

    Behaviour:

    * *Accumulation.* Several backward passes in one context add up, as always in torch: divide
      their losses by their number. Several contexts are averaged. If their losses were divided by
      their number all the same, say so: ``sampled_params(train=True, divided_by=number)``. A
      gradient in ``p.grad`` when the first context of a step begins counts as its first backward
      pass, so call ``zero_grad`` inside or before it.
    * *Changing gradients.* After a context ``p.grad`` holds the mean gradient over the draws.
      ``clip_grad_norm_`` and the like act on it and, by the same factor, on the curvature.
    * *Mixed precision.* ``scaler.step(optimizer)`` with a ``torch.amp.GradScaler``, with or
      without ``scaler.unscale_(optimizer)`` after the last context: gradient and curvature are
      unscaled before they are used, and a step that the scaler skips changes nothing and drops
      its draws. A scale must not change (``scaler.update()``) between the draws of one step.
    * *Half-precision weights* keep ``hess``, ``squares``, ``momentum`` and the noise in float32;
      the weights are rounded once when perturbed and once when updated.
    * *Frozen parameters* are neither perturbed nor updated. Parameters without a gradient are not
      updated. The state of a parameter begins with its first step.
    * *Failures.* If the body of a context raises, the weights come back bit for bit, and that
      draw and its gradients are dropped. A gradient with NaN or inf makes ``step`` raise and drop
      its draws; weights and state stay. (On a GPU this check waits for the gradients.)
    * *Resuming.* ``state_dict()`` after a step holds everything, and ``load_state_dict`` copies it:
      training continues bit for bit.

    Raises:
        InputError: a hyperparameter or parameter is out of range.
        OptimizerError: no draw before ``step``; nested contexts; a sparse or non-finite gradient;
            a state that does not fit.

    Source: Shen et al., "Variational Learning is Effective for Large Deep Networks", ICML 2024,
    Algorithm 1; the curvature step is from Lin et al., ICML 2020.
    """

    _ranges: ClassVar = {"hess_init": "(0, inf)"}

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        hess_init: float | Literal["weights"] = 1.0,
        beta1: float = 0.9,
        beta2: float = DEFAULT_BETA2,
        weight_decay: float = DEFAULT_DECAY,
        mc_samples: int = 1,
        hess_approx: str = "price",
        clip_radius: float = math.inf,
        sync: bool = False,
        debias: bool = True,
        rescale_lr: bool | Literal["gradient"] = True,
        *,
        generator: torch.Generator | None = None,
        foreach: bool | None = None,
        steps: int | None = None,
        squares: bool = True,
        batch_size: int | None = None,
        prior: Posterior | None = None,
    ) -> None:
        check_setting("lr", lr, INTERVALS["lr"])
        check_setting("ess", ess, INTERVALS["ess"])
        check_setting("weight_decay", weight_decay, INTERVALS["weight_decay"])
        widest = WIDEST
        if hess_init == "weights":
            params = groups_of(params)
            size = size_of(params)
            widest = WIDEST_RELATIVE * size
            hess_init = hess_init_for(size, ess)
        check_setting("hess_init", hess_init, self._ranges["hess_init"])
        earlier = None
        first_decay = weight_decay
        if prior is not None:
            params = groups_of(params)
            earlier = WeightPrior.read(prior, params)
            first_decay = earlier.decay([*earlier.mean], ess, hess_init)
            if weight_decay == DEFAULT_DECAY:
                weight_decay = 0.0  # the prior takes its place
        if beta2 == DEFAULT_BETA2:
            beta2 = beta2_for(steps, ess, hess_init, widest)
        if clip_radius == math.inf:
            factor = float(hess_init) + float(first_decay) if rescale_lr else 1.0
            clip_radius = radius_for(steps, float(lr) * factor)
        self.steps = steps  # which a recipe reads
        self._set_up(
            ROWS["IVON"],
            params,
            lr=lr,
            ess=ess,
            hess_init=hess_init,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            mc_samples=mc_samples,
            hess_approx=hess_approx,
            clip_radius=clip_radius,
            sync=sync,
            debias=debias,
            rescale_lr=rescale_lr,
            generator=generator,
            foreach=foreach,
            squares=squares and hess_approx == "price",
            batch_size=batch_size,
            earlier=earlier,
        )

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        hess_approx = one_of("hess_approx", group["hess_approx"], tuple(CURVATURES))
        if hess_approx != self.param_groups[0]["hess_approx"]:
            raise InputError("hess_approx is the same for all groups")
        if isinstance(group["rescale_lr"], str):
            one_of("rescale_lr", group["rescale_lr"], ("gradient",))
        if group.get("batch_size") is not None:
            positive_int("batch_size", group["batch_size"])
        elif hess_approx == "fisher":
            raise InputError('hess_approx="fisher" needs batch_size, the examples of a step')

    def _update(self, inverse_scale: float) -> None:
        unmeasured = [
            group
            for group in self.param_groups
            if group["rescale_lr"] == "gradient" and "gradient_size" not in group
        ]
        if unmeasured:
            gradients = list(self._gathered.grads.values())
            size = root_mean_square(gradients) * inverse_scale
            for group in unmeasured:
                if size > 0:
                    group["gradient_size"] = size
        super()._update(inverse_scale)

    def _law(self, group: Group) -> Law:
        settings = {**group}
        if group["rescale_lr"]:
            lr = float(group["lr"]) * (group["hess_init"] + typical_decay(group))
            settings["lr"] = lr
        if group["rescale_lr"] == "gradient":
            size = group.get("gradient_size", math.inf)  # no step before the first gradient
            settings["lr"] /= size
            settings["clip_radius"] *= size
        move = replace(self.row.move, debias=bool(group["debias"]))
        return Law(CURVATURES[group["hess_approx"]], move, settings)
