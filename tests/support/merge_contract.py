"""The contract of every merge method: in memory, streamed and run again it is a formula."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models_on_disk import SHAPES, State, curved, near, state, write_model
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import BLRError
from blr_analysis.files import Folder, shards
from blr_analysis.merging.methods import METHODS

DELTA = 0.3
SCALE = 0.8


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
        arguments: dict[str, Any] = {"method": self.method}
        if row.takes("weights"):
            arguments["weights"] = list(self.weights)
        if row.uses_precisions:
            arguments["precisions"] = precisions
        if row.uses_base_precision:
            arguments |= {"base_precision": first, "delta": DELTA}
        return {**arguments, **self.options}

    def family(self, dtype: torch.dtype) -> tuple[State, list[State], list[State], State]:
        base = state(0, dtype)
        times = range(1, self.count + 1)
        return base, [near(base, t) for t in times], [curved(t) for t in times], curved(0)

    def in_memory(self, stored: torch.dtype, **options: Any) -> dict[str, Tensor]:
        base, models, precisions, first = self.family(stored)
        arguments = self.arguments(precisions, first)
        return blr.merge(base, models, **arguments, **options)

    def test_in_memory_it_is_the_formula(self) -> None:
        base, models, precisions, first = self.family(torch.float64)
        actual = self.in_memory(torch.float64, dtype=torch.float64)
        assert list(actual) == list(SHAPES)
        for name in SHAPES:
            stacked = torch.stack([model[name].double() for model in models])
            h = torch.stack([precision[name].double() for precision in precisions])
            truth = self.formula(base[name], stacked, h, first[name].double() + DELTA, name)
            torch.testing.assert_close(actual[name], truth, rtol=0, atol=self.close, msg=name)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_what_is_merged_stays_as_it_is(self, dtype: torch.dtype) -> None:
        base, models, precisions, first = self.family(dtype)
        given = [base, *models, *precisions, first]
        before = copy.deepcopy(given)
        blr.merge(base, models, **self.arguments(precisions, first), dtype=torch.float64)
        for state_after, state_before in zip(given, before, strict=True):
            assert all(torch.equal(state_after[name], state_before[name]) for name in SHAPES)

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
        arguments = {**self.arguments(places, root / "precision"), "max_shard_bytes": 200}

        def stop(*args: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shards.Shards, "put", stop)
            blr.merge(root, folders, **arguments, out=tmp_path / "out")
        assert not any(p.name.startswith((".out", "out")) for p in tmp_path.iterdir())
        report = blr.merge(root, folders, **arguments, threads=2, out=tmp_path / "out")
        written = Folder.open(report.folder).tensors()
        memory = self.in_memory(dtype)
        assert len(report.shards) > 1
        assert written.keys() == memory.keys()
        assert all(torch.equal(written[n], memory[n]) for n in SHAPES)
        assert all(t.dtype == dtype for t in written.values())

    def test_a_long_tensor_is_merged_in_pieces(self) -> None:
        """A tensor of a length that no piece divides is the formula, for any memory and threads."""
        generator = torch.Generator().manual_seed(0)
        base = torch.randn(2**19 + 77, generator=generator)
        models = [base + 0.1 * torch.randn(len(base), generator=generator) for _ in self.weights]
        h = [torch.rand(len(base), generator=generator) for _ in self.weights]
        arguments = self.arguments([{"w": x} for x in h], {"w": h[0]})
        arguments |= {"base": {"w": base}, "models": [{"w": m} for m in models]}
        actual = blr.merge(**arguments, threads=1)["w"]
        in_pieces = blr.merge(**arguments, threads=3, max_memory=60_000_000)["w"]
        assert torch.equal(actual, in_pieces)
        stacked = torch.stack(models).double()
        curves = torch.stack(h).double()
        truth = self.formula(base.double(), stacked, curves, curves[0] + DELTA, "w")
        apart = (actual - truth).abs() > 1e-4  # where rounding decides what is trimmed
        assert float(apart.double().mean()) < 1e-5

    def test_weights_by_the_name(self) -> None:
        if not METHODS[self.method].takes("weights"):
            pytest.skip("the method weighs by itself")
        by_name = [lambda n, a=a: a if "layers.0" in n else 1.0 for a in self.weights]
        base, models, precisions, first = self.family(torch.float32)
        arguments = self.arguments(precisions, first)
        mixed = blr.merge(base, models, **{**arguments, "weights": by_name})
        unweighted = blr.merge(base, models, **{**arguments, "weights": 1.0})
        for name, weighted in self.in_memory(torch.float32).items():
            expected = weighted if "layers.0" in name else unweighted[name]
            assert torch.equal(mixed[name], expected)

    @pytest.mark.parametrize("sign", [1.0, -1.0])
    def test_running_statistics_are_averaged(self, sign: float) -> None:
        """By normalised weights; by equal ones where some are negative."""
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
        arguments = self.arguments(ones, ones[0])
        weighs = METHODS[self.method].takes("weights")
        if weighs:
            arguments["weights"] = weights
        if sign < 0 and METHODS[self.method].positive:
            with pytest.raises(BLRError, match="takes no negative weights"):
                blr.merge(base, models, **arguments)
            return
        merged = blr.merge(base, models, **arguments)
        shares = torch.tensor(weights if sign > 0 and weighs else [1.0] * self.count)
        for name in ("1.running_var", "1.running_mean"):
            statistics = torch.stack([m.state_dict()[name] for m in models])
            torch.testing.assert_close(merged[name], shares @ statistics / shares.sum())
        assert int(merged["1.num_batches_tracked"]) == 0
