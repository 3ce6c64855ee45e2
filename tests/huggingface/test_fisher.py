"""Precisions of folders: every kind against gradients taken one example at a time by autograd."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import torch.nn.functional as F
from oracles import relative
from torch import Tensor

import blr_analysis as blr
from blr_analysis.errors import BLRError, DataError, InputError, PosteriorError, StorageError
from blr_analysis.files import Folder, fingerprint, storage
from blr_analysis.huggingface.fisher import FisherResult, fisher, fisher_cost
from blr_analysis.huggingface.models import load_tuned
from blr_analysis.merging.precisions import open_precision
from blr_analysis.posterior import read_precision_record

transformers = pytest.importorskip("transformers")

N = 9
Models = dict[str, Path]  # by name
TEXTS = tiny.sentences(N)
MODELS = {
    "bert": ("bert", "classification", {}),
    "gpt2 classifier": ("gpt2", "classification", {}),
    "llama classifier": ("llama", "classification", {}),
    "gpt2, tied": ("gpt2", "causal_lm", {}),
    "llama": ("llama", "causal_lm", {}),
    "llama, tied": ("llama", "causal_lm", {"tie_word_embeddings": True}),
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with their data beside them."""
    rows = [{"text": t, "label": i % 3} for i, t in enumerate(TEXTS)]
    places = {}
    for name, (kind, task, settings) in MODELS.items():
        place = tiny.save(tmp_path_factory.mktemp("model"), tiny.build(kind, task, **settings))
        places[name] = write_rows(place / "data.jsonl", rows).parent
    return places


def on(model: Path, out: Path, data: str | Path = "data.jsonl", **options: Any) -> FisherResult:
    return fisher(model, model / data, out=out, **options)


def reload(folder: Path) -> tuple[Any, Any]:
    """The model, in float64, and the tokenizer by transformers' own means."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder).double().eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def logits_of(model: Any, tokenizer: Any, text: str) -> tuple[Tensor, Tensor]:
    """One text by itself, unpadded: logits, and its ids."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return model(input_ids=ids).logits[0], ids[0]


def gradient(model: Any, loss: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    gradients = torch.autograd.grad(
        loss, list(named.values()), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return dict(zip(named, gradients, strict=True))


def summed(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([g[n] for g in gradients]).square().sum(0) for n in gradients[0]}


def empirical(folder: Path) -> dict[str, Tensor]:
    """Σ g², text by text, with the cross-entropy of torch."""
    model, tokenizer = reload(folder)
    gradients = []
    for i, text in enumerate(TEXTS):
        logits, ids = logits_of(model, tokenizer, text)
        if logits.ndim == 1:
            loss = F.cross_entropy(logits, torch.tensor(i % 3))
        else:
            loss = F.cross_entropy(logits[:-1], ids[1:], reduction="sum")
        gradients.append(gradient(model, loss))
    return summed(gradients)


def weighed(model: Any, logits: Tensor) -> list[dict[str, Tensor]]:
    """√p_c g_c of every class at every position: their squares add up to the Fisher."""
    rows = []
    for loss in -logits.log_softmax(-1).reshape(-1):
        root_of_probability = (-loss / 2).exp().detach()
        rows.append({n: x * root_of_probability for n, x in gradient(model, loss).items()})
    return rows


def gap(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest difference, in units of the largest entry of its tensor."""
    assert set(ours) == set(truth)
    floor = max(float(t.abs().max()) for t in truth.values()) * 1e-6
    return max(
        float((ours[n].double() - t).abs().max()) / max(floor, float(t.abs().max()))
        for n, t in truth.items()
    )


def apart(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    our_numbers = torch.cat([ours[n].double().flatten() for n in truth])
    true_numbers = torch.cat([t.double().flatten() for t in truth.values()])
    return relative(our_numbers, true_numbers)


def stored(folder: Path) -> dict[str, Tensor]:
    return storage.read(folder)[0]


@pytest.mark.parametrize("name", MODELS)
def test_the_empirical_fisher_is_the_sum_of_squared_gradients(
    models: Models, tmp_path: Path, name: str
) -> None:
    folder = models[name]
    result = on(folder, tmp_path / "p", kind="emp", seed=4)
    actual, record = storage.read(tmp_path / "p")
    assert gap(actual, empirical(folder)) < 1e-5
    assert set(actual) <= set(Folder.open(folder).specs)  # the names of the files
    assert (record["kind"], record["n_data"], record["prior_precision"]) == ("fisher_emp", N, 0)
    assert (record["samples"], record["seed"], record["examples"]) == (None, 4, N)
    assert record["frozen"] == []
    assert "average" in record["definition"]
    assert record["model_sha256"] == fingerprint(Folder.open(folder))
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
    assert bool(record["tied"]) == bool(tied and record["likelihood"] == "causal_lm")
    assert set(open_precision(tmp_path / "p").stored) >= set(actual)  # as a merge reads it
    numbers = torch.cat([t.flatten() for t in actual.values()])
    share_of_zeros = int((numbers == 0).sum()) / len(numbers)
    sizes = (len(actual), len(numbers), N, N, 0, 16)
    expected = (*sizes, share_of_zeros, result.seconds)
    assert result == FisherResult(tmp_path / "p", "fisher_emp", *expected)


@pytest.mark.slow
def test_ggn_is_exact_and_sampled_labels_tend_to_it(models: Models, tmp_path: Path) -> None:
    """Σ_i Σ_c p_c g_ic²: every label weighed by its probability."""
    bert = models["bert"]
    model, tokenizer = reload(bert)
    logits_by_text = [logits_of(model, tokenizer, text)[0] for text in TEXTS]
    truth = summed([row for logits in logits_by_text for row in weighed(model, logits)])
    on(bert, tmp_path / "ggn", kind="ggn")
    assert gap(stored(tmp_path / "ggn"), truth) < 1e-4
    for samples in (3, 150):
        on(bert, tmp_path / str(samples), samples=samples, seed=3)
    error_of_few = apart(stored(tmp_path / "3"), truth)
    error_of_many = apart(stored(tmp_path / "150"), truth)
    assert error_of_many < error_of_few / 3  # 1/√50 of it, but for chance
    assert error_of_many < 0.15
    assert apart(empirical(bert), truth) > 2 * error_of_many  # another quantity


def test_sampled_tokens_are_the_models_own(models: Models, tmp_path: Path) -> None:
    """E (Σ_t g_t(ŷ_t))² = Σ_t Σ_v p_tv g_tv², because g_t(ŷ_t) have mean 0 and no correlation."""
    llama = models["llama"]
    model, tokenizer = reload(llama)
    text = min(TEXTS, key=len)
    truth = summed(weighed(model, logits_of(model, tokenizer, text)[0][:-1]))
    on(llama, tmp_path / "p", write_rows(tmp_path / "one.jsonl", [{"text": text}]), samples=100)
    assert apart(stored(tmp_path / "p"), truth) < 0.2


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_labels_are_drawn_by_example_and_seed(name: str, tmp_path: Path, models: Models) -> None:
    """And the file needs none."""
    (tmp_path / "d.txt").write_text("\n\n".join(TEXTS) + "\n")
    on(models[name], tmp_path / "one", seed=5)
    on(models[name], tmp_path / "again", tmp_path / "d.txt", seed=5, memory_budget=1)  # one a pass
    on(models[name], tmp_path / "other", seed=6)
    first = stored(tmp_path / "one")
    again = stored(tmp_path / "again")
    another_seed = stored(tmp_path / "other")
    assert gap(first, again) < 1e-5
    assert gap(first, another_seed) > 1e-3
    assert read_precision_record(tmp_path / "one")["samples"] == 1


def test_it_lies_beside_the_model_and_asks_no_network(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = models["bert"]
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for place, call in ((socket.socket, "connect"), (socket, "getaddrinfo")):
        monkeypatch.setattr(place, call, lambda *_, **__: pytest.fail("a connection was tried"))
    model = shutil.copytree(bert, tmp_path / "m")
    fisher(model, bert / "data.jsonl", kind="emp")
    with pytest.raises(StorageError, match="--force"):
        fisher(model, bert / "data.jsonl", kind="ggn")
    assert read_precision_record(model / "precision")["kind"] == "fisher_emp"
    fisher(model, bert / "data.jsonl", kind="ggn", force=True)
    assert read_precision_record(model / "precision")["kind"] == "ggn"


@pytest.mark.parametrize("name", ["bert", "llama, tied"])
def test_a_model_in_half_precision_stays_in_it(models: Models, name: str, tmp_path: Path) -> None:
    """Sums are float32, and as near to those of the wide model as rounding lets them."""
    place = tmp_path / "half"
    shutil.copytree(models[name], place)
    model, _ = reload(place)
    model.bfloat16().save_pretrained(place)
    assert load_tuned(place).model.dtype == torch.bfloat16
    on(place, tmp_path / "of half", kind="emp")
    wide = reload(place)[0].float()
    wide.save_pretrained(place)
    on(place, tmp_path / "of wide", kind="emp")
    assert {t.dtype for t in stored(tmp_path / "of half").values()} == {torch.float32}
    assert gap(stored(tmp_path / "of half"), stored(tmp_path / "of wide")) < 0.05


def test_some_of_the_examples_stand_for_all(models: Models, tmp_path: Path) -> None:
    bert = models["bert"]
    result = on(bert, tmp_path / "some", kind="emp", examples=3, seed=1)
    assert (result.n_data, result.examples) == (N, 3)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:3].tolist()
    part = write_rows(tmp_path / "d.jsonl", [{"text": TEXTS[i], "label": i % 3} for i in order])
    on(bert, tmp_path / "three", part, kind="emp")
    on(bert, tmp_path / "half", part, kind="emp", dtype=torch.bfloat16)
    three = stored(tmp_path / "three")
    half = stored(tmp_path / "half")
    assert all(torch.equal(t.bfloat16(), half[n]) for n, t in three.items())
    assert gap(stored(tmp_path / "some"), {n: t.double() * N / 3 for n, t in three.items()}) < 1e-5


def test_names_are_those_of_the_files(tmp_path: Path, models: Models) -> None:
    """A GPT-2 saved without its head: the files lack the prefix that the model's names have."""
    whole = tiny.build("gpt2", "causal_lm")
    model = tiny.save(tmp_path / "m", whole.transformer)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    fisher(model, models["llama"] / "data.jsonl", kind="emp")
    actual, record = storage.read(model / "precision")
    assert set(actual) == set(Folder.open(model).specs)
    assert "wte.weight" in actual
    assert record["tied"] == {"wte.weight": ["transformer.wte.weight", "lm_head.weight"]}
    truth = empirical(tiny.save(tmp_path / "w", whole))
    assert gap(actual, {n.removeprefix("transformer."): t for n, t in truth.items()}) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "at"), [("diag", ""), ("gram", ""), ("kron", ".factors"), ("kron", "")]
)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, structure: str, at: str
) -> None:
    """Not one of another seed, which begins again."""
    llama = models["llama"]
    options: Any = {"structure": structure}
    if structure != "gram":
        options["memory_budget"] = 1
    at = f"out{at}.unfinished"
    follow = storage.Unfinished.follow
    take_up = storage.Unfinished.take_up
    starts: dict[str, int] = {}

    def ended(self: Any, sums: Any) -> None:
        self._due = 0.0  # each pass is kept
        follow(self, sums)
        if self.done == 2 and self.path.name == at:
            raise KeyboardInterrupt

    def seen(self: Any, sums: Any) -> None:
        before = self.done
        take_up(self, sums)
        starts[self.path.name] = self.done - before

    place = tmp_path / "place"
    out = tmp_path / "place" / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage.Unfinished, "follow", ended)
        on(llama, out, **options)
    assert (place / at).is_file()
    assert not out.exists()
    monkeypatch.setattr(storage.Unfinished, "take_up", seen)
    begun = shutil.copytree(place, tmp_path / "begun")
    for seed in (0, 1):
        shutil.copytree(begun, place, dirs_exist_ok=True)
        on(llama, tmp_path / f"whole{seed}", **options, seed=seed)
        on(llama, out, **options, seed=seed, force=True)
        assert bool(starts[at]) == (seed == 0)
        assert not list(place.glob("*unfinished*"))
        once = stored(tmp_path / f"whole{seed}")
        again = stored(out)
        assert all(torch.equal(t, again[n]) for n, t in once.items()), seed


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["diag", "gram"])
def test_an_adapter_has_the_precision_of_what_it_changes(
    models: Models, tmp_path: Path, structure: str
) -> None:
    """By PEFT's merge of it, as a model of its own; the merges take it, and no other's."""
    llama = models["llama"]
    peft = pytest.importorskip("peft")
    places = [tmp_path / "one", tmp_path / "two"]
    for seed, place in enumerate(places):
        settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
        tuned = peft.get_peft_model(tiny.build("llama", "causal_lm"), settings)
        torch.manual_seed(seed)
        for p in tuned.parameters():
            p.data += p.requires_grad * torch.randn_like(p) / 3
        tuned.save_pretrained(str(place))
        fisher(place, llama / "data.jsonl", base=llama, kind="emp", structure=structure)
        whole = tiny.save(tmp_path / f"whole{seed}", tuned.merge_and_unload())
        fisher(whole, llama / "data.jsonl", kind="emp", structure=structure)
        ours = open_precision(place / "precision")
        truth = open_precision(whole / "precision")
        changed = [n for n in truth.source.specs if "q_proj" in n or "down_proj" in n]
        assert changed
        assert set(ours.source.specs) == set(changed)
        for name in changed:
            if "eigenvectors" not in name:
                expected = truth.source.tensor(name)
                error = ours.source.tensor(name) - expected
                assert float(error.norm()) < 1e-5 * float(expected.norm())
    precisions = [place / "precision" for place in places]
    blr.merge(llama, places, out=tmp_path / "out", precisions=precisions, method="fisher")
    swapped = places[::-1]
    with pytest.raises(PosteriorError, match="swapped"):
        blr.merge(llama, swapped, out=tmp_path / "no", precisions=precisions, method="fisher")
    with pytest.raises(InputError, match="adapter"):
        fisher(llama, llama / "data.jsonl", base=llama)


GRAM: dict[str, Any] = {"structure": "gram"}
Case = Callable[[Path, Path, Path], object]
REFUSED: dict[str, tuple[Case, type[BLRError], str]] = {
    "GGN of sequences": (lambda lm, _, p: on(lm, p, kind="ggn"), InputError, "kind='mc'"),
    "samples": (lambda _, m, p: on(m, p, kind="emp", samples=2), InputError, "kind='mc'"),
    "unknown kind": (lambda _, m, p: on(m, p, kind="hessian"), InputError, "'hessian'"),
    "label of a language model": (lambda lm, _, p: on(lm, p, label="y"), InputError, "no label"),
    "too long": (lambda _, m, p: on(m, p, max_length=17), InputError, "16 tokens"),
    "too many": (lambda _, m, p: on(m, p, examples=N + 1), InputError, f"holds {N}"),
    "bad label": (lambda _, m, p: on(m, p, "bad.csv", kind="emp"), DataError, r"row 2 .*'3'"),
    "no label": (lambda _, m, p: on(m, p, "d.txt", kind="emp"), DataError, "name for the label"),
    "below a file": (lambda _, m, p: on(m, m / "data.jsonl/p"), StorageError, "cannot write"),
    "half": (lambda _, m, p: on(m, p, dtype=torch.float16), InputError, "bfloat16"),
    "gram": (lambda _, m, p: on(m, p, **GRAM, dtype=torch.bfloat16), InputError, "float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    case: str, models: Models, tmp_path: Path
) -> None:
    bert = models["bert"]
    llama = models["llama"]
    (bert / "bad.csv").write_text("text,label\na,0\nb,3\n")
    (bert / "d.txt").write_text("a film\n")
    ask, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        ask(llama, bert, tmp_path / "p")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("bert", "gram"),
        ("llama", "gram"),
        ("llama, tied", "gram"),
        ("llama", "kron"),
        ("llama, tied", "kron"),
    ],
)
def test_a_dry_run_knows_the_numbers_that_are_written(
    models: Models, tmp_path: Path, name: str, structure: str
) -> None:
    place = models[name]
    cost = fisher_cost(place, place / "data.jsonl", structure=structure)
    tensors = stored(on(place, tmp_path / "out", structure=structure).folder)
    assert cost.disk == sum(tensor.nbytes for tensor in tensors.values())
