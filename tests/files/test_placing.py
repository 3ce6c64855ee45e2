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
from blr_analysis.files import drafted, folder_for, held, placing, storage


def writes(how: Any, target: Path, there: Connection) -> None:
    with how(target) as place:
        there.send("begun")
        there.recv()
        if how is drafted:
            place.write_text("theirs")


@contextmanager
def another_run(how: Any, target: Path) -> Iterator[Any]:
    """A process that writes ``target`` until it is killed, or the block ends."""
    here, there = FORK.Pipe()
    run = FORK.Process(target=writes, args=(how, target, there))
    run.start()
    assert here.recv() == "begun"
    yield run
    here.send("end")
    run.join()


@pytest.mark.parametrize("mine", [drafted, folder_for])
def test_two_runs_do_not_write_one_place(tmp_path: Path, mine: Any) -> None:
    target = tmp_path / "out"
    with another_run(mine, target) as run:
        with pytest.raises(StorageError, match="another run is writing"), mine(target):
            pytest.fail("both write")
        if mine is drafted:
            with pytest.raises(StorageError, match="another run is writing"):
                storage.write(target, {"w": torch.ones(1)}, {})
    assert run.exitcode == 0
    if mine is drafted:
        assert target.read_text() == "theirs"
    with mine(target) as place:
        (place / "mine" if mine is folder_for else place).write_text("mine")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with another_run(drafted, tmp_path / "out") as run:
        run.kill()
    (left,) = tmp_path.iterdir()
    assert left.name == ".out.unfinished" and [*left.iterdir()]
    storage.write(tmp_path / "out", {"w": torch.ones(1)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_run_that_holds_a_place_writes_to_it_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real", target_is_directory=True)
    with held(tmp_path / "link"):
        storage.write(tmp_path / "real", {"w": torch.ones(1)}, {})
        storage.write(tmp_path / "link", {"w": torch.zeros(1)}, {})
    assert storage.read(tmp_path / "real")[0]["w"].tolist() == [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_a_disk_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    storage.write(tmp_path / "p", {"w": torch.ones(1)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_a_disk_that_is_read_only_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="read-only"):
        placing.check_room(tmp_path / "out", 2**60)


def test_a_place_that_its_last_holder_removes_is_not_ours(tmp_path: Path) -> None:
    """Locked, but gone from the disk when the lock is had."""
    place = tmp_path / ".out.unfinished"
    place.mkdir()

    def removed(lock: int, how: int) -> None:
        place.rmdir()
        place.mkdir()
        (place / "theirs").mkdir()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fcntl.flock", removed)
        with pytest.raises(StorageError, match="another run"), held(tmp_path / "out"):
            pytest.fail("both write")
    assert (place / "theirs").is_dir()
