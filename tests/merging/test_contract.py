"""The contract of every method: in memory, streamed and run again it is the formula of its paper,
written out in float64 on whole tensors."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models_on_disk import SHAPES, State, curved, near, state, write_model
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError
from blr_analysis.files import Folder, shards
from blr_analysis.merging.methods import METHODS
from blr_analysis.merging.sparse import random_mask

DELTA, SCALE = 0.3, 0.8


class MergeContract:
    """A method; ``formula`` gives one tensor of the merge from whole ones."""

    method = ""
    weights: tuple[float, ...] = (0.7, 0.4, -0.2)
    options: ClassVar[dict[str, Any]] = {}
    close = 2e-9

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """θ of θ_0, the stacked θ_t and H_t, and H_0 + δ."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        return len(self.weights)

    def shares(self, like: Tensor) -> Tensor:
        return torch.tensor(self.weights, dtype=like.dtype).view(-1, *[1] * (like.ndim - 1))

    def arguments(self, precisions: list[Any], first: Any) -> dict[str, Any]:
        row = METHODS[self.method]
        more: dict[str, Any] = {"method": self.method, "weights": list(self.weights)}
        if row.uses_precisions:
            more["precisions"] = precisions
        if row.uses_base_precision:
            more |= {"base_precision": first, "delta": DELTA}
        return {**more, **self.options}

    def family(self, dtype: torch.dtype) -> tuple[State, list[State], list[State], State]:
        base = state(0, dtype)
        times = range(1, self.count + 1)
        return base, [near(base, t) for t in times], [curved(t) for t in times], curved(0)

    def in_memory(self, stored: torch.dtype, **more: Any) -> dict[str, Tensor]:
        base, models, precisions, first = self.family(stored)
        given = self.arguments(precisions, first)
        return blr.merge(base, models, **given, **more)

    def test_in_memory_it_is_the_formula(self) -> None:
        base, models, precisions, first = self.family(torch.float64)
        found = self.in_memory(torch.float64, dtype=torch.float64)
        assert list(found) == list(SHAPES)
        for name in SHAPES:
            every, h = (torch.stack([s[name].double() for s in ss]) for ss in (models, precisions))
            truth = self.formula(base[name], every, h, first[name].double() + DELTA, name)
            torch.testing.assert_close(found[name], truth, rtol=0, atol=self.close, msg=name)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_streamed_and_run_again_it_is_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        """To the bit, from shards into shards; a run that was cut short leaves nothing behind."""
        base, models, precisions, first = self.family(dtype)
        root = write_model(tmp_path / "base", base, precision=first, shards=2)
        folders = [
            write_model(tmp_path / f"ft{t}", m, precision=h, shards=1 + t)
            for t, (m, h) in enumerate(zip(models, precisions, strict=True))
        ]
        places = [f / "precision" for f in folders]
        given = {**self.arguments(places, root / "precision"), "max_shard_bytes": 200}

        def stop(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shards.Shards, "put", stop)
            blr.merge(root, folders, **given, out=tmp_path / "out")
        assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())
        report = blr.merge(root, folders, **given, threads=2, out=tmp_path / "out")
        written, memory = Folder.open(report.folder).tensors(), self.in_memory(dtype)
        assert len(report.shards) > 1 and written.keys() == memory.keys()
        assert all(torch.equal(written[n], memory[n]) for n in SHAPES)
        assert all(t.dtype == dtype for t in written.values())

    def test_a_long_tensor_is_merged_in_pieces(self) -> None:
        """Of a length that no piece divides: as the formula has it, for any memory and threads."""
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(2**19 + 77, generator=generator)
        models = [base + 0.1 * torch.randn(len(base), generator=generator) for _ in self.weights]
        h = [torch.rand(len(base), generator=generator) for _ in self.weights]
        given = self.arguments([{"w": x} for x in h], {"w": h[0]})
        found = [
            blr.merge({"w": base}, [{"w": m} for m in models], **given, **how)["w"]
            for how in ({"threads": 1}, {"threads": 3, "max_memory": 60_000_000})
        ]
        assert torch.equal(*found)
        every, curves = torch.stack(models).double(), torch.stack(h).double()
        truth = self.formula(base.double(), every, curves, curves[0] + DELTA, "w")
        apart = (found[0] - truth).abs() > 1e-4  # where rounding decides what is trimmed
        assert float(apart.double().mean()) < 1e-5

    def test_weights_by_the_name(self) -> None:
        by_name = [lambda n, a=a: a if "layers.0" in n else 1.0 for a in self.weights]
        base, models, precisions, first = self.family(torch.float32)
        given = self.arguments(precisions, first)
        mixed = blr.merge(base, models, **{**given, "weights": by_name})
        one = blr.merge(base, models, **{**given, "weights": 1.0})
        for n, own in self.in_memory(torch.float32).items():
            assert torch.equal(mixed[n], (own if "layers.0" in n else one[n]).view_as(own))

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_running_statistics_are_averaged(self, sign: float) -> None:
        """No weights: by normalised weights, equal ones where some are negative; never negative."""
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        models = [copy.deepcopy(base) for _ in self.weights]
        for t, model in enumerate(models):
            for p in model.parameters():
                p.data += 0.1 * torch.randn_like(p)
            model[1].running_var.fill_(0.1 * (t + 1))
            model[1].running_mean.fill_(t - 1.0)
            model[1].num_batches_tracked += t
        ones = [{n: torch.ones_like(p) for n, p in m.named_parameters()} for m in models]
        weights = [1.0, *[2.0] * (self.count - 2), sign * 0.5]
        given = {**self.arguments(ones, ones[0]), "weights": weights}
        own = blr.merge(base, models, **given)
        shares = torch.tensor(weights if sign > 0 else [1.0] * self.count)
        for name in ("1.running_var", "1.running_mean"):
            each = torch.stack([m.state_dict()[name] for m in models])
            torch.testing.assert_close(own[name], shares @ each / shares.sum())
        assert int(own["1.num_batches_tracked"]) == 0


class TestGradientMatching(MergeContract):
    method = "gradient_matching"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        a = self.shares(models)
        step = (a * (first + h) * (models - base)).sum(0)
        total, size = first + (a * h).sum(0), first + (a.abs() * h).sum(0)
        plain = (a * (models - base)).sum(0)
        return base + torch.where(total > 0.1 * size, step / total, plain)


class TestFisher(MergeContract):
    method, weights = "fisher", (0.7, 0.4, 1.2)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        a = self.shares(models)
        return (a * h * models).sum(0) / (a * h).sum(0)


class TestTaskArithmetic(MergeContract):
    method, options = "task_arithmetic", {"scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * (models - base)).sum(0)


class TestLinear(MergeContract):
    method = "linear"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return (self.shares(models) * models).sum(0) / sum(self.weights)


class TestTies(MergeContract):
    method, options = "ties", {"density": 0.5, "scale": SCALE}

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """Trim by sorting, elect and average entry by entry."""
        h = h if self.method == "fisher_ties" else torch.ones_like(h)
        flat = (models - base).reshape(len(models), -1)
        size = flat.abs() * h.reshape(len(h), -1).sqrt()
        kept = torch.zeros_like(flat)
        for row, order in zip(kept, size.argsort(1, descending=True), strict=True):
            row[order[: max(1, int(0.5 * flat.shape[1]))]] = 1.0
        shares = self.shares(models) * h
        pulls = shares * (kept * flat).view_as(models)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        agree = pulls * sign > 0
        below = (shares * agree).sum(0)
        return base + SCALE * (pulls * agree).sum(0) / torch.where(below == 0, 1.0, below)


class TestFisherTies(TestTies):
    method, weights = "fisher_ties", (0.7, 0.4, 0.2)


class TestDareLinear(MergeContract):
    method, options = "dare_linear", {"density": 0.25, "scale": SCALE, "seed": 3}

    def steps(self, base: Tensor, models: Tensor, name: str) -> Tensor:
        steps, block = models - base, 2**17
        rows = []
        for t, step in enumerate(steps.reshape(len(steps), -1)):
            starts = range(0, len(step), block)
            cuts = [(s, min(block, len(step) - s)) for s in starts]
            rows.append(torch.cat([random_mask(0.25, n, 3, t, name, s) for s, n in cuts]))
        return steps * torch.stack(rows).view_as(steps) / 0.25

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        return base + SCALE * (self.shares(models) * self.steps(base, models, name)).sum(0)


class TestDareTies(TestDareLinear):
    method = "dare_ties"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        pulls = self.shares(models) * self.steps(base, models, name)
        sign = torch.where(pulls.sum(0) >= 0, 1.0, -1.0)
        return base + SCALE * (pulls * (pulls * sign > 0)).sum(0)


def unit(values: Tensor) -> Tensor:
    return values / values.norm()


class TestSlerp(MergeContract):
    method, weights = "slerp", (0.7, 0.3)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        one, two = models
        cosine = float((unit(one) * unit(two)).sum())
        if abs(cosine) > 0.9995:
            return 0.7 * one + 0.3 * two
        angle = math.acos(cosine)
        return (math.sin(0.7 * angle) * one + math.sin(0.3 * angle) * two) / math.sin(angle)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("zero", ["first", "second", "both"])
def test_slerp_of_zeros_is_that_at_a_right_angle(t: float, zero: str) -> None:
    """A vector without a direction; also where it is only as good as zero."""
    generator = torch.Generator().manual_seed(0)
    one, two = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    for size in (0.0, 1e-12):
        pair = [one * (size if zero != "second" else 1), two * (size if zero != "first" else 1)]
        truth = math.cos(t * math.pi / 2) * pair[0] + math.sin(t * math.pi / 2) * pair[1]
        states = [{"w": model} for model in pair]
        merge = blr.merge(None, states, method="slerp", weights=[1 - t, t], dtype=torch.float64)
        torch.testing.assert_close(merge["w"], truth)


class TestMultislerp(MergeContract):
    method, weights = "multislerp", (0.5, 0.3, 0.2)

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        steps, a = models - base, self.shares(models)
        mean = sum(w * unit(s) for w, s in zip(self.weights, steps, strict=True))
        lengths = steps.reshape(len(steps), -1).norm(dim=1)
        return base + float((a.flatten() * lengths).sum()) * unit(mean)


class TestKarcher(MergeContract):
    method, weights, close = "karcher", (0.5, 0.3, 0.2), 2e-5  # steps below 1e-5 are none

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        """The point from which no tangent is left, by walking there in small steps."""
        points = [unit(m) for m in models]
        at = unit(sum(w * p for w, p in zip(self.weights, points, strict=True)))
        for _ in range(60):
            tangent = torch.zeros_like(at)
            for w, p in zip(self.weights, points, strict=True):
                cosine = (p * at).sum().clamp(-1, 1)
                across = p - cosine * at
                if float(across.norm()) > 1e-12:
                    tangent += w * cosine.acos() * unit(across)
            at = unit(at + tangent)
        lengths = models.reshape(len(models), -1).norm(dim=1)
        return float((torch.tensor(self.weights).double() * lengths).sum()) * at


class TestModelStock(MergeContract):
    method = "model_stock"

    def formula(self, base: Tensor, models: Tensor, h: Tensor, first: Tensor, name: str) -> Tensor:
        steps = models - base
        c = sum((unit(a) * unit(b)).sum() for i, a in enumerate(steps) for b in steps[:i]) / 3
        return base + 3 * c / (1 + 2 * c) * steps.mean(0)


def test_every_method_keeps_the_contract() -> None:
    kept = {c.method for c in globals().values() if isinstance(c, type) and hasattr(c, "formula")}
    assert kept - {""} == METHODS.keys()


# Identities


def one(*rows: list[float]) -> list[dict[str, Tensor]]:
    return [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]


def merged(method: str, base: Any, models: Any, **more: Any) -> Tensor:
    return blr.merge(base, models, method=method, dtype=torch.float64, **more)["w"]


def test_special_cases_of_gradient_matching() -> None:
    base, models = one([0.1, 0.2])[0], one([1.0, 2.0], [3.0, -1.0])
    same, none = one([2.0, 5.0], [2.0, 5.0]), one([0.0, 0.0], [0.0, 0.0])
    weights: dict[str, Any] = {"weights": [0.6, 0.4]}
    match = lambda *a, **k: merged("gradient_matching", *a, **k, **weights)  # noqa: E731
    arithmetic = merged("task_arithmetic", base, models, **weights)
    torch.testing.assert_close(match(base, models, precisions=none, delta=1.0), arithmetic)
    average = merged("linear", None, models, **weights)
    torch.testing.assert_close(match(base, models, precisions=same), average)
    curved = one([1.0, 3.0], [4.0, 0.5])
    fisher = merged("fisher", None, models, precisions=curved, **weights)
    torch.testing.assert_close(match(base, models, precisions=curved), fisher)


def test_a_model_that_equals_its_base_leaves_it_to_the_bit() -> None:
    base, other = state(0), near(state(0), 1)
    found = blr.merge(base, [{**base, "scale": other["scale"]}], precisions=[curved(1)], delta=1.0)
    assert all(torch.equal(found[n], base[n]) for n in SHAPES if n != "scale")


@pytest.mark.parametrize(
    ("weight", "h", "first", "expected"),
    [
        (-2.0, [1.0, 0.1], 1.0, [-2.0, -2 * 1.1 / 0.8]),  # H̄ = −1 is no precision
        (-1.0, [9.5, 1.0], 10.0, [-1.0, -11 / 9]),  # 0.5 of 19.5 would take a huge step
        (1.0, [0.0, -0.0], 0.0, [1.0, 1.0]),  # nobody has any
    ],
)
def test_what_is_no_precision_to_divide_by(
    weight: float, h: list[float], first: float, expected: list[float]
) -> None:
    base, model = one([0.0, 0.0], [1.0, 1.0])
    found = merged(
        "gradient_matching", base, [model], weights=[weight], precisions=one(h), delta=first
    )
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_dare_keeps_by_chance() -> None:
    base, tuned = {"w": torch.zeros(2**18 + 5)}, [{"w": torch.ones(2**18 + 5)}]
    how: dict[str, Any] = {"method": "dare_linear", "density": 0.25}
    once = blr.merge(base, tuned, **how)["w"]
    assert set(once.tolist()) == {0.0, 4.0}
    spread = math.sqrt(0.25 * 0.75 / len(once))
    assert abs(float((once > 0).double().mean()) - 0.25) < 4 * spread
    other = blr.merge(base, tuned, **how, seed=1)["w"]
    assert abs(float(((once > 0) & (other > 0)).double().mean()) - 0.0625) < 4 * spread
    assert torch.equal(blr.merge(base, tuned, **how, rescale=False)["w"], once / 4)


@pytest.mark.parametrize(("density", "least"), [(0.3, 2.0), (0.01, 5.0)])
def test_ties_keeps_all_entries_as_large_as_the_last(density: float, least: float) -> None:
    (tuned,) = one([5.0, -2.0, 2.0, 1.0, 0.0, 2.0, 0.5, 0.0, 0.0, 0.0])
    own = merged("ties", {"w": torch.zeros(10).double()}, [tuned], density=density)
    assert torch.equal(own, torch.where(tuned["w"].abs() >= least, tuned["w"], 0.0))


def test_opposite_models_have_no_spherical_mean() -> None:
    with pytest.raises(InputError, match="opposite"):
        merged("karcher", None, one([1.0, 0.0], [-1.0, 0.0]))


def test_the_power_of_diagonals_is_that_of_every_number() -> None:
    """Of the data's part, the prior off, and the base's own; δ is added as it is."""
    models = one([1.0, 2.0], [3.0, 0.5], [0.3, 0.2])
    held = one([4.0, 1.0], [9.0, 0.25], [1.0, 16.0])
    roots = [{"w": h["w"].sqrt()} for h in held]
    priors = [
        blr.Posterior(m, {"w": h["w"] + 3.0}, prior_precision=3.0, n_data=5)
        for m, h in zip(models, held, strict=True)
    ]
    for method in ("gradient_matching", "fisher"):
        found = []
        for q, more in ((priors, {"power": 0.5}), (roots, {})):
            based = {"base_precision": q[0], "delta": 0.5} if method != "fisher" else {}
            how = {"precisions": q[1:], **based, **more}
            found.append(merged(method, models[0], models[1:], **how))
        torch.testing.assert_close(*found)
