"""Getting hidden states out of vLLM: the requests, and the shards that they fill.

The server (pipeline.states_server) answers each with the name of a file that holds the states
(pipeline.staging), which go into the shard that waits for them. The longest sequences of a shard
are asked first, so that its last ones come close together. `extract.concurrency` requests are in
flight, also while a shard is written, but only MAX_SHARDS are in memory: when the disk is slower
than the model, the model waits.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset

from pipeline.client import MAX_BUSY_ATTEMPTS, Request, api_client, backoff_s, run, send
from pipeline.errors import ServerError
from pipeline.live import LiveStates
from pipeline.manifest import (
    TRANSIENT,
    Plan,
    SequenceRecord,
    ShardFile,
    StatesRejection,
    describe,
)
from pipeline.params import Extract, Params
from pipeline.pool import Pool, Server, metrics_client
from pipeline.progress import Bar, progress_bar
from pipeline.room import num_bytes, require, told_plainly
from pipeline.server import Endpoint
from pipeline.shards import Shard, ShardWriter
from pipeline.staging import MAX_FAILED_FRACTION, Rejected, pack, take
from pipeline.states_server import request_body
from pipeline.verifier import VerifierIdentity

MAX_SHARDS = 2  # in memory: one is filled, one is written
MAX_REJECTED_AT_FIRST = 20  # before any states came: it is the server
# Not worth a second try at once: the answer would be the same, or cost as long again.
FINAL = frozenset({StatesRejection.REFUSED, StatesRejection.TIMED_OUT})


def make_shards(
    todo: Plan,
    sequences: Dataset,
    params: Params,
    verifier: VerifierIdentity,
    folder: Path,
    endpoints: Sequence[Endpoint],
) -> dict[str, ShardFile]:
    """Write every shard of `todo.to_make`; without a sequence to ask `endpoints` may be empty.

    Raises:
        ServerError: too many requests failed. Shards finished until then stay.
        UserError: the disk is full. The same.
    """
    to_ask = todo.to_ask
    live = LiveStates(
        len(to_ask), sum(record.num_tokens for record in to_ask), len(todo.to_make), folder
    )
    with progress_bar("extracting", len(to_ask), "sequences") as bar:
        shards = _Shards(todo, sequences, verifier.hidden_size, folder, live)
        asking = _Asking(shards, params.extract, live, bar)
        try:
            run(asking.ask_all(endpoints))
        except BaseException:
            live.write("stopped")
            raise
    live.write("done")
    return shards.made


@dataclass(frozen=True)
class Job:
    """A sequence to ask for: the shard that waits for it, and its place there."""

    shard: ShardWriter
    index: int
    record: SequenceRecord
    input_ids: np.ndarray  # [T]


class _Shards:
    """The shards to make, opened one after the other, each written when its last sequence came."""

    def __init__(
        self, todo: Plan, sequences: Dataset, hidden_size: int, folder: Path, live: LiveStates
    ) -> None:
        self.made: dict[str, ShardFile] = {}
        self._todo, self._hidden_size, self._folder, self._live = todo, hidden_size, folder, live
        self._rows = {key: row for row, key in enumerate(sequences["key"])}
        self._input_ids = sequences.select_columns(["input_ids"]).with_format("numpy")
        self._entries = iter(todo.to_make.items())
        # Mapped before the first is written: a new shard may take the place of an old one.
        self._old = {file: Shard(folder / file) for file, _ in todo.known.values()}
        self._jobs: deque[Job] = deque()
        self._unsettled: dict[Path, int] = {}  # how many sequences an open shard waits for
        self._opening, self._places = asyncio.Lock(), asyncio.Semaphore(MAX_SHARDS)

    async def next_job(self) -> Job | None:
        """Waits where MAX_SHARDS are in memory. None: there is nothing left to ask for."""
        async with self._opening:
            while not self._jobs:
                name, entry = next(self._entries, (None, None))
                if name is None or entry is None:
                    return None
                await self._places.acquire()
                shard = ShardWriter(self._folder / name, entry, self._hidden_size)
                jobs = await asyncio.to_thread(self._open, shard, entry.sequences)
                self._unsettled[shard.path] = len(jobs)
                self._jobs.extend(jobs)
                if not jobs:
                    await self.write(shard)
            return self._jobs.popleft()

    def settle(self, shard: ShardWriter) -> bool:
        """One more of its sequences is in or rejected; True: it was the last one."""
        self._unsettled[shard.path] -= 1
        return self._unsettled[shard.path] == 0

    def _open(self, shard: ShardWriter, records: list[SequenceRecord]) -> list[Job]:
        """Puts in what can be copied and returns what must be asked for, the longest first."""
        missing = []
        for index, record in enumerate(records):
            if record.ids_sha256 in self._todo.known:
                file, row = self._todo.known[record.ids_sha256]
                shard.put(index, self._old[file].read(row))
            else:
                missing.append(index)
        if not missing:
            return []
        rows = self._input_ids[[self._rows[records[index].key] for index in missing]]
        jobs = [
            Job(shard, index, records[index], np.asarray(ids))
            for index, ids in zip(missing, rows["input_ids"], strict=True)
        ]
        return sorted(jobs, key=lambda job: -job.record.num_tokens)

    async def write(self, shard: ShardWriter) -> None:
        made = await asyncio.to_thread(self._write, shard)
        self.made[made.file] = made
        self._live.wrote(made.num_bytes)
        self._places.release()

    def _write(self, shard: ShardWriter) -> ShardFile:
        needed = num_bytes(self._todo.to_make[shard.path.name], self._hidden_size)
        require(self._folder, needed, f"{shard.path.name}, the next shard,")
        with told_plainly(self._folder):
            return describe(shard.path, shard.write())


class _Asking:
    """Bounded concurrency, the next server for what one failed, and the end of it when the servers
    are at fault."""

    def __init__(self, shards: _Shards, extract: Extract, live: LiveStates, bar: Bar) -> None:
        self._shards, self._extract, self._live, self._bar = shards, extract, live, bar
        self._rejected_at_first = self._failed = 0

    async def ask_all(self, endpoints: Sequence[Endpoint]) -> None:
        concurrency = self._extract.concurrency if endpoints else 1
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    api_client(endpoint, concurrency, self._extract.timeout_s)
                )
                for endpoint in endpoints
            ]
            servers = [Server(*pair) for pair in zip(endpoints, clients, strict=True)]
            self._pool = Pool(servers, await stack.enter_async_context(metrics_client()))
            async with asyncio.TaskGroup() as self._tasks:
                for _ in range(concurrency):
                    self._tasks.create_task(self._work())
        if self._failed > MAX_FAILED_FRACTION * self._bar.total:
            raise ServerError(
                f"{self._failed} of {self._bar.total} sequences got no hidden states (timed out "
                "or failed, see logs/vllm-extract.log); the next run asks them again, a larger "
                "extract.timeout_s or a smaller extract.concurrency may help"
            )

    async def _work(self) -> None:
        while job := await self._shards.next_job():
            self._live.sent += 1
            self._pool.num_open += 1
            reason = None
            try:
                await self._get(job)
            except Rejected as rejected:
                reason = rejected.reason
                job.shard.reject(job.index, reason)
                await self._count(rejected, job.record)
            self._pool.num_open -= 1
            self._live.add(job.record.num_tokens, reason)
            if self._shards.settle(job.shard):
                self._tasks.create_task(self._shards.write(job.shard))
            self._live.write("asking")
            self._bar.advance(note=str(self._live))
            del job  # or it would hold a shard that is written while the next waits for its place

    async def _get(self, job: Job) -> None:
        """Asks once more, or each further server once, what went wrong. Raises Rejected."""
        tried: list[Server] = []
        while True:
            server = self._pool.next_one(tried)
            tried.append(server)
            try:
                payload = await take(await self._ask(server, job), self._extract.timeout_s)
                await pack(payload, job.input_ids, job.shard, job.index)
            except Rejected as rejected:
                if rejected.reason is StatesRejection.FAILED:
                    self._pool.failed(server, str(rejected))
                if rejected.reason in FINAL or len(tried) > len(self._pool.servers):
                    raise
            else:
                self._pool.answered(server)
                return

    async def _ask(self, server: Server, job: Job) -> str:
        """The name of the file with the states. Raises Rejected."""
        body = request_body(job.input_ids.tolist())
        for num_busy in range(1, MAX_BUSY_ATTEMPTS + 1):
            reply = await send(Request(job.record.key, body), server, "/completions")
            if reply.outcome != "busy":
                break
            pause_s = backoff_s(num_busy, reply.retry_after_s)
            self._pool.busy(server, pause_s)
            await asyncio.sleep(pause_s)
        match reply.outcome:
            case "answered":
                assert reply.body is not None
                transfer = reply.body.get("kv_transfer_params")
                file = transfer.get("hidden_states_path") if isinstance(transfer, dict) else None
                if not isinstance(file, str):
                    raise ServerError(
                        f"{server.endpoint.base_url} answers without hidden states; the servers in "
                        "extract.endpoints need vLLM's extract_hidden_states method and a "
                        "hidden-states connector"
                    )
                return file
            case "refused":
                raise Rejected(StatesRejection.REFUSED, reply.error)
            case "timed_out":
                why = f"no answer in {self._extract.timeout_s} s"
                raise Rejected(StatesRejection.TIMED_OUT, why)
            case _:
                raise Rejected(StatesRejection.FAILED, reply.error)

    async def _count(self, rejected: Rejected, record: SequenceRecord) -> None:
        """Raises ServerError when the servers are at fault."""
        if rejected.reason in TRANSIENT:
            self._failed += 1
            await self._pool.gave_up(self._pool.servers[0], str(rejected))
        self._rejected_at_first += not self._live.tokens
        if self._rejected_at_first == MAX_REJECTED_AT_FIRST:
            raise ServerError(
                f"{MAX_REJECTED_AT_FIRST} sequences in a row got no hidden states, the last one "
                f"{record.sample_id}: {rejected.reason}, {rejected}"
            ) from rejected
