"""Stage 5, extract: the verifier's hidden states on every training and held-out sequence.

    python -m pipeline.extract

reads   data/sequences/{train,held_out}, data/verifier.json
writes  data/hidden_states/ (see pipeline.manifest; parity.json is the parity gate's, see
        pipeline.parity), reports/extract.json
params  extract.*, and of verifier.* what its server needs (all but model, revision, parser)

Shard i holds the sequences, one a turn, whose prompt_index lies in [i·n, (i+1)·n), where n is
extract.samples_per_shard, so that more questions touch the last shard alone. A shard that is there
already stays as it is, byte for byte; within one that changes, states of the same tokens are
copied. Only the rest is asked of vLLM, which runs each sequence through the verifier once
(see pipeline.capture). With extract.mode streamed there are no shards: what they would hold is
planned and proved, and asked for when it is needed (see pipeline.streaming).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from pydantic import BaseModel

from pipeline.errors import DataError
from pipeline.manifest import (
    MANIFEST,
    PLAN,
    SHARDS,
    Manifest,
    SequenceRecord,
    ShardEntry,
    ShardFile,
    StatesRejection,
    ids_sha256,
    plan,
    shard_name,
    survey,
)
from pipeline.params import Params, load_params
from pipeline.records import HIDDEN_STATES, SEQUENCES, Ablation, Split, count_by
from pipeline.resume import TEMP_SUFFIX, content_key, one_writer, write_json
from pipeline.sequences import load_split
from pipeline.server import Endpoint
from pipeline.stage import run_stage
from pipeline.verifier import VerifierIdentity, load_verifier

METRICS_PATH = Path("reports/extract.json")
MADE_BY = ("weights_fingerprint", "served_as", "layer_ids")
PARITY = "parity.json"  # beside the shards: what the parity gate measured, and on which settings


def load_sequences(folder: Path) -> Dataset:
    """Both splits as one, in the order of prompt_index; turns of a conversation stay in theirs.

    Raises:
        DataError: there is none, or two rows have one key.
    """
    splits = [load_split(folder / split) for split in Split]
    sequences = concatenate_datasets([split for split in splits if len(split)] or splits)
    if not len(sequences):
        raise DataError(f"{folder} is empty: reports/reassemble.json says where the rows went")
    if len(set(sequences["key"])) < len(sequences):
        raise DataError(f"{folder} holds one trace key twice; `dvc repro -f reassemble`")
    return sequences.select(np.argsort(sequences["prompt_index"], kind="stable"))


def record_of(row: dict[str, Any]) -> SequenceRecord:
    """A sequence as the manifest knows it. Training reads the last state from the first supervised
    token on: speculators aligns the loss mask with the token that the state was computed at."""
    supervised = np.flatnonzero(row["loss_mask"])
    num_tokens = len(row["input_ids"])
    return SequenceRecord(
        sample_id=str(row["sample_id"]),
        key=str(row["key"]),
        ids_sha256=ids_sha256(row["input_ids"]),
        num_tokens=num_tokens,
        num_last_states=num_tokens - int(supervised[0]) if len(supervised) else 0,
        ablation=Ablation(row["ablation"]),
    )


def wanted_shards(
    sequences: Dataset, params: Params, verifier: VerifierIdentity
) -> dict[str, ShardEntry]:
    """What data/hidden_states shall hold, by file name.

    Raises:
        DataError: extract.layer_ids asks for a layer that the verifier does not have.
    """
    extract, served = params.extract, params.verifier
    if extract.layer_ids[-1] > verifier.num_hidden_layers:
        raise DataError(
            f"extract.layer_ids is {extract.layer_ids}, but {verifier.model} has "
            f"{verifier.num_hidden_layers} layers"
        )
    served_as = {
        "dtype": served.dtype,
        "quantization": served.quantization,
        "config_sha256": verifier.config_sha256,
    }
    columns = ["sample_id", "key", "prompt_index", "input_ids", "loss_mask", "ablation"]
    shards = groupby(
        sequences.select_columns(columns).with_format("numpy"),
        key=lambda row: int(row["prompt_index"]) // extract.samples_per_shard,
    )
    return {
        shard_name(index): ShardEntry(
            layer_ids=[*extract.layer_ids, verifier.num_hidden_layers],
            dtype=extract.dtype,
            weights_fingerprint=verifier.weights_fingerprint,
            served_as=content_key(served_as),
            sequences=[record_of(row) for row in rows],
        )
        for index, rows in shards
    }


class Proof(BaseModel):
    """parity.json: what the parity gate measured, and what that holds for."""

    settings: dict[str, Any]
    no_reference: str | None
    max_errors: list[float] | None
    top1_agreement: float
    together_max_error: float


def load_proof(folder: Path) -> Proof | None:
    """None: nothing is proved yet, or what was written is damaged, which comes to the same."""
    try:
        return Proof.model_validate_json((folder / PARITY).read_bytes())
    except (OSError, ValueError):
        return None


def prune(folder: Path, wanted: set[str]) -> None:
    """Remove shards, manifest or plan that nobody wants any more."""
    for pattern in (SHARDS, MANIFEST, PLAN):
        for path in folder.glob(pattern):
            if path.name not in wanted:
                path.unlink()


def sweep(folder: Path) -> None:
    """Remove what a killed writer left, before the room is looked at."""
    for name in (SHARDS, MANIFEST, PLAN, PARITY):
        for path in folder.glob(name + TEMP_SUFFIX):
            path.unlink()


def report(entries: Sequence[ShardEntry]) -> dict[str, Any]:
    """reports/extract.json; rows_in = rows_stored + rows_streamed + rejected."""
    there = [record for entry in entries for record in entry.stored()]
    reasons = [record.rejected for entry in entries for record in entry.sequences]
    shards = [entry for entry in entries if isinstance(entry, ShardFile)]
    num_stored = sum(len(shard.stored()) for shard in shards)
    return {
        "rows_in": len(reasons),
        "rows_stored": num_stored,
        "rows_streamed": len(there) - num_stored,
        "rejected": count_by((reason for reason in reasons if reason), StatesRejection),
        "tokens": sum(record.num_tokens for record in there),
        "last_states": sum(record.num_last_states for record in there),
        "shards": len(shards),
        "bytes": sum(shard.num_bytes for shard in shards),
    }


def parity_figures(folder: Path, entries: Sequence[ShardEntry]) -> dict[str, Any] | None:
    """What the parity gate (pipeline.parity) measured on the settings of the shards or the plan."""
    found = load_proof(folder)
    if found is None:
        return None
    for entry in entries:
        if any(getattr(entry, name) != found.settings.get(name) for name in MADE_BY):
            return None
    return {
        "reference_max_error": found.max_errors and max(found.max_errors),
        "together_max_error": found.together_max_error,
        "top1_agreement": found.top1_agreement,
    }


def store(
    wanted: dict[str, ShardEntry], sequences: Dataset, params: Params, verifier: VerifierIdentity
) -> list[ShardFile]:
    """extract.mode stored: make the shards that are not there."""
    todo = plan(wanted, survey(HIDDEN_STATES))
    print(
        f"{len(sequences)} sequences in {len(wanted)} shards: {len(todo.kept)} are there, "
        f"{len(todo.to_make)} to make, of {len(todo.to_ask)} sequences to ask and "
        f"{todo.num_copied} to copy or round"
    )
    made: dict[str, ShardFile] = {}
    if todo.to_make:
        # Here and not above: torch and vLLM's client take seconds to load, for nothing mostly.
        from pipeline.capture import make_shards
        from pipeline.parity import prove
        from pipeline.room import check_room
        from pipeline.states_server import states_endpoints

        check_room(todo, params, verifier, HIDDEN_STATES)
        nobody = nullcontext[list[Endpoint]]([])
        with states_endpoints(params, verifier) if todo.to_ask else nobody as endpoints:
            if todo.to_ask:
                settings = next(iter(todo.to_make.values()))
                prove(endpoints, sequences, params, verifier, settings, HIDDEN_STATES)
            made = make_shards(todo, sequences, params, verifier, HIDDEN_STATES, endpoints)
    shards = {**todo.kept, **made}
    manifest = Manifest(shards=[shards[name] for name in sorted(shards)])
    write_json(HIDDEN_STATES / MANIFEST, manifest.model_dump())
    return manifest.shards


def stream(
    wanted: dict[str, ShardEntry], sequences: Dataset, params: Params, verifier: VerifierIdentity
) -> ShardEntry:
    """extract.mode streamed: write the plan, once the server is proved right."""
    any_shard = next(iter(wanted.values()))
    records = [record for entry in wanted.values() for record in entry.sequences]
    planned = any_shard.model_copy(update={"dtype": params.verifier.dtype, "sequences": records})
    if parity_figures(HIDDEN_STATES, [planned]) is None:
        from pipeline.parity import prove
        from pipeline.states_server import states_endpoints

        with states_endpoints(params, verifier) as endpoints:
            prove(endpoints, sequences, params, verifier, planned, HIDDEN_STATES)
    write_json(HIDDEN_STATES / PLAN, planned.model_dump())
    return planned


def main() -> None:
    params, verifier = load_params(), load_verifier()
    sequences = load_sequences(SEQUENCES)
    wanted = wanted_shards(sequences, params, verifier)
    with one_writer(HIDDEN_STATES):
        HIDDEN_STATES.mkdir(exist_ok=True)
        sweep(HIDDEN_STATES)
        entries: Sequence[ShardEntry]
        if params.extract.mode == "stored":
            entries = store(wanted, sequences, params, verifier)
            prune(HIDDEN_STATES, {*wanted, MANIFEST})
        else:
            entries = [stream(wanted, sequences, params, verifier)]
            prune(HIDDEN_STATES, {PLAN})
    metrics = {**report(entries), "parity": parity_figures(HIDDEN_STATES, entries)}
    write_json(METRICS_PATH, metrics)
    if params.extract.mode == "streamed":
        print(f"{len(sequences)} sequences to stream: {metrics['tokens']} tokens an epoch")
        return
    print(
        f"{metrics['rows_stored']} of {metrics['rows_in']} sequences stored: {metrics['tokens']} "
        f"tokens, {metrics['bytes'] / 1e6:,.1f} MB in {metrics['shards']} shards"
    )


if __name__ == "__main__":
    run_stage("extract", main)
