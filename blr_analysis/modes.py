"""The modes, training or eval, in which a model's modules were while it trained.

A model with some module in training mode shows these modes. A model that is in eval mode as a whole
does not show them: then all modules are taken to have trained, except norms with frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Mode = str | Callable[[nn.Module], object]
WORDS = ("train", "eval")  # the modes that a recipe can name


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training mode, by name."""
    return {name: module.training for name, module in model.named_modules()}


def training_modes(model: nn.Module) -> dict[str, bool] | None:
    """:func:`modes_of` a model with some module in training mode; None for any other model.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> _ = model[1].eval()
    >>> training_modes(model)
    {'': True, '0': True, '1': False}
    >>> training_modes(model.eval()) is None
    True
    """
    modes = modes_of(model)
    return modes if any(modes.values()) else None


def begin_training(
    model: nn.Module, modes: Mapping[str, bool] | None, mode: Mode | None = None
) -> None:
    """Put every module into the mode in which it trains.

    Args:
        modes: the modes of the training that is repeated, by module name; None: unknown.
        mode: the recipe's mode, which replaces ``modes``; None: the recipe names none.
    """
    model.train()
    if mode == "eval":
        model.eval()
    elif callable(mode):
        mode(model)
    elif mode is None and modes is None:
        for norm in frozen_norms(model):
            norm.eval()
    elif mode is None and modes is not None:
        for name, module in model.named_modules():
            module.training = modes.get(name, True)


def frozen_norms(model: nn.Module) -> Iterator[nn.Module]:
    """The layers with running statistics whose parameters are all frozen.

    A layer without parameters goes by those of the nearest module around it that has some.
    """
    modules = dict(model.named_modules())
    for path, module in modules.items():
        is_norm = isinstance(module, _NormBase) or "running_mean" in dict(module.named_buffers())
        if not is_norm:
            continue
        while path and not any(True for _ in modules[path].parameters()):
            path = path.rpartition(".")[0]
        parameters = [*modules[path].parameters()]
        if parameters and not any(p.requires_grad for p in parameters):
            yield module
