"""What the verifier is (data/verifier.json), and whether it still is.

`identify` writes it; every later stage reads ids and sizes from here instead of trusting tables,
and compares the files and the server it meets with it.
"""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import VerifierError
from pipeline.resume import file_sha256, read_json

VERIFIER_PATH = Path("data/verifier.json")
# All that is not weights: config, tokenizer, chat template, and code where a model brings its own.
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


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
    end_of_turn_id: int
    """the one of end_ids that the family ends an answer with"""
    bos_id: int | None
    control_ids: list[int]
    """special and added tokens of the tokenizer, markers of the family: none belongs inside a
    generated turn"""
    blank_ids: list[int]
    """ids that decode to white space alone: a block of these is an empty block"""
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    family: str
    family_verified: bool
    """whether this project tried a real tokenizer of the family"""

    @cached_property
    def blank(self) -> frozenset[int]:
        return frozenset(self.blank_ids)

    @cached_property
    def markers(self) -> frozenset[int]:
        """Think, end and control tokens: all that is no text."""
        think = (self.think_start_id, self.think_end_id)
        return frozenset((*think, *self.end_ids, *self.control_ids))

    @cached_property
    def turn_breakers(self) -> frozenset[int]:
        """What no generated turn may hold before its end: markers less the think tokens."""
        return self.markers - {self.think_start_id, self.think_end_id}


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


def small_files(model: str, revision: str | None) -> Path:
    """The folder with all that is not weights: the model's own, or a snapshot of the revision.

    Raises:
        VerifierError: the hub does not give it.
    """
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=SMALL_FILES))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise unreadable(model, revision, error) from error


def unreadable(model: str, revision: str | None, error: Exception) -> VerifierError:
    return VerifierError(
        f"{model} at {revision} cannot be read from the hub: {type(error).__name__}; check the "
        "network, the name, the revision and HF_TOKEN"
    )


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """The verifier's own tokenizer, with its own code if it has some.

    Raises:
        VerifierError: it does not load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # the model's own files, and perhaps its own code
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise VerifierError(f"the tokenizer in {folder} does not load: {reason}") from error
