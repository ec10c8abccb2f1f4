"""Getting hidden states out of vLLM: the requests, the checks, the packing.

The server (pipeline.states_server) writes the states of a request to a file in a staging folder,
where it stays for a moment: it is checked, packed into its shard and deleted.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import (
    InvalidResponseError,
    generate_hidden_states_async,
    wait_for_lock_async,
)

from pipeline.client import api_client, server_words
from pipeline.errors import ServerError
from pipeline.manifest import (
    TRANSIENT,
    Plan,
    SequenceRecord,
    ShardFile,
    StatesRejection,
    describe,
)
from pipeline.params import Extract, Params
from pipeline.progress import Bar, progress_bar
from pipeline.server import Endpoint
from pipeline.shards import Shard, ShardWriter, States
from pipeline.states_server import states_endpoints
from pipeline.verifier import VerifierIdentity

# So many failures in a row, or so many rejections before anything else: it is the server.
FAILURES_IN_A_ROW = 20
MAX_FAILED_FRACTION = 0.01  # timed out or failed, of those asked: more of them fail the stage
# Not worth a second try at once: the answer would be the same, or cost as long again.
FINAL = frozenset({StatesRejection.REFUSED, StatesRejection.TIMED_OUT})


class Rejected(Exception):
    """A sequence without usable states."""

    def __init__(self, reason: StatesRejection, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def make_shards(
    todo: Plan, sequences: Dataset, params: Params, verifier: VerifierIdentity, folder: Path
) -> dict[str, ShardFile]:
    """Write every shard of `todo.to_make`; a server runs only when there is something to ask.

    Raises:
        ServerError: too many requests failed. Shards finished until then stay.
    """
    shards = _Shards(todo, verifier.hidden_size, folder)
    if not todo.to_ask:
        assert not list(shards.jobs())
        return shards.made
    with (
        states_endpoints(params, verifier) as endpoints,
        progress_bar("extracting", len(todo.to_ask), "sequences") as bar,
    ):
        asking = _Asking(shards, sequences, params.extract, bar)
        asyncio.run(asking.ask_all(endpoints))
    return shards.made


# A sequence to ask for: the shard that waits for it, and its place there.
Job = tuple[ShardWriter, int, SequenceRecord]


class _Shards:
    """The shards to make, opened one after the other, each written when its last sequence came."""

    def __init__(self, todo: Plan, hidden_size: int, folder: Path) -> None:
        self.made: dict[str, ShardFile] = {}
        self._todo, self._hidden_size, self._folder = todo, hidden_size, folder
        # Mapped before the first is written: a new shard may take the place of an old one.
        self._old = {file: Shard(folder / file) for file, _ in todo.known.values()}

    def jobs(self) -> Iterator[Job]:
        for name, entry in self._todo.to_make.items():
            shard = ShardWriter(self._folder / name, entry, self._hidden_size)
            missing: list[Job] = []
            for index, record in enumerate(entry.sequences):
                if record.ids_sha256 in self._todo.known:
                    file, row = self._todo.known[record.ids_sha256]
                    shard.put(index, self._old[file].read(row))
                else:
                    missing.append((shard, index, record))
            if shard.complete:
                self.finish(shard)
            yield from missing

    def finish(self, shard: ShardWriter) -> None:
        self.made[shard.path.name] = describe(shard.path, shard.write())


class _Asking:
    """Bounded concurrency, one retry, and the end of it when the server is at fault."""

    def __init__(self, shards: _Shards, sequences: Dataset, extract: Extract, bar: Bar) -> None:
        self._shards, self._extract, self._bar = shards, extract, bar
        self._rows = {key: row for row, key in enumerate(sequences["key"])}
        self._input_ids = sequences.select_columns(["input_ids"]).with_format("numpy")
        self._failures_in_a_row = self._rejected_at_first = self._failed = 0
        self._num_tokens = self._num_bytes = 0
        self._started = time.monotonic()

    async def ask_all(self, endpoints: list[Endpoint]) -> None:
        jobs = self._shards.jobs()
        clients = [
            api_client(endpoint, self._extract.concurrency, self._extract.timeout_s)
            for endpoint in endpoints
        ]
        workers = [
            asyncio.create_task(self._work(jobs, clients[i % len(clients)], endpoints[0].model))
            for i in range(self._extract.concurrency)
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for client in clients:
                await client.close()
        if self._failed > MAX_FAILED_FRACTION * self._bar.total:
            raise ServerError(
                f"{self._failed} of {self._bar.total} sequences got no hidden states (timed out "
                "or failed, see logs/vllm-extract.log); the next run asks them again, a larger "
                "extract.timeout_s or a smaller extract.concurrency may help"
            )

    async def _work(self, jobs: Iterator[Job], client: openai.AsyncOpenAI, model: str) -> None:
        for shard, index, record in jobs:
            try:
                shard.put(index, await self._ask_twice(client, model, shard, record))
                self._failures_in_a_row = 0
                self._num_tokens += record.num_tokens
            except Rejected as rejected:
                shard.reject(index, rejected.reason)
                self._count(rejected, record)
            if shard.complete:
                await asyncio.to_thread(self._shards.finish, shard)
            self._bar.advance(note=self._note())

    def _count(self, rejected: Rejected, record: SequenceRecord) -> None:
        """Raises ServerError when the server is at fault."""
        failed = rejected.reason in TRANSIENT
        self._failed += failed
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed else 0
        self._rejected_at_first += not self._num_tokens
        if FAILURES_IN_A_ROW in (self._failures_in_a_row, self._rejected_at_first):
            raise ServerError(
                f"{FAILURES_IN_A_ROW} sequences in a row got no hidden states, the last one "
                f"{record.sample_id}: {rejected.reason}, {rejected}"
            ) from rejected

    def _note(self) -> str:
        rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{rate:,.0f} tokens/s, {self._num_bytes / 1e6:,.1f} MB{failed}"

    async def _ask_twice(
        self, client: openai.AsyncOpenAI, model: str, shard: ShardWriter, record: SequenceRecord
    ) -> States:
        try:
            return await self._ask(client, model, shard, record)
        except Rejected as rejected:
            if rejected.reason in FINAL:
                raise
            return await self._ask(client, model, shard, record)

    async def _ask(
        self, client: openai.AsyncOpenAI, model: str, shard: ShardWriter, record: SequenceRecord
    ) -> States:
        input_ids = self._input_ids[self._rows[record.key]]["input_ids"].tolist()
        try:
            file, _ = await generate_hidden_states_async(
                client,
                model,
                {"input_ids": input_ids},
                timeout=self._extract.timeout_s,
                max_retries=0,
            )
        except InvalidResponseError as error:
            raise _invalid(error) from error
        except openai.BadRequestError as error:
            raise Rejected(StatesRejection.REFUSED, _first_line(error)) from error
        except (TimeoutError, openai.APITimeoutError) as error:
            raise Rejected(
                StatesRejection.TIMED_OUT, f"no answer in {self._extract.timeout_s} s"
            ) from error
        except openai.OpenAIError as error:
            raise Rejected(StatesRejection.FAILED, _first_line(error)) from error
        payload = await take(file, self._extract.timeout_s)
        self._num_bytes += payload["hidden_states"].nbytes
        return await asyncio.to_thread(checked, payload, input_ids, shard)


async def take(file: str, timeout_s: float) -> dict[str, torch.Tensor]:
    """What the server wrote to a file of its staging folder, which is deleted.

    A server can name any file: only one that proves to hold hidden states is deleted.
    """
    path, lock = Path(file), Path(f"{file}.lock")
    if path.suffix != ".safetensors":
        raise Rejected(StatesRejection.FAILED, f"{path} is no .safetensors file")
    try:
        if lock.exists():  # vLLM holds it until the file is written
            await wait_for_lock_async(lock, timeout_s, 0.005)
        payload = await asyncio.to_thread(load_file, path)
    except TimeoutError as error:
        raise Rejected(StatesRejection.TIMED_OUT, f"{path} is never finished") from error
    except (OSError, SafetensorError) as error:
        raise Rejected(StatesRejection.FAILED, f"{path}: {_first_line(error)}") from error
    if not {"hidden_states", "token_ids"} <= payload.keys():
        raise Rejected(StatesRejection.SHAPE, f"{path} holds {sorted(payload)[:4]}, no states")
    path.unlink(missing_ok=True)
    return payload


def checked(payload: dict[str, torch.Tensor], input_ids: list[int], shard: ShardWriter) -> States:
    """The states in a staged file, in the shard's dtype.

    Raises:
        Rejected: other tokens, another shape, or values that are not finite in that dtype.
    """
    hidden_states = payload["hidden_states"]  # [T, 4, H]
    if payload["token_ids"].tolist() != input_ids:
        raise Rejected(StatesRejection.TOKEN_IDS, "the states are those of other tokens")
    wanted = (len(input_ids), shard.num_layers, shard.hidden_size)
    if tuple(hidden_states.shape) != wanted:
        raise Rejected(
            StatesRejection.SHAPE, f"shape {tuple(hidden_states.shape)} instead of {wanted}"
        )
    stored = {**payload, "hidden_states": hidden_states.to(shard.dtype)}
    try:
        check_hidden_states(stored, input_ids)
    except ValueError as error:
        raise Rejected(StatesRejection.NOT_FINITE, _first_line(error)) from error
    return States(
        payload["token_ids"], stored["hidden_states"][:, :-1], stored["hidden_states"][:, -1]
    )


def _invalid(error: InvalidResponseError) -> Exception:
    """speculators' client found the answer wrong; without transfer params the server is."""
    if "kv_transfer_params" in str(error):
        return ServerError(
            "the server answers without hidden states; the servers in extract.endpoints need "
            "vLLM's extract_hidden_states method and a hidden-states connector"
        )
    return Rejected(StatesRejection.TOKEN_IDS, "the server read other tokens than it was sent")


def _first_line(error: Exception) -> str:
    if isinstance(error, openai.APIStatusError):
        return server_words(error)
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
