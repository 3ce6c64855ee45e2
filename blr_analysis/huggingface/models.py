"""A local Hugging Face folder as a model to analyse: loaded offline, in float32, in eval mode.

Two kinds are known, by the last words of the architecture in ``config.json`` or by ``task=``:

* "classification": ``…ForSequenceClassification``, one of C labels for a text (or a pair);
* "causal_lm": ``…ForCausalLM`` and ``…LMHeadModel``, the next token at every token.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blr_analysis.adapters import CONFIG, is_adapter, open_adapter
from blr_analysis.checks import install, one_of, path_of, some
from blr_analysis.errors import InputError, ModelError, StorageError, told_as
from blr_analysis.files import Folder, Spec
from blr_analysis.files.headers import read_json
from blr_analysis.huggingface.file_layout import file_layout
from blr_analysis.task import find_device

AUTO = {"classification": "AutoModelForSequenceClassification", "causal_lm": "AutoModelForCausalLM"}
ENDINGS = {
    "classification": ("ForSequenceClassification",),
    "causal_lm": ("ForCausalLM", "LMHeadModel"),
}
OFFLINE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
UNBOUNDED = 10**6  # some tokenizers say 10³⁰ where they know no bound


@dataclass(frozen=True)
class Pretrained:
    """A model with its tokenizer.

    Attributes:
        folder: where it was loaded from.
        task: "classification" or "causal_lm".
        specs: shapes and dtypes of the tensors in the folder, by their names there.
        pad_id: the token that fills up short rows of a batch.
        inputs: the tokenizer's outputs that the model takes.
        longest: tokens that the model can read of one text.
    """

    folder: Path
    task: str
    model: nn.Module
    tokenizer: Any
    specs: Mapping[str, Spec]
    pad_id: int
    inputs: tuple[str, ...]
    longest: int

    @property
    def likelihood(self) -> str:
        """What :class:`~blr_analysis.Task` calls the loss of this model."""
        return "categorical" if self.task == "classification" else "causal_lm"


def load_model(
    folder: str | os.PathLike[str], *, task: str | None = None, device: str | torch.device = "cpu"
) -> Pretrained:
    """Load a sequence classifier or a causal language model with its tokenizer.

    Only the folder is read: no network, no pickle, no code that comes with the model.

    Args:
        folder: ``config.json``, safetensors, and the tokenizer's files.
        task: "classification" or "causal_lm"; None: what ``config.json`` says.
        device: where the weights are put.

    Raises:
        InputError: transformers is not installed; an unknown task.
        StorageError: no such folder, no model in it, only pickles, damaged files.
        ModelError: an architecture that is neither, weights that are missing (a head that was
            never trained), quantised weights, no tokenizer.
    """
    place = Path(path_of(folder)).expanduser()
    if task is not None:
        one_of("task", task, tuple(AUTO))
    config = read_config(place)
    kind = task or _task_in(config, place)
    where = find_device(device)
    specs = Folder.open(place).specs
    with _quiet():
        model = _load_weights(place, kind)
        tokenizer = _load_tokenizer(place)
    model = model.float().eval().to(where)
    model.config.use_cache = False  # nothing is generated: keys and values need not be kept
    taken = inspect.signature(model.forward).parameters
    named = dict.fromkeys(("input_ids", "attention_mask", *tokenizer.model_input_names))
    inputs = tuple(n for n in named if n in taken)
    pad = _pad_id(model.config, tokenizer, place)
    bound = min(int(tokenizer.model_max_length), _positions(model))
    return Pretrained(place, kind, model, tokenizer, specs, pad, inputs, bound)


def load_language_model(
    folder: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None
) -> Pretrained:
    """A causal language model with its tokenizer; or a LoRA adapter on its base, whose own weights
    alone are the parameters.

    Args:
        base: where the adapter's base is, unless its configuration names a folder here.

    Raises:
        ModelError: a base that is not there, or is another than the adapter was made for; and as
            :func:`load_model`.
    """
    place = Path(path_of(folder)).expanduser()
    if not is_adapter(place):
        return load_model(place)
    if find_spec("peft") is None:
        raise InputError(f"a LoRA adapter needs peft: {install('peft')}")
    loaded = load_model(_base_of(place, base))
    model, tokenizer = _adapted(loaded, place), _tokenizer_of(place, loaded)
    return replace(loaded, folder=place, model=model.float().eval(), tokenizer=tokenizer)


def load_tuned(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    task: str | None = None,
    device: str | torch.device = "cpu",
) -> Pretrained:
    """:func:`load_model`; of the folder of an adapter its base with the adapter added, of which
    only the parameters that it changes have a gradient.

    Args:
        base: where the adapter's base is, unless its configuration names a folder here.

    Raises:
        ModelError: an adapter that does not fit its base; and as :func:`load_model`.
    """
    place = Path(path_of(folder)).expanduser()
    if not is_adapter(place):
        if base is not None:
            raise InputError(f"{str(place)!r} is no adapter: leave base out")
        return load_model(place, task=task, device=device)
    loaded = load_model(_base_of(place, base), task=task, device=device)
    source = open_adapter(place, Folder.open(loaded.folder), dtype=torch.float32)
    left = set(source.changes)
    layout = file_layout(loaded.model, loaded.specs, loaded.folder)
    for name, p in loaded.model.named_parameters():
        stored = layout.names[name][0]
        p.requires_grad_(name in layout.renamed and stored in left)
        if p.requires_grad:
            p.data.copy_(source.tensor(stored))
            left.remove(stored)
    if left:
        raise ModelError(f"the adapter {str(place)!r} changes {some(sorted(left))}, not trained")
    return replace(loaded, tokenizer=_tokenizer_of(place, loaded))


def _tokenizer_of(place: Path, loaded: Pretrained) -> Any:
    """An adapter's own tokenizer where it has one, or its base's."""
    own = any((place / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    return _load_tokenizer(place) if own else loaded.tokenizer


def _base_of(place: Path, base: str | os.PathLike[str] | None) -> Path:
    """The folder of an adapter's base."""
    named = read_json(place / CONFIG).get("base_model_name_or_path") if base is None else base
    name = str(path_of(named))
    tried = [Path(name).expanduser(), place / name]
    found = next((p for p in tried if p.is_dir()), None)
    if found is None:
        said = f"an adapter of {name!r}, no folder here"
        raise ModelError(f"{str(place)!r} is {said}: name its base (--base)")
    return found


def _adapted(loaded: Pretrained, place: Path) -> Any:
    """The base with the adapter, all of whose tensors must find their place."""
    from peft import PeftModel, get_peft_model_state_dict

    stored = Folder.open(place, stem="adapter_model").specs
    wrong = f"the adapter {str(place)!r} does not fit {str(loaded.folder)!r}"
    with _quiet(), warnings.catch_warnings(), told_as(ModelError, wrong, "name its base (--base)"):
        warnings.simplefilter("ignore")  # what is missing is raised below
        model: Any = PeftModel.from_pretrained(loaded.model, str(place), is_trainable=True)  # type: ignore[arg-type]
    taken = {n: tuple(t.shape) for n, t in get_peft_model_state_dict(model).items()}
    if taken != {n: spec.shape for n, spec in stored.items()}:
        raise ModelError(f"{wrong}: {some(sorted(set(taken) ^ set(stored)) or sorted(taken))}")
    return model


def read_config(folder: Path) -> Any:
    """The configuration in a folder, as transformers reads it; nothing is fetched or executed.

    Raises:
        InputError: transformers is not installed.
        StorageError: no such folder, or no ``config.json`` in it.
        ModelError: a broken one, quantised weights, or a model that transformers does not know.
    """
    if find_spec("transformers") is None:
        raise InputError(f"a Hugging Face model needs transformers: {install('hf')}")
    if not (folder / "config.json").is_file():
        made = "name one of save_pretrained, an adapter after merge_and_unload()"
        raise StorageError(f"there is no folder {str(folder)!r} with a config.json: {made}.")
    from transformers import AutoConfig

    with told_as(ModelError, f"transformers cannot load {str(folder)!r}"):
        config = AutoConfig.from_pretrained(str(folder), **OFFLINE)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"the weights of {str(folder)!r} are quantised: use the model before")
    return config


def _task_in(config: Any, folder: Path) -> str:
    """The task that the configuration's architectures were built for."""
    named = [str(name) for name in config.architectures or []]
    tasks = {kind for kind, endings in ENDINGS.items() if any(n.endswith(endings) for n in named)}
    if len(tasks) != 1:
        held = ", ".join(named) or "no architecture"
        raise ModelError(f"{str(folder)!r} is {held}: say task='classification' or 'causal_lm'")
    return tasks.pop()


@contextmanager
def _quiet() -> Any:
    """Without transformers' own bars and reports: what matters in them is raised here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_weights(folder: Path, kind: str) -> Any:
    import transformers

    auto: Any = getattr(transformers, AUTO[kind])
    with told_as(ModelError, f"transformers cannot load {str(folder)!r} for {kind}"):
        model, about = auto.from_pretrained(
            str(folder), use_safetensors=True, output_loading_info=True, **OFFLINE
        )
    if missing := sorted(about["missing_keys"]):
        raise ModelError(f"{some(missing)} would be random, {str(folder)!r} holds none: train them")
    several = model.config.problem_type not in (None, "single_label_classification")
    if kind == "classification" and (model.config.num_labels < 2 or several):
        said = model.config.problem_type or "regression"
        raise ModelError(f"{str(folder)!r} is a {said} model, no classifier: give its blr.Task")
    return model


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    again = "save it there: tokenizer.save_pretrained(folder)"
    with told_as(ModelError, f"no tokenizer can be loaded from {str(folder)!r}", again):
        tokenizer = AutoTokenizer.from_pretrained(str(folder), **OFFLINE)
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    if not any((folder / name).is_file() for name in files):  # transformers makes an empty one
        raise ModelError(f"{str(folder)!r} holds no tokenizer ({some(sorted(files))}); {again}")
    return tokenizer


def _pad_id(config: Any, tokenizer: Any, folder: Path) -> int:
    """The id that pads; a classifier of the decoder kind looks for it to find the last token."""
    known = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((int(i) for i in known if i is not None and int(i) >= 0), None)
    if pad is None:
        raise ModelError(f"{str(folder)!r} names no padding token: set tokenizer.pad_token")
    config.pad_token_id = pad
    return pad


def _positions(model: Any) -> int:
    """Tokens that the model has positions for; RoBERTa's begin after its padding row."""
    named = getattr(model.config, "max_position_embeddings", None)
    most = named if named is not None and named > 0 else UNBOUNDED  # XLNet says -1 for no limit
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            most = min(most, part.num_embeddings - first)
    return int(most)
