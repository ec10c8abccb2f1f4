"""Time taken on the server's side, the same for every client: first request in, last answer out.

An ASGI middleware: `vllm serve … --middleware perf.stopwatch.Stopwatch`. Each client prints a
duration of its own and means another one by it; this one begins after a client's imports.

    POST /stopwatch     start anew
    GET /stopwatch      [12.5, 20.25]      time.monotonic of the first request, of the last answer
"""

import json
import time
from typing import Any

import httpx2


class Stopwatch:
    """Notes when POST requests come in and when they are answered."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.first_in: float | None = None
        self.last_out: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/stopwatch":
            if scope["method"] == "POST":
                self.first_in = self.last_out = None
            await send_json(send, json.dumps([self.first_in, self.last_out]).encode())
        elif scope["type"] == "http" and scope["method"] == "POST":
            self.first_in = self.first_in or time.monotonic()
            await self.app(scope, receive, send)
            self.last_out = time.monotonic()
        else:
            await self.app(scope, receive, send)


async def send_json(send: Any, body: bytes, status: int = 200) -> None:
    """A whole ASGI answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def start_stopwatch(base_url: str) -> None:
    httpx2.post(_url(base_url), trust_env=False).raise_for_status()


def read_stopwatch(base_url: str) -> tuple[float, float]:
    first_in, last_out = httpx2.get(_url(base_url), trust_env=False).raise_for_status().json()
    return first_in, last_out


def _url(base_url: str) -> str:
    return base_url.removesuffix("/v1") + "/stopwatch"
