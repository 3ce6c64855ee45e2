"""The fine-tunes that are merged, and their precisions, on disk below ``merging/`` of the cache.

Of every seed: a base (MiniLM with a new classifier, fine-tuned on movie snippets), five fine-tunes
of it, one on each of the other domains, and joint training from the base: on all six domains, on
all but tweets, and on all and then on tweets alone, which α < 0 takes out again. AdamW trains one
such family, IVON another (without the joint ones). Word, position and type embeddings
stay as MiniLM's, dropout is off. A fine-tune is one ``.safetensors`` file of the trained tensors;
its precisions lie beside it in the package's format: ``fisher`` (sampled labels, at the trained
weights), ``adam_v`` (N·B·v̂) or ``ivon`` (N·h) — data parts, sums over the N training examples.

What is whole and of the same recipe is kept; everything else is made again.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import blr_analysis as blr
from benchmarks.merging import sentiment_data
from benchmarks.merging.sentiment_texts import BASE, Recipe, Texts, new_model, shuffled, texts
from benchmarks.truth import store
from blr_analysis.files import storage

JOINT, GONE = "joint", "tweets"
THEN, WITHOUT = f"joint, then {GONE}", f"joint without {GONE}"
DOMAINS = tuple(sentiment_data.DOMAINS)
TASKS = tuple(d for d in DOMAINS if d != BASE)
PRECISIONS = {"adamw": ("fisher", "adam_v"), "ivon": ("ivon",)}
JOBS = [("adamw", d) for d in (*DOMAINS, JOINT, THEN, WITHOUT)] + [("ivon", d) for d in DOMAINS]
STARTS = {BASE: None, THEN: JOINT}  # what a training starts from; all others start from the base
Weights = dict[str, Tensor]


def trained_weights(model: nn.Module) -> Weights:
    """A copy of every tensor that is trained."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def load(model: nn.Module, weights: Weights) -> None:
    """Write these weights into the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(weights[name])


def mean_loss(model: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    inputs, labels = batch
    device = next(model.parameters()).device
    logits = model(**{name: ids.to(device) for name, ids in inputs.items()}).logits
    return F.cross_entropy(logits, labels.to(device))


def fit(
    model: nn.Module, data: Texts, recipe: Recipe, how: str, seed: int, *, first: bool = False
) -> Any:
    """Train the model on these texts (``first``: the base); the optimizer comes back."""
    n, per_epoch = len(data), math.ceil(len(data) / recipe.batch_size)
    steps = recipe.epochs * per_epoch
    parameters = [p for p in model.parameters() if p.requires_grad]
    ivon = how == "ivon"
    optimizer: torch.optim.Optimizer
    if ivon:
        optimizer = blr.IVON(
            parameters,
            lr=recipe.ivon_lr if first else recipe.ivon_lr_tasks,
            ess=n,
            hess_init=recipe.ivon_precision / n,
            beta2=recipe.ivon_kept ** (1 / steps),
            weight_decay=1e-6,
        )
    else:
        optimizer = torch.optim.AdamW(parameters, lr=recipe.adamw_lr, weight_decay=0.0)
    warm = max(1, round(recipe.warm_up * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * k / steps))
    )
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(recipe.epochs):
        for batch in data.batches(recipe.batch_size, generator):
            if isinstance(optimizer, blr.IVON):
                with optimizer.sampled_params(train=True):
                    optimizer.zero_grad()
                    mean_loss(model, batch).backward()
            else:
                optimizer.zero_grad()
                mean_loss(model, batch).backward()
            optimizer.step()
            schedule.step()
    return optimizer


@torch.inference_mode()
def evaluate(model: nn.Module, data: Texts) -> tuple[float, float]:
    """Accuracy and mean loss."""
    model.eval()
    right, loss = 0, 0.0
    for inputs, labels in data.batches(64):
        logits = model(**inputs).logits.double()
        right += int((logits.argmax(1) == labels).sum())
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return right / len(data), loss / len(data)


def fisher(model: nn.Module, data: Texts, count: int, seed: int) -> Weights:
    """Σ_i g_i², g_i with a label drawn from the model; from ``count`` texts, scaled to all."""
    model.eval()
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in names.items()}
    generator = torch.Generator().manual_seed(seed)
    chosen = data.first(count)
    for inputs, _ in chosen.batches(1):
        logits = model(**inputs).logits
        label = torch.multinomial(logits[0].detach().softmax(0), 1, generator=generator)
        loss = F.cross_entropy(logits, label)
        for name, g in zip(names, torch.autograd.grad(loss, list(names.values())), strict=True):
            total[name].addcmul_(g, g)
    return {n: t * (len(data) / len(chosen)) for n, t in total.items()}


def learned_precision(optimizer: Any, model: nn.Module, data: Texts, recipe: Recipe) -> Weights:
    """The data part of what the optimizer knows: N·h of IVON, N·B·v̂ of AdamW."""
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if isinstance(optimizer, blr.IVON):
        return {n: len(data) * optimizer.state[p]["hess"] for n, p in names.items()}
    scale, beta2 = len(data) * recipe.batch_size, optimizer.param_groups[0]["betas"][1]
    found = {}
    for name, p in names.items():
        state = optimizer.state[p]
        found[name] = state["exp_avg_sq"] * (scale / (1 - beta2 ** float(state["step"])))
    return found


def folder(seed: int, how: str, domain: str) -> Path:
    """Where one fine-tune is kept."""
    return store.root() / "merging" / f"seed{seed}" / how / domain


def read(seed: int, how: str, domain: str, recipe: Recipe) -> store.Stored | None:
    """A fine-tune of this recipe; None where there is none."""
    return store.read(folder(seed, how, domain) / "model.safetensors", recipe.hash(how))


def read_precision(seed: int, how: str, domain: str, kind: str) -> Weights:
    """The data part of a fine-tune's precision."""
    return storage.read(folder(seed, how, domain) / kind)[0]


def training_texts(domain: str, seed: int, recipe: Recipe) -> Texts:
    """What a model is trained on; joint training takes as many texts of every domain, shuffled."""
    if domain in DOMAINS or domain == THEN:
        return texts(GONE if domain == THEN else domain, seed, recipe)["train"]
    kept = [d for d in DOMAINS if domain == JOINT or d != GONE]
    parts = [texts(d, seed, recipe)["train"].first(recipe.n_train) for d in kept]
    every = Texts([ids for p in parts for ids in p.ids], torch.cat([p.labels for p in parts]))
    return every.chosen(shuffled(len(every), torch.Generator().manual_seed(seed)))


def make(seed: int, how: str, domain: str, recipe: Recipe) -> dict[str, Any]:
    """Train one model, find its precisions, keep both; its record."""
    begun = time.perf_counter()
    model = new_model(seed)
    start = STARTS.get(domain, BASE)
    if start is not None:
        found = read(seed, how, start, recipe)
        assert found is not None, f"{start} of seed {seed} comes first"
        load(model, found.tensors)
    data = training_texts(domain, seed, recipe)
    if domain == THEN:
        mixed = training_texts(JOINT, seed, recipe)
        _keep(seed, how, JOINT, "fisher", fisher(model, mixed, recipe.n_fisher, seed), len(mixed))
    optimizer = fit(model, data, recipe, how, seed, first=domain == BASE)
    record: dict[str, Any] = {"hash": recipe.hash(how), "n_data": len(data)}
    record["seconds"] = time.perf_counter() - begun
    record["train_loss"] = evaluate(model, data.first(400))[1]
    held = texts(domain if domain in DOMAINS else BASE, seed, recipe)["validation"]
    record["accuracy"], record["loss"] = evaluate(model, held)
    if domain in DOMAINS:
        kind = "adam_v" if how == "adamw" else "ivon"
        _keep(seed, how, domain, kind, learned_precision(optimizer, model, data, recipe), len(data))
    if how == "adamw" and domain not in (JOINT, WITHOUT):
        found = fisher(model, data, recipe.n_fisher, seed)
        _keep(seed, how, domain, "fisher", found, len(data))
    store.write(folder(seed, how, domain) / "model.safetensors", trained_weights(model), record)
    return record


def _keep(seed: int, how: str, domain: str, kind: str, precision: Weights, n_data: int) -> None:
    """Write a precision, the data part alone, beside its model."""
    record = {"kind": "fisher_mc" if kind == "fisher" else kind, "n_data": n_data}
    record |= {"prior_precision": 0.0, "structure": "diag"}
    storage.write(folder(seed, how, domain) / kind, precision, record)


def run(seeds: list[int], recipe: Recipe, hows: tuple[str, ...] = tuple(PRECISIONS)) -> None:
    """Make whatever is missing."""
    for seed in seeds:
        for how, domain in (job for job in JOBS if job[0] in hows):
            path = folder(seed, how, domain) / "model.safetensors"
            if store.record_of(path, recipe.hash(how)) is None:
                record = make(seed, how, domain, recipe)
                said = {k: round(v, 3) for k, v in record.items() if k != "hash"}
                print(f"seed {seed}, {how}, {domain}: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--how", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    torch.set_num_threads(1)
    chosen = parser.parse_args()
    run(chosen.seeds, Recipe(), tuple(chosen.how))


if __name__ == "__main__":
    main()
