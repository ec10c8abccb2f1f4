"""A server that speaks vLLM 0.32's HTTP over a made-up vocabulary, and misbehaves on command.

    with FakeServer() as server:                 # a real server on a free port, in a thread
        server.when("Why?", fail(500), reset)    # the next two requests for this question
        server.next(fail(429), fail(429))        # the next two requests, whatever they ask
        server.from_request(6, silence)          # the sixth and all later ones
        server.always(edited(drop_token_ids))    # every request that nothing above claims
        server.writes["Why?"] = [THINK, *ids("because"), THINK_END, *ids("so"), END]
        ... PIPELINE_GENERATE_ENDPOINTS=server.base_url ...
        server.bodies                            # the JSON of every chat request, as it came in
        server.questions                         # the last user turn of each, in that order
        server.peak                              # most chat requests that were open at once

A token is a character and its id the code point; five more ids are the special tokens. So a test
can write a prompt or an answer by hand, and text follows from ids as it does in vLLM: `max_tokens`
cuts the ids, the text is split at the first "</think>" in it.

An act is `async (request, answer) -> response`; `answer` is the JSON of a server that behaves.
Here are `fail`, `reset`, `silence`, `torn_json`, `cut_off`, `says` and `edited`; `server.hold`
answers only after `server.release()`.
"""

import asyncio
import copy
import json
import threading
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

MODEL = "models/verifier"
VERSION = "0.32.0"
THINK, THINK_END, END, USER, ASSISTANT, SYSTEM = 200, 201, 202, 203, 204, 205
VOCAB_SIZE = 256
SPECIAL_TEXT = {
    THINK: "<think>",
    THINK_END: "</think>",
    END: "",
    USER: "<|user|>",
    ASSISTANT: "<|assistant|>",
    SYSTEM: "<|system|>",
}

Answer = dict[str, Any]
Act = Callable[[web.Request, Answer], Awaitable[web.StreamResponse]]


def ids(text: str) -> list[int]:
    """The token ids of ASCII text; "</think>" in it is eight ordinary tokens."""
    return list(text.encode("ascii"))


def text_of(token_ids: list[int]) -> str:
    return "".join(SPECIAL_TEXT.get(token) or chr(token) for token in token_ids if token != END)


def prompt_ids(messages: list[dict[str, str]], *, thinking: bool = True) -> list[int]:
    """What this model's chat template makes: thinking off is an empty block, as in Qwen3."""
    roles = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
    turns = [[roles[m["role"]], *ids(m["content"]), END] for m in messages]
    asked = [token for turn in turns for token in turn]
    return [*asked, ASSISTANT, *([] if thinking else [THINK, THINK_END])]


def written(question: str, *, thinking: bool = True) -> list[int]:
    """What this model writes when nothing else is scripted."""
    reasoning = [THINK, *ids(f"\nI recall {question}\n"), THINK_END]
    return [*(reasoning if thinking else []), *ids(f"\n\nIt is {question[::-1]}"), END]


class FakeServer:
    """See the module. `together` holds the first requests until so many are open (or 20 s)."""

    def __init__(
        self,
        *,
        model: str = MODEL,
        max_model_len: int = 1024,
        api_key: str | None = None,
        together: int = 0,
    ) -> None:
        self.model, self.max_model_len, self.api_key = model, max_model_len, api_key
        self.writes: dict[str, list[int]] = {}
        self.metrics = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.peak = 0
        self._together = together
        self._by_question: dict[str, deque[Act]] = defaultdict(deque)
        self._next: deque[Act] = deque()
        self._from_request: tuple[int, Act] | None = None
        self._always: Act | None = None
        self._loop = asyncio.new_event_loop()
        self._released, self._met = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def when(self, question: str, *acts: Act) -> None:
        self._by_question[question].extend(acts)

    def next(self, *acts: Act) -> None:
        self._next.extend(acts)

    def from_request(self, number: int, act: Act) -> None:
        self._from_request = (number, act)

    def always(self, act: Act | None) -> None:
        self._always = act

    def behave(self) -> None:
        """Forget every script."""
        self._by_question.clear()
        self._next.clear()
        self._from_request = self._always = None
        self.writes.clear()

    async def hold(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        await self._released.wait()
        return web.json_response(answer)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._released.set)

    @property
    def questions(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self.port = self._call(self._start())
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Drop every connection and refuse new ones."""
        if self._thread.is_alive():
            self._call(self._runner.cleanup())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> int:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        return int(self._runner.addresses[0][1])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """As vLLM's --api-key: everything under /v1 wants the key."""
        sent = request.headers.get("Authorization", "")
        if self.api_key and request.path.startswith("/v1") and sent != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self.model, "object": "model", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        act = self._act(body["messages"][-1]["content"], len(self.bodies))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if self._together:
                await self._meet()
            answer = completion(body, self.writes)
            return await act(request, answer) if act else web.json_response(answer)
        finally:
            self.in_flight -= 1

    async def _meet(self) -> None:
        if self.in_flight >= self._together:
            self._met.set()
        try:
            await asyncio.wait_for(self._met.wait(), 20)
        except TimeoutError:
            self._met.set()  # they never came together; `peak` tells

    def _act(self, question: str, number: int) -> Act | None:
        for scripted in (self._by_question[question], self._next):
            if scripted:
                return scripted.popleft()
        if self._from_request and number >= self._from_request[0]:
            return self._from_request[1]
        return self._always


def completion(body: dict[str, Any], writes: dict[str, list[int]]) -> Answer:
    """The answer of a server that behaves."""
    switch = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
    question = body["messages"][-1]["content"]
    token_ids = writes.get(question) or written(question, thinking=bool(switch))
    finish = "stop"
    if len(token_ids) > body["max_tokens"]:
        token_ids, finish = token_ids[: body["max_tokens"]], "length"
    answer: Answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "prompt_token_ids": prompt_ids(body["messages"], thinking=bool(switch)),
    }
    answer = with_ids(answer, token_ids, finish, thinking=bool(switch))
    if not body.get("return_token_ids"):
        drop_token_ids(answer)
    return answer


def with_ids(
    answer: Answer, token_ids: list[int], finish: str | None, *, thinking: bool = True
) -> Answer:
    """`answer` with these generated ids, and text and usage as they follow from them."""
    text = text_of(token_ids).removeprefix("<think>")
    reasoning, closed, content = text.partition("</think>") if thinking else (None, True, text)
    num_prompt = len(answer["prompt_token_ids"])
    choice = {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": (content or None) if closed else None,
            "reasoning": reasoning or None,
            "tool_calls": [],
        },
        "finish_reason": finish,
        "token_ids": token_ids,
    }
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": len(token_ids),
        "total_tokens": num_prompt + len(token_ids),
        "prompt_tokens_details": None,
    }
    return {**answer, "choices": [choice], "usage": usage}


def drop_token_ids(answer: Answer) -> None:
    """What a vLLM that was not asked for ids says."""
    answer["prompt_token_ids"] = answer["choices"][0]["token_ids"] = None


def says(*token_ids: int, finish: str | None = "stop") -> Act:
    """Answer with these generated ids."""

    async def act(request: web.Request, answer: Answer) -> web.StreamResponse:
        return web.json_response(with_ids(answer, list(token_ids), finish))

    return act


def edited(change: Callable[[Answer], object]) -> Act:
    """Answer with what `change` leaves of the right answer."""

    async def act(request: web.Request, answer: Answer) -> web.StreamResponse:
        changed = copy.deepcopy(answer)
        change(changed)
        return web.json_response(changed)

    return act


def fail(status: int, message: str = "no luck", *, echo_key: bool = False) -> Act:
    """An HTTP error in vLLM's form; `echo_key` quotes the sender's key, as some gateways do."""

    async def act(request: web.Request, answer: Answer) -> web.StreamResponse:
        key = f" (you sent {request.headers.get('Authorization')})" if echo_key else ""
        error = {"message": message + key, "type": "Error", "param": None, "code": status}
        return web.json_response({"error": error}, status=status)

    return act


async def reset(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Drop the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def silence(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def in_two_chunks(request: web.Request, answer: Answer) -> web.StreamResponse:
    """The right answer, torn in the middle of the JSON but complete."""
    return await _in_chunks(request, answer, parts=2)


async def torn_json(request: web.Request, answer: Answer) -> web.StreamResponse:
    """A complete HTTP answer whose JSON stops half-way."""
    return await _in_chunks(request, answer, parts=1)


async def cut_off(request: web.Request, answer: Answer) -> web.StreamResponse:
    """Half an answer, then the connection drops."""
    response = await _in_chunks(request, answer, parts=1, end=False)
    assert request.transport is not None
    request.transport.abort()
    return response


async def _in_chunks(
    request: web.Request, answer: Answer, parts: int, *, end: bool = True
) -> web.StreamResponse:
    data = json.dumps(answer).encode()
    middle = len(data) // 2
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for part in (data[:middle], data[middle:])[:parts]:
        await response.write(part)
        await asyncio.sleep(0)
    if end:
        await response.write_eof()
    return response
