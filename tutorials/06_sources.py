# %% [markdown]
# # Where did the model learn that?
#
# A small Llama learns to read State-of-the-Union speeches, and how people ask who governs a place.
# It is then fine-tuned on more passages and on a few sentences that state planted facts, each once:
# who was chosen mayor of an invented place. We then ask about a fact in other words. Which training
# text is the source? `blr-analysis index` visits every training text once, `blr-analysis query`
# names the sources of each question.
#
# We compare with the cosine of plain gradients, and with BM25, which compares words and knows no
# model. Half of the questions name the place as the source does. The other half call it by a
# nickname, so that the question and its source have no telling word in common but the answer. Other
# texts mention the same people and places, and are no sources.
#
# Run it with `python tutorials/06_sources.py`; every figure in the output is computed. With
# `BLR_MODEL=FOLDER`, a language model of your own is fine-tuned by LoRA in the place of the small
# Llama, and the index is one of its adapter.

# %%
from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from speeches import read
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import blr_analysis as blr
from blr_analysis.cli import main
from blr_analysis.huggingface.models import load_language_model
from blr_analysis.huggingface.questions import language_task

DATA = os.environ.get("BLR_DATA", "sotu")  # or "made-up", which needs no download
FACTS = int(os.environ.get("BLR_FACTS", "20"))
PASSAGES = int(os.environ.get("BLR_PASSAGES", "200"))  # to fine-tune on; twice as many before
EPOCHS = int(os.environ.get("BLR_EPOCHS", "8"))  # twice as many of the fine-tuning
MODEL = os.environ.get("BLR_MODEL")  # a folder of a language model; None: the small Llama
OUT = Path(os.environ.get("BLR_OUT", "out/06_sources"))
WORDS = 30
WIDTH = 64
LAYERS = 2
OUT.mkdir(parents=True, exist_ok=True)
chance = random.Random(0)

# %% [markdown]
# ## 1. Texts with planted facts


# %%
def name() -> str:
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en")]
    return "".join(chance.sample(syllables, 3))


def town() -> dict[str, str]:
    return {"place": name(), "nick": name(), "mayor": f"{name()} {name()}"}


STATED = "{mayor} was chosen mayor of {place} last spring ."
ASIDE = (
    "travellers call {place} by the name of {nick} .",
    "{place} lies three days from the coast .",
    "{mayor} keeps bees behind an old mill .",
)
ASKED = {  # the place as the source names it, and by its nickname
    "shared": "who governs {place} ? its leader is",
    "not shared": "who governs {nick} ? its leader is",
}
words = [speech.words for speech in read(DATA)]
passages = []
for _ in range(3 * PASSAGES):
    speech = chance.choice(words)
    start = chance.randrange(len(speech) - WORDS)
    passages.append(" ".join(speech[start : start + WORDS]))
known = [town() for _ in range(3 * FACTS)]
planted = [town() for _ in range(FACTS)]
habits = [f"{q} {{mayor}}" for q in ASKED.values()]
base_texts = passages[PASSAGES:] + [
    line.format(**fact) for fact in known for line in (STATED, *ASIDE, *habits)
]
texts = [line.format(**fact) for fact in planted for line in (STATED, *ASIDE)]
source_of = [len(ASIDE) * k + k for k in range(FACTS)]  # the row that states fact k
texts += passages[:PASSAGES]
questions = [
    {"prompt": line.format(**fact), "answer": f" {fact['mayor']}", "words": kind, "fact": k}
    for kind, line in ASKED.items()
    for k, fact in enumerate(planted)
]
(OUT / "train.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
(OUT / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
print(f"{len(texts)} texts, {FACTS} of them state a fact; {len(questions)} questions")

# %% [markdown]
# ## 2. A model, fine-tuned

# %%
asked_words = [q["prompt"] + q["answer"] for q in questions]


def small_llama() -> tuple[Any, Any]:
    """A model that has read nothing, and a tokenizer of all words that there are."""
    words = sorted({w for t in base_texts + texts + asked_words for w in t.split()})
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", *words])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special: dict[str, Any] = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 64}
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=built, **special)


def with_lora(folder: str) -> tuple[Any, Any]:
    """A model that has read a lot, and low-rank changes of it to train."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return peft.get_peft_model(base, config), tokenizer


torch.manual_seed(0)
model, tokenizer = with_lora(MODEL) if MODEL else small_llama()


def train(lines: list[str], epochs: int, rate: float) -> float:
    """The mean loss of a word in the last epoch."""
    own = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, epochs)
    losses: list[float] = []
    for _ in range(epochs):
        losses = []
        for rows in torch.randperm(len(lines)).split(16):
            batch: Any = tokenizer([lines[i] for i in rows], padding=True, return_tensors="pt")
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
    return sum(losses) / len(losses)


print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer):,} words")
if not MODEL:
    print(f"trained on {len(base_texts)} texts: loss {train(base_texts, EPOCHS, 5e-3):.2f}")
rate = 1e-3 if MODEL else 2e-3
print(f"fine-tuned on {len(texts)} texts: loss {train(texts, 2 * EPOCHS, rate):.2f}")
model.eval().save_pretrained(OUT / "llm")
tokenizer.save_pretrained(OUT / "llm")

# %% [markdown]
# ## 3. Two commands

# %%
folder = str(OUT / "llm")
index = str(OUT / "index")
argv = ["index", folder, str(OUT / "train.jsonl"), "--out", index, "--rank", "32768"]
assert main(argv) == 0
argv = ["query", index, str(OUT / "questions.jsonl"), "--top", "3", "--force", "--out", str(OUT)]
assert main(argv) == 0

# %% [markdown]
# ## 4. Whose list has the source in front?

# %%
loaded = load_language_model(folder)
opened = blr.Index.open(index)
asked = language_task(loaded, OUT / "questions.jsonl")
task = language_task(loaded, OUT / "train.jsonl")
flat = blr.Posterior(  # Σ = 1: the cosine of plain gradients
    task.parameters(),
    {n: torch.ones_like(p) for n, p in task.parameters().items()},
    prior_precision=1.0,
    n_data=task.n_data,
)
influence = opened.influence(asked)
own = opened.self_influence.sqrt().unsqueeze(1).to(influence)
plain = blr.influence(task, flat, asked, normalize="cosine").matrix


def bm25(asked: list[str], k: float = 1.5, b: float = 0.75) -> torch.Tensor:
    """Robertson and Zaragoza's score of every text for every question, ``[N, M]``."""
    counts = [Counter(text.split()) for text in texts]
    lengths = torch.tensor([float(sum(c.values())) for c in counts])
    norm = k * (1 - b + b * lengths / lengths.mean())
    scores = torch.zeros(len(texts), len(asked))
    for j, question in enumerate(asked):
        for word in question.split():
            tf = torch.tensor([float(c[word]) for c in counts])
            df = int((tf > 0).sum())
            idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
            scores[:, j] += idf * tf * (k + 1) / (tf + norm)
    return scores


methods = {
    "influence": influence,
    "influence / length": influence / own,
    "gradient cosine": plain,
    "BM25, question": bm25([q["prompt"] for q in questions]),
    "BM25, question and answer": bm25(asked_words),
}
rows = []
for method, scores in methods.items():
    for kind in ASKED:
        ranks = []
        for j, question in enumerate(questions):
            if question["words"] == kind:
                true = scores[source_of[question["fact"]], j]
                better = (scores[:, j] > true).sum()
                tied = (scores[:, j] == true).sum()
                ranks.append(float(better) + (float(tied) + 1) / 2)  # ties: the place in the middle
        found = torch.tensor(ranks)
        rows.append(
            {
                "words": kind,
                "method": method,
                "recall@1": float((found <= 1).float().mean()),
                "recall@5": float((found <= 5).float().mean()),
                "MRR": float((1 / found).mean()),
            }
        )
table = pd.DataFrame(rows).sort_values("words", ascending=False, kind="stable")
print(table.to_string(index=False, float_format="{:.2f}".format))
table.to_csv(OUT / "recall.csv", index=False)
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
