"""A vLLM server that gives hidden states instead of answers.

    make states-server       (python -m pipeline.states_server)

starts one and says where it is, for another process or machine that shares the file system to name
in extract.endpoints; `extract`, `train` and `evaluate` start their own where none is named.

Its `extract_hidden_states` method treats the wanted layers as a draft model that proposes nothing,
and a KV connector writes their states to a file per request, named in the answer.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import ServerStopped, VerifierError
from pipeline.params import Params, Verifier, endpoints_from, load_params
from pipeline.resume import one_writer
from pipeline.room import require, staging_bytes
from pipeline.server import Endpoint, meet_all, serve, speculative_args
from pipeline.stage import run_stage
from pipeline.verifier import VerifierIdentity, load_verifier

SHARED_MEMORY = Path("/dev/shm")
STAGING_ON_DISK = Path("data/.staging")
GPU_CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}
CPU_CONNECTOR = {
    "kv_connector": "CpuHiddenStatesConnector",
    "kv_connector_module_path": "pipeline.cpu_connector",
}


@contextmanager
def states_endpoints(params: Params, verifier: VerifierIdentity) -> Iterator[list[Endpoint]]:
    """The running servers that were named, or one of our own.

    Raises:
        VerifierError: a server serves something else, or has no room for one token more.
        UserError: there is no room for what the server stages.
    """
    named = endpoints_from("PIPELINE_EXTRACT_ENDPOINTS", params.extract.endpoints)
    if named:
        endpoints = meet_all(named, params.verifier)
        for endpoint in endpoints:
            _check_context(endpoint, params.verifier.max_model_len + 1)
        yield endpoints
        return
    with _own_server(params, verifier, "extract") as server:
        yield [server]


@contextmanager
def _own_server(params: Params, verifier: VerifierIdentity, name: str) -> Iterator[Endpoint]:
    with _staging_folder(staging_bytes(params, verifier.hidden_size), name) as staging:
        layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
        extra_args = states_args(layer_ids, staging, connector())
        with serve(with_room(params.verifier), name, extra_args) as server:
            yield server


def request_body(input_ids: list[int]) -> dict[str, Any]:
    """A completion of one token, the fewest that vLLM generates, which is thrown away."""
    return {"prompt": input_ids, "max_tokens": 1, "temperature": 0.0}


def _check_context(endpoint: Endpoint, needed: int) -> None:
    if endpoint.max_model_len < needed:
        raise VerifierError(
            f"{endpoint.base_url} serves {endpoint.max_model_len} tokens of context; a server in "
            f"extract.endpoints needs verifier.max_model_len and one more, which vLLM insists on "
            f"generating: --max-model-len {needed} (with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 where the "
            "model's own context ends there)"
        )


def with_room(verifier: Verifier) -> Verifier:
    """The verifier with room for one token more.

    vLLM insists on generating one, which a sequence of max_model_len tokens leaves no room for. The
    token is thrown away and never fed back, so no position beyond the model's own is used, and
    vLLM's refusal to serve more than max_position_embeddings can be overruled.
    """
    env = {**verifier.server_env, "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    return verifier.model_copy(
        update={"max_model_len": verifier.max_model_len + 1, "server_env": env}
    )


def states_args(layer_ids: list[int], staging: Path, connector: dict[str, str]) -> list[str]:
    """vLLM's arguments, for the states of these layers in files in `staging`."""
    transfer = {
        **connector,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(staging)},
    }
    return [
        *speculative_args(
            {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}
                },
            }
        ),
        "--kv-transfer-config",
        json.dumps(transfer),
        # A cached prefix is not computed again, so its states would be missing.
        "--no-enable-prefix-caching",
    ]


def connector() -> dict[str, str]:
    """The one for the machine at hand."""
    return GPU_CONNECTOR if torch.accelerator.is_available() else CPU_CONNECTOR


@contextmanager
def _staging_folder(needed: int, server: str) -> Iterator[Path]:
    """In memory where there is room for as many bytes, else on disk. The name is the same for each
    run of `server` in this folder, so that what a killed run left is removed by the next (the stage
    has one writer). Raises UserError when there is no room anywhere."""
    here = hashlib.sha256(f"{os.getcwd()} {server}".encode()).hexdigest()[:12]
    name, on_disk = f"hidden-states-{os.getuid()}-{here}", STAGING_ON_DISK / server
    # First what a killed run left: it may be what fills the room.
    for left in (SHARED_MEMORY / name, on_disk):
        shutil.rmtree(left, ignore_errors=True)
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= needed
    staging = SHARED_MEMORY / name if roomy else on_disk.resolve()
    staging.mkdir(parents=True)
    try:
        require(staging, needed, "the requests in flight", "a smaller extract.concurrency")
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> None:
    params, verifier = load_params(), load_verifier()
    here = STAGING_ON_DISK / "states-server.one"  # for its lock: two would share one folder
    with one_writer(here), _own_server(params, verifier, "states-server") as server:
        print(f"extract.endpoints: [{server.base_url}]    (ends with Ctrl-C)", flush=True)
        while not server.died:
            time.sleep(1)
        raise ServerStopped(server.last_words)


if __name__ == "__main__":
    run_stage("states_server", main)
