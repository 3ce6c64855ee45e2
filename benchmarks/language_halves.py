"""Does influence tell what a language model would say had it not read half of its texts?

    python -m benchmarks.language_halves train --texts FILE.jsonl --out FOLDER [--device cuda]
                        [--passages 2000] [--halves 32] [--layers 4] [--width 192] [--words 4000]
    python -m benchmarks.language_halves score --out FOLDER [--peer NAME=SCORES.safetensors ...]
                                              [--row NAME ...]

``train``: a Llama learns to read passages from nothing, for every seed, and 32 times
more without a random half of them. ``score``: the **linear datamodeling score**, for each held-out
passage Spearman's correlation over the halves of its true loss (the mean over the seeds) with
minus the sum of the influences of the passages in the half; the mean over held-out passages, ± a
standard error from resampling them. Influence is of the first seed's model. A peer's scores are
``[N, M]`` under the name ``scores``, positive where i helps j. The last row predicts one seed's
losses by another's: what no estimate can be expected to pass.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

M, TOKENS = 100, 64
EPOCHS, BATCH, RATE, DECAY = 12, 32, 2e-3, 0.01


def model_of(seed: int, layers: int, width: int, words: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=6,
            tie_word_embeddings=True,
            use_cache=False,
            max_position_embeddings=TOKENS,
        )
    )


def passages(texts: str, n: int, words: int) -> Tensor:
    """``[n + M, T]`` of the most frequent words, by their rank; 0: any other."""
    with open(texts, encoding="utf-8") as file:
        lines = [json.loads(line)["text"].lower().split()[:TOKENS] for line in file]
    lines = [line for line in lines if len(line) == TOKENS]
    chosen = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))[: n + M]
    held = [lines[i] for i in chosen]
    counts: dict[str, int] = {}
    for line in held:
        for word in line:
            counts[word] = counts.get(word, 0) + 1
    known = sorted(counts, key=lambda word: (-counts[word], word))[: words - 1]
    places = {word: k for k, word in enumerate(known, start=1)}
    return torch.tensor([[places.get(word, 0) for word in line] for line in held])


def losses(model: Any, ids: Tensor) -> Tensor:
    """The summed loss of every passage, ``[B]``."""
    logits = model(input_ids=ids).logits[:, :-1].float()
    each = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    return each.sum(1)


def trained(model: Any, ids: Tensor, seed: int) -> Any:
    model = model.to(ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    steps = EPOCHS * (-(-len(ids) // BATCH))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(ids), generator=generator).to(ids.device).split(BATCH):
            optimizer.zero_grad()
            (losses(model, ids[rows]).mean() / TOKENS).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.eval()


def halves(count: int, n: int) -> Tensor:
    """``[count, n]``: which passages are in each."""
    generator = torch.Generator().manual_seed(1)
    chosen = [torch.randperm(n, generator=generator)[: n // 2] for _ in range(count)]
    return torch.stack([torch.zeros(n, dtype=torch.bool).scatter(0, c, True) for c in chosen])


def train(ids: Tensor, inside: Tensor, out: Path, seed: int, shape: tuple[int, int, int]) -> None:
    """The model of all passages, and one of each half that ``out`` does not have yet."""
    own, held_out = ids[:-M], ids[-M:]
    if not seed:
        save_file({"ids": ids.cpu(), "inside": inside.cpu()}, out / "data.safetensors")
    start, fit, file = time.perf_counter(), math.nan, out / f"losses-{seed}.safetensors"
    rows = list(load_file(file)["losses"]) if file.is_file() else []
    for k in range(len(rows) - 1, len(inside)):
        model = trained(model_of(seed, *shape), own if k < 0 else own[inside[k]], seed)
        with torch.no_grad():
            rows.append(losses(model, held_out).cpu())
            if k < 0:
                fit = float(losses(model, own).mean()) / (TOKENS - 1)
                model.save_pretrained(out / f"model-{seed}")
        save_file({"losses": torch.stack(rows)}, file)
        print(f"seed {seed} half {k}: {time.perf_counter() - start:.0f} s", flush=True)
    full = float(rows[0].mean()) / (TOKENS - 1)
    half = float(torch.stack(rows[1:]).mean()) / (TOKENS - 1)
    print(f"seed {seed}: nats a word {fit:.2f} read, {full:.2f} held out, {half:.2f} of halves")


def ranks_of(x: Tensor) -> Tensor:
    return x.argsort(0).argsort(0).double()


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Column by column."""
    a, b = ranks_of(a), ranks_of(b)
    return torch.corrcoef(torch.cat([a, b], 1).mT)[: a.shape[1], a.shape[1] :].diagonal()


def score(out: Path, peers: list[str], only: list[str] | None = None) -> None:
    import transformers

    import blr_analysis as blr

    data = load_file(out / "data.safetensors")
    ids, inside = data["ids"], data["inside"].double()
    files = sorted(out.glob("losses-*.safetensors"))
    found = [load_file(file)["losses"][1:].double() for file in files]
    each = torch.stack([rows[: min(map(len, found))] for rows in found])
    truth, inside = each.mean(0), inside[: each.shape[1]]
    model = transformers.LlamaForCausalLM.from_pretrained(out / "model-0").eval()
    model.config.use_cache = False

    def task_of(ids: Tensor) -> Any:
        def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
            return model(input_ids=batch[0], use_cache=False).logits, batch[1]

        return blr.Task(model, (ids, ids), likelihood="causal_lm", forward=forward)

    task, test = task_of(ids[:-M]), task_of(ids[-M:])
    quiet: dict[str, Any] = {"progress": False}

    def kept(structure: str) -> Any:
        return blr.fit_laplace(task, structure=structure, curvature="mc_fisher", **quiet)

    flat = blr.Posterior(
        {n: p.detach() for n, p in model.named_parameters()},
        {n: torch.ones_like(p) for n, p in model.named_parameters()},
        prior_precision=1.0,
        n_data=task.n_data,
    )
    rows: dict[str, Callable[[], Tensor]] = {
        "gradient cosine": lambda: (
            blr.influence(task, flat, test, normalize="cosine", **quiet).matrix
        ),
        "influence, diag": lambda: blr.influence(task, kept("diag"), test, **quiet).matrix,
        "influence, kron": lambda: blr.influence(task, kept("kron"), test, **quiet).matrix,
        "influence, kron, last errors": lambda: (
            blr.influence(task, kept("kron"), test, solver="posterior", **quiet).matrix
        ),
        **{
            name: (lambda place=place: load_file(place)["scores"])
            for name, place in (peer.rsplit("=", 1) for peer in peers)
        },
    }
    rows = {name: run for name, run in rows.items() if not only or name in only}
    print(f"{len(files)} seeds, {len(inside)} halves of {task.n_data:,} passages, {M} held out\n")
    print("| | linear datamodeling score | seconds of CPU |\n|---|---|---|")

    def printed(name: str, predicted: Tensor, seconds: str) -> None:
        found = spearman(predicted, truth)
        error = float(found.std()) / len(found) ** 0.5
        print(f"| {name} | {float(found.mean()):.3f} ± {error:.3f} | {seconds} |", flush=True)

    for name, run in rows.items():
        start = time.process_time()
        values = run().double()
        printed(name, -inside @ values, f"{time.process_time() - start:.0f}")
    others = each[1:].mean(0) if len(each) > 1 else each[0]
    found = spearman(each[0], others)
    print(f"| one seed's losses, of the others' | {float(found.mean()):.3f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language_halves")
    parser.add_argument("what", choices=["train", "score"])
    parser.add_argument("--texts", help="a .jsonl file with a text per line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--halves", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", action="append", default=[], help="NAME=SCORES.safetensors")
    parser.add_argument("--row", action="append", help="by name; default: all")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.what == "train":
        args.out.mkdir(parents=True, exist_ok=True)
        ids = passages(args.texts, args.passages, args.words)
        inside = halves(args.halves, args.passages)
        train(
            ids.to(args.device),
            inside.to(args.device),
            args.out,
            args.seed,
            (args.layers, args.width, args.words),
        )
    else:
        score(args.out, args.peer, args.row)


if __name__ == "__main__":
    main()
