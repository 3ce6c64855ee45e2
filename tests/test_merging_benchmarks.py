"""Merging's benchmarks: what keeps their figures honest, the data's splits, TIES; no timing."""

from __future__ import annotations

import pickle  # noqa: TID251 - to be read without running it
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.merging import child, sentiment_data, sentiment_rows
from benchmarks.merging import sentiment_train as training
from benchmarks.merging.agreement import difference
from benchmarks.merging.checkpoints_made import make
from benchmarks.merging.sentiment_data import Text
from benchmarks.merging.sentiment_ties import ties_step
from benchmarks.merging.sentiment_train import Recipe
from blr_analysis.files import storage

HOLD = "import time; x = b'1' * 200_000_000; time.sleep(0.2)"


def test_a_wrong_result_shows(tmp_path: Path) -> None:
    made = make(tmp_path / "made", 500_000)
    tensors = load_file(made.base / "model.safetensors")
    name = max(tensors, key=lambda n: tensors[n].numel())
    total = sum(t.numel() for t in tensors.values())
    top = float(tensors[name].abs().max())
    tensors[name].view(-1)[0] = 3 * top
    save_file(tensors, tmp_path / "other.safetensors")
    found = difference(tmp_path / "other.safetensors", made.base / "model.safetensors")
    assert found.share == pytest.approx(1 / total)
    assert 2 <= found.largest <= 4
    save_file({"another": tensors[name]}, tmp_path / "foreign.safetensors")
    with pytest.raises(ValueError, match="different names"):
        difference(tmp_path / "foreign.safetensors", made.base / "model.safetensors")


def test_a_child_is_measured_by_itself() -> None:
    held = torch.zeros(30_000_000)  # of this process, and none of the child's
    assert held.sum() == 0
    small = child.run([sys.executable, "-I", "-S", "-c", "print('{\"inner\": 0.5}')"])
    assert small.inner == 0.5 and small.seconds > 0
    assert 1e6 < small.peak < 60e6
    large = child.run([sys.executable, "-I", "-S", "-c", HOLD])
    assert large.inner is None and large.peak > 200e6
    assert 200e6 < large.own <= large.peak
    with pytest.raises(child.ChildError, match=r"ended with 3:\s+no luck"):
        child.run(["sh", "-c", "echo no luck; exit 3"])
    with pytest.raises(child.ChildError, match="could not be started"):
        child.run(["no-such-program-anywhere"])


# The merging experiment's own parts: its data's splits, TIES, batches; nothing is downloaded.


def documents() -> Iterator[Text]:
    """60 documents of 5 sentences; two of five are positive; one text is there twice."""
    for document in range(60):
        for row in range(5):
            yield Text(f"text {document} {row}", row < 2, str(document))
    yield Text(" TEXT 7  1", True, "7")


class TestSplits:
    @pytest.fixture(autouse=True)
    def made_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sentiment_data.DOMAINS, "made up", documents)

    def test_documents_stay_whole(self) -> None:
        split = sentiment_data.split("made up", 0, 60, 10, 20)
        held = {t.document for t in split.validation + split.test}
        assert held
        assert not held & {t.document for t in split.train}

    def test_balanced_and_disjoint(self) -> None:
        split = sentiment_data.split("made up", 0, 60, 10, 20)
        for part, size in ((split.train, 60), (split.validation, 10), (split.test, 20)):
            assert len(part) == size
            assert sum(t.positive for t in part) == size // 2
        texts = [" ".join(t.text.lower().split()) for p in vars(split).values() for t in p]
        assert len(set(texts)) == 90

    def test_seeds_draw_other_training_texts_and_the_same_test(self) -> None:
        one, two = (sentiment_data.split("made up", seed, 60, 10, 20) for seed in (0, 1))
        assert one.train != two.train
        assert one.test == two.test
        assert one.validation == two.validation


def test_strings_of_a_pickle_are_read_without_running_it() -> None:
    class Harmful:
        def __reduce__(self) -> tuple:
            return pytest.fail, ("the pickle was run",)

    again = "good"
    data = pickle.dumps([["one", again, "two"], again, Harmful()], protocol=4)
    found = list(sentiment_data._strings(data))
    assert found[:4] == ["one", "good", "two", "good"]
    assert "the pickle was run" in found


class TestTies:
    def test_by_hand(self) -> None:
        """Of 5 entries 2 are kept; the third entry's signs disagree, the larger sum wins."""
        base = {"w": torch.ones(5)}
        steps = [[4.0, 0.1, 3.0, 0.0, 0.2], [2.0, 0.3, -5.0, 0.1, 0.0]]
        models = [{"w": 1 + torch.tensor(s)} for s in steps]
        found = ties_step(base, models, kept=0.4)
        assert found["w"].tolist() == pytest.approx([3, 0, -5, 0, 0])

    def test_trims_over_all_tensors(self) -> None:
        base = {"a": torch.zeros(2), "b": torch.zeros(2)}
        model = {"a": torch.tensor([9.0, -8.0]), "b": torch.tensor([1.0, 2.0])}
        found = ties_step(base, [model], kept=0.5)
        assert found["a"].tolist() == [9, -8]
        assert found["b"].tolist() == [0, 0]


class TestMerges:
    @pytest.fixture
    def family(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[sentiment_rows.Family, dict[str, dict[str, Tensor]]]:
        """Random weights and precisions on disk, as training would have left them."""
        monkeypatch.setenv("BLR_CACHE", str(tmp_path))
        recipe, g = Recipe(), torch.Generator().manual_seed(0)
        curved = {}
        for domain in training.DOMAINS:
            place = training.folder(0, "ivon", domain)
            weights = {"w": torch.randn(3, 4, generator=g)}
            curved[domain] = {"w": 2e4 + 1e5 * torch.rand(3, 4, generator=g)}
            record = {"hash": recipe.hash("ivon")}
            training.store.write(place / "model.safetensors", weights, record)
            storage.write(place / "ivon", curved[domain], {"kind": "ivon"})
        return sentiment_rows.Family(0, "ivon", recipe), curved

    def test_agrees_with_the_formula_in_float64(self, family: tuple) -> None:
        """θ_0 + Σ α (H_0 + H_t)(θ_t − θ_0) / (H_0 + Σ α H_t), written out."""
        found, curved = family
        base = found.base["w"].double()
        top, bottom = torch.zeros_like(base), curved["movies"]["w"].double()
        for domain, model in found.models.items():
            h = curved[domain]["w"].double()
            top += 0.4 * (curved["movies"]["w"].double() + h) * (model["w"].double() - base)
            bottom = bottom + 0.4 * h
        merged = found.merged("gradient_matching", "ivon", 0.4)["w"].double()
        torch.testing.assert_close(merged, base + top / bottom, rtol=1e-5, atol=1e-6)

    def test_what_ivon_began_with_is_taken_off(self, family: tuple) -> None:
        found, curved = family
        kept, start = found.recipe.ivon_kept, found.recipe.ivon_precision
        h = found.precision("foods", "ivon, start off")["w"]
        expected = ((curved["foods"]["w"] - kept * start) / (1 - kept)).clamp_min(0)
        torch.testing.assert_close(h, expected)
        assert 0 < (h == 0).sum() < h.numel()
