"""Recipes as model cards print them: which of them run here, and which line does not and why.

    python -m benchmarks.merging.cards [--peers DIR] | python -m benchmarks.results merging_cards

Written in the manner of public cards, with their methods, slices, gradients and odd keys; their
models are Llamas of 32 thin layers in bfloat16 under the names that the recipes use. With
``--peers DIR`` (``make peers``) mergekit runs each as well: the largest difference of any number,
both with float32 for the recipe's dtype (in bfloat16 mergekit computes with 8 bits); "draws" where
chance decides what stays. TIES of bfloat16 checkpoints differs in some entries, why is not known:
bfloat16 has many equal magnitudes at the threshold, which may be it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.merging.recipes import largest, words
from blr_analysis.errors import BLRError
from blr_analysis.merging.folders import execute
from blr_analysis.merging.plan import plan_folders
from blr_analysis.merging.recipe import read_recipe

LAYERS = 32
ATTENTION = """parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5
dtype: bfloat16
"""
PAIR = """slices:
  - sources:
      - model: lab/alpha-7b
        layer_range: [0, 32]
      - model: lab/beta-7b
        layer_range: [0, 32]
"""
LISTED = """models:
  - model: org/base-7b
    # no parameters necessary for base model
  - model: lab/alpha-7b
    parameters: {%s}
  - model: lab/beta-7b
    parameters: {%s}
"""
PLAIN = """models:
  - model: lab/alpha-7b
    parameters: {%s}
  - model: lab/beta-7b
    parameters: {%s}
"""
BASE = "base_model: org/base-7b\n"
STACKED = """slices:
- sources:
  - model: lab/alpha-7b
    layer_range: [0, 24]
- sources:
  - model: lab/beta-7b
    layer_range: [8, 32]
merge_method: passthrough
dtype: bfloat16
"""
SELF = "slices:\n" + "".join(
    f"- sources:\n  - layer_range: [{k}, {k + 8}]\n    model: lab/alpha-7b\n"
    for k in range(0, 28, 4)
)
GROWN = "slices:\n" + "".join(
    f"""- sources:
  - model: lab/alpha-7b
    layer_range: [{k}, {k + 8}]
- sources:
  - model: lab/alpha-7b
    layer_range: [{k + 7}, {k + 8}]
    parameters:
      scale:
      - filter: o_proj
        value: 0.0
      - filter: down_proj
        value: 0.0
      - value: 1.0
"""
    for k in range(0, 32, 8)
)
GRADIENTS = """models:
  - model: lab/alpha-7b
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: lab/beta-7b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: lab/gamma-7b
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: org/base-7b
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""
SLICED = """slices:
  - sources:
      - model: lab/alpha-7b
        layer_range: [0, 32]
        parameters: {weight: 0.6, density: 1}
      - model: lab/beta-7b
        layer_range: [0, 32]
        parameters: {weight: 0.4, density: 1}
      - model: org/base-7b
        layer_range: [0, 32]
merge_method: dare_ties
base_model: org/base-7b
parameters: {int8_mask: true}
dtype: bfloat16
"""
MIX = """base_model: org/base-7b
gate_mode: hidden
dtype: bfloat16
experts:
  - source_model: lab/alpha-7b
    positive_prompts: ["chat", "assistant"]
  - source_model: lab/beta-7b
    positive_prompts: ["code", "python"]
"""
SEVERAL = f"""name: first
{PAIR}merge_method: slerp
base_model: lab/alpha-7b
{ATTENTION}---
name: second
models:
  - model: first
  - model: lab/gamma-7b
merge_method: linear
parameters: {{weight: 0.5}}
dtype: bfloat16
"""
TWO = ("weight: 0.5, density: 0.5",) * 2
DARED = ("density: 1, weight: 0.4", "density: 1, weight: 0.3")
# name: the recipe
CARDS = {
    "SLERP, slices, t by layer and filter": PAIR
    + "merge_method: slerp\nbase_model: lab/alpha-7b\n"
    + ATTENTION,
    "SLERP, models, one t": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\n"
    "merge_method: slerp\nbase_model: lab/alpha-7b\nparameters:\n  t: 0.5\ndtype: bfloat16\n",
    "SLERP, embed_slerp": PAIR
    + "merge_method: slerp\nbase_model: lab/alpha-7b\nparameters:\n  t: 0.4\n  embed_slerp: true\n"
    "dtype: bfloat16\n",
    "TIES, base listed, int8_mask": LISTED % TWO
    + "merge_method: ties\n"
    + BASE
    + "parameters: {normalize: true, int8_mask: true}\ndtype: bfloat16\n",
    "TIES, density and weight gradients": GRADIENTS,
    "DARE-TIES, base listed": LISTED % (("density: 0.53, weight: 0.4",) * 2)
    + "merge_method: dare_ties\n"
    + BASE
    + "parameters: {int8_mask: true}\ndtype: bfloat16\n",
    "DARE-TIES, nothing dropped": LISTED % DARED
    + "merge_method: dare_ties\n"
    + BASE
    + "parameters: {int8_mask: true}\ndtype: bfloat16\n",
    "DARE-TIES, slices": SLICED,
    "DARE linear, random_seed": PLAIN % DARED
    + "merge_method: dare_linear\n"
    + BASE
    + "dtype: bfloat16\nrandom_seed: 0\n",
    "frankenmerge of two": STACKED,
    "frankenmerge of one with itself": SELF + "merge_method: passthrough\ndtype: float16\n",
    "block expansion, zeroed projections": GROWN + "merge_method: passthrough\ndtype: bfloat16\n",
    "linear, tokenizer_source": PLAIN % ("weight: 1.0", "weight: 0.3")
    + "merge_method: linear\ntokenizer_source: union\ndtype: float16\n",
    "linear, chat_template, out_dtype": PLAIN % ("weight: 0.6", "weight: 0.4")
    + "merge_method: linear\nchat_template: chatml\ndtype: float32\nout_dtype: bfloat16\n",
    "task arithmetic, a model taken off": PLAIN % ("weight: 1.0", "weight: -0.5")
    + "merge_method: task_arithmetic\n"
    + BASE
    + "parameters: {normalize: false}\ndtype: bfloat16\n",
    "an adapter on its base": "models:\n  - model: org/base-7b+lab/lora\n"
    "    parameters: {weight: 1.0}\n  - model: lab/beta-7b\n    parameters: {weight: 0.5}\n"
    "merge_method: linear\ndtype: bfloat16\n",
    "model stock": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\n"
    "  - model: lab/gamma-7b\nmerge_method: model_stock\n" + BASE + "dtype: bfloat16\n",
    "model stock, filter_wise": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\n"
    "merge_method: model_stock\n" + BASE + "parameters: {filter_wise: true}\ndtype: bfloat16\n",
    "Karcher, max_iter": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\n"
    "merge_method: karcher\nparameters: {max_iter: 10, tol: 1e-5}\ndtype: bfloat16\n",
    "breadcrumbs": PLAIN % (("weight: 0.5, density: 0.9, gamma: 0.01",) * 2)
    + "merge_method: breadcrumbs\n"
    + BASE
    + "dtype: bfloat16\n",
    "breadcrumbs TIES": PLAIN % (("weight: 0.5, density: 0.9, gamma: 0.01",) * 2)
    + "merge_method: breadcrumbs_ties\n"
    + BASE
    + "dtype: bfloat16\n",
    "DELLA": PLAIN % (("weight: 0.5, density: 0.6, epsilon: 0.2",) * 2)
    + "merge_method: della\n"
    + BASE
    + "parameters: {lambda: 1.1}\ndtype: bfloat16\n",
    "DELLA linear": PLAIN % (("weight: 0.5, density: 0.6, epsilon: 0.2",) * 2)
    + "merge_method: della_linear\n"
    + BASE
    + "dtype: bfloat16\n",
    "nearswap": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\n"
    "merge_method: nearswap\nbase_model: lab/alpha-7b\nparameters: {t: 0.0001}\n"
    "dtype: bfloat16\n",
    "NuSLERP": PLAIN % ("weight: 0.5", "weight: 0.5") + "merge_method: nuslerp\ndtype: bfloat16\n",
    "SCE": "models:\n  - model: lab/alpha-7b\n  - model: lab/beta-7b\nmerge_method: sce\n"
    + BASE
    + "parameters: {select_topk: 0.8}\ndtype: bfloat16\n",
    "Arcee fusion": "models:\n  - model: lab/alpha-7b\nmerge_method: arcee_fusion\n"
    + BASE
    + "dtype: bfloat16\n",
    "several documents (mergekit-multi)": SEVERAL,
    "a mixture of experts (mergekit-moe)": MIX,
}


def make(root: Path) -> None:
    """The models, and an adapter."""
    from peft import LoraConfig, get_peft_model

    start = {}
    for seed, name in enumerate(("org/base-7b", "lab/alpha-7b", "lab/beta-7b", "lab/gamma-7b")):
        tokenizer = words()
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
                num_attention_heads=2, vocab_size=len(tokenizer),
            )
        )  # fmt: skip
        state = model.state_dict()
        for key, values in state.items():
            if start:
                values.copy_(start[key] + 0.02 * torch.randn_like(values))
        start = start or {key: values.clone() for key, values in state.items()}
        model.to(torch.bfloat16).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    settings = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    base = LlamaForCausalLM.from_pretrained(root / "org/base-7b")
    get_peft_model(base, settings).save_pretrained(root / "lab/lora")  # type: ignore[arg-type]


def ours(root: Path, name: str) -> str:
    """What becomes of a recipe: "" if it was merged, else the complaint."""
    try:
        job = read_recipe(root / f"{name}.yml").job
        execute(plan_folders(job), root / "ours" / name, progress=False)
    except BLRError as error:
        said = re.sub(r"\s+", " ", str(error)).replace(f"{root}/", "").replace(f"{name}.yml, ", "")
        return re.sub(r"(; known (here|are)|[;.]? (did you mean [^?]*\? )?Known are).*", ".", said)
    return ""


LOOP = """
import sys
from mergekit.scripts.run_yaml import main
for name in sys.argv[1:]:
    try:
        flags = ["--no-write-model-card", "--quiet"]
        main([f"{name}.yml", f"theirs/{name}", *flags], standalone_mode=False)
    except BaseException as error:
        print(f"{name}\\t{type(error).__name__}", flush=True)
"""


def lines(root: Path, peers: Path | None) -> Iterator[str]:
    said = []
    for number, text in enumerate(CARDS.values()):
        (root / f"{number}.yml").write_text(text)
        said.append(ours(root, str(number)))
        precise = re.sub(r"(?m)^dtype: .*", "dtype: float32", re.sub(r"(?m)^out_.*\n", "", text))
        (root / f"{number}-precise.yml").write_text(precise)
    failed = dict[str, str]()
    names = [f"{number}-precise" for number in range(len(CARDS))]
    if peers is not None:
        for name, complaint in zip(names, said, strict=True):
            if not complaint:
                ours(root, name)
        told = subprocess.run(
            [peers, "-W", "ignore", "-c", LOOP, *names],
            cwd=root, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        failed = dict(line.split("\t") for line in told.stdout.splitlines() if "\t" in line)
    yield "| recipe | here | mergekit | largest difference |\n|---|---|---|---|"
    for number, (name, text) in enumerate(CARDS.items()):
        here, apart, theirs = said[number], "", failed.get(names[number], "runs")
        if peers is None:
            theirs = ""
        elif not here and theirs == "runs":
            apart = "draws"
            if "DARE" not in name or "density: 0" not in text:
                apart = f"{largest(*(root / w / names[number] for w in ('ours', 'theirs'))):.1e}"
        yield f"| {name} | {here.replace('|', '/') or 'runs'} | {theirs} | {apart} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path)
    peers = parser.parse_args().peers
    python = None if peers is None else peers.absolute() / "mergekit" / "bin" / "python"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(os.path.realpath(folder))
        (root / "ours").mkdir()
        make(root)
        for line in lines(root, python):
            print(line, flush=True)


if __name__ == "__main__":
    main()
