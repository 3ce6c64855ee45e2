"""The weights that a training may have begun with, drawn anew by the model's own code.

On a copy of the model every weight that is trained is set to NaN; what is still NaN when each
layer, and each model that initialises its own layers, has done so cannot be drawn. Layers that only
normalise, y = w ∘ x̂ + b, begin with w = 1 and b = 0 whatever they are called (w = 0 where they
scale by 1 + w). A LoRA adapter begins with B = 0; what peft trains beside it, as the base has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from blr_analysis.checks import some
from blr_analysis.errors import InputError
from blr_analysis.sensitivity.minimise import on_a_copy
from blr_analysis.snapshots import State, state_of
from blr_analysis.task import Task

RESETS = ("_reset_parameters", "reset_parameters")
FLAG = "_is_hf_initialized"  # by which transformers knows what it need not draw
WIDE = 10.0  # the inputs that a norm is tried on: its eps is nothing beside them
CLOSE = 1e-3  # how nearly it must normalise them


def drawn(task: Task, seed: int) -> State:
    """The trainable weights as the model's own code draws them, and the buffers as it resets them.

    Raises:
        InputError: that code does not say how; ModelError: the model cannot be copied.
    """
    model = on_a_copy(task).model
    for p in model.parameters():
        if p.requires_grad:
            p.detach().fill_(torch.nan)
    devices = [task.device] if task.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        try:
            _draw(model)
        except Exception as error:  # whatever a layer makes of weights that it did not expect
            raise InputError(
                "the weights cannot be drawn anew: give the recipe initial="
            ) from error
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        if parameters and all(bool(p.isnan().all()) for p in parameters.values()):
            for name, value in _of_a_norm(module, parameters).items():
                parameters[name].detach().fill_(value)
    state = state_of(model)
    undrawn = [n for n, w in state.items() if w.is_floating_point() and bool(w.isnan().any())]
    if undrawn:
        raise InputError(f"{some(undrawn)} cannot be drawn anew: give the recipe initial=")
    return state


def _draw(model: nn.Module) -> None:
    """By each layer, then by the models that initialise layers, then by the adapters on them."""
    for module in filter(_trains, model.modules()):
        for name in RESETS:
            reset = getattr(module, name, None)
            if callable(reset):
                reset()
    owner: Any
    for owner in _owners(model):
        if hasattr(owner, "initialize_weights") and hasattr(owner, "config"):  # of transformers
            for module in owner.modules():
                vars(module).pop(FLAG, None)
            for p in owner.parameters():
                setattr(p, FLAG, not p.requires_grad)
            owner.initialize_weights()
        else:
            owner.apply(owner._init_weights)
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if configs:
            for name, config in dict(configs).items():
                _draw_adapter(module, name, config)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _owners(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models with a function that initialises any of their layers."""
    draw = getattr(model, "_init_weights", None)
    if inspect.ismethod(draw) and len(inspect.signature(draw).parameters) == 1:
        yield model
    else:
        for child in model.children():
            yield from _owners(child)


def _draw_adapter(model: nn.Module, name: str, config: Any) -> None:
    """The weights of one adapter of peft."""
    start = getattr(config, "init_lora_weights", None)
    if start not in (True, False, "gaussian"):
        raise NotImplementedError("only LoRA, begun as it is by default")
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters(name, start)
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and name in copies:  # frozen below, and not redrawn
            copies[name].load_state_dict(module.original_module.state_dict())


def _of_a_norm(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """0 or 1 for each parameter of a layer that then does nothing but normalise; none for others.

    To normalise is to give numbers of mean square 1, f(x) = f(c x) and f(−x) = −f(x).
    """
    shapes = {p.shape for p in parameters.values()}
    if len(parameters) > 2 or len(shapes) > 1 or any(p.ndim != 1 for p in parameters.values()):
        return {}
    like = next(iter(parameters.values()))
    n = len(like)
    generator = torch.Generator().manual_seed(0)
    normalising: list[dict[str, float]] = []
    for shape in ((4, 5, n), (4, n, 5, 5)):
        x = WIDE * torch.randn(shape, generator=generator).to(like)
        for numbers in product((0.0, 1.0), repeat=len(parameters)):
            values = dict(zip(parameters, numbers, strict=True))
            if _normalises(module, parameters, values, x):
                normalising.append(values)
    if not normalising or any(values != normalising[0] for values in normalising):
        return {}
    return normalising[0]


def _normalises(
    module: nn.Module, parameters: Mapping[str, Tensor], values: Mapping[str, float], x: Tensor
) -> bool:
    """Whether a layer with these values everywhere in its parameters normalises x."""
    filled = {name: torch.full_like(parameters[name], value) for name, value in values.items()}
    try:
        y = functional_call(module, filled, (x,)).double()
        of_larger = functional_call(module, filled, (3.0 * x,)).double()
        of_negative = functional_call(module, filled, (-x,)).double()
    except Exception:  # an input that it does not take
        return False
    gaps = (y - of_larger, y + of_negative, y.square().mean() - 1)
    return y.shape == x.shape and all(float(gap.abs().max()) < CLOSE for gap in gaps)
