"""``blr-analysis algorithms``."""

from __future__ import annotations

import warnings
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from blr_analysis.cli import main
from blr_analysis.cli.commands import app
from blr_analysis.errors import PosteriorWarning
from blr_analysis.learning_rule.table import ROWS, table1


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["algorithms", *words], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_whole_table() -> None:
    text = run()
    assert all(name in text for name in ROWS)
    assert "square-root" in text and "from_optimizer" in text and "its sites" in text


def test_one_algorithm() -> None:
    text = run("adam")
    assert "squared minibatch gradient" in text and "blr_analysis.learning_rule.optim" in text
    assert "BayesBiNN" not in text


def test_files(tmp_path: Path) -> None:
    run("Adam", "--out", str(tmp_path / "new"))  # the whole, as --out promises
    stored = pd.read_parquet(tmp_path / "new" / "table1.parquet")
    pd.testing.assert_frame_equal(table1(), stored)


def test_an_unknown_name(capsys: pytest.CaptureFixture) -> None:
    assert main(["algorithms", "adamax"]) == 2
    assert "no row is called 'adamax'" in capsys.readouterr().err


def test_a_warning_is_a_line_without_a_place_in_the_code(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> pd.DataFrame:
        warnings.warn("of other\n  data", PosteriorWarning, stacklevel=1)
        return table1()

    monkeypatch.setattr("blr_analysis.learning_rule.table.table1", warned)
    assert main(["algorithms", "Adam"]) == 0
    assert capsys.readouterr().err == "warning: of other data\n"
