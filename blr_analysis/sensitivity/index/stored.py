"""The folder of an index: its files, and how they are written, read and checked.

index_plan.json         what the index will hold: written first, so that a build can go on
gradients-00001-of-…    sketches of 256 examples' gradients
posterior.safetensors   under which gradients are compared
examples.parquet        index, self-influence and metadata of every example
index_config.json       the plan, the measured error, and checksums of the files: written last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from blr_analysis.errors import StorageError
from blr_analysis.files import Folder
from blr_analysis.files.checksums import checksum_of
from blr_analysis.files.headers import CHECKSUM, FILES, RECORD, damaged, read_json, record_text
from blr_analysis.files.placing import drafted
from blr_analysis.files.shards import save_file, shard_name
from blr_analysis.files.source import bytes_of
from blr_analysis.files.storage import file_checksum

FORMAT = "blr_analysis.index"
VERSION = 8
PLAN = "index_plan.json"
CONFIG = "index_config.json"
EXAMPLES = "examples.parquet"
POSTERIOR = "posterior.safetensors"
STEM = "gradients"
SHARD = 256  # examples per file: what a killed run loses at most

Records = Mapping[str, Tensor]  # of some examples, what files hold, by name
Compute = Callable[[Records], Tensor]  # rows of something, from records
Unread = dict[str, dict[str, str]]  # checksums of tensors that nobody has read, by file and name


class FilePart(NamedTuple):
    """Rows of one file.

    Attributes:
        name: of the file.
        file_rows: all rows that it holds.
        rows: those that are asked for.
    """

    name: str
    file_rows: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Store:
    """The files of an index.

    Attributes:
        path: their folder.
        n_data: examples that they hold.
        checksums: of the files, by name, once the index is complete.
        unread: checksums of the tensors that nobody has read yet.
    """

    path: Path
    n_data: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    unread: Unread = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Store:
        """The files of an index that is complete.

        Raises:
            StorageError: nothing there, or an index that is not complete or is damaged.
        """
        if not (path / CONFIG).is_file():
            if (path / PLAN).is_file():
                raise StorageError(
                    f"{str(path)!r} holds an index that is not complete: build it again, and it "
                    "goes on."
                )
            raise StorageError(f"{str(path)!r} holds no index: build one.")
        config = read_checked(path / CONFIG)
        checksums = config[FILES]
        store = cls(path, config["n_data"], checksums)
        missing = store.missing()
        if missing:
            raise StorageError(f"{str(path)!r} lacks {missing[0]}: copy the whole folder.")
        for name, rows in store.files.items():
            store.unread[name] = check_shard(path / name, rows, checksums.get(name))
        return store

    @property
    def config(self) -> dict[str, Any]:
        """The record of an index that is complete."""
        return read_checked(self.path / CONFIG)

    @property
    def plan(self) -> dict[str, Any]:
        """What was decided when the index was begun."""
        return read_checked(self.path / PLAN)

    @property
    def is_complete(self) -> bool:
        return (self.path / CONFIG).is_file()

    @property
    def files(self) -> dict[str, Tensor]:
        """The examples of each file of records, by its name."""
        parts = torch.arange(self.n_data).split(SHARD)
        names = [shard_name(STEM, nth, len(parts)) for nth in range(1, len(parts) + 1)]
        return dict(zip(names, parts, strict=True))

    def missing(self) -> list[str]:
        """Files of records that are not there."""
        return [name for name in self.files if not (self.path / name).is_file()]

    def read(
        self, compute: Compute, rows: Tensor | None = None, *, threads: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows, and what is computed from their records, file by file.

        Args:
            rows: which, in rising order; None: all.
            threads: each reads a file at a time.
        """
        parts = self._parts(rows)
        if threads == 1 or len(parts) == 1:
            for part in parts:
                yield part.rows, self._computed(part, compute)
            return
        threads_before = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(
                threads, initializer=torch.set_num_threads, initargs=(1,)
            ) as pool:
                values = list(pool.map(lambda part: self._computed(part, compute), parts))
        finally:
            torch.set_num_threads(threads_before)
        for part, part_values in zip(parts, values, strict=True):
            yield part.rows, part_values

    def _parts(self, rows: Tensor | None) -> list[FilePart]:
        files = self.files
        if rows is None:
            return [FilePart(name, file_rows, file_rows) for name, file_rows in files.items()]
        counts = torch.bincount(rows // SHARD, minlength=len(files)).tolist()
        parts = zip(files.items(), rows.split(counts), strict=True)
        return [
            FilePart(name, file_rows, chosen) for (name, file_rows), chosen in parts if len(chosen)
        ]

    def _computed(self, part: FilePart, compute: Compute) -> Tensor:
        """From most rows of a file without copies, and with a look at its checksums."""
        file = self.path / part.name
        records = load_records(file)
        places = part.rows - part.file_rows[0]
        if 2 * len(part.rows) > len(part.file_rows):
            checked = CheckedRecords(file, records, self.unread.get(part.name, {}))
            return compute(checked)[places]
        return compute({name: tensor[places] for name, tensor in records.items()})

    def examples(self) -> dict[str, list[Any]]:
        """The table of the examples, by column.

        Raises:
            StorageError: a damaged file.
        """
        import pyarrow.parquet as parquet

        file = self.path / EXAMPLES
        if file_checksum(file) != self.checksums.get(EXAMPLES):
            raise StorageError(f"{damaged(file)[:-1]}, or delete it and build again.")
        try:
            return parquet.read_table(file).to_pydict()
        except (OSError, ValueError) as error:  # ArrowInvalid is one
            raise _damaged(file) from error

    def write_examples(self, metadata: Mapping[str, Any]) -> None:
        """Write the table, when all records are there.

        A column of metadata that has the name of a computed one is called ``…_metadata``.
        """
        import pyarrow as pa
        import pyarrow.parquet as parquet

        records = [load_records(self.path / name) for name in self.files]
        squares = torch.cat([part["self_influence"] for part in records])
        columns = {"index": list(range(self.n_data)), "self_influence": squares.tolist()}
        users_columns = {
            f"{name}_metadata" if name in columns else name: values
            for name, values in metadata.items()
        }
        with drafted(self.path / EXAMPLES) as draft:
            parquet.write_table(pa.table(columns | users_columns), draft)

    def write_config(self, config: dict[str, Any]) -> None:
        """Write the record, when all other files are there: the index is complete."""
        names = [*self.files, POSTERIOR, EXAMPLES, PLAN]
        checksums = {name: file_checksum(self.path / name) for name in names}
        write_record(self.path / CONFIG, config, checksums)


class CheckedRecords(Mapping[str, Tensor]):
    """The tensors of one file, each compared with its checksum when it is first read.

    Args:
        file: where they are from.
        tensors: the same, mapped into memory.
        unread: checksums of those that nobody has read; they leave it when they are read.
    """

    def __init__(self, file: Path, tensors: Records, unread: dict[str, str]) -> None:
        self._file = file
        self._tensors = tensors
        self._unread = unread

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        checksum = self._unread.get(name)
        if checksum is not None:
            if checksum_of(bytes_of(tensor)) != checksum:
                raise StorageError(f"{damaged(self._file)[:-1]}, or delete it and build again.")
            self._unread.pop(name, None)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def load_records(file: Path) -> Records:
    """The records of one file, mapped into memory.

    Raises:
        StorageError: a damaged file.
    """
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise _damaged(file) from error


def write_shard(records: dict[str, Tensor], file: Path, rows: Tensor) -> None:
    """Write the records of these examples, in one step."""
    metadata = {"format": "pt", "first": str(int(rows[0])), RECORD: CONFIG}
    with drafted(file) as draft:
        save_file(records, draft, metadata)


def check_shard(file: Path, rows: Tensor, checksum: str | None) -> dict[str, str]:
    """The checksums of a file's tensors that were not read yet: all but the self-influences.

    Raises:
        StorageError: a damaged file, or one of other examples or of another index.
    """
    try:
        source = Folder.open(file)
        squares = source.tensor("self_influence")
    except (KeyError, StorageError) as error:
        raise _damaged(file) from error
    header = source.headers[file]
    has_these_rows = source.metadata.get("first") == str(int(rows[0])) and len(squares) == len(rows)
    if not has_these_rows or header.checksum != checksum:
        raise StorageError(f"{str(file)!r} is another file of an index: copy the whole folder.")
    return {name: sum_ for name, sum_ in header.checksums.items() if name != "self_influence"}


def write_record(
    file: Path, content: dict[str, Any], checksums: Mapping[str, str] | None = None
) -> None:
    """Write a plan or a config, in one step."""
    with drafted(file) as draft:
        draft.write_text(record_text(content, checksums), encoding="utf-8")


def read_checked(file: Path) -> dict[str, Any]:
    """A plan or a config.

    Raises:
        StorageError: a damaged file, one of something else, or of another version.
    """
    content = read_json(file)
    if content.get("format") != FORMAT:
        raise StorageError(f"{str(file)!r} is no index of this package.")
    if content.get("version") != VERSION:
        raise StorageError(
            f"{str(file)!r} is of another version than {VERSION}: delete the folder, index again."
        )
    if CHECKSUM not in content:
        raise StorageError(damaged(file))
    return content


def _damaged(file: Path) -> StorageError:
    return StorageError(f"{str(file)!r} is damaged: delete it and build again.")
