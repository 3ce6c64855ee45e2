"""``blr-analysis fisher``: the precision of a fine-tuned model from its data, for merging. What
only this command needs is imported inside of it, so that no other pays for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from blr_analysis.cli.options import Base, Shared, show_forecast, takes
from blr_analysis.terminal import Teller, pairs


@takes("huggingface/fisher.py", "fisher", "kind", "structure", "samples", "label", "task")
@takes("huggingface/fisher.py", "fisher", "examples", "max_length", "seed")
def fisher(
    shared: Shared,
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
    base: Base = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="The text's column; twice for pairs. Otherwise by its usual names (text, "
            "sentence, sentence1 and sentence2, ...).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="PATH", help="Where to write; else MODEL/precision."),
    ] = None,
    half: Annotated[
        bool, typer.Option("--bfloat16", help="Store half the bytes; else float32.")
    ] = False,
    **how: Any,
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
    dtype = torch.bfloat16 if half else None
    how |= {"base": base, "text": text or None, "device": shared.device or "cpu", "dtype": dtype}
    if shared.dry_run:
        show_forecast(fisher_cost(model, data, **how))
        return
    how |= {"out": out, "force": shared.force, "memory_budget": shared.memory}
    result = compute(model, data, **how)
    say("done")
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
