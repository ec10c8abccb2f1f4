"""Many long generations at once: bounded, rarely repeated, and ended when hopeless.

    await ask_all(requests, endpoints, concurrency, timeout_s, on_answer)

One generation may take half an hour, so nothing here repeats one lightly: the `openai` client's
own retries are off and a time-out is never repeated at once. What is retried, and what is not:

    HTTP 429, 5xx, refused or reset connection   twice more, after a back-off with jitter
    time-out                                     not in this run; the row stays to do
    HTTP 400, 413, 422                           never: the question itself is refused
    HTTP 401, 403, 404                           the run ends: wrong key or wrong model
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import orjson

from pipeline.errors import BadRun, ServerError
from pipeline.server import Endpoint, api_key

MAX_ATTEMPTS = 3
BACKOFF_S = 1.0
# So many requests given up in a row (or all that were in flight, if more), and the run ends.
MAX_CONSECUTIVE_FAILURES = 30
REFUSED = frozenset({400, 413, 422})
HOPELESS = frozenset({401, 403, 404})


@dataclass(frozen=True)
class Request:
    """A chat completion to ask for; `body` is the JSON on the wire less the model name."""

    key: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came back: the server's JSON, or why there is none."""

    key: str
    body: dict[str, Any] | None
    error: str | None  # the server's own message
    outcome: str  # answered | refused | timed_out | failed
    attempts: int
    endpoint: Endpoint


class _Pool:
    """The servers: the least busy sound one is next, and when none is sound the run ends."""

    def __init__(self, clients: dict[Endpoint, openai.AsyncOpenAI], timeout_s: float) -> None:
        self.clients, self.timeout_s = clients, timeout_s
        self.in_flight = dict.fromkeys(clients, 0)
        self.failed_in_a_row = dict.fromkeys(clients, 0)  # requests given up, by server

    @asynccontextmanager
    async def least_busy(self) -> AsyncIterator[Endpoint]:
        # A dead server fails fastest, so by load alone it would draw every request.
        endpoint = min(self.in_flight, key=lambda e: (self.failed_in_a_row[e], self.in_flight[e]))
        self.in_flight[endpoint] += 1
        try:
            yield endpoint
        finally:
            self.in_flight[endpoint] -= 1

    def gave_up(self, endpoint: Endpoint, error: str) -> None:
        """Raises ServerError when no server has answered anything for too long."""
        self.failed_in_a_row[endpoint] += 1
        limit = max(MAX_CONSECUTIVE_FAILURES, sum(self.in_flight.values()))
        if min(self.failed_in_a_row.values()) >= limit / len(self.clients):
            raise ServerError(
                f"{endpoint.base_url} failed {self.failed_in_a_row[endpoint]} times in a row, at "
                f"last with {error!r}; what was answered is stored, the next run goes on"
            )


async def ask_all(
    requests: Iterable[Request],
    endpoints: list[Endpoint],
    concurrency: int,
    timeout_s: float,
    on_answer: Callable[[Answer], None],
) -> None:
    """Send every request once, `concurrency` at a time; `on_answer` sees each as it comes.

    Raises:
        BadRun: the server refuses key or model.
        ServerError: the servers stopped answering.
        whatever `on_answer` raises; requests in flight are then dropped.
    """
    todo = iter(requests)
    async with AsyncExitStack() as stack:
        clients = {
            endpoint: await stack.enter_async_context(api_client(endpoint, concurrency, timeout_s))
            for endpoint in endpoints
        }
        pool = _Pool(clients, timeout_s)

        async def work() -> None:
            for request in todo:  # shared: each worker takes the next one
                on_answer(await _ask(request, pool))

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())


def run(coroutine: Any) -> None:
    """`asyncio.run`, with the first real error instead of a group of them."""
    try:
        asyncio.run(coroutine)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def api_client(endpoint: Endpoint, concurrency: int, timeout_s: float) -> openai.AsyncOpenAI:
    """A client for `concurrency` requests at once that never repeats one by itself."""
    # A pool smaller than the concurrency would queue: to a time-out that is silence.
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=api_key(),
        max_retries=0,
        timeout=httpx2.Timeout(timeout_s, connect=30),
        http_client=httpx2.AsyncClient(limits=limits, trust_env=False),
    )


async def _ask(request: Request, pool: _Pool) -> Answer:
    error = ""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        async with pool.least_busy() as endpoint:
            try:
                body = await _post(pool.clients[endpoint], endpoint, request)
            except openai.APITimeoutError:
                pool.gave_up(endpoint, f"no answer in {pool.timeout_s:g} s")
                return Answer(request.key, None, "timed out", "timed_out", attempt, endpoint)
            except openai.APIStatusError as status:
                error = server_words(status)
                if status.status_code in HOPELESS:
                    raise BadRun(f"{endpoint.base_url} says {error}") from None
                if status.status_code in REFUSED:
                    return Answer(request.key, None, error, "refused", attempt, endpoint)
            except (openai.APIConnectionError, orjson.JSONDecodeError) as lost:
                error = f"{type(lost).__name__}: {lost.__cause__ or lost}"
            else:
                pool.failed_in_a_row[endpoint] = 0
                return Answer(request.key, body, None, "answered", attempt, endpoint)
        if attempt < MAX_ATTEMPTS:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
    pool.gave_up(endpoint, error)
    return Answer(request.key, None, error, "failed", MAX_ATTEMPTS, endpoint)


async def _post(client: openai.AsyncOpenAI, endpoint: Endpoint, request: Request) -> dict[str, Any]:
    """The raw JSON: `"reasoning": ""`, null and absent stay apart, and thousands of token ids need
    no model object."""
    response = await client.chat.completions.with_raw_response.create(
        model=endpoint.model,
        messages=request.body["messages"],
        extra_body={k: v for k, v in request.body.items() if k != "messages"},
    )
    body = orjson.loads(response.http_response.content)
    return body if isinstance(body, dict) else {}


def server_words(error: openai.APIStatusError) -> str:
    """`HTTP 400: …` on one line, not too long, and without our key, which some servers echo."""
    body = error.body
    text = body.get("message") if isinstance(body, dict) else None
    words = " ".join(str(text or error.response.text).split()).replace(api_key(), "<key>")
    return f"HTTP {error.status_code}: {words[:300]}"


class Throughput:
    """Tokens a second since the first answer."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.tokens = 0

    def add(self, tokens: int) -> None:
        self.tokens += tokens

    def __str__(self) -> str:
        return f"{self.tokens / max(time.monotonic() - self._started, 1e-9):.0f} tok/s"
