"""The figures of the papers, small: each shows what its paper says."""

from types import ModuleType

import pytest

from benchmarks.papers import posterior_approximation, segmentation, theorem_1, two_wells


def numbers(paper: ModuleType) -> dict[str, float]:
    figure, found = paper.draw(True)
    assert all(axes.has_data() for axes in figure.axes)
    return found


@pytest.mark.slow
def test_posteriors_of_two_weights() -> None:
    """Deviations in units of mean-field's: Gauss–Newton is right, ĝ² of M = 10 too wide."""
    found = numbers(posterior_approximation)
    assert found["VOGN, M = 1"] == pytest.approx(1, abs=0.15)
    assert found["VOGGN"] == pytest.approx(1, abs=0.05)
    assert found["Vadam, M = 10"] > 1.5
    assert max(v for k, v in found.items() if k.endswith("mean")) < 0.4


def test_theorem_1() -> None:
    found = numbers(theorem_1)
    assert found["error"] < 0.08 and found["ratio at N"] > 2


def test_vadam_leaves_the_narrow_well() -> None:
    found = numbers(two_wells)
    assert found["gradient descent"] == pytest.approx(-1, abs=0.05)
    assert found["Vadam"] == pytest.approx(1.9, abs=0.4)


@pytest.mark.slow
def test_a_segmentation_is_unsure_where_it_may_be_wrong() -> None:
    found = numbers(segmentation)
    assert found["share wrong"] < 0.05
    assert found["entropy at borders"] > 5 * found["entropy elsewhere"]
    assert found["entropy where wrong"] > found["entropy at borders"]
