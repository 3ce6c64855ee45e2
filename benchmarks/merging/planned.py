"""What ``--dry-run`` plans for layers of a large Llama, beside what the runs take.

    python -m benchmarks.merging.planned [--hidden 512 768] [--intermediate 1376 2064]
        [--layers 1] [--structures gram kron] [--folder DIR]
        | python -m benchmarks.results merging_planned

Makes a base and two fine-tunes with layers of these widths (a Llama of 7 billion parameters has
4096 and 11008, and 32 of them), measures a precision of each fine-tune (``fisher``) and merges
them. Each command is a fresh process, planned and then run.

* memory: of a run, the kernel's peak, less that of a process that only imports the package. Of a
  merge, ``--dry-run`` plans the buffers; files that are mapped come on top where they are resident.
* disk: what the run writes.
* seconds: of processors, without start-up and imports, because other programs change those of the
  clock; so the clock by which ``--dry-run`` plans is theirs. Merges are not timed by it.

The last rows are the plan for all 32 layers of 7 billion parameters, by the same functions from the
shapes alone. Nothing of that size is run: "taken" is the straight line through what the two smaller
models took over what was planned for them, continued.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.__main__ import machine
from benchmarks.merging import child
from benchmarks.merging.checkpoints_made import Shape
from blr_analysis.backprop.matrices import Joint, MatrixShape
from blr_analysis.merging.plan import bytes_of_layer
from blr_analysis.posterior.forecast import bytes_of_fit, numbers_of_factors, numbers_of_gram

ROOT = Path(__file__).parents[2]
WORDS = 500
TEXTS = 64
TOKENS = 32
HEADS = 8
LLAMA_7B = Shape(hidden=4096, intermediate=11008, layers=32, vocabulary=32_000, heads=32)
FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
PYTHON = ("env", "OMP_NUM_THREADS=1", sys.executable, "-W", "ignore", "-c")
IMPORTS = "import torch, transformers, blr_analysis.huggingface, blr_analysis.merging"
COMMAND = f"""
import json, time
{IMPORTS}
from blr_analysis.cli import main
started = time.process_time()
code = main()
if code:
    raise SystemExit(code)
print(json.dumps({{"inner": time.process_time() - started}}))
"""
DRY_RUN = f"""
import time
{IMPORTS}
time.perf_counter = time.monotonic = time.process_time
from blr_analysis.cli import main
raise SystemExit(main())
"""


def tokenizer() -> Any:
    """A tokenizer of words w0, w1, …, split at spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


def make(root: Path, shape: Shape) -> None:
    """Write a base, two fine-tunes and texts."""
    words = tokenizer()
    for seed, name in enumerate(("base", "tuned1", "tuned2")):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            key: torch.randn(sizes, generator=generator).mul_(0.02).bfloat16()
            for key, sizes in shape.tensors()
        }
        folder = root / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(shape.config()))
        words.save_pretrained(folder)
    numbers = torch.randint(WORDS, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    rows = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in numbers.tolist()]
    (root / "texts.jsonl").write_text("\n".join(rows))


def run(*arguments: object) -> child.Run:
    """A command of the package, in a process of its own; ``inner`` is without imports."""
    command = [*PYTHON, COMMAND, *map(str, arguments)]
    return child.run(command, [ROOT])


def planned(*arguments: object) -> dict[str, Any]:
    """What a command's ``--dry-run`` says."""
    command = [*PYTHON, DRY_RUN, *map(str, arguments)]
    text = child.output([*command, "--dry-run", "--json"], [ROOT])
    return json.loads(text)["dry_run"]


def bytes_in(folder: Path) -> int:
    """What lies in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def compared(root: Path, structure: str, start: int) -> Iterator[tuple[str, str, float, float]]:
    """Every planned number beside the measured one: command, what, planned, measured.

    Args:
        start: the peak of a process that imports the package, in bytes.
    """
    arguments = (root / "texts.jsonl", "--structure", structure)
    plan = planned("fisher", root / "tuned1", *arguments)
    measured = run("fisher", root / "tuned1", *arguments)
    run("fisher", root / "tuned2", *arguments)
    yield "fisher", "memory, GB", (plan["memory"] - start) / 1e9, (measured.peak - start) / 1e9
    yield "fisher", "disk, GB", plan["disk"] / 1e9, bytes_in(root / "tuned1" / "precision") / 1e9
    assert measured.inner is not None
    yield "fisher", "seconds", plan["seconds"], measured.inner
    recipe = {
        "merge_method": "fisher",
        "base_model": "base",
        "models": [{"model": "tuned1"}, {"model": "tuned2"}],
    }
    (root / "recipe.yml").write_text(json.dumps(recipe))  # JSON is YAML
    one_thread = ("--threads", 1)  # as many as fit would take part, fewer with wider layers
    plan = planned("merge", root / "recipe.yml", *one_thread)
    measured = run("merge", root / "recipe.yml", root / "out", *one_thread)
    yield "merge", "memory, GB", plan["memory"] / 1e9, (measured.peak - start) / 1e9
    written = (root / "out" / "model.safetensors").stat().st_size
    yield "merge", "disk, GB", plan["bytes_written"] / 1e9, written / 1e9


def layers_of(shape: Shape, structure: str) -> list[Joint]:
    """The layers with factors: all of them, but for Kronecker factors of the head."""
    layers = []
    for name, sizes in shape.tensors():
        has_factors = "_proj" in name or (name == "lm_head.weight" and structure == "gram")
        if has_factors:
            rows, columns = sizes
            layers.append(Joint(name, None, MatrixShape(1, rows, columns, (rows, columns))))
    return layers


def planned_of(shape: Shape, structure: str) -> dict[tuple[str, str], float]:
    """The plan for a model of these widths, by command and what is planned."""
    layers = layers_of(shape, structure)
    fit = bytes_of_fit(structure, layers, shape.parameters, FLOAT32_BYTES)
    if structure == "gram":
        numbers = sum(numbers_of_gram(layer, is_table=False) for layer in layers)
    else:
        numbers = sum(numbers_of_factors(layer) for layer in layers)
    largest_layer = max(
        bytes_of_layer(layer, 2, 2, has_outputs=structure == "kron") for layer in layers
    )
    return {
        ("fisher", "memory, GB"): (FLOAT32_BYTES * shape.parameters + fit) / 1e9,
        ("fisher", "disk, GB"): FLOAT32_BYTES * (shape.parameters + numbers) / 1e9,
        ("merge", "memory, GB"): largest_layer / 1e9,
        ("merge", "disk, GB"): BFLOAT16_BYTES * shape.parameters / 1e9,
    }


def continued(points: Sequence[tuple[float, float]], planned: float) -> float:
    """The straight line through the first and the last point, at another plan."""
    (first_plan, first), (last_plan, last) = points[0], points[-1]
    slope = (last - first) / (last_plan - first_plan)
    return last + slope * (planned - last_plan)


def row(structure: str, shape: Shape, command: str, what: str, plan: float, taken: float) -> str:
    """A line of the table."""
    widths = f"{shape.hidden}, {shape.intermediate}"
    names = f"{structure} | {widths} | {shape.layers} | {command} | {what}"
    return f"| {names} | {plan:.3g} | {taken:.3g} | {plan / taken:.2f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 768])
    parser.add_argument("--intermediate", type=int, nargs="+", default=[1376, 2064])
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--structures", nargs="+", default=["gram", "kron"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    shapes = [
        Shape(hidden, intermediate, layers, vocabulary=WORDS, heads=HEADS, positions=TOKENS)
        for hidden, intermediate in zip(args.hidden, args.intermediate, strict=True)
        for layers in args.layers
    ]
    start = child.run([*PYTHON, IMPORTS], [ROOT]).peak
    print(
        machine(),
        "",
        "| structure | widths | layers | command | what | planned | taken | ratio |",
        sep="\n",
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for structure in args.structures:
        points: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for shape in shapes:
            root = Path(tempfile.mkdtemp(prefix="planned_", dir=args.folder))
            try:
                make(root, shape)
                for command, what, plan, taken in compared(root, structure, start):
                    points.setdefault((command, what), []).append((plan, taken))
                    print(row(structure, shape, command, what, plan, taken), flush=True)
            finally:
                shutil.rmtree(root, ignore_errors=True)
        if len(shapes) > 1:
            for (command, what), plan in planned_of(LLAMA_7B, structure).items():
                taken = continued(points[command, what], plan)
                print(row(structure, LLAMA_7B, command, what, plan, taken), flush=True)


if __name__ == "__main__":
    main()
