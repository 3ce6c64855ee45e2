"""Methods that mergekit's recipes have: against dense formulas of their papers, whole tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from merging.models_on_disk import SHAPES, curved, near, state, write_model
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.files import Folder
from blr_analysis.merging import stream as streaming
from blr_analysis.merging.folders import execute
from blr_analysis.merging.methods import METHODS
from blr_analysis.merging.plan import plan_folders
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
        ("passthrough", {}, "copies one model"),
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


def test_layers_stacked_are_copies(place: Path) -> None:
    tensors, config = run(
        place,
        "merge_method: passthrough\nslices:\n- sources: [{model: ft1, layer_range: [0, 2]}]\n"
        "- sources: [{model: ft2, layer_range: [1, 2]}]\n"
        "- sources: [{model: ft1, layer_range: [0, 1], parameters: {scale: 0.5}}]\n",
    )
    one, two = (Folder.open(place / n).tensors() for n in ("ft1", "ft2"))
    assert config["num_hidden_layers"] == 4
    assert config["layer_types"] == ["full", "sliding", "sliding", "full"]
    expected = {
        "embed.weight": one["embed.weight"],
        "scale": 0.5 * one["scale"],  # after the layers: of the last slice
    }
    for at, (of, layer, factor) in enumerate(
        [(one, 0, 1), (one, 1, 1), (two, 1, 1), (one, 0, 0.5)]
    ):
        for part in ("mlp", "norm"):
            expected[f"layers.{at}.{part}.weight"] = factor * of[f"layers.{layer}.{part}.weight"]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[n], t) for n, t in expected.items())


def test_slices_have_weights_of_their_own(place: Path) -> None:
    tensors, config = run(
        place,
        "merge_method: task_arithmetic\nbase_model: base\nslices:\n"
        "- sources: [{model: ft1, layer_range: [1, 2], parameters: {weight: 0.5}}]\n"
        "- parameters: {weight: [2, 0.25]}\n"
        "  sources: [{model: ft2, layer_range: [0, 2]}]\n",
    )
    base, one, two = (Folder.open(place / n).tensors() for n in ("base", "ft1", "ft2"))
    assert config["num_hidden_layers"] == 3
    for name, alpha, tuned, own in (
        ("embed.weight", 0.5, one, "embed.weight"),
        ("layers.0.mlp.weight", 0.5, one, "layers.1.mlp.weight"),
        ("layers.1.mlp.weight", 2.0, two, "layers.0.mlp.weight"),
        ("layers.2.mlp.weight", 0.25, two, "layers.1.mlp.weight"),
        ("scale", 2.0, two, "scale"),
    ):
        expected = base[own] + alpha * (tuned[own] - base[own])
        torch.testing.assert_close(tensors[name], expected, rtol=0, atol=1e-6)


def test_a_module_is_its_slices(place: Path) -> None:
    both = "{model: ft1, layer_range: [0, 2]}, {model: ft2, layer_range: [0, 2]}"
    slices = f"slices: [{{sources: [{both}]}}]"
    plain, _ = run(place, f"merge_method: linear\n{slices}\n")
    inside, _ = run(place, f"merge_method: linear\nmodules: {{default: {{{slices}}}}}\n")
    assert all(torch.equal(plain[n], inside[n]) for n in SHAPES)


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
