"""The contract of the methods that need no data, each against its paper's formula in float64.

They were compared with mergekit 0.1.5 where it has them, entry by entry, when they were written.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import scipy.linalg
import torch
from merge_contract import SCALE, MergeContract
from models_on_disk import curved, near, state, write_model
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import BLRError, ModelError
from blr_analysis.merging.methods import METHODS
from blr_analysis.merging.sparse import draws
from blr_analysis.merging.task_matrices import ace, iso_c, iso_cts, tsv_m, wudi


class MatrixContract(MergeContract):
    """A method for the matrices of layers; other tensors are averaged."""

    weights = (0.7, 0.4, 0.2)
    options: ClassVar[dict[str, Any]] = {"scale": SCALE}
    close = 1e-8

    def step(self, steps: list[np.ndarray]) -> np.ndarray:
        raise NotImplementedError

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        is_matrix = base.ndim > 1 and name != "embed.weight"
        if not is_matrix:
            return (self.shares(models) * models).sum(0) / sum(self.weights)
        steps = [(model - base).numpy() for model in models]
        return base + SCALE * torch.from_numpy(self.step(steps))


class TestIsoC(MatrixContract):
    method = "iso_c"

    def step(self, steps: list[np.ndarray]) -> np.ndarray:
        """By the polar decomposition M = Q P: Q, times the mean eigenvalue of P."""
        total = sum(a * step for a, step in zip(self.weights, steps, strict=True))
        orthogonal, symmetric = scipy.linalg.polar(total)
        return orthogonal * np.trace(symmetric) / min(total.shape)


class TestIsoCts(MatrixContract):
    method = "iso_cts"

    def step(self, steps: list[np.ndarray]) -> np.ndarray:
        """By eigenvectors of Gram matrices, and the polar factors of what they span."""
        weighted = [a * step for a, step in zip(self.weights, steps, strict=True)]
        size = min(steps[0].shape)
        per_task = round((size - int(0.8 * size)) / len(steps))
        common = _leading(np.sum(weighted, 0), size - per_task * len(steps))
        projection = np.eye(len(common[0])) - common[0] @ common[0].T
        parts = [common, *(_leading(projection @ step, per_task) for step in weighted)]
        left, _ = scipy.linalg.polar(np.concatenate([part[0] for part in parts], 1))
        right, _ = scipy.linalg.polar(np.concatenate([part[1] for part in parts], 1))
        return np.concatenate([part[2] for part in parts]).mean() * left @ right.T


def _leading(matrix: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first left and right singular vectors, and values, from the eigenvectors of M Mᵀ."""
    squares, left = np.linalg.eigh(matrix @ matrix.T)
    left = left[:, ::-1][:, :count]
    values = np.sqrt(squares[::-1][:count])
    return left, matrix.T @ left / values, values


class TestTsvM(MatrixContract):
    method = "tsv_m"

    def step(self, steps: list[np.ndarray]) -> np.ndarray:
        lefts = []
        values = []
        rights = []
        for a, step in zip(self.weights, steps, strict=True):
            left, value, right = np.linalg.svd(step)
            count = min(step.shape) // len(steps)
            lefts.append(left[:, :count])
            values.extend(a * value[:count])
            rights.append(right[:count].T)
        left, _ = scipy.linalg.polar(np.concatenate(lefts, 1))
        right, _ = scipy.linalg.polar(np.concatenate(rights, 1))
        return left @ np.diag(values) @ right.T


class TestWudi(MatrixContract):
    method = "wudi"
    damping = 0.0

    def step(self, steps: list[np.ndarray]) -> np.ndarray:
        """Least squares Δ [Δ_tᵀ √α_t / ‖Δ_t‖, …] ≈ [Δ_t Δ_tᵀ √α_t / ‖Δ_t‖, …], row by row."""
        left = []
        right = []
        for a, step in zip(self.weights, steps, strict=True):
            ridge = math.sqrt(self.damping / step.shape[1]) * np.eye(step.shape[1])
            inputs = np.concatenate([step / np.linalg.norm(step), ridge])
            left.append(math.sqrt(a) * inputs)
            right.append(math.sqrt(a) * inputs @ step.T)
        solved, *_ = np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)
        return solved.T


class TestAce(TestWudi):
    method = "ace"
    options: ClassVar[dict[str, Any]] = {"scale": SCALE, "damping": 0.3}
    damping = 0.3


class TestNuslerp(MergeContract):
    method = "nuslerp"
    weights = (0.3, 0.9)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        first_step, second_step = models - base
        t = 0.75
        cosine = float((first_step * second_step).sum() / first_step.norm() / second_step.norm())
        if abs(cosine) > 0.9995:
            return base + (1 - t) * first_step + t * second_step
        angle = math.acos(cosine)
        arc = math.sin((1 - t) * angle) * first_step + math.sin(t * angle) * second_step
        return base + arc / math.sin(angle)


class SelectionContract(MergeContract):
    """A method that takes no weights."""

    weights = (1.0, 1.0, 1.0)

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        raise NotImplementedError

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + self.step(base, models - base)


class TestNearswap(SelectionContract):
    method = "nearswap"
    weights = (1.0,)
    options: ClassVar[dict[str, Any]] = {"t": 0.05}

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        """Interpolated by t / |θ_1 − θ_0|, 1 at most."""
        share = torch.nan_to_num(0.05 / steps[0].abs(), nan=1.0, posinf=1.0).clamp(0, 1)
        return share * steps[0]


class TestRam(SelectionContract):
    method = "ram"
    options: ClassVar[dict[str, Any]] = {"epsilon": 0.04}

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        changed = steps.abs() > 0.04
        mean = torch.where(changed, steps, math.nan).nanmean(0)
        return torch.nan_to_num(mean, nan=0.0)


class TestRamPlus(SelectionContract):
    method = "ramplus_tl"
    options: ClassVar[dict[str, Any]] = {"epsilon": 0.04, "r": 0.3, "alpha": 0.5}

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        flat = steps.reshape(len(steps), -1)
        changed = flat.abs() > 0.04
        result = torch.zeros_like(flat[0])
        for k in range(flat.shape[1]):
            models = changed[:, k].nonzero().flatten().tolist()
            if len(models) > 1:
                result[k] = flat[models, k].mean()
            elif len(models) == 1:
                (model,) = models
                alone = changed[model] & (changed.sum(0) == 1)
                shared = changed[model] & (changed.sum(0) > 1)
                overlap = float(shared.sum()) / float(alone.sum())
                result[k] = flat[model, k] * (1 + 0.3 * min(overlap, 0.5))
        return result.view_as(base)

    def test_a_long_tensor_is_merged_in_pieces(self) -> None:
        pytest.skip("entry by entry it takes too long; ram and sce have the same pieces")


class TestSce(SelectionContract):
    method = "sce"
    options: ClassVar[dict[str, Any]] = {"select_topk": 0.4}

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        flat = steps.reshape(len(steps), -1).clone()
        variance = flat.var(0, correction=0)
        stays = variance.argsort(descending=True)[: max(1, int(0.4 * len(variance)))]
        selected = torch.zeros_like(flat)
        selected[:, stays] = flat[:, stays]
        energy = selected.square().mean(1)
        weights = (energy / energy.sum())[:, None]
        agree = torch.sign(selected) == torch.sign(selected.sum(0) + 1e-300)
        total = (weights * agree).sum(0)
        merged = (weights * agree * selected).sum(0) / torch.where(total == 0, 1.0, total)
        return merged.view_as(base)


class TestArceeFusion(SelectionContract):
    method = "arcee_fusion"
    weights = (1.0,)

    def step(self, base: Tensor, steps: Tensor) -> Tensor:
        (step,) = steps
        p = (base + step).softmax(-1)
        q = base.softmax(-1)
        importance = step.abs() * (p * (p / q).log()).sum(-1, keepdim=True)
        first, median, third = np.quantile(importance.numpy(), [0.25, 0.5, 0.75], method="lower")
        return torch.where(importance >= median + 1.5 * (third - first), step, 0.0)


class TestBreadcrumbs(MergeContract):
    method = "breadcrumbs"
    options: ClassVar[dict[str, Any]] = {"density": 0.5, "gamma": 0.2, "scale": SCALE}
    elects = False

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        pulls = torch.zeros_like(models)
        for weight, pull, step in zip(self.weights, pulls, models - base, strict=True):
            size = step.numel()
            order = sorted(range(size), key=lambda k: -abs(float(step.flatten()[k])))
            count = int(0.5 * size)
            dropped = min(int(0.2 * size), size - count)
            stays = order[dropped : dropped + count]
            pull.view(-1)[stays] = weight * step.flatten()[stays]
        if self.elects:
            sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
            pulls = pulls * (pulls * sign > 0)
        return base + SCALE * pulls.sum(0)


class TestBreadcrumbsTies(TestBreadcrumbs):
    method = "breadcrumbs_ties"
    elects = True


class TestDellaLinear(MergeContract):
    method = "della_linear"
    options: ClassVar[dict[str, Any]] = {"density": 0.5, "epsilon": 0.2, "scale": SCALE, "seed": 3}

    def steps(self, base: Tensor, models: Tensor, name: str) -> Tensor:
        """Steps thinned row by row, with the draws of the package and chances by sorting."""
        rows = base.shape[0] if base.ndim > 1 else 1
        thinned = torch.zeros_like(models).view(len(models), rows, -1)
        for t, model in enumerate(models):
            drawn = draws(f"3\0{t}\0{name}", 0, base.numel()).view(rows, -1)
            for k, row in enumerate((model - base).view(rows, -1)):
                sizes = sorted(row.abs().tolist())
                for j, value in enumerate(row):
                    rank = sizes.index(abs(float(value))) / max(len(row) - 1, 1)
                    chance = 0.3 + 0.4 * rank if len(row) > 1 else 0.5
                    if float(drawn[k, j]) < chance:
                        thinned[t, k, j] = value / chance
        return thinned.view_as(models)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * self.steps(base, models, name)).sum(0)

    def test_a_long_tensor_is_merged_in_pieces(self) -> None:
        """The same entries stay for any number of threads, in about the share of ``density``."""
        base = {"w": torch.zeros(40, 20_011)}
        models = [{"w": torch.randn(40, 20_011)} for _ in self.weights]
        arguments = self.arguments([], None)
        actual = blr.merge(base, models, **arguments, threads=1)["w"]
        in_pieces = blr.merge(base, models, **arguments, threads=3, max_memory=90_000_000)["w"]
        assert torch.equal(actual, in_pieces)
        settings = {"density": 0.5, "epsilon": 0.2, "method": "della_linear"}
        thinned = blr.merge(base, models[:1], **settings)["w"]
        share = float((thinned != 0).double().mean())
        assert abs(share - 0.5) < 0.005


class TestDella(TestDellaLinear):
    method = "della"
    weights = (0.7, 0.4, 0.2)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        pulls = self.shares(models) * self.steps(base, models, name)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        agree = pulls * sign > 0
        total = (self.shares(models) * agree).sum(0)
        return base + SCALE * (pulls * agree).sum(0) / torch.where(total == 0, 1.0, total)


@pytest.mark.parametrize("merged", [iso_c, iso_cts, tsv_m, wudi, ace], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
def test_one_task_of_one_direction_is_itself(merged: Any, shape: tuple[int, int]) -> None:
    """No method changes a step of rank 1."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 1, generator=generator).double() for n in shape)
    step = left @ right.mT
    result = merged([step], [1.0])
    torch.testing.assert_close(result, step)


@pytest.mark.parametrize("merged", [iso_c, iso_cts, tsv_m, wudi, ace], ids=lambda f: f.__name__)
def test_a_turned_layer_has_the_turned_merge(merged: Any) -> None:
    """Q Δ_t Rᵀ merge to Q times the merge of the Δ_t times Rᵀ, for steps of low rank and of zeros.

    A method that used the singular vectors of value 0, which are not unique, would break this.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    rank_two = normal(8, 2) @ normal(2, 6)
    rank_one = normal(8, 1) @ normal(1, 6)
    steps = [rank_two, rank_one, torch.zeros(8, 6).double(), rank_two]
    q = torch.linalg.qr(normal(8, 8)).Q
    r = torch.linalg.qr(normal(6, 6)).Q
    weights = [1.0, 0.7, 0.4, 1.0]
    turned = merged([q @ step @ r.mT for step in steps], weights)
    torch.testing.assert_close(turned, q @ merged(steps, weights) @ r.mT)


def test_products_of_small_and_large_steps_are_taken_in_float64() -> None:
    """Directions do not depend on the unit of the weights."""
    generator = torch.Generator().manual_seed(0)
    models = [torch.randn(4, 3, generator=generator) for _ in "ab"]
    for method in ("slerp", "karcher"):
        merged = blr.merge(None, [{"w": model} for model in models], method=method)["w"]
        large = blr.merge(None, [{"w": 1e25 * model} for model in models], method=method)["w"]
        torch.testing.assert_close(large / 1e25, merged)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_model_is_refused(method: str, value: float) -> None:
    weight = TWO[1]["layers.0.mlp.weight"].clone()
    weight[1, 2] = value
    damaged = {**TWO[1], "layers.0.mlp.weight": weight}
    options: dict[str, Any] = {}
    if method == "nearswap":
        options["t"] = 0.1
    if METHODS[method].thinned:
        options["density"] = 0.5
    if METHODS[method].uses_precisions:
        options["precisions"] = [curved(1), curved(2)]
    models = [damaged] if METHODS[method].models == 1 else [TWO[0], damaged]
    with pytest.raises(ModelError, match=r"'layers.0.mlp.weight' of 'models.*NaN or inf"):
        blr.merge(B, models[: METHODS[method].models], method=method, **options)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_t_of_slerp_is_the_share_of_the_angle(t: float) -> None:
    """The merge of two unit vectors at a right angle is at t·90° between them."""
    models = [{"w": vector} for vector in torch.eye(2)]
    merged = blr.merge(None, models, method="slerp", t=t)["w"]
    angle = torch.tensor(t * math.pi / 2)
    torch.testing.assert_close(merged, torch.stack([angle.cos(), angle.sin()]))


def test_opposite_numbers_have_no_spherical_mean() -> None:
    """Rounding gives them no direction either, and the tensor is named."""
    models = [{"scale": torch.tensor(0.5292)}, {"scale": torch.tensor(-1.4122)}]
    with pytest.raises(BLRError, match="'scale': the models point opposite ways"):
        blr.merge(None, models, method="karcher")


def test_layers_that_store_inputs_first_are_turned() -> None:
    """Conv1D stores [inputs, outputs], which its bias shows; it merges as a Linear layer does."""
    linear = {"fc.weight": torch.randn(5, 3), "fc.bias": torch.randn(5)}
    models = [{name: t + 0.1 * torch.randn_like(t) for name, t in linear.items()} for _ in "ab"]
    turned = [{**m, "fc.weight": m["fc.weight"].mT.contiguous()} for m in (linear, *models)]
    for method in ("wudi", "ace"):
        merged = blr.merge(linear, models, method=method)
        merged_turned = blr.merge(turned[0], turned[1:], method=method)
        torch.testing.assert_close(merged_turned["fc.weight"].mT, merged["fc.weight"])


def test_convolutions_are_matrices() -> None:
    base = {"conv.weight": torch.randn(4, 2, 3, 3)}
    models = [{"conv.weight": base["conv.weight"] + 0.1 * torch.randn(4, 2, 3, 3)} for _ in "ab"]
    flat = [{"conv.weight": m["conv.weight"].flatten(1)} for m in (base, *models)]
    merged = blr.merge(base, models, method="tsv_m")["conv.weight"]
    expected = blr.merge(flat[0], flat[1:], method="tsv_m")["conv.weight"]
    torch.testing.assert_close(merged.flatten(1), expected)


B = state(0)
TWO = [near(B, 1), near(B, 2)]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"method": "nearswap", "models": TWO[:1]}, "nearswap needs t"),
        ({"method": "nearswap", "t": 0.1}, "merges one model with the base"),
        ({"method": "nearswap", "models": TWO[:1], "t": -1.0}, "t must be"),
        ({"method": "slerp", "t": 1.5}, "t of slerp must be between 0 and 1"),
        ({"method": "slerp", "t": 0.5, "weights": [1.0, 2.0]}, "t or weights"),
        ({"method": "ram", "models": None}, "models must be a list"),
        ({"method": "ram", "weights": [1.0, 0.5]}, "weights="),
        ({"method": "ram", "gamma": 0.1}, "gamma="),
        ({"method": "sce", "select_topk": 0.0}, "select_topk"),
        ({"method": "sce", "select_topk": 1.5}, "select_topk must be"),
        ({"method": "della", "density": 0.1, "epsilon": 0.2}, "density ± epsilon"),
        ({"method": "breadcrumbs", "gamma": 1.5}, "gamma"),
        ({"method": "iso_c", "damping": 1.0}, "damping="),
        ({"method": "iso_c", "base": None}, "needs the base"),
        ({"method": "wudi", "max_memory": 1000}, "max_memory"),
        ({"method": "wudi", "weights": [1.0, -0.5]}, "wudi takes no negative weights"),
        ({"method": "ace", "weights": [1.0, lambda name: -0.5]}, "ace takes no negative weights"),
        ({"method": "model_stock", "weights": [1.0, 0.5]}, "weights="),
    ],
)
def test_calls_that_make_no_sense(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(BLRError, match=word):
        blr.merge(**{"base": B, "models": TWO, **changes})


def test_a_plan_counts_what_is_held_at_once(tmp_path: Path) -> None:
    """A matrix of many entries needs its steps and their singular vectors in float64."""
    large = {"fc.weight": torch.zeros(1000, 1000)}
    base = write_model(tmp_path / "base", large)
    tuned = write_model(tmp_path / "ft", {"fc.weight": torch.ones(1000, 1000)})
    with pytest.raises(BLRError, match="max_memory"):
        blr.merge(base, [tuned], method="iso_c", max_memory=50_000_000, out=tmp_path / "out")
    blr.merge(base, [tuned], method="iso_c", max_memory=120_000_000, out=tmp_path / "out")


def test_every_method_has_a_contract() -> None:
    """In this file or in test_contract.py."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_contract*.py"))
    assert [name for name in METHODS if f'"{name}"' not in text] == []
