"""Many long generations at once: bounded, rarely repeated, and ended when hopeless.

    await ask_all(requests, endpoints, concurrency, timeout_s, on_answer, stall_s=300)

`on_answer` may return a follow-up (the next turn, the same with a larger budget): the worker that
asked sends it before it takes a new request, so a question has one generation at a time.

One generation may take half an hour, so nothing here repeats one lightly: the `openai` client's
own retries are off. What is retried, and what is not:

    HTTP 5xx and other statuses, lost connection   3 attempts, with back-off and jitter
    HTTP 429, 503                                  busy: after `Retry-After` or a back-off that
                                                   doubles from 1 s to 60 s, as long as anything is
                                                   being answered; else 8 attempts
    time-out, HTTP 504                             not in this run; the row stays to do
    HTTP 400, 413, 422                             never: the question itself is refused; but once
                                                   more if only its max_tokens is too large, or at
                                                   another server if its length is not the reason
    HTTP 401, 403, 404                             the run ends: wrong key or wrong model

Which server is next, and what ends a run besides a wrong key, is in pipeline/pool.py.
"""

import asyncio
import random
import resource
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx2
import openai
import orjson

from pipeline.errors import BadRun
from pipeline.pool import Pool, Server, metrics_client
from pipeline.server import Endpoint, api_key

MAX_ATTEMPTS = 3
MAX_BUSY_ATTEMPTS = 8  # and of all attempts together
BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
BUSY = frozenset({429, 503})
REFUSED = frozenset({400, 413, 422})
HOPELESS = frozenset({401, 403, 404})
GATEWAY_TIMED_OUT = frozenset({504, 524})  # 524: Cloudflare's
CONNECT_S = 30.0
CHAT = "/chat/completions"
TOKENIZE_S = 60.0


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
    max_tokens: int | None  # the budget as sent


async def ask_all(
    requests: Iterable[Request],
    endpoints: list[Endpoint],
    concurrency: int,
    timeout_s: float,
    on_answer: Callable[[Answer], Request | None],
    *,
    stall_s: float | None = None,
    num_first: int = 0,
    go_on: asyncio.Event | None = None,
) -> None:
    """Send every request once, `concurrency` at a time; `on_answer` sees each as it comes and may
    return a follow-up. With `stall_s`, a server that generates nothing for so long is hung. With
    `go_on`, all but the `num_first` first wait until it is set.

    Raises:
        BadRun: the server refuses key or model.
        Refused: it refuses one question after the other.
        ServerStopped: no server is left; what was in flight has no answer.
        whatever `on_answer` raises; requests in flight are then dropped.
    """
    todo = iter(requests)
    async with AsyncExitStack() as stack:
        pool = Pool(
            [
                Server(e, await stack.enter_async_context(api_client(e, concurrency, timeout_s)))
                for e in endpoints
            ],
            await stack.enter_async_context(metrics_client()),
        )
        # Before any of them is asked and can hang on it. One without such counters is not watched.
        counts = {server: await pool.count_tokens(server) for server in pool.servers if stall_s}
        num_sent = 0

        async def work() -> None:
            nonlocal num_sent
            while True:
                if go_on and num_sent >= num_first:
                    await go_on.wait()
                current = next(todo, None)  # shared: each worker takes the next one
                if current is None:
                    return
                num_sent += 1
                while current:
                    pool.num_open += 1
                    answer = await _ask(current, pool)
                    pool.num_open -= 1
                    current = on_answer(answer)

        async with asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(pool.watch(server, stall_s, count))
                for server, count in counts.items()
                if stall_s and count is not None
            ]
            await asyncio.wait([tasks.create_task(work()) for _ in range(concurrency)])
            for watch in watches:
                watch.cancel()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run`, with the first real error instead of a group of them, and without a traceback
    of the task that SIGTERM happened to meet."""
    try:
        asyncio.run(_with_quiet_exits(coroutine))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _with_quiet_exits(coroutine: Coroutine[Any, Any, None]) -> None:
    def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), SystemExit):
            loop.default_exception_handler(context)

    asyncio.get_running_loop().set_exception_handler(tell)
    await coroutine


async def _ask(request: Request, pool: Pool) -> Answer:
    """The answer to one request, after all the attempts that its errors deserve."""
    tried: list[Server] = []
    num_busy = num_in_vain = num_faults = 0
    pause_s = 0.0
    while num_in_vain < MAX_BUSY_ATTEMPTS and num_faults < MAX_ATTEMPTS:
        await asyncio.sleep(pause_s)
        server = pool.next_one(tried)
        tried.append(server)
        budget, asked_at = request.body.get("max_tokens"), time.monotonic()
        reply = await send(request, server)
        match reply.outcome:
            case "answered" | "timed_out":
                break
            case "refused":
                room = await _room(request, server)
                pause_s = 0.0
                if budget is not None and room is not None and 0 < room < budget:
                    request = replace(request, body={**request.body, "max_tokens": room})
                elif room is not None and room <= 0:
                    server.recover()
                    break
                elif all(other in tried for other in pool.servers):
                    pool.refused(reply.error)
                    break
            case "busy":
                num_busy += 1
                num_in_vain += not pool.is_at_work(asked_at)  # whoever is answered makes room
                pause_s = backoff_s(num_busy, reply.retry_after_s)
                pool.busy(server, pause_s)
                if any(other.is_sound for other in pool.servers):  # and named no time
                    pause_s = backoff_s(num_busy)
            case "failed":
                num_faults += 1
                num_in_vain += 1
                pause_s = backoff_s(num_faults)
                pool.failed(server, reply.error)
    if reply.outcome == "answered":
        pool.answered(server)
    elif reply.outcome != "refused":
        await pool.gave_up(server, reply.error)
    outcome = "failed" if reply.outcome == "busy" else reply.outcome
    error = reply.error or None
    return Answer(request.key, reply.body, error, outcome, len(tried), server.endpoint, budget)


class Reply(NamedTuple):
    """How one attempt went."""

    outcome: str  # answered | refused | timed_out | busy | failed
    body: dict[str, Any] | None = None
    error: str = ""
    retry_after_s: float = 0.0


async def send(request: Request, server: Server, path: str = CHAT) -> Reply:
    """One attempt. Raises BadRun when the server refuses key or model."""
    try:
        async with server.asked():
            body = await _post(server, request, path)
        if body.get("error") and not body.get("choices"):  # some gateways say so with HTTP 200
            return Reply("failed", error=f"HTTP 200: {_safe(str(body['error']))}")
        return Reply("answered", body)
    except openai.APIStatusError as status:
        error, code = server_words(status), status.status_code
        if code in HOPELESS:
            raise BadRun(f"{server.endpoint.base_url} says {error}") from None
        if code in REFUSED:
            return Reply("refused", error=error)
        if code in GATEWAY_TIMED_OUT:
            return Reply("timed_out", error=error)
        if code in BUSY:
            return Reply("busy", error=error, retry_after_s=_retry_after_s(status.response))
        return Reply("failed", error=error)
    except TimeoutError:
        return Reply("failed", error="the server hung")
    except orjson.JSONDecodeError as torn:
        return Reply("failed", error=f"an answer that is no JSON: {torn}")
    except openai.APIConnectionError as lost:
        if isinstance(lost.__cause__, httpx2.ReadTimeout):  # a connect time-out generated nothing
            return Reply("timed_out", error="timed out")
        cause = lost.__cause__ or lost  # of which the client's own name for it may be wrong
        return Reply("failed", error=f"no answer: {str(cause) or type(cause).__name__}")


async def _post(server: Server, request: Request, path: str) -> dict[str, Any]:
    """The raw JSON: `"reasoning": ""`, null and absent stay apart, and thousands of token ids need
    no model object. Nor does the request: `chat.completions.create` would look at each message
    anew, for 0.2 ms of CPU a request."""
    response = await server.client.post(
        path,
        body={"model": server.endpoint.model, **request.body},
        cast_to=httpx2.Response,
    )
    body = orjson.loads(response.content)
    return body if isinstance(body, dict) else {}


async def _room(request: Request, server: Server) -> int | None:
    """The tokens that the prompt leaves for an answer; None when the server does not say.

    A present vLLM cuts a budget that does not fit by itself, an older one refuses the request. Its
    /tokenize tells, where its words would differ from version to version.
    """
    question = {
        "model": server.endpoint.model,
        "messages": request.body["messages"],
        "add_generation_prompt": True,
        "chat_template_kwargs": request.body.get("chat_template_kwargs"),
    }
    try:
        response = await server.client.post(
            server.endpoint.tokenize_url,
            body=question,
            cast_to=httpx2.Response,
            options={"timeout": TOKENIZE_S},
        )
        counted = orjson.loads(response.content)
        return int(counted["max_model_len"]) - int(counted["count"])
    except (openai.APIError, ValueError, KeyError, TypeError):
        return None


def backoff_s(nth: int, retry_after_s: float = 0.0) -> float:
    """Before the next attempt. Those refused in one moment must not come back in one."""
    if retry_after_s:
        return retry_after_s * random.uniform(1, 1.25)
    return min(BACKOFF_S * 2 ** (nth - 1), MAX_BACKOFF_S) * random.uniform(0.5, 1.5)


def _retry_after_s(response: httpx2.Response) -> float:
    """`Retry-After` in seconds, bounded; 0 without one, or for a date."""
    try:
        seconds = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return 0.0
    return min(seconds, MAX_BACKOFF_S) if seconds > 0 else 0.0


def server_words(error: openai.APIStatusError) -> str:
    """`HTTP 400: …` on one line, not too long, and without our key, which some servers echo."""
    body = error.body
    text = body.get("message") if isinstance(body, dict) else None
    return f"HTTP {error.status_code}: {_safe(str(text or error.response.text))}"


def _safe(words: str) -> str:
    return " ".join(words.split()).replace(api_key(), "<key>")[:300]


def api_client(endpoint: Endpoint, concurrency: int, timeout_s: float) -> openai.AsyncOpenAI:
    """A client for `concurrency` requests at once that never repeats one by itself."""
    _allow_open_files()
    # A pool smaller than the concurrency would queue, and to a time-out a queue is silence. The
    # pool is aiohttp's: httpcore2 looks at every connection of its own twice a request.
    limits = httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        api_key=api_key(),
        max_retries=0,
        timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S),
        http_client=openai.DefaultAioHttpClient(limits=limits, trust_env=False),
    )


def _allow_open_files() -> None:
    """A connection is an open file, and many a login shell allows a process 1,024 of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
