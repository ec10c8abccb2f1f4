"""What the verifier is (data/verifier.json), and whether it still is.

`identify` writes it; every later stage reads ids and sizes from here instead of trusting tables,
and compares the files and the server it meets with it.
"""

import hashlib
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import VerifierError
from pipeline.resume import file_sha256, read_json

VERIFIER_PATH = Path("data/verifier.json")


class FileIdentity(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    size_bytes: int
    sha256: str


class VerifierIdentity(BaseModel):
    """The verifier as `identify` found it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    revision: str | None
    config_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    small_files: list[FileIdentity]
    """config, tokenizer, chat template, generation config: all that is not weights"""
    weights: list[FileIdentity]
    weights_fingerprint: str
    """sha256 over name, size and sha256 of every weights file"""
    think_start: str
    think_end: str
    think_start_id: int
    think_end_id: int
    end_ids: list[int]
    """ids that end a generated turn: eos_token_id of generation_config.json and config.json"""
    bos_id: int | None
    control_ids: list[int]
    """special tokens of the tokenizer: none of them belongs inside a generated turn"""
    blank_ids: list[int]
    """ids that decode to white space alone: a block of these is an empty block"""
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int

    @cached_property
    def blank(self) -> frozenset[int]:
        return frozenset(self.blank_ids)

    @cached_property
    def markers(self) -> frozenset[int]:
        """Think, end and control tokens: all that is no text."""
        think = (self.think_start_id, self.think_end_id)
        return frozenset((*think, *self.end_ids, *self.control_ids))


def fingerprint(weights: list[FileIdentity]) -> str:
    digest = hashlib.sha256()
    for file in weights:
        digest.update(f"{file.name} {file.size_bytes} {file.sha256}\n".encode())
    return digest.hexdigest()


def load_verifier(path: Path = VERIFIER_PATH) -> VerifierIdentity:
    """Read verifier.json and check that the files it describes are still those.

    Raises:
        VerifierError: a file is missing or has other bytes. Of weights the size is compared, and
            the bytes only if the file is younger than verifier.json.
    """
    try:
        identity = VerifierIdentity.model_validate(read_json(path))
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise VerifierError(
            f"{path} is not what `identify` writes now ({key}); `dvc repro -f identify`"
        ) from error
    folder = Path(identity.model)
    if not folder.is_dir():
        return identity  # a hub snapshot is pinned by its revision
    written = path.stat().st_mtime
    for file in [*identity.small_files, *identity.weights]:
        on_disk = folder / file.name
        # Reading a terabyte to be sure is for `identify`; here old weights are believed.
        is_old = (
            file in identity.weights and on_disk.is_file() and on_disk.stat().st_mtime <= written
        )
        same = (
            on_disk.is_file()
            and on_disk.stat().st_size == file.size_bytes
            and (is_old or file_sha256(on_disk) == file.sha256)
        )
        if not same:
            raise VerifierError(
                f"verifier changed: {on_disk} is not the file in {path}; `dvc repro -f identify`"
            )
    return identity
