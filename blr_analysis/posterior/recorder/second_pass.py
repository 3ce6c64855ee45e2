"""A second backward pass: for drawn labels, or for the signed losses of a training's own labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from blr_analysis.backprop.tape import Gradients, Pass
from blr_analysis.half import working

Squares = dict[str, Tensor]  # E_i g_i² by parameter


class SecondPass:
    """Backward passes that a recorder makes while the training makes its own.

    Attributes:
        is_running: whether one is running, so that hooks leave its gradients alone.
    """

    def __init__(self) -> None:
        self.is_running = False

    def gradients(
        self, forward: Pass, outputs: Tensor, errors: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[list[Gradients], Gradients] | None:
        """The gradients at every call's outputs and of these parameters.

        None where there is no second backward pass, as through reentrant checkpoints.

        Args:
            errors: the gradients at the model's outputs.
        """
        self.is_running = True
        try:
            gradients = forward.gradients([outputs], [errors], parameters)
            for call in forward.calls:
                call.check_inputs()
            return gradients
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            forward.recomputed.clear()
            return None
        finally:
            self.is_running = False


def with_random_signs(gradient: Tensor, seed: int) -> Tensor:
    """s_i d_i with a random sign s_i for each example: E (Σ_i s_i g_i)² = Σ_i g_i².

    Args:
        gradient: d, examples first.
        seed: of the signs.
    """
    generator = torch.Generator(gradient.device).manual_seed(seed)
    n_examples = len(gradient)
    bits = torch.randint(2, (n_examples,), generator=generator, device=gradient.device)
    signs = (2 * bits - 1).to(gradient.dtype)
    return gradient * signs.reshape(-1, *[1] * (gradient.ndim - 1))


def mean_squares(
    parameters: Mapping[str, nn.Parameter], gradients: Gradients, n_examples: int
) -> Squares:
    """E_i g_i² of parameters, from their gradients Σ_i g_i; 0 where there is no gradient.

    Examples' gradients are independent with mean 0, because their labels, or signs, are drawn.
    """
    squares = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        wide = gradient.detach().to(working(gradient.dtype))
        squares[name] = wide.square().div_(n_examples)
    return squares
