"""What a structure is fitted to: sweeps over a task's data, and the columns that they sum."""

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

EXACT_OUTPUTS = 256  # up to here every output of an example is differentiated unless told otherwise
MANY = 64  # outputs, from which on the closed form of the last layer is faster
SAMPLE = 256  # sequences that the directions of a Kronecker posterior are found in, at most
LEAST_SAMPLE = 32  # the same, at least
TOKENS = 10  # times a layer's inputs: so many tokens show its directions
DIRECTIONS = 512  # gradients, of all examples together, that they are found in at least


@dataclass
class Fit:
    """What a structure is fitted to: sweeps over a task's data at some weights.

    Attributes:
        task, params, prior, curvature, samples, seed, rank, kept: as of :func:`fit_kept`.
        drawn: labels drawn of an example in place of the exact columns of "ggn"; 0: none are.
        measures: whether the first sweep over all data sums the gradient too, from one column more.
        gradient: Σ_i ∇ℓ_i, once it is known.
    """

    task: Task
    params: dict[str, Tensor]
    prior: Prior
    curvature: str
    samples: int
    seed: int
    rank: int | None
    kept: Mapping[str, Unfinished]
    drawn: int = 0
    measures: bool = False
    gradient: Tree = field(default_factory=dict)

    @cached_property
    def seeds(self) -> Tensor:
        """One for each example, ``[N]``."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(2**31, (self.task.n_data,), generator=generator)

    def columns(self) -> int:
        """How many G_i an example has."""
        if self.drawn:
            return self.drawn
        if self.curvature == "empirical_fisher":
            return 1
        if self.curvature == "mc_fisher":
            return self.samples
        return n_outputs(self.task, self.params)

    def mixed_columns(self, n_examples: int) -> int | None:
        """How many random sums of an example's columns show the directions; None: its columns
        are fewer."""
        enough = -(-DIRECTIONS // n_examples)
        return enough if enough < self.columns() else None

    def passes(
        self,
        label: str,
        indices: Tensor | None = None,
        kept: Unfinished | None = None,
        by_layer: bool = False,
        mixed: int | None = None,
    ) -> Iterator[list[Term]]:
        """The terms of the columns G_i, chunk by chunk.

        Args:
            label: of the progress bar.
            indices: of the examples; None: all.
            kept: sums that a sweep which was cut off has kept.
            by_layer: whether the caller sums each layer by itself. The last layer then has exact
                sums in place of columns, if it gives many outputs or columns are mixed.
            mixed: so many sums of an example's columns with random signs in their place, whose
                G Gᵀ has the same mean; None: the columns.
        """
        sums_gradient = self.measures and not self.gradient and indices is None
        has_error_column = sums_gradient and self.curvature != "empirical_fisher"
        if sums_gradient:
            self.gradient.update({n: torch.zeros_like(p) for n, p in self.params.items()})
        signs = None if mixed is None else self._signs(mixed)
        sweep = chunks(
            self.task,
            self.params,
            columns=(mixed or self.columns()) + int(has_error_column),
            indices=indices_of_rank(self.task, self.params, indices),
            label=label,
            unfinished=kept,
        )
        for chunk in sweep:
            fewest = MANY if signs is None else 1
            head, parts = self._exact_head(chunk, fewest) if by_layer else (None, None)
            columns = self._curvature_columns(chunk)
            if signs is not None:
                columns = _mixed(columns, signs[chunk.indices])
            if has_error_column:
                columns = _with_error(chunk, columns)
            terms = chunk.terms(columns, last=True)
            if sums_gradient:
                self._add_gradient(terms)
            if has_error_column:
                terms = [term.columns(slice(-1)) for term in terms]
            yield with_head(terms, head, parts)
        if sums_gradient:
            ranks.total(self.gradient.values())

    def with_gradient(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These sums and the gradient's, as a file of unfinished sums holds them."""
        gradient = {f"gradient of {name}": total for name, total in self.gradient.items()}
        return {**sums, **gradient}

    def _add_gradient(self, terms: Sequence[Term]) -> None:
        """Add the last column of the terms, J_iᵀ e_i, summed over the examples."""
        for term in terms:
            for name, gradient in term.columns(slice(-1, None)).sum().items():
                self.gradient[name] += gradient

    def _exact_head(
        self, chunk: Chunk, fewest: int
    ) -> tuple[str | None, tuple[Tensor, Tensor] | None]:
        """The weight of the layer that gives the outputs, where they are not few, and s, v of
        Λ = diag(s) − v vᵀ."""
        outputs = chunk.outputs
        if self.curvature != "ggn" or outputs.ndim != 2 or outputs.shape[1] < fewest:
            return None, None
        parts = chunk.likelihood.hessian_parts(chunk.outputs.double(), chunk.targets)
        return chunk.head, parts

    def _signs(self, mixed: int) -> Tensor:
        """Random signs over the root of ``mixed``, ``[N, mixed, K]``, drawn at once, so that they
        do not depend on how the data are divided into chunks."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.task.n_data, mixed, self.columns())
        return (2 * torch.randint(2, shape, generator=generator) - 1).float() / mixed**0.5

    def _curvature_columns(self, chunk: Chunk) -> Tensor:
        if self.curvature in ("ggn", "exact") and not self.drawn:
            return curvature_root(chunk)
        if self.curvature == "empirical_fisher":
            return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
        samples = self.drawn or self.samples
        labels = drawn_labels(chunk, samples, self.seeds[chunk.indices])
        errors = [
            chunk.likelihood.drawn_error(chunk.outputs, chunk.targets, drawn) for drawn in labels
        ]
        return torch.stack(errors, dim=1) / samples**0.5


def _mixed(columns: Tensor, signs: Tensor) -> Tensor:
    """Sums of the columns ``[B, K, …]`` by ``[B, M, ≥ K]`` signs: ``[B, M, …]``."""
    used = signs[..., : columns.shape[1]].to(columns)
    return torch.einsum("bmk,bk...->bm...", used, columns)


def _with_error(chunk: Chunk, columns: Tensor) -> Tensor:
    """The columns ``[B, K, C]``, and the example's error e_i behind them."""
    error = chunk.likelihood.error(chunk.outputs, chunk.targets)
    return torch.cat([columns, error.unsqueeze(1)], dim=1)


def has_many_outputs(task: Task, params: Mapping[str, Tensor]) -> bool:
    """Whether a backward pass for each output of an example is too much; of losses whose labels can
    be drawn."""
    kind = type(task.likelihood.plain)
    if task.likelihood.is_sequence or kind.hessian_parts is Likelihood.hessian_parts:
        return False
    return n_outputs(task, params) > EXACT_OUTPUTS


def vocabulary_of(task: Task, params: dict[str, Tensor]) -> int:
    """The outputs at a token of a causal language model; 0 for other models."""
    if not isinstance(task.likelihood, CausalLM):
        return 0
    first = torch.zeros(1, dtype=torch.long)
    with torch.no_grad(), task.evaluation():
        return task.run(task.fetch(first), params, first)[0].shape[-1]


def sampled_examples(task: Task) -> Tensor | None:
    """Sequences at random, whose tokens are many more than the directions; None: all."""
    if not task.likelihood.is_sequence or task.n_data <= LEAST_SAMPLE:
        return None
    order = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))
    size = SAMPLE
    tokens = _tokens_of_each(task, order[:LEAST_SAMPLE])
    if tokens is not None:
        matrices = [p.flatten(1) for p in task.parameters().values() if p.ndim > 1]
        widest = max((matrix.shape[1] for matrix in matrices), default=0)
        enough = math.ceil(TOKENS * widest / max(1.0, tokens))
        size = min(SAMPLE, max(LEAST_SAMPLE, enough))
    return None if size >= task.n_data else order[:size].sort().values


def _tokens_of_each(task: Task, indices: Tensor) -> float | None:
    """How many tokens of a sequence count, on average over these; None: the labels are not where
    they usually are."""
    _, labels = mask_and_labels(task.fetch(indices))
    if not isinstance(labels, Tensor) or labels.shape[:1] != indices.shape:
        return None
    counted = task.likelihood.counted(labels)
    return None if counted is None else float(counted.sum()) / len(indices)


def curvature_root(chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ_i, ``[B, K, C]``.

    Of sequences, whose Λ_i has T·C columns, there is one column instead, that of the empirical
    Fisher: e_i.
    """
    if chunk.likelihood.is_sequence:
        return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
    return chunk.likelihood.hessian_root(chunk.outputs, chunk.targets).mT


def drawn_labels(chunk: Chunk, samples: int, seeds: Tensor) -> list[Tensor]:
    """K labels for every example from the model's own predictions: K tensors as the targets.

    Each example has a seed, so that its labels do not depend on how the data are divided into
    chunks.
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
    """The same for sequences: one uniform number for each token that counts falls among the
    cumulated probabilities."""
    generator = torch.Generator()
    uniform = torch.zeros(*counted.shape, samples)
    for row, seed in enumerate(seeds.tolist()):
        generator.manual_seed(seed)
        places = counted[row].cpu()
        uniform[row, places] = torch.rand(int(places.sum()), samples, generator=generator)
    cumulated = chunk.outputs.softmax(-1).cumsum(-1)
    heights = uniform.to(cumulated) * cumulated[..., -1:]
    last_token = cumulated.shape[-1] - 1
    tokens = torch.searchsorted(cumulated, heights, right=True).clamp_max(last_token)
    return [torch.where(counted, drawn, chunk.targets) for drawn in tokens.unbind(-1)]
