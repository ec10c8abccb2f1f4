"""Are the hidden states on disk what was written?

    python -m pipeline.verify_states          # make verify-states

reads   data/hidden_states; when something is damaged, dvc.lock and DVC's cache
writes  nothing; removes damaged shards, and DVC's copy of one if that is damaged too

Every shard is read from its first to its last byte and compared with its checksum in manifest.json.
The stages do not do so: they find a shard that is cut, or that was touched since the manifest was
written, but a byte that a disk lost under an old time only shows here. What is removed is made
again by `dvc repro extract`, and only that. Code 0 when all are sound, else 1.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from pipeline.errors import DataError, PipelineError
from pipeline.manifest import MANIFEST, PLAN, SHARDS, ShardFile, load_manifest, read_entry
from pipeline.progress import progress_bar
from pipeline.records import HIDDEN_STATES
from pipeline.resume import one_writer

LOCK = Path("dvc.lock")
MEGABYTE = 1_000_000
PIECE = 8 * MEGABYTE
HASH = "md5"  # DVC's
# Raised by what is no lock (a merge conflict, say), or no list of files.
NO_LOCK = (yaml.YAMLError, TypeError, AttributeError, ValueError)


def damage(path: Path, listed: ShardFile, advance: Callable[[int], None]) -> str | None:
    """What is wrong with a shard, None when it is sound; `advance` is told of bytes read.

    A newer one of other sequences than the manifest says was put there by a run that was killed
    before it wrote the manifest: it has no checksum yet, and safetensors has found it whole.
    """
    try:
        file = path.stat()
    except FileNotFoundError:
        return "it is not there"
    num_bytes, entry = file.st_size, read_entry(path)
    if entry and entry != listed.entry():
        is_newer = file.st_mtime > path.with_name(MANIFEST).stat().st_mtime
        return None if is_newer else "its header describes other sequences than the manifest"
    if num_bytes != listed.num_bytes:
        return f"{num_bytes:,} bytes instead of {listed.num_bytes:,}"
    try:
        found = digest(path, "sha256", advance)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if found == listed.sha256:
        return None
    if entry is None:
        return "its header is damaged"
    return f"its bytes have changed: sha256 {found[:12]}… instead of {listed.sha256[:12]}…"


def digest(path: Path, algorithm: str, advance: Callable[[int], None] = lambda _: None) -> str:
    """Like hashlib.file_digest, and `advance` is told of bytes read."""
    hashed, piece = hashlib.new(algorithm, usedforsecurity=False), bytearray(PIECE)
    view = memoryview(piece)
    with path.open("rb", buffering=0) as file:
        while num_read := file.readinto(view):
            hashed.update(view[:num_read])
            advance(num_read)
    return hashed.hexdigest()


def verify(folder: Path, listed: dict[str, ShardFile]) -> dict[str, str]:
    """What is wrong, by file name: with every shard of the manifest, and with what is there beside
    them and has no header. A shard that a killed run finished has no checksum yet."""
    num_bytes = sum(shard.num_bytes for shard in listed.values())
    wrong = {}
    with progress_bar("verifying", -(-num_bytes // MEGABYTE), "MB") as bar:
        done = 0

        def advance(num_read: int) -> None:
            nonlocal done
            before, done = done, done + num_read
            bar.advance(done // MEGABYTE - before // MEGABYTE)

        for name, shard in listed.items():
            if what := damage(folder / name, shard, advance):
                wrong[name] = what
    for path in sorted(folder.glob(SHARDS)):
        if path.name not in listed and read_entry(path) is None:
            wrong[path.name] = "it is no shard"
    return wrong


def copy_in_cache(path: Path) -> Path | None:
    """Where DVC keeps what it last recorded for a file of an output folder, if it does."""
    from dvc.exceptions import DvcException  # here: it takes a second, and damage is rare
    from dvc.repo import Repo

    try:
        cache = Path(Repo().cache.local.path)
        outs = [
            out
            for stage in yaml.safe_load(LOCK.read_text(encoding="utf-8"))["stages"].values()
            for out in stage.get("outs", [])
        ]
        recorded = next(out[HASH] for out in outs if out["path"] == path.parent.as_posix())
        files = json.loads(in_cache(cache, recorded).read_text(encoding="utf-8"))
        found = next(file[HASH] for file in files if file["relpath"] == path.name)
    except (DvcException, OSError, KeyError, StopIteration, *NO_LOCK):
        return None
    copy = in_cache(cache, found)
    return copy if copy.exists() else None


def in_cache(cache: Path, name: str) -> Path:
    return cache / name[:2] / name[2:]


def remove(path: Path, listed: ShardFile | None) -> bool:
    """Remove a damaged file; whether DVC's cache has a sound copy of it.

    A copy whose content is not what its name says goes too. DVC does not look: when the file has
    been made again, it would put that copy in the place of the new one.
    """
    copy = copy_in_cache(path)
    is_sound = bool(copy and listed and digest(copy, "sha256") == listed.sha256)
    if copy and not is_sound and digest(copy, HASH) != copy.parent.name + copy.name:
        copy.unlink()
    path.unlink(missing_ok=True)  # of a link into the cache, the link
    return is_sound


def main() -> None:
    if not HIDDEN_STATES.exists():
        raise DataError(f"{HIDDEN_STATES} is not there; `make pull` or `dvc repro` brings it")
    with one_writer(HIDDEN_STATES):
        if (HIDDEN_STATES / PLAN).exists() and not (HIDDEN_STATES / MANIFEST).exists():
            print(f"{HIDDEN_STATES}: nothing is stored, extract.mode is streamed")
            return
        listed = {shard.file: shard for shard in load_manifest(HIDDEN_STATES).shards}
        wrong = verify(HIDDEN_STATES, listed)
        if not wrong:
            print(f"{HIDDEN_STATES}: {len(listed)} shards, all as {MANIFEST} says")
            return
        copies = []
        for name, what in wrong.items():
            print(f"{HIDDEN_STATES / name}: {what}", file=sys.stderr)
            copies.append(remove(HIDDEN_STATES / name, listed.get(name)))
    again = "`dvc repro extract` makes again what is missing, and only that"
    if all(copies):
        again = f"`dvc checkout {HIDDEN_STATES}` brings back what is missing from DVC's cache"
    sys.exit(f"{len(wrong)} damaged and removed: {again}")


if __name__ == "__main__":
    try:
        main()
    except PipelineError as error:
        sys.exit(f"verify_states: {error}")
