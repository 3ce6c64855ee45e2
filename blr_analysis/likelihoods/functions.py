"""Any function of outputs and targets as the loss of each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.likelihoods.base import Likelihood

Loss = Callable[[Tensor, Tensor], Tensor]
TOLERANCE = 1e-4  # relative, between an example's loss in its batch and alone; of a sum of shares
SHARES_TOLERANCE = 1e-3  # of the sum of targets that look like shares of classes
NEAR = 0.01  # standard deviations of the noise around the targets, where curvature is looked for


class Function(Likelihood):
    """A loss ``(outputs [B, C], targets) -> [B]``; e and Λ come from automatic differentiation.

        e = ∂ℓ/∂f,   Λ = LLᵀ = Q diag(max(λ, 0)) Qᵀ  with  ∂²ℓ/∂f² = Q diag(λ) Qᵀ

    Losses that are not convex in the outputs (focal ones) have negative curvature, which Λ leaves
    out; ``fit_laplace(curvature="exact")`` takes the Hessian as it is.

    Args:
        loss: the function. The loss of an example must not depend on the others in the batch, and
            must have a second derivative. The function is called on any device, in float32 or
            float64. The objective is the SUM over the examples: for a training loss that is their
            mean, with an L2 penalty ``weight_decay``, δ = N · weight_decay.
        like: the likelihood that defines targets, predictions and which of them are right. None:
            targets are taken as they are, and the outputs are the prediction.

    Raises:
        InputError: the loss fails, is not one number per example, mixes examples, or has no
            second derivative; or labels are to be drawn from it.

    Example:
        >>> from blr_analysis.likelihoods import Categorical
        >>> def focal(f, y):  # Lin et al., 2017, with γ = 2
        ...     logp = f.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
        ...     return -((1 - logp.exp()) ** 2) * logp
        >>> Function(focal, like=Categorical()).error(torch.zeros(1, 2), torch.tensor([1]))
        tensor([[ 0.2983, -0.2983]])
    """

    def __init__(self, loss: Loss, like: Likelihood | None = None) -> None:
        if not callable(loss):
            raise InputError(f"a loss must be a function (outputs, targets), got {loss!r}")
        self.loss = loss
        self.like = like
        self.name = "function" if like is None else like.name
        self.is_classification = like is not None and like.is_classification
        self.integer_targets = like is not None and like.integer_targets

    def __repr__(self) -> str:
        arguments = [getattr(self.loss, "__qualname__", None) or repr(self.loss)]
        if self.like is not None:
            arguments.append(f"like={self.like!r}")
        return f"Function({', '.join(arguments)})"

    @property
    def kind(self) -> Likelihood:
        return self if self.like is None else self.like

    def check_outputs(self, outputs: Tensor) -> None:
        if self.like is None:
            super().check_outputs(outputs)
        else:
            self.like.check_outputs(outputs)

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        if self.like is not None:
            targets = self.like.prepare_targets(targets, outputs)
        elif targets.is_floating_point():
            targets = targets.to(outputs.dtype)
        if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
            raise DataError("the targets contain NaN or inf; drop or mend those examples")
        self._check(outputs.detach(), targets)
        return targets

    def check_values(self, targets: Tensor, outputs: Tensor) -> None:
        """Any target may be possible: only the user's loss knows."""

    def _check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise unless the loss is one finite number for each example, and has curvature.

        The loss of an example must depend on that example alone.
        """
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        with told_as(InputError, lambda: f"the loss {self!r} failed on {shapes}"):
            losses = self.loss(outputs, targets)
        in_float64 = "the CPU in float64 (use w.to(outputs) on its constants)"
        with told_as(InputError, lambda: f"the loss {self!r} failed on {in_float64}"):
            loss_alone = self._loss_alone(outputs, targets)
        self._check_losses(losses, outputs)
        loss_in_batch = losses[:1].to(loss_alone)
        if not torch.allclose(loss_alone, loss_in_batch, rtol=TOLERANCE, atol=TOLERANCE):
            lacks_last_axis = outputs.shape[-1] == 1 and targets.ndim == 1
            remedy = "give y[:, None] as targets" if lacks_last_axis else "leave out batch means"
            raise InputError(f"the loss of an example depends on the others; {remedy}")
        self._check_curvature(outputs, targets)

    def _loss_alone(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of the first example without the others, on the CPU in float64."""
        target = targets[:1].cpu()
        if target.is_floating_point():
            target = target.double()
        return self.loss(outputs[:1].cpu().double(), target)

    def _check_losses(self, losses: Any, outputs: Tensor) -> None:
        """Raise unless the losses are finite numbers, one for each example."""
        if not isinstance(losses, Tensor) or losses.shape != outputs.shape[:1]:
            is_tensor = isinstance(losses, Tensor)
            answer = tuple(losses.shape) if is_tensor else type(losses).__name__
            raise InputError(
                f"the loss must give one number per example, [{len(outputs)}], got {answer}; use "
                'reduction="none" and sum over the outputs'
            )
        if not bool(torch.isfinite(losses).all()):
            raise DataError("the loss is NaN or inf for some examples; check targets and outputs")

    def _check_curvature(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise if the loss is linear at the outputs, at random outputs and near the targets."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(outputs.shape, generator=generator).to(outputs)
        places = [outputs, noise]
        if targets.numel() == outputs.numel():  # a loss with linear tails curves only here
            places.append(targets.to(outputs).view_as(outputs) + NEAR * noise)
        problem = "the loss has no second derivative in the outputs"
        remedy = f"use {_curved_loss(outputs, targets)}"
        with told_as(InputError, problem, remedy):
            if any(bool(self._hessian_times(f, targets, noise).any()) for f in places):
                return
        raise InputError(f"{problem} (it is linear there); {remedy}")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        loss_entries = getattr(self.loss, "entries", None)
        return len(outputs) if loss_entries is None else loss_entries(outputs, targets)

    def as_module_takes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        as_module_takes = getattr(self.loss, "as_module_takes", None)
        if as_module_takes is None:
            return outputs, targets
        return as_module_takes(outputs, targets)

    def _slope(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs f, and e with the graph that leads back to f."""
        f = outputs.detach().requires_grad_()
        loss = self.loss(f, targets).sum()
        if not loss.requires_grad:
            raise InputError("the loss does not depend on the outputs by differentiable steps")
        (e,) = torch.autograd.grad(loss, f, create_graph=True)
        return f, e

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            _, e = self._slope(outputs, targets)
        return e.detach()

    def _hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """(∂²ℓ/∂f²) u, negative curvature included."""
        with torch.enable_grad():
            f, e = self._slope(outputs, targets)
            return _derivative(e, f, vector)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            f, e = self._slope(outputs, targets)
            units = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
            columns = [_derivative(e, f, unit.expand_as(f)) for unit in units]
        exact = torch.stack(columns, -1)
        symmetric = (exact + exact.mT) / 2
        eigenvalues, eigenvectors = torch.linalg.eigh(symmetric)
        return eigenvectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs if self.like is None else self.like.mean(outputs)

    def prediction(self, outputs: Tensor) -> Tensor:
        if self.like is None:
            return super().prediction(outputs)
        return self.like.prediction(outputs)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return None if self.like is None else self.like.correct(outputs, targets)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> NoReturn:
        raise InputError(
            f'{self!r} is no distribution to draw labels from; use curvature="ggn" (or "exact")'
        )


def _curved_loss(outputs: Tensor, targets: Tensor) -> str:
    """Words for a loss with curvature that fits such outputs and targets."""
    if outputs.shape[-1] > 1 and _are_log_probabilities(outputs):
        return "nn.CrossEntropyLoss, which takes log-probabilities and shares of classes too"
    if targets.shape == outputs.shape and _are_shares(targets):
        return "the logits and nn.CrossEntropyLoss, which takes shares of classes too"
    if bool((targets.abs() == 1).all()):
        return "nn.SoftMarginLoss"
    if outputs.shape[-1] > 1 and not targets.is_floating_point():
        return "nn.CrossEntropyLoss"
    return "a smooth one: nn.HuberLoss"


def _are_log_probabilities(outputs: Tensor) -> bool:
    """Whether the exponentials of every row sum to one."""
    deviations = (outputs.exp().sum(-1) - 1).abs()
    return bool((deviations < TOLERANCE).all())


def _are_shares(targets: Tensor) -> bool:
    """Whether every row is a distribution over several classes."""
    if targets.shape[-1] < 2 or bool((targets < 0).any()):
        return False
    deviations = (targets.sum(-1) - 1).abs()
    return bool((deviations < SHARES_TOLERANCE).all())


def _derivative(e: Tensor, f: Tensor, vector: Tensor) -> Tensor:
    """Σ_c u_c ∂e_c/∂f of every example, ``[B, C]``; examples do not mix."""
    if not e.requires_grad:
        return torch.zeros_like(f)
    (slope,) = torch.autograd.grad(
        e, f, vector, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return slope
