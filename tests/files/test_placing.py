"""One place, one run: who comes second is told so, and a killed run keeps nobody out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import FORK

from blr_analysis.errors import StorageError
from blr_analysis.files import drafted, held, storage
from blr_analysis.files.placing import folder_for

ONE = {"w": torch.ones(1)}


def writes(how: Any, target: Path, there: Connection) -> None:
    with how(target):
        there.send("begun")
        there.recv()


@contextmanager
def another_run(how: Any, target: Path) -> Iterator[Any]:
    """A process that has ``target`` until it is killed, or the block ends."""
    here, there = FORK.Pipe()
    run = FORK.Process(target=writes, args=(how, target, there))
    run.start()
    assert here.recv() == "begun"
    yield run
    here.send("end")
    run.join()


@pytest.mark.parametrize("mine", [held, folder_for])
def test_two_runs_do_not_write_one_place(tmp_path: Path, mine: Any) -> None:
    target = tmp_path / "out"
    with another_run(mine, target) as run:
        with pytest.raises(StorageError, match="another run is writing"), mine(target):
            pytest.fail("both write")
        if mine is held:
            with pytest.raises(StorageError, match="another run is writing"):
                storage.write(target, ONE, {})
    assert run.exitcode == 0
    assert not [*tmp_path.iterdir()]
    with mine(target):
        target.mkdir(exist_ok=True)
        (target / "mine").write_text("mine")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/mine"]


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    storage.write(tmp_path / "out", {"w": torch.zeros(1)}, {})
    with another_run(drafted, tmp_path / "out") as run:
        run.kill()
    assert storage.read(tmp_path / "out")[0]["w"].tolist() == [0]
    assert run.exitcode == -9
    (left,) = tmp_path.glob(".out.unfinished")
    assert [*left.iterdir()]
    storage.write(tmp_path / "out", ONE, {})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert storage.read(tmp_path / "out")[0]["w"].tolist() == [1]


def test_a_run_that_holds_a_place_writes_to_it_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    with held(tmp_path / "link"):
        storage.write(tmp_path / "real", ONE, {})
        storage.write(tmp_path / "link", {"w": torch.zeros(1)}, {})
    assert storage.read(tmp_path / "real")[0]["w"].tolist() == [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_locks_that_the_disk_lacks_and_one_that_is_of_a_folder_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    place = tmp_path / ".out.unfinished"

    def removed(*_: object) -> None:
        """By its last holder, while this one waits for the lock."""
        place.rmdir()
        (place / "theirs").mkdir(parents=True)

    monkeypatch.setattr("fcntl.flock", unsupported)
    storage.write(tmp_path / "p", ONE, {})
    monkeypatch.setattr("fcntl.flock", removed)
    with pytest.raises(StorageError, match="another run"), held(tmp_path / "out"):
        pytest.fail("both write")
    assert (place / "theirs").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.unfinished", "p"]
