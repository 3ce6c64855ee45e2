"""The posterior of earlier data as the prior of the next training, weight by weight.

objective  Σ_i ℓ_i(θ) + ½ (θ − m₀)ᵀ S₀ (θ − m₀),   S₀ the diagonal of the earlier precision

Source: Khan & Rue, "The Bayesian Learning Rule", section 5 (continual learning).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blr_analysis.checks import bare_name, instance
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.half import working
from blr_analysis.learning_rule.optim.draws import Group, Tensors
from blr_analysis.posterior.posterior import Posterior
from blr_analysis.posterior.prior import differences

TENSORS = ("prior_precision", "prior_mean")
"""The names of the prior's tensors in the state of a parameter."""


def typical_decay(group: Group) -> float:
    """δ/ess of a group: its ``weight_decay``, or one number for a prior that differs by weight."""
    return float(group.get("prior_decay", group["weight_decay"]))


@dataclass(frozen=True)
class WeightPrior:
    """N(m₀, 1/S₀), by parameter.

    Attributes:
        mean: m₀.
        precision: S₀, without a division by ess.
    """

    mean: Tensors
    precision: Tensors

    @classmethod
    def read(
        cls, posterior: Any, groups: Sequence[Group], model: nn.Module | None = None
    ) -> WeightPrior:
        """The prior of every parameter that is trained, from the posterior of earlier data.

        Args:
            groups: the optimizer's groups, with ``param_names`` if torch knows them.
            model: gives the parameters' names if it is passed.

        Raises:
            InputError: this is no posterior, or it has no precision of weights; or there are
                parameters without names, and two of them have the same shape.
            PosteriorError: the posterior belongs to another model.
        """
        instance("prior", posterior, Posterior, "a blr_analysis.Posterior")
        if posterior.structure == "gram":
            raise InputError("a posterior of structure 'gram' is no prior: fit it as 'diag'")
        names = _names(posterior, groups, model)
        shapes = {bare_name(name): p for name, p in posterior.mean.items()}
        trained = {bare_name(name): p for p, name in names.items()}
        if mismatch := differences(shapes, trained, ("prior", "optimizer")):
            raise PosteriorError(f"prior= belongs to another model: {mismatch}")
        posterior_names = {bare_name(name): name for name in posterior.mean}
        diagonal = posterior.form.diagonal()
        mean = {}
        precision = {}
        for name, p in trained.items():
            posterior_name = posterior_names[name]
            mean[p] = _copied(posterior.mean[posterior_name], p)
            precision[p] = _copied(diagonal[posterior_name], p)
        return cls(mean, precision)

    def decay(self, params: Sequence[Tensor], ess: float, hess_init: float) -> float:
        """One δ/ess for the first steps of these parameters.

        With this δ, 1 / (hess_init + δ) is the mean of 1 / (hess_init + S₀/ess) over their weights.
        """
        precisions = [self.precision[p].double().flatten() for p in params if p in self.precision]
        if not precisions:
            return 0.0
        divisors = torch.cat([t.cpu() for t in precisions]) / float(ess) + float(hess_init)
        harmonic_mean = float(1 / divisors.reciprocal().mean())
        return max(harmonic_mean - float(hess_init), 0.0)

    def state_of(self, param: Tensor) -> dict[str, Tensor]:
        """The prior's tensors in the optimizer's state of this parameter."""
        return {"prior_precision": self.precision[param], "prior_mean": self.mean[param]}


def _copied(tensor: Tensor, param: Tensor) -> Tensor:
    """A copy on the parameter's device, in the dtype of computation."""
    return tensor.detach().to(param.device, working(param.dtype), copy=True)


def _names(
    posterior: Posterior, groups: Sequence[Group], model: nn.Module | None
) -> dict[Tensor, str]:
    """The name of every parameter that is trained: the group's, the model's, or by its shape."""
    names = {}
    if model is not None:
        names = {p: name for name, p in model.named_parameters()}
    for group in groups:
        names |= dict(zip(group["params"], group.get("param_names", ()), strict=False))
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    if all(p in names for p in trained):
        return {p: names[p] for p in trained}
    return _names_by_shape(posterior.mean, trained)


def _names_by_shape(mean: Mapping[str, Tensor], trained: Sequence[Tensor]) -> dict[Tensor, str]:
    """The posterior's names, by the parameters' shapes.

    Raises:
        InputError: two parameters have the same shape.
    """
    for shape, count in Counter(tuple(p.shape) for p in trained).most_common(1):
        if count > 1:
            raise InputError(
                f"{count} parameters have shape {shape}, prior= needs their names: pass "
                "model.named_parameters()"
            )
    names = {tuple(m.shape): name for name, m in mean.items()}
    return {p: names.get(tuple(p.shape), f"unnamed {tuple(p.shape)}") for p in trained}
