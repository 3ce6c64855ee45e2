"""A merge of 7-billion-parameter models planned from their headers: CPU seconds, bytes, memory.

    python -m benchmarks.merging.planned | python -m benchmarks.results merging_planned

A base and three fine-tunes of Llama-2-7B's shapes in bfloat16, with precisions of structure "diag"
(float32) and "gram", whose files have true headers and holes for numbers; each recipe is planned by
``blr-analysis merge RECIPE --dry-run`` in a process of its own. ``to read`` and ``memory`` are what
the plan says; ``files`` is the bytes of tensors in the files that the recipe names.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from blr_analysis.files import Spec
from blr_analysis.files.headers import write_header

H, F, V, LAYERS = 4096, 11008, 32000, 32
MODELS = ("one", "two", "three")
METHODS = {
    "linear": "",
    "task_arithmetic": "base_model: base\n",
    "ties": "base_model: base\n",
    "gradient_matching": "base_model: base\nbase_precision: base/diag\n",
    "fisher": "",
}
RUN = """
import resource, sys
from blr_analysis.cli import main
try:
    main()
finally:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H)}
    for k in range(LAYERS):
        at = f"model.layers.{k}"
        found |= {f"{at}.self_attn.{p}_proj.weight": (H, H) for p in "qkvo"}
        found |= {f"{at}.mlp.{p}_proj.weight": (F, H) for p in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (H, F)
        found |= {f"{at}.{p}_layernorm.weight": (H,) for p in ("input", "post_attention")}
    return {**found, "model.norm.weight": (H,), "lm_head.weight": (V, H)}


def hollow(path: Path, specs: Mapping[str, Spec]) -> int:
    """A safetensors file without numbers; their bytes."""
    head, _ = write_header(dict(specs), {"format": "pt"})
    size = sum(math.prod(s.shape) * s.dtype.itemsize for s in specs.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return size


def make(root: Path) -> dict[str, int]:
    """The folders; bytes of tensors by folder."""
    every, sizes = shapes(), {}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": H}
    record = {
        "format": "blr_analysis.precision", "version": 1, "structure": "diag",
        "kind": "fisher_mc", "n_data": 1000, "prior_precision": 0.0, "parameters": list(every),
    }  # fmt: skip
    matrices = [n for n, s in every.items() if len(s) == 2 and ".layers." in n]
    grams = {
        **record,
        "structure": "gram",
        "kind": "input_moments",
        "shapes": every,
        "blocks": [
            {
                "weight": n, "bias": None, "groups": 1, "rows": every[n][0],
                "columns": every[n][1], "shape": every[n], "transposed": False,
            }
            for n in matrices
        ],
    }  # fmt: skip
    inputs = {n: every[n][1] for n in matrices}
    factors = {f"{n}.input_eigenvectors": (1, i, i) for n, i in inputs.items()}
    factors |= {f"{n}.eigenvalues": (1, 1, i) for n, i in inputs.items()}
    factors |= {n: s for n, s in every.items() if n not in inputs}
    for k, name in enumerate(("base", *MODELS)):
        place, dtype = root / name, torch.bfloat16
        specs = {n: Spec(s, dtype) for n, s in every.items()}
        sizes[name] = hollow(place / "model.safetensors", specs)
        with open(place / "model.safetensors", "r+b") as file:  # or it would equal the base
            file.seek(-2 * V * H + 2 * k, 2)
            file.write(b"\x01\x40")
        (place / "config.json").write_text(json.dumps(config))
        for kind, about, held in (("diag", record, every), ("gram", grams, factors)):
            specs = {n: Spec(s, torch.float32) for n, s in held.items()}
            sizes[f"{name}/{kind}"] = hollow(place / kind / "precision.safetensors", specs)
            (place / kind / "precision_config.json").write_text(json.dumps(about))
    return sizes


def processor() -> float:
    """CPU seconds of the processes that were run."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def planned(root: Path, sizes: Mapping[str, int], method: str, kind: str) -> str:
    """A line of the table."""
    rest, models = METHODS[method], MODELS
    files = [*models, *(["base"] if "base_model" in rest else [])]
    entries = [f"- {{model: {m}" + (f", precision: {m}/{kind}" if kind else "") for m in models]
    files += [f"{m}/{kind}" for m in models] if kind else []
    files += ["base/diag"] if "base_precision" in rest else []
    text = f"merge_method: {method}\n{rest}models:\n" + "".join(f"{e}}}\n" for e in entries)
    (root / "recipe.yml").write_text(text)
    started = processor()
    command = ["merge", "recipe.yml", "--dry-run", "--max-memory", "16GiB", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *command], cwd=root, capture_output=True, text=True
    )
    seconds, said = processor() - started, done.stdout + done.stderr
    found = [re.search(rf"{what}\s+(.+)", said) for what in ("to read", "memory", "peak")]
    if not all(found):
        return f"| {method} | {kind} | | | | | {said.strip()[-300:]!r} |"
    read, memory, peak = (m[1].strip() for m in found if m)
    true = sum(sizes[f] for f in files) / 1e9
    return (
        f"| {method} | {kind} | {seconds:.1f} | {read} | {true:.1f} GB | {memory} "
        f"| {int(peak) / 1e6:.2f} GB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the hollow files are made")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    given = parser.parse_args()
    where = given.folder
    with tempfile.TemporaryDirectory(dir=where) as folder:
        sizes = make(Path(folder))
        print("| method | precision | CPU seconds | to read | files | memory | peak of the plan |")
        print("|---|---|---|---|---|---|---|")
        for method in given.only:
            kinds = ("diag", "gram") if method == "fisher" else ("diag",)
            for kind in kinds if method in ("fisher", "gradient_matching") else ("",):
                print(planned(Path(folder), sizes, method, kind), flush=True)


if __name__ == "__main__":
    main()
