"""What a posterior knows of its fit, data and training: kept wherever a posterior goes, read from
files of before, dropped where it was measured of other data."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import blr_analysis as blr
from blr_analysis.errors import InputError, PosteriorError
from blr_analysis.posterior.facts import Calibration, Facts, Rerun, facts_of, recorded
from blr_analysis.posterior.minimum import PrecisionMatch, Stationarity

MEASURED = {
    "stationarity": Stationarity(0.5, 2.0, 1.0, 10, "categorical"),
    "saturated": 0.25,
    "calibration": Calibration(0.3, error=0.1, how="exact solves", examples=7),
    "fingerprint": {"outputs": [1.0], "targets": [2.0], "losses": [3.0]},
    "frozen_values": {"w": [1.0, 2.0]},
    "input_ranges": {"mean": [0.0, 1.0], "spread": [2.0, 3.0]},
    "precision_match": PrecisionMatch(0.2, 1.1, probes=8),
}
OF_TRAINING = {
    "start": {"w": [0.5, 7.0]},
    "source": "laplace",
    "is_classifier": True,
    "rerun": Rerun(3, known=False, ending="ended elsewhere"),
    "ending": "ended elsewhere",
}
# as files of before say it
RECORD = {
    "kind": "ggn",
    "source": "laplace",
    "classifier": True,
    "stationarity": {
        "residual": 0.5,
        "decrement": 2.0,
        "pull": 1.0,
        "n_data": 10,
        "likelihood": "categorical",
        "blocks": {},
    },
    "saturated": 0.25,
    "calibration": {
        "temperature": 0.3,
        "error": 0.1,
        "how": "exact solves",
        "examples": 7,
        "ending": "",
    },
    "rerun": {"seed": 3, "known": False, "ending": "ended elsewhere"},
    "fingerprint": {"outputs": [1.0], "targets": [2.0], "losses": [3.0]},
    "frozen_values": {"w": [1.0, 2.0]},
    "input_ranges": {"mean": [0.0, 1.0], "spread": [2.0, 3.0]},
    "start": {"w": [0.5, 7.0]},
    "precision_match": {"mismatch": 0.2, "ratio": 1.1, "probes": 8, "draws": 0},
}


def posterior(record: Any) -> blr.Posterior:
    precision = {"w": torch.ones(2)}
    mean = {"w": torch.zeros(2)}
    return blr.Posterior(mean, precision, prior_precision=1.0, n_data=10, record=record)


def facts(q: blr.Posterior) -> dict[str, Any]:
    return {name: getattr(q, name) for name in MEASURED | OF_TRAINING}


def test_a_record_of_before_gives_the_fields_and_a_file_keeps_them(tmp_path: Path) -> None:
    q = posterior(RECORD)
    assert facts(q) == MEASURED | OF_TRAINING
    assert (q.temperature, q.temperature_error) == (0.3, 0.1)
    q.save(tmp_path / "q.safetensors")
    loaded = blr.Posterior.load(tmp_path / "q.safetensors")
    rebuilt = posterior(loaded.record)
    wider = q.to("cpu", torch.float64)
    for copied in (loaded, rebuilt, wider, q.changed(record=q.record), copy.deepcopy(q)):
        assert facts(copied) == facts(q)
        assert copied.record == q.record
    assert json.loads(json.dumps(q.record)) == q.record
    assert q.record["kind"] == "ggn"


def test_nothing_is_known_of_what_nobody_measured() -> None:
    q = posterior(None)
    assert facts(q) == facts(posterior(recorded(Facts())))
    assert q.record == {}
    assert q.note == ""
    assert q.at_minimum is None
    assert facts_of({"kind": "ivon"}) == Facts()


def test_a_record_is_read_only() -> None:
    q = posterior({"step": 3})
    for write in (
        lambda: q.record.update(step=4),
        lambda: q.record.__setitem__("step", 4),
        lambda: q.record.pop("step"),
    ):
        with pytest.raises(InputError, match="not written into"):
            write()
    assert q.changed(record={**q.record, "step": 4}).record == {"step": 4}
    assert q.record == {"step": 3}


@pytest.mark.parametrize(
    ("word", "entry"),
    [
        ("calibration", "0.3"),
        ("calibration", {"error": 0.1}),
        ("stationarity", [1.0]),
        ("rerun", 3),
        ("saturated", "most"),
        ("fingerprint", {"outputs": 1.0}),
        ("frozen_values", [1.0]),
        ("input_ranges", {"mean": 1.0}),
        ("start", {"w": 0.5}),
        ("precision_match", {"ratio": 1.0}),
    ],
)
def test_a_damaged_entry_is_named(word: str, entry: Any) -> None:
    with pytest.raises(PosteriorError, match=f"{word!r} is damaged"):
        posterior({word: entry})


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 3, generator=generator), torch.arange(20) % 2


def test_a_changed_posterior_keeps_what_holds_of_the_training_alone() -> None:
    task = blr.Task(nn.Linear(3, 2), data())
    of_training = {**OF_TRAINING, "start": None}  # analyses take the posterior as it was drawn
    q = blr.fit_laplace(task, prior_precision=1.0).changed(**MEASURED, **of_training)
    q = q.changed(fingerprint=blr.fit_laplace(task, prior_precision=1.0).fingerprint)
    left = blr.what_if(task, q, remove=[0, 1], solver="posterior").posterior
    assert left is not None
    unknown = facts(posterior(None))
    assert facts(left) == unknown | of_training
    assert left.record["kind"] == "what_if"
