"""vLLM's hidden-states connector, for a server on a CPU.

vLLM loads it by `"kv_connector_module_path": "pipeline.cpu_connector"`; on a GPU the stock
`ExampleHiddenStatesConnector` is used as it is. The one difference: the stock connector copies
through pinned memory on a CUDA stream, and here the states are in main memory already.
"""

import fcntl
import os
from functools import partial

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class CopyDone:
    """Stands in for the CUDA event of a copy that has ended."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Per request one safetensors file: `hidden_states` [T, layers, H] and `token_ids` [T]."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        assert self._kv_cache is not None
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)  # [blocks]
        num_tokens = len(pending.token_ids)
        slots = torch.arange(self._block_size) + blocks[:, None] * self._block_size
        hidden_states = extract_from_kv_cache(  # [T, layers, H], a copy: the blocks are freed next
            self._kv_cache, slots.flatten()[:num_tokens], num_tokens
        )
        tensors = {
            "hidden_states": hidden_states.contiguous(),
            "token_ids": pending.token_ids.clone(),
        }

        assert pending.req_id not in self._req_futures
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        # wait_for_save made the lock before the client could learn the file's name.
        lock_fd = self._lock_fds.pop(pending.req_id, None)
        if lock_fd is None and self.use_lock:
            lock_fd = os.open(pending.filename + ".lock", os.O_CREAT | os.O_WRONLY, 0o644)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        done = CopyDone()
        future = self._executor.submit(
            self._write_tensors, tensors, done, pending.filename, lock_fd
        )
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
