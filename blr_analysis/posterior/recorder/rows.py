"""Which rows of a layer's inputs and outputs belong to which example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blr_analysis.backprop.layers import Axis
from blr_analysis.backprop.reading import Axes
from blr_analysis.backprop.record import Visit
from blr_analysis.backprop.tape import Gradients, leaves_with_gradient
from blr_analysis.errors import ModelError

COPY = "ToCopyBackward"  # the name of autograd's node of a copy in another dtype
MOST_OUTPUTS = 2**27  # in a pass with drawn labels: more would take too much memory


def outputs_of(output: Any, batch: int) -> Tensor | None:
    """The one output that the loss is taken of: ``logits``, or all that there is; None: several."""
    logits = getattr(output, "logits", None)
    leaves = [leaf for leaf in leaves_with_gradient(output) if leaf.ndim and len(leaf) == batch]
    if isinstance(logits, Tensor) and logits.requires_grad:
        leaves = [logits]
    if len(leaves) != 1 or leaves[0].numel() > MOST_OUTPUTS:
        return None
    return leaves[0]


def call_with_gradient(outputs: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call a function with the loss's gradient at the outputs, when a backward pass begins.

    Under mixed precision a model may compute its loss from half-precision outputs, and return a
    copy of them in float32 on which the loss does not depend: then it is the gradient at the
    original. Where the loss depends on the copy, the function is called for both, the copy first.
    """
    outputs.register_hook(function)
    node: Any = outputs.grad_fn
    place = outputs.output_nr
    while node is not None and node.name().startswith(COPY):
        node, place = node.next_functions[0]
    if node is None or node is outputs.grad_fn:
        return

    def at_original(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[place]
        if gradient is not None:
            function(gradient)

    node.register_prehook(at_original)


def n_terms_of_loss(gradient: Tensor) -> int:
    """The examples that a loss has a gradient of at the outputs; of sequences the tokens."""
    is_of_sequences = gradient.ndim == 3
    rows = gradient.flatten(0, 1) if is_of_sequences else gradient.reshape(len(gradient), -1)
    return int(rows.any(1).sum())


def positions_of(visit: Visit) -> int:
    """The positions in one row of a layer's output: pixels of channels first, tokens, else 1."""
    output = visit.outputs[0]
    channels = output.shape[1] if output.ndim > 1 else 1
    is_convolution = isinstance(visit.unit.module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    if not is_convolution and output.ndim > 1:
        channels = output.shape[-1]
    return max(1, output.shape[1:].numel() // channels)


def rows_stand_for(visit: Visit, batch: int) -> bool:
    """Whether so many examples stand first in what goes in and out of a layer."""
    x = tree_leaves((visit.args, visit.kwargs))[0]
    rows = len(visit.outputs[0])
    return rows > 0 and rows % batch == 0 and len(x) == rows


def rows_are_read(visit: Visit, batch: int) -> bool:
    """Whether a layer has rows for each example, or one row that all examples share.

    No rows at all, as of an expert without tokens, say nothing of the rows of later passes.
    """
    is_shared = len(visit.outputs[0]) == 1 and rows_stand_for(visit, 1)
    return is_shared or rows_stand_for(visit, batch)


def axes_of(batch: int, visit: Visit, gradients: Gradients) -> Axes:
    """The axes of the examples, which stand first, in one row each or in several together.

    Raises:
        ModelError: the layer has other rows.
    """
    leaves = tree_leaves((visit.args, visit.kwargs))
    rows = len(visit.outputs[0])
    if not rows_stand_for(visit, batch):
        raise ModelError(
            f"layer {visit.unit.path!r} sees {len(leaves[0])} rows for {batch} examples: put "
            "examples first"
        )
    axis = Axis(repeats=rows // batch)
    inputs = [axis if _has_rows(leaf, rows) else None for leaf in leaves]
    return inputs, [axis] * len(visit.outputs)


def _has_rows(leaf: Any, rows: int) -> bool:
    """Whether an input is a tensor with so many rows."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows
