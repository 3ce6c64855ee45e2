"""The sweeps over a task's data to which a precision is fitted, and the columns that they sum.

A precision is a sum over examples, Σ_i G_iᵀ G_i. The rows of G_i are gradients J_iᵀ c_ik of the
outputs. The vectors c_ik ``[C]`` are called the columns of example i. They are the columns of a
root of the example's curvature at its outputs (GGN), its error (empirical Fisher), or the errors of
labels that are drawn from the model's prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks, n_outputs
from blr_analysis.backprop.head import with_head
from blr_analysis.backprop.record import indices_of_rank
from blr_analysis.backprop.terms import Term, Tree
from blr_analysis.data.batches import mask_and_labels
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import Likelihood
from blr_analysis.likelihoods.tokens import CausalLM
from blr_analysis.posterior.prior import Prior
from blr_analysis.task import Task

EXACT_OUTPUTS = 256  # for more outputs, labels are drawn unless the user says otherwise
MANY_OUTPUTS = 64  # from so many outputs on, the closed form of the last layer is faster
LARGEST_SAMPLE = 256  # sequences of a sampled fit, and at most of a search for directions
# A layer's directions are found in a sample of sequences …
SMALLEST_SAMPLE = 32  # sequences at least
TOKENS_PER_INPUT = 10  # tokens that are enough, for each input of the widest layer
# … and in so many gradients at least, of all examples together.
LEAST_GRADIENTS = 512


@dataclass
class Fit:
    """Sweeps over a task's data at some weights.

    Attributes:
        task, params, curvature, samples, seed, rank, unfinished: as passed to
            :func:`~blr_analysis.posterior.one_fit.fit_at_weights`.
        prior: δ and θ₀; δ is 1 until it is found.
        labels_drawn: the number of labels that are drawn for each example, in place of the exact
            columns of "ggn"; 0 if the columns are exact.
        sample: the examples that sweeps visit, whose sums are multiplied by ``scale``; None: all.
        measures_gradient: whether the first sweep over all data sums the gradient too, by one more
            column.
        gradient: Σ_i ∇ℓ_i by parameter name; empty before that sweep.
    """

    task: Task
    params: dict[str, Tensor]
    prior: Prior
    curvature: str
    samples: int
    seed: int
    rank: int | None
    unfinished: Mapping[str, Unfinished]
    labels_drawn: int = 0
    sample: Tensor | None = None
    measures_gradient: bool = False
    gradient: Tree = field(default_factory=dict)

    @cached_property
    def seeds(self) -> Tensor:
        """A random seed for the labels of each example, ``[N]``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(2**31, (self.task.n_data,), generator=generator)

    @property
    def scale(self) -> float:
        """The factor that turns sums over the sample into sums over all examples."""
        return 1.0 if self.sample is None else self.task.n_data / len(self.sample)

    def columns(self) -> int:
        """The number of columns of an example."""
        if self.labels_drawn:
            return self.labels_drawn
        if self.curvature == "empirical_fisher":
            return 1
        if self.curvature == "mc_fisher":
            return self.samples
        return n_outputs(self.task, self.params)

    def mixed_columns(self, n_examples: int) -> int | None:
        """The number of random sums of an example's columns that show a layer's directions.

        None if the columns themselves are not more than these sums.
        """
        enough = math.ceil(LEAST_GRADIENTS / n_examples)
        return enough if enough < self.columns() else None

    def passes(
        self,
        label: str,
        indices: Tensor | None = None,
        unfinished: Unfinished | None = None,
        by_layer: bool = False,
        mixed: int | None = None,
    ) -> Iterator[list[Term]]:
        """The terms of the examples' columns, chunk by chunk.

        Args:
            label: the text of the progress bar.
            indices: the examples to visit; None: the sample, or all if there is no sample.
            unfinished: the sums of a sweep that was cut off.
            by_layer: whether the caller sums each layer by itself. The last layer then gets exact
                sums in place of columns if it has many outputs, or if columns are mixed.
            mixed: this many sums of an example's columns, with random signs, replace the columns;
                their G Gᵀ has the same mean. None: the columns themselves.
        """
        sums_gradient = self.measures_gradient and not self.gradient and indices is None
        if indices is None:
            indices = self.sample
        # The column of the empirical Fisher is the error itself.
        needs_error_column = sums_gradient and self.curvature != "empirical_fisher"
        if sums_gradient:
            self.gradient.update({n: torch.zeros_like(p) for n, p in self.params.items()})
        signs = None if mixed is None else self._signs(mixed)
        fewest_outputs = _fewest_outputs_of_head(by_layer, is_mixed=signs is not None)
        sweep = chunks(
            self.task,
            self.params,
            columns=(mixed or self.columns()) + int(needs_error_column),
            indices=indices_of_rank(self.task, self.params, indices),
            label=label,
            unfinished=unfinished,
            in_order=False,
        )
        for chunk in sweep:
            columns = self._columns_of(chunk, signs)
            if needs_error_column:
                columns = _with_error(chunk, columns)
            head, head_parts = self._exact_head(chunk, fewest_outputs)
            terms = chunk.terms(columns, last=True)
            if sums_gradient:
                self._add_gradient(terms)
            if needs_error_column:
                terms = [term.columns(slice(-1)) for term in terms]
            yield with_head(terms, head, head_parts)
        if sums_gradient:
            self._finish_gradient()

    def with_gradient(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These sums and those of the gradient, by their names in a file of unfinished sums."""
        gradients = {f"gradient of {name}": g for name, g in self.gradient.items()}
        return {**sums, **gradients}

    def _add_gradient(self, terms: Sequence[Term]) -> None:
        """Add Σ_i J_iᵀ e_i of a chunk, from the last column of its terms, to the gradient."""
        for term in terms:
            for name, gradient in term.columns(slice(-1, None)).sum().items():
                self.gradient[name] += gradient

    def _finish_gradient(self) -> None:
        """Turn the sums over this rank's examples of the sample into Σ_i ∇ℓ_i over all examples."""
        for gradient in self.gradient.values():
            gradient.mul_(self.scale)
        ranks.total(self.gradient.values())

    def _exact_head(
        self, chunk: Chunk, fewest_outputs: int | None
    ) -> tuple[str | None, tuple[Tensor, Tensor] | None]:
        """The name of the last layer's weight, and s and v of Λ = diag(s) − v vᵀ.

        Both are None if the last layer has less than ``fewest_outputs`` outputs, or if Λ does not
        have this form.
        """
        outputs = chunk.outputs
        has_class_scores = self.curvature == "ggn" and outputs.ndim == 2
        if fewest_outputs is None or not has_class_scores or outputs.shape[1] < fewest_outputs:
            return None, None
        parts = chunk.likelihood.hessian_parts(outputs.double(), chunk.targets)
        return chunk.head, parts

    def _signs(self, mixed: int) -> Tensor:
        """Random signs ±1 of all examples, ``[N, mixed, K]`` in int8.

        They are drawn at once, so that they do not depend on how the data are cut into chunks.
        """
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.task.n_data, mixed, self.columns())
        return torch.randint(2, shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)

    def _columns_of(self, chunk: Chunk, signs: Tensor | None) -> Tensor:
        """The columns c_ik, or sums of them with these signs: ``[B, K]`` + the outputs' shape."""
        columns = self._unmixed_columns(chunk)
        return columns if signs is None else _mixed(columns, signs[chunk.indices])

    def _unmixed_columns(self, chunk: Chunk) -> Tensor:
        """The columns c_ik of this curvature."""
        if self.curvature in ("ggn", "exact") and not self.labels_drawn:
            return curvature_root(chunk)
        if self.curvature == "empirical_fisher":
            return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
        n_labels = self.labels_drawn or self.samples
        errors = [
            chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, labels)
            for labels in drawn_labels(chunk, n_labels, self.seeds[chunk.indices])
        ]
        return torch.stack(errors, dim=1) / n_labels**0.5


def _fewest_outputs_of_head(by_layer: bool, is_mixed: bool) -> int | None:
    """The number of outputs from which on the last layer gets exact sums; None: it never does."""
    if not by_layer:
        return None
    return 1 if is_mixed else MANY_OUTPUTS


def _mixed(columns: Tensor, signs: Tensor) -> Tensor:
    """M random sums of the columns, over √M: ``[B, M, …]``.

    Args:
        columns: ``[B, K, …]``.
        signs: ``[B, M, ≥ K]``, of which the first K are used.
    """
    n_columns = columns.shape[1]
    n_sums = signs.shape[1]
    weights = signs[..., :n_columns].float() / n_sums**0.5
    return torch.einsum("bmk,bk...->bm...", weights.to(columns), columns)


def _with_error(chunk: Chunk, columns: Tensor) -> Tensor:
    """The columns ``[B, K, C]``, and the example's error e_i behind them."""
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    return torch.cat([columns, error.unsqueeze(1)], dim=1)


def has_many_outputs(task: Task, params: Mapping[str, Tensor]) -> bool:
    """Whether labels should be drawn, because a backward pass for each output takes too long.

    False for sequences, and for losses that have no labels to draw.
    """
    kind = type(task.likelihood.plain)
    draws_labels = kind.hessian_parts is not Likelihood.hessian_parts
    if task.likelihood.is_sequence or not draws_labels:
        return False
    return n_outputs(task, params) > EXACT_OUTPUTS


def vocabulary_of(task: Task, params: dict[str, Tensor]) -> int:
    """The number of outputs at each token of a causal language model; 0 for other models."""
    if not isinstance(task.likelihood, CausalLM):
        return 0
    index = torch.zeros(1, dtype=torch.long)
    with torch.no_grad(), task.evaluation():
        outputs, _ = task.run(task.fetch(index), params, index)
    return outputs.shape[-1]


def random_sequences(task: Task) -> Tensor | None:
    """Indices of the random sequences that stand for all in a sampled fit; None: all examples."""
    if not task.likelihood.is_sequence or task.n_data <= LARGEST_SAMPLE:
        return None
    return _shuffled(task)[:LARGEST_SAMPLE].sort().values


def _shuffled(task: Task) -> Tensor:
    return torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))


def sampled_examples(task: Task) -> Tensor | None:
    """Indices of random sequences with enough tokens to find the directions of each layer.

    None if all examples are needed, and for data that are not sequences. They are among those of
    :func:`random_sequences`.
    """
    if not task.likelihood.is_sequence or task.n_data <= SMALLEST_SAMPLE:
        return None
    order = _shuffled(task)
    size = _size_of_sample(task, probe=order[:SMALLEST_SAMPLE])
    return None if size >= task.n_data else order[:size].sort().values


def _size_of_sample(task: Task, probe: Tensor) -> int:
    """The number of sequences that have enough tokens for the widest layer.

    Args:
        probe: the sequences whose tokens are counted.
    """
    tokens_per_sequence = _mean_count_of_tokens(task, probe)
    if tokens_per_sequence is None:
        return LARGEST_SAMPLE
    matrices = [p.flatten(1) for p in task.parameters().values() if p.ndim > 1]
    most_inputs = max((matrix.shape[1] for matrix in matrices), default=0)
    enough = math.ceil(TOKENS_PER_INPUT * most_inputs / max(1.0, tokens_per_sequence))
    return min(LARGEST_SAMPLE, max(SMALLEST_SAMPLE, enough))


def _mean_count_of_tokens(task: Task, indices: Tensor) -> float | None:
    """The mean number of tokens that count in these sequences; None if labels are not found."""
    _, labels = mask_and_labels(task.fetch(indices))
    if not isinstance(labels, Tensor) or labels.shape[:1] != indices.shape:
        return None
    counted = task.likelihood.counted(labels)
    return None if counted is None else float(counted.sum()) / len(indices)


def curvature_root(chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ_i, ``[B, K, C]``.

    A root of a sequence's Λ_i would have T·C columns, which are too many. A sequence has one column
    instead, its error e_i, as in the empirical Fisher.
    """
    if chunk.likelihood.is_sequence:
        return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
    return chunk.likelihood.hessian_root(chunk.outputs, chunk.targets).mT


def drawn_labels(chunk: Chunk, samples: int, seeds: Tensor) -> list[Tensor]:
    """Labels drawn from the model's predictions: ``samples`` tensors, each shaped as the targets.

    Each example has a seed, so that its labels do not depend on how the data are cut into chunks.
    """
    counted = chunk.likelihood.counted(chunk.targets)
    if counted is not None:
        return _drawn_tokens(chunk, counted, samples, seeds)
    outputs = chunk.outputs.cpu()
    targets = chunk.targets.cpu()
    generator = torch.Generator()
    labels_by_example = []
    for row, seed in enumerate(seeds.tolist()):
        generator.manual_seed(seed)
        output = outputs[row : row + 1]
        target = targets[row : row + 1]
        labels_by_example.append(
            [chunk.likelihood.resample(output, target, generator) for _ in range(samples)]
        )
    by_sample = zip(*labels_by_example, strict=True)
    return [torch.cat(labels).to(chunk.outputs.device) for labels in by_sample]


def _drawn_tokens(chunk: Chunk, counted: Tensor, samples: int, seeds: Tensor) -> list[Tensor]:
    """Labels drawn for the tokens of sequences: ``samples`` tensors ``[B, T]``.

    The drawn class is the first one whose cumulated probability is above a uniform number.

    Args:
        counted: which tokens have a label that counts, ``[B, T]``; the others keep their label.
    """
    generator = torch.Generator()
    uniform = torch.zeros(*counted.shape, samples)
    for row, seed in enumerate(seeds.tolist()):
        generator.manual_seed(seed)
        places = counted[row].cpu()
        uniform[row, places] = torch.rand(int(places.sum()), samples, generator=generator)
    cumulated = chunk.outputs.softmax(-1).cumsum(-1)
    total = cumulated[..., -1:]  # 1 up to rounding
    last_class = cumulated.shape[-1] - 1
    heights = uniform.to(cumulated) * total
    classes = torch.searchsorted(cumulated, heights, right=True).clamp_max(last_class)
    return [torch.where(counted, labels, chunk.targets) for labels in classes.unbind(-1)]
