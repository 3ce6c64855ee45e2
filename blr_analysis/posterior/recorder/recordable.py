"""What a recorder can see in a model, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from blr_analysis.backprop.plan import units_of
from blr_analysis.backprop.record import Unit
from blr_analysis.backprop.recurrent import RECURRENT
from blr_analysis.checks import some
from blr_analysis.errors import ModelError
from blr_analysis.half import working
from blr_analysis.models import unwrapped
from blr_analysis.posterior.structures.kronecker import LARGEST
from blr_analysis.ranks import is_sharded


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def readable_units(model: nn.Module) -> list[Unit]:
    """The layers in which hooks see what each example contributes to their parameters."""
    units = units_of(model, set(trainable(model)))
    return [unit for unit in units if _is_readable(unit, model)]


def is_recordable(model: nn.Module) -> bool:
    """Whether a recorder sees all that is trained in a model."""
    model = unwrapped(model)
    try:
        check_recordable(trainable(model), readable_units(model))
    except ModelError:
        return False
    return True


def check_recordable(parameters: Mapping[str, nn.Parameter], units: Sequence[Unit]) -> None:
    """Raise :class:`ModelError` where hooks cannot see all that is trained."""
    if not parameters:
        raise ModelError("the model has no trainable parameters to record")
    if sharded := [name for name, p in parameters.items() if is_sharded(p)]:
        raise ModelError(
            f"{some(sharded)} are sharded over processes, where layers see no whole weights: "
            "record under DistributedDataParallel, or use fit_laplace"
        )
    if not units:
        raise ModelError(f"no layer rule for {some(list(parameters))}: use fit_laplace")


def _is_readable(unit: Unit, model: nn.Module) -> bool:
    """Whether hooks see what each example contributes to the parameters of a module.

    The others are recorded by the gradient of drawn labels. They are modules without a rule,
    recurrent layers whose examples are not first, and the projections of
    ``torch.nn.MultiheadAttention``, which runs them without calling them.
    """
    module = unit.module
    parent = model.get_submodule(unit.path.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return False
    if isinstance(module, nn.RNNBase) and not module.batch_first:
        return False
    return unit.rule is not None or _is_small(unit)


def _is_small(unit: Unit) -> bool:
    """Whether a module without a rule is differentiated by itself: its parameters are vectors, and
    it has neither modules inside of it nor buffers that a call may change."""
    module = unit.module
    has_vectors = all(p.ndim <= 1 for p in module.parameters())
    has_children = next(module.children(), None) is not None
    has_buffers = next(module.buffers(), None) is not None
    return has_vectors and not has_children and not has_buffers


def recurrent_names(units: Sequence[Unit]) -> set[str]:
    """The parameters of recurrent layers, whose gradients at different steps go together."""
    recurrent = [unit for unit in units if isinstance(unit.module, RECURRENT)]
    return {name for unit in recurrent for name in unit.names.values()}


def read_outs_of(model: nn.Module, units: Sequence[Unit]) -> set[str]:
    """The parameters of language models' heads, which get a diagonal: a factor would have the
    square of the vocabulary.

    The weight of such a head has the shape of an embedding's table.
    """
    tables = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Embedding)}
    names: set[str] = set()
    for unit in units:
        weight = unit.module._parameters.get("weight")
        is_table = isinstance(unit.module, nn.Embedding)
        if weight is not None and tuple(weight.shape) in tables and not is_table:
            names.update(unit.names.values())
    return names


def bytes_of_recording(
    parameters: Mapping[str, nn.Parameter],
    units: Sequence[Unit],
    read_outs: set[str],
    without_rule: Sequence[str],
    has_gradients: bool,
) -> int:
    """The bytes that the means of a recorder take, once all layers were recorded.

    Args:
        parameters: all that are trained.
        units: the layers that are recorded by their inputs and outputs.
        read_outs: names of parameters that have squares in place of factors.
        without_rule: names of parameters that no layer of ``units`` has.
        has_gradients: whether the mean gradient is recorded too.
    """
    sizes: dict[str, int] = {}  # by name: a table that is also a head counts once
    for unit in units:
        for name in unit.names.values():
            weight = parameters[name]
            n_numbers = weight.numel()
            if name not in read_outs:
                n_numbers = _numbers_of_factors(unit.module, weight)
            if has_gradients:
                n_numbers += weight.numel()
            sizes[name] = n_numbers * working(weight.dtype).itemsize
    for name in without_rule:
        weight = parameters[name]
        sizes[name] = 2 * weight.numel() * working(weight.dtype).itemsize
    return sum(sizes.values())


def _numbers_of_factors(module: nn.Module, weight: Tensor) -> int:
    """How many numbers a layer's matrix has in A, G and T; any other parameter has its squares."""
    is_matrix = weight.ndim > 1 and not isinstance(module, nn.Embedding)
    if not is_matrix:
        return weight.numel()
    groups = int(getattr(module, "groups", 1))
    rows = weight.shape[0] // groups
    columns = weight.numel() // weight.shape[0]
    if max(rows, columns) > LARGEST:
        return weight.numel()
    return groups * ((columns + 1) ** 2 + rows**2) + 1


def in_bytes(count: int) -> str:
    """A number of bytes in words.

    >>> in_bytes(3_000), in_bytes(5 * 2**20)
    ('2.9 KiB', '5.0 MiB')
    """
    size = float(count)
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
