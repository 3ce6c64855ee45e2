"""Networks with weights ±1: straight-through estimation and BayesBiNN.

BayesBiNN's relaxed signs are continuous numbers in the place of draws from a Bernoulli on ±1.
For λ = ½ log(p / (1 − p)), uniform ε and the temperature τ (Maddison et al., 2017; Khan & Rue,
Eq. 50),

    w = tanh((λ + δ) / τ),      δ = ½ log(ε / (1 − ε)),

tends to a draw sign(λ + δ) as τ → 0. Its slope along the mean μ = tanh λ (Eq. 51) is

    s = dw/dμ = (1 − w²) / (τ (1 − μ²)).

Averaged over the noise, s → dE[sign(λ + δ)]/dμ = 1: the identity that straight-through
estimation puts there. Without noise, s → 0 at any λ ≠ 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.learning_rule.expectations import AT_SIGN, GAUSS_NEWTON
from blr_analysis.learning_rule.families.domain import HALF
from blr_analysis.learning_rule.families.drawing import uniform
from blr_analysis.learning_rule.moves import Move
from blr_analysis.learning_rule.optim.draws import Context, Group, Seen
from blr_analysis.learning_rule.optim.row_optimizer import RowOptimizer
from blr_analysis.learning_rule.optim.settings import NAMES, check_setting
from blr_analysis.learning_rule.table import ROWS, Row

AVERAGE = Move(momentum="average", debias=True, decay="momentum")
BAYESBINN = replace(ROWS["BayesBiNN"], move=AVERAGE)
"""The row with momentum, which averages the prior's part λ as well."""


class BinaryOptimizer(RowOptimizer):
    """An optimizer of real parameters θ for a network whose weights are their signs."""

    def mode_params(self) -> Context:
        """The model with the weights sign(θ), the binary network itself; θ again after it."""
        return self._context_of_look(lambda theta, group, generator: (signs(theta), None))

    def _is_noisy(self, train: bool) -> bool:
        return False

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if any(p.dtype in HALF for p in group["params"]):
            raise InputError("signs need float32 parameters: train under torch.autocast")


class STE(BinaryOptimizer):
    r"""Straight-through estimation: latent θ, moved by the gradients at sign(θ).

        θ ← θ − lr · ∇ℓ(w),      w = sign(θ)                              (Khan & Rue, Eq. 48)

    The parameters of the model are the latent θ; the binary network is the model inside
    ``with optimizer.sampled_params():`` (or ``mode_params()``, the same). Another row than SGD
    moves θ by that row's arithmetic, for instance ``row="Adam"``.

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = STE(model.parameters(), lr=0.1)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # weights are signs
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()                               # weights are the latent ones
        >>> with optimizer.mode_params():
        ...     model.weight.detach().abs()
        tensor([[1., 1., 1.]])

    Args:
        params: the parameters to be made binary, their groups, or named parameters; give biases
            and normalisation layers to another optimizer.
        lr: step size.
        row: SGD, SGD with momentum, RMSprop, Adam, AdamW or gradient descent.
        clip: θ is clipped to [−clip, clip]; 1 in BinaryConnect (Courbariaux et al., 2015).
        settings: ``weight_decay``, ``beta1``, ``beta2``, ``eps``, ``mc_samples`` and ``sync``, as
            in the row.

    Raises:
        InputError: a setting, row or parameter that cannot be used.
        OptimizerError: as IVON.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        row: Row | str = "SGD",
        *,
        clip: float = math.inf,
        **settings: Any,
    ) -> None:
        self._set_up(self._accepted(row), params, lr=lr, clip=clip, **settings)

    def _accepted(self, row_or_name: Row | str) -> Row:
        accepted = super()._accepted(row_or_name)
        if accepted.look.noisy or accepted.curvature == GAUSS_NEWTON:
            raise InputError(f"STE cannot move by {accepted.algorithm}: take SGD or Adam")
        name = "STE" if accepted.algorithm == "SGD" else f"STE with {accepted.algorithm}"
        move = replace(accepted.move, entropy=False)
        return replace(accepted, algorithm=name, family=ROWS["STE"].family, look=AT_SIGN, move=move)

    def _training_look(self, theta: Tensor, group: Group, generator: Any) -> Seen:
        return signs(theta), None

    _posterior_look = _training_look

    def _move_group(self, group: Group, params: list[Tensor], inverse_scale: float) -> None:
        super()._move_group(group, params, inverse_scale)
        if group["clip"] == math.inf:
            return
        for param in params:
            param.clamp_(-group["clip"], group["clip"])


class BayesBiNN(BinaryOptimizer):
    r"""Learn a Bernoulli q(w) over binary weights: P(w_j = 1) = ½ (1 + tanh λ_j).

    The parameters of the model are the natural parameters λ. Each step takes the gradient of the
    mean loss at relaxed signs and moves λ by the rule (Khan & Rue, Eq. 52; N = ess, α = lr):

        w = tanh((λ + δ) / τ),      s = (1 − w² + ε) / (τ (1 − tanh²λ + ε))
        λ ← (1 − α) λ − α (N s ∘ ∇ℓ(w) − λ₀)

    with logistic noise δ. Both w and s are computed from the λ of the draw. The binary network is
    the model inside one of the contexts

    * ``sampled_params()``: signs drawn from q; average predictions over several contexts;
    * ``mode_params()``: the most probable signs, the binary network to deploy;
    * ``mean_params()``: the means tanh λ.

        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> x, y = torch.randn(50, 3), torch.randn(50, 1)
        >>> optimizer = BayesBiNN(model.parameters(), lr=0.01, ess=50)
        >>> for _ in range(5):
        ...     with optimizer.sampled_params(train=True):     # relaxed signs
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.mse_loss(model(x), y).backward()
        ...     optimizer.step()                               # weights are λ again
        >>> with optimizer.sampled_params():
        ...     model.weight.detach().abs()
        tensor([[1., 1., 1.]])

    After the context ``p.grad`` holds N s ∘ ∇ℓ. torch's schedulers change ``lr``; a cosine down
    to 0 is usual. As τ → 0 the slope s has mean 1 and a variance without bound. Meng et al. set
    ``floor = temperature`` for images, with which s becomes 1 / (1 − μ²) in that limit.

    Args:
        params: the parameters to be made binary, their groups, or named parameters; they start
            as λ, so small ones start at maximal entropy. Give biases and normalisation layers
            to another optimizer.
        lr: α, in [0, 1].
        ess: N, the number of training examples. A larger one makes a cold posterior, in which
            the divergence from the prior counts N/ess times. Networks of many more weights than
            examples need it.
        temperature: τ.
        floor: ε, which bounds the slope.
        beta1: decay of an average over the λ-updates (0: none), corrected for its start at 0.
        prior: λ₀, a number, or a tensor for each parameter of the group: λ of an earlier
            posterior, to learn from one set of data after another.
        noise: a factor of δ; 1 is the rule, at 0 the weights are tanh(λ/τ).
        settings: also ``mc_samples``, ``sync`` and ``generator``, as in IVON.

    Raises:
        InputError: a setting or parameter that cannot be used.
        OptimizerError: as IVON.

    Source: Meng, Bachmann & Khan, "Training Binary Neural Networks using the Bayesian Learning
    Rule", ICML 2020, Eqs. 8 and 9, with the bound ε of its implementation.
    """

    _ranges: ClassVar = {"lr": "[0, 1]"}
    _grouped: ClassVar = (*NAMES, "prior")

    def __init__(
        self,
        params: Any,
        lr: float,
        ess: float,
        *,
        prior: float | Sequence[Tensor] = 0.0,
        **settings: Any,
    ) -> None:
        defaults = {"temperature": 1.0, "floor": 1e-10, "beta1": 0.0, "noise": 1.0}
        for_entropy = {"weight_decay": 1.0, "hess_init": 1.0}  # its gradient is λ itself
        all_settings: dict[str, Any] = defaults | settings | for_entropy
        self._set_up(BAYESBINN, params, lr=lr, ess=ess, prior=prior, **all_settings)

    def mean_params(self) -> Context:
        """The model with the weights tanh λ, the mean of q; λ again after it."""
        return self._context_of_look(lambda theta, group, generator: (torch.tanh(theta), None))

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        prior = group["prior"]
        if not isinstance(prior, Sequence):
            check_setting("prior", prior, "(-inf, inf)")
            return
        shapes = [p.shape for p in group["params"]]
        if [getattr(tensor, "shape", None) for tensor in prior] != shapes:
            sizes = [tuple(shape) for shape in shapes]
            raise InputError(f"prior must hold tensors of the parameters' shapes, {sizes}")

    def _training_look(self, theta: Tensor, group: Group, generator: Any) -> Seen:
        noise = group["noise"] * logistic_noise(theta, generator)
        temperature = group["temperature"]
        slope = relaxed_slope(theta, noise, temperature, group["floor"])
        return relax(theta, noise, temperature), group["ess"] * slope

    def _posterior_look(self, theta: Tensor, group: Group, generator: Any) -> Seen:
        return draw_signs(theta, generator), None

    def _move_group(self, group: Group, params: list[Tensor], inverse_scale: float) -> None:
        """Subtract λ₀ from the gradient, which still has its loss scale; then move."""
        prior = group["prior"]
        priors = prior if isinstance(prior, Sequence) else [prior] * len(group["params"])
        for param, natural in zip(group["params"], priors, strict=True):
            is_zero = not isinstance(natural, Tensor) and natural == 0
            if param in self._gathered.grads and not is_zero:
                self._gathered.grads[param].sub_(natural / inverse_scale)
        super()._move_group(group, params, inverse_scale)


# Relaxed signs --------------------------------------------------------------------------------


def signs(theta: Tensor) -> Tensor:
    """±1, with +1 at 0.

    >>> signs(torch.tensor([-2.0, 0.0, 3.0]))
    tensor([-1.,  1.,  1.])
    """
    ones = torch.ones_like(theta)
    return torch.where(theta >= 0, ones, -ones)


def draw_signs(half_logit: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw of ±1 with means tanh λ."""
    return signs(torch.sigmoid(2 * half_logit) - uniform(half_logit, generator))


def logistic_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """δ = ½ log(ε / (1 − ε)) for uniform ε, shaped as ``like``."""
    draws = uniform(like, generator)
    return (draws.log() - torch.log1p(-draws)) / 2


def relax(half_logit: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """w = tanh((λ + δ) / τ), Khan & Rue, Eq. 50.

    >>> relax(torch.tensor([0.5, -0.5]), torch.zeros(2), 0.01)
    tensor([ 1., -1.])
    """
    return torch.tanh((half_logit + noise) / temperature)


def relaxed_slope(
    half_logit: Tensor, noise: Tensor, temperature: float, floor: float = 0.0
) -> Tensor:
    """s = (1 − w² + floor) / (τ (1 − μ² + floor)), which at floor 0 is dw/dμ.

    1 − tanh² is computed from its logarithm, so that it is not 0 where tanh rounds to ±1.

    >>> relaxed_slope(torch.tensor([0.3]), torch.zeros(1), 1.0)
    tensor([1.])
    """
    numerator = _log_sech2((half_logit + noise) / temperature)
    denominator = _log_sech2(half_logit)
    if floor == 0:
        return (numerator - denominator).exp() / temperature
    return (numerator.exp() + floor) / (temperature * (denominator.exp() + floor))


def _log_sech2(x: Tensor) -> Tensor:
    """log(1 − tanh² x)."""
    size = x.abs()
    return math.log(4.0) - 2 * size - 2 * torch.log1p(torch.exp(-2 * size))
