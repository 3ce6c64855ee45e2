"""The merge of one tensor: every special case, and the optimum of all tasks together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blr_analysis.errors import InputError
from blr_analysis.files import Scratch
from blr_analysis.merging.formula import BLOCK, combine, combine_into

TASKS = 3


def some_case(seed: int = 0, size: tuple[int, ...] = (7, 5)) -> dict[str, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return {
        "base": [normal()],
        "models": [normal() for _ in range(TASKS)],
        "precisions": [normal().exp() for _ in range(TASKS)],
        "first": [normal().exp()],
    }


def plain(base: Tensor, models: list, alphas: list, curved: list, first: Tensor) -> Tensor:
    """The merge formula in float64."""
    total = first + sum(a * h for a, h in zip(alphas, curved, strict=True))
    step = sum(a * (first + h) * (m - base) for a, h, m in zip(alphas, curved, models, strict=True))
    return base + step / total


def test_the_formula_as_it_stands() -> None:
    case, alphas = some_case(), [0.7, 1.3, 0.2]
    (base,), models, curved, (first,) = case.values()
    merged = combine(
        base, models, alphas, precisions=curved, base_precision=first, delta=0.3,
        dtype=torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(merged, plain(base, models, alphas, curved, first + 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_the_dtype_of_the_arithmetic(dtype: torch.dtype) -> None:
    (base,), models, curved, (first,) = some_case().values()
    stored, others = base.to(dtype), [m.to(dtype) for m in models]
    merged = combine(stored, others, precisions=curved, base_precision=first)
    expected = plain(stored.double(), [o.double() for o in others], [1.0] * 3, curved, first)
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_precision_of_the_tasks_it_is_task_arithmetic() -> None:
    (base,), models, _, (first,) = some_case().values()
    alphas = [0.5, 2.0, -0.25]
    expected = base + sum(a * (m - base) for a, m in zip(alphas, models, strict=True))
    nothing = [torch.zeros_like(base)] * 3
    for precisions in (None, nothing):
        merged = combine(
            base, models, alphas, precisions=precisions, base_precision=first, dtype=torch.float64
        )
        torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)


def test_equal_precisions_without_the_bases_give_the_weighted_average() -> None:
    (base,), models, curved, _ = some_case().values()
    alphas = [0.5, 0.3, 0.2]
    merged = combine(base, models, alphas, precisions=[curved[0]] * 3, dtype=torch.float64)
    expected = sum(a * m for a, m in zip(alphas, models, strict=True))
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_base", [True, False])
def test_without_the_bases_precision_it_is_the_fisher_average(with_base: bool) -> None:
    (base,), models, curved, _ = some_case().values()
    merged = combine(base if with_base else None, models, precisions=curved, dtype=torch.float64)
    expected = sum(h * m for h, m in zip(curved, models, strict=True)) / sum(curved)
    torch.testing.assert_close(merged, expected, rtol=1e-12, atol=1e-12)


def test_quadratic_losses_give_the_optimum_of_all_tasks() -> None:
    """ℓ_t(θ) = ½ (θ − c_t)ᵀ H_t (θ − c_t); θ_t minimises ℓ_t + ½ (θ − θ_0)ᵀ H_0 (θ − θ_0)."""
    (base,), centres, curved, (first,) = some_case(1).values()
    models = [(h * c + first * base) / (h + first) for h, c in zip(curved, centres, strict=True)]
    merged = combine(base, models, precisions=curved, base_precision=first, dtype=torch.float64)
    theta = merged.clone().requires_grad_()
    loss = 0.5 * (first * (theta - base) ** 2).sum()
    for h, c in zip(curved, centres, strict=True):
        loss = loss + 0.5 * (h * (theta - c) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    assert float(gradient.abs().max()) < 1e-10


def test_a_negative_weight_takes_a_task_out_again() -> None:
    """Quadratic tasks: merging all three and then the third with weight −1 leaves two."""
    (base,), centres, curved, (first,) = some_case(2).values()

    def tuned(start: Tensor, around: Tensor, t: int) -> Tensor:
        return (curved[t] * centres[t] + around * start) / (curved[t] + around)

    models = [tuned(base, first, t) for t in range(3)]
    options = {"dtype": torch.float64}
    two = combine(base, models[:2], precisions=curved[:2], base_precision=first, **options)
    three = combine(base, models, precisions=curved, base_precision=first, **options)
    # Seen from all three, the third's own fine-tune starts at their optimum.
    around = first + sum(curved)
    back = combine(
        three, [tuned(three, around, 2)], [-1.0], precisions=[curved[2]], base_precision=around,
        **options,
    )  # fmt: skip
    torch.testing.assert_close(back, two, rtol=1e-9, atol=1e-9)


def test_where_nobody_has_a_precision_task_arithmetic_stands_and_is_counted() -> None:
    (base,), models, curved, _ = some_case().values()
    for h in curved:
        h[2] = 0.0
    curved[0][3] = -0.0
    out = torch.empty_like(base)
    count = combine_into(
        out.view(-1), base.view(-1), [m.view(-1) for m in models], [1.0] * 3,
        [h.view(-1) for h in curved], 0.0,
    )  # fmt: skip
    assert count == base.shape[1]
    torch.testing.assert_close(out[2], base[2] + sum(m[2] - base[2] for m in models))
    assert bool(out.isfinite().all())


def test_a_precision_that_weights_turn_negative_is_no_precision() -> None:
    base, model = torch.zeros(2), torch.ones(2)
    merged = combine(base, [model], [-2.0], precisions=[torch.tensor([1.0, 0.1])], delta=1.0)
    torch.testing.assert_close(merged, torch.tensor([-2.0, -2 * 1.1 / 0.8]))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3 * BLOCK), st.integers(0, 2**31), st.lists(st.integers(1, 5), max_size=3))
def test_bits_do_not_depend_on_where_a_tensor_is_cut(size: int, seed: int, cuts: list) -> None:
    generator = torch.Generator().manual_seed(seed)
    base, one, two = (torch.randn(size, generator=generator).bfloat16() for _ in range(3))
    curved = [torch.rand(size, generator=generator) for _ in range(2)]
    curved[0][::7] = 0.0
    curved[1][::14] = 0.0

    def run(step: int) -> Tensor:
        out, scratch = torch.empty(size), Scratch()
        for low in range(0, size, step):
            p = slice(low, low + step)
            combine_into(
                out[p], base[p], [one[p], two[p]], [0.3, 1.7], [c[p] for c in curved], 0.0, scratch
            )
        return out

    whole = run(size)
    for cut in {1, *cuts}:
        assert torch.equal(run(cut * BLOCK), whole)


def test_a_model_that_equals_its_base_leaves_it_to_the_bit() -> None:
    (base,), _, curved, (first,) = some_case().values()
    stored = base.float()
    merged = combine(stored, [stored.clone()] * 3, precisions=curved, base_precision=first)
    assert torch.equal(merged, stored)


@pytest.mark.parametrize(
    "arguments",
    [
        {"models": []},
        {"weights": [1.0]},
        {"precisions": [1.0]},
        {"precisions": [torch.ones(3)] * 2},
        {"base_precision": torch.ones(3)},
        {"base": torch.ones(3)},
    ],
)
def test_arguments_that_disagree_are_refused(arguments: dict) -> None:
    whole = {"base": torch.zeros(2), "models": [torch.ones(2)] * 2, **arguments}
    with pytest.raises(InputError):
        combine(whole.pop("base"), whole.pop("models"), **whole)
