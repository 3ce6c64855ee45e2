"""Cases of the contest with transformers: see :mod:`benchmarks.merging.cases`.

* sentiment: six domains (:mod:`benchmarks.merging.sentiment_data`); all-MiniLM-L6-v2 with a new
  classifier, embeddings frozen; up to 1,000 texts a task, two epochs of AdamW, 400 test texts and
  150 to validate. The base saw 150 other texts of each.
* lora: SmolLM2-135M (the folder that ``$SMOLLM2`` names) and LoRA adapters of rank 8 on the query
  and value projections of the last ten layers: 160 pieces of 64 tokens of State of the Union
  speeches, and of tweets to airlines, one epoch; what is merged is the matrices with the products
  in them. Judged by nats per token on 40 other pieces of each.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import torch
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.merging import sentiment_data
from benchmarks.merging.cases import Case, State
from benchmarks.merging.sentiment_rows import task
from benchmarks.merging.sentiment_texts import Recipe, Texts, new_model, texts
from benchmarks.merging.sentiment_train import fit
from benchmarks.truth import store

FIRST, EACH = 150, 1000
RECIPE = Recipe(n_base=FIRST + EACH, n_train=FIRST + EACH)
LAYERS, PIECE, PIECES, HELD = 10, 64, 160, 40


def moving(model: nn.Module) -> State:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def twin(model: nn.Module, state: State) -> nn.Module:
    """A copy at these weights, which shares what is frozen."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    made = copy.deepcopy(model, shared)
    with torch.no_grad():
        for name, value in state.items():
            made.get_parameter(name).copy_(value)
    return made


def joined(parts: list[Texts]) -> Texts:
    return Texts([row for p in parts for row in p.ids], torch.cat([p.labels for p in parts]))


def sentiment(seed: int, device: str) -> Case:
    every = {d: texts(d, seed, RECIPE) for d in sentiment_data.DOMAINS}
    starts = joined([t["train"].first(FIRST) for t in every.values()])
    own = {d: t["train"].chosen(list(range(FIRST, len(t["train"])))) for d, t in every.items()}
    model = new_model(seed).to(device)

    def trained(start: State, data: Texts) -> State:
        made = twin(model, start)
        fit(made, data, RECIPE, "adamw", seed)
        return moving(made)

    base = trained(moving(model), starts)
    models = {d: trained(base, data) for d, data in own.items()}
    joint = trained(base, joined(list(own.values())))

    def tasks(part: dict[str, Texts]) -> dict[str, blr.Task]:
        return {d: task(twin(model, models[d]).eval(), data) for d, data in part.items()}

    layers = [f"bert.encoder.layer.{k}" for k in range(6)]
    return Case(
        model.eval(),
        {n: v.cpu() for n, v in base.items()},
        {d: {n: v.cpu() for n, v in m.items()} for d, m in models.items()},
        {n: v.cpu() for n, v in joint.items()},
        task(twin(model, base).eval(), starts),
        tasks(own),
        tasks({d: t["validation"] for d, t in every.items()}),
        tasks({d: t["test"] for d, t in every.items()}),
        [[layer] for layer in layers] + [["bert.pooler"], ["classifier"]],
    )


def pieces(tokenizer: Any, seed: int) -> dict[str, Tensor]:
    """Pieces of 64 tokens by task, in an order of this seed."""
    speeches = sorted((store.root() / "sotu").glob("*.txt"))
    tweets = [t.text for t in sentiment_data.airline()]
    source = random.Random(0)
    source.shuffle(tweets)
    written = {
        "speeches": "\n".join(p.read_text("utf-8") for p in speeches[::10]),
        "tweets": "\n".join(tweets[:3000]),
    }
    found = {}
    for name, text in written.items():
        ids = torch.tensor(tokenizer(text)["input_ids"])
        rows = ids[: len(ids) // PIECE * PIECE].reshape(-1, PIECE)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        found[name] = rows[order]
    return found


def lora(seed: int, device: str) -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.environ["SMOLLM2"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = loaded.to(device)
    model.config.use_cache = False
    count = model.config.num_hidden_layers
    last = range(count - LAYERS, count)
    names = [f"model.layers.{k}.self_attn.{p}_proj" for k in last for p in ("q", "v")]
    for n, p in model.named_parameters():
        p.requires_grad_(n.removesuffix(".weight") in names)
    rows = pieces(tokenizer, seed)
    base = moving(model)

    def trained(start: State, data: Tensor) -> State:
        torch.manual_seed(seed)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM")
        made: Any = get_peft_model(twin(model, start), settings)
        chosen = [p for p in made.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(chosen, lr=2e-3)
        for batch in data[torch.randperm(len(data))].to(device).split(4):
            optimizer.zero_grad()
            made(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
        merged = made.merge_and_unload()
        return {n: merged.get_parameter(n).detach().clone() for n in base}

    train = {n: r[:PIECES] for n, r in rows.items()}
    models = {n: trained(base, data) for n, data in train.items()}
    joint = trained(base, torch.cat(list(train.values())))

    def language(state: State, data: Tensor) -> blr.Task:
        def forward(m: Any, batch: Any) -> tuple[Tensor, Tensor]:
            return m(input_ids=batch[0], use_cache=False).logits, batch[1]

        made = twin(model, state).eval()
        return blr.Task(made, (data, data), likelihood="causal_lm", forward=forward, batch_size=8)

    def tasks(first: int, last: int) -> dict[str, blr.Task]:
        return {n: language(models[n], rows[n][first:last]) for n in models}

    end = PIECES + HELD
    return Case(
        model,
        base,
        models,
        joint,
        language(base, torch.cat([r[: PIECES // 4] for r in rows.values()])),
        tasks(0, PIECES // 2),
        tasks(end, end + HELD // 2),
        tasks(PIECES, end),
        [[f"model.layers.{k}"] for k in last],
        by="nll",
        structures=("diag", "gram"),
        grid=(0.3, 0.4, 0.5, 0.7, 1.0),
    )
