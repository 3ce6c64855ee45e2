"""The sweeps over a task's data to which a precision is fitted, and the columns that they sum.

A precision is a sum over examples, Σ_i G_iᵀ G_i. The rows of G_i are called columns of the example
i: gradients J_iᵀ c_ik, one for each column c_ik ``[C]`` of a root of the example's curvature at its
outputs (GGN), of its error (empirical Fisher), or of the errors of labels that are drawn.
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

EXACT_OUTPUTS = 256  # of an example: with more, labels are drawn unless the user says otherwise
MANY_OUTPUTS = 64  # from here on the closed form of the last layer is faster
LARGEST_SAMPLE = 256  # sequences of a sampled fit, and at most of a search for directions
SMALLEST_SAMPLE = 32  # sequences at least of such a search
TOKENS_PER_INPUT = 10  # of a layer: so many tokens show its directions
LEAST_GRADIENTS = 512  # of all examples together, in which a layer's directions are found


@dataclass
class Fit:
    """Sweeps over a task's data at some weights.

    Attributes:
        task, params, curvature, samples, seed, rank, unfinished: as passed to
            :func:`~blr_analysis.posterior.one_fit.fit_at_weights`.
        prior: δ and θ₀; δ is 1 until it is found.
        drawn: labels that are drawn of each example in place of the exact columns of "ggn"; 0 where
            the columns are exact.
        sample: the examples that sweeps visit, whose sums are multiplied by ``scale``; None: all.
        measures: whether the first sweep over all data sums the gradient too, by one more column.
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
    drawn: int = 0
    sample: Tensor | None = None
    measures: bool = False
    gradient: Tree = field(default_factory=dict)

    @cached_property
    def seeds(self) -> Tensor:
        """A random seed for each example's labels, ``[N]``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(2**31, (self.task.n_data,), generator=generator)

    @property
    def scale(self) -> float:
        """Makes sums over the sample sums over all examples."""
        return 1.0 if self.sample is None else self.task.n_data / len(self.sample)

    def columns(self) -> int:
        """How many columns an example has."""
        if self.drawn:
            return self.drawn
        if self.curvature == "empirical_fisher":
            return 1
        if self.curvature == "mc_fisher":
            return self.samples
        return n_outputs(self.task, self.params)

    def mixed_columns(self, n_examples: int) -> int | None:
        """How many random sums of an example's columns are enough to find a layer's directions;
        None where the columns themselves are fewer."""
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
            label: of the progress bar.
            indices: of the examples; None: all, or the sample.
            unfinished: the sums of a sweep that was cut off.
            by_layer: whether the caller sums each layer by itself. The last layer then gets exact
                sums in place of columns where it has many outputs, or where columns are mixed.
            mixed: so many sums of an example's columns with random signs take the columns' place;
                their G Gᵀ has the same mean. None: the columns themselves.
        """
        sums_gradient = self.measures and not self.gradient and indices is None
        if indices is None:
            indices = self.sample
        needs_error_column = sums_gradient and self.curvature != "empirical_fisher"
        if sums_gradient:
            self.gradient.update({n: torch.zeros_like(p) for n, p in self.params.items()})
        signs = None if mixed is None else self._signs(mixed)
        fewest_outputs = None  # of a last layer with exact sums
        if by_layer:
            fewest_outputs = MANY_OUTPUTS if signs is None else 1
        sweep = chunks(
            self.task,
            self.params,
            columns=(mixed or self.columns()) + int(needs_error_column),
            indices=indices_of_rank(self.task, self.params, indices),
            label=label,
            unfinished=unfinished,
        )
        for chunk in sweep:
            columns = self._curvature_columns(chunk, signs)
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
            for gradient in self.gradient.values():
                gradient.mul_(self.scale)
            ranks.total(self.gradient.values())

    def with_gradient(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These sums and the gradient's, as a file of unfinished sums names them."""
        gradients = {f"gradient of {name}": g for name, g in self.gradient.items()}
        return {**sums, **gradients}

    def _add_gradient(self, terms: Sequence[Term]) -> None:
        """Add to the gradient the last column of the terms, J_iᵀ e_i, of all examples."""
        for term in terms:
            for name, gradient in term.columns(slice(-1, None)).sum().items():
                self.gradient[name] += gradient

    def _exact_head(
        self, chunk: Chunk, fewest_outputs: int | None
    ) -> tuple[str | None, tuple[Tensor, Tensor] | None]:
        """The name of the last layer's weight, and s and v of Λ = diag(s) − v vᵀ.

        Both are None where the last layer has fewer outputs than that, or Λ no such form.
        """
        outputs = chunk.outputs
        has_class_scores = self.curvature == "ggn" and outputs.ndim == 2
        if fewest_outputs is None or not has_class_scores or outputs.shape[1] < fewest_outputs:
            return None, None
        parts = chunk.likelihood.hessian_parts(outputs.double(), chunk.targets)
        return chunk.head, parts

    def _signs(self, mixed: int) -> Tensor:
        """Random signs of all examples, over √mixed: ``[N, mixed, K]``.

        They are drawn at once, so that they do not depend on how the data are cut into chunks.
        """
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.task.n_data, mixed, self.columns())
        signs = 2 * torch.randint(2, shape, generator=generator) - 1
        return signs.float() / mixed**0.5

    def _curvature_columns(self, chunk: Chunk, signs: Tensor | None) -> Tensor:
        """The columns c_ik of this curvature, or their sums with these signs: ``[B, K, …]``, with
        the outputs' shape at the end."""
        columns = self._unmixed_columns(chunk)
        return columns if signs is None else _mixed(columns, signs[chunk.indices])

    def _unmixed_columns(self, chunk: Chunk) -> Tensor:
        if self.curvature in ("ggn", "exact") and not self.drawn:
            return curvature_root(chunk)
        if self.curvature == "empirical_fisher":
            return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
        n_labels = self.drawn or self.samples
        errors = [
            chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, labels)
            for labels in drawn_labels(chunk, n_labels, self.seeds[chunk.indices])
        ]
        return torch.stack(errors, dim=1) / n_labels**0.5


def _mixed(columns: Tensor, signs: Tensor) -> Tensor:
    """Sums of the columns ``[B, K, …]`` with the first K of the signs ``[B, M, ≥ K]``, shaped
    ``[B, M, …]``."""
    n_columns = columns.shape[1]
    signs_of_columns = signs[..., :n_columns].to(columns)
    return torch.einsum("bmk,bk...->bm...", signs_of_columns, columns)


def _with_error(chunk: Chunk, columns: Tensor) -> Tensor:
    """The columns ``[B, K, C]``, and the example's error e_i behind them."""
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    return torch.cat([columns, error.unsqueeze(1)], dim=1)


def has_many_outputs(task: Task, params: Mapping[str, Tensor]) -> bool:
    """Whether labels should be drawn, because a backward pass for each output takes too long.

    False for losses that have no labels to draw.
    """
    kind = type(task.likelihood.plain)
    has_hessian_parts = kind.hessian_parts is not Likelihood.hessian_parts
    if task.likelihood.is_sequence or not has_hessian_parts:
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

    None where all examples are needed, and for data that are not sequences. They are among those
    of :func:`random_sequences`.
    """
    if not task.likelihood.is_sequence or task.n_data <= SMALLEST_SAMPLE:
        return None
    order = _shuffled(task)
    size = LARGEST_SAMPLE
    tokens_per_sequence = _mean_count_of_tokens(task, order[:SMALLEST_SAMPLE])
    if tokens_per_sequence is not None:
        matrices = [p.flatten(1) for p in task.parameters().values() if p.ndim > 1]
        widest = max((matrix.shape[1] for matrix in matrices), default=0)
        enough = math.ceil(TOKENS_PER_INPUT * widest / max(1.0, tokens_per_sequence))
        size = min(LARGEST_SAMPLE, max(SMALLEST_SAMPLE, enough))
    return None if size >= task.n_data else order[:size].sort().values


def _mean_count_of_tokens(task: Task, indices: Tensor) -> float | None:
    """The mean number of tokens that count in these sequences; None where labels are not found."""
    _, labels = mask_and_labels(task.fetch(indices))
    if not isinstance(labels, Tensor) or labels.shape[:1] != indices.shape:
        return None
    counted = task.likelihood.counted(labels)
    return None if counted is None else float(counted.sum()) / len(indices)


def curvature_root(chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ_i, ``[B, K, C]``.

    A sequence's Λ_i has T·C columns, which are too many. Its one column is the error e_i of the
    empirical Fisher.
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
    """The same for sequences, by inversion: the drawn class is the first one whose cumulated
    probability is above a uniform number.

    Args:
        counted: which tokens have a label that counts, ``[B, T]``; the others keep theirs.
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
    return [torch.where(counted, drawn, chunk.targets) for drawn in classes.unbind(-1)]
