"""Answers that a user already has: `python -m pipeline.generate --import FILE`.

FILE is JSONL. A row holds `messages` (OpenAI's form; a last assistant turn is the answer) and
beside or inside it `reasoning` (or `reasoning_content`), `content`, `finish_reason`, and, if there,
`prompt_token_ids` and `token_ids`, `usage`, `sampling`, `thinking`, `model`. What a row does not
say of sampling, thinking and model, params.yaml says: the user vouches for it.

Each row is judged as an answer of the server would be, and keyed by what it is. Rows that the
present params want are there for the next `make repro`; the others wait in data/.stash. Rows of no
use, those without reasoning among them, are counted by reason (ImportRejection, or their status)
and listed in logs/import.rejected.jsonl.
"""

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any

import orjson

from pipeline import diagnosis
from pipeline.client import Answer
from pipeline.errors import DataError
from pipeline.exchange import REASONING_FIELDS, Question, trace_key, trace_of
from pipeline.params import Generate, Params, load_params
from pipeline.progress import progress_bar
from pipeline.reasoning import has_ids, verdict_of
from pipeline.records import (
    NO_ANSWER,
    TRACES,
    TRUNCATED,
    Message,
    Prompt,
    Rejected,
    Status,
    Trace,
    in_words,
)
from pipeline.resume import BOM, content_key, jsonl, one_writer, write_bytes
from pipeline.server import Endpoint
from pipeline.stage import LOGS
from pipeline.traces import JOURNAL, Stored, append, keep, load_stored
from pipeline.verifier import VerifierIdentity, load_verifier

# What a run would ask again or set aside is better asked than imported.
USABLE = TRUNCATED | {Status.OK, Status.THINKING_OFF_BY_USER}
REJECTED_PATH = LOGS / "import.rejected.jsonl"


class ImportRejection(StrEnum):
    """Why a row was not taken in."""

    NOT_JSON = "not_json"
    BAD_SHAPE = "bad_shape"  # no list of {role, content}, or fields of the wrong type
    NO_QUESTION = "no_question"  # no user turn before the answer
    OTHER_MODEL = "other_model"  # it names another model than verifier.model
    NO_FINISH_REASON = "no_finish_reason"  # was it cut? neither finish_reason nor an end token
    NO_TEXT = "no_text"  # neither text nor ids in it
    ALREADY_THERE = "already_there"


def import_file(path: Path) -> None:
    """Take the rows of `path` into data/traces.

    Raises:
        DataError: the file cannot be read.
    """
    params, verifier = load_params(), load_verifier()
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    statuses: Counter[str] = Counter()
    num_without_ids = 0
    rejected: list[dict[str, Any]] = []
    with one_writer(TRACES):
        TRACES.mkdir(exist_ok=True)
        stored = load_stored(lambda trace: verdict_of(trace, verifier, params))
        num_bytes = path.stat().st_size
        with (
            file,
            JOURNAL.open("ab") as journal,
            progress_bar("importing", num_bytes, "bytes") as bar,
        ):
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    trace = imported(line, params, verifier)
                    there = stored.get(trace["key"])
                    if there and there.verdict.status not in NO_ANSWER:
                        raise Rejected(ImportRejection.ALREADY_THERE)
                    verdict = verdict_of(trace, verifier, params)
                    place = append(journal, trace)
                    keep(trace["key"], Stored.of(trace, verdict, place), stored)
                    statuses[trace["status"]] += 1
                    num_without_ids += not has_ids(trace)
                except Rejected as rejection:
                    rejected.append({"row": number, "reason": rejection.reason.value})
                bar.advance(len(line), f"{len(rejected)} rejected")
    write_bytes(REJECTED_PATH, jsonl(rejected))
    reasons = Counter(row["reason"] for row in rejected)
    taken = statuses.total()
    print(
        f"{taken + len(rejected)} rows: {taken} taken in ({in_words(statuses)}), {len(rejected)} "
        f"rejected ({in_words(reasons)})"
        + ("; `make repro` puts those to use that answer its questions" if taken else "")
    )
    if num_without_ids:
        way = "are rebuilt from their text"
        if params.reassemble.source == "ids":
            key = diagnosis.line("reassemble.source", params)
            way = f"train once {key} is ids_else_text (or text)"
        print(f"{num_without_ids} have no token ids: they {way}, and are not asked again")


def imported(line: bytes, params: Params, verifier: VerifierIdentity) -> Trace:
    """The trace that a row of the file becomes.

    Raises:
        Rejected: with the reason.
    """
    try:
        row = orjson.loads(line.removeprefix(BOM))
    except orjson.JSONDecodeError:
        raise Rejected(ImportRejection.NOT_JSON) from None
    if not isinstance(row, dict):
        raise Rejected(ImportRejection.BAD_SHAPE)
    messages, message = _question_and_answer(row)
    said = {name: value for name, value in row.items() if value is not None}
    if said.get("model", verifier.model) != verifier.model:
        raise Rejected(ImportRejection.OTHER_MODEL)
    thinking = said.get("thinking", params.generate.thinking)
    if not isinstance(thinking, bool):
        raise Rejected(ImportRejection.BAD_SHAPE)
    made_with = params.generate.model_copy(update={"thinking": thinking})
    sampling = _sampling(said.get("sampling", {}), made_with)
    budget = int(sampling.pop("max_tokens"))
    if budget < 1:
        raise Rejected(ImportRejection.BAD_SHAPE)
    key = trace_key(messages, sampling, made_with.template_kwargs, verifier)
    body = {
        "prompt_token_ids": row.get("prompt_token_ids"),
        "choices": [
            {
                "message": message,
                "token_ids": row.get("token_ids"),
                "finish_reason": _finish_reason(row, verifier),
            }
        ],
        "usage": row.get("usage") or _usage(row),
    }
    version = str(row.get("server_version") or "unknown")
    origin = Endpoint("import", verifier.model, version, params.verifier.max_model_len)
    answer = Answer(key, body, None, "answered", 1, origin, budget)
    prompt_key = content_key(messages)
    prompt = Prompt(
        index=0,
        split="train",
        key=prompt_key,
        sample_id=str(row.get("sample_id") or f"{prompt_key[:16]}_gen0"),
        source=str(row.get("source") or "import"),
        messages=messages,
        later_turns=[],
    )
    as_made = params.model_copy(update={"generate": made_with})
    trace = trace_of(answer, Question.first(prompt), as_made, verifier)
    if "error" in trace:
        raise Rejected(ImportRejection.BAD_SHAPE)
    if not (has_ids(trace) or _has_text(trace)):
        raise Rejected(ImportRejection.NO_TEXT)
    if trace["status"] not in USABLE:
        raise Rejected(Status(trace["status"]))
    return {**trace, "sampling": {**sampling, "max_tokens": budget}, "imported": True}


def _sampling(said: Any, params: Generate) -> dict[str, float | int]:
    """The sampling values, those of params.yaml for what is not said (or null), each in the type
    it is sent in: the key of 0 is not that of 0.0."""
    values = {**params.sampling, "max_tokens": params.max_tokens}
    if not isinstance(said, dict):
        raise Rejected(ImportRejection.BAD_SHAPE)
    for name, value in said.items():
        if value is None:
            continue
        if type(value) not in (int, float) or abs(value) >= 2**53:
            raise Rejected(ImportRejection.BAD_SHAPE)
        values[name] = type(values[name])(value) if name in values else value
    return values


def _usage(row: dict[str, Any]) -> dict[str, int]:
    """Counted from the ids, where nobody says what was billed."""
    prompt_ids, token_ids = row.get("prompt_token_ids"), row.get("token_ids")
    if not isinstance(prompt_ids, list) or not isinstance(token_ids, list):
        return {}
    return {"prompt_tokens": len(prompt_ids), "completion_tokens": len(token_ids)}


def _question_and_answer(row: dict[str, Any]) -> tuple[list[Message], dict[str, Any]]:
    """The messages as they were sent, and the answer as a server would put it."""
    turns = row.get("messages")
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns
    ):
        raise Rejected(ImportRejection.BAD_SHAPE)
    message: dict[str, Any] = {k: row[k] for k in (*REASONING_FIELDS, "content") if k in row}
    if turns and turns[-1]["role"] == "assistant":
        *turns, last = turns
        beside = {k: v for k, v in message.items() if v is not None or k not in last}
        message = {k: v for k, v in last.items() if k != "role"} | beside
    if not all(isinstance(turn.get("content"), str) for turn in turns):
        raise Rejected(ImportRejection.BAD_SHAPE)
    if not turns or turns[-1]["role"] != "user":
        raise Rejected(ImportRejection.NO_QUESTION)
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns], message


def _finish_reason(row: dict[str, Any], verifier: VerifierIdentity) -> str:
    """As the row says; else by its last token, for without that nobody knows whether it was cut."""
    given, ids = row.get("finish_reason"), row.get("token_ids")
    if isinstance(given, str):
        return given
    if isinstance(ids, list) and ids:
        return "stop" if ids[-1] in verifier.end_ids else "length"
    raise Rejected(ImportRejection.NO_FINISH_REASON)


def _has_text(trace: Trace) -> bool:
    return bool((trace.get("reasoning") or "").strip() or (trace.get("content") or "").strip())
