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
        server.asked                             # those of questions proper: no probe, no try
        server.peak                              # most chat requests that were open at once
        server.down(); server.up()               # gone for a while, and back on the same port

A token is a character and its id the code point; five more ids are the special tokens. So a test
can write a prompt or an answer by hand, and text follows from ids as it does in vLLM: `max_tokens`
cuts the ids, the text is split at the first "</think>" in it. /v1/completions takes such ids and
goes on where the same model would, /tokenize makes them, and /metrics shows the text in
`server.metrics`, and with `counting=True` the tokens of what was really answered.

What kind of server it is, the constructor says: the switch that its template knows, whether it
thinks by default, whether it cuts a budget that exceeds the context (`clamps`, as vLLM 0.32) or
refuses it (as older ones), whether its think tokens show in the text of a completion, whether it
has /tokenize and /v1/completions. With `spares_probes` the scripts begin with the first question:
generate's probe before it (`is_probe`) is answered as by a server that behaves.

An act is `async (request, answer) -> response`; `answer` is the JSON of a server that behaves.
Here are `fail`, `reset`, `silence`, `torn_json`, `cut_off`, `says` and `edited`; `server.hold`
answers only after `server.release()`.
"""

import asyncio
import copy
import json
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

MODEL = "models/verifier"
VERSION = "0.32.0"
THINK, THINK_END, END, USER, ASSISTANT, SYSTEM = 200, 201, 202, 203, 204, 205
VOCAB_SIZE = 256
TRY_MAX_TOKENS = 128  # pipeline.diagnosis tries the known switches with it
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
        switch: str = "enable_thinking",
        thinks_by_default: bool = True,
        clamps: bool = True,
        hides_think_tokens: bool = False,
        tokenizes: bool = True,
        completes: bool = True,
        counting: bool = False,
        spares_probes: bool = False,
    ) -> None:
        self.model, self.max_model_len, self.api_key = model, max_model_len, api_key
        self.switch, self.thinks_by_default, self.clamps = switch, thinks_by_default, clamps
        self.hides_think_tokens, self.tokenizes = hides_think_tokens, tokenizes
        self.completes, self.counting, self.spares_probes = completes, counting, spares_probes
        self.writes: dict[str, list[int]] = {}
        self.metrics = ""
        self.metrics_act: Act | None = None  # what /metrics does instead
        self.num_polls = 0  # how often /metrics was asked for
        self.tokens = Counter[str]()  # prompt and generation tokens of what was answered
        self.bodies: list[dict[str, Any]] = []
        self.completion_bodies: list[dict[str, Any]] = []
        self.tokenize_bodies: list[dict[str, Any]] = []
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

    @property
    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies if is_question(body)]

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self.port = self._call(self._start(port=0))
        self.base_url = f"http://127.0.0.1:{self.port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """`down` for good."""
        if self._thread.is_alive():
            self._call(self._runner.cleanup())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def down(self) -> None:
        """Drop every connection and refuse new ones, until `up`."""
        self._call(self._runner.cleanup())

    def up(self) -> None:
        self._call(self._start(self.port))

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self, port: int) -> int:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.completes:
            app.router.add_post("/v1/completions", self._complete)
        if self.tokenizes:
            app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=1024)
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

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        self.num_polls += 1
        text = self.metrics + (counters(self.tokens) if self.counting else "")
        if self.metrics_act:
            return await self.metrics_act(request, {"metrics": text})
        return web.Response(text=text)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        act = self._act(body)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if self._together:
                await self._meet()
            thinking = self._thinking(body)
            prompt = prompt_ids(body["messages"], thinking=thinking)
            try:
                budget = self._budget(len(prompt), body.get("max_tokens"))
            except ValueError as refusal:
                act, answer = fail(400, str(refusal)), {}
            else:
                answer = chat_answer(body, prompt, self._writing(body, thinking), budget, thinking)
            response = await act(request, answer) if act else web.json_response(answer)
            if response.status == 200:
                self._count(len(prompt), answer["usage"]["completion_tokens"])
            return response
        finally:
            self.in_flight -= 1

    def _thinking(self, body: dict[str, Any]) -> bool:
        """As a template sees it: a switch of another name changes nothing."""
        switches = body.get("chat_template_kwargs") or {}
        return bool(switches.get(self.switch, self.thinks_by_default))

    def _writing(self, body: dict[str, Any], thinking: bool) -> list[int]:
        question = body["messages"][-1]["content"]
        return self.writes.get(question) or written(question, thinking=thinking)

    def _budget(self, num_prompt: int, max_tokens: int | None) -> int:
        """How many tokens may be generated. Raises ValueError in vLLM's words."""
        length, room = self.max_model_len, self.max_model_len - num_prompt
        wanted = room if max_tokens is None else max_tokens
        if room <= 0:
            raise ValueError(
                f"This model's maximum context length is {length} tokens. However, your prompt "
                f"contains {num_prompt} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt."
            )
        if wanted > (length if self.clamps else room):
            raise ValueError(
                f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's "
                f"maximum context length is {length} tokens and your request has {num_prompt} "
                f"input tokens ({wanted} > {length} - {num_prompt})."
            )
        return min(wanted, room)

    def _count(self, num_prompt: int, num_generated: int) -> None:
        self.tokens["prompt"] += num_prompt
        self.tokens["generation"] += num_generated

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        """Go on with a prompt of ids as the model would have: with the rest of its own writing."""
        body = await request.json()
        self.completion_bodies.append(body)
        prompt = body["prompt"]
        try:
            budget = self._budget(len(prompt), body.get("max_tokens", 16))
        except ValueError as refusal:
            return await fail(400, str(refusal))(request, {})
        rest = self._rest_of(prompt)
        token_ids, finish = cut(rest, budget)
        hidden = {THINK, THINK_END} if self.hides_think_tokens else set()
        choice: dict[str, Any] = {
            "index": 0,
            "text": text_of([token for token in token_ids if token not in hidden]),
            "finish_reason": finish,
        }
        if body.get("return_token_ids"):
            choice |= {"token_ids": token_ids, "prompt_token_ids": prompt}
        self._count(len(prompt), len(token_ids))
        usage = usage_of(len(prompt), len(token_ids))
        answer = {"id": "cmpl-1", "object": "text_completion", "model": self.model}
        return web.json_response({**answer, "choices": [choice], "usage": usage})

    def _rest_of(self, prompt: list[int]) -> list[int]:
        """What follows a chat prompt and the first tokens of the model's own answer to it; after
        anything else this model has nothing to say."""
        if USER not in prompt:
            return [END]
        asked = len(prompt) - prompt[::-1].index(USER)
        characters = "".join(map(chr, prompt[asked:]))  # one a token, special ones too
        question, _, after = characters.partition(chr(END) + chr(ASSISTANT))
        begun = [ord(character) for character in after]
        for opening, thinking in (([], True), ([THINK, THINK_END], False)):
            whole = [*opening, *(self.writes.get(question) or written(question, thinking=thinking))]
            if whole[: len(begun)] == begun and len(begun) >= len(opening):
                return whole[len(begun) :]
        return [END]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.tokenize_bodies.append(body)
        tokens = prompt_ids(body["messages"], thinking=self._thinking(body))
        counted = {"count": len(tokens), "max_model_len": self.max_model_len}
        return web.json_response({**counted, "tokens": tokens, "token_strs": None})

    async def _meet(self) -> None:
        if self.in_flight >= self._together:
            self._met.set()
        try:
            await asyncio.wait_for(self._met.wait(), 20)
        except TimeoutError:
            self._met.set()  # they never came together; `peak` tells

    def _act(self, body: dict[str, Any]) -> Act | None:
        if self.spares_probes and is_probe(body):
            return None
        for scripted in (self._by_question[body["messages"][-1]["content"]], self._next):
            if scripted:
                return scripted.popleft()
        if self._from_request:
            number, act = self._from_request
            spared = sum(map(is_probe, self.bodies)) if self.spares_probes else 0
            if len(self.bodies) - spared >= number:
                return act
        return self._always


def is_probe(body: dict[str, Any]) -> bool:
    """generate's probe wants probabilities, or one token to see the prompt."""
    return bool(body.get("logprobs")) or body.get("max_tokens") == 1


def is_question(body: dict[str, Any]) -> bool:
    return not is_probe(body) and body.get("max_tokens") != TRY_MAX_TOKENS


def chat_answer(
    body: dict[str, Any], prompt: list[int], writing: list[int], budget: int, thinking: bool
) -> Answer:
    """The answer of a server that behaves."""
    token_ids, finish = cut(writing, budget)
    answer: Answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "prompt_token_ids": prompt,
    }
    answer = with_ids(answer, token_ids, finish, thinking=thinking)
    if body.get("logprobs"):
        answer["choices"][0]["logprobs"] = {
            "content": [logprob_of(token, body.get("top_logprobs", 0)) for token in token_ids]
        }
    if not body.get("return_token_ids"):
        drop_token_ids(answer)
    return answer


def cut(token_ids: list[int], budget: int) -> tuple[list[int], str]:
    """As many as the budget allows, and the finish reason."""
    return (token_ids[:budget], "length") if len(token_ids) > budget else (token_ids, "stop")


def logprob_of(token: int, num_top: int, *, likeliest: int | None = None) -> dict[str, Any]:
    """One generated token as in `logprobs.content`; the likeliest unless another one was.

    As vLLM does it: the sampled token is the first of `top_logprobs`, whatever its rank.
    """
    others = {"?": -3.0} if likeliest is None else {text_of([likeliest]): -0.1, "?": -3.0}
    given = {text_of([token]): -0.1 if likeliest is None else -2.0, **others}
    top = [{"token": text, "logprob": value, "bytes": None} for text, value in given.items()]
    return {**top[0], "top_logprobs": top[:num_top]}


def usage_of(num_prompt: int, num_generated: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": None,
    }


def counters(tokens: Mapping[str, int]) -> str:
    """Token counters as vLLM's /metrics shows them."""
    label = '{engine="0",model_name="models/verifier"}'
    return "".join(
        f"# HELP vllm:{kind}_tokens_total Number of {kind} tokens processed.\n"
        f"# TYPE vllm:{kind}_tokens_total counter\n"
        f"vllm:{kind}_tokens_total{label} {float(tokens.get(kind, 0))}\n"
        for kind in ("prompt", "generation")
    )


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
    return {**answer, "choices": [choice], "usage": usage_of(num_prompt, len(token_ids))}


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


def fail(
    status: int,
    message: str = "no luck",
    *,
    echo_key: bool = False,
    retry_after: str | None = None,
) -> Act:
    """An HTTP error in vLLM's form; `echo_key` quotes the sender's key, as some gateways do."""

    async def act(request: web.Request, answer: Answer) -> web.StreamResponse:
        key = f" (you sent {request.headers.get('Authorization')})" if echo_key else ""
        error = {"message": message + key, "type": "Error", "param": None, "code": status}
        headers = {"Retry-After": retry_after} if retry_after else {}
        return web.json_response({"error": error}, status=status, headers=headers)

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
