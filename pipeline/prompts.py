"""Stage 2, prompts: raw chat rows become the questions that will be asked.

Reads    the files in `prompts.sources`: JSONL, JSON (a list) or Parquet, rows with ShareGPT
         `conversations` (from/value) or OpenAI `messages` (role/content)
Writes   data/prompts/prompts.jsonl (records.Prompt, line number = index),
         data/prompts/rejected.jsonl (file, row, reason), reports/prompts.json
Run      python -m pipeline.prompts

A question is the leading system turn, if it says anything, and the first user turn. With
`prompts.turns: all` the later user turns belong to it, each on its own, also where two follow each
other; the answers in between are dropped, because the verifier gives its own. A later turn that is
blank or holds anything but text ends the conversation there, as what follows may be about it.

A question is known by what is sent first, so conversations that begin alike are one, and asking
their later turns too moves nobody. Questions are ordered by sha256(prompts.seed, key), so new rows
and a larger cap move nobody either; the first `num_held_out` are held out, the next `sample_cap`
are trained on.
"""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson

from pipeline.errors import DataError
from pipeline.params import Prompts, load_params
from pipeline.progress import progress_bar
from pipeline.records import (
    PROMPTS_PATH,
    Message,
    Prompt,
    PromptRejection,
    Rejected,
    Split,
    count_by,
    in_words,
)
from pipeline.resume import BOM, content_key, jsonl, write_bytes, write_json
from pipeline.stage import run_stage

REJECTED_PATH = Path("data/prompts/rejected.jsonl")
METRICS_PATH = Path("reports/prompts.json")

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_call": "tool",
    "observation": "tool",
}
ROWS_PER_PROGRESS = 1000


class Question(NamedTuple):
    """What a raw row asks."""

    source: str
    messages: list[Message]
    later_turns: list[str]
    num_cut: int  # user turns left out: the first that cannot be sent, and those behind it


def main() -> None:
    params = load_params().prompts
    questions, rejected = read_questions(params)
    check_enough(len(questions), len(rejected), params)
    prompts = choose(questions, params)
    write_bytes(PROMPTS_PATH, jsonl(prompts))
    write_bytes(REJECTED_PATH, jsonl(rejected))
    metrics = metrics_of(prompts, questions, rejected)
    write_json(METRICS_PATH, metrics)
    print(
        f"{metrics['rows_in']} rows: {metrics['held_out']} held out, {metrics['train']} to train "
        f"on, {metrics['beyond_cap']} beyond sample_cap, {len(rejected)} rejected: "
        f"{in_words(metrics['rejected'])}"
    )
    if params.turns == "all":
        print(
            f"{metrics['user_turns']} user turns to ask, {metrics['user_turns_cut']} cut off with "
            "one that cannot be sent"
        )


def read_questions(params: Prompts) -> tuple[dict[str, Question], list[dict[str, Any]]]:
    """All questions of the sources, by key, and the rejected rows.

    Raises:
        DataError: a source is missing or of no known format.
    """
    rejected: list[dict[str, Any]] = []
    questions: dict[str, Question] = {}
    for path in map(Path, params.sources):
        number = 0
        with progress_bar(f"reading {path.name}", path_rows(path), "rows") as bar:
            for number, row in enumerate(read_rows(path), start=1):
                try:
                    question = question_of(row, path.stem, params.turns)
                    key = content_key(question.messages)
                    if key in questions:
                        raise Rejected(PromptRejection.DUPLICATE)
                    questions[key] = question
                except Rejected as rejection:
                    reason = rejection.reason.value
                    rejected.append({"file": str(path), "row": number, "reason": reason})
                if number % ROWS_PER_PROGRESS == 0:
                    bar.advance(ROWS_PER_PROGRESS, f"{len(rejected)} rejected")
            bar.advance(number - bar.done, f"{len(rejected)} rejected")
    return questions, rejected


def check_enough(num_questions: int, num_rejected: int, params: Prompts) -> None:
    """Raises DataError when there are fewer than params.yaml asks for: who wrote 10,000 would
    else find out from the report that it was 3,000."""
    num_to_train = num_questions - params.num_held_out
    if num_to_train >= params.sample_cap:
        return
    most = f"at most {num_to_train}" if num_to_train > 0 else "smaller, num_held_out too"
    raise DataError(
        f"{', '.join(params.sources)}: {num_questions} questions, {num_rejected} rows rejected; "
        f"prompts.num_held_out {params.num_held_out} and prompts.sample_cap {params.sample_cap} "
        f"are more: set sample_cap to {most}, or add questions"
    )


def choose(questions: dict[str, Question], params: Prompts) -> list[Prompt]:
    """The questions to ask, in order."""
    wanted = params.num_held_out + params.sample_cap
    chosen = heapq.nsmallest(wanted, questions, key=lambda key: content_key([params.seed, key]))
    return [
        Prompt(
            index=index,
            split=Split.HELD_OUT if index < params.num_held_out else Split.TRAIN,
            key=key,
            sample_id=f"{key[:16]}_gen0",
            source=questions[key].source,
            messages=questions[key].messages,
            later_turns=questions[key].later_turns,
        )
        for index, key in enumerate(chosen)
    ]


def question_of(row: Any, file_name: str, which: Literal["first", "all"]) -> Question:
    """What one raw row asks; `file_name` stands in for its source, `which` is prompts.turns.

    Raises:
        Rejected: the row is no question, with the reason.
    """
    if row is None:
        raise Rejected(PromptRejection.NOT_JSON)
    if not isinstance(row, dict):
        raise Rejected(PromptRejection.BAD_SHAPE)
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        raise Rejected(PromptRejection.NO_CONVERSATION)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise Rejected(PromptRejection.BAD_SHAPE)
    if row.get("tools") and row["tools"] != "[]":  # an empty list, also written as text
        raise Rejected(PromptRejection.TOOLS)
    roles = [_role(turn) for turn in turns]
    if "tool" in roles:
        raise Rejected(PromptRejection.TOOLS)
    speaking = [role for role in roles if role != "system"]
    if not speaking:
        raise Rejected(PromptRejection.NO_QUESTION)
    if speaking[0] == "assistant":
        raise Rejected(PromptRejection.STARTS_WITH_ASSISTANT)
    source = str(row.get("source") or file_name)
    if not _is_unicode(source):
        raise Rejected(PromptRejection.BAD_SHAPE)
    messages: list[Message] = []
    if roles[0] == "system" and (system := _text(turns[0])).strip():
        messages.append({"role": "system", "content": system})
    first, *later = [turn for role, turn in zip(roles, turns, strict=True) if role == "user"]
    messages.append({"role": "user", "content": _asked(first)})
    if which == "first":
        return Question(source, messages, [], 0)
    later_turns = list(_sendable(later))
    return Question(source, messages, later_turns, len(later) - len(later_turns))


def _sendable(turns: Iterable[dict[str, Any]]) -> Iterator[str]:
    """The texts of the user's turns up to the first that cannot be sent."""
    with suppress(Rejected):
        for turn in turns:
            yield _asked(turn)


def _asked(turn: dict[str, Any]) -> str:
    """The text of a user turn."""
    text = _text(turn)
    if not text.strip():
        raise Rejected(PromptRejection.BLANK)
    return text


def _role(turn: dict[str, Any]) -> str:
    name = turn.get("role") or turn.get("from")  # Parquet fills an absent key with null
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Rejected(PromptRejection.UNKNOWN_ROLE)
    return role


def _text(turn: dict[str, Any]) -> str:
    """The turn's text; a list of text parts is joined, any other part is a rejection."""
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise Rejected(PromptRejection.MULTIMODAL)
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise Rejected(PromptRejection.BAD_SHAPE)
        content = "".join(texts)
    if not isinstance(content, str) or not _is_unicode(content):
        raise Rejected(PromptRejection.BAD_SHAPE)
    return content


def _is_unicode(text: str) -> bool:
    """False for a lone surrogate (a JSON escape cut in half): no server could be sent it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_rows(path: Path) -> Iterator[Any]:
    """Each row of a source; None for a JSONL line that does not parse.

    Raises:
        DataError: the file is missing, unreadable or of no known format.
    """
    try:
        match path.suffix:
            case ".jsonl":
                with path.open("rb") as file:
                    yield from (_parsed(line) for line in file if line.strip())
            case ".json":
                # Python's own parser takes half an escaped character, which is one bad row.
                rows = json.loads(path.read_bytes())
                if not isinstance(rows, list):
                    raise DataError(f"{path}: a JSON source is a list of rows")
                yield from rows
            case ".parquet":
                import pyarrow.parquet as pq

                for batch in pq.ParquetFile(path).iter_batches(ROWS_PER_PROGRESS):
                    yield from batch.to_pylist()
            case suffix:
                raise DataError(f"{path}: {suffix or 'no suffix'} is not .jsonl, .json or .parquet")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror or error}; `make raw` fetches what prompts.urls names, else "
            "see prompts.sources"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {error}") from error


def path_rows(path: Path) -> int:
    """How many rows to expect, for the progress bar; 0 when only reading would tell."""
    if path.suffix != ".jsonl" or not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line.removeprefix(BOM))
    except orjson.JSONDecodeError:
        return None


def metrics_of(
    prompts: list[Prompt], questions: dict[str, Question], rejected: list[dict[str, Any]]
) -> dict[str, Any]:
    splits: Iterable[str] = [prompt["split"] for prompt in prompts]
    return {
        "rows_in": len(questions) + len(rejected),
        **count_by(splits, Split),
        "beyond_cap": len(questions) - len(prompts),
        "rejected": count_by((row["reason"] for row in rejected), PromptRejection),
        "source": dict(sorted(Counter(prompt["source"] for prompt in prompts).items())),
        "user_turns": sum(1 + len(prompt["later_turns"]) for prompt in prompts),
        "user_turns_cut": sum(questions[prompt["key"]].num_cut for prompt in prompts),
    }


if __name__ == "__main__":
    run_stage("prompts", main)
