"""A vLLM that costs nothing: every question gets the same answer of 2,000 tokens, at once.

    python -m perf.stub_server 8000        # until it is ended

What a client does with an answer is then all there is to measure. The answer has vLLM's fields, and
reasoning by the demo verifier's ids: think-start, reasoning, think-end, answer, end of turn.
"""

import json
import re
import sys
from typing import Any

import uvicorn

from perf.stopwatch import Stopwatch, send_json

MODEL = "models/verifier"
MAX_MODEL_LEN = 2048
END, THINK, THINK_END = 1021, 1022, 1023
NUM_TOKENS, NUM_ANSWER_TOKENS, NUM_PROMPT_TOKENS = 2000, 100, 30
CHARS_PER_TOKEN = 4


def words(num_tokens: int) -> list[int]:
    """Ids of ordinary tokens without an end that repeats."""
    return [100 + i * i % 797 for i in range(num_tokens)]


def text(num_tokens: int) -> str:
    sentence = "so the next number is larger by three and that is "
    num_chars = num_tokens * CHARS_PER_TOKEN
    return (sentence * (num_chars // len(sentence) + 1))[:num_chars]


def chat_completion(prompt_ids: list[int]) -> dict[str, Any]:
    num_reasoning = NUM_TOKENS - NUM_ANSWER_TOKENS - 3
    ids = [THINK, *words(num_reasoning), THINK_END, *words(NUM_ANSWER_TOKENS), END]
    message = {
        "role": "assistant",
        "content": "\n\n" + text(NUM_ANSWER_TOKENS),
        "reasoning": "\n" + text(num_reasoning) + "\n",
        "tool_calls": [],
    }
    return answered("chat.completion", {"message": message}, prompt_ids, ids)


def text_completion() -> dict[str, Any]:
    return answered("text_completion", {"text": text(1)}, PROMPT_IDS, words(1))


def answered(
    kind: str, choice: dict[str, Any], prompt_ids: list[int], ids: list[int]
) -> dict[str, Any]:
    """The parts that both kinds of completion have, in vLLM 0.32's names."""
    common = {"index": 0, "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    return {
        "id": "stub-1",
        "object": kind,
        "created": 0,
        "model": MODEL,
        "choices": [{**common, **choice, "token_ids": ids}],
        "prompt_token_ids": prompt_ids,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt_ids) + len(ids),
        },
    }


def as_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


PROMPT_IDS = words(NUM_PROMPT_TOKENS)
ANSWERS = {
    "/v1/chat/completions": as_json(chat_completion(PROMPT_IDS)),
    "/v1/completions": as_json(text_completion()),
    "/v1/models": as_json({"data": [{"id": MODEL, "max_model_len": MAX_MODEL_LEN}]}),
    "/version": as_json({"version": "0.32.0"}),
    "/metrics": b"",
}
# `generate` looks first whether the switch changes the prompt, as the template's empty block does.
NOT_THINKING = as_json(chat_completion([*PROMPT_IDS, THINK, THINK_END]))
THINKING_OFF = re.compile(rb'"enable_thinking": ?false')
NOT_FOUND = as_json({"error": {"message": "Not Found", "code": 404}})


async def app(scope: Any, receive: Any, send: Any) -> None:
    """The ASGI application. Of a question it reads the thinking switch alone."""
    asked = b""
    while scope["method"] == "POST":
        message = await receive()
        asked += message.get("body", b"")
        if not message.get("more_body"):
            break
    thinks = THINKING_OFF.search(asked) is None
    body = ANSWERS.get(scope["path"]) if thinks else NOT_THINKING
    await send_json(send, NOT_FOUND if body is None else body, 404 if body is None else 200)


def main() -> None:
    uvicorn.run(
        Stopwatch(app),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        backlog=4096,
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
