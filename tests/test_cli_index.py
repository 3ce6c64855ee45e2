"""``blr-analysis index`` and ``query``: what they print is what the library gives."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import tiny_transformers as tiny
import torch

import blr_analysis as blr
from blr_analysis.cli import main
from blr_analysis.errors import DataError
from blr_analysis.huggingface.models import load_model
from blr_analysis.huggingface.questions import language_task

pytest.importorskip("transformers")

N = 9
ASKED = [{"prompt": "the film", "answer": " was good"}, {"prompt": "a", "answer": " dull book"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny.save(place, tiny.build("llama", "causal_lm", tie_word_embeddings=True), pairs=False)
    texts = tiny.sentences(N, low=3)
    (place / "data.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    (place / "asked.jsonl").write_text("\n".join(map(json.dumps, ASKED)))
    return place


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_loss_of_a_question_is_that_of_its_answer(model: Path) -> None:
    loaded = load_model(model)
    task = language_task(loaded, model / "asked.jsonl")
    batch = task.fetch(torch.arange(2))
    counted = (batch["labels"] != -100).sum(1).tolist()
    assert counted == [2, 2]
    ids = loaded.tokenizer("the film was good", return_tensors="pt")["input_ids"]
    logits = loaded.model(ids).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[1:-1], ids[0, 2:], reduction="sum")
    ours = task.likelihood.nll(*task.run(batch, task.parameters()))[0]
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)


def test_two_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "index"
    options = ("--prior-precision", 1.0, "--rank", 10**6)
    code, out, err = run(capsys, "index", model, model / "data.jsonl", "--out", place, *options)
    assert code == 0, err
    assert f"sequences  {N}" in out
    found = tmp_path / "found"
    code, out, err = run(capsys, "query", place, model / "asked.jsonl", "--top", 3, "--out", found)
    assert code == 0, err
    table = pd.read_parquet(found / "sources.parquet")
    loaded = load_model(model)
    task = language_task(loaded, model / "data.jsonl")
    test = language_task(loaded, model / "asked.jsonl")
    how = {"structure": "diag", "curvature": "empirical_fisher", "prior_precision": 1.0}
    exact = blr.top_influence(
        task, blr.fit_laplace(task, **how, progress=False), test, k=3, progress=False
    )
    assert table["example"].tolist() == exact.helpful.flatten().tolist()
    assert table["influence"].tolist() == pytest.approx(
        exact.helpful_values.flatten().tolist(), rel=0.01
    )
    first = int(exact.helpful[0, 0])
    assert task.metadata["text"][first] in out


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "the", "answer": ""}], "row 1 .* empty prompt or answer"),
        ([{"prompt": " ".join(["the"] * 20), "answer": " book"}], "leaves nothing to predict"),
        ([{"text": "the"}], "leaves nothing to predict"),
        ([{"other": "the"}], "no column of a usual name"),
    ],
)
def test_bad_rows(model: Path, tmp_path: Path, rows: list[dict[str, str]], words: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=words):
        language_task(load_model(model), file)


def test_one_line_for_each_failure(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "index", model, model / "data.jsonl", "--out", tmp_path / "i")
    assert code == 2
    assert "--prior-precision" in err
    code, _, err = run(capsys, "query", tmp_path / "none", model / "asked.jsonl")
    assert code == 2
    assert err.count("\n") == 1
    assert "holds no index" in err
