"""``blr-analysis index``, ``query``, ``what-if`` and ``audit`` of language models: what they print
is what the library gives, and what they read is what trainers make of it."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny_transformers as tiny
import torch
from commands import refused, run
from safetensors.torch import load_file, save_file

import blr_analysis as blr
from blr_analysis.backprop import engine
from blr_analysis.cli import main
from blr_analysis.errors import DataError, InputError, ModelError
from blr_analysis.files import held
from blr_analysis.huggingface.models import load_language_model, load_model
from blr_analysis.huggingface.questions import language_task

pytest.importorskip("transformers")

N = 9
ASKED = [{"prompt": "the film", "answer": " was good"}, {"prompt": "a", "answer": " dull book"}]
TEMPLATE = (
    "{% for m in messages %}{{ '[CLS] ' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ ' [SEP] ' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny.save(place, tiny.build("llama", "causal_lm", tie_word_embeddings=True), pairs=False)
    texts = tiny.sentences(N, low=3)
    rows = [{"text": t, "source": "ab"[i % 2]} for i, t in enumerate(texts)]
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (place / "asked.jsonl").write_text("\n".join(map(json.dumps, ASKED)))
    return place


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    peft = pytest.importorskip("peft")
    place = tmp_path_factory.mktemp("adapter")
    base = load_model(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(base.model, config)
    for p in (p for p in tuned.parameters() if p.requires_grad):
        p.data.normal_(generator=torch.Generator().manual_seed(p.numel()))
    tuned.save_pretrained(str(place))
    settings = json.loads((place / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(model)
    (place / "adapter_config.json").write_text(json.dumps(settings))
    return place


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


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


@pytest.mark.parametrize(
    ("row", "words", "counted"),
    [
        ({"input": "a book"}, "the film\n\na book was good", 2),
        ({"input": ""}, "the film was good", 2),
        ({"input": None}, "the film was good", 2),
        ({"input": "a book", "text": "a dull book"}, "a dull book", 3),
    ],
)
def test_an_instruction_is_followed_by_its_input(
    model: Path,
    tmp_path: Path,
    row: dict[str, Any],
    words: str,
    counted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load_model(model)
    kind, read = type(loaded.tokenizer), []
    plain = kind.__call__
    monkeypatch.setattr(
        kind, "__call__", lambda own, text, **how: read.append(text) or plain(own, text, **how)
    )
    file = written(tmp_path, [{"instruction": "the film", "output": " was good", **row}])
    task = language_task(loaded, file)
    batch = task.fetch(torch.arange(1))
    assert read[0] == words
    assert batch["input_ids"].shape[1] == len(words.split())
    assert int((batch["labels"] != -100).sum()) == counted


def test_messages_count_in_every_answer(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    loaded.tokenizer.chat_template = TEMPLATE
    turns = [("user", "the film"), ("assistant", "good"), ("user", "a book"), ("assistant", "dull")]
    messages = [{"role": role, "content": words} for role, words in turns]
    rows = [{"messages": messages}]
    tables = {"jsonl": written(tmp_path, rows)}
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    tables["parquet"] = tmp_path / "rows.parquet"
    split = [{"prompt": messages[:3], "completion": messages[3:]}]
    (tmp_path / "split.json").write_text(json.dumps(split))
    for kind, file in {**tables, "split": tmp_path / "split.json"}.items():
        batch = language_task(loaded, file).fetch(torch.arange(1))
        words = loaded.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
        assert " ".join(words) == "[CLS] the film [SEP] good [SEP] [CLS] a book [SEP] dull [SEP]"
        (kept,) = (batch["labels"][0] != -100).nonzero(as_tuple=True)
        assert kept.tolist() == ([10, 11] if kind == "split" else [4, 5, 10, 11])


def test_a_header_may_end_within_a_token_but_turns_stand(model: Path, tmp_path: Path) -> None:
    """A token that begins in the header counts, as after a prompt; a turn that is written
    otherwise once others follow is refused."""
    loaded = load_model(model)
    turns = [("user", "the film"), ("assistant", "od"), ("user", "a book"), ("assistant", "od")]
    rows = [{"messages": [{"role": role, "content": words} for role, words in turns]}]
    file = written(tmp_path, rows)
    glued = TEMPLATE.replace(
        "{{ m.content }}", "{{ 'go' if m.role == 'assistant' }}{{ m.content }}"
    )
    loaded.tokenizer.chat_template = glued + "{{ 'go' if add_generation_prompt }}"
    batch = language_task(loaded, file).fetch(torch.arange(1))
    words = loaded.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    assert " ".join(words) == "[CLS] the film [SEP] good [SEP] [CLS] a book [SEP] good [SEP]"
    (kept,) = (batch["labels"][0] != -100).nonzero(as_tuple=True)
    assert kept.tolist() == [4, 5, 10, 11]
    loaded.tokenizer.chat_template = "{{ 'dull ' if messages | length > 2 }}" + TEMPLATE
    with pytest.raises(DataError, match="rewrites"):
        language_task(loaded, file)


def test_datasets_are_read_as_their_files_are(model: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = load_model(model)
    table = pd.read_json(model / "data.jsonl", lines=True)
    whole = datasets.Dataset.from_pandas(table)
    whole.save_to_disk(str(tmp_path / "saved"))
    table.to_csv(tmp_path / "data.csv", index=False)
    table.to_json(tmp_path / "data.json", orient="records")
    truth = language_task(loaded, model / "data.jsonl")
    every = torch.arange(N)
    for data in (whole, *(tmp_path / n for n in ("saved", "data.csv", "data.json"))):
        task = language_task(loaded, data)
        batch = task.fetch(every)
        assert all(torch.equal(batch[n], x) for n, x in truth.fetch(every).items())
        assert task.metadata == truth.metadata
        assert task.metadata["source"] == table["source"].tolist()


def test_an_adapter_is_indexed_on_its_base(
    adapter: Path, model: Path, tmp_path: Path, capsys: Any
) -> None:
    place = tmp_path / "index"
    code, _, err = run(capsys, "index", adapter, model / "data.jsonl", "--out", place)
    assert code == 0, err
    assert "prior precision" in err  # was found
    names = set(blr.Index.open(place).posterior.mean)
    assert names and all("lora_" in name for name in names)
    code, out, err = run(capsys, "query", place, model / "asked.jsonl", "--top", 1)
    assert code == 0, err
    assert out.count("\n\n") <= len(ASKED) and "the film" in out
    code, _, err = run(capsys, "query", place, model / "asked.jsonl", "--max-length", 3)
    assert code == 0 and "1 of 2 texts" in err
    moved = shutil.copytree(model, tmp_path / "moved")
    code, _, err = run(capsys, "query", place, model / "asked.jsonl", "--base", moved)
    assert code == 0, err
    weights = load_file(moved / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    code, _, err = run(capsys, "query", place, model / "asked.jsonl", "--base", moved)
    assert code == 2 and "is not the base that the index was built on" in err


@pytest.mark.slow
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_of_a_tied_table(target: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    """Has gradients of its own; what ``fisher`` would add it to is two layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
    peft.get_peft_model(load_model(model).model, config).save_pretrained(tmp_path / "lora")
    argv = (tmp_path / "lora", model / "data.jsonl", "--base", model, "--out", tmp_path / "out")
    code, _, err = run(capsys, "index", *argv, "--prior-precision", 1.0)
    assert code == 0, err
    names = set(blr.Index.open(tmp_path / "out").posterior.mean)
    assert names and all(f"{target}.lora_" in name for name in names)
    code, _, err = run(capsys, "fisher", *argv[:-1], tmp_path / "precision")
    assert code == 2 and "tied" in err, err


@pytest.mark.slow
def test_a_query_names_the_model_that_the_index_was_made_with(
    model: Path, tmp_path: Path, capsys: Any
) -> None:
    place, other = tmp_path / "index", tmp_path / "other"
    assert run(capsys, "index", model, model / "data.jsonl", "--out", place)[0] == 0
    loaded = load_model(model)
    loaded.tokenizer.save_pretrained(other)
    asked = ("query", place, model / "asked.jsonl", "--top", 1, "--model", other)
    loaded.model.bfloat16().save_pretrained(other)  # the same, rounded
    assert run(capsys, *asked)[0] == 0
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.mul_(1.05)
    loaded.model.save_pretrained(other)
    code, _, err = run(capsys, *asked)
    assert code != 0 and "weights" in err
    load_model(model).model.save_pretrained(other)
    loaded.tokenizer.add_tokens(["another"])  # which no text had
    loaded.tokenizer.save_pretrained(other)
    assert run(capsys, *asked)[0] == 0
    words = json.loads((other / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["good"], ids["dull"] = ids["dull"], ids["good"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    code, _, err = run(capsys, *asked)
    assert code == 2 and f"the tokenizer of '{other}' is not the index's" in err


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "the", "answer": ""}], "line 1 .* has '' for its answer"),
        ([{"prompt": 4, "answer": " book"}], "line 1 .* has 4 for its prompt: write it as text"),
        ([{"prompt": 4, "answer": 5}], "has 4"),
        ([{"text": 12345}], "12345 for its text: write it as text"),
        ([{"text": "the book"}, {"source": "a"}], "line 2 .* has None for its text"),
        ([{"messages": 4}], "no list of messages"),
        ([{"prompt": " ".join(["the"] * 16), "answer": " book"}], "17 tokens"),
        ([{"text": "the"}], "leaves nothing to predict"),
        ([{"text": "the book"}, {"text": " "}], "line 2 .* has ' ' for its text"),
        ([{"text": " ".join(["the"] * 40)}], "max_length"),
        ([{"other": "the"}], "no column of a usual name"),
        ([{"messages": "the"}], "no list of messages"),
        ([{"messages": [{"role": "user", "content": "the"}]}], "leaves nothing to predict"),
    ],
)
def test_bad_rows(model: Path, tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    loaded = load_model(model)
    loaded.tokenizer.chat_template = TEMPLATE
    with pytest.raises(DataError, match=words):
        language_task(loaded, written(tmp_path, rows))


def test_tokens_and_adapters_of_other_models(model: Path, adapter: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    rows = written(tmp_path, [{"messages": [{"role": "assistant", "content": "the"}]}])
    with pytest.raises(InputError, match="no chat template"):
        language_task(loaded, rows)
    loaded.model.resize_token_embeddings(6)
    rows = written(tmp_path, [{"text": "the bright book"}])
    with pytest.raises(DataError, match="tokenizer"):
        language_task(loaded, rows)
    wide = tiny.save(tmp_path / "wide", tiny.build("llama", "causal_lm", hidden_size=16))
    other = tiny.save(tmp_path / "other", tiny.build("gpt2", "causal_lm"))
    for base in (wide, other, tmp_path / "x"):
        with pytest.raises(ModelError, match="--base"):
            load_language_model(adapter, base=base)
    for name, change in {"NONE": {"peft_type": "NONE"}, "rank": {"r": 0}}.items():
        place = shutil.copytree(adapter, tmp_path / name) / "adapter_config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | change))
        with pytest.raises(ModelError, match="does not fit"):
            load_language_model(tmp_path / name, base=model)


# The commands


@pytest.mark.slow
def test_an_index_and_its_questions(model: Path, tmp_path: Path, capsys: Any) -> None:
    place, found = tmp_path / "index", tmp_path / "found"
    options = ("--prior-precision", 1.0, "--rank", 10**6)
    code, out, err = run(capsys, "index", model, model / "data.jsonl", "--out", place, *options)
    assert code == 0 and f"sequences  {N}" in out and "rough" not in err, err
    asked = ("query", place, model / "asked.jsonl", "--top", 3)
    more = ("--out", found, "--tokens", "--refine", 3, "--no-normalize")
    code, out, err = run(capsys, *asked, *more)
    assert code == 0, err
    table = pd.read_parquet(found / "sources.parquet")
    loaded = load_model(model)
    task = language_task(loaded, model / "data.jsonl")
    test = language_task(loaded, model / "asked.jsonl")
    how = {"structure": "kron", "curvature": "mc_fisher", "prior_precision": 1.0}
    q = blr.fit_laplace(task, **how)
    exact = blr.influence(task, q, test, k=3)
    assert table["example"].tolist() == exact.helpful.flatten().tolist()
    values = exact.helpful_values.flatten().tolist()
    assert table["influence"].tolist() == pytest.approx(values, rel=1e-4)
    first = int(exact.helpful[0, 0])
    assert task.metadata["text"][first][:48] in out and "0  the film was good" in out
    code, _, err = run(capsys, *asked, "--out", tmp_path / "by length")
    by_length = pd.read_parquet(tmp_path / "by length" / "sources.parquet")
    exact = blr.influence(task, q, test, k=3, normalize=True)
    values = exact.helpful_values.flatten().tolist()
    assert by_length["normalized_influence"].tolist() == pytest.approx(values, rel=1e-3)
    steering = {**ASKED[0], "prompt": "the film\u202e\x1b[31m"}
    code, out, err = run(capsys, "query", place, written(tmp_path, [steering]), "--top", 999)
    assert code == 0 and f"all {N} examples" in err, err
    assert "the film??[31m" in out and "\x1b" not in out
    shares = pd.read_parquet(found / "tokens.parquet")
    sums = shares.groupby(["question", "example"])["influence"].sum()
    for row in table.itertuples():
        assert float(sums[row.question, row.example]) == pytest.approx(row.influence, rel=1e-3)
    words = shares.query("question == 0 and example == @first")["token"].tolist()
    assert words == task.metadata["text"][first].split()[1:]


@pytest.mark.slow
def test_an_audit_and_a_what_if_of_texts(model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "audit"
    options = ("--prior-precision", 1.0, "--test", model / "asked.jsonl", "--max-length", 5)
    code, printed, err = run(capsys, "audit", model, model / "data.jsonl", "-o", out, *options)
    assert code == 0 and "perplexity" in printed, err
    task = language_task(load_model(model), model / "data.jsonl", max_length=5)
    longer = sum(len(text.split()) > 5 for text in task.metadata["text"])
    assert f"{longer} of {N} texts" in err and longer > 0
    table = pd.read_parquet(out / "table.parquet")
    q = blr.Posterior.load(out / "posterior.safetensors")
    loo = blr.leave_one_out(task, q)
    assert table["left_out_loss"].tolist() == pytest.approx(loo.losses.tolist(), rel=1e-4)
    assert table["text"].tolist() == task.metadata["text"]
    order = pd.read_parquet(out / "suspicious.parquet")["index"].tolist()
    assert order == blr.suspicious(task, q).order.tolist()
    page = (out / "report.html").read_text()
    assert task.metadata["text"][0] in page and (out / "memory_map.png").is_file()
    argv = (model, model / "data.jsonl", "-p", out / "posterior.safetensors", "--max-length", 5)
    asked = ("--remove", "source == 'a'", "--solver", "posterior")
    code, printed, err = run(capsys, "what-if", *argv, *asked)
    gone = [i for i, source in enumerate(task.metadata["source"]) if source == "a"]
    truth = blr.what_if(task, q, remove=gone, solver="posterior")
    assert code == 0 and f"{truth.nll:.3f}" in printed, err


@pytest.mark.slow
def test_a_dry_run_counts_what_the_run_then_does(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    true = engine.record
    monkeypatch.setattr(engine, "record", lambda *a, **k: ran.append(k["size"]) or true(*a, **k))
    place, argv = tmp_path / "index", ("index", model, model / "data.jsonl", "--rank", 64)
    for options, found in ((("--fit", "diag", "--prior-precision", 1.0), 0), ((), 1)):
        # a pass without records: the loss of the model
        code, out, err = run(capsys, *argv, *options, "--out", place, "--dry-run")
        assert code == 0 and not place.exists(), err
        said = float(out.split("passes")[1].split()[0])
        ran.clear()
        assert run(capsys, *argv, *options, "--out", place)[0] == 0
        assert sum(ran) / N == pytest.approx(said - found, rel=0.05)
        shutil.rmtree(place)
    argv = ("audit", model, model / "data.jsonl", "-o", tmp_path / "audit", "--dry-run")
    said = []
    for more in ((), ("--by", "source", "--passes", 50), ("--test", model / "asked.jsonl")):
        code, out, err = run(capsys, *argv, *more)
        assert code == 0 and [line.split()[0] for line in out.splitlines()][2:] == [
            "disk",
            "besides",
        ]
        said.append(float(out.split("passes")[1].split()[0]))
    groups_and_test = [passes - said[0] for passes in said[1:]]
    assert groups_and_test == pytest.approx([3 * 3 * 50, len(ASKED) / N], abs=0.011)
    assert not list(tmp_path.glob("audit"))


@pytest.mark.slow
def test_a_place_for_an_index_is_looked_at_before_the_work(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, fits = tmp_path / "index", []
    argv = ("index", model, model / "data.jsonl", "--prior-precision", 1.0, "--out")
    assert run(capsys, *argv, place)[0] == 0
    plain = blr.fit_laplace
    monkeypatch.setattr(
        "blr_analysis.posterior.fit_laplace", lambda *a, **k: fits.append(1) or plain(*a, **k)
    )
    other = tmp_path / "other"
    loaded = load_model(model)
    loaded.tokenizer.save_pretrained(other)
    with torch.no_grad():
        next(loaded.model.parameters()).mul_(1.05)
    loaded.model.save_pretrained(other)
    (tmp_path / "file").touch()
    for where, way, word in (
        (tmp_path / "file", argv, "is no folder"),
        (other, argv, "is not empty"),
        (place, (argv[0], other, *argv[2:]), "an index with another model: name"),
        (place, (*argv[:2], model / "asked.jsonl", *argv[3:]), "another number of examples, data:"),
        (place, (*argv[:-1], "--rank", 7, "--out"), "another rank"),
    ):
        for how in ((), ("--dry-run",)):
            assert word in refused(capsys, *way, where, *how)
    with held(tmp_path / "new"):  # by a run that began before
        argv_held = [*map(str, argv), str(tmp_path / "new")]
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(main, argv_held).result() == 2
    assert "another run is writing" in capsys.readouterr().err and not fits
    assert run(capsys, *argv[:-1], "--rank", 7, "--force", "--out", place)[0] == 0 and fits
