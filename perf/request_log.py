"""The requests that a server was sent, one line each: its own stages start it, so nobody counts them
from outside.

An ASGI middleware: `vllm serve … --middleware perf.request_log.RequestLog`, and in its environment
$REQUEST_LOG, the file that gets the path of each POST.
"""

import os
from pathlib import Path
from typing import Any


class RequestLog:
    def __init__(self, app: Any) -> None:
        self.app = app
        self.log = Path(os.environ["REQUEST_LOG"])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            with self.log.open("a") as lines:
                lines.write(scope["path"] + "\n")
        await self.app(scope, receive, send)
