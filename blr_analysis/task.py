"""What was learned from what: a model, the data it was trained on, its likelihood.

A :class:`Task` is the only thing the analyses know of a user's world. It hands out examples in
the order of the dataset, runs the model at any weights without touching it, and checks what
comes in and out.

    >>> import torch
    >>> from blr_analysis import Task
    >>> X, y = torch.randn(6, 3), torch.randint(2, (6,))
    >>> task = Task(torch.nn.Linear(3, 2), (X, y), likelihood="categorical")
    >>> task.n_data
    6
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from blr_analysis.errors import BLRError, DataError, DeviceError, InputError, ModelError
from blr_analysis.likelihoods import Likelihood, resolve

Forward = Callable[[nn.Module, Any], tuple[Any, Tensor]]


class Task:
    """A model, the data it was trained on, and its likelihood.

    Args:
        model: any ``torch.nn.Module``. It is never changed: weights are swapped functionally,
            and mode, hooks, ``requires_grad`` and gradients are left as they are.
        data: a map-style ``Dataset``, a ``DataLoader`` (its dataset and ``collate_fn`` are used
            in dataset order, whatever its shuffling), or a pair ``(X, y)`` of tensors.
        likelihood: "categorical", "bernoulli", "gaussian", "poisson", or a
            :class:`~blr_analysis.likelihoods.Likelihood`.
        forward: ``(model, batch) -> (outputs, targets)``; the default takes ``(x, y)`` pairs and
            Hugging Face dict batches with a ``labels`` entry.
        batch_size: examples in one forward pass.
        device: where batches are sent; default: the model's own device.
        metadata: columns that describe the examples (``{"source": [...]}`` or a DataFrame), one
            value per example; they come back in every table and can be selected by.

    Raises:
        DataError: empty data, iterable-style data, samplers that subset or reweight.
        InputError: unknown likelihood, bad batch size, metadata of another length.
        DeviceError: a device that this machine does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        likelihood: str | Likelihood = "categorical",
        forward: Forward | None = None,
        batch_size: int = 256,
        device: str | torch.device | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise InputError(f"batch_size must be a positive integer, got {batch_size!r}")
        self.model = model
        self.likelihood = resolve(likelihood)
        self.dataset, self._collate = _dataset(data)
        self.n_data = len(self.dataset)
        if self.n_data == 0:
            raise DataError("the data hold no examples; a task needs at least one")
        self.forward: Forward = forward or default_forward
        self.batch_size = batch_size
        self.device = _device(device, model)
        self.metadata = _metadata(metadata, self.n_data)
        self.plans: dict[Any, Any] = {}  # how the engine reads this model; filled by backprop

    def __len__(self) -> int:
        return self.n_data

    def __repr__(self) -> str:
        return (
            f"Task({type(self.model).__name__}, {self.n_data} examples, {self.likelihood.name}, "
            f"device={self.device})"
        )

    def subset(self, indices: Sequence[int] | Tensor) -> Task:
        """The same task on some of its examples, in the order given."""
        chosen = [int(i) for i in indices]
        return Task(
            self.model,
            DataLoader(Subset(self.dataset, chosen), collate_fn=self._collate),
            likelihood=self.likelihood,
            forward=self.forward,
            batch_size=self.batch_size,
            device=self.device,
            metadata={k: [v[i] for i in chosen] for k, v in self.metadata.items()},
        )

    def fetch(self, indices: Tensor) -> Any:
        """The collated batch of these examples, on the task's device."""
        if isinstance(self.dataset, TensorDataset) and self._collate is default_collate:
            if _is_range(indices):
                batch: Any = self.dataset[int(indices[0]) : int(indices[-1]) + 1]
            else:
                batch = self.dataset[indices]
        else:
            batch = self._collate([self.dataset[int(i)] for i in indices])
        return _to(batch, self.device)

    def batches(
        self, size: int | None = None, indices: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield ``(indices, batch)`` in dataset order (or the order of ``indices``)."""
        order = torch.arange(self.n_data) if indices is None else indices
        for chosen in order.split(size or self.batch_size):
            yield chosen, self.fetch(chosen)

    def parameters(self) -> dict[str, Tensor]:
        """The model's trainable parameters by name, detached; tied tensors once."""
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def run(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, C]`` and checked targets at these parameters (others: the model's own).

        Raises:
            ModelError: the model fails on the batch, or its outputs contain NaN or inf.
            DataError: targets out of the likelihood's range, shape or dtype.
        """
        values = {f"model.{n}": p.detach() for n, p in self.model.named_parameters()}
        values.update({f"model.{n}": p for n, p in params.items()})
        try:
            outputs, targets = functional_call(_Runner(self.model, self.forward), values, (batch,))
        except (BLRError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise ModelError(
                f"the model failed on a batch of {_describe(batch)}: {error}; check that "
                "data, forward= and the posterior belong to this model"
            ) from error
        return self._checked(outputs, targets, indices)

    def _checked(self, outputs: Any, targets: Any, indices: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs = getattr(outputs, "logits", outputs)
        if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
            raise ModelError(
                f"the model must return a floating-point tensor, got {type(outputs).__name__}; "
                "pick it in Task(..., forward=...)"
            )
        if outputs.ndim == 1 and not self.likelihood.integer_targets:
            outputs = outputs.unsqueeze(-1)
        self.likelihood.check_outputs(outputs)
        if not isinstance(targets, Tensor):
            targets = torch.as_tensor(targets, device=outputs.device)
        if len(targets) != len(outputs):
            raise DataError(
                f"{len(outputs)} outputs but {len(targets)} targets in one batch; the model must "
                "return one row per example"
            )
        targets = self.likelihood.prepare_targets(targets, outputs)
        finite = torch.isfinite(outputs.detach()).all(-1)
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().cpu()
            where = bad if indices is None else indices[bad]
            raise ModelError(
                f"the model's outputs are NaN or inf for {len(bad)} examples, the first at index "
                f"{int(where[0])}; check the weights and those inputs"
            )
        return outputs, targets

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run the model in eval mode inside; give every module its own mode back after.

        Raises:
            ModelError: a BatchNorm layer is in training mode or keeps no running statistics.
        """
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm):
                if module.training:
                    raise ModelError(
                        f"BatchNorm layer {name!r} is in training mode, where examples share "
                        "their statistics and no example can be taken out; call model.eval()"
                    )
                if module.running_mean is None:
                    raise ModelError(
                        f"BatchNorm layer {name!r} keeps no running statistics; build it with "
                        "track_running_stats=True and train, or use GroupNorm"
                    )
        modes = {module: module.training for module in self.model.modules()}
        try:
            self.model.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


class _Runner(nn.Module):
    """Calls ``forward(model, batch)`` with the model as a child, for ``functional_call``."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.training = model.training
        self.model = model
        self._call = forward

    def forward(self, batch: Any) -> tuple[Any, Tensor]:
        result = self._call(self.model, batch)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(
                "forward must return (outputs, targets), got "
                f"{type(result).__name__}; see Task(..., forward=...)"
            )
        return result


def default_forward(model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
    """``(x, y)`` pairs, and dict batches with ``labels`` as Hugging Face models take them."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise DataError(
                f"a dict batch needs a 'labels' entry, found {sorted(batch)}; rename the target "
                "column or pass forward= to Task"
            )
        return model(**{k: v for k, v in batch.items() if k != "labels"}), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, y = batch
        if isinstance(x, Tensor) and x.is_floating_point():
            first = next((p for p in model.parameters() if p.is_floating_point()), None)
            if first is not None:
                x = x.to(first.dtype)
        return model(x), y
    raise DataError(
        f"cannot read a batch of type {type(batch).__name__}; give (x, y) pairs, dict batches "
        "with 'labels', or forward=(model, batch) -> (outputs, targets)"
    )


def _dataset(data: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    if isinstance(data, DataLoader):
        collate = data.collate_fn if data.batch_size is not None else default_collate
        if not isinstance(data.dataset, IterableDataset):
            _check_sampler(data)
        return _dataset(data.dataset)[0], collate
    if isinstance(data, (tuple, list)) and len(data) == 2 and not isinstance(data, Dataset):
        x, y = (torch.as_tensor(part) if hasattr(part, "__array__") else part for part in data)
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
                raise DataError(
                    f"X and y must have the same length, got shapes {tuple(x.shape)} and "
                    f"{tuple(y.shape)}"
                )
            return TensorDataset(x, y), default_collate
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise DataError(
            f"data must be a map-style Dataset, a DataLoader over one, or (X, y) tensors, got "
            f"{type(data).__name__}; examples are addressed by index, so list an iterable first"
        )
    return data, default_collate


def _check_sampler(loader: DataLoader[Any]) -> None:
    sampler = loader.batch_sampler if loader.batch_size is None else loader.sampler
    if isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    ordinary = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if sampler is not None and not ordinary:
        raise DataError(
            f"the DataLoader draws its examples through {type(sampler).__name__}, so that the "
            "training set and its order are not those of its dataset; pass the dataset itself, "
            "or torch.utils.data.Subset of it"
        )


def _device(device: str | torch.device | None, model: nn.Module) -> torch.device:
    if device is None:
        first = next(model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")
    try:
        wanted = torch.device(device)
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(
            f"device {device!r} cannot be used here ({str(error).splitlines()[0]}); "
            'use device="cpu" or install a matching torch build'
        ) from error
    elsewhere = next((n for n, p in model.named_parameters() if p.device.type != wanted.type), None)
    if elsewhere is not None:
        raise DeviceError(
            f"device={str(wanted)!r} was asked for but parameter {elsewhere!r} lives elsewhere; "
            f"move the model first: model.to({str(wanted)!r})"
        )
    return wanted


def _metadata(metadata: Mapping[str, Sequence[Any]] | None, n_data: int) -> dict[str, list[Any]]:
    columns = {str(k): list(v) for k, v in dict(metadata or {}).items()}
    for name, column in columns.items():
        if len(column) != n_data:
            raise InputError(
                f"metadata column {name!r} has {len(column)} values for {n_data} examples"
            )
    return columns


def _is_range(indices: Tensor) -> bool:
    return len(indices) > 0 and bool((indices.diff() == 1).all())


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: _to(v, device) for k, v in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_to(v, device) for v in batch) if type(batch) in (list, tuple) else batch
    return batch


def _describe(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{k}: {_describe(v)}" for k, v in batch.items()) + "}"
    if isinstance(batch, (list, tuple)):
        return "(" + ", ".join(_describe(v) for v in batch) + ")"
    return type(batch).__name__
