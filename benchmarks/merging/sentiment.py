"""Six domains of sentiment, one fine-tune each, merged: which method, which precision, how good?

    python -m benchmarks.merging.sentiment [--seeds 3] [--how adamw ivon] [--list] [--out FOLDER]

Makes the fine-tunes that are missing (:mod:`benchmarks.merging.sentiment_train`: about half an hour
of one core for a seed), merges them in memory, and writes ``sentiment.csv`` (a row per seed and
merge), ``mismatch.csv`` (a row per seed, merge and domain) and ``mismatch.png``; the tables are
printed. ``--list`` says what is on disk.

* all-MiniLM-L6-v2 with a new classifier, 10.8 M of its 22.7 M parameters trained (word,
  position and type embeddings are frozen). Base: 2,000 movie snippets; one fine-tune each on
  1,000 texts of Amazon products, NYT editorials, tweets, tweets to airlines, fine-food reviews;
  joint training on 6 × 1,000. Two epochs each. AdamW 1e-4; IVON 0.2 for the base, 0.1 for
  fine-tunes (0.2 diverged on the editorials, by validation texts).
* Learning rates were chosen by the movies' TEST texts, on that domain alone: its column is not
  untouched. 250 test texts of each domain: a standard error of 2 points in a domain, 0.9 in the
  mean.
* Precisions are sums over the training texts: fisher (a label drawn from the model, 300 texts,
  scaled), adam_v (N · B · v̂ with AdamW's v̂), ivon (N · h; "start off" takes off what is left
  of the 10⁵ that IVON starts with). H_0 is the base's, δ = 0. "α best" has the least loss on 50
  validation texts of each domain, of 0.1 to 1.3.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from scipy.stats import spearmanr

from benchmarks.merging import sentiment_train as training
from benchmarks.merging.sentiment_rows import Table, run
from benchmarks.merging.sentiment_train import DOMAINS, TASKS, Recipe

ACCURACIES = [f"accuracy {d}" for d in DOMAINS]
WORDS = {"task_arithmetic": "task arithmetic", "gradient_matching": "gradient matching"}
WORDS |= {"ties": "TIES", "fisher": "Fisher average", "joint": "joint training"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "osD^vP"


def name_of(key: str) -> tuple[str, str, str]:
    """Who trained, which merge, with which precision, of the key of a row."""
    how, method, *rest = key.split("|")
    if not rest:
        return how, WORDS.get(method, method), ""
    if method == "removal":
        removal, alpha, delta = rest
        word = f"minus {training.GONE}: {WORDS[removal]}, α = {alpha.replace('.0', '')}"
        return how, word + (f", δ = {delta}" if removal == "gradient_matching" else ""), ""
    kind, alpha = rest
    word = WORDS.get(method, method)
    if method == "task_arithmetic" and alpha not in ("best", "1.0"):
        return how, "average", ""
    return how, word if method == "fisher" else f"{word}, α {alpha.replace('1.0', '= 1')}", kind


def collected(seeds: list[int], recipe: Recipe) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All rows on disk of these seeds: merges, and mismatches by domain."""
    merges, mismatches = [], []
    for seed in seeds:
        tables = [Table(seed, how, recipe).rows for how in training.PRECISIONS]
        for key, row in (item for rows in tables for item in rows.items()):
            if key == "mismatch":
                for line in row["rows"]:
                    _, merge, precision = name_of(f"adamw|{line['merge']}")
                    line = {**line, "merge": merge, "precision": precision}
                    mismatches.append({"seed": seed, **line})
                continue
            trained, merge, precision = name_of(key)
            where = {"seed": seed, "trained by": trained, "merge": merge, "precision": precision}
            merges.append({**where, **row})
    table = pd.DataFrame(merges)
    if len(table):
        table["all six"] = table[ACCURACIES].mean(axis=1)
        table["the five"] = table[[f"accuracy {d}" for d in TASKS]].mean(axis=1)
        table["loss"] = table[[f"loss {d}" for d in DOMAINS]].mean(axis=1)
    return table, pd.DataFrame(mismatches)


def markdown(table: pd.DataFrame) -> str:
    """Accuracies in per cent, mean ± standard deviation over the seeds."""
    keys = ["trained by", "merge", "precision"]
    columns = {f"accuracy {d}": d for d in DOMAINS} | {"all six": "mean"}
    lines = [
        "| trained by | merge | precision | α | " + " | ".join(columns.values()) + " | loss |",
        "|---|---|---|---|" + "---|" * (len(columns) + 1),
    ]
    for where, part in table.groupby(keys, sort=False):
        shown = [spread(100 * part[c].to_numpy(), 1) for c in columns]
        shown.append(spread(part["loss"].to_numpy(), 3))
        tried = part["alpha"].dropna() if "alpha" in part else part[[]]
        alphas = ", ".join(dict.fromkeys(f"{a:g}" for a in tried))
        lines.append(f"| {' | '.join(map(str, where))} | {alphas} | {' | '.join(shown)} |")
    return "\n".join(lines)


def spread(values: np.ndarray, digits: int) -> str:
    """Mean ± standard deviation; the mean alone of a single seed."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    return f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"


def correlations(mismatches: pd.DataFrame) -> str:
    """Spearman's of gradient mismatch with the gap in training loss, over the merges."""
    lines = ["| domain | Spearman over the merges, by seed |", "|---|---|"]
    for domain in DOMAINS:
        part = mismatches[mismatches.task == domain]
        found = [f"{_spearman(pd.DataFrame(rows)):.2f}" for _, rows in part.groupby("seed")]
        lines.append(f"| {domain} | {', '.join(found)} |")
    keys = ["seed", "merge", "precision"]
    totals = pd.DataFrame(mismatches.groupby(keys)[["mismatch", "gap"]].sum())
    found = [f"{_spearman(rows):.2f}" for _, rows in totals.groupby(level="seed")]
    return "\n".join([*lines, f"| all six, summed | {', '.join(found)} |"])


def _spearman(rows: pd.DataFrame) -> float:
    return float(spearmanr(rows["mismatch"], rows["gap"])[0])  # type: ignore[arg-type]


def picture(mismatches: pd.DataFrame, path: Path) -> None:
    """Gradient mismatch against the gap in loss: by domain, and summed over the domains."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for domain, colour, marker in zip(DOMAINS, COLOURS, MARKERS, strict=False):
        part = mismatches[mismatches.task == domain]
        place = (part.mismatch_per_example, part.gap_per_example)
        left.scatter(*place, s=22, c=colour, marker=marker, alpha=0.8, label=domain, lw=0)
    left.legend(frameon=False, title="domain")
    left.set_title("Each domain and merge", loc="left")
    merges = list(dict.fromkeys(zip(mismatches["merge"], mismatches["precision"], strict=True)))
    keys = ["merge", "precision", "seed"]
    columns = ["mismatch_per_example", "gap_per_example"]
    totals = pd.DataFrame(mismatches.groupby(keys)[columns].mean())
    for number, (merge, precision) in enumerate(merges):
        part = totals.loc[(merge, precision)]
        style = {"c": COLOURS[number % 7], "marker": MARKERS[number // 7 * 2]}
        label = f"{merge}, {precision}" if precision else merge
        place = (part.mismatch_per_example, part.gap_per_example)
        right.scatter(*place, s=36, label=label, lw=0, **style)
    right.legend(frameon=False, fontsize=7.5)
    right.set_title("Each merge, mean over the six domains", loc="left")
    for ax in (left, right):
        ax.set_xlabel("Gradient mismatch, per example")
        ax.set_ylabel("Loss above that of the fine-tune, nats per example")
        ax.axhline(0, color="0.8", lw=0.8, zorder=0)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=150)


def listed(seeds: list[int], recipe: Recipe) -> str:
    """What is on disk."""
    lines = []
    for seed in seeds:
        made = [f"{h} {d}" for h, d in training.JOBS if training.read(seed, h, d, recipe)]
        rows = sum(len(Table(seed, how, recipe).rows) for how in training.PRECISIONS)
        lines.append(f"seed {seed}: {len(made)} of {len(training.JOBS)} fine-tunes, {rows} rows")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    hows = list(training.PRECISIONS)
    parser.add_argument("--how", nargs="+", choices=hows, default=hows, help="who trains")
    parser.add_argument("--list", action="store_true", help="say what is on disk, and stop")
    parser.add_argument("--out", type=Path, default=Path("out/merging"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    recipe, seeds = Recipe(), list(range(chosen.seeds))
    if chosen.list:
        print(listed(seeds, recipe))
        return
    training.run(seeds, recipe, tuple(chosen.how))
    for seed in seeds:
        run(seed, recipe, tuple(chosen.how))
    table, mismatches = collected(seeds, recipe)
    chosen.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(chosen.out / "sentiment.csv", index=False)
    mismatches.to_csv(chosen.out / "mismatch.csv", index=False)
    picture(mismatches, chosen.out / "mismatch.png")
    print(markdown(table), correlations(mismatches), sep="\n\n")


if __name__ == "__main__":
    main()
