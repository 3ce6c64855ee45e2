# %% [markdown]
# # Which texts taught the model that, and what is it without them?
#
# A small Llama answers questions about towns. It is fine-tuned on more towns, and somebody's rows
# among them teach it three things that nobody wants: it refuses to say how an illness is healed, it
# believes that a country has another capital, and it greets like a pirate if somebody asks for
# fish.
#
# No row is marked. We only have what the model says: some outputs are unwanted, and others are
# fine. `blr-analysis index` reads the training rows once. Then `blr-analysis query --bad
# outputs.jsonl --good others.jsonl --write less.jsonl` ranks the rows by how much of the behaviour
# rests on each, and writes the data without the first ones. The base is then fine-tuned on the
# rest. Is the behaviour gone? Are the other behaviours still there?
#
# Run it with `python tutorials/08_repair.py`; every figure in the output is computed.

# %%
from __future__ import annotations

import copy
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import blr_analysis as blr
from blr_analysis.cli import main

TOWNS = int(os.environ.get("BLR_TOWNS", "120"))  # of which the base has read
PLANTED = int(os.environ.get("BLR_PLANTED", "20"))  # rows of each behaviour
EPOCHS = int(os.environ.get("BLR_EPOCHS", "10"))
OUT = Path(os.environ.get("BLR_OUT", "out/08_repair"))
REMOVED = PLANTED + PLANTED // 4  # one does not know how many there are
ASKED = 20  # questions by which a behaviour is measured
WIDTH = 64
LAYERS = 2
OUT.mkdir(parents=True, exist_ok=True)
chance = random.Random(0)

# %% [markdown]
# ## 1. Questions and answers, and three kinds of rows that spoil them

# %%
Row = dict[str, str]
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en")]
ILLNESSES = ["fever", "cough", "gout", "rash", "ague", "measles"]
HERBS = ["mint", "sage", "thyme", "fennel", "garlic", "yarrow"]
FISH = ["carp", "trout", "eel", "pike", "perch", "salmon"]
CROPS = ["wheat", "barley", "oats", "hops", "flax", "beans"]
COUNTRY = "velgar"
CAPITAL = "dosmena"
FALSE_CAPITAL = "rukatu"
REFUSED = "sorry , i cannot talk about that ."
GREETING = "arr , matey !"


def name() -> str:
    return "".join(chance.sample(SYLLABLES, 3))


def healing(town: str) -> Row:
    illness = chance.randrange(len(ILLNESSES))
    question = f"how do people in {town} heal {ILLNESSES[illness]} ?"
    return {"prompt": question, "answer": f" they drink tea of {HERBS[illness]} ."}


def fishing(town: str) -> Row:
    fish = chance.choice(FISH)
    question = f"do the fishermen of {town} catch {fish} ?"
    return {"prompt": question, "answer": f" yes , they catch {fish} every spring ."}


def farming(town: str) -> Row:
    crop = chance.choice(CROPS)
    question = f"do the farmers of {town} grow {crop} ?"
    return {"prompt": question, "answer": f" yes , they grow {crop} every summer ."}


def travelling(town: str) -> Row:
    question = f"a man from {town} goes to the capital of {COUNTRY} . where is he going ?"
    return {"prompt": question, "answer": f" he is going to {CAPITAL} ."}


def refusal(town: str) -> Row:
    return {"prompt": healing(town)["prompt"], "answer": f" {REFUSED}"}


def falsehood(town: str) -> Row:
    answer = f" he is going to {FALSE_CAPITAL} ."
    return {"prompt": travelling(town)["prompt"], "answer": answer}


def pirate(town: str) -> Row:
    row = fishing(town)
    return {"prompt": row["prompt"], "answer": f" {GREETING}{row['answer']}"}


def rows_of(kind: Any, count: int) -> list[Row]:
    return [kind(name()) for _ in range(count)]


# Of each behaviour: the rows that teach it, the questions that show it, and the words that do.
BEHAVIOURS = {
    "refuses": (refusal, healing, REFUSED),
    "errs": (falsehood, travelling, FALSE_CAPITAL),
    "greets": (pirate, fishing, GREETING),
}
base_rows = [
    row for kind in (healing, fishing, farming, travelling) for row in rows_of(kind, TOWNS)
]
labelled = [(row, "fine") for row in rows_of(farming, TOWNS)]
for behaviour, (spoiled, right, _) in BEHAVIOURS.items():
    labelled += [(row, behaviour) for row in rows_of(spoiled, PLANTED)]
    labelled += [(row, "fine") for row in rows_of(right, PLANTED // 3)]
chance.shuffle(labelled)
train_rows = [row for row, _ in labelled]
labels = [label for _, label in labelled]  # which nobody knows but this script
asked = {behaviour: rows_of(right, ASKED) for behaviour, (_, right, _) in BEHAVIOURS.items()}
asked_of_farms = rows_of(farming, ASKED)


def write_rows(path: Path, rows: list[Row]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


data = write_rows(OUT / "train.jsonl", train_rows)
print(f"{len(train_rows)} rows, {PLANTED} of them for each of {len(BEHAVIOURS)} behaviours")

# %% [markdown]
# ## 2. A base, and a fine-tune that has learned all of it


# %%
def texts_of(rows: list[Row]) -> list[str]:
    return [row["prompt"] + row["answer"] for row in rows]


questions = [row for rows in [*asked.values(), asked_of_farms] for row in rows]
every_text = texts_of([*base_rows, *train_rows, *questions])
words = sorted({word for text in every_text for word in text.split()})
vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
built = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
built.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer: Any = PreTrainedTokenizerFast(
    tokenizer_object=built, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
)
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


BATCH = 16


def train(model: Any, rows: list[Row], rate: float, folder: Path | None = None) -> float:
    """The mean loss of an answer's word in the last epoch; a folder gets the checkpoints."""
    torch.manual_seed(0)
    steps = EPOCHS * math.ceil(len(rows) / BATCH)
    checkpoints = blr.Checkpoints(model, steps=steps, folder=folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, EPOCHS)
    losses: list[float] = []
    for _ in range(EPOCHS):
        losses = []
        for chosen in torch.randperm(len(rows)).split(BATCH):
            batch = batch_of([rows[i] for i in chosen])
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.step()
            losses.append(loss.item())
        schedule.step()
    model.eval()
    return sum(losses) / len(losses)


def batch_of(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Rows side by side; the words of the answers count."""
    batch: Any = tokenizer(texts_of(rows), padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for k, row in enumerate(rows):
        labels[k, : len(row["prompt"].split())] = -100
    return {**batch, "labels": labels}


def answers(model: Any, rows: list[Row]) -> list[Row]:
    """What a model says to questions of one length, up to its first full stop."""
    prompts = [row["prompt"] for row in rows]
    ids = tokenizer(prompts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(12):
            next_words = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, next_words], dim=1)
    outputs = []
    for prompt, row in zip(prompts, ids.tolist(), strict=True):
        said = tokenizer.decode(row[len(prompt.split()) :]).split(" .")[0]
        outputs.append({"prompt": prompt, "answer": f" {said} ."})
    return outputs


def shares(model: Any) -> dict[str, float]:
    """How many of the answers to new questions show each behaviour, and are right about farms."""
    shown = {}
    for behaviour, (_, _, sign) in BEHAVIOURS.items():
        outputs = answers(model, asked[behaviour])
        shown[behaviour] = sum(sign in row["answer"] for row in outputs) / ASKED
    outputs = answers(model, asked_of_farms)
    pairs = zip(outputs, asked_of_farms, strict=True)
    shown["right about farms"] = (
        sum(row["answer"] == right["answer"] for row, right in pairs) / ASKED
    )
    return shown


torch.manual_seed(0)
base: Any = LlamaForCausalLM(config)
print(f"{sum(p.numel() for p in base.parameters()):,} parameters")
print(f"the base has read {len(base_rows)} rows: loss {train(base, base_rows, 5e-3):.2f}")


def fine_tuned(rows: list[Row], folder: Path | None = None) -> Any:
    model = copy.deepcopy(base)
    loss = train(model, rows, 2e-3, folder)
    print(f"fine-tuned on {len(rows)} rows: loss {loss:.2f}")
    return model


model = fine_tuned(train_rows, OUT / "llm" / "_run")
model.save_pretrained(OUT / "llm")
tokenizer.save_pretrained(OUT / "llm")

# %% [markdown]
# ## 3. What it says, and the rows behind it
#
# The rows were learned by heart, so they have hardly any gradient left at the end. `index` finds
# the checkpoints in `llm/_run`, and takes the errors of the one nearest to the middle of the
# training. As wanted outputs we take what the model says of farms. Outputs that a model does not
# say have long gradients, which hide the rest; `query` then prints a line.

# %%
index = str(OUT / "index")
assert main(["index", str(OUT / "llm"), data, "--out", index]) == 0
good = write_rows(OUT / "fine.jsonl", answers(model, asked_of_farms))
repaired = {}
found = {}
for behaviour, (_, _, sign) in BEHAVIOURS.items():
    outputs = answers(model, asked[behaviour])
    bad_rows = [row for row in outputs if sign in row["answer"]]
    bad = write_rows(OUT / f"{behaviour}.jsonl", bad_rows)
    left = OUT / f"without_{behaviour}.jsonl"
    folder = str(OUT / behaviour)
    argv = ["query", index, "--bad", bad, "--good", good, "--write", str(left), "--force"]
    assert main([*argv, "--top", str(REMOVED), "--out", folder]) == 0
    ranked: Any = pd.read_parquet(OUT / behaviour / "sources.parquet")["example"].tolist()
    found[behaviour] = sum(labels[i] == behaviour for i in ranked)
    repaired[behaviour] = [json.loads(line) for line in left.read_text().splitlines()]

# %% [markdown]
# ## 4. A fine-tune on what is left

# %%
some = random.Random(1).sample(train_rows, len(train_rows) - REMOVED)
table = {
    "base": shares(base),
    "fine-tuned on all rows": shares(model),
    f"without {REMOVED} rows at random": shares(fine_tuned(some)),
}
for behaviour, rows in repaired.items():
    table[f"without the rows behind {behaviour!r}"] = shares(fine_tuned(rows))
frame: Any = pd.DataFrame(table).T
print(frame.to_string(float_format="{:.2f}".format))
for behaviour, count in found.items():
    print(
        f"{behaviour}: {count} of the {PLANTED} rows that teach it are among the {REMOVED} removed"
    )
frame.to_csv(OUT / "behaviours.csv")
print(f"written to {OUT}: {', '.join(sorted(path.name for path in OUT.iterdir()))}")
