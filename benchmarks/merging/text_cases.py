"""Cases of the contest with transformers: see :mod:`benchmarks.merging.cases`.

* sentiment: six domains (:mod:`benchmarks.merging.sentiment_data`); the last three of
  all-MiniLM-L6-v2's six layers and a new classifier; 300 texts a task, two epochs of AdamW, 250
  test texts. The base saw 60 other texts of each. Statistics are of the first 64 of every task.
* lora: SmolLM2-135M (the folder that ``$SMOLLM2`` names) and LoRA adapters of rank 8 on the query
  and value projections of the last ten layers: 96 pieces of 64 tokens of State of the Union
  speeches, and of tweets to airlines, one epoch; what is merged is the matrices with the products
  in them. Judged by nats per token on 32 other pieces of each. Statistics are of the first 24.

What lies below the layers that are trained is the same in all models, and is run once.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
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

FIRST, EACH, SEEN, TEST, UPPER = 60, 300, 64, 250, 3
RECIPE = Recipe(n_base=FIRST + EACH, n_train=FIRST + EACH, adamw_lr=2e-4)
LAYERS, PIECE, PIECES, KNOWN, HELD = 10, 64, 96, 24, 32


Rows = tuple[Tensor, Tensor]  # what the last layers are given, token ids


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


@dataclass(frozen=True)
class States(Texts):
    """Texts as the trained layers are given them."""

    def padded(self, chosen: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        rows: list[Any] = [self.ids[i] for i in chosen]
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(r)) for r in rows], batch_first=True)
        hidden = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return {"hidden": hidden, "attention_mask": mask}, self.labels[chosen]


class Upper(nn.Module):
    """The last layers of a classifier of texts."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.layers = whole.bert.encoder.layer[-UPPER:]
        self.pooler, self.classifier = whole.bert.pooler, whole.classifier

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Any:
        seen = torch.where(attention_mask[:, None, None] > 0, 0.0, torch.finfo(hidden.dtype).min)
        for layer in self.layers:
            found = layer(hidden, seen)
            hidden = found if isinstance(found, Tensor) else found[0]
        return SimpleNamespace(logits=self.classifier(self.pooler(hidden)))


@torch.no_grad()
def states(whole: Any, data: Texts) -> States:
    """What the last layers are given, without padding."""
    found: list[Any] = []
    for begin in range(0, len(data), 16):
        inputs, _ = data.padded(list(range(begin, min(begin + 16, len(data)))))
        inputs = {n: v.to(whole.device) for n, v in inputs.items()}
        hidden = whole.bert(**inputs, output_hidden_states=True).hidden_states[-1 - UPPER].cpu()
        counts = inputs["attention_mask"].sum(1).tolist()
        found += [row[:count].clone() for row, count in zip(hidden, counts, strict=True)]
    return States(found, data.labels)


def joined(parts: Sequence[Texts]) -> States:
    return States([row for p in parts for row in p.ids], torch.cat([p.labels for p in parts]))


def sentiment(seed: int, device: str) -> Case:
    whole: Any = new_model(seed).to(device).eval()
    every = {d: texts(d, seed, RECIPE) for d in sentiment_data.DOMAINS}
    train = {d: states(whole, t["train"]) for d, t in every.items()}
    test = {d: states(whole, t["test"].first(TEST)) for d, t in every.items()}
    starts = joined([t.first(FIRST) for t in train.values()])
    own = {d: t.chosen(list(range(FIRST, len(t)))) for d, t in train.items()}
    model = Upper(whole)

    def trained(start: State, data: Texts) -> State:
        made = twin(model, start)
        fit(made, data, RECIPE, "adamw", seed)
        return moving(made)

    base = trained(moving(model), starts)
    models = {d: trained(base, data) for d, data in own.items()}
    joint = trained(base, joined(list(own.values())))
    at = {d: twin(model, state).eval() for d, state in models.items()}
    return Case(
        model.eval(),
        {n: v.cpu() for n, v in base.items()},
        {d: {n: v.cpu() for n, v in m.items()} for d, m in models.items()},
        {n: v.cpu() for n, v in joint.items()},
        task(twin(model, base).eval(), starts.first(SEEN)),
        {d: task(at[d], data.first(SEEN)) for d, data in own.items()},
        {},
        {d: task(at[d], data) for d, data in test.items()},
        [[f"layers.{k}"] for k in range(UPPER)] + [["pooler"], ["classifier"]],
        structures=("diag", "gram"),
        curvature="mc_fisher",
        grid=(0.15, 0.3, 0.45, 0.6, 1.0),
        short=True,
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
        found[name] = rows[order][: PIECES + HELD]
    return found


def lora(seed: int, device: str) -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.environ["SMOLLM2"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = loaded.to(device)
    rows = {n: (below(model, ids), ids) for n, ids in pieces(tokenizer, seed).items()}
    model.model.layers = model.model.layers[-LAYERS:]
    model.config.num_hidden_layers, model.config.use_cache = LAYERS, False
    names = [f"model.layers.{k}.self_attn.{p}_proj" for k in range(LAYERS) for p in ("q", "v")]
    for n, p in model.named_parameters():
        p.requires_grad_(n.removesuffix(".weight") in names)
    base = moving(model)

    def trained(start: State, data: Rows) -> State:
        torch.manual_seed(seed)
        settings = LoraConfig(r=8, lora_alpha=16, target_modules=names, task_type="CAUSAL_LM")
        made: Any = get_peft_model(twin(model, start), settings)
        chosen = [p for p in made.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(chosen, lr=2e-3)
        for batch in torch.randperm(len(data[0])).split(4):
            optimizer.zero_grad()
            x, ids = (part[batch].to(device) for part in data)
            made(inputs_embeds=x, labels=ids).loss.backward()
            optimizer.step()
        merged = made.merge_and_unload()
        return {n: merged.get_parameter(n).detach().clone() for n in base}

    train = {n: part(r, 0, PIECES) for n, r in rows.items()}
    models = {n: trained(base, data) for n, data in train.items()}
    x, ids = (torch.cat(parts) for parts in zip(*train.values(), strict=True))
    joint = trained(base, (x, ids))

    def language(state: State, data: Rows) -> blr.Task:
        def forward(m: Any, batch: Any) -> tuple[Tensor, Tensor]:
            return m(inputs_embeds=batch[0]).logits, batch[1]

        made = twin(model, state).eval()
        return blr.Task(made, data, likelihood="causal_lm", forward=forward, batch_size=8)

    def tasks(first: int, last: int) -> dict[str, blr.Task]:
        return {n: language(models[n], part(rows[n], first, last)) for n in models}

    starts = [part(r, 0, KNOWN // 2) for r in rows.values()]
    return Case(
        model,
        base,
        models,
        joint,
        language(base, (torch.cat([x for x, _ in starts]), torch.cat([y for _, y in starts]))),
        tasks(0, KNOWN),
        {},
        tasks(PIECES, PIECES + HELD),
        [[f"model.layers.{k}"] for k in range(LAYERS)],
        by="nll",
        tokens=PIECE - 1,
        structures=("diag", "gram"),
        curvature="empirical_fisher",
        grid=(0.3, 0.4, 0.5, 0.7, 1.0),
        short=True,
    )


@torch.no_grad()
def below(model: Any, ids: Tensor) -> Tensor:
    """What the last layers are given."""
    lower = copy.copy(model.model)
    lower._modules = {**lower._modules, "norm": nn.Identity()}
    lower.layers = lower.layers[:-LAYERS]
    found = [lower(b.to(model.device), use_cache=False).last_hidden_state for b in ids.split(8)]
    return torch.cat(found).cpu()


def part(rows: Rows, first: int, last: int) -> Rows:
    return rows[0][first:last], rows[1][first:last]
