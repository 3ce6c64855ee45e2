"""``blr-analysis fisher``: the precision of a fine-tuned model from its data, for merging. What
only this command needs is imported inside of it, so that no other pays for it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import DryRun, read_size, show_forecast
from blr_analysis.terminal import Teller, pairs

if TYPE_CHECKING:
    from blr_analysis.huggingface.fisher import FisherResult


Kind = StrEnum("Kind", "mc emp ggn")
Shape = StrEnum("Shape", "diag gram kron")
ModelTask = StrEnum("ModelTask", {"classification": "classification", "causal_lm": "causal-lm"})
StoredDtype = StrEnum("StoredDtype", "float32 bfloat16")


def fisher(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A folder with a fine-tuned model and its tokenizer, in safetensors; or with an "
            "adapter.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="What it was fine-tuned on: .jsonl, .csv, .tsv, .parquet, or .txt with a text "
            "per line.",
            show_default=False,
        ),
    ],
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="An adapter's base, unless its configuration names a folder here."
        ),
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="mc: the Fisher, with labels drawn from the model; emp: the empirical Fisher, "
            "with the labels of the data; ggn: as mc, exact, for classifiers (a backward pass for "
            "every label but one: see --dry-run)."
        ),
    ] = Kind.mc,
    structure: Annotated[
        Shape,
        typer.Option(
            help="diag: a number per weight; gram: second moments of the layers' inputs, by "
            "forward passes alone (RegMean); kron: Kronecker factors of inputs and gradients."
        ),
    ] = Shape.diag,
    samples: Annotated[
        int, typer.Option(metavar="K", min=1, help="Labels drawn per example, for --kind mc.")
    ] = 1,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="The text's column; twice for pairs. Otherwise by its usual names (text, "
            "sentence, sentence1 and sentence2, ...).",
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The label's column, for --kind emp; the others need none.",
        ),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            metavar="M", min=1, help="Use M random examples, and scale the sum to all of them."
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            min=1,
            help="Tokens read of a text; otherwise what the model reads, at most 512.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of labels and examples.")] = 0,
    task: Annotated[
        ModelTask | None,
        typer.Option(help="Where the model's configuration does not say what it is."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="PATH", help="Where to write; otherwise MODEL/precision."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a precision that is already there.")
    ] = False,
    dtype: Annotated[
        StoredDtype, typer.Option(help="Of the numbers on disk.")
    ] = StoredDtype.float32,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where to compute: cpu, cuda, mps.")
    ] = "cpu",
    max_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Of the passes over the data. On top come the model, the sum, and the check of "
            "the first gradients, some 20 bytes per parameter in all; one example is taken "
            "whatever it needs.",
        ),
    ] = "256MiB",
    dry_run: DryRun = False,
) -> None:
    """The precision of a fine-tuned model, from its data: what a merge weighs it by.

    MODEL is a folder as save_pretrained leaves it, with a sequence classifier or a causal language
    model; DATA is what it was fine-tuned on:

      blr-analysis fisher ./ft1 train.csv
      blr-analysis fisher ./ft1 train.jsonl --text premise --text hypothesis
      blr-analysis fisher ./ft1 train.parquet --examples 2000 --samples 4
      blr-analysis fisher ./ft1 train.csv --kind emp --label sentiment
      blr-analysis fisher ./llm corpus.txt --max-length 256 --out PRECISION

    Writes MODEL/precision, which blr-analysis merge finds there: for every weight the sum over all
    examples of its squared gradients, each example by itself. With --kind mc, the Fisher, labels
    are drawn from the model's own predictions, so that DATA needs none; --kind ggn is the same
    without the noise of drawing, for classifiers with few labels; --kind emp takes the labels of
    DATA.

    Sums, not averages: the record beside the numbers says n_data, and the merge counts on it.
    """
    import torch

    from blr_analysis.huggingface.fisher import fisher as compute
    from blr_analysis.huggingface.fisher import fisher_cost

    say = Teller()
    say(f"loading {model}")
    asked: dict[str, Any] = {
        "kind": str(kind),
        "structure": str(structure),
        "samples": samples,
        "base": base,
        "text": text or None,
        "examples": examples,
        "max_length": max_length,
        "task": None if task is None else str(task).replace("-", "_"),
        "device": device,
        "dtype": torch.bfloat16 if dtype is StoredDtype.bfloat16 else None,
    }
    if dry_run:
        show_forecast(fisher_cost(model, data, **asked))
        return
    result = compute(
        model,
        data,
        **asked,
        label=label,
        seed=seed,
        out=out,
        force=force,
        memory_budget=read_size("--max-memory", max_memory),
    )
    say("done")
    show_result(result)


def show_result(result: FisherResult) -> None:
    """What was computed and where it lies, a line each."""
    used = "" if result.examples == result.n_data else f" ({result.examples:,} used, scaled)"
    if result.truncated:
        most = f"{result.max_length} tokens (--max-length)"
        used += f"; {result.truncated:,} texts were cut to {most}"
    pairs(
        {
            "kind": result.kind,
            "tensors": f"{result.tensors:,}",
            "parameters": f"{result.parameters:,}, {result.zeros:.1%} of them exactly 0",
            "n_data": f"{result.n_data:,}{used}",
            "seconds": f"{result.seconds:.1f}",
            "written": result.folder,
            "next": "blr-analysis merge recipe.yml OUT",
        }
    )
