"""The files that the server stages: one a request, checked, packed into its shard and deleted.

A staged file holds `hidden_states` [T, 4, H] in the server's dtype and `token_ids` [T]. It is
mapped, not read: its states go from the page cache straight into their place in the shard.
"""

import asyncio
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators.data_generation.vllm_client import wait_for_lock_async

from pipeline.float8 import CODES
from pipeline.manifest import StatesRejection
from pipeline.shards import ShardWriter, States

POLL_S = 0.005
MAX_FAILED_FRACTION = 0.01  # timed out or failed, of those asked: more of them fail a stage
SERVED = frozenset({torch.float32, torch.bfloat16, torch.float16})  # verifier.dtype


class Rejected(Exception):
    """A sequence without usable states."""

    def __init__(self, reason: StatesRejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


async def take(file: str, timeout_s: float) -> dict[str, torch.Tensor]:
    """What the server wrote to a file of its staging folder, which is deleted: the tensors keep it
    until they go.

    A server can name any file: only one that proves to hold hidden states is deleted.
    """
    path, lock = Path(file), Path(f"{file}.lock")
    if path.suffix != ".safetensors":
        raise Rejected(StatesRejection.FAILED, f"{path} is no .safetensors file")
    try:
        if lock.exists():  # vLLM holds it until the file is written
            await wait_for_lock_async(lock, timeout_s, POLL_S)
        payload = load_file(path)  # maps it, which takes a fraction of a millisecond
    except TimeoutError as error:
        raise Rejected(StatesRejection.TIMED_OUT, f"{path} is never finished") from error
    except FileNotFoundError as error:
        raise Rejected(
            StatesRejection.FAILED,
            f"{path} is not there: the server must share a file system with this machine, and have "
            "room on it",
        ) from error
    except (OSError, SafetensorError) as error:
        raise Rejected(StatesRejection.FAILED, f"{path}: {str(error)[:200]}") from error
    if not {"hidden_states", "token_ids"} <= payload.keys():
        raise Rejected(StatesRejection.SHAPE, f"{path} holds {sorted(payload)[:4]}, no states")
    path.unlink(missing_ok=True)
    return payload


def checked(payload: dict[str, torch.Tensor], input_ids: np.ndarray, shard: ShardWriter) -> States:
    """The states in a staged file, as the server gave them.

    Raises:
        Rejected: other tokens, another shape, or values that are not finite, there or in the
            shard's dtype.
    """
    hidden_states, token_ids = payload["hidden_states"], payload["token_ids"]  # [T, 4, H], [T]
    if hidden_states.dtype not in SERVED or token_ids.dtype.is_floating_point:
        raise Rejected(
            StatesRejection.SHAPE, f"{hidden_states.dtype} states, {token_ids.dtype} token ids"
        )
    # A prefix cache leaves states out in front; a request mixed up with another has its tokens.
    if not np.array_equal(token_ids.numpy(), input_ids):
        raise Rejected(StatesRejection.TOKEN_IDS, "the states are those of other tokens")
    wanted = (len(input_ids), shard.num_layers, shard.hidden_size)
    if tuple(hidden_states.shape) != wanted:
        raise Rejected(
            StatesRejection.SHAPE, f"shape {tuple(hidden_states.shape)} instead of {wanted}"
        )
    extremes = torch.stack(torch.aminmax(hidden_states))  # NaN if there is one
    # float8 has a scale for each row: what is finite stays so.
    stored = extremes if shard.dtype is CODES else extremes.to(shard.dtype)
    if not bool(torch.isfinite(stored).all()):
        least, most = extremes.tolist()
        raise Rejected(
            StatesRejection.NOT_FINITE, f"values from {least} to {most}, not finite as stored"
        )
    return States(token_ids, hidden_states[:, :-1], hidden_states[:, -1])


async def pack(
    payload: dict[str, torch.Tensor], input_ids: np.ndarray, shard: ShardWriter, index: int
) -> None:
    """Raises Rejected as `checked` does."""
    await asyncio.to_thread(lambda: shard.put(index, checked(payload, input_ids, shard)))
