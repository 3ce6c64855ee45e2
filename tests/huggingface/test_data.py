"""Texts and labels from files: what is read, and how each fault is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import tiny_transformers as tiny
import torch

from blr_analysis.errors import BLRError, DataError, InputError, ModelError, StorageError
from blr_analysis.huggingface import checkpoint_precision
from blr_analysis.huggingface.data import class_indices, read_file, read_texts
from blr_analysis.huggingface.models import checkpoint_names, load_model
from blr_analysis.huggingface.tokens import encode

pytest.importorskip("transformers")

TEXTS = ["a film", 'it was "very good", we\tsaid', "", "Über 雪"]
LABELS = [1, 0, 2, 1]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.build("bert", id2label={0: "neg", 1: "mid", 2: "pos"})
    return tiny.save(tmp_path_factory.mktemp("bert"), model)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    return tiny.save(place, tiny.build("llama", "causal_lm"), pairs=False)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_jsonl(path: Path) -> None:
    rows = [{"other": 1, "text": t, "label": y} for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")


def as_csv(path: Path) -> None:
    rows = ['"' + t.replace('"', '""') + f'",{y}' for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["text,label", *rows]).encode())


def as_tsv(path: Path) -> None:
    rows = [f"{y}\t{t.replace(chr(9), ' ')}" for t, y in zip(TEXTS, LABELS, strict=True)]
    path.write_text("\n".join(["label\ttext", *rows]) + "\n")


def as_parquet(path: Path) -> None:
    table = pd.DataFrame({"label": LABELS, "text": TEXTS, "more": TEXTS})
    table.set_axis([f"row {text}" for text in TEXTS]).to_parquet(path)


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_tsv, as_parquet])
def test_every_format_says_the_same(write: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / f"d.{write.__name__.removeprefix('as_')}"
    write(path)
    found = read_texts(path, labelled=True)
    spaces = "\t" if write is not as_tsv else " "
    assert [t for (t,) in found.texts] == [t.replace("\t", spaces) for t in TEXTS]
    assert class_indices(found, {}, 3) == LABELS
    assert found.columns == ("text", "label")
    unlabelled = read_texts(path)
    assert unlabelled.labels is None
    assert unlabelled.texts == found.texts


def test_plain_text_is_a_text_per_line(tmp_path: Path) -> None:
    found = read_texts(written(tmp_path / "d.txt", "one\n\n  \n two \n"))
    assert found.texts == [("one",), (" two ",)]
    assert found.places[1].startswith("line 4 of")


def test_a_quoted_line_break_is_text(tmp_path: Path) -> None:
    found = read_texts(written(tmp_path / "d.csv", 'text,label\n"a\nb",0\nc,1\n'), labelled=True)
    assert found.texts == [("a\nb",), ("c",)]
    assert found.places[1].startswith("row 2 of")


def test_pairs_by_their_usual_names_and_by_hand(tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", "premise,hypothesis,idx,gold\na,b,1,x\n")
    assert read_texts(path).texts == [("a", "b")]
    by_hand = read_texts(path, text=["hypothesis", "idx"], label="gold", labelled=True)
    assert by_hand.texts == [("b", "1")]
    assert by_hand.labels == ["x"]
    nli = written(tmp_path / "q.csv", "question,sentence,label\na,b,1\n")
    assert read_texts(nli).texts == [("a", "b")]  # not the sentence alone


def test_labels_by_name_and_number(tmp_path: Path) -> None:
    names = {"neg": 0, "mid": 1, "pos": 2, "2": 0}
    rows = [{"text": "a", "label": y} for y in ("pos", 1, "1", 2.0, " 0 ", "2")]
    path = written(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    # a name of the model's comes before a number
    assert class_indices(read_texts(path, labelled=True), names, 3) == [2, 1, 1, 2, 0, 0]


@pytest.mark.parametrize(
    "label",
    [
        3,
        -1,
        1.5,
        True,
        None,
        "Pos",
        "",
        "¹",
        float("nan"),
        [1],
    ],
)
def test_labels_out_of_range_are_named(label: object, tmp_path: Path) -> None:
    rows = [{"text": "a", "label": 0}, {"text": "b", "label": label}]
    path = written(tmp_path / "d.jsonl", "\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"line 2 of .*label .*0 … 2 .*'pos'"):
        class_indices(read_texts(path, labelled=True), {"pos": 2}, 3)


BROKEN: list[tuple[str, str | bytes, type[BLRError], str]] = [
    ("d.xlsx", "", DataError, r"none of \.jsonl"),
    ("d.json", "[]", DataError, "no examples"),
    ("d.jsonl", "", DataError, "no examples"),
    ("d.txt", "\n \n", DataError, "no examples"),
    ("d.csv", "tekst,label\na,1\n", DataError, r"'tekst', 'label'.*--text"),
    ("d.csv", "text,sentence,label\na,b,1\n", DataError, "several columns"),
    ("d.csv", "text,y\na,1\n", DataError, r"label.*--label"),
    ("d.csv", "text,label,target\na,1,1\n", DataError, "several columns that could be the label"),
    ("d.csv", "text,text,label\na,b,1\n", DataError, "'text' twice"),
    ("d.csv", "text,label\na,b,1\n", DataError, "2 fields in line 2, saw 3"),
    ("d.csv", "text,label\na,1\nb\n", DataError, "row 2 .* fewer fields"),
    ("d.csv", 'text,label\n"a,1\n', DataError, "no .csv"),
    (
        "d.csv",
        "text,label\nna\u00efve,1\n".encode("latin-1"),
        DataError,
        "line 2 .* not in UTF-8.*iconv",
    ),
    ("d.jsonl", b'\n{"text": "\xe9"}', DataError, "line 2 .* not in UTF-8"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"text": ', DataError, "^line 3 .* no JSON: .* 10"),
    ("d.jsonl", '\n{"text": "a"}\n["a"]', DataError, "line 3 .* no object"),
    ("d.jsonl", '{"text": "a", "label": 1}\n\n{"label": 1}', DataError, "line 3 .* has no text"),
    ("d.jsonl", '{"text": 5, "label": 1}', DataError, "line 1 .* has 5 for its text"),
    ("d.json", '[{"text": "a"},\n{"text": ]', DataError, "line 2 column 10"),
    ("d.parquet", "PAR1 no", DataError, "no .parquet"),
]


@pytest.mark.parametrize(("name", "content", "error", "words"), BROKEN)
def test_broken_files_are_named(
    name: str, content: str | bytes, error: type[BLRError], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(error, match=words) as caught:
        read_texts(path, labelled=not name.endswith(".txt"))
    assert name in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone\.csv"):
        read_texts(tmp_path / "gone.csv")
    with pytest.raises(DataError, match="plain text without labels"):
        read_texts(written(tmp_path / "d.txt", "a\n"), labelled=True)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(StorageError, match="directory"):
        read_texts(tmp_path / "folder.csv")


@pytest.mark.parametrize("columns", [["text", "nothing"], ["a", "b", "c"], []])
def test_columns_that_cannot_be(columns: list[str], tmp_path: Path) -> None:
    path = written(tmp_path / "d.csv", "text,label\na,1\n")
    with pytest.raises(DataError, match="column"):
        read_texts(path, text=columns)


# --- token ids --------------------------------------------------------------------------------


def test_rows_are_sorted_padded_and_masked(bert: Path, tmp_path: Path) -> None:
    loaded = load_model(bert)
    texts = tiny.sentences(12, low=1, high=20)
    path = written(tmp_path / "d.txt", "\n".join(texts))
    labels = list(range(12))
    encoded = encode(read_texts(path), loaded, labels, max_length=10)
    tokenizer = tiny.tokenizer()
    assert encoded.lengths == sorted(encoded.lengths)
    assert encoded.cut == sum(len(t.split()) + 2 > 10 for t in texts) > 0
    for row in encoded:
        label = row["labels"]
        assert row["input_ids"] == tokenizer(texts[label], truncation=True, max_length=10).input_ids
    batch = encoded.collate([encoded[i] for i in range(12)])
    for ids, mask, i in zip(batch["input_ids"], batch["attention_mask"], range(12), strict=True):
        count = encoded.lengths[i]
        assert ids[:count].tolist() == encoded[i]["input_ids"]
        assert ids[count:].eq(0).all()
        assert mask.tolist() == [1] * count + [0] * (len(ids) - count)
    assert batch["labels"].tolist() == [row["labels"] for row in encoded]


def test_the_labels_of_a_language_model_are_its_ids(llama: Path, tmp_path: Path) -> None:
    loaded = load_model(llama)
    encoded = encode(read_texts(written(tmp_path / "d.txt", "a film was\nit was")), loaded)
    batch = encoded.collate([encoded[0], encoded[1]])
    assert "token_type_ids" not in batch  # which Llama does not take
    assert torch.equal(batch["labels"][1], batch["input_ids"][1])
    assert batch["labels"][0, 2] == -100
    assert batch["labels"][0, :2].tolist() == batch["input_ids"][0, :2].tolist()


def test_texts_that_a_language_model_cannot_score(llama: Path, tmp_path: Path) -> None:
    loaded = load_model(llama)
    with pytest.raises(DataError, match=r"line 2 .* 1 token"):
        encode(read_texts(written(tmp_path / "d.txt", "a film\na\n")), loaded)
    pairs = read_texts(written(tmp_path / "d.csv", "text1,text2\na,b\n"))
    with pytest.raises(DataError, match="reads one text"):
        encode(pairs, loaded)


def test_pairs_are_one_row(bert: Path, tmp_path: Path) -> None:
    pairs = read_texts(written(tmp_path / "d.csv", "text1,text2\na film,it\n"))
    (item,) = encode(pairs, load_model(bert))
    assert item["input_ids"] == tiny.tokenizer()("a film", "it").input_ids
    assert 1 in item["token_type_ids"]


# --- the model's folder -----------------------------------------------------------------------


def test_a_model_is_loaded_in_float32_and_eval_mode(tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert").bfloat16().train())
    loaded = load_model(place)
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not any(m.training for m in loaded.model.modules())
    assert (loaded.task, loaded.likelihood, loaded.longest) == (
        "classification",
        "categorical",
        16,
    )
    assert checkpoint_names(loaded) == {n: n for n, _ in loaded.model.named_parameters()}


def _config(place: Path, **more: object) -> None:
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _truncated(place: Path) -> None:
    content = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(content[:-10])


def _no_head(place: Path) -> None:
    tiny.build("bert").bert.save_pretrained(place)
    _config(place, architectures=["BertForSequenceClassification"])


def _moved(old: str, new: str) -> Callable[[Path], object]:
    return lambda place: (place / old).rename(place / new)


FOLDERS: dict[str, tuple[Callable[[Path], object], type[BLRError], str]] = {
    "no config": (lambda p: (p / "config.json").unlink(), StorageError, r"no config\.json"),
    "an adapter": (_moved("config.json", "adapter_config.json"), ModelError, "PEFT adapter"),
    "another head": (lambda p: _config(p, architectures=["BertForMaskedLM"]), ModelError, "task="),
    "no architecture": (lambda p: _config(p, architectures=None), ModelError, "no architecture"),
    "quantised": (lambda p: _config(p, quantization_config={"bits": 4}), ModelError, "quantised"),
    "broken": (lambda p: (p / "config.json").write_text("{"), StorageError, r"config\.json"),
    "pickled": (_moved("model.safetensors", "pytorch_model.bin"), StorageError, "pickle"),
    "truncated": (_truncated, StorageError, "safetensors"),
    "no tokenizer": (
        lambda p: [path.unlink() for path in p.glob("tokenizer*")],
        ModelError,
        "tokenizer",
    ),
    "no head": (_no_head, ModelError, r"'classifier\.bias', 'classifier\.weight'.*random"),
    "regression": (
        lambda p: tiny.build("bert", num_labels=1).save_pretrained(p),
        ModelError,
        "regression",
    ),
    "unknown family": (lambda p: _config(p, model_type="unknown"), ModelError, "cannot load"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_no_model_says_why(case: str, tmp_path: Path) -> None:
    place = tiny.save(tmp_path, tiny.build("bert"))
    change, error, words = FOLDERS[case]
    change(place)
    with pytest.raises(error, match=words):
        load_model(place)


def test_other_faults_of_loading(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(InputError, match="'summary'"):
        load_model(bert, task="summary")
    with pytest.raises(ModelError, match="random"):
        load_model(bert, task="causal_lm")
    with pytest.raises(BLRError, match="'abacus'"):
        load_model(bert, device="abacus")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    for read in (load_model, partial(checkpoint_precision, n_data=1)):
        with pytest.raises(InputError, match=r"pip install '\.\[hf\]'"):
            read(bert)


@pytest.mark.filterwarnings("error")
def test_dates_stand_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "dated.jsonl"
    file.write_text('{"text": "a", "date": "2020-01-01", "timestamp": 1600000000}\n')
    assert read_file(file).iloc[0].tolist() == ["a", "2020-01-01", 1600000000]
