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

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import checkpoint
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from blr_analysis import data as reading
from blr_analysis.checks import bare_name as bare_name
from blr_analysis.checks import instance, positive_int
from blr_analysis.errors import DeviceError, InputError, ModelError, told_as
from blr_analysis.estimators import centred, read_estimator
from blr_analysis.frozen import FrozenOutputs
from blr_analysis.half import narrow, shared, stored, widened, working
from blr_analysis.likelihoods import (
    SEVERAL,
    Categorical,
    CausalLM,
    Likelihood,
    Loss,
    TokenCategorical,
    Weighted,
    reduction_of,
    resolve,
)
from blr_analysis.likelihoods.modules import is_mean_over_outputs
from blr_analysis.modes import training_modes
from blr_analysis.padding import padding_of
from blr_analysis.ranks import divided, is_sharded
from blr_analysis.recipe import Recipe
from blr_analysis.runs import recipe_of_weights
from blr_analysis.snapshots import Snapshots

BATCH = 256  # examples in a forward pass where the user names no number
ANOTHER = {"checkpoints": (), "prior_precision": None}  # which other data, or weights, have not


class Task:
    """A model, the data it was trained on, and its likelihood.

    Args:
        model: any ``torch.nn.Module``; of a compiled or data-parallel one, what it wraps. It is
            never changed: weights are swapped functionally, and mode, hooks, ``requires_grad`` and
            gradients are left as they are.
        data: a map-style ``Dataset``, a ``DataLoader`` (its dataset and ``collate_fn`` are used
            in dataset order, whatever its shuffling), or a pair ``(X, y)`` of tensors. The same
            index must give the same example on every visit; what training drew (crops, flips,
            noise) is said by ``Recipe(augment=)``. Also a pandas
            DataFrame or one split of a ``datasets.Dataset``, see ``target``. Inputs without labels
            (X alone, or a data set of such) serve ``posterior.predict`` and
            :func:`blr_analysis.acquire`.
        likelihood: "categorical" (of images with a class per pixel, outputs ``[B, C, H, W]``, too),
            "bernoulli", "gaussian", "poisson", for sequences "tokens" (one class per token) and
            "causal_lm"; the loss of ``torch.nn`` that the model was trained
            with, whose settings are read (:mod:`blr_analysis.likelihoods.modules` says how δ
            follows from its reduction); any function (outputs, targets) -> loss of each example
            ``[B]``; or a :class:`~blr_analysis.likelihoods.Likelihood`.
        weights: w_i ≥ 0 of every example, ``[N]``: its loss counts w_i times. Losses and their
            means, of a test set too, hold the weights of their own task; accuracies do not.
        forward: ``(model, batch) -> (outputs, targets)``; the default takes ``(x, y)`` pairs and
            Hugging Face dict batches with a ``labels`` entry.
        batch_size: examples in one forward pass, and in a chunk of an analysis; None: 256, and as
            many as ``memory_budget`` holds.
        memory_budget: bytes of working memory above model and data; at least one example's need is
            taken. None: 56 MiB, or 8 examples' need, up to 1 GiB or four times what the parameters
            take; at least 1 GiB on a GPU. What frozen layers give for each example is kept beside
            it, in as many bytes again (None: what the model's weights take, 64 MiB or more).
        progress: None shows a bar on a terminal when the work is long; True always, False never.
        device: where batches are sent; default: the model's own device.
        metadata: columns that describe the examples (``{"source": [...]}`` or a DataFrame), one
            value per example; they come back in every table and can be selected by. Pandas data
            bring an index, which metadata and ``weights`` of pandas must share: a mask that is a
            Series is read by it, and a pandas Index selects by it. Beside tensors, whose rows are
            0 … N − 1, any other index is refused: ``reset_index(drop=True)`` where the order is
            that of the data. An index of y beside a tensor X is warned of.
        checkpoints: weights along the training, oldest first: state dicts, safetensors files, a
            trainer's folders, one folder of ``checkpoint-*``, or a
            :class:`blr_analysis.Checkpoints`. The model's own weights are the last.
        recipe: how the model was trained, a :class:`blr_analysis.Recipe`; None: the one that
            callbacks kept in the folder of the checkpoints, where they did.
        target: of a DataFrame, the column to predict: its columns of numbers are the inputs, in
            their order and the model's dtype, its columns of words the metadata, and labels that
            are words count from 0 in the order of their ``pd.Categorical``, else of the alphabet.
            Of a ``datasets.Dataset``, the column that the model calls ``labels``, where it is
            called neither so nor ``label``; words are metadata there too, and columns that a model
            of transformers does not take. Rows of unequal length are filled up as its Trainer does.

    Raises:
        DataError: empty or iterable-style data, samplers that subset or reweight, a dataset that
            fails on an index or changes between two visits.
        InputError: unknown likelihood, bad batch size, metadata or weights of another length,
            weights below 0.
        DeviceError: a device that this machine does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        *,
        likelihood: Loss = "categorical",
        weights: Tensor | Sequence[float] | None = None,
        forward: reading.Forward | None = None,
        batch_size: int | None = None,
        memory_budget: int | None = None,
        progress: bool | None = None,
        device: str | torch.device | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
        target: str | None = None,
        checkpoints: Any = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.model = checked_model(model)
        if forward is not None and not callable(forward):
            raise InputError("forward must be a function (model, batch) -> (outputs, targets)")
        self.forward: reading.Forward = forward or reading.default_forward
        self.device = _device(device, self.model)
        self.chunk_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.batch_size = self.chunk_size or BATCH
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        self.memory_budget = memory_budget
        self.progress = progress
        self._read(data, target, likelihood, weights, metadata)
        self._learn_of_training(likelihood, checkpoints, recipe)
        self.prior_precision: Any = None  # δ, where what was read names it
        self.frozen = FrozenOutputs(self.dataset, self.examples.collate)
        self.plans: dict[Any, Any] = {}  # how the engine reads this model; filled by backprop
        self._looked_at = False  # whether some outputs were: are they logits?
        self._overwrites = True  # whether the model works in place on its inputs; a run will tell

    def _read(
        self, data: Any, target: str | None, likelihood: Loss, weights: Any, metadata: Any
    ) -> None:
        """The examples, what describes them, and the likelihood of their targets."""
        kind = resolve(likelihood)
        has_own_forward = self.forward is not reading.default_forward
        padding = padding_of(self.model, kind)
        model_that_takes_columns = None if has_own_forward else self.model
        opened, described = reading.opened(
            data, target, _dtype_of(self.model), model_that_takes_columns, padding
        )
        examples = reading.read_data(opened, padding)
        self.n_data = len(examples)
        if not has_own_forward:
            kind = per_pixel(kind, examples)
        self.likelihood = kind if weights is None else _weighted(kind, weights, self.n_data)
        table = described if metadata is None else metadata
        self.metadata = reading.read_metadata(table, self.n_data)
        columns: dict[str, Any] = {"weights": weights}
        if table is not None:
            for name in table:
                columns[f"metadata {name!r}"] = table[name]
        labels = reading.labels_beside(columns, self.n_data, examples.labels)
        self.examples = replace(examples, labels=labels)

    def _learn_of_training(self, loss: Loss, checkpoints: Any, recipe: Recipe | None) -> None:
        """How the model was trained: its loss's reduction, modes, checkpoints and recipe."""
        self.reduction = reduction_of(loss)
        self.mean_over_outputs = is_mean_over_outputs(loss)
        self.modes = getattr(checkpoints, "modes", None) or training_modes(self.model)
        self.checkpoints = () if checkpoints is None else Snapshots(checkpoints, self.model)
        if recipe is not None:
            instance("recipe", recipe, Recipe, "a blr_analysis.Recipe")
            recipe.check_examples(self.n_data)
        self.recipe = recipe or recipe_of_weights(checkpoints, self.model)

    @classmethod
    def from_sklearn(
        cls, estimator: Any, X: Any, y: Any, *, likelihood: Any = None, metadata: Any = None
    ) -> Task:
        """A fitted scikit-learn estimator, or a Pipeline that ends in one, and its training data.

        LogisticRegression, LinearRegression, Ridge, PoissonRegressor and MLPClassifier become
        torch modules in float64 on the transformed features; ``task.prior_precision`` is δ as C or
        alpha sets it, and :func:`blr_analysis.fit_laplace` takes it from there. See
        :mod:`blr_analysis.estimators` for the formulas.

        Args:
            likelihood: in place of what is read. Beside a task of the training data, or a posterior
                of it, test data are judged with its noise, of a regression, and its weights, of
                "balanced" classes.
            metadata: as for :class:`Task`; labels that are words come along as ``label``,
                unless there is one.

        Raises:
            InputError: not fitted, no likelihood known for it here, other features or labels.
            DataError: NaN or inf in X or y.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from sklearn.linear_model import LogisticRegression
            >>> X, y = load_iris(return_X_y=True)
            >>> task = Task.from_sklearn(LogisticRegression(C=0.5, max_iter=500).fit(X, y), X, y)
            >>> task.likelihood.name, task.prior_precision["weight"]
            ('categorical', 2.0)
        """
        fitted, fitted_to = read_estimator(estimator, X, y, likelihood)
        examples = reading.read_data((fitted_to.inputs, fitted_to.targets))
        row_labels = reading.row_labels({"X": X, "y": y}, len(examples))
        task = cls(
            fitted.model,
            replace(examples, labels=row_labels, classes=fitted_to.classes),
            likelihood=likelihood or fitted.likelihood,
            forward=centred if fitted.likelihood.name == "categorical" else None,
            metadata=metadata,
        )
        if fitted_to.labels:
            task.metadata.setdefault("label", fitted_to.labels)
        task.prior_precision = fitted.prior
        return task

    def __len__(self) -> int:
        return self.n_data

    def __repr__(self) -> str:
        about = f"{self.n_data} examples, {self.likelihood.name}, device={self.device}"
        return f"Task({type(self.model).__name__}, {about})"

    @property
    def dataset(self) -> Any:
        """The examples, by index."""
        return self.examples.dataset

    @property
    def quiet(self) -> Task:
        """The same task, without progress bars."""
        return self._changed(progress=False)

    def subset(self, indices: Sequence[int] | Tensor) -> Task:
        """The same task on some of its examples (indices, or a boolean mask), in that order.

        Raises:
            InputError: a mask of another length, or an index out of range.
        """
        chosen = reading.chosen_indices(indices, self.n_data, labels=self.examples.labels)
        if not chosen:
            raise InputError(f"indices select none of the {self.n_data} examples")
        return self._changed(
            examples=self.examples.subset(chosen),
            n_data=len(chosen),
            likelihood=self.likelihood.at(torch.tensor(chosen)),
            metadata={k: [v[i] for i in chosen] for k, v in self.metadata.items()},
            recipe=self.recipe and self.recipe.of_examples(chosen),
            **ANOTHER,
        )

    def _changed(self, **attributes: Any) -> Task:
        """The same task, but for these attributes."""
        task = copy.copy(self)
        vars(task).update(attributes)
        return task

    def reading(self, examples: reading.Examples) -> Task:
        """The same task, its examples read in another way."""
        return self._changed(examples=examples)

    def with_model(self, task: Task) -> Task:
        """These examples, read as they are here, under another task's model and device; a noise,
        or weights of classes, that were estimated from them are the other's.

        Raises:
            InputError: DataFrames with other columns, or with other words for their classes.
        """
        self.examples.check_coded_as(task.examples)
        joined = self
        if self.model is not task.model or self.device != task.device:
            joined = self.under(task.model, task.device)
            if self.likelihood.estimated and task.likelihood.estimated:
                joined.likelihood = task.likelihood
        are_both_sequences = joined.likelihood.is_sequence == task.likelihood.is_sequence
        if joined.forward is task.forward and are_both_sequences:
            first = torch.zeros(1, dtype=torch.long)
            are_read_alike = _form(joined.fetch(first)) == _form(task.fetch(first))
            if are_read_alike:
                joined.plans = task.plans
        return joined

    def holding(self, buffers: Mapping[str, Tensor]) -> Task:
        """The same task under a model with these buffers: a copy, where its own differ."""
        present = dict(self.model.named_buffers())
        shared_names = buffers.keys() & present.keys()
        if all(torch.equal(present[n], buffers[n].to(present[n])) for n in shared_names):
            return self
        model = copy.deepcopy(self.model)
        model.load_state_dict(dict(buffers), strict=False)
        return self.under(model, self.device)

    def under(self, model: nn.Module, device: torch.device) -> Task:
        """These examples, read as they are here, under another model on that device."""
        frozen = self.frozen.of_other_model()
        return self._changed(model=model, device=device, plans={}, frozen=frozen, **ANOTHER)

    def fetch(self, indices: Tensor) -> Any:
        """The collated batch of these examples, on the task's device, as tensors that autograd
        takes, also inside of ``torch.inference_mode``. Of a causal language model, padding before a
        sequence is moved behind it.

        Raises:
            DataError: the dataset fails on an index, or its collate function on a batch.
        """
        with torch.inference_mode(False):
            batch = reading.moved(self.examples.batch(indices), self.device)
            if isinstance(self.likelihood.kind, CausalLM):
                batch = reading.padded_behind(batch, self.likelihood.kind.ignore_index)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            # Autograd does not take tensors of inference mode.
            if self._overwrites or any(tensor.is_inference() for tensor in tensors):
                return tree_map(_copied, batch)
            return batch

    def batches(
        self, size: int | None = None, indices: Tensor | None = None
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield ``(indices, batch)`` in dataset order (or the order of ``indices``)."""
        order = torch.arange(self.n_data) if indices is None else indices
        for chosen in order.split(size or self.batch_size):
            yield chosen, self.fetch(chosen)

    def parameters(self) -> dict[str, Tensor]:
        """The model's trainable parameters by name, detached; tied tensors once, half precision
        as float32."""
        return widened({n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad})

    def cast(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These values, those of parameters in half precision as the model has them: its own
        tensors where they are equal."""
        weights = dict(self.model.named_parameters())
        return {n: shared(v, weights[n]) if n in weights else v for n, v in narrow(params).items()}

    def check_parameters(self, names: Collection[str]) -> torch.dtype:
        """The one dtype of the sums over these parameters: theirs, or float32 for half precision.

        Raises:
            ModelError: several dtypes, complex or whole numbers, no values.
        """
        weights = dict(self.model.named_parameters())
        kinds = {working(weights[name].dtype): name for name in names}
        if away := [name for name in names if weights[name].is_meta]:
            raise ModelError(f"parameter {away[0]!r} is on the meta device; load the weights")
        if len(kinds) > 1 or not kinds.keys() <= {torch.float32, torch.float64}:
            each = ", ".join(f"{str(k).removeprefix('torch.')}: {n}" for k, n in kinds.items())
            raise ModelError(f"parameters must be real, of one dtype ({each}): use model.float()")
        return next(iter(kinds))

    def run(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, C]`` and checked targets at these parameters (others: the model's own).

        Of sequences, ``[B, T, C]``: what the likelihood scores, 0 where the target is ignored.

        The model runs in its own dtype; half precision outputs come back as float32.

        Raises:
            ModelError: the model fails on the batch, does not return one row of finite numbers
                per example, or returns something else than outputs and targets.
            DataError: NaN or inf in the inputs, targets out of the likelihood's range, shape or
                dtype.
        """
        if self.forward is reading.default_forward and not reading.has_labels(batch):
            reading.refuse_unlabelled(batch)
        returned, labels = self._forward_pass(batch, params, indices)
        outputs, targets = reading.checked(returned, labels, self.likelihood, indices)
        self._warn_of_probabilities(outputs)
        return outputs, targets

    def predicted(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The same, also of inputs without labels, whose targets are None.

        Raises:
            ModelError, DataError: as :meth:`run`.
        """
        returned, labels = self._forward_pass(batch, params, indices)
        targets = None
        if labels is None:
            outputs = reading.checked_outputs(returned, self.likelihood, indices)
        else:
            outputs, targets = reading.checked(returned, labels, self.likelihood, indices)
        self._warn_of_probabilities(outputs)
        return outputs, targets

    def _forward_pass(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> tuple[Any, Any]:
        """What the model returns, and the labels; None where the batch has none."""
        if self.forward is reading.default_forward:
            reading.check_inputs(batch, indices)
        before = reading.versions(batch)
        failed = f"the model failed on a batch of {reading.describe(batch)}"
        remedy = "give inputs of the shape and dtype of the training"
        frozen = self.frozen.reused(self, batch, params, indices)
        with told_as(ModelError, failed, remedy), frozen as is_whole:
            result = self.run_model(batch, params)
        if not (isinstance(result, tuple) and len(result) == 2):
            got = reading.describe(result)
            raise InputError(f"forward must return a tuple (outputs, targets), got {got}")
        if is_whole:
            self._overwrites = reading.versions(batch) != before
        return result

    def _warn_of_probabilities(self, outputs: Tensor) -> None:
        """Say once where outputs look like probabilities and are read as logits."""
        if self._looked_at:
            return
        are_normalised = self.likelihood.looks_normalised(outputs.detach())
        self._looked_at = are_normalised or len(outputs) >= SEVERAL
        if are_normalised:
            warnings.warn(
                "the model's outputs look like probabilities, and are read as logits; leave "
                "softmax or sigmoid out, or give a loss of probabilities as likelihood=",
                stacklevel=3,
            )

    def run_model(self, batch: Any, params: Mapping[str, Tensor]) -> Any:
        """What the model makes of a batch at these parameters, unchecked."""
        is_default = self.forward is reading.default_forward
        is_unlabelled = is_default and not reading.has_labels(batch)
        with _running(self.model, narrow(params)):
            if is_unlabelled:
                return reading.forward_of_inputs(self.model, batch), None
            return self.forward(self.model, batch)

    def at(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> ModelAt:
        """The model at these parameters and buffers (others: its own), in evaluation mode.

        >>> task = Task(torch.nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2))
        >>> outputs, targets = task.at(task.parameters()).run(torch.tensor([0, 5]))
        >>> outputs.shape, targets
        (torch.Size([2, 2]), tensor([0, 1]))
        """
        task = self if buffers is None else self.holding(buffers)
        return ModelAt(task, params)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run the model in eval mode inside; give every module its own mode back after.

        Raises:
            ModelError: a BatchNorm layer is in training mode or keeps no running statistics.
        """
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            if isinstance(module, _BatchNorm) and (module.running_mean is None or module.training):
                raise ModelError(
                    f"BatchNorm layer {name!r} mixes examples; eval() it, or use GroupNorm"
                )
        modes = {module: module.training for module in modules.values()}
        try:
            if any(modes.values()):
                self.model.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


@dataclass(frozen=True)
class ModelAt:
    """A task's model at given weights, in evaluation mode: see :meth:`Task.at`."""

    task: Task
    params: Mapping[str, Tensor]

    def run(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of these examples.

        Raises:
            ModelError, DataError: as :meth:`Task.run`, :meth:`Task.fetch`, :meth:`Task.evaluation`.
        """
        return self.run_batch(self.task.fetch(indices), indices)

    def run_batch(self, batch: Any, indices: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same for a batch that :meth:`Task.fetch` gave."""
        with self.task.evaluation():
            return self.task.run(batch, self.params, indices)


Entry = tuple[Any, str, Any]  # a dictionary, a key, and the value while a model runs


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inside = getattr(model, "_orig_mod", None)
    return unwrapped(inside) if isinstance(inside, nn.Module) else model


@contextmanager
def _running(model: nn.Module, params: Mapping[str, Tensor]) -> Iterator[None]:
    """The model at these parameters and buffers, detached from its own others, and as it can be
    differentiated: what is inside of non-reentrant checkpoints runs once (they would run it again
    in the backward pass, when those weights are gone), recurrent layers by torch's own kernels
    (cuDNN's have no backward in eval mode), and the gradients of embeddings are dense."""

    def once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    layers = list(model.modules())
    of_checkpoints: dict[str, Any] = checkpoint.__dict__
    entries: list[Entry] = [(of_checkpoints, "_checkpoint_without_reentrant_generator", once)]
    for layer in layers:
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            entries.append((vars(layer), "sparse", False))
    entries += _values_at(model, params)
    values_before = [place[key] for place, key, _ in entries]
    cudnn: Any = torch.backends.cudnn
    enabled_before = cudnn.enabled
    is_recurrent = any(isinstance(layer, nn.RNNBase) for layer in layers)
    try:
        cudnn.enabled = enabled_before and not is_recurrent
        for place, key, value in entries:
            place[key] = value
        yield
    finally:
        cudnn.enabled = enabled_before
        for (place, key, _), value in zip(entries, values_before, strict=True):
            place[key] = value


def _values_at(model: nn.Module, params: Mapping[str, Tensor]) -> list[Entry]:
    """What stands at every place of a tensor; a tied one has the same at all of its places."""
    entries: list[Entry] = []
    values: dict[int, Tensor] = {}
    for place, key, tensor, name in _places(model):
        if id(tensor) not in values:  # the first place of a tied tensor is its name
            values[id(tensor)] = tensor.detach()
            if name in params:
                values[id(tensor)] = stored(params[name], tensor).to(tensor.device)
        entries.append((place, key, values[id(tensor)]))
    return entries


def per_pixel(likelihood: Likelihood, examples: reading.Examples) -> Likelihood:
    """The likelihood of every pixel, where that of classes has images of classes as targets, as
    ``torch.nn.CrossEntropyLoss`` takes them."""
    if type(likelihood) is not Categorical:
        return likelihood
    batch = examples.batch(torch.zeros(1, dtype=torch.long))
    if not reading.has_labels(batch):
        return likelihood
    _, labels = reading.padding(batch)
    are_images = isinstance(labels, Tensor) and labels.ndim >= 3 and not labels.is_floating_point()
    if not are_images:
        return likelihood
    ignored = -100 if likelihood.ignore_index is None else likelihood.ignore_index
    return TokenCategorical(ignored, likelihood.weight, likelihood.label_smoothing)


def checked_model(model: Any) -> nn.Module:
    """The model, or what a compiled or data-parallel one wraps.

    Raises:
        InputError: no module.
        ModelError: lazy parameters, or a model that is divided among processes.
    """
    instance("model", model, nn.Module, "a torch.nn.Module")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ModelError(f"parameter {lazy[0]!r} is lazy, without a shape; run a batch first")
    inside = unwrapped(model)
    if divided(inside) or any(map(is_sharded, inside.parameters())):
        raise ModelError("the model is sharded; load its full state dict into a plain one")
    return inside


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Of the first parameter of real numbers."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


def _weighted(likelihood: Likelihood, weights: Any, n_data: int) -> Weighted:
    if likelihood.is_sequence:
        raise InputError("weights= are for one target per example, not for sequences")
    with told_as(InputError, "weights must be numbers, one per example"):
        is_pandas = hasattr(weights, "to_numpy")
        values = weights.to_numpy(copy=True) if is_pandas else weights
        w = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    are_possible = bool((w.isfinite() & (w >= 0)).all()) and bool(w.any())
    if w.shape != (n_data,) or not are_possible:
        raise InputError(f"weights must be {n_data} finite numbers, 0 or more, and not all 0")
    return Weighted(likelihood.plain, w)


def parameter_places(module: nn.Module) -> dict[str, nn.Parameter]:
    """Every place below a module that holds a parameter, by name, each place once.

    What ``functional_call(..., tie_weights=False)`` must be given: tied tensors have several
    places, and a module that is registered twice has its own only once, because
    ``functional_call`` would swap those twice and give back the wrong ones.
    """
    return {name: p for *_, p, name in _places(module) if isinstance(p, nn.Parameter)}


def _places(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor, str]]:
    """Every place below a module that holds a parameter or a buffer: where, what, by which name."""
    places = []
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for tensors in (part._parameters, part._buffers):
            for attribute, tensor in tensors.items():
                if tensor is not None:
                    places.append((tensors, attribute, tensor, prefix + attribute))
    return places


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _form(batch: Any) -> Any:
    """What a batch is made of: its structure, and the dimensions and dtypes of its tensors."""
    leaves, spec = tree_flatten(batch)
    return spec, [(x.ndim, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves]


def find_device(device: str | torch.device) -> torch.device:
    """The device of this name.

    Raises:
        DeviceError: an unknown name, or this machine, or this build of torch, does not have it.
    """
    if str(device).split(":")[0] in ("gpu", "nvidia"):
        raise DeviceError(f'device {device!r} cannot be used here: write "cuda"; "cpu" can')
    with told_as(DeviceError, f"device {device!r} cannot be used here", '"cpu" can'):
        return torch.empty(0, device=device).device  # "cuda" → "cuda:0"


def _device(device: str | torch.device | None, model: nn.Module) -> torch.device:
    if device is None:
        first = next(model.parameters(), None)
        return first.device if first is not None else torch.device("cpu")
    wanted = find_device(device)
    elsewhere = next((n for n, p in model.named_parameters() if p.device.type != wanted.type), None)
    if elsewhere is not None:
        raise DeviceError(f"parameter {elsewhere!r} is on another device; use model.to({device!r})")
    return wanted
