"""Reading a diagonal posterior precision out of what a training run saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from blr_analysis.checks import some
from blr_analysis.errors import ModelError, OptimizerError
from blr_analysis.posterior.capture.assemble import (
    HALF_REASON,
    Captured,
    Slot,
    assemble,
    tied_names,
)
from blr_analysis.posterior.capture.grouping import name_states
from blr_analysis.posterior.capture.readers import reader_of_saved, split_flat
from blr_analysis.posterior.capture.saved import Saved, load_saved
from blr_analysis.posterior.capture.scale import Told
from blr_analysis.task import HALF


def from_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    n_data: int | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    scaling: str = "sqrt",
    batch_size: int | None = None,
    tokens: int | None = None,
    names: Sequence[str] | None = None,
    bare: bool = False,
    initial: Mapping[str, Tensor] | None = None,
) -> Captured:
    """The posterior that a training run saved: as :func:`from_optimizer`, from disk.

    ``path`` is one of

    * a checkpoint folder of Hugging Face's Trainer (``optimizer.pt`` beside
      ``model.safetensors`` or ``pytorch_model.bin``, sharded or not);
    * a Lightning ``.ckpt``, or another file with the weights and the optimizer under
      ``model_state_dict`` and ``optimizer_state_dict``, or ``model`` and ``optimizer``;
    * a file saved with ``torch.save(optimizer.state_dict(), path)``.

    The mean is the checkpoint's weights; with the optimizer's state alone it is the model's own.
    Files are read with ``weights_only=True`` and nothing else. A saved state numbers its
    parameters; the names follow from the model and are believed only if group sizes, weight
    decays, every shape and the total agree. A different order with the very same shapes cannot
    be told: pass ``names`` if the optimizer was given the parameters in an order of your own.

    Args:
        path: see above.
        model: the model that was trained (it is read for names and shapes, not changed), with
            the same parameters frozen.
        n_data: as in :func:`from_optimizer`, like the four after it.
        prior_precision: see there.
        scaling: see there.
        batch_size: see there.
        tokens: see there.
        names: every parameter's name, in the order in which the optimizer got them.
        initial, bare: as in :func:`from_optimizer`.

    Raises:
        StorageError: files are missing, truncated, or hold more than tensors and containers.
        OptimizerError: an unknown optimizer, one in half precision, or one that does not fit
            the model in exactly one way.
        ModelError: the weights are not this model's, or not finite.

    Example:
        >>> import tempfile, torch
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(5, 2)).mean().backward()
        >>> optimizer.step()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(optimizer.state_dict(), f"{folder}/adam.pt")
        ...     captured = from_checkpoint(
        ...         f"{folder}/adam.pt", model, n_data=100, prior_precision=3.0
        ...     )
        >>> captured.precision["weight"].round()
        tensor([[103., 103.]])
    """
    saved = load_saved(Path(path).expanduser())
    groups, states = saved.optimizer["param_groups"], saved.optimizer["state"]
    reader = reader_of_saved(states.values(), groups)
    order = name_states(
        model, saved.optimizer, key=reader.key, names=names, trainer=saved.source == "trainer"
    )
    values = _values(saved, model)
    parameters = dict(model.named_parameters())
    flat = split_flat(groups, [[parameters[name].shape for name in run] for run in order.groups])
    slots = []
    for k, (group, run) in enumerate(zip(groups, order.groups, strict=True)):
        for i, (number, name) in enumerate(zip(group["params"], run, strict=True)):
            if parameters[name].requires_grad:
                state = states.get(number, {}) if flat is None else flat[k][i]
                slots.append(Slot(name, values[name], state, group))
    for slot in slots:
        if reader.key in slot.state and slot.state[reader.key].dtype in HALF:
            raise OptimizerError(
                f"{str(path)!r} keeps the second moment of {slot.name!r} in "
                f"{slot.state[reader.key].dtype}: {HALF_REASON}. Use fit_laplace."
            )
    held = set(order.names)
    return assemble(
        slots,
        reader,
        model,
        Told(n_data, prior_precision, scaling, batch_size, tokens, bare, initial),
        {
            "source": saved.source,
            "path": os.fspath(path),
            "order": order.rule,
            "mean_from": "model" if saved.weights is None else "checkpoint",
            "not_in_optimizer": [
                name for name, p in parameters.items() if p.requires_grad and name not in held
            ],
        },
    )


def _values(saved: Saved, model: nn.Module) -> dict[str, Tensor]:
    """The mean by parameter name: from the weights saved, under any of a tied tensor's names."""
    parameters = dict(model.named_parameters())
    if saved.weights is None:
        return {name: p.detach() for name, p in parameters.items()}
    tied = tied_names(model)
    aliases = {name: [name, *tied.get(name, [])] for name in parameters}
    prefix = _prefix(aliases, saved.weights)
    result, wrong = {}, []
    for name, p in parameters.items():
        key = next((prefix + a for a in aliases[name] if prefix + a in saved.weights), None)
        if key is None:
            wrong.append(f"{name}: not there")
        elif saved.weights[key].shape != p.shape:
            wrong.append(f"{name}: {tuple(saved.weights[key].shape)}, not {tuple(p.shape)}")
        else:
            device = p.device if not p.is_meta else saved.weights[key].device
            result[name] = saved.weights[key].to(device)
    if wrong:
        raise ModelError(
            f"the checkpoint's weights are not this model's: {some(wrong)}. Its tensors are "
            f"called {some(list(saved.weights))}."
        )
    return result


def _prefix(aliases: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor]) -> str:
    """What the checkpoint puts before every name, such as ``model.`` or ``_orig_mod.``."""
    first, *_ = aliases.values()
    prefixes = {
        key.removesuffix(a) for a in first for key in weights if f".{key}".endswith(f".{a}")
    }
    for prefix in sorted(prefixes, key=len):
        if all(any(prefix + a in weights for a in names) for names in aliases.values()):
            return prefix
    return ""
