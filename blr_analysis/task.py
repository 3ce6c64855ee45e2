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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from blr_analysis.checks import instance, positive_int
from blr_analysis.data.batches import (
    describe,
    has_labels,
    mask_and_labels,
    padded_behind,
    refuse_unlabelled,
    to_device,
    write_counts,
)
from blr_analysis.data.examples import Examples
from blr_analysis.data.frames import open_data
from blr_analysis.data.outputs import (
    Forward,
    check_inputs,
    checked,
    checked_outputs,
    default_forward,
    forward_of_inputs,
)
from blr_analysis.data.reading import read_data
from blr_analysis.data.row_labels import (
    chosen_indices,
    labels_beside,
    read_metadata,
    row_labels,
)
from blr_analysis.errors import InputError, ModelError, told_as
from blr_analysis.estimators import centred, read_estimator
from blr_analysis.frozen import FrozenOutputs
from blr_analysis.half import narrow, shared, widened, working
from blr_analysis.likelihoods import (
    MIN_TO_TELL_LOGITS,
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
from blr_analysis.models import checked_model, copied, device_for, dtype_of, running_at
from blr_analysis.modes import training_modes
from blr_analysis.padding import IGNORED, padding_of
from blr_analysis.ranks import divided, gathered_piece, is_sharded
from blr_analysis.recipe import Recipe
from blr_analysis.runs import recipe_of_weights
from blr_analysis.snapshots import Snapshots

DEFAULT_BATCH = 256  # examples in a forward pass where the user names no number
# A task on other data, or with another model, has lost these: they belong to the training.
WITHOUT_TRAINING = {"checkpoints": (), "prior_precision": None}


class Task:
    """A model, the data it was trained on, and its likelihood.

    Args:
        model: any ``torch.nn.Module``. A compiled or data-parallel model is unwrapped. The model is
            never changed: weights are swapped functionally, and mode, hooks, ``requires_grad`` and
            gradients are left as they are. Weights that ``fully_shard`` divides among processes,
            and frozen ones that are quantised or offloaded, stay so.
        data: a map-style ``Dataset``, a ``DataLoader`` (its dataset and ``collate_fn`` are used in
            dataset order, whatever its shuffling), a pair ``(X, y)`` of tensors, a pandas DataFrame
            or one split of a ``datasets.Dataset`` (see ``target``). The same index must give the
            same example on every visit. Random crops, flips and noise of the training belong to
            ``Recipe(augment=)``. Inputs without labels (X alone, or a data set of inputs) serve
            ``posterior.predict`` and :func:`blr_analysis.acquire`.
        likelihood: "categorical" (also of images with a class per pixel, outputs ``[B, C, H, W]``),
            "bernoulli", "gaussian", "poisson"; for sequences "tokens" (one class per token) and
            "causal_lm"; the loss of ``torch.nn`` that the model was trained with, whose settings
            are read (:mod:`blr_analysis.likelihoods.modules` says how δ follows from its
            reduction); any function (outputs, targets) -> loss of each example ``[B]``; or a
            :class:`~blr_analysis.likelihoods.Likelihood`.
        weights: w_i ≥ 0 of every example, ``[N]``: its loss counts w_i times. The losses of a task
            and their means include its weights, on test data too; accuracies do not.
        forward: ``(model, batch) -> (outputs, targets)``; the default takes ``(x, y)`` pairs and
            Hugging Face dict batches with a ``labels`` entry.
        batch_size: examples in one forward pass, and in a chunk of an analysis. None: 256 in a
            pass, and as many in a chunk as ``memory_budget`` allows.
        memory_budget: how many bytes of memory to use beyond model and data. An analysis takes at
            least what one example needs. None: enough for 8 examples, at least 56 MiB (1 GiB on a
            GPU), and at most 1 GiB or four times the bytes of the parameters, whichever is more.
            The outputs of frozen layers are kept in as many bytes again (None: the bytes of the
            model's weights, 64 MiB or more).
        progress: None shows a bar on a terminal when the work is long; True always, False never.
        device: where batches are sent; default: the model's own device.
        metadata: columns that describe the examples (``{"source": [...]}`` or a DataFrame), one
            value for each example. They appear in every table, and examples can be selected by
            them. If the data are pandas objects, ``metadata`` and ``weights`` from pandas must have
            the same index; a mask that is a Series, and a pandas Index, select rows by it. If the
            data are tensors, their rows are 0 … N − 1, and another index is refused: call
            ``reset_index(drop=True)`` if the order is that of the data. A y with an index beside a
            tensor X gives a warning.
        checkpoints: weights along the training, oldest first: state dicts, safetensors files, a
            trainer's folders, one folder of ``checkpoint-*``, or a
            :class:`blr_analysis.Checkpoints`. The model's own weights are the last.
        recipe: how the model was trained, a :class:`blr_analysis.Recipe`; None: the recipe that
            callbacks stored in the folder of the checkpoints, if they did.
        target: the column to predict. In a DataFrame, the columns of numbers are the inputs, in
            their order and in the model's dtype, and the columns of words are metadata. Labels that
            are words are numbered from 0 in the order of their ``pd.Categorical``, or else of the
            alphabet. In a ``datasets.Dataset``, name the column that the model calls ``labels``,
            unless it has that name or ``label``. Columns of words, and columns that a transformers
            model does not take, are metadata. Rows of unequal length are padded as in its Trainer.
            A data set with a transform gives what the transform returns, without metadata.

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
        forward: Forward | None = None,
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
        self.forward: Forward = forward or default_forward
        self.device = device_for(self.model, device)
        self.chunk_size = None if batch_size is None else positive_int("batch_size", batch_size)
        self.batch_size = self.chunk_size or DEFAULT_BATCH
        if memory_budget is not None:
            positive_int("memory_budget", memory_budget)
        self.memory_budget = memory_budget
        self.progress = progress
        self._read(data, target, likelihood, weights, metadata)
        self._learn_of_training(likelihood, checkpoints, recipe)
        self.prior_precision: Any = None  # δ, where the data's reader knows it
        self.frozen = FrozenOutputs(self.dataset, self.examples.collate)
        self.plans: dict[Any, Any] = {}  # how the engine reads this model; backprop fills it
        self._has_checked_logits = False  # whether outputs were compared with probabilities
        self._writes_to_inputs = True  # whether the model works in place; the first run tells
        plain = self.likelihood
        if type(plain) is Categorical and self._predicts_pixels_without_labels():
            self.likelihood = tokens_of(plain)

    def _read(
        self, data: Any, target: str | None, likelihood: Loss, weights: Any, metadata: Any
    ) -> None:
        """Read the examples, their metadata, and the likelihood of their targets."""
        kind = resolve(likelihood)
        has_own_forward = self.forward is not default_forward
        padding = padding_of(self.model, kind)
        model_that_takes_columns = None if has_own_forward else self.model
        opened = open_data(data, target, dtype_of(self.model), model_that_takes_columns, padding)
        examples = read_data(opened.data, padding)
        self.n_data = len(examples)
        if not has_own_forward:
            kind = per_pixel(kind, examples)
        self.likelihood = kind if weights is None else _weighted(kind, weights, self.n_data)
        table = opened.metadata if metadata is None else metadata
        self.metadata = read_metadata(table, self.n_data)
        columns: dict[str, Any] = {"weights": weights}
        if table is not None:
            for name in table:
                columns[f"metadata {name!r}"] = table[name]
        labels = labels_beside(columns, self.n_data, examples.labels)
        self.examples = replace(examples, labels=labels)

    def _predicts_pixels_without_labels(self) -> bool:
        """Whether unlabelled inputs have outputs ``[B, C, H, W]``; one example tells.

        A model that fails on it fails again where it is used, with a better reason.
        """
        batch = self.examples.batch(torch.zeros(1, dtype=torch.long))
        is_unlabelled = self.forward is default_forward and not has_labels(batch)
        if not is_unlabelled:
            return False
        try:
            with torch.no_grad(), self.evaluation():
                returned, _ = self._forward_pass(batch, {}, None)
        except ModelError:
            return False
        outputs = getattr(returned, "logits", returned)
        return isinstance(outputs, Tensor) and outputs.ndim >= 4

    def _learn_of_training(self, loss: Loss, checkpoints: Any, recipe: Recipe | None) -> None:
        """Read how the model was trained: its loss's reduction, modes, checkpoints and recipe."""
        self.reduction = reduction_of(loss)
        self.mean_over_outputs = is_mean_over_outputs(loss)
        self.modes = getattr(checkpoints, "modes", None) or training_modes(self.model)
        self.checkpoints: Sequence[Any] | Snapshots = ()
        if checkpoints is not None:
            self.checkpoints = Snapshots(checkpoints, self.model)
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
            likelihood: replaces the one that is read from the estimator. Test data take over the
                noise of a regression and the weights of "balanced" classes from the training task
                or its posterior.
            metadata: as for :class:`Task`; labels that are words become the column ``label``,
                unless it has one.

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
        examples = read_data((fitted_to.inputs, fitted_to.targets))
        labels = row_labels({"X": X, "y": y}, len(examples))
        task = cls(
            fitted.model,
            replace(examples, labels=labels, classes=fitted_to.classes),
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
        facts = [
            type(self.model).__name__,
            f"{self.n_data} examples",
            self.likelihood.name,
            f"device={self.device}",
        ]
        return f"Task({', '.join(facts)})"

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
        chosen = chosen_indices(indices, self.n_data, labels=self.examples.labels)
        if not chosen:
            raise InputError(f"indices select none of the {self.n_data} examples")
        return self._changed(
            examples=self.examples.subset(chosen),
            n_data=len(chosen),
            likelihood=self.likelihood.at(torch.tensor(chosen)),
            metadata=self._metadata_of(chosen),
            recipe=self.recipe and self.recipe.of_examples(chosen),
            **WITHOUT_TRAINING,
        )

    def _metadata_of(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """The metadata of the examples at these indices."""
        return {
            name: [values[index] for index in indices] for name, values in self.metadata.items()
        }

    def _changed(self, **attributes: Any) -> Task:
        """A copy of the task with these attributes."""
        task = copy.copy(self)
        vars(task).update(attributes)
        return task

    def reading(self, examples: Examples) -> Task:
        """The same task with these examples, the same data read in another way."""
        return self._changed(examples=examples)

    def with_model(self, task: Task) -> Task:
        """These examples, read as they are here, under the model and on the device of ``task``.

        A noise, or weights of classes, that this task estimated from its data are replaced by
        those that ``task`` estimated from the training data.

        Raises:
            InputError: DataFrames with other columns, or with other words for their classes.
        """
        self.examples.check_coded_as(task.examples)
        joined = self
        if self.model is not task.model or self.device != task.device:
            joined = self.under(task.model, task.device)
            if self.likelihood.estimated and task.likelihood.estimated:
                joined.likelihood = task.likelihood
        same_kind = joined.likelihood.is_sequence == task.likelihood.is_sequence
        if same_kind and joined.forward is task.forward:
            first = torch.zeros(1, dtype=torch.long)
            are_read_alike = _form(joined.fetch(first)) == _form(task.fetch(first))
            if are_read_alike:
                joined.plans = task.plans
        return joined

    def holding(self, buffers: Mapping[str, Tensor]) -> Task:
        """The same task under a model with these buffers: a copy, if the model's own differ."""
        model_buffers = dict(self.model.named_buffers())
        are_equal = all(
            torch.equal(model_buffers[name], buffers[name].to(model_buffers[name]))
            for name in buffers.keys() & model_buffers.keys()
        )
        if are_equal:
            return self
        model = copied(self.model)
        model.load_state_dict(dict(buffers), strict=False)
        return self.under(model, self.device)

    def under(self, model: nn.Module, device: torch.device) -> Task:
        """These examples, read as they are here, under another model on that device."""
        frozen = self.frozen.of_other_model()
        return self._changed(
            model=model, device=device, plans={}, frozen=frozen, **WITHOUT_TRAINING
        )

    def fetch(self, indices: Tensor) -> Any:
        """The collated batch of these examples, on the task's device.

        Autograd can take its tensors, also inside of ``torch.inference_mode``. For a causal
        language model, the padding before a sequence is moved behind it.

        Raises:
            DataError: the dataset fails on an index, or its collate function on a batch.
        """
        with torch.inference_mode(False):
            batch = to_device(self.examples.batch(indices), self.device)
            if isinstance(self.likelihood.kind, CausalLM):
                batch = padded_behind(batch, self.likelihood.kind.ignore_index)
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            # Autograd does not take tensors of inference mode.
            if self._writes_to_inputs or any(tensor.is_inference() for tensor in tensors):
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
        """The model's trainable parameters by name, detached.

        Tied tensors stand once; half precision is read in float32. Tensors that ``fully_shard``
        divides are whole here.
        """
        divided(self.model)
        trainable = {
            name: gathered_piece(parameter).detach()
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return widened(trainable)

    def cast(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These values in half precision where the model's parameters are.

        A value that equals the model's own is the model's own tensor, so that it is stored once.
        """
        weights = dict(self.model.named_parameters())
        values = dict(narrow(params))
        for name in values.keys() & weights.keys():
            if not is_sharded(weights[name]):
                values[name] = shared(values[name], weights[name])
        return values

    def check_parameters(self, names: Collection[str]) -> torch.dtype:
        """The dtype of the sums over these parameters: their own, or float32 for half precision.

        Raises:
            ModelError: several dtypes, complex or whole numbers, no values.
        """
        weights = dict(self.model.named_parameters())
        without_values = [name for name in names if weights[name].is_meta]
        if without_values:
            raise ModelError(
                f"parameter {without_values[0]!r} is on the meta device; load the weights"
            )
        name_of_dtype = {working(weights[name].dtype): name for name in names}
        if len(name_of_dtype) > 1 or not name_of_dtype.keys() <= {torch.float32, torch.float64}:
            examples = ", ".join(
                f"{str(dtype).removeprefix('torch.')}: {name}"
                for dtype, name in name_of_dtype.items()
            )
            raise ModelError(
                f"parameters must be real, of one dtype ({examples}): use model.float()"
            )
        return next(iter(name_of_dtype))

    def run(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, C]`` and targets of a batch at these parameters, checked.

        Parameters that are not named are the model's own. For sequences the outputs are
        ``[B, T, C]``, as the likelihood scores them: 0 where the target is ignored. The model runs
        in its own dtype; outputs in half precision come back as float32.

        Args:
            indices: of the examples in the batch, ``[B]``, for messages and for frozen layers.

        Raises:
            ModelError: the model fails on the batch, does not return one row of finite numbers
                per example, or returns something else than outputs and targets.
            DataError: NaN or inf in the inputs, targets out of the likelihood's range, shape or
                dtype.
        """
        if self.forward is default_forward and not has_labels(batch):
            refuse_unlabelled(batch)
        returned, labels = self._forward_pass(batch, params, indices)
        outputs, targets = checked(returned, labels, self.likelihood, indices)
        self._warn_of_one_hot(targets)
        self._warn_of_probabilities(outputs)
        return outputs, targets

    def predicted(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`run`, for inputs without labels too: their targets are None.

        Raises:
            ModelError, DataError: as :meth:`run`.
        """
        returned, labels = self._forward_pass(batch, params, indices)
        targets = None
        if labels is None:
            outputs = checked_outputs(returned, self.likelihood, indices)
        else:
            outputs, targets = checked(returned, labels, self.likelihood, indices)
        self._warn_of_probabilities(outputs)
        return outputs, targets

    def _forward_pass(
        self, batch: Any, params: Mapping[str, Tensor], indices: Tensor | None
    ) -> tuple[Any, Any]:
        """The model's outputs and the labels of the batch, or None for labels that it lacks."""
        if self.forward is default_forward:
            check_inputs(batch, indices)
        counts_before = write_counts(batch)
        fault = f"the model failed on a batch of {describe(batch)}"
        remedy = "give inputs of the shape and dtype of the training"
        frozen = self.frozen.reused(self, batch, params, indices)
        with told_as(ModelError, fault, remedy), frozen as whole_model_runs:
            result = self.run_model(batch, params)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(
                f"forward must return a tuple (outputs, targets), got {describe(result)}"
            )
        if whole_model_runs:
            self._writes_to_inputs = write_counts(batch) != counts_before
        return result

    def _warn_of_one_hot(self, targets: Tensor) -> None:
        """Warn once of one-hot targets, which have no labels to show or to group by."""
        if self._has_checked_logits or not self.likelihood.are_one_hot(targets.detach()):
            return
        warnings.warn(
            "the targets are one-hot; give y.argmax(-1), so that tables and groups have labels",
            stacklevel=3,
        )

    def _warn_of_probabilities(self, outputs: Tensor) -> None:
        """Warn once where outputs look like probabilities and are read as logits."""
        if self._has_checked_logits:
            return
        are_normalised = self.likelihood.looks_normalised(outputs.detach())
        self._has_checked_logits = are_normalised or len(outputs) >= MIN_TO_TELL_LOGITS
        if are_normalised:
            warnings.warn(
                "the model's outputs look like probabilities, but are read as logits; leave "
                "softmax or sigmoid out, or pass a loss of probabilities as likelihood=",
                stacklevel=3,
            )

    def run_model(self, batch: Any, params: Mapping[str, Tensor]) -> Any:
        """What ``forward`` returns for a batch at these parameters, unchecked.

        By the default forward function, inputs without labels give the outputs and None.
        """
        is_default = self.forward is default_forward
        is_unlabelled = is_default and not has_labels(batch)
        with running_at(self.model, narrow(params)):
            if is_unlabelled:
                return forward_of_inputs(self.model, batch), None
            return self.forward(self.model, batch)

    def at(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> ModelAt:
        """The model at these parameters and buffers, in evaluation mode.

        Parameters and buffers that are not named are the model's own.

        >>> task = Task(torch.nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2))
        >>> outputs, targets = task.at(task.parameters()).run(torch.tensor([0, 5]))
        >>> outputs.shape, targets
        (torch.Size([2, 2]), tensor([0, 1]))
        """
        task = self if buffers is None else self.holding(buffers)
        return ModelAt(task, params)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Inside, the model is in eval mode; every module has its own mode again after.

        Raises:
            ModelError: a BatchNorm layer is in training mode or keeps no running statistics.
        """
        modules = dict(self.model.named_modules())
        for name, module in modules.items():
            if isinstance(module, _BatchNorm) and (module.running_mean is None or module.training):
                raise ModelError(
                    f"BatchNorm layer {name!r} mixes examples; call model.eval(), or use GroupNorm"
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
        """Outputs and targets of a batch that :meth:`Task.fetch` returned."""
        with self.task.evaluation():
            return self.task.run(batch, self.params, indices)


def per_pixel(likelihood: Likelihood, examples: Examples) -> Likelihood:
    """The likelihood of every pixel, where the targets are images of classes.

    ``torch.nn.CrossEntropyLoss`` takes these targets too. Any other likelihood comes back as it is.
    """
    if type(likelihood) is not Categorical:
        return likelihood
    batch = examples.batch(torch.zeros(1, dtype=torch.long))
    if not has_labels(batch):
        return likelihood
    _, labels = mask_and_labels(batch)
    are_images = isinstance(labels, Tensor) and labels.ndim >= 3 and not labels.is_floating_point()
    if not are_images:
        return likelihood
    return tokens_of(likelihood)


def tokens_of(likelihood: Categorical) -> TokenCategorical:
    """The likelihood of every pixel or token, with the weights and smoothing of this one."""
    ignored = IGNORED if likelihood.ignore_index is None else likelihood.ignore_index
    return TokenCategorical(ignored, likelihood.weight, likelihood.label_smoothing)


def _weighted(likelihood: Likelihood, weights: Any, n_data: int) -> Weighted:
    """The likelihood with a weight for each example, ``[N]``.

    Raises:
        InputError: sequences, another number of weights, or weights below 0.
    """
    if likelihood.is_sequence:
        raise InputError("weights= are for one target per example, not for sequences")
    with told_as(InputError, "weights must be numbers, one per example"):
        is_pandas = hasattr(weights, "to_numpy")
        values = weights.to_numpy(copy=True) if is_pandas else weights
        vector = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    are_in_range = bool((vector.isfinite() & (vector >= 0)).all())
    if vector.shape != (n_data,) or not are_in_range or not vector.any():
        raise InputError(f"weights must be {n_data} finite numbers, 0 or more, and not all 0")
    return Weighted(likelihood.plain, vector)


def _copied(leaf: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _form(batch: Any) -> Any:
    """What a batch is made of: its structure, and the dimensions and dtypes of its tensors."""
    leaves, structure = tree_flatten(batch)
    kinds = [(leaf.ndim, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]
    return structure, kinds
