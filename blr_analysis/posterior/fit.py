"""What a structure is fitted to: sweeps over a task's data, and the columns that they sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from blr_analysis import ranks
from blr_analysis.backprop.engine import Chunk, chunks, n_outputs
from blr_analysis.backprop.head import with_head
from blr_analysis.backprop.record import shared
from blr_analysis.backprop.terms import Term, Tree
from blr_analysis.files import Unfinished
from blr_analysis.likelihoods import Likelihood
from blr_analysis.likelihoods.tokens import CausalLM
from blr_analysis.posterior.prior import Prior
from blr_analysis.task import Task

EXACT_OUTPUTS = 256  # up to here every output of an example is differentiated unless told otherwise
MANY = 64  # outputs, from which on the closed form of the last layer is faster
SAMPLE = 256  # sequences that the directions of a Kronecker posterior are found in


@dataclass
class Fit:
    """What a structure is fitted to: sweeps over a task's data at some weights.

    Attributes:
        task, params, prior, curvature, samples, seed, rank, kept: as of :func:`fit_kept`.
        drawn: labels drawn of an example in place of the exact columns of "ggn"; 0: none are.
        measures: whether the first sweep over all data sums the gradient too, from one column more.
        slope: Σ_i ∇ℓ_i, once it is known.
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
    slope: Tree = field(default_factory=dict)

    @cached_property
    def seeds(self) -> Tensor:
        source = torch.Generator().manual_seed(self.seed)
        return torch.randint(2**31, (self.task.n_data,), generator=source)

    def columns(self) -> int:
        """How many G_i an example has."""
        if self.drawn:
            return self.drawn
        drawn = {"empirical_fisher": 1, "mc_fisher": self.samples}
        return drawn.get(self.curvature) or n_outputs(self.task, self.params)

    def passes(
        self,
        label: str,
        indices: Tensor | None = None,
        kept: Unfinished | None = None,
        by_layer: bool = False,
    ) -> Iterator[list[Term]]:
        """Per chunk the terms of the columns G_i; ``by_layer``: where each layer's are summed by
        themselves, the last layer's are exact sums in place of columns, if it gives many outputs.
        """
        task, params = self.task, self.params
        first = self.measures and not self.slope and indices is None
        more = int(first and self.curvature != "empirical_fisher")  # whose own column it is
        asked = self.columns() + more
        if first:
            self.slope.update({n: torch.zeros_like(p) for n, p in params.items()})
        own = {"indices": shared(task, params, indices), "label": label, "kept": kept}
        for chunk in chunks(task, params, columns=asked, **own):
            head, parts = self._exact_head(chunk) if by_layer else (None, None)
            cotangents = self._cotangents(chunk)
            if more:
                error = chunk.likelihood.error(chunk.outputs, chunk.targets)
                cotangents = torch.cat([cotangents, error.unsqueeze(1)], dim=1)
            terms = chunk.terms(cotangents, last=True)
            for term in terms if first else ():
                for name, gradient in term.columns(slice(-1, None)).sum().items():
                    self.slope[name] += gradient
            if more:
                terms = [term.columns(slice(-1)) for term in terms]
            yield with_head(terms, head, parts)
        if first:
            ranks.total(self.slope.values())

    def _exact_head(self, chunk: Chunk) -> tuple[str | None, tuple[Tensor, Tensor] | None]:
        """The weight of the layer that gives many outputs, and s, v of Λ = diag(s) − v vᵀ."""
        if self.curvature != "ggn" or chunk.outputs.ndim != 2 or chunk.outputs.shape[1] < MANY:
            return None, None
        parts = chunk.likelihood.hessian_parts(chunk.outputs.double(), chunk.targets)
        return chunk.head, parts

    def _cotangents(self, chunk: Chunk) -> Tensor:
        if self.curvature in ("ggn", "exact") and not self.drawn:
            return curvature_root(chunk)
        f, y, likelihood = chunk.outputs, chunk.targets, chunk.likelihood
        if self.curvature == "empirical_fisher":
            return likelihood.error(f, y).unsqueeze(1)
        samples = self.drawn or self.samples
        drawn = drawn_labels(chunk, samples, self.seeds[chunk.indices])
        return torch.stack([likelihood.drawn_error(f, y, d) for d in drawn], 1) / samples**0.5


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
    """Sequences at random; None: all. Their tokens are many more than the directions."""
    if not task.likelihood.is_sequence or task.n_data <= SAMPLE:
        return None
    drawn = torch.randperm(task.n_data, generator=torch.Generator().manual_seed(0))
    return drawn[:SAMPLE].sort().values


def curvature_root(chunk: Chunk) -> Tensor:
    """Columns c_ik with Σ_k c_ik c_ikᵀ = Λ_i, ``[B, K, C]``.

    For sequences, where Λ_i has T·C columns, the empirical Fisher's one instead: e_i.
    """
    if chunk.likelihood.is_sequence:
        return chunk.likelihood.error(chunk.outputs, chunk.targets).unsqueeze(1)
    return chunk.likelihood.hessian_root(chunk.outputs, chunk.targets).mT


def drawn_labels(chunk: Chunk, samples: int, seeds: Tensor) -> list[Tensor]:
    """K labels for every example from the model's own predictions: K tensors as the targets.

    Each example has a seed, so that they do not depend on how the data are divided into passes.
    """
    counted = chunk.likelihood.counted(chunk.targets)
    if counted is not None:
        return _sampled_tokens(chunk, counted, samples, seeds)
    outputs, targets = chunk.outputs.cpu(), chunk.targets.cpu()
    source, drawn = torch.Generator(), []
    for row, seed in enumerate(seeds.tolist()):
        source.manual_seed(seed)
        own = outputs[row : row + 1], targets[row : row + 1]
        drawn.append([chunk.likelihood.resample(*own, source) for _ in range(samples)])
    return [torch.cat(labels).to(chunk.outputs.device) for labels in zip(*drawn, strict=True)]


def _sampled_tokens(chunk: Chunk, counted: Tensor, samples: int, seeds: Tensor) -> list[Tensor]:
    """The same for sequences, by one uniform number per token that counts: where it falls among
    the cumulated probabilities."""
    source, uniform = torch.Generator(), torch.zeros(*counted.shape, samples)
    for row, seed in enumerate(seeds.tolist()):
        own = counted[row].cpu()
        uniform[row, own] = torch.rand(int(own.sum()), samples, generator=source.manual_seed(seed))
    reached = chunk.outputs.softmax(-1).cumsum(-1)
    heights = uniform.to(reached) * reached[..., -1:]
    drawn = torch.searchsorted(reached, heights, right=True).clamp_max(reached.shape[-1] - 1)
    return [torch.where(counted, y, chunk.targets) for y in drawn.unbind(-1)]
