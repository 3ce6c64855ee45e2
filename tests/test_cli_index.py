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
from blr_analysis.huggingface.data import read_rows
from blr_analysis.huggingface.models import load_language_model, load_model
from blr_analysis.huggingface.questions import language_task, read_tokens

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
    written(place, [{"text": t, "source": "ab"[i % 2]} for i, t in enumerate(texts)], "data.jsonl")
    written(place, ASKED, "asked.jsonl")
    return place


def tuned(model: Path, place: Path, *targets: str) -> Path:
    """A LoRA adapter of the model."""
    peft = pytest.importorskip("peft")
    how = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=2, target_modules=[*targets], **how)
    peft.get_peft_model(load_model(model).model, config).save_pretrained(str(place))
    changed(place / "adapter_config.json", base_model_name_or_path=str(model))
    return place


def changed(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return folder / name


# What is read


def chat(*contents: str) -> list[dict[str, str]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


TURNS = chat("the film", "good", "a book", "dull")
SAID = "[CLS] the film [SEP] good [SEP] [CLS] a book [SEP] dull [SEP]"
INSTRUCTION = {"instruction": "the film", "output": " was good"}


@pytest.mark.parametrize(
    ("row", "words", "kept"),
    [
        (ASKED[0], "the film was good", [2, 3]),
        (INSTRUCTION | {"input": "a book"}, "the film\n\na book was good", [4, 5]),
        (INSTRUCTION | {"input": ""}, "the film was good", [2, 3]),
        (INSTRUCTION | {"input": None}, "the film was good", [2, 3]),
        (INSTRUCTION | {"input": "a book", "text": "a dull book"}, "a dull book", [0, 1, 2]),
        ({"messages": TURNS}, SAID, [4, 5, 10, 11]),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, SAID, [10, 11]),
    ],
)
def test_of_prompts_and_conversations_the_answers_count(
    model: Path, tmp_path: Path, row: Any, words: str, kept: list[int]
) -> None:
    loaded = load_model(model)
    loaded.tokenizer.chat_template = TEMPLATE
    pd.DataFrame([row]).to_parquet(tmp_path / "rows.parquet")
    for file in (written(tmp_path, [row]), tmp_path / "rows.parquet"):
        (said,) = read_tokens(loaded, *read_rows(file), None, None)[2]
        assert said == words.replace("[CLS] ", "").replace(" [SEP]", "")
        task = language_task(loaded, file)
        batch = task.fetch(torch.arange(1))
        ids, labels = batch["input_ids"][0], batch["labels"][0]
        assert loaded.tokenizer.convert_ids_to_tokens(ids.tolist()) == words.split()
        assert (labels != -100).nonzero().flatten().tolist() == kept
        logits, told = loaded.model(ids[None]).logits[0], [k for k in kept if k > 0]
        loss = torch.nn.functional.cross_entropy(
            logits[[k - 1 for k in told]], ids[told], reduction="sum"
        )
        ours = task.likelihood.nll(*task.run(batch, task.parameters()))[0]
        assert ours.item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_header_may_end_within_a_token_but_turns_stand(model: Path, tmp_path: Path) -> None:
    """A token that begins in the header counts, as after a prompt; a turn that is written
    otherwise once others follow is refused."""
    loaded = load_model(model)
    file = written(tmp_path, [{"messages": chat("the film", "od", "a book", "od")}])
    go = "{{ 'go' if m.role == 'assistant' }}{{ m.content }}"
    glued = TEMPLATE.replace("{{ m.content }}", go) + "{{ 'go' if add_generation_prompt }}"
    loaded.tokenizer.chat_template = glued
    batch = language_task(loaded, file).fetch(torch.arange(1))
    words = loaded.tokenizer.convert_ids_to_tokens(batch["input_ids"][0].tolist())
    assert " ".join(words) == SAID.replace("dull", "good")
    assert (batch["labels"][0] != -100).nonzero().flatten().tolist() == [4, 5, 10, 11]
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
    truth, every = language_task(loaded, model / "data.jsonl"), torch.arange(N)
    assert truth.metadata["source"] == table["source"].tolist()
    for data in (whole, *(tmp_path / n for n in ("saved", "data.csv", "data.json"))):
        task = language_task(loaded, data)
        batch = task.fetch(every)
        assert all(torch.equal(batch[n], x) for n, x in truth.fetch(every).items())
        assert task.metadata == truth.metadata


LONG = " ".join(["the"] * 16)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "the", "answer": ""}], "line 1 .* has '' for its answer"),
        ([{"prompt": 4, "answer": " book"}], "line 1 .* has 4 for its prompt: write it as text"),
        ([{"text": "the book"}, {"source": "a"}], "line 2 .* has None for its text"),
        ([{"prompt": LONG, "answer": " book"}], "17 tokens"),
        ([{"text": "the"}], "leaves nothing to predict"),
        ([{"text": "the book"}, {"text": " "}], "line 2 .* has ' ' for its text"),
        ([{"text": f"{LONG} book"}], "max_length"),
        ([{"other": "the"}], "no column of a usual name"),
        ([{"messages": "the"}], "no list of messages"),
        ([{"messages": chat("the")}], "leaves nothing to predict"),
    ],
)
def test_bad_rows(model: Path, tmp_path: Path, rows: list[dict[str, Any]], words: str) -> None:
    loaded = load_model(model)
    loaded.tokenizer.chat_template = TEMPLATE
    with pytest.raises(DataError, match=words):
        language_task(loaded, written(tmp_path, rows))


def test_tokens_and_adapters_of_other_models(model: Path, tmp_path: Path) -> None:
    loaded, adapter = load_model(model), tuned(model, tmp_path / "lora", "q_proj", "v_proj")
    with pytest.raises(InputError, match="no chat template"):
        language_task(loaded, written(tmp_path, [{"messages": TURNS}]))
    loaded.model.resize_token_embeddings(6)
    with pytest.raises(DataError, match="tokenizer"):
        language_task(loaded, model / "data.jsonl")
    wide = tiny.save(tmp_path / "wide", tiny.build("llama", "causal_lm", hidden_size=16))
    other = tiny.save(tmp_path / "other", tiny.build("gpt2", "causal_lm"))
    for base in (wide, other, tmp_path / "x"):
        with pytest.raises(ModelError, match="--base"):
            load_language_model(adapter, base=base)
    for change in ({"peft_type": "NONE"}, {"r": 0}):
        place = shutil.copytree(adapter, tmp_path / next(iter(change)))
        changed(place / "adapter_config.json", **change)
        with pytest.raises(ModelError, match="does not fit"):
            load_language_model(place, base=model)


# The commands

TIED = [pytest.param(name, marks=pytest.mark.slow) for name in ("embed_tokens", "lm_head")]


@pytest.mark.parametrize("target", ["q_proj", *TIED])
def test_an_adapter_is_indexed_on_its_base(
    target: str, model: Path, tmp_path: Path, capsys: Any
) -> None:
    """That of a tied table has gradients of its own; what fisher would add it to is two layers."""
    place, argv = (
        tmp_path / "index",
        (tuned(model, tmp_path / "lora", target), model / "data.jsonl"),
    )
    code, _, err = run(capsys, "index", *argv, "--out", place)
    assert code == 0 and "prior precision" in err, err  # was found
    names = set(blr.Index.open(place).posterior.mean)
    assert names and all(f"{target}.lora_" in name for name in names)
    if target != "q_proj":
        assert "tied" in refused(capsys, "fisher", *argv, "--out", tmp_path / "precision")
        return
    asked = ("query", place, model / "asked.jsonl")
    code, out, err = run(capsys, *asked, "--top", 1, "--max-length", 3)
    assert code == 0 and "the film" in out and "1 of 2 texts" in err, err
    moved = shutil.copytree(model, tmp_path / "moved")
    assert run(capsys, *asked, "--base", moved)[0] == 0
    weights = load_file(moved / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    said = refused(capsys, *asked, "--base", moved)
    assert "is not the base that the index was built on" in said


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exact index of the model's texts."""
    place = tmp_path_factory.mktemp("index") / "index"
    argv = (model, model / "data.jsonl", "--prior-precision", 1.0, "--rank", 10**6, "--out", place)
    assert main(["index", *map(str, argv)]) == 0
    return place


@pytest.mark.slow
def test_a_query_names_the_model_that_the_index_was_made_with(
    model: Path, built: Path, tmp_path: Path, capsys: Any
) -> None:
    loaded, other = load_model(model), tmp_path / "other"
    loaded.tokenizer.save_pretrained(other)
    asked = ("query", built, model / "asked.jsonl", "--top", 1, "--model", other)
    loaded.model.bfloat16().save_pretrained(other)  # the same, rounded
    assert run(capsys, *asked)[0] == 0
    tiny.build("llama", "causal_lm", seed=1, tie_word_embeddings=True).save_pretrained(other)
    assert "weights" in refused(capsys, *asked)
    load_model(model).model.save_pretrained(other)
    loaded.tokenizer.add_tokens(["another"])  # which no text had
    loaded.tokenizer.save_pretrained(other)
    assert run(capsys, *asked)[0] == 0
    words = json.loads((other / "tokenizer.json").read_text())
    ids = words["model"]["vocab"]
    ids["good"], ids["dull"] = ids["dull"], ids["good"]
    changed(other / "tokenizer.json", **words)
    assert f"the tokenizer of '{other}' is not the index's" in refused(capsys, *asked)


@pytest.mark.slow
def test_an_index_and_its_questions(model: Path, built: Path, tmp_path: Path, capsys: Any) -> None:
    found = tmp_path / "found"
    task, test = (
        language_task(load_model(model), model / n) for n in ("data.jsonl", "asked.jsonl")
    )
    q = blr.fit_laplace(task, structure="kron", curvature="mc_fisher", prior_precision=1.0)
    asked = ("query", built, model / "asked.jsonl", "--top", 3, "--out", found, "--force")
    for more, name, normalize in (
        ((), "normalized_influence", True),
        (("--tokens", "--refine", 3, "--no-normalize"), "influence", False),
    ):
        code, out, err = run(capsys, *asked, *more)
        assert code == 0, err
        exact = blr.influence(task, q, test, k=3, normalize=normalize)
        table = pd.read_parquet(found / "sources.parquet")
        assert table["example"].tolist() == exact.helpful.flatten().tolist()
        values = exact.helpful_values.flatten().tolist()
        assert table[name].tolist() == pytest.approx(values, rel=1e-3)
    first = int(exact.helpful[0, 0])
    assert task.metadata["text"][first][:48] in out and "0  the film was good" in out
    shares = pd.read_parquet(found / "tokens.parquet")
    sums = shares.groupby(["question", "example"])["influence"].sum()
    for row in table.itertuples():
        assert float(sums[row.question, row.example]) == pytest.approx(row.influence, rel=1e-3)
    words = shares.query("question == 0 and example == @first")["token"].tolist()
    assert words == task.metadata["text"][first].split()[1:]
    steering = {**ASKED[0], "prompt": "the film\u202e\x1b[31m"}
    code, out, err = run(capsys, "query", built, written(tmp_path, [steering]), "--top", 999)
    assert code == 0 and "the film??[31m" in out and "\x1b" not in out, err


@pytest.mark.slow
def test_an_audit_and_a_what_if_of_texts(model: Path, tmp_path: Path, capsys: Any) -> None:
    out, argv = tmp_path / "audit", (model, model / "data.jsonl", "--max-length", 5)
    options = ("--prior-precision", 1.0, "--test", model / "asked.jsonl")
    code, printed, err = run(capsys, "audit", *argv, "-o", out, *options)
    task = language_task(load_model(model), model / "data.jsonl", max_length=5)
    longer = sum(len(text.split()) > 5 for text in task.metadata["text"])
    assert code == 0 and "perplexity" in printed and f"{longer} of {N} texts" in err, err
    table, order = (pd.read_parquet(out / f"{n}.parquet") for n in ("table", "suspicious"))
    q = blr.Posterior.load(out / "posterior.safetensors")
    loo = blr.leave_one_out(task, q)
    assert table["left_out_loss"].tolist() == pytest.approx(loo.losses.tolist(), rel=1e-4)
    assert table["text"].tolist() == task.metadata["text"]
    assert order["index"].tolist() == blr.suspicious(task, q).order.tolist()
    assert task.metadata["text"][0] in (out / "report.html").read_text()
    asked = ("--remove", "source == 'a'", "--solver", "posterior")
    code, printed, err = run(capsys, "what-if", *argv, "-p", out / "posterior.safetensors", *asked)
    truth = blr.what_if(task, q, remove=range(0, N, 2), solver="posterior")
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
    argv, passes = ("audit", model, model / "data.jsonl", "-o", place, "--dry-run"), []
    for more in ((), ("--by", "source", "--passes", 50), ("--test", model / "asked.jsonl")):
        code, out, err = run(capsys, *argv, *more)
        assert code == 0 and "besides" in out and not place.exists(), err
        passes.append(float(out.split("passes")[1].split()[0]))
    groups_and_test = [more - passes[0] for more in passes[1:]]
    assert groups_and_test == pytest.approx([3 * 3 * 50, len(ASKED) / N], abs=0.011)


@pytest.mark.slow
def test_a_place_for_an_index_is_looked_at_before_the_work(
    model: Path, built: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, fits, plain = tmp_path / "other", [], blr.fit_laplace
    monkeypatch.setattr(
        "blr_analysis.posterior.fit_laplace", lambda *a, **k: fits.append(1) or plain(*a, **k)
    )
    tiny.save(other, tiny.build("llama", "causal_lm", seed=1), pairs=False)
    (tmp_path / "file").touch()
    data, asked, rank = model / "data.jsonl", model / "asked.jsonl", ("--rank", 10**6)
    for where, argv, word in (
        (tmp_path / "file", (model, data), "there already"),
        (other, (model, data), "is not empty"),
        (built, (other, data, *rank), "an index with another model: name"),
        (built, (model, asked, *rank), "another number of examples, data:"),
        (built, (model, data, "--rank", 7), "another rank"),
    ):
        for how in ((), ("--dry-run",)):
            given = (*argv, "--prior-precision", 1.0, *how, "--out", where)
            assert word in refused(capsys, "index", *given)
    copied, new = shutil.copytree(built, tmp_path / "copied"), str(tmp_path / "new")
    with held(new), ThreadPoolExecutor(1) as pool:  # by a run that began before
        assert pool.submit(main, ["index", str(model), str(data), "--out", new]).result() == 2
    assert "another run is writing" in capsys.readouterr().err and not fits
    assert run(capsys, "index", model, data, "--rank", 7, "--force", "--out", copied)[0] == 0
    assert fits
