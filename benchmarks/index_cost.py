"""What an index of a language model's texts costs, in batched passes over the same texts.

    python benchmarks/index_cost.py [--texts 200] [--tokens 100] [--width 256] [--layers 6]

A batched pass is forward and backward over all texts, eight at a time; the loop takes one text at
a time. A random Llama of 5 million parameters, random texts. Seconds are of the processor, on one
thread, so that a busy machine does not count; the passes below them are in seconds of the clock.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import blr_analysis as blr
from blr_analysis.progress import profiled

VOCABULARY = 2000
TOGETHER = 8  # texts of a batched pass
RANK = 32768  # numbers of one byte a text, as the command takes them


def llama(width: int, layers: int, tokens: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def passed(model: Any, texts: Tensor, size: int) -> None:
    """Forward and backward over all texts."""
    for ids in texts.split(size):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = llama(args.width, args.layers, args.tokens)
    texts = torch.randint(5, VOCABULARY, (args.texts, args.tokens))
    passed(model, texts[:TOGETHER], TOGETHER)
    _, batched = timed(lambda: passed(model, texts, TOGETHER))
    _, loop = timed(lambda: passed(model, texts, 1))
    rows = [{"input_ids": ids, "labels": ids} for ids in texts]
    task = blr.Task(model, rows, likelihood="causal_lm")
    with profiled() as seconds, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        q, fit = timed(lambda: blr.fit_laplace(task, sampled=True))
        index, building = timed(lambda: blr.Index.build(task, q, path, rank=RANK))
        of_posterior = (path / "posterior.safetensors").stat().st_size
        disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {args.texts} texts of {args.tokens} tokens")
    print(f"a batched pass {batched:.1f} s, the loop {loop / batched:.2f} batched passes")
    print(f"fit {fit / batched:.2f}, index {building / batched:.2f} batched passes; {index.error}")
    kilobytes = (disk - of_posterior) / args.texts / 1000
    print(f"disk {kilobytes:.1f} kB a text, and {of_posterior / 1e6:.0f} MB of the posterior")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"memory {peak:.0f} MB at most, weights {4 * parameters / 1e6:.0f} MB")
    for name, share in seconds.items():
        print(f"  {name}: {share:.1f} s")


if __name__ == "__main__":
    main()
