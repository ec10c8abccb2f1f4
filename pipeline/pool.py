"""The servers that share the work: who is next, who rests, and when going on is pointless.

    server = pool.next_one(tried)
    async with server.asked():                   # one more request in flight there
        ...
    pool.answered(server)                        # or busy, failed, refused; in the end gave_up

The least busy sound server is next. One that failed five times in a row rests for 30 s while the
others get everything; then one request tries it again, and after each failure more it rests twice
as long, up to 5 min. One that says it is busy rests for as long as it asks for.

Three things end the run: a server of our own whose process died, and as many requests in a row as
are open that were given up, or refused for no reason of their own. A fourth fault makes no noise: a
hung server holds its requests and generates nothing. `watch` sees that its token counters stand
still, and lets the requests go, to be asked elsewhere; where there is no elsewhere, that ends the
run too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx2
import openai
from prometheus_client.parser import text_string_to_metric_families

from pipeline.errors import Refused, ServerStopped
from pipeline.server import Endpoint, authorization

# More than the attempts of one request: a single question that breaks the server's parser each
# time sets no sound server aside.
MAX_FAILURES = 5
REST_S, MAX_REST_S = 30.0, 300.0
# So many requests given up in a row (or all that are open, if more), and the run ends.
MAX_CONSECUTIVE_FAILURES = 30
LONG_S = 10.0  # what is in flight for longer is being generated
# A dying server drops its connections some seconds before its process is gone.
LAST_BREATH_S = 10.0
POLL_S, METRICS_TIMEOUT_S = 5.0, 10.0
TOKEN_COUNTERS = {"vllm:generation_tokens_total", "vllm:prompt_tokens_total"}


class Server:
    """One server, what is in flight there and how it has been doing."""

    def __init__(self, endpoint: Endpoint, client: openai.AsyncOpenAI) -> None:
        self.endpoint, self.client = endpoint, client
        self.in_flight: dict[asyncio.Timeout, float] = {}  # since when
        self.failures = 0  # in a row
        self._rests_until = self._busy_until = 0.0

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[None]:
        """A request in flight. Raises TimeoutError when it is let go, and on no other occasion."""
        async with asyncio.timeout(None) as scope:
            self.in_flight[scope] = time.monotonic()
            try:
                yield
            finally:
                del self.in_flight[scope]

    @property
    def rests(self) -> bool:
        return time.monotonic() < self._rests_until

    @property
    def is_sound(self) -> bool:
        """After a rest that failures brought about, one request at a time is trusted to it."""
        if self.rests or time.monotonic() < self._busy_until:
            return False
        return self.failures < MAX_FAILURES or not self.in_flight

    def rest(self, seconds: float) -> None:
        self._rests_until = max(self._rests_until, time.monotonic() + seconds)

    def pause(self, seconds: float) -> None:
        """As it asked for; no answer that comes meanwhile shortens it."""
        self._busy_until = max(self._busy_until, time.monotonic() + seconds)

    def recover(self) -> None:
        self.failures, self._rests_until = 0, 0.0

    def let_go(self) -> None:
        """Have every request in flight here end with a TimeoutError."""
        for scope in self.in_flight:
            scope.reschedule(0)


class Pool:
    """All servers of a run; `num_open` counts the requests that have no answer yet."""

    def __init__(self, servers: Sequence[Server], metrics: httpx2.AsyncClient) -> None:
        self.servers, self.num_open = servers, 0
        self._metrics = metrics
        self._last_answer = time.monotonic()
        self._given_up_in_a_row = self._refused_in_a_row = 0

    def is_at_work(self, since: float) -> bool:
        """Whether an answer came since then, or is being generated: a refusal comes sooner."""
        long_ago = time.monotonic() - LONG_S
        began = (moment for server in self.servers for moment in server.in_flight.values())
        return self._last_answer > since or any(moment < long_ago for moment in began)

    def next_one(self, tried: Sequence[Server]) -> Server:
        """The least busy sound server, of those that this request tried least."""
        sound = [server for server in self.servers if server.is_sound]
        return min(sound or self.servers, key=lambda s: (tried.count(s), len(s.in_flight)))

    def answered(self, server: Server) -> None:
        server.recover()
        self._given_up_in_a_row = self._refused_in_a_row = 0
        self._last_answer = time.monotonic()

    def refused(self, error: str) -> None:
        """For no reason that the question's length would explain. Raises Refused when that is all
        that comes."""
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= max(MAX_CONSECUTIVE_FAILURES, self.num_open):
            raise Refused(
                f"{', '.join(s.endpoint.base_url for s in self.servers)} refused "
                f"{self._refused_in_a_row} questions in a row, at last with {error!r}"
            )

    def busy(self, server: Server, pause_s: float) -> None:
        """It wants a pause, which is no failure. Raises ServerStopped when our own server died."""
        _check_process(server)
        server.pause(pause_s)

    def failed(self, server: Server, error: str) -> None:
        """A 5xx or a lost connection. Raises ServerStopped when our own server died."""
        _check_process(server)
        if not server.rests:  # else it was asked before it was set aside
            server.failures += 1
            if server.failures >= MAX_FAILURES:
                self._set_aside(server, f"failed {server.failures} times in a row: {error}")

    async def gave_up(self, server: Server, error: str) -> None:
        """Raises ServerStopped when our own server died, or none has answered for too long."""
        await _wait_for_end(server)
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= max(MAX_CONSECUTIVE_FAILURES, self.num_open):
            raise ServerStopped(
                f"{', '.join(s.endpoint.base_url for s in self.servers)} failed "
                f"{self._given_up_in_a_row} times in a row, at last with {error!r}"
            )

    async def watch(self, server: Server, stall_s: float, seen: float) -> None:
        """Let go what a hung server holds; `seen` is what it counted before it was asked.

        Raises:
            ServerStopped: it is hung and no other is sound.
        """
        moved = time.monotonic()
        while True:
            await asyncio.sleep(min(POLL_S, stall_s / 4))
            tokens = await self.count_tokens(server)
            if not server.in_flight or tokens not in (None, seen):
                moved = time.monotonic()
                seen = seen if tokens is None else tokens
            elif time.monotonic() - moved >= stall_s:
                self._hung(server, stall_s)
                moved = time.monotonic()

    async def count_tokens(self, server: Server) -> float | None:
        """All tokens that a server has read and written; None when it does not say."""
        try:
            page = (await self._metrics.get(server.endpoint.metrics_url)).raise_for_status().text
            samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        except (httpx2.HTTPError, ValueError):
            return None
        counts = [sample.value for sample in samples if sample.name in TOKEN_COUNTERS]
        return sum(counts) if counts else None

    def _hung(self, server: Server, stall_s: float) -> None:
        _check_process(server)
        waiting = len(server.in_flight)
        error = f"generated nothing for {stall_s:g} s while {waiting} requests waited"
        server.failures = max(server.failures + 1, MAX_FAILURES)
        self._set_aside(server, error)
        server.let_go()
        if not any(other.is_sound for other in self.servers):
            raise ServerStopped(f"{server.endpoint.base_url} {error}")

    def _set_aside(self, server: Server, error: str) -> None:
        seconds = min(REST_S * 2 ** (server.failures - MAX_FAILURES), MAX_REST_S)
        server.rest(seconds)
        if len(self.servers) > 1:  # a single one is asked on
            print(f"{server.endpoint.base_url} {error}; it rests for {seconds:g} s", flush=True)


def _check_process(server: Server) -> None:
    if server.endpoint.died:
        raise ServerStopped(server.endpoint.last_words)


async def _wait_for_end(server: Server) -> None:
    """Give a server of our own the time to be seen dead, before a question is given up for it."""
    deadline = time.monotonic() + LAST_BREATH_S
    while server.endpoint.process and time.monotonic() < deadline:
        _check_process(server)
        await asyncio.sleep(0.1)


def metrics_client() -> httpx2.AsyncClient:
    """A client of its own: one of `concurrency` connections may have none left for a poll."""
    return httpx2.AsyncClient(timeout=METRICS_TIMEOUT_S, trust_env=False, headers=authorization())
