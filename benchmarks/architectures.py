"""Every causal language model of the installed transformers, as small as its configuration allows:
how its gradients are read, and how far they are from autograd's.

    python -m benchmarks.architectures [--only llama mixtral ...] [--seconds 20]

writes ``results/architectures.csv``; with ``--only``, these rows of it.

Each model has random weights in float64 and four random sequences of 12 tokens; its gradients are
the examples' own, summed with different weights over a batch of four, against plain autograd, one
sequence at a time. ``rules``: parameters that are read by a layer's rule, by structure or type;
``torch_func``: the modules that go through ``torch.func``, by their classes, and ``whole model``
for what is differentiated through all of it; ``one_by_one``: the share of parameters for which this
chunk is, one example at a time, since a router filled experts in another way than the plan saw.
What cannot be built without a configuration of its own, or does not run by itself on token ids, is
skipped with the reason. Everything is built offline.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
TOKENS, EXAMPLES = 12, 4
LARGEST = 3_000_000  # parameters of what still counts as small
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "dim"), 32),
    **dict.fromkeys(("embedding_size", "model_dim", "input_embedding_size", "width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "n_inner", "d_inner", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("pad_token_id", "pad_index"), 0),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("vocab_size_per_layer_input", "shape_vocab_size"), 40),
    "pronunciation_vocab_size": 40,
    "mamba_d_ssm": 64,
    "num_kv_shared_layers": 0,
    "vocab_size": 40,
    "n_words": 40,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "state_size": 8,
    "rotary_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": False,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"expand": 1},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}
COLUMNS = ("architecture", "model", "outcome", "dtype", "parameters", "by_rules", "torch_func")
COLUMNS += ("whole_model", "one_by_one", "relative_error", "seconds", "said")


def smaller(config: type[Any]) -> dict[str, Any]:
    """The sizes that this configuration has, and those of its parts."""
    default = config()
    named = set(inspect.signature(config.__init__).parameters) | set(default.to_dict())
    sizes = {n: v for n, v in SIZES.items() if n in named or n in config.attribute_map}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)
    for part in config.sub_configs:
        held = getattr(default, part, None)
        if held is not None:
            sizes[part] = smaller(type(held))
    return sizes


def built(kind: str, dtype: torch.dtype) -> Any:
    """The model with random weights."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class: Any = CONFIG_MAPPING[kind]
    config = config_class(**{**smaller(config_class), **SPECIAL.get(kind, {})})
    config._experts_implementation = "eager"  # grouped products take no double precision
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters with the sizes that this script sets")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.config.use_cache = False
    for p in model.parameters():
        if p.is_floating_point():
            p.data = torch.where(p.isfinite(), p, 0).add_(0.1 * torch.randn_like(p))
    return model


def running(kind: str, ids: Tensor) -> tuple[Any, str]:
    """The model in the widest dtype that it runs in by itself, gradients and all."""
    for dtype in (torch.float64, torch.float32):
        model = built(kind, dtype)
        try:
            gradients(model, ids[:1])
        except (RuntimeError, TypeError, ValueError):
            if dtype == torch.float32:
                raise
        else:
            return model, str(dtype).removeprefix("torch.")
    raise AssertionError


def gradients(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """∂(summed loss)/∂θ of every sequence by plain autograd."""
    found = []
    for row in ids:
        model.zero_grad()
        logits = model(input_ids=row.unsqueeze(0)).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum").backward()
        found.append(
            {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for n, p in model.named_parameters()
            }
        )
    model.zero_grad()
    return found


def looked_at(kind: str) -> dict[str, Any]:
    """A row of the table."""
    import blr_analysis as blr
    from blr_analysis.backprop import reading
    from blr_analysis.backprop.engine import Chunking, chunks
    from blr_analysis.backprop.plan import plan_for
    from blr_analysis.errors import BLRError
    from blr_analysis.sensitivity.influence.blocks import loss_terms

    ids = torch.randint(3, 40, (EXAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))
    try:
        model, dtype = running(kind, ids)
        truth = gradients(model, ids)
    except Exception as error:
        return {"outcome": "skipped", "said": said(error)}
    row = {"dtype": dtype, "parameters": sum(p.numel() for p in model.parameters())}

    def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return model(input_ids=batch[0]).logits, batch[1]

    alone: set[str] = set()
    whole = reading.task_columns

    def noted(task: Any, params: Any, names: Any, *rest: Any) -> Any:
        alone.update(names)
        return whole(task, params, names, *rest)

    reading.task_columns = noted
    try:
        task = blr.Task(model, (ids, ids), likelihood="causal_lm", forward=forward)
        params = {n: p.detach() for n, p in model.named_parameters()}
        plan = plan_for(task, params)
        alone.clear()
        errors = [0.0]
        for chunk in chunks(task, params, Chunking(chunk_size=EXAMPLES, progress=False), columns=1):
            ours = {n: g for t in loss_terms(task, chunk) for n, g in t.jacobian().items()}
            for i, exact in enumerate(truth):
                gap = sum(
                    float((exact[n] - (ours[n][i, 0] if n in ours else 0)).square().sum())
                    for n in params
                )
                size = sum(float(g.square().sum()) for g in exact.values())
                errors.append((gap / size) ** 0.5)
    except BLRError as error:
        return {**row, "outcome": "refused", "said": said(error)}
    except Exception as error:
        return {**row, "outcome": "fault", "said": said(error)}
    modules = Counter(type(u.module).__name__ for u in plan.units if u.rule is None)
    names = {n for u in plan.units if u.rule for n in u.names.values()}
    outcome = "whole model" if plan.whole_model else "torch.func" if modules else "rules"
    return {
        **row,
        "outcome": outcome,
        "by_rules": f"{sum(params[n].numel() for n in names) / row['parameters']:.3f}",
        "torch_func": " ".join(f"{n}×{k}" for n, k in sorted(modules.items())),
        "whole_model": kinds(plan.whole_model),
        "one_by_one": f"{sum(params[n].numel() for n in alone) / row['parameters']:.3f}",
        "relative_error": f"{max(errors):.1e}",
    }


def kinds(names: Any) -> str:
    """Names of parameters without the numbers of their layers."""
    plain = {".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names}
    return " ".join(sorted(plain))


def said(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:240]


def guarded(kind: str, seconds: int) -> dict[str, Any]:
    """The row, made in a process of its own that ends after so many seconds of CPU."""
    with tempfile.NamedTemporaryFile("r") as file:
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            try:
                row = looked_at(kind)
                with open(file.name, "w") as draft:
                    json.dump(row, draft)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        text = file.read()
    if text:
        return json.loads(text)
    ended = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
    return {"outcome": "skipped", "said": f"over {seconds} s" if ended else "the process ended"}


def kept(before: pd.DataFrame, rows: Sequence[dict[str, Any]], file: Path) -> dict[str, int]:
    """Rows in place of those of the same names before, in the file; how many there are of each."""
    new = pd.DataFrame(rows, columns=list(COLUMNS)).fillna("")
    old = before[~before["architecture"].isin(new["architecture"])] if len(before) else before
    table = pd.concat([old, new]).sort_values(by=["architecture"])
    table.to_csv(file, index=False)
    return table["outcome"].value_counts().to_dict()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", help="these, by their names in transformers")
    parser.add_argument("--seconds", type=int, default=30, help="of CPU, for each")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import blr_analysis.sensitivity.influence  # noqa: F401  # once, before the processes

    transformers.logging.set_verbosity_error()
    with torch.no_grad():
        built("llama", torch.float64)(input_ids=torch.ones(1, 2, dtype=torch.long))
    rows = []
    for kind, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if args.only is None or kind in args.only:
            start = time.perf_counter()
            row = guarded(kind, args.seconds)
            seconds = f"{time.perf_counter() - start:.1f}"
            rows.append({"architecture": kind, "model": model, "seconds": seconds, **row})
            print(" | ".join(str(rows[-1].get(c, "")) for c in COLUMNS), flush=True)
    file = RESULTS / "architectures.csv"
    before = pd.read_csv(file, dtype=str).fillna("") if args.only else pd.DataFrame()
    print(f"transformers {transformers.__version__}: {kept(before, rows, file)}")


if __name__ == "__main__":
    main()
