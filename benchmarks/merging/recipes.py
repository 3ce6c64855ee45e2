"""The recipes that mergekit's users have, merged here and by mergekit: the largest difference.

    python -m benchmarks.merging.recipes --peers DIR [--only NAME ...]

DIR holds mergekit's environment as DIR/mergekit (``make peers`` sets it up). Models are Llamas of
four layers in float32 with tokenizers of their own, some with added tokens, one tied. Rows of
embeddings and heads are compared by token, since a union is free to number new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blr_analysis.errors import BLRError
from blr_analysis.files import Folder
from blr_analysis.merging.folders import execute
from blr_analysis.merging.plan import plan_folders
from blr_analysis.merging.recipe import read_recipe
from blr_analysis.merging.recipe.places import vocabulary
from blr_analysis.merging.vocabularies import is_vocabulary

WORDS = [f"w{i}" for i in range(50)]
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
TOKENS = """models:
- {model: one, parameters: {weight: 0.6}}
- {model: more, parameters: {weight: 0.3}}
- {model: other, parameters: {weight: 0.4}}
"""
T = """parameters:
  t:
  - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
  - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
  - value: 0.5
"""
WHOLE = "- sources: [{model: base, layer_range: [0, 4]}, {model: %s, layer_range: [0, 4]}]\n"
STACK = """slices:
- sources: [{model: one, layer_range: [0, 3]}]
- sources:
  - model: two
    layer_range: [1, 4]
    parameters: {scale: [{filter: o_proj, value: 0.0}, {value: 1.0}]}
"""
PIECES = """slices:
- sources:
  - {model: one, layer_range: [0, 2], parameters: {weight: [0.2, 0.8]}}
  - {model: two, layer_range: [0, 2], parameters: {weight: 0.5}}
- sources:
  - {model: far, layer_range: [2, 4], parameters: {weight: [0.1, 0.6]}}
  - {model: two, layer_range: [2, 4], parameters: {weight: 1}}
"""
SHIFTED = """slices:
- sources:
  - {model: one, layer_range: [0, 3], parameters: {weight: 0.6}}
  - {model: base, layer_range: [0, 3]}
- sources:
  - {model: two, layer_range: [2, 4], parameters: {weight: 0.3}}
  - {model: base, layer_range: [2, 4]}
"""
MODULE = """modules:
  default:
    slices:
    - sources:
      - {model: one, layer_range: [0, 4], parameters: {weight: 1}}
      - {model: two, layer_range: [0, 4], parameters: {weight: 2}}
"""
CHOSEN = """tokenizer:
  source: union
  tokens:
    <extra>: {source: other, force: true}
    <tool>: {source: {kind: model_token, model: other, token: w3}}
"""
TIED = """models:
- {model: one, parameters: {weight: 1}}
- {model: tied, parameters: {weight: 1}}
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
    "SLERP, gradient t": ("slerp", BASED + "slices:\n" + WHOLE % "one" + T),
    "SLERP, far models": ("slerp", BASED + "slices:\n" + WHOLE % "far" + T),
    "multi-SLERP": ("multislerp", FAR),
    "multi-SLERP of steps": ("multislerp", BASED + FAR),
    "Karcher": ("karcher", BARE),
    "model stock": ("model_stock", BASED + BARE),
    "passthrough, stacked layers": ("passthrough", STACK),
    "slices": ("linear", PIECES),
    "slices of task arithmetic": ("task_arithmetic", BASED + SHIFTED),
    "a module": ("linear", MODULE),
    "tokenizer of the base": ("task_arithmetic", BASED + "tokenizer_source: base\n" + TOKENS),
    "tokenizer of a model": ("linear", "tokenizer_source: other\n" + TOKENS),
    "union": ("linear", "tokenizer_source: union\n" + TOKENS),
    "union with a base": ("ties", BASED + "tokenizer_source: union\n" + TOKENS),
    "union, padded": ("linear", "tokenizer: {source: union, pad_to_multiple_of: 16}\n" + TOKENS),
    "union, chosen tokens": ("linear", CHOSEN + TOKENS),
    "a tied base": ("task_arithmetic", "base_model: tied\n" + PLAIN),
    "tied among others": ("linear", TIED),
}  # fmt: skip


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of fifty words."""
    vocab = {word: n for n, word in enumerate(WORDS)}
    model = Tokenizer(BPE(vocab=vocab, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>")


def make(root: Path) -> None:
    """The models."""
    start: dict[str, Tensor] = {}
    added = {"more": ["<extra>"], "other": ["<tool>", "<extra>"]}
    for seed, name in enumerate(("base", "one", "two", "far", "more", "other", "tied")):
        tokenizer = words()
        tokenizer.add_tokens(added.get(name, []))
        tokenizer.save_pretrained(root / name)
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
                vocab_size=len(tokenizer), tie_word_embeddings=name == "tied",
            )
        )  # fmt: skip
        state = model.state_dict()
        if name not in ("base", "far", "tied"):
            for key, values in state.items():
                rows = slice(len(start[key]))
                values[rows] = start[key] + 0.02 * torch.randn_like(start[key])
        start = start or {key: values.clone() for key, values in state.items()}
        model.save_pretrained(root / name)


def largest(ours: Path, theirs: Path) -> float:
    """The largest difference of any number, rows of tokens by token."""
    mine, other = Folder.open(ours).tensors(), Folder.open(theirs).tensors()
    if mine.keys() != other.keys():
        return float("nan")
    here, there = vocabulary(ours), vocabulary(theirs)

    def apart() -> Iterator[float]:
        for name in mine:
            one, two = mine[name], other[name]
            if is_vocabulary(name):
                one, two = one[list(here.values())], two[[there[token] for token in here]]
            yield float((one - two).abs().max())

    return max(apart())


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
        try:
            execute(plan_folders(read_recipe(file).job), root / "ours" / name, progress=False)
        except BLRError as error:
            said[name] = f"ours: {error}"
    told = subprocess.run(
        [python, "-W", "ignore", "-c", LOOP, *names],
        cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in told.stdout.splitlines():
        name, tab, error = line.partition("\t")
        if tab and name in said:
            said[name] += f" mergekit: {error}"
    for name in names:
        places = [root / who / name for who in ("ours", "theirs")]
        if said[name] or not all((p / "config.json").is_file() for p in places):
            yield f"| {name} | | {said[name] or 'no result'} |"
            continue
        one, two = (
            json.loads((p / "config.json").read_text())["tie_word_embeddings"] for p in places
        )
        note = "" if one == two else f"tie_word_embeddings: {one} here, {two} there"
        yield f"| {name} | {largest(*places):.1e} | {note} |"


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
