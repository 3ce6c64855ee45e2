"""What an index of an adapter costs on its frozen base, beside the plain loop.

    python -m benchmarks.adapters --shape 4m --texts 2000 --tokens 64       # a CPU, ten minutes
    python -m benchmarks.adapters --shape 7b --targets q_proj,v_proj --device cuda --texts 2000 \\
        --tokens 512                                                        # a card of 80 GB

The plain loop makes one batched forward and backward pass over the same texts, by transformers and
peft alone, eight texts of similar lengths at a time. With ``--mixed`` the texts have many lengths.
Both run in a process of their own; weights are random, so nothing is fetched. Printed are seconds,
start-up aside (on a CPU of the processor, on one thread), and the peak of memory: on a GPU what
torch allocated there, on a CPU the process's. On a GPU the base is in bfloat16. On a CPU there are
two runs, in float32 and in bfloat16, which many CPUs multiply slowly.

The 7B run was not made yet. Expected of one H100: 80 s for the plain loop, 110 s for the index,
30 s for the sweeps of the fit to 256 texts and 3 minutes for 128 eigendecompositions of 4,096
inputs or outputs, in 40 GB: 14 of the base, 9 of the factors, the rest of a chunk. On every linear
layer (the default) the factors alone would take 70 GB: 11 sides of 4,096 and 3 of 11,008 in each of
32 layers.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 512),
    "4m": Shape(256, 704, 4, 4, 4, 4000),
    "30m": Shape(512, 1408, 10, 8, 4, 10_000),
    "135m": Shape(576, 1536, 30, 9, 3, 49_152),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936),
    "7b": Shape(4096, 11_008, 32, 32, 32, 32_000),
}
BATCH = 8
RANK = 16
SPREAD = 0.8  # of the logarithm of mixed lengths
EVERY_LAYER = "all-linear"


def tokenizer(size: int) -> Any:
    """Words w0, w1, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{k}": k for k in range(size)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="w0",
        model_max_length=4096,
        model_input_names=["input_ids", "attention_mask"],
    )


def lengths_of(texts: int, tokens: int, *, mixed: bool) -> list[int]:
    """The tokens of each text: all ``tokens``, or log-normal around it."""
    if not mixed:
        return [tokens] * texts
    draw = random.Random(1)
    drawn = [draw.lognormvariate(math.log(tokens), SPREAD) for _ in range(texts)]
    return [int(min(4 * tokens, max(tokens / 8, length))) for length in drawn]


def write(folder: Path, shape: Shape, lengths: list[int], dtype: torch.dtype, targets: str) -> None:
    """A base of this type, an adapter of rank 16 on the layers ``targets``, and texts."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        pad_token_id=0,
        tie_word_embeddings=shape.hidden < 1024,
    )
    base = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    base.save_pretrained(folder / "base")
    tokenizer(shape.vocabulary).save_pretrained(folder / "base")
    base.config._name_or_path = str(folder / "base")
    adapter = peft.LoraConfig(
        r=RANK,
        target_modules=targets if targets == EVERY_LAYER else targets.split(","),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    peft.get_peft_model(base, adapter).save_pretrained(str(folder / "adapter"))
    settings = folder / "adapter" / "adapter_config.json"
    about = json.loads(settings.read_text())
    about["base_model_name_or_path"] = str(folder / "base")
    settings.write_text(json.dumps(about))
    draw = random.Random(0)
    rows = [
        json.dumps(
            {"text": " ".join(f"w{draw.randrange(1, shape.vocabulary)}" for _ in range(tokens))}
        )
        for tokens in lengths
    ]
    (folder / "texts.jsonl").write_text("\n".join(rows))


def clock(device: str) -> float:
    """Seconds: on a GPU of the clock, on a CPU of the processor, so that other work counts not."""
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def plain(folder: Path, device: str, fit: str) -> float:
    """Seconds of one batched forward and backward pass over the texts."""
    import peft
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    model: Any = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    model = model.to(device).eval()
    read = AutoTokenizer.from_pretrained(folder / "base")
    texts = [json.loads(line)["text"] for line in (folder / "texts.jsonl").open()]
    texts.sort(key=lambda text: len(text.split()))
    started = clock(device)
    for first in range(0, len(texts), BATCH):
        batch = read(texts[first : first + BATCH], return_tensors="pt", padding=True).to(device)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        model.zero_grad()
    return clock(device) - started


def indexed(folder: Path, device: str, fit: str) -> float:
    """Seconds of what ``blr-analysis index`` does, its start aside."""
    import blr_analysis as blr
    from blr_analysis.cli.refinement import ROUGH
    from blr_analysis.huggingface.models import load_language_model
    from blr_analysis.huggingface.questions import language_task
    from blr_analysis.sensitivity.index.rank import smallest_rank_with_error_below

    loaded = load_language_model(str(folder / "adapter"), device=device, dtype="auto")
    task = language_task(loaded, str(folder / "texts.jsonl"), text="text")
    started = clock(device)
    q = blr.fit_laplace(task, structure=fit, curvature="mc_fisher", sampled=True)
    fitted = clock(device)
    rank, error = smallest_rank_with_error_below(ROUGH, task, q)
    ranked = clock(device)
    blr.Index.build(task, q, folder / "INDEX", rank=rank, error=error)
    ended = clock(device)
    print(
        f"fit {fitted - started:.1f} s, rank {rank} in {ranked - fitted:.1f} s (error "
        f"{error.relative_rms:.2f}), index {ended - ranked:.1f} s"
    )
    return ended - started


WAYS = {"plain": plain, "index": indexed}


def peak(device: str) -> float:
    """GiB, at most, of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(way: str, folder: Path, device: str, fit: str) -> tuple[float, float]:
    """Seconds and GiB of one way, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.adapters", "--way", way, "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--device", device, "--fit", fit], check=True, stdout=subprocess.PIPE, text=True
    )
    *words, figures = done.stdout.strip().splitlines()
    for line in words:
        print(line)
    seconds, memory = figures.split()
    return float(seconds), float(memory)


def compare(asked: argparse.Namespace, dtype: str) -> None:
    """Print what both ways take on a base of this type."""
    shape = SHAPES[asked.shape]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = lengths_of(asked.texts, asked.tokens, mixed=asked.mixed)
        write(folder, shape, lengths, getattr(torch, dtype), asked.targets)
        base = sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
        print(f"a base of {base / 2**30:.2f} GiB in {dtype}")
        figures = {way: measured(way, folder, asked.device, asked.fit) for way in WAYS}
        size = sum(f.stat().st_size for f in (folder / "INDEX").rglob("*") if f.is_file())
        posterior = (folder / "INDEX" / "posterior.safetensors").stat().st_size
    for way, (seconds, memory) in figures.items():
        print(f"{way:<8}{seconds:8.1f} s{memory:8.2f} GiB")
    loop_seconds, loop_memory = figures["plain"]
    seconds, memory = figures["index"]
    print(f"ratio   {seconds / loop_seconds:8.2f}  {memory / loop_memory:8.2f}")
    kilobytes = (size - posterior) / asked.texts / 1000
    print(f"disk    {kilobytes:8.1f} kB a text, and {posterior / 1e6:.0f} MB of the posterior")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="30m")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--mixed", action="store_true", help="texts of many lengths")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+")
    parser.add_argument("--fit", choices=("kron", "diag"), default="kron")
    parser.add_argument("--targets", default=EVERY_LAYER, help="or names such as q_proj,v_proj")
    parser.add_argument("--small", action="store_true", help="a tiny model and few texts")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)
    if asked.way:
        seconds = WAYS[asked.way](asked.folder, asked.device, asked.fit)
        print(seconds, peak(asked.device))
        return
    if asked.small:
        asked.shape = "tiny"
        asked.texts = 8
        asked.tokens = 16
    every_dtype = ["bfloat16"] if asked.device == "cuda" else ["float32", "bfloat16"]
    for dtype in asked.dtype or every_dtype:
        compare(asked, dtype)


if __name__ == "__main__":
    main()
