"""data/sequences on disk: written row by row, read memory-mapped.

    with SequenceWriter(folder) as writer:
        writer.add(row)                        a dict of records.SEQUENCE_COLUMNS
    load_split(folder)                         → datasets.Dataset, as speculators loads it too

The bytes depend on the rows alone, and memory does not grow with their number.
"""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from datasets.table import InMemoryTable

from pipeline.errors import DataError
from pipeline.records import SEQUENCE_COLUMNS
from pipeline.resume import TEMP_SUFFIX, file_sha256

ROWS_A_BATCH = 256
DATA_FILE = "data-00000-of-00001.arrow"  # the name that `datasets` gives a single file
READ_BY_SPECULATORS = ["input_ids", "loss_mask", "seq_len"]
# speculators compares input_ids with a server's int64.
LISTS = {"input_ids": "int64", "loss_mask": "int8"}
TEXTS = frozenset({"sample_id", "key", "source", "status", "cut_in", "ablation"})
FLAGS = frozenset({"rebuilt", "control_text"})


def _kind(column: str) -> Value | List:
    if column in LISTS:
        return List(Value(LISTS[column]))
    return Value("string" if column in TEXTS else "bool" if column in FLAGS else "int64")


FEATURES = Features({column: _kind(column) for column in SEQUENCE_COLUMNS})
SCHEMA = FEATURES.arrow_schema  # `datasets` makes it anew each time it is asked for


class SequenceWriter:
    """A `datasets` folder that takes its place when the block ends well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_rows = 0
        self._temp = folder.with_name(folder.name + TEMP_SUFFIX)
        self._batch: list[dict[str, Any]] = []
        self._first: pa.Table | None = None

    def __enter__(self) -> "SequenceWriter":
        shutil.rmtree(self._temp, ignore_errors=True)
        self._temp.mkdir(parents=True)
        self._rows = self._temp / "rows.arrow"
        self._writer = ArrowWriter(path=str(self._rows), features=FEATURES)
        return self

    def add(self, row: dict[str, Any]) -> None:
        self._batch.append(row)
        self.num_rows += 1
        if len(self._batch) == ROWS_A_BATCH:
            self._flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._writer.finalize()
                self._take_place()
            else:
                self._writer.close()
        finally:
            shutil.rmtree(self._temp, ignore_errors=True)

    def _flush(self) -> None:
        if self._batch:
            arrays = [
                _column(name, [row[name] for row in self._batch]) for name in SEQUENCE_COLUMNS
            ]
            table = pa.Table.from_arrays(arrays, schema=SCHEMA)
            self._writer.write_table(table)
            self._first = self._first or table.slice(0, 1)
        self._batch = []

    def _take_place(self) -> None:
        """Have `datasets` write a folder with the first row, and put all of them in its place.

        It would put a random fingerprint into state.json unless it is given one.
        """
        whole = self._temp / "whole"
        first = InMemoryTable(self._first or SCHEMA.empty_table())
        like = Dataset(first, fingerprint=file_sha256(self._rows)[:16])
        # speculators' loader wants tensors of its columns, and sets no format itself.
        like.set_format("torch", columns=READ_BY_SPECULATORS, output_all_columns=True)
        like.save_to_disk(str(whole), num_shards=1)
        assert (whole / DATA_FILE).is_file()
        self._rows.replace(whole / DATA_FILE)
        shutil.rmtree(self.folder, ignore_errors=True)
        whole.rename(self.folder)


def _column(name: str, values: list[Any]) -> pa.Array:
    if name not in LISTS:
        return pa.array(values, type=SCHEMA.field(name).type)
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = pa.array(np.concatenate(values), type=LISTS[name])
    return pa.ListArray.from_arrays(offsets, flat, type=SCHEMA.field(name).type)


def load_split(folder: Path) -> Dataset:
    """One split, memory-mapped, its values as plain Python. Raises DataError when there is none."""
    try:
        return Dataset.load_from_disk(str(folder)).with_format(None)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{folder} holds no sequences; `dvc repro` makes them") from error
