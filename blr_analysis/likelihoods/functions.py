"""A likelihood from any function of outputs and targets that returns the loss of each example."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError, told_as
from blr_analysis.likelihoods.base import Likelihood

Loss = Callable[[Tensor, Tensor], Tensor]
BATCH_TOLERANCE = 1e-4  # between an example's loss in its batch and alone, relative and absolute
SUM_TOLERANCE = 1e-4  # between 1 and the sum of a row that the network made of probabilities
SHARES_TOLERANCE = 1e-3  # between 1 and the sum of a row of targets, which files may have rounded
NOISE_AT_TARGETS = 0.01  # standard deviation of the noise around targets, for outputs near them


class Function(Likelihood):
    """A loss ``(outputs [B, C], targets) -> [B]``; e and Λ come from automatic differentiation.

        e = ∂ℓ/∂f,   Λ = LLᵀ = Q diag(max(λ, 0)) Qᵀ  with  ∂²ℓ/∂f² = Q diag(λ) Qᵀ

    A loss that is not convex in the outputs (a focal loss, for example) has negative curvature,
    which Λ leaves out; ``fit_laplace(curvature="exact")`` takes the Hessian as it is.

    Args:
        loss: the function. The loss of an example must not depend on the others in the batch, and
            must have a second derivative. The function is called on any device, in float32 or
            float64. The objective of the posterior is the SUM of the losses. A training that
            minimises their MEAN with an L2 penalty ``weight_decay`` therefore has the prior
            precision δ = N · weight_decay.
        like: the likelihood that prepares the targets, makes predictions of the outputs, and
            decides which of them are right. None: targets are taken as they are, and the outputs
            are the prediction.
        lowest, highest: the range of outputs that the loss takes.

    Raises:
        InputError: the loss fails, is not one number per example, mixes examples, or has no
            second derivative; or :meth:`sample` is called.

    Example:
        >>> from blr_analysis.likelihoods import Categorical
        >>> def focal(f, y):  # Lin et al., 2017, with γ = 2
        ...     logp = f.log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
        ...     return -((1 - logp.exp()) ** 2) * logp
        >>> Function(focal, like=Categorical()).error(torch.zeros(1, 2), torch.tensor([1]))
        tensor([[ 0.2983, -0.2983]])
    """

    def __init__(
        self,
        loss: Loss,
        like: Likelihood | None = None,
        *,
        lowest: float = -math.inf,
        highest: float = math.inf,
    ) -> None:
        if not callable(loss):
            raise InputError(f"a loss must be a function (outputs, targets), got {loss!r}")
        self.loss = loss
        self.like = like
        self.lowest = lowest
        self.highest = highest
        self.has_curvature = False  # whether some batch showed that it has
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
        """Raise unless the loss is what :class:`Function` asks of it, on these examples.

        It must be one finite number for each example, depend on that example alone, and have
        curvature.
        """
        shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
        with told_as(InputError, lambda: f"the loss {self!r} failed on {shapes}"):
            losses = self.loss(outputs, targets)
        in_float64 = "the CPU in float64 (use w.to(outputs) on its constants)"
        with told_as(InputError, lambda: f"the loss {self!r} failed on {in_float64}"):
            loss_alone = self._loss_alone(outputs, targets)
        self._check_losses(losses, outputs)
        loss_in_batch = losses[:1].to(loss_alone)
        is_same = torch.allclose(
            loss_alone, loss_in_batch, rtol=BATCH_TOLERANCE, atol=BATCH_TOLERANCE
        )
        if not is_same:
            is_pairwise = outputs.shape[-1] == 1 and targets.ndim == 1  # [N, 1] − [N] is [N, N]
            remedy = "give y[:, None] as targets" if is_pairwise else "leave out batch means"
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
        is_tensor = isinstance(losses, Tensor)
        if not is_tensor or losses.shape != outputs.shape[:1]:
            shape_or_type = tuple(losses.shape) if is_tensor else type(losses).__name__
            raise InputError(
                f"the loss must give one number per example, [{len(outputs)}], got "
                f'{shape_or_type}; use reduction="none" and sum over the outputs'
            )
        if not bool(torch.isfinite(losses).all()):
            raise DataError("the loss is NaN or inf for some examples; check targets and outputs")

    def _check_curvature(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise if the loss is linear everywhere that is tried.

        It is tried at the outputs, at random outputs and near the targets, of each batch until one
        has curvature: a loss may be linear for some targets, as that of rates for a count of 0.
        """
        if self.has_curvature:
            return
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(outputs.shape, generator=generator).to(outputs)
        points = [outputs, noise]
        if targets.numel() == outputs.numel():  # a loss with linear tails curves only near them
            targets_as_outputs = targets.to(outputs).view_as(outputs)
            points.append(targets_as_outputs + NOISE_AT_TARGETS * noise)
        problem = "the loss has no second derivative in the outputs"
        remedy = f"use {_suggested_loss(outputs, targets)}"
        with told_as(InputError, problem, remedy):
            for f in points:
                curvature = self._hessian_times(f, targets, noise)
                if bool(curvature.any()):
                    self.has_curvature = True
                    return
        raise InputError(f"{problem} (it is linear there); {remedy}")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def moved(self, outputs: Tensor, step: Tensor) -> Tensor:
        """Linear, and cut off at the range of outputs that the loss takes."""
        if self.like is not None:
            return self.like.moved(outputs, step)
        return super().moved(outputs, step).clamp(self.lowest, self.highest)

    def check_moved(self, outputs: Tensor, targets: Tensor) -> None:
        problem = f"the loss {self!r} fails on linearised outputs, which have no bounds"
        remedy = "let the model return logits or logarithms, and the loss take them"
        with told_as(InputError, problem, remedy):
            losses = self.loss(outputs, targets)
        if bool(losses.isnan().any()):
            raise InputError(f"{problem}; {remedy}")

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        entries_of_module = getattr(self.loss, "entries", None)  # where the loss is a torch module
        if entries_of_module is None:
            return len(outputs)
        return entries_of_module(outputs, targets)

    def as_module_takes(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        layout_of_module = getattr(self.loss, "as_module_takes", None)
        if layout_of_module is None:
            return outputs, targets
        return layout_of_module(outputs, targets)

    def _outputs_and_error(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs as leaves f of a new graph, and e = ∂ℓ/∂f with the graph back to f."""
        f = outputs.detach().requires_grad_()
        loss = self.loss(f, targets).sum()
        if not loss.requires_grad:
            raise InputError("the loss is no differentiable function of the outputs")
        (e,) = torch.autograd.grad(loss, f, create_graph=True)
        return f, e

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            _, e = self._outputs_and_error(outputs, targets)
        return e.detach()

    def _hessian_times(self, outputs: Tensor, targets: Tensor, vector: Tensor) -> Tensor:
        """(∂²ℓ/∂f²) u, negative curvature included."""
        with torch.enable_grad():
            f, e = self._outputs_and_error(outputs, targets)
            return _derivative(e, f, vector)

    def hessian_root(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            f, e = self._outputs_and_error(outputs, targets)
            unit_vectors = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
            columns = [_derivative(e, f, unit.expand_as(f)) for unit in unit_vectors]
        hessian = torch.stack(columns, -1)
        symmetric = (hessian + hessian.mT) / 2  # without the rounding of the two halves
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


def _suggested_loss(outputs: Tensor, targets: Tensor) -> str:
    """Words that suggest a loss with curvature for such outputs and targets."""
    if outputs.shape[-1] > 1 and _are_log_probabilities(outputs):
        return "nn.CrossEntropyLoss, which takes log-probabilities and shares of classes too"
    if targets.shape == outputs.shape and _are_shares(targets):
        return "the logits and nn.CrossEntropyLoss, which takes shares of classes too"
    are_signs = bool((targets.abs() == 1).all())
    if are_signs:
        return "nn.SoftMarginLoss"
    are_classes = outputs.shape[-1] > 1 and not targets.is_floating_point()
    if are_classes:
        return "nn.CrossEntropyLoss"
    return "a smooth one: nn.HuberLoss"


def _are_log_probabilities(outputs: Tensor) -> bool:
    """Whether the exponentials of every row sum to one."""
    deviations = (outputs.exp().sum(-1) - 1).abs()
    return bool((deviations < SUM_TOLERANCE).all())


def _are_shares(targets: Tensor) -> bool:
    """Whether every row is a distribution over several classes."""
    if targets.shape[-1] < 2 or bool((targets < 0).any()):
        return False
    deviations = (targets.sum(-1) - 1).abs()
    return bool((deviations < SHARES_TOLERANCE).all())


def _derivative(e: Tensor, f: Tensor, vector: Tensor) -> Tensor:
    """Σ_c u_c ∂e_c/∂f of every example, ``[B, C]``; 0 where e does not depend on f."""
    if not e.requires_grad:
        return torch.zeros_like(f)
    (derivative,) = torch.autograd.grad(
        e, f, vector, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return derivative
