"""Bergson's gradient store beside the rows "index" and "search" of ``benchmarks.language``.

    python benchmarks/peers/bergson_index.py [--side 20] [--model FOLDER --texts FILE.jsonl]
                                             [--sequences 64] [--tokens 105] [--threads 2]

in an environment with bergson (``requirements/peers-bergson.txt``). The model and the sequences are
those of ``benchmarks.language``. Every layer's gradient is projected to ``side`` × ``side`` numbers
of four bytes, of the blocks' linear layers, as it does. Processor seconds a sequence, beside a
training pass of eight sequences at once in the same process, the least of ``--repeats``; the build
packs sequences into passes of ``--pass-tokens``. Search is one question to ``--rows`` synthetic
rows that it holds in memory, after its own gradient.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from bergson import Attributor, GradientProcessor, IndexConfig, collect_gradients
from bergson.data import allocate_batches, create_index
from datasets import Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from language import ids_of, load, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=20)
    parser.add_argument("--model")
    parser.add_argument("--texts")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=105)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pass-tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=20_000)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.model, torch.float32)
    ids = ids_of(model, args.sequences, 0, args.texts, args.tokens)
    rows = {"input_ids": ids.tolist(), "length": [args.tokens] * len(ids)}
    sizes: dict[str, int] = {}

    def build() -> None:
        place = f"{tempfile.mkdtemp()}/index"
        config = IndexConfig(
            place, projection_dim=args.side, token_batch_size=args.pass_tokens, drop_columns=True
        )
        Path(config.partial_run_path).mkdir()
        processor = GradientProcessor(projection_dim=args.side)
        batches = allocate_batches(rows["length"], args.pass_tokens)
        data = Dataset.from_dict(rows)
        collect_gradients(model, data, processor, config, batches=batches)
        stored = Path(config.partial_run_path) / "gradients.bin"
        sizes["bytes"] = stored.stat().st_size // len(ids)

    def train() -> None:
        for part in ids.split(8):
            model.zero_grad()
            outputs = model(input_ids=part, use_cache=False).logits
            F.cross_entropy(
                outputs[:, :-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum"
            ).backward()

    taken = measured(train, args.repeats), measured(build, args.repeats)
    each = [1e3 * t["cpu"] / len(ids) for t in taken]
    print(
        f"training {each[0]:.1f} ms a sequence, build {each[1]:.1f} ms, "
        f"{each[1] / each[0]:.2f} training passes, {sizes['bytes']:,} bytes a sequence"
    )
    with tempfile.TemporaryDirectory() as place:
        numbers = {"all": sizes["bytes"] // 4}
        create_index(Path(place), num_grads=args.rows, grad_sizes=numbers, dtype=np.float32)[:] = 1
        GradientProcessor(projection_dim=args.side).save(Path(place))
        attributor: Any = Attributor(place)
        asked = {"all": torch.randn(1, numbers["all"])}
        found = measured(lambda: attributor.search(asked, 10), max(args.repeats, 8))
    print(
        f"search of {args.rows:,} rows {found['wall']:.3f} s, {found['cpu']:.3f} of CPU; "
        f"{math.ceil(args.rows * sizes['bytes'] / 2**20):,} MiB held"
    )


if __name__ == "__main__":
    main()
