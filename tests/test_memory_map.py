from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blr_analysis.errors import InputError
from blr_analysis.memory_map import REGIONS, memory_map


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    """Scores with C = 1 and given |e| and V."""
    e = torch.as_tensor(error, dtype=torch.float64).reshape(-1, 1)
    v = torch.as_tensor(variance, dtype=torch.float64).reshape(-1, 1, 1)
    return SimpleNamespace(error=e, variance=v, self_influence=(e * e * v[:, :, 0])[:, 0])


def test_size_of_error_and_variance_in_many_dimensions() -> None:
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    root = torch.randn(40, 3, 3, generator=generator, dtype=torch.float64)
    variance = root @ root.mT
    influence = torch.einsum("nc,ncd,nd->n", error, variance, error)
    scores = SimpleNamespace(error=error, variance=variance, self_influence=influence)
    memory = memory_map(scores)
    np.testing.assert_allclose(memory.error, np.sqrt((error.numpy() ** 2).sum(1)), rtol=1e-12)
    np.testing.assert_allclose(memory.variance, [v.trace() for v in variance], rtol=1e-12)
    scores.variance, scores.error[0], scores.self_influence[0] = None, 0.0, 0.0
    along = memory_map(scores)  # without V, that along the error, which is 0 where there is none
    assert memory.variance_kind == "trace" and along.variance_kind == "along_error"
    units = error[1:] / error[1:].norm(dim=1, keepdim=True)
    wanted = torch.einsum("nc,ncd,nd->n", units, variance[1:], units)
    torch.testing.assert_close(along.variance, torch.cat([torch.zeros(1).double(), wanted]))
    assert "along the error" in repr(along) and "along" not in repr(memory)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_regions_against_sorting_one_by_one(
    pairs: list[tuple[float, float]], quantile: float
) -> None:
    error, variance = ([pair[k] for pair in pairs] for k in (0, 1))
    memory = memory_map(scores_of(error, variance), quantile=quantile)
    assert memory.error_threshold == np.quantile(error, quantile)
    assert memory.variance_threshold == np.quantile(variance, quantile)
    names = (("regular", "uncertain"), ("unpredictable", "memorable"))
    for e, v, region in zip(error, variance, memory.region, strict=True):
        assert region == names[e > memory.error_threshold][v > memory.variance_threshold]
    assert list(memory.counts()) == list(REGIONS) and sum(memory.counts().values()) == len(pairs)


def test_memorable_are_sorted_by_error_times_variance() -> None:
    error, variance = [5.0, 0.0, 9.0, 6.0, 7.0, 0.1], [5.0, 9.0, 3.0, 6.0, 0.0, 0.1]
    memory = memory_map(scores_of(error, variance), quantile=0.3)
    assert memory.memorable.tolist() == [3, 2, 0]  # 36, 27, 25
    assert memory.indices("uncertain").tolist() == [1]
    equal = memory_map(scores_of([1e-300] * 7, [0.3] * 7))
    assert equal.counts()["regular"] == 7 and equal.memorable.tolist() == []
    rounded = memory_map(scores_of([3e-30, 0.2], [1.0, -1e-9]))
    assert rounded.variance.tolist() == [1.0, 0.0] and rounded.error[0] == 3e-30


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: memory_map(scores_of([0.1, float("nan")], [1.0, 1.0])), "finite"),
        (lambda: memory_map(scores_of([0.1, 0.2], [float("inf"), 1.0])), "finite"),
        (lambda: memory_map(scores_of([], [])), "one example or more"),
        (lambda: memory_map(scores_of([0.1], [0.1]), quantile=-0.1), "quantile must be"),
        (lambda: memory_map(scores_of([0.1], [0.1]), quantile=float("nan")), "quantile must be"),
        (lambda: memory_map(scores_of([0.1], [0.1]), quantile="0.9"), "quantile must be"),
        (lambda: memory_map([1.0, 2.0]), "scores of a network"),
        (lambda: memory_map(scores_of([0.1], [0.1])).indices("memorised"), "'memorable', got"),
    ],
)
def test_what_is_refused(call: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        call()
