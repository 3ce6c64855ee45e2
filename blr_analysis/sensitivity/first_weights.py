"""Draw the first weights of a training anew, by the model's own initialisation code.

On a copy of the model, every weight that is trained is set to NaN. Then all layers, and all models
that initialise their layers, do so. A weight that is still NaN cannot be drawn.

* A layer that only normalises, y = w ∘ x̂ + b, begins with w = 1 and b = 0, whatever its class (with
  w = 0 if it scales by 1 + w).
* A LoRA adapter begins with B = 0. Other layers that peft trains begin with the base model's
  weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

RESETS = ("_reset_parameters", "reset_parameters")  # names of torch's initialisation methods
FLAG = "_is_hf_initialized"  # transformers sets it on what it need not initialise
TEST_SCALE = 10.0  # of the inputs that test a layer; a norm's eps is small beside them
TOLERANCE = 1e-3  # of that test


def drawn(task: Task, seed: int) -> State:
    """The trainable weights as the model's own code draws them, and the buffers as it resets them.

    Raises:
        InputError: the code fails, or leaves some weight undrawn.
        ModelError: the model cannot be copied.
    """
    model = on_a_copy(task).model
    for weight in model.parameters():
        if weight.requires_grad:
            weight.detach().fill_(torch.nan)
    with seeded(task.device, seed), torch.no_grad():
        try:
            _draw(model)
        except Exception as error:  # a layer's code may raise anything
            raise InputError(
                "the weights cannot be drawn anew: give the recipe initial="
            ) from error
    _fill_norms(model)
    state = state_of(model)
    undrawn = [name for name, value in state.items() if _has_nan(value)]
    if undrawn:
        raise InputError(f"{some(undrawn)} cannot be drawn anew: give the recipe initial=")
    return state


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, random numbers come from this seed; afterwards the generators go on as before."""
    gpus = []
    if device.type == "cuda":
        gpus.append(device)
    with torch.random.fork_rng(gpus):
        torch.manual_seed(seed)
        yield


def _has_nan(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isnan().any())


def _draw(model: nn.Module) -> None:
    """Let the layers draw their weights, then models that initialise layers, then LoRA adapters."""
    for module in model.modules():
        if any(weight.requires_grad for weight in module.parameters()):
            _reset(module)
    for initialiser in _initialisers(model):
        _initialise(initialiser)
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        if adapters:
            for name, config in dict(adapters).items():
                _draw_adapter(module, name, config)


def _reset(module: nn.Module) -> None:
    """Let one layer draw its weights, if it has a method for that."""
    for name in RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            reset()


def _initialisers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost models that have a method which initialises one of their layers."""
    if _initialises_layers(model):
        yield model
        return
    for child in model.children():
        yield from _initialisers(child)


def _initialises_layers(model: nn.Module) -> bool:
    """Whether a model has a method which initialises one of its layers."""
    method = getattr(model, "_init_weights", None)
    return inspect.ismethod(method) and len(inspect.signature(method).parameters) == 1


def _initialise(model: Any) -> None:
    """Let a model initialise its layers."""
    is_of_transformers = hasattr(model, "initialize_weights") and hasattr(model, "config")
    if not is_of_transformers:
        model.apply(model._init_weights)
        return
    for module in model.modules():
        vars(module).pop(FLAG, None)
    for weight in model.parameters():
        is_frozen = not weight.requires_grad
        setattr(weight, FLAG, is_frozen)
    model.initialize_weights()


def _draw_adapter(model: nn.Module, name: str, config: Any) -> None:
    """Draw the weights of one adapter of peft.

    Raises:
        NotImplementedError: it is no LoRA with a usual initialisation.
    """
    initialisation = getattr(config, "init_lora_weights", None)
    if initialisation not in (True, False, "gaussian"):
        raise NotImplementedError("only LoRA, begun as it is by default")
    module: Any
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters"):
            module.reset_lora_parameters(name, initialisation)
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and name in copies:  # begins as the frozen original
            copies[name].load_state_dict(module.original_module.state_dict())


def _fill_norms(model: nn.Module) -> None:
    """Fill the weights of layers that only normalise with 0 or 1, where they are still NaN."""
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        is_undrawn = all(bool(weight.isnan().all()) for weight in parameters.values())
        if parameters and is_undrawn:
            for name, value in _values_of_a_norm(module, parameters).items():
                parameters[name].detach().fill_(value)


def _values_of_a_norm(module: nn.Module, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """The values, 0 or 1 for each parameter, with which a layer only normalises.

    The dict is empty for a layer that is no norm. To normalise is to give numbers of mean square 1,
    with f(x) = f(c x) and f(−x) = −f(x).
    """
    weights = list(parameters.values())
    are_alike = len({weight.shape for weight in weights}) == 1
    are_vectors = all(weight.ndim == 1 for weight in weights)
    if len(weights) > 2 or not (are_alike and are_vectors):
        return {}
    n_features = len(weights[0])
    generator = torch.Generator().manual_seed(0)
    solutions: list[dict[str, float]] = []
    for shape in ((4, 5, n_features), (4, n_features, 5, 5)):  # features last, as images second
        x = TEST_SCALE * torch.randn(shape, generator=generator).to(weights[0])
        for zeros_and_ones in product((0.0, 1.0), repeat=len(weights)):
            values = dict(zip(parameters, zeros_and_ones, strict=True))
            if _normalises(module, parameters, values, x):
                solutions.append(values)
    is_unique = bool(solutions) and all(values == solutions[0] for values in solutions)
    return solutions[0] if is_unique else {}


def _normalises(
    module: nn.Module, parameters: Mapping[str, Tensor], values: Mapping[str, float], x: Tensor
) -> bool:
    """Whether a layer normalises x if its parameters are filled with these values."""
    filled = {name: torch.full_like(parameters[name], value) for name, value in values.items()}
    try:
        y = functional_call(module, filled, (x,)).double()
        y_of_larger = functional_call(module, filled, (3.0 * x,)).double()
        y_of_negative = functional_call(module, filled, (-x,)).double()
    except Exception:  # the layer takes other inputs
        return False
    if y.shape != x.shape:
        return False
    deviations = (y - y_of_larger, y + y_of_negative, y.square().mean() - 1)
    return all(float(deviation.abs().max()) < TOLERANCE for deviation in deviations)
