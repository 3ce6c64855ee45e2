"""What an audit of a language model costs, in training passes and in loops written by hand.

    python -m benchmarks.language [--quick] [--threads 2] [--model FOLDER] [--dtype bfloat16]
                                  [--texts FILE.jsonl] [--tokens 105] [--rows "search 2048" ...]

A **training pass** is a forward and a backward pass that leaves ∂(loss)/∂θ in ``p.grad``, over
batches of one or of eight sequences, whichever takes less; a **gradient pass** is the same one
sequence at a time. Times are CPU seconds of the process (user and system, all threads), the least
of ``--repeats`` runs, peak memory that of the process. Every row runs in a process of its own.
"by hand" and "influence" of 32 queries are of each gradient formed, theirs too; "plan" of each of
its three sequences. Without ``--model``, a Llama of 6 layers, 256 wide, over 8,000 words, tied,
with random weights; sequences of ``--tokens`` tokens, random ones without ``--texts``.

``index K`` stores K numbers of every sequence, in two bytes each: its row is the pass over the data
alone; the rest of a build does not grow with them. ``recall`` is the share of the exact ten most
helpful sequences of each of 32 questions that are among the index's ten; ``among 30`` those that
``refine=30`` finds. ``search K`` is one
question to 100,000 synthetic rows of K numbers, after its own gradient, the files read before: the
ten most helpful, beside the most harmful, which none is like the question, and files that are
read from disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

QUERIES = 32
PROBE = 3  # sequences of the plan's check


def load(folder: str | None, dtype: torch.dtype) -> Any:
    """The folder's model, or the small Llama."""
    import transformers

    if folder:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(dtype).eval()


def ids_of(model: Any, n: int, seed: int, texts: str | None, tokens: int) -> Tensor:
    """n sequences of random tokens; or the first tokens of every line of ``texts``, from line
    1,000 · ``seed`` on."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (n, tokens), generator=g)
    if texts is not None:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(model.config.name_or_path)
        with open(texts, encoding="utf-8") as file:
            lines = [json.loads(line)["text"] for line in file]
        held = [tokenizer(line)["input_ids"][:tokens] for line in lines]
        held = [row for row in held if len(row) == tokens]
        ids = torch.tensor([held[i % len(held)] for i in range(seed * 1000, seed * 1000 + n)])
    return ids


def task_of(model: Any, n: int, seed: int, texts: str | None, tokens: int) -> Any:
    import blr_analysis as blr

    ids = ids_of(model, n, seed, texts, tokens)
    model.config.use_cache = False
    return blr.Task(model, (ids, ids), likelihood="causal_lm", forward=forward, batch_size=8)


def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model(input_ids=batch[0], use_cache=False).logits, batch[1]


def backward(task: Any, batch: Any) -> None:
    """Gradients of the summed loss in ``p.grad``."""
    outputs, labels = task.forward(task.model, batch)
    flat = outputs[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    torch.nn.functional.cross_entropy(*flat, reduction="sum").backward()


def training(task: Any, size: int) -> None:
    for _, batch in task.batches(size):
        task.model.zero_grad()
        backward(task, batch)


def by_hand(task: Any, test: Any, precision: dict[str, Tensor]) -> Tensor:
    """The ten-line loop: influence on preconditioned queries, one gradient at a time."""
    rows = []
    parameters = dict(task.model.named_parameters())
    held = {n: torch.empty(test.n_data, *p.shape) for n, p in parameters.items()}
    for k, batch in test.batches(1):
        task.model.zero_grad()
        backward(task, batch)
        for n, p in parameters.items():
            torch.div(p.grad, precision[n], out=held[n][k[0]])
    for _, batch in task.batches(1):
        task.model.zero_grad()
        backward(task, batch)
        shares = [held[n].flatten(1) @ p.grad.flatten().to(held[n]) for n, p in parameters.items()]
        rows.append(torch.stack(shares).sum(0))
    return torch.stack(rows)


def measured(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """CPU and wall seconds, the least of some runs."""
    cpu, wall = [], []
    for _ in range(repeats):
        start = time.process_time(), time.perf_counter()
        run()
        cpu.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return {"cpu": min(cpu), "wall": min(wall)}


def one(what: str, args: argparse.Namespace) -> dict[str, float]:
    """One row: seconds per sequence."""
    import blr_analysis as blr
    from blr_analysis.posterior import Posterior

    dtype = getattr(torch, args.dtype)
    if what.startswith("search"):
        return search(int(what.split()[1]), args.repeats)
    model = load(args.model, dtype)
    task = task_of(model, args.sequences, 0, args.texts, args.tokens)

    def posterior(task: Any) -> Any:
        precision = {n: torch.full_like(p, 2.0, dtype=torch.float32) for n, p in mean.items()}
        return Posterior(mean, precision, prior_precision=1.0, n_data=task.n_data)

    mean = {n: p.detach().float() for n, p in model.named_parameters()}
    quiet: dict[str, Any] = {"progress": False}
    if what == "nothing":
        return {"cpu": 0.0, "wall": 0.0}
    if what.startswith("training"):
        del mean
        size = int(what.split()[1])
        return measured(lambda: training(task, size), args.repeats)
    if what == "by hand":
        precision = {n: torch.full_like(p, 2.0) for n, p in mean.items()}
        test = task_of(model, QUERIES, 1, args.texts, args.tokens)
        return measured(lambda: by_hand(task, test, precision), args.repeats)
    if what == "plan":
        from blr_analysis.backprop.plan import plan_for

        def fresh() -> None:
            task.plans.clear()
            plan_for(task, mean)

        return measured(fresh, args.repeats)
    if what.startswith("fit_laplace"):
        kind: dict[str, Any] = {"structure": what.split()[1], "curvature": "mc_fisher"}
        blr.fit_laplace(task.subset([0, 1]), prior_precision=1.0, **kind, **quiet)
        from blr_analysis.backprop.plan import plan_for

        plan_for(task, mean)
        return measured(
            lambda: blr.fit_laplace(task, prior_precision=1.0, **kind, **quiet), args.repeats
        )
    if what == "fisher":
        from blr_analysis.backprop.plan import plan_for
        from blr_analysis.huggingface.diagonals import fisher_diagonal

        plan_for(task, mean)
        lengths = [args.tokens] * args.sequences
        return measured(lambda: fisher_diagonal(task, lengths=lengths, **quiet), args.repeats)
    if what.startswith("index"):
        asked = task_of(model, QUERIES, 1, args.texts, args.tokens)
        return index(task, asked, int(what.split()[1]))
    q = posterior(task)
    if what == "sensitivity":
        from blr_analysis.backprop.plan import plan_for

        plan_for(task, q.mean)
        return measured(lambda: blr.sensitivity(task, q, **quiet), args.repeats)
    if what == "influence":
        from blr_analysis.backprop.plan import plan_for

        plan_for(task, q.mean)
        test = task_of(model, QUERIES, 1, args.texts, args.tokens)
        return measured(lambda: blr.influence(task, q, test, **quiet), args.repeats)
    raise SystemExit(f"no row {what!r}")


def index(task: Any, questions: Any, rank: int) -> dict[str, float]:
    """The pass that stores every sequence under a Kronecker posterior, and what it recalls."""
    import tempfile

    import blr_analysis as blr
    from blr_analysis.backprop.engine import QUIET
    from blr_analysis.sensitivity.influence.index import _each, _joined, _stored

    quiet: dict[str, Any] = {"progress": False}
    q = blr.fit_laplace(task, structure="kron", curvature="mc_fisher", **quiet)
    with tempfile.TemporaryDirectory() as folder:
        built = blr.Index.build(task, q, f"{folder}/index", rank=rank, **quiet)
        kept = built._compression
        order, roots = torch.arange(task.n_data), kept.roots(q)

        def files() -> None:
            each = _each(task, q, kept, roots, QUIET, order)
            _joined(_stored(kept, each, torch.float16), order, False)

        row = measured(files, 1)
        exact = blr.influence(task, q, questions, k=10, **quiet).helpful
        found = built.top(questions, 30, **quiet).helpful
        for name, best in {"recall": found[:, :10], "of_30": found}.items():
            pairs = zip(best.tolist(), exact.tolist(), strict=True)
            row[name] = sum(len(set(a) & set(b)) for a, b in pairs) / exact.numel()
        return {**row, "error": built.error.relative_rms}


def search(rank: int, repeats: int) -> dict[str, float]:
    """One question to 100,000 synthetic rows, of which 200 are like it by cosines up to 0.3."""
    import os
    import tempfile
    from pathlib import Path

    from safetensors.torch import save_file

    from blr_analysis.sensitivity import Index
    from blr_analysis.sensitivity.influence import compressed as kept_as
    from blr_analysis.sensitivity.influence.index import MORE, _files

    def places(count: int, each: int) -> Tensor:
        """Of blocks, of a model of as many numbers as the small Llama's."""
        return torch.randint(100_000, (count, each), dtype=torch.int32)

    n, like, cosines = 100_000, 500, 0.3
    blocks = rank // 2 // kept_as.HELD  # a quarter of the room, as where words are trained
    signs = 8 * (2 * rank - kept_as.HELD * blocks) // kept_as.MIX * kept_as.MIX
    kept, question = kept_as.Compression(signs, True, signs, blocks), torch.randn(1, signs)
    question /= question.norm()
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in _files(n).items():
            bits = torch.randint(256, (len(rows), signs // 8), dtype=torch.uint8)
            for row in (rows % like == 0).nonzero().flatten().tolist():
                rho = cosines * float(torch.rand(()))
                z = rho * question[0] + (1 - rho**2) ** 0.5 * torch.randn(signs) / signs**0.5
                bits[row] = torch.from_numpy(np.packbits(z.numpy() > 0))
            apart = {"first": bits[:, : kept.first // 8].contiguous()} if kept.first else {}
            stored = {
                **apart,
                "gradients": bits[:, kept.first // 8 :].contiguous(),
                "blocks": torch.randint(
                    1, 16, (len(rows), blocks, kept_as.BLOCK // 2), dtype=torch.uint8
                ).mul_(17),
                "units": torch.rand(len(rows), blocks) / 1e5,
                "places": places(len(rows), blocks),
                "length": torch.ones(len(rows)),
            }
            save_file(stored, f"{folder}/{name}")
        index = object.__new__(Index)
        known = {"path": Path(folder), "n_data": n, "numbers": signs, "signs": True, "_sums": signs}
        for name, value in {**known, "_blocks": blocks, "self_influence": torch.ones(n)}.items():
            object.__setattr__(index, name, value)
        asked = kept_as.Compressed(
            question,
            torch.ones(1),
            torch.randn(1, MORE * blocks, kept_as.BLOCK) / 1e2,
            places(1, MORE * blocks).long(),
        )

        def forget() -> None:
            os.sync()
            for file in Path(folder).iterdir():
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def timed(harmful: bool, cold: bool = False) -> float:
            if cold:
                forget()
            start = time.perf_counter()
            index._best(asked, 10, False, harmful=harmful)
            return time.perf_counter() - start

        index._best(asked, 10, False)
        row = measured(lambda: index._best(asked, 10, False, harmful=False), repeats)
        return {**row, "both": min(timed(True) for _ in range(repeats)), "cold": timed(False, True)}


ROWS = (
    "training 1",
    "training 8",
    "by hand",
    "plan",
    "fisher",
    "fit_laplace diag",
    "sensitivity",
    "influence",
    "fit_laplace kron",
    "index 32768",
    "search 2048",
    "search 32768",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.language", description=__doc__)
    parser.add_argument("--model", help="a folder of a causal language model")
    parser.add_argument("--texts", help="a .jsonl file with a text per line, for --model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=105, help="of a sequence")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="16 sequences, once")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.sequences, args.repeats = min(args.sequences, 16), 1
    torch.set_num_threads(args.threads)
    if args.row:
        row = one(args.row, args)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(json.dumps({**row, "peak_mb": peak}))
        return
    found: dict[str, dict[str, float]] = {}
    options = [
        f"--{k}={getattr(args, k)}" for k in ("dtype", "sequences", "tokens", "repeats", "threads")
    ]
    options += [f"--model={args.model}"] if args.model else []
    options += [f"--texts={args.texts}"] if args.texts else []
    for row in args.rows:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.language", "--row", row]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode:
            print(f"{row}: {done.stderr.strip().splitlines()[-1]}")
            continue
        found[row] = json.loads(done.stdout.splitlines()[-1])
    passes = [found[r]["cpu"] for r in found if r.startswith("training")]
    best, each = min(passes, default=1.0), found.get("training 1", {}).get("cpu", 1.0)
    print(
        f"{'':<18}{'ms/sequence':>12}{'training passes':>17}{'gradient passes':>17}{'peak MB':>9}"
    )
    for row, numbers in found.items():
        cpu = numbers["cpu"]
        if row.startswith("search"):
            print(
                f"{row:<18}{numbers['wall']:.2f} s, {cpu:.2f} of CPU, a question to 100,000 rows; "
                f"with harmful ones {numbers['both']:.2f} s; from disk {numbers['cold']:.2f} s"
            )
            continue
        formed = args.sequences + (QUERIES if row in ("by hand", "influence") else 0)
        count = PROBE if row == "plan" else formed
        scale = args.sequences / count
        print(
            f"{row:<18}{1e3 * cpu / count:>12.1f}{cpu * scale / best:>17.2f}"
            f"{cpu * scale / each:>17.2f}{numbers['peak_mb']:>9.0f}"
            + (
                "  recall {recall:.2f}, among 30 {of_30:.2f}, error {error:.2f}".format(**numbers)
                if "recall" in numbers
                else ""
            )
        )


if __name__ == "__main__":
    main()
