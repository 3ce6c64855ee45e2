from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blr_analysis.errors import InputError
from blr_analysis.memory_map import (
    REGIONS,
    error_size,
    memory_map,
    variance_along_error,
    variance_size,
)


def scores_of(error: Any, variance: Any) -> SimpleNamespace:
    """Scores with C = 1 and given |e| and V."""
    e = torch.as_tensor(error, dtype=torch.float64).reshape(-1, 1)
    v = torch.as_tensor(variance, dtype=torch.float64).reshape(-1, 1, 1)
    return SimpleNamespace(error=e, variance=v, self_influence=(e * e * v[:, :, 0])[:, 0])


def many_outputs(n: int = 40, c: int = 3, seed: int = 0) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    error = torch.randn(n, c, generator=generator, dtype=torch.float64)
    root = torch.randn(n, c, c, generator=generator, dtype=torch.float64)
    variance = root @ root.mT
    influence = torch.einsum("nc,ncd,nd->n", error, variance, error)
    return SimpleNamespace(error=error, variance=variance, self_influence=influence)


def test_each_corner_has_its_name() -> None:
    memory = memory_map(scores_of([0.1, 0.1, 2.0, -2.0], [0.1, 3.0, 0.1, 3.0]), quantile=0.5)
    assert memory.region.tolist() == ["regular", "uncertain", "unpredictable", "memorable"]
    assert memory.counts() == dict.fromkeys(REGIONS, 1)
    assert memory.error.tolist() == [0.1, 0.1, 2.0, 2.0]


def test_size_of_error_and_variance_in_many_dimensions() -> None:
    scores = many_outputs()
    memory = memory_map(scores)
    for i in range(len(scores.error)):
        norm = math.sqrt(sum(float(x) ** 2 for x in scores.error[i]))
        trace = sum(float(scores.variance[i, c, c]) for c in range(3))
        assert float(memory.error[i]) == pytest.approx(norm, rel=1e-12)
        assert float(memory.variance[i]) == pytest.approx(trace, rel=1e-12)
    assert memory.variance_kind == "trace"


def test_float32_errors_do_not_vanish_when_squared() -> None:
    assert error_size(torch.tensor([[3e-30, 4e-30]])).item() == pytest.approx(5e-30, rel=1e-6)


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
    for e, v, region in zip(error, variance, memory.region, strict=True):
        high = (e > memory.error_threshold, v > memory.variance_threshold)
        expected = {
            (False, False): "regular",
            (False, True): "uncertain",
            (True, False): "unpredictable",
            (True, True): "memorable",
        }[high]
        assert region == expected
    assert sum(memory.counts().values()) == len(pairs)


def test_memorable_are_sorted_by_error_times_variance() -> None:
    error, variance = [5.0, 0.0, 9.0, 6.0, 7.0, 0.1], [5.0, 9.0, 3.0, 6.0, 0.0, 0.1]
    memory = memory_map(scores_of(error, variance), quantile=0.3)
    assert memory.memorable.tolist() == [3, 2, 0]  # 36, 27, 25
    assert memory.indices("uncertain").tolist() == [1]
    with pytest.raises(InputError, match="regular, uncertain, unpredictable, memorable"):
        memory.indices("memorised")


def test_without_the_variance_matrix_the_variance_along_the_error_is_used() -> None:
    scores = many_outputs()
    whole = scores.variance
    scores.variance = None
    memory = memory_map(scores)
    assert memory.variance_kind == "along_error" and "along the error" in repr(memory)
    for i, e in enumerate(scores.error):
        unit = e / e.norm()
        assert float(memory.variance[i]) == pytest.approx(float(unit @ whole[i] @ unit), rel=1e-12)


def test_variance_along_an_error_of_zero_is_zero() -> None:
    value = variance_along_error(torch.zeros(2, 3), torch.tensor([0.0, 0.0]))
    assert value.tolist() == [0.0, 0.0]


def test_with_one_output_both_kinds_of_variance_agree() -> None:
    scores = scores_of([0.5, -2.0], [3.0, 0.25])
    along = variance_along_error(scores.error, scores.self_influence)
    torch.testing.assert_close(along, variance_size(scores.variance), rtol=1e-14, atol=0)


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("value", [0.0, 0.3, 1e-300])
def test_equal_values_are_all_regular(n: int, value: float) -> None:
    memory = memory_map(scores_of([value] * n, [value] * n))
    assert memory.counts() == {"regular": n, "uncertain": 0, "unpredictable": 0, "memorable": 0}
    assert memory.memorable.tolist() == []


def test_mostly_zero_errors_leave_the_others_high() -> None:
    memory = memory_map(scores_of([0.0] * 19 + [0.1], range(20)))
    assert memory.error_threshold == 0
    assert memory.indices("memorable").tolist() == [19]


@pytest.mark.parametrize(
    ("error", "variance", "asked", "message"),
    [
        ([0.1, float("nan")], [1.0, 1.0], 0.9, r"error of 1 examples .* not finite \(index 1\)"),
        ([0.1, 0.2], [float("inf"), 1.0], 0.9, r"variance of 1 examples .* not finite \(index 0\)"),
        ([0.1, 0.2], [1.0, -0.5], 0.9, r"variance of 1 examples .* negative \(index 1\)"),
        ([0.1] * 9, [float("nan")] * 9, 0.9, r"\(index 0, 1, 2, 3, 4 and 4 more\)"),
        ([], [], 0.9, "no examples"),
        ([0.1], [0.1], -0.1, "quantile must be"),
        ([0.1], [0.1], float("nan"), "quantile must be"),
        ([0.1], [0.1], "0.9", "quantile must be"),
    ],
)
def test_what_is_refused(error: Any, variance: Any, asked: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        memory_map(scores_of(error, variance), quantile=asked)
    with pytest.raises(InputError, match="scores of a network"):
        memory_map([1.0, 2.0])


def test_rounding_below_zero_counts_as_zero() -> None:
    memory = memory_map(scores_of([0.1, 0.2], [1.0, -1e-9]))
    assert memory.variance.tolist() == [1.0, 0.0]
