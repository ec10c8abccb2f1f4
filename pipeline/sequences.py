"""data/sequences as the stages after reassemble read it."""

from pathlib import Path

from datasets import Dataset

from pipeline.errors import DataError


def load_split(folder: Path) -> Dataset:
    """One split, memory-mapped. Raises DataError when there is none."""
    try:
        return Dataset.load_from_disk(str(folder))
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{folder} holds no sequences; `dvc repro` makes them") from error
