"""``blr-analysis fisher``: the precision of a fine-tuned model from its data, for merging.

Modules that only this command needs are imported inside it, so that the others start faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blr_analysis.cli.options import Base, Shared, option, show_forecast
from blr_analysis.terminal import Teller, pairs

if TYPE_CHECKING:  # torch is loaded by the commands that compute
    from blr_analysis.huggingface.fisher import FisherResult


OF_DATA = "How DATA is read"
OF_PRECISION = "The precision"


def fisher(
    *,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="The folder of a fine-tuned model with its tokenizer (in safetensors), "
            "or of an adapter.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="The data that it was fine-tuned on: .jsonl, .csv, .tsv, .parquet, or "
            ".txt with a text per line.",
            show_default=False,
        ),
    ],
    base: Base = None,
    text: Annotated[
        list[str] | None,
        option(
            "COLUMN",
            "The column with the texts; give it twice for pairs. If left out: a usual "
            "name (text, sentence, sentence1 and sentence2, ...).",
            panel=OF_DATA,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("PATH", "Where to write. If left out: MODEL/precision.", "--out", "-o"),
    ] = None,
    bfloat16: Annotated[
        bool,
        typer.Option(
            "--bfloat16",
            help="Store bfloat16, which takes half the bytes of float32.",
            rich_help_panel=OF_PRECISION,
        ),
    ] = False,
    kind: Annotated[
        str,
        typer.Option(
            help="mc: the Fisher with labels drawn from the model (DATA needs none). emp: the "
            "empirical Fisher. ggn: exact over the classes (not for language models).",
            rich_help_panel=OF_PRECISION,
        ),
    ] = "mc",
    structure: Annotated[
        str,
        typer.Option(
            help="diag; kron: Kronecker factors of each layer; gram: second moments of "
            "each layer's inputs, from forward passes alone (--kind has no effect).",
            rich_help_panel=OF_PRECISION,
        ),
    ] = "diag",
    samples: Annotated[
        int,
        typer.Option(
            help="Labels to draw for each example, with mc.", rich_help_panel=OF_PRECISION
        ),
    ] = 1,
    label: Annotated[
        str | None,
        option("COLUMN", "The column with the labels. If left out: a usual name.", panel=OF_DATA),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="classification or causal_lm. If left out: what the model's configuration says.",
            rich_help_panel=OF_DATA,
        ),
    ] = None,
    examples: Annotated[
        int | None,
        option(
            "M", "Use M random examples of the N; the sum is scaled by N/M.", panel=OF_PRECISION
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        option(
            "TOKENS",
            "Read this many tokens of a text. If left out: as many as the model reads, "
            "at most 512.",
            panel=OF_DATA,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the examples and labels that are drawn.", rich_help_panel=OF_PRECISION
        ),
    ] = 0,
    shared: Shared,
) -> dict[str, Any]:
    """Measure from data how sure a fine-tuned model is of each weight: its precision.

      blr-analysis fisher ./ft1 train.csv

    MODEL is the folder of a text classifier or a language model. DATA is what it was fine-tuned
    on. For pairs of texts, name two columns:

      blr-analysis fisher ./ft1 train.jsonl --text premise --text hypothesis

    The command writes MODEL/precision, where blr-analysis merge finds it. --kind mc draws labels
    from the model, so that DATA needs none. emp takes the labels of DATA. ggn is mc without the
    noise of drawing, for classifiers with few labels.

    --json prints kind, tensors, parameters, zeros, n_data, examples, truncated, max_length,
    seconds, folder.
    """
    import torch

    from blr_analysis.huggingface.fisher import fisher as compute_fisher
    from blr_analysis.huggingface.fisher import fisher_cost

    say = Teller()
    say(f"loading {model}")
    settings: dict[str, Any] = {
        "base": base,
        "kind": kind,
        "structure": structure,
        "samples": samples,
        "text": text or None,
        "label": label,
        "task": task,
        "examples": examples,
        "max_length": max_length,
        "seed": seed,
        "device": shared.device or "cpu",
        "dtype": torch.bfloat16 if bfloat16 else None,
    }
    if shared.dry_run:
        return show_forecast(fisher_cost(model, data, **settings))
    result = compute_fisher(
        model, data, out=out, force=shared.force, memory_budget=shared.memory, **settings
    )
    say("done")
    show_fisher(result)
    return vars(result)


def show_fisher(result: FisherResult) -> None:
    """Print what was computed and where it was written, a line each."""
    n_data = f"{result.n_data:,}"
    if result.examples != result.n_data:
        n_data += f" ({result.examples:,} used, scaled)"
    if result.truncated:
        n_data += (
            f"; {result.truncated:,} texts were cut to {result.max_length} tokens (--max-length)"
        )
    pairs(
        {
            "kind": result.kind,
            "tensors": f"{result.tensors:,}",
            "parameters": f"{result.parameters:,}, {result.zeros:.1%} of them exactly 0",
            "n_data": n_data,
            "seconds": f"{result.seconds:.1f}",
            "written": result.folder,
            "next": "blr-analysis merge recipe.yml OUT",
        }
    )
