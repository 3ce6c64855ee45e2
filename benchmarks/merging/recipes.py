"""The recipes that mergekit's users have, merged here and by mergekit: the largest difference.

    python -m benchmarks.merging.recipes --peers DIR [--only NAME ...]

DIR holds mergekit's environment as DIR/mergekit (``make peers`` sets it up). Models are Llamas of
four layers in float32.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
OURS = "from blr_analysis.cli import main; main()"
BASED = "base_model: base\n"
TWO = """models:
- {model: one, parameters: {weight: 0.7%s}}
- {model: two, parameters: {weight: [0.2, 0.9]%s}}
"""
HALF, PLAIN = TWO % ((", density: 0.5",) * 2), TWO % ("", "")
GRADIENTS = """parameters: {normalize: true, lambda: 0.7}
models:
- {model: one, parameters: {weight: [0.3, 0.6, 0.1], density: [1, 0.7, 0.1]}}
- {model: two, parameters: {density: 0.5, weight: [{filter: mlp, value: 0.5}, {value: 0.2}]}}
"""
FAR = """models:
- {model: one, parameters: {weight: 0.7}}
- {model: far, parameters: {weight: 0.4}}
- {model: two, parameters: {weight: 0.4}}
"""
BARE = "models: [{model: one}, {model: far}, {model: two}]\n"
T = """parameters:
  t:
  - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
  - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
  - value: 0.5
"""
# name: (method, the rest of the recipe)
RECIPES = {
    "linear": ("linear", PLAIN),
    "linear, not normalized": ("linear", "parameters: {normalize: false}\n" + PLAIN),
    "task arithmetic": ("task_arithmetic", BASED + "parameters: {lambda: 0.8}\n" + PLAIN),
    "TIES": ("ties", BASED + HALF),
    "TIES, gradients": ("ties", BASED + GRADIENTS),
    "TIES, not normalized": ("ties", BASED + "parameters: {normalize: false}\n" + HALF),
    "DARE linear, density 1": ("dare_linear", BASED + PLAIN),
    "DARE TIES, density 1": ("dare_ties", BASED + "parameters: {lambda: 1.3}\n" + PLAIN),
    "DARE TIES, density 0.5": ("dare_ties", BASED + HALF),
    "SLERP, gradient t": ("slerp", BASED + "models: [{model: base}, {model: one}]\n" + T),
    "SLERP, far models": ("slerp", BASED + "models: [{model: base}, {model: far}]\n" + T),
    "multi-SLERP": ("multislerp", FAR),
    "multi-SLERP of steps": ("multislerp", BASED + FAR),
    "Karcher": ("karcher", BARE),
    "model stock": ("model_stock", BASED + BARE),
}


def make(root: Path) -> None:
    """The models."""
    start: dict[str, Tensor] = {}
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 50}
    for seed, name in enumerate(("base", "one", "two", "far")):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **shape))
        state = model.state_dict()
        if name in ("one", "two"):
            for key, values in state.items():
                values.copy_(start[key] + 0.02 * torch.randn_like(start[key]))
        start = start or {key: values.clone() for key, values in state.items()}
        model.save_pretrained(root / name)


def largest(ours: Path, theirs: Path) -> float:
    """The largest difference of any number."""
    mine, other = (load_file(p / "model.safetensors") for p in (ours, theirs))
    if mine.keys() != other.keys():
        return float("nan")
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


LOOP = """
import sys
from mergekit.scripts.run_yaml import main
for name in sys.argv[1:]:
    try:
        flags = ["--no-write-model-card", "--quiet"]
        main([f"{name}.yml", f"theirs/{name}", *flags], standalone_mode=False)
    except Exception as error:
        print(f"{name}\\t{error!r:.200}")
"""


def run(root: Path, names: list[str], python: Path) -> Iterator[str]:
    """The lines of the table."""
    said = dict.fromkeys(names, "")
    for name in names:
        method, rest = RECIPES[name]
        file = root / f"{name}.yml"
        file.write_text(f"merge_method: {method}\ndtype: float32\n{rest}")
        command = [sys.executable, "-W", "ignore", "-c", OURS, "merge", file.name, f"ours/{name}"]
        done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True)
        if done.returncode:
            said[name] = f"ours: {done.stderr.strip().splitlines()[-1]}"
    command = [python, "-W", "ignore", "-c", LOOP, *names]
    told = subprocess.run(command, cwd=root, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    for line in told.stdout.splitlines():
        name, tab, error = line.partition("\t")
        if tab and name in said:
            said[name] += f" mergekit: {error}"
    for name in names:
        places = [root / who / name for who in ("ours", "theirs")]
        if said[name] or not all((p / "config.json").is_file() for p in places):
            yield f"| {name} | | {said[name] or 'no result'} |"
        else:
            yield f"| {name} | {largest(*places):.1e} | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ours").mkdir()
        make(Path(folder))
        print("| recipe | largest difference | note |\n|---|---|---|")
        python = given.peers.absolute() / "mergekit" / "bin" / "python"
        for line in run(Path(folder), given.only, python):
            print(line, flush=True)


if __name__ == "__main__":
    main()
