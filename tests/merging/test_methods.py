"""Methods that mergekit's recipes have: against dense formulas of their papers, whole tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merging.models_on_disk import SHAPES, curved, near, state, write_model
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, Scratch
from blr_analysis.merging import stream as streaming
from blr_analysis.merging.folders import execute
from blr_analysis.merging.formula import BLOCK, combine, combine_into
from blr_analysis.merging.methods import METHODS
from blr_analysis.merging.plan import make_plan as plan_folders
from blr_analysis.merging.recipe import read_recipe

BASE = state(0, torch.float64)
MODELS = [near(BASE, t) for t in (1, 2, 3)]
WEIGHTS = [0.7, 0.4, -0.2]
CURVED = [{n: h.double() for n, h in curved(t).items()} for t in (1, 2, 3)]


def merged(method: str, **more: Any) -> dict[str, Tensor]:
    given = {"models": MODELS, "weights": WEIGHTS, "dtype": torch.float64, **more}
    return blr.merge(given.pop("base", BASE), given.pop("models"), method=method, **given)


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in SHAPES:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=2e-9, msg=name)


def ties(
    name: str, density: float, scale: float, precisions: list[dict[str, Tensor]] | None = None
) -> Tensor:
    """Trim by sorting, elect and average entry by entry."""
    start = BASE[name].flatten()
    steps = torch.stack([m[name].flatten() - start for m in MODELS])
    h = torch.ones_like(steps)
    if precisions is not None:
        h = torch.stack([p[name].flatten() for p in precisions])
    size = (steps**2 * h).sqrt()
    kept = torch.zeros_like(steps)
    for row, order in zip(kept, size.argsort(1, descending=True), strict=True):
        row[order[: max(1, int(density * len(start)))]] = 1.0
    out = start.clone()
    for i in range(len(start)):
        pulls = [w * float(h[t, i] * kept[t, i] * steps[t, i]) for t, w in enumerate(WEIGHTS)]
        sign = 1.0 if sum(pulls) >= 0 else -1.0
        agree = [t for t, p in enumerate(pulls) if p * sign > 0]
        below = sum(WEIGHTS[t] * float(h[t, i]) for t in agree)
        if agree:
            out[i] += scale * sum(pulls[t] for t in agree) / below
    return out.view(BASE[name].shape)


@pytest.mark.parametrize("density", [1.0, 0.5, 0.17])
def test_ties_trims_elects_and_averages(density: float) -> None:
    own = merged("ties", density=density, scale=0.8)
    close(own, {n: ties(n, density, 0.8) for n in SHAPES})
    weighed = merged("fisher_ties", density=density, scale=0.8, precisions=CURVED)
    close(weighed, {n: ties(n, density, 0.8, CURVED) for n in SHAPES})


@pytest.mark.parametrize(("density", "least"), [(0.3, 2.0), (0.01, 5.0)])
def test_ties_keeps_all_entries_as_large_as_the_last(density: float, least: float) -> None:
    tuned = torch.tensor([5.0, -2.0, 2.0, 1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 0.0])
    base = {"w": torch.zeros(10)}
    own = merged("ties", base=base, models=[{"w": tuned}], weights=[1.0], density=density)
    assert torch.equal(own["w"], torch.where(tuned.abs() >= least, tuned, 0.0).double())


def test_fisher_ties_under_equal_precisions_is_ties() -> None:
    ones = [{n: torch.full_like(t, 3.0) for n, t in BASE.items()}] * 3
    close(merged("fisher_ties", precisions=ones, density=0.4), merged("ties", density=0.4))


def test_dare_keeps_by_chance_and_rescales() -> None:
    start, tuned = torch.zeros(2**18 + 5), torch.ones(2**18 + 5)
    family: dict[str, Any] = {"base": {"w": start}, "models": [{"w": tuned}], "weights": [1.0]}
    once = merged("dare_linear", **family, density=0.25)["w"]
    assert set(once.tolist()) == {0.0, 4.0}
    share, spread = float((once > 0).double().mean()), math.sqrt(0.25 * 0.75 / len(once))
    assert abs(share - 0.25) < 4 * spread
    assert torch.equal(once, merged("dare_linear", **family, density=0.25)["w"])
    other = merged("dare_linear", **family, density=0.25, seed=1)["w"]
    assert abs(float(((once > 0) & (other > 0)).double().mean()) - 0.0625) < 4 * spread
    kept = merged("dare_linear", **family, density=0.25, rescale=False)["w"]
    assert torch.equal(kept, once / 4)


def test_what_chance_leaves_does_not_depend_on_shards(tmp_path: Path) -> None:
    """Two models of 2¹⁸ + … entries in one and in three files, in pieces of two lengths."""
    big = {n: torch.randn(300, 1000) for n in "ab"}
    prints = []
    for k, (shards, memory) in enumerate([(1, 2**28), (3, 18_000_000)]):
        root = tmp_path / str(k)
        base = write_model(root / "base", big, shards=shards)
        model = write_model(root / "ft", {n: t + 1 for n, t in big.items()}, shards=shards)
        blr.merge(
            base, [model], method="dare_ties", density=0.5, out=root / "out", max_memory=memory
        )
        prints.append(Folder.open(root / "out").tensors())
    assert all(torch.equal(prints[0][n], prints[1][n]) for n in "ab")


def test_at_density_one_dare_is_task_arithmetic() -> None:
    close(merged("dare_linear"), merged("task_arithmetic"))


def unit(values: Tensor) -> Tensor:
    return values / values.norm()


def test_slerp_walks_the_arc() -> None:
    """At constant speed, in the plane of both, with lengths mixed as sin does."""
    for name in SHAPES:
        a, b = state(5, torch.float64)[name], state(6, torch.float64)[name]
        found = merged("slerp", base=None, models=[{"w": a}, {"w": b}], weights=[0.7, 0.3])["w"]
        if a.ndim == 0:
            assert float(found) == pytest.approx(0.7 * float(a) + 0.3 * float(b))
            continue
        angle = math.acos(float((unit(a) * unit(b)).sum()))
        on_sphere = merged(
            "slerp", base=None, models=[{"w": unit(a)}, {"w": unit(b)}], weights=[0.7, 0.3]
        )["w"]
        assert float(on_sphere.norm()) == pytest.approx(1.0)
        assert math.acos(float((on_sphere * unit(a)).sum())) == pytest.approx(0.3 * angle)
        rest = found - a * math.sin(0.7 * angle) / math.sin(angle)
        torch.testing.assert_close(rest, b * math.sin(0.3 * angle) / math.sin(angle))


def test_the_karcher_mean_has_no_tangent_left() -> None:
    weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    far = [state(t, torch.float64) for t in (5, 6, 7)]
    found = merged("karcher", base=None, models=far, weights=weights.tolist())
    for name in ("embed.weight", "layers.0.mlp.weight"):
        vectors = [m[name] for m in far]
        lengths = torch.stack([v.norm() for v in vectors])
        assert float(found[name].norm()) == pytest.approx(float(weights @ lengths))
        at, tangent = unit(found[name]), torch.zeros_like(found[name])
        for w, v in zip(weights, vectors, strict=True):
            angle = torch.acos((unit(v) * at).sum())
            tangent += w * angle / angle.sin() * (unit(v) - angle.cos() * at)
        assert float(tangent.norm()) < 1e-5


def test_the_mean_of_directions_has_the_mean_length() -> None:
    found = merged("multislerp", weights=[0.5, 0.3, 0.2])
    for name in ("embed.weight", "layers.0.mlp.weight"):
        steps = [m[name] - BASE[name] for m in MODELS]
        mean = sum(w * unit(s) for w, s in zip((0.5, 0.3, 0.2), steps, strict=True))
        length = sum(w * s.norm() for w, s in zip((0.5, 0.3, 0.2), steps, strict=True))
        torch.testing.assert_close(found[name], BASE[name] + length * unit(mean))


def test_scale_multiplies_the_steps_of_task_arithmetic() -> None:
    found = merged("task_arithmetic", scale=lambda name: 0.5 if "norm" in name else 2.0)
    for name, start in BASE.items():
        step = sum(a * (m[name] - start) for a, m in zip(WEIGHTS, MODELS, strict=True))
        expected = start + (0.5 if "norm" in name else 2.0) * step
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)
    halved = merged("task_arithmetic", normalize=True, scale=0.5, weights=[1.0, 2.0, 1.0])
    mean = sum(a * m["scale"] for a, m in zip([0.25, 0.5, 0.25], MODELS, strict=True))
    torch.testing.assert_close(halved["scale"], (BASE["scale"] + mean) / 2)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("linear", {"scale": 0.5}),
        ("gradient_matching", {"scale": 0.5, "precisions": CURVED}),
        ("task_arithmetic", {"density": 0.5}),
        ("linear", {"precisions": CURVED}),
        ("fisher", {"delta": 1.0, "precisions": CURVED}),
        ("ties", {"seed": 1}),
        ("linear", {"seed": 1}),
        ("ties", {"rescale": False}),
        ("linear", {"shrink": 0.9}),
        ("linear", {"validate": []}),
        ("linear", {"criterion": "accuracy"}),
        ("auto", {"scale": 0.5, "precisions": CURVED}),
        ("auto", {"delta": 1.0, "precisions": CURVED, "base": None}),
    ],
)
def test_an_argument_without_effect_is_refused(method: str, more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(more))}="):
        merged(method, **more)


def test_model_stock_trusts_what_the_steps_share() -> None:
    found = merged("model_stock")
    for name in ("embed.weight", "layers.0.mlp.weight"):
        steps = [m[name] - BASE[name] for m in MODELS]
        cosines = [(unit(a) * unit(b)).sum() for i, a in enumerate(steps) for b in steps[:i]]
        c = sum(cosines) / 3
        expected = BASE[name] + 3 * c / (1 + 2 * c) * sum(steps) / 3
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize("method", ["ties", "fisher_ties", "dare_ties", "karcher", "model_stock"])
def test_pieces_do_not_matter(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more: dict[str, Any] = {"density": 0.5} if METHODS[method].thinned else {}
    more |= {"precisions": CURVED} if method == "fisher_ties" else {}
    base = None if method == "karcher" else BASE
    weights = [0.5, 0.3, 0.2]
    whole = merged(method, weights=weights, base=base, **more)
    monkeypatch.setattr(streaming.sparse, "BLOCK", 7)
    small = merged(method, weights=weights, base=base, **more)
    if method != "dare_ties":  # whose blocks are part of its chance
        close(whole, small)
    assert all(bool(t.isfinite().all()) for t in small.values())


@pytest.mark.parametrize(
    ("method", "more", "word"),
    [
        ("ties", {"density": 1.5}, "at most 1"),
        ("dare_ties", {"density": 0}, "above 0"),
        ("ties", {"density": [0.5]}, "one entry per model"),
        ("slerp", {"base": None}, "merges 2 models"),
        ("dare_ties", {"seed": -1}, "seed"),
        ("ties", {"base": None}, "needs the base"),
    ],
)
def test_what_a_method_cannot_take(method: str, more: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        merged(method, **more)


# Slices


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for k, name in enumerate(("base", "ft1", "ft2")):
        config = {"num_hidden_layers": 2, "layer_types": ["full", "sliding"]}
        write_model(tmp_path / name, near(state(0), k), config=config)
    return tmp_path


def run(place: Path, text: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    (place / "r.yml").write_text(text)
    out = place / f"out{len(list(place.iterdir()))}"
    execute(plan_folders(read_recipe(place / "r.yml").job), out)
    return Folder.open(out).tensors(), json.loads((out / "config.json").read_text())


def test_slerp_with_a_gradient(place: Path) -> None:
    tensors, _ = run(
        place,
        "merge_method: slerp\nbase_model: base\nmodels: [{model: ft1}, {model: base}]\n"
        "parameters: {t: [{filter: norm, value: 1}, {value: [0, 1]}]}\n",
    )
    base, one = (Folder.open(place / n).tensors() for n in ("base", "ft1"))
    at = {"layers.0.mlp.weight": base, "layers.1.mlp.weight": one, "layers.0.norm.weight": one}
    for name, expected in at.items():
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=1e-6)


def test_densities_and_weights_run_over_the_layers(place: Path) -> None:
    tensors, _ = run(
        place,
        "merge_method: ties\nbase_model: base\nparameters: {normalize: true, lambda: 0.7}\n"
        "models:\n- {model: ft1, parameters: {weight: [0.3, 0.6], density: [1, 0.5]}}\n"
        "- model: ft2\n  parameters:\n    density: 0.5\n"
        "    weight: [{filter: mlp, value: 0.5}, {value: 0.2}]\n",
    )
    base, one, two = (Folder.open(place / n).tensors() for n in ("base", "ft1", "ft2"))
    for layer, (weight, density) in enumerate([(0.3, 1.0), (0.6, 0.5)]):
        for part, other in (("mlp", 0.5), ("norm", 0.2)):
            name = f"layers.{layer}.{part}.weight"
            expected = blr.merge(
                {name: base[name]},
                [{name: one[name]}, {name: two[name]}],
                method="ties",
                weights=[weight, other],
                density=[density, 0.5],
                scale=0.7,
            )
            assert torch.equal(tensors[name], expected[name])


def test_a_filter_of_a_density_that_matches_nothing(place: Path) -> None:
    with pytest.raises(InputError, match="did you mean"):
        run(
            place,
            "merge_method: dare_ties\nbase_model: base\nmodels:\n- model: ft1\n"
            "  parameters: {weight: 1, density: [{filter: mpl, value: 0.5}, {value: 1}]}\n",
        )


# The merge of one tensor: every special case, and the optimum of all tasks together.


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
