"""What a sketch is made of: signs, whitening, and the room of every matrix."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from oracles import relative
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.backprop.matrices import Basis, MatrixShape
from blr_analysis.sensitivity.index.places import places_of, rooms
from blr_analysis.sensitivity.index.sketch import (
    MatrixSketch,
    Side,
    Sketch,
    random_signs,
    whitening_of_sides,
)

ENERGIES = {"a": 5.0, "b": 1.0, "c": 0.2, "d": 1e-6}
SIZES = {"a": 40, "b": 40, "c": 3, "d": 40}


def filled_by_hand(total: int) -> dict[str, float]:
    """Rooms by adding a little room at a time to every matrix, until the total is reached."""
    level = 0.0
    while True:
        filled = {
            name: min(float(SIZES[name]), max(1.0, level * energy))
            for name, energy in ENERGIES.items()
        }
        if sum(filled.values()) >= total:
            return filled
        level += 1e-3


@pytest.mark.parametrize("total", [5, 20, 50, 80])
def test_rooms_are_in_proportion_to_energies_between_one_number_and_all(total: int) -> None:
    shared = rooms(SIZES, ENERGIES, total)
    assert list(shared) == list(SIZES)
    assert sum(shared.values()) == pytest.approx(total)
    for name, room in filled_by_hand(total).items():
        assert shared[name] == pytest.approx(room, abs=0.01)


@pytest.mark.parametrize("total", [123, 1000])
def test_with_room_for_all_numbers_every_matrix_has_its_own(total: int) -> None:
    assert rooms(SIZES, ENERGIES, total) == SIZES


def test_with_too_little_room_every_matrix_has_one_number() -> None:
    assert rooms(SIZES, ENERGIES, 1) == pytest.approx(dict.fromkeys(SIZES, 1.0), abs=1e-3)


SHAPES = [(1, 20, 30), (3, 20, 30), (1, 1, 50), (2, 50, 1), (1, 300, 2), (4, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.99])
def test_places_fit_into_the_room_and_keep_the_matrix_in_shape(
    shape: tuple[int, int, int], share: float
) -> None:
    groups, rows, columns = shape
    room = share * groups * rows * columns
    left, right = places_of(shape, room)
    numbers = max(1, int(room / groups))
    assert 1 <= left <= rows
    assert 1 <= right <= columns
    assert left * right <= numbers
    assert left * (right + 1) > numbers or right == columns
    wanted = rows * (numbers / (rows * columns)) ** 0.5
    assert left <= max(1, wanted + 1e-9)
    assert left > wanted - 1 or left == numbers


@pytest.mark.parametrize("shape", SHAPES)
def test_places_for_every_number_are_the_matrix(shape: tuple[int, int, int]) -> None:
    groups, rows, columns = shape
    size = groups * rows * columns
    assert places_of(shape, size) == (rows, columns)
    assert places_of(shape, 2 * size) == (rows, columns)
    assert places_of(shape, size - 1) != (rows, columns)


@pytest.mark.parametrize("delta", [0.0, 0.7])
def test_whitening_by_sides_keeps_what_each_column_and_the_whole_holds(delta: float) -> None:
    """(α_o β_i)² in place of 1 / s_oi, in sums over the data s − δ."""
    generator = torch.Generator().manual_seed(0)
    data = torch.rand(2, 5, 7, generator=generator, dtype=torch.float64) + 0.1
    precision = data + delta
    alpha, beta = whitening_of_sides(precision, delta)
    assert alpha.shape == (2, 5)
    assert beta.shape == (2, 7)
    by_sides = data * (alpha.unsqueeze(2) * beta.unsqueeze(1)).square()
    by_number = data / precision
    assert relative(by_sides.sum(1), by_number.sum(1)) < 1e-12
    assert relative(by_sides.sum(2), by_number.sum(2)) < 0.2


def test_whitening_by_sides_is_exact_for_a_product_of_sides() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.rand(2, n, generator=generator).double() + 0.5 for n in (5, 7))
    precision = rows.unsqueeze(2) * columns.unsqueeze(1)
    alpha, beta = whitening_of_sides(precision, 0.0)
    assert relative((alpha.unsqueeze(2) * beta.unsqueeze(1)) ** -2, precision) < 1e-12


def test_a_prior_without_data_is_whitened_as_the_prior() -> None:
    precision = torch.full((1, 4, 6), 0.7, dtype=torch.float64)
    alpha, beta = whitening_of_sides(precision, 0.7)
    assert relative((alpha.unsqueeze(2) * beta.unsqueeze(1)) ** -2, precision) < 1e-12


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
def test_signs_are_the_first_bits_of_the_generator(count: int) -> None:
    signs = random_signs(count, seed=5)
    assert signs.shape == (count,)
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    assert torch.equal(signs, random_signs(1000, seed=5)[:count])
    assert not torch.equal(random_signs(1000, seed=6), random_signs(1000, seed=5))


def test_signs_are_fair() -> None:
    assert abs(float(random_signs(10_000).double().mean())) < 0.05


@pytest.mark.parametrize(
    ("positions", "rows", "columns", "late_side"),
    [(1, 6, 7, None), (40, 3, 50, "right"), (40, 50, 3, "left")],
)
@pytest.mark.parametrize("groups", [1, 2])
def test_factors_are_projected_as_the_matrix_that_they_make(
    positions: int, rows: int, columns: int, late_side: str | None, groups: int
) -> None:
    """Whichever side is projected last: U_Gᵀ G U_A, scaled and added up entry by entry."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(groups, *shape, generator=generator, dtype=torch.float64)

    layout = MatrixShape(groups, rows, columns - 1, (groups * rows, columns - 1))
    vectors = [torch.linalg.qr(random(n, n)).Q for n in (columns, rows)]
    basis = Basis("weight", "bias", layout, *vectors)
    matrix = MatrixSketch.of(random(rows, columns).exp(), 0.0, basis, groups * 12, seed=1)
    d = torch.stack([random(positions, rows) for _ in range(4)])
    a = torch.stack([random(positions, columns - 1) for _ in range(4)])
    assert matrix.right.is_projected_after(a, matrix.left.size) == (late_side == "right")
    assert matrix.left.is_projected_after(d, matrix.right.size) == (late_side == "left")

    gradients = d.mT @ torch.nn.functional.pad(a, (0, 1), value=1.0)
    scaled = (
        matrix.left.scale.unsqueeze(2) * basis.turn(gradients) * matrix.right.scale.unsqueeze(1)
    )
    expected = torch.zeros(4, groups, matrix.left.size, matrix.right.size, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            place = (row % matrix.left.size, column % matrix.right.size)
            expected[:, :, *place] += scaled[:, :, row, column]
    assert relative(matrix.of_factors(d, a), expected.flatten(1)) < 1e-12


def of_equal_layers(structure: str) -> blr.Posterior:
    """Four matrices of one size, and their biases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4))).double()
    x = torch.randn(6, 40, dtype=torch.float64)
    task = blr.Task(model, (x, torch.arange(6)))
    return blr.fit_laplace(task, structure=structure, prior_precision=1.0)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_no_two_sides_share_their_signs(structure: str) -> None:
    """Products of two sides would have a mean otherwise."""
    sketch = Sketch.of(of_equal_layers(structure), 800)
    matrices = sketch.matrices.values()
    sides = [side.scale[0].sign() for m in matrices for side in (m.left, m.right)]
    long_sides = [signs for signs in sides if len(signs) >= 40]
    assert len(long_sides) >= 8
    for one_side, other_side in combinations(long_sides, 2):
        n_shared = min(len(one_side), len(other_side))
        agreement = (one_side[:n_shared] == other_side[:n_shared]).double().mean()
        assert 0.1 < float(agreement) < 0.9


def test_parts_of_a_sketch_stand_side_by_side() -> None:
    sketch = Sketch.of(of_equal_layers("kron"), 800)
    end = 0
    for name, matrix in sketch.matrices.items():
        assert sketch.starts[name] == end
        end += matrix.size
    assert sketch.size == end <= 800
    assert not sketch.is_exact


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("positions", [1, 4])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [2, 5])
def test_a_side_turns_scales_and_adds_up(
    groups: int, positions: int, has_bias: bool, size: int
) -> None:
    """Against one dense matrix; an input of 1 stands for the bias."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n = 7
    scale = normal(groups, n)
    vectors = normal(groups, n, n)
    x = normal(6, groups, positions, n - has_bias)
    places = torch.eye(size, dtype=torch.float64).repeat(4, 1)[:n]
    complete = torch.cat([x, torch.ones(6, groups, positions, int(has_bias)).double()], -1)
    turned = torch.einsum("bgtn,gnm,gm,ms->bgts", complete, vectors, scale, places)
    assert relative(Side.of_basis(scale, size, vectors).of(x), turned) < 1e-12
    if has_bias:
        return
    plain = torch.einsum("bgtn,gn,ns->bgts", x, scale, places)
    assert relative(Side.of_basis(scale, size, None).of(x), plain) < 1e-12
