"""What a row on disk means, from question to sequence.

    raw row → Prompt (data/prompts) → Trace (data/traces) → sequence (data/sequences, `datasets`)

Every stage accounts for its rows: rows in = rows out + rows rejected, by a reason from a closed
list (the enums here), in its file under reports/.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NotRequired, TypedDict

PROMPTS_PATH = Path("data/prompts/prompts.jsonl")
TRACES = Path("data/traces")
TRACES_PER_PART = 1000
SEQUENCES = Path("data/sequences")
DISAGREEMENTS_PATH = SEQUENCES / "disagreements.jsonl"
HIDDEN_STATES = Path("data/hidden_states")
DRAFT = Path("models/draft")
PROVENANCE = "provenance.json"  # of a draft, in its folder: what it was made from


class Message(TypedDict):
    role: str  # system | user | assistant
    content: str


class Split(StrEnum):
    """Which side of the fence a question stands on. Held-out ones never reach training."""

    HELD_OUT = "held_out"
    TRAIN = "train"


class Rejected(Exception):
    """A row that goes no further; `reason`, of one of the closed lists here, says why."""

    def __init__(self, reason: StrEnum) -> None:
        super().__init__(reason.value)
        self.reason = reason


class PromptRejection(StrEnum):
    """Why a raw row is no question. `prompts` counts each."""

    NOT_JSON = "not_json"  # a line that does not parse
    NO_CONVERSATION = "no_conversation"  # absent, null or empty
    BAD_SHAPE = "bad_shape"  # a conversation that is no list of {role, content} objects
    UNKNOWN_ROLE = "unknown_role"
    NO_QUESTION = "no_question"  # no user turn
    STARTS_WITH_ASSISTANT = "starts_with_assistant"
    TOOLS = "tools"  # tool turns or a tools column: nothing here answers tool calls
    MULTIMODAL = "multimodal"  # content parts that are no text
    BLANK = "blank"  # a question of white space
    DUPLICATE = "duplicate"  # begins as an earlier row does


class Prompt(TypedDict):
    """One question as it will be sent, in data/prompts/prompts.jsonl (line number = index)."""

    index: int  # place in the order of sha256(seed, key)
    split: str
    key: str  # sha256 of messages
    sample_id: str
    source: str  # where the raw row says it comes from
    messages: list[Message]  # up to the first question
    later_turns: list[str]  # the user's further questions (prompts.turns: all)


def turn_id(prompt: Prompt, turn: int) -> str:
    """The sample id of the answer to a turn: `c7_gen0`, `c7_gen1`, …"""
    return f"{prompt['sample_id'].removesuffix('_gen0')}_gen{turn}"


class Status(StrEnum):
    """What became of a question. Decided from token ids first, text second."""

    OK = "ok"
    TRUNCATED_IN_REASONING = "truncated_in_reasoning"  # max_tokens came before the think-end
    TRUNCATED_IN_ANSWER = "truncated_in_answer"
    EMPTY_REASONING = "empty_reasoning"  # no think block, or white space in it
    EMPTY_ANSWER = "empty_answer"
    UNCLOSED_REASONING = "unclosed_reasoning"  # stopped by itself without a think-end
    PARSER_CONFLICT = "parser_conflict"  # ids, text and finish_reason contradict each other
    LOOPING = "looping"  # cut while repeating itself
    GARBAGE = "garbage"  # cut while repeating one token
    ABORTED = "aborted"  # a finish_reason that is neither stop nor length
    TOOL_CALL = "tool_call"
    THINKING_OFF_BY_USER = "thinking_off_by_user"  # the question itself says /no_think
    REJECTED_BY_SERVER = "rejected_by_server"  # HTTP 400: too long, mostly
    TIMED_OUT = "timed_out"  # transient: asked again whenever the stage runs
    FAILED = "failed"  # transient


STATUSES = frozenset(status.value for status in Status)
TRANSIENT = frozenset({Status.TIMED_OUT, Status.FAILED})
TRUNCATED = frozenset({Status.TRUNCATED_IN_REASONING, Status.TRUNCATED_IN_ANSWER})
TRAINABLE = TRUNCATED | {Status.OK}
# Nothing was paid for, or what came is of no use: never takes the place of an answer.
NO_ANSWER = TRANSIENT | {Status.REJECTED_BY_SERVER, Status.ABORTED}
# Cut by max_tokens, so a larger max_tokens may save them.
CUT = TRUNCATED | {Status.LOOPING, Status.GARBAGE}


class Trace(TypedDict):
    """One answered question, a line in data/traces/part-*.jsonl."""

    sample_id: str
    key: str  # sha256 of all that determines the answer; see pipeline.exchange.trace_key
    status: str
    source: str
    messages: list[Message]
    reasoning: NotRequired[str | None]  # as the server gave it: text, "", null, or absent
    content: NotRequired[str | None]
    unsplit: NotRequired[bool]  # no parser split them: both were one text in `content`
    other_fields: NotRequired[list[str]]  # further fields of the message that hold text
    tool_calls: NotRequired[list[Any]]
    imported: NotRequired[bool]  # `generate --import`: made elsewhere
    finish_reason: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    usage: dict[str, int]  # reasoning_tokens among them, where the server counts them
    sampling: dict[str, Any]  # as sent, max_tokens included
    max_model_len: int  # the context it was asked at
    attempts: int
    error: NotRequired[str]  # for rejected_by_server, timed_out and failed
    server_version: str


SHAPE_OF_A_TRACE: dict[str, type | tuple[type, ...]] = {
    "sample_id": str,
    "key": str,
    "status": str,
    "source": str,
    "messages": list,
    "finish_reason": (str, type(None)),
    "prompt_token_ids": list,
    "token_ids": list,
    "usage": dict,
    "sampling": dict,
}


def trace_problem(row: Any) -> str | None:
    """What is wrong with a row that should be a Trace; None if nothing is. For files that a person
    may have edited: what `generate` writes is right."""
    if not isinstance(row, dict):
        return "it is no object"
    for field, kinds in SHAPE_OF_A_TRACE.items():
        if not isinstance(row.get(field, ...), kinds):
            return f"{field} is {'missing' if field not in row else 'of another type'}"
    if row["status"] not in STATUSES:
        return f"no status {row['status']!r}"
    ids = {*map(type, row["prompt_token_ids"]), *map(type, row["token_ids"])}
    return None if ids <= {int} else "token ids that are no integers"


class SequenceRejection(StrEnum):
    """Why a trace is no training sequence, beside its status. `reassemble` counts each."""

    TRUNCATED = "truncated"  # reassemble.truncated: drop
    THINK_START = "think_start"  # not exactly one think-start
    THINK_END = "think_end"  # none where one must be, or one where none may be
    NO_ANSWER = "no_answer"
    END_OF_TURN = "end_of_turn"  # missing after stop, present after length, or not as the status
    CONTROL_TOKEN = "control_token"  # a control token inside the generated turn
    USAGE = "usage"  # token counts differ from what the server billed
    UNKNOWN_ID = "unknown_id"  # a token id that the verifier does not have
    NO_TOKEN_IDS = "no_token_ids"  # text alone is no exact sequence (reassemble.source: ids)
    TEXT_NOT_EXACT = "text_not_exact"  # the text spells a control token, or does not come back
    BOS = "bos"  # not as many BOS in the prompt as the chat template writes
    CONTROL_TEXT = "control_text"  # a control token that a user wrote (reassemble.on_control_text)
    OTHER_TEMPLATE = "other_template"  # no prompt that the verifier's chat template makes
    TOO_LONG = "too_long"  # reassemble.max_tokens: drop, or nothing to learn before the cut
    NOTHING_TO_LEARN = "nothing_to_learn"  # reassemble.train_on and reasoning leave no token


class Ablation(StrEnum):
    """What was taken out of a sequence on purpose, to see what it is worth."""

    NONE = "none"
    REASONING_DROPPED = "reasoning_dropped"  # the think block is gone
    REASONING_EMPTY = "reasoning_empty"  # its two tokens are left


# The columns of data/sequences/{train,held_out}. speculators reads the first three; spans are
# half-open token ranges [start, end) of input_ids.
SEQUENCE_COLUMNS = (
    "input_ids",  # prompt ids + generated ids, as the server gave them, less what params take out
    "loss_mask",  # 1 on the generated tokens that reassemble.train_on names, think-end and end
    "seq_len",
    "sample_id",
    "key",  # the trace's
    "prompt_index",
    "source",
    "status",
    "generated_start",  # first token that the verifier wrote
    "reasoning_start",  # first token after the think-start
    "reasoning_end",  # the think-end, or seq_len if cut before it
    "answer_start",  # first token after the think-end, or seq_len
    "answer_end",  # the end-of-turn token, or seq_len if cut before it
    "rebuilt",  # from text: these need not be the tokens that the verifier wrote
    "control_text",  # a user wrote control tokens into the question
    "cut_in",  # the phase that reassemble.max_tokens ended: none | reasoning | answer
    "ablation",  # see Ablation
)


def count_by(values: Iterable[StrEnum | str], kinds: type[StrEnum]) -> dict[str, int]:
    """How many of each kind, zeros included, so that two runs have the same names to compare."""
    counts = Counter(str(value) for value in values)
    return {kind.value: counts[kind.value] for kind in kinds}


def in_words(counts: Mapping[str, int]) -> str:
    """`{"blank": 6, "tools": 0}` → "6 blank"."""
    return ", ".join(f"{n} {kind}" for kind, n in counts.items() if n) or "none"
