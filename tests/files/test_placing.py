"""One place, one run: who comes second is told so, and a killed run keeps nobody out."""

from __future__ import annotations

import threading
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


def test_runs_beside_one_another_do_not_disturb(tmp_path: Path) -> None:
    """Places of other runs that go while they are looked at, that are made just now, and one that
    is held for a moment only."""
    (tmp_path / ".gone.unfinished").symlink_to("nowhere")
    made = tmp_path / ".made.unfinished"
    made.mkdir()
    with another_run(held, tmp_path / "out") as run:
        threading.Timer(0.1, run.kill).start()
        with drafted(tmp_path / "out") as draft:
            draft.write_text("mine")
    assert (tmp_path / "out").read_text() == "mine"
    assert made.is_dir()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with another_run(drafted, tmp_path / "out") as run:
        run.kill()
    assert [p.name for p in tmp_path.iterdir()] == [".out.unfinished"]
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


def test_parents_made_for_nothing_are_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), drafted(tmp_path / "a" / "b" / "c"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    storage.write(tmp_path / "p", {"w": torch.ones(1)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_what_a_killed_run_left_is_removed_and_named(tmp_path: Path) -> None:
    """By any later run in that folder, whatever it writes; not while somebody holds it."""
    left = tmp_path / ".old.unfinished"
    (left / "tmpabc").mkdir(parents=True)
    (left / "tmpabc" / "part").write_bytes(bytes(1000))
    foreign = tmp_path / ".mine.unfinished"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("all of it")
    with pytest.warns(UserWarning, match=r"old\.unfinished.*1,000"):
        storage.write(tmp_path / "new.safetensors", {"w": torch.ones(1)}, {})
    assert not left.exists()
    assert foreign.exists()
    with held(tmp_path / "other"):
        storage.write(tmp_path / "two.safetensors", {"w": torch.ones(1)}, {})
        assert (tmp_path / ".other.unfinished").exists()


def test_a_disk_that_is_read_only_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing.os, "access", lambda *_: False)
    with pytest.raises(StorageError, match="read-only"):
        placing.check_room(tmp_path / "out", 2**60)
