"""The modes, training or eval, in which a model's modules were while it trained.

A model that arrives with some module in training mode tells them. One that arrives in eval mode
does not: then all modules train, but for norms with frozen parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Mode = str | Callable[[nn.Module], object]
WORDS = ("train", "eval")


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training mode, by name."""
    return {name: module.training for name, module in model.named_modules()}


def training_modes(model: nn.Module) -> dict[str, bool] | None:
    """:func:`modes_of` a model of which a part is in training mode; None of others.

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
        modes: those of the training that is repeated; None: they are not known.
        mode: in place of them, what a recipe says.
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
    """The layers with running statistics whose parameters, or without any those of the module
    around them, are all frozen."""
    around = dict(model.named_modules())
    for path, module in around.items():
        if not (isinstance(module, _NormBase) or "running_mean" in dict(module.named_buffers())):
            continue
        while path and not any(True for _ in around[path].parameters()):
            path = path.rpartition(".")[0]
        parameters = [*around[path].parameters()]
        if parameters and not any(p.requires_grad for p in parameters):
            yield module
