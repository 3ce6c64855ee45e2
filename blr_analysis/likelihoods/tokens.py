"""One of C classes for every token of a sequence: tagging, and causal language models.

With f_t ∈ R^C the output at token t, p_t = softmax(f_t), and the sum over the tokens that count,

    ℓ = Σ_t −log p_t[y_t],    e_t = p_t − onehot(y_t),    Λ = blockdiag_t(diag(p_t) − p_t p_tᵀ)

The loss of an example is the SUM over its tokens, because the objective of training is read as a
sum: with a training loss that is averaged over the tokens of all sequences and an L2 penalty
``weight_decay``, δ = (number of tokens that count) · ``weight_decay``. Perplexity is
exp(Σ losses / Σ tokens).
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from blr_analysis.errors import DataError, InputError
from blr_analysis.likelihoods.categorical import Categorical


class TokenCategorical(Categorical):
    """A softmax at every token (``likelihood="tokens"``): outputs ``[B, T, C]``, targets [B, T].

    Images with a class per pixel are sequences too: outputs ``[B, C, H, W]`` with targets
    [B, H, W], as ``torch.nn.CrossEntropyLoss`` takes them, become T = H·W tokens. There may be any
    number of axes after C.

    Tokens whose target is ``ignore_index`` (padding, prompts) do not count: their error is 0, and
    their outputs are replaced by 0. T may differ between batches. Λ has (T·C)² entries per
    sequence and is not formed; ``hessian_times`` multiplies with it.

    Args:
        ignore_index: the target of tokens that do not count.
        weight, label_smoothing: apply to every token's loss as in
            :class:`~blr_analysis.likelihoods.Categorical` (``label_smoothing`` is Hugging Face's
            ``label_smoothing_factor``).

    Raises:
        InputError: ``ignore_index`` is no whole number; bad weights or smoothing; the Hessian
            itself is asked for.
        DataError: targets of another shape or dtype, or out of range.

    Example:
        >>> f, y = torch.zeros(1, 2, 4), torch.tensor([[3, -100]])
        >>> TokenCategorical().error(f, y).squeeze(0)
        tensor([[ 0.2500,  0.2500,  0.2500, -0.7500],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """

    name = "tokens"
    is_sequence = True

    def __init__(
        self, ignore_index: int = -100, weight: Any = None, label_smoothing: float = 0.0
    ) -> None:
        if ignore_index is None:
            raise InputError("ignore_index must be a whole number, got None")
        super().__init__(weight, label_smoothing, ignore_index)

    def by_token(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, C, H, W]`` and targets ``[B, H, W]`` as tokens; other shapes unchanged."""
        shape_without_classes = (len(outputs), *outputs.shape[2:])
        has_classes_second = outputs.ndim >= 3 and shape_without_classes == tuple(targets.shape)
        could_be_sequence = outputs.ndim == 3 and outputs.shape[:2] == targets.shape
        if has_classes_second and not could_be_sequence:
            return pixels_as_tokens(outputs), targets.flatten(1)
        return outputs, targets

    def check_outputs(self, outputs: Tensor) -> None:
        has_tokens = outputs.ndim == 3 and outputs.shape[1] > 0
        if not has_tokens or outputs.shape[-1] < 2:
            raise DataError(
                f"the {self.name} likelihood needs outputs of shape [batch, tokens, C], got "
                f"{tuple(outputs.shape)}; or [batch, C, H, W] with targets [batch, H, W], or use "
                '"categorical"'
            )
        self.check_weight(outputs)

    def prepare(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs, 0 where the target is ignored, and targets ``[B, T]``, checked."""
        targets = self.prepare_targets(targets, outputs)
        is_counted = self.counted(targets)
        if not bool(is_counted.all()):
            outputs = outputs.masked_fill(~is_counted.unsqueeze(-1), 0.0)
        return outputs, targets

    def prepare_targets(self, targets: Tensor, outputs: Tensor) -> Tensor:
        if targets.shape != outputs.shape[:2]:
            raise DataError(
                f"{self.name} targets must be classes of shape {list(outputs.shape[:2])}, got "
                f"{list(targets.shape)}; pad them with {self.ignore_index}"
            )
        return self.classes(targets, outputs)

    def counted(self, targets: Tensor) -> Tensor:
        return targets != self.ignore_index

    def token_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Every token's loss in nats, ``[B, T]``; 0 where the target is ignored."""
        return super().nll(outputs, targets)

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum over the tokens that count, in nats, ``[B]``."""
        return self.token_nll(outputs, targets).sum(-1)

    def mass(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The number of an example's tokens that count, or the sum of their weights, ``[B]``."""
        return super().mass(outputs, targets).sum(-1)

    def entries(self, outputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def hessian(self, outputs: Tensor, targets: Tensor) -> NoReturn:
        raise InputError(
            f"the output Hessian of a sequence, {tuple(outputs.shape[1:])} outputs, is not formed; "
            'use curvature="empirical_fisher" or "mc_fisher", one gradient per sequence'
        )

    hessian_root = hessian  # a root would be as large

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The fraction of the tokens that count which are predicted right, ``[B]``."""
        is_counted = self.counted(targets)
        is_right = (outputs.argmax(-1) == targets) & is_counted
        return is_right.sum(-1).to(outputs.dtype) / is_counted.sum(-1)

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Classes ``[B, T]``: the first whose cumulative probability exceeds a uniform number."""
        cumulative = outputs.softmax(-1).cumsum_(-1)
        heights = torch.rand(*outputs.shape[:2], 1, generator=generator).to(cumulative)
        heights *= cumulative[..., -1:]  # the total is 1 only up to rounding
        classes = torch.searchsorted(cumulative, heights, right=True).squeeze(-1)
        return classes.clamp_max(outputs.shape[-1] - 1)

    def resample(
        self, outputs: Tensor, targets: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        drawn = self.sample(outputs, generator)
        return torch.where(self.counted(targets), drawn, self.ignore_index)


def pixels_as_tokens(outputs: Tensor) -> Tensor:
    """``[B, C, H, W]`` as ``[B, H·W, C]``.

    >>> pixels_as_tokens(torch.zeros(2, 3, 4, 5)).shape
    torch.Size([2, 20, 3])
    """
    return outputs.flatten(2).transpose(1, 2)


class CausalLM(TokenCategorical):
    """A causal language model (``likelihood="causal_lm"``): the output at t predicts token t + 1.

    Takes outputs ``[B, T, C]`` and labels ``[B, T]`` as Hugging Face models do, where labels are
    the input ids (``ignore_index`` on padding), and shifts them here: outputs ``[:, :-1]`` against
    labels ``[:, 1:]``. On these T − 1 tokens it is :class:`TokenCategorical`.

    Example:
        >>> f, ids = torch.zeros(1, 3, 4), torch.tensor([[3, 1, -100]])
        >>> outputs, targets = CausalLM().prepare(f, ids)
        >>> outputs.shape, targets
        (torch.Size([1, 2, 4]), tensor([[   1, -100]]))
    """

    name = "causal_lm"

    def by_token(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, targets

    def check_outputs(self, outputs: Tensor) -> None:
        super().check_outputs(outputs)
        if outputs.shape[1] < 2:
            raise DataError("nothing follows a single token: give sequences of at least 2 tokens")

    def prepare(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and labels shifted against each other, ``[B, T − 1, C]`` and ``[B, T − 1]``."""
        if targets.shape != outputs.shape[:2]:
            raise DataError(
                f"{self.name} labels must be token ids of shape {list(outputs.shape[:2])}, got "
                f"{list(targets.shape)}; give the input ids, unshifted"
            )
        return super().prepare(outputs[:, :-1], targets[:, 1:])
