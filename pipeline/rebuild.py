"""Token ids from text: the prompt as the chat template makes it, and an answer without ids.

    rebuilder = Rebuilder(tokenizer, verifier, params)
    prompt_ids, token_ids = rebuilder.rebuild(trace)

Only the prompt is rendered by the chat template, up to where the verifier went on. The turn itself
is put together by hand: think tokens and end-of-turn by their ids, text between them by the
tokenizer, white space next to them as the family writes it where the text came without. No
template ever renders a finished turn: many drop the reasoning or change its newlines.

What comes out need not be what was generated: a model may write "he" + "llo" where the tokenizer
makes "hello". `agreement` says how far the two are apart where both are known.
"""

from typing import Any, NamedTuple

from pipeline.errors import VerifierError
from pipeline.families import family_of, generation_prompt
from pipeline.params import Params
from pipeline.reasoning import is_prefilled
from pipeline.records import Message, Rejected, SequenceRejection, Status, Trace
from pipeline.verifier import VerifierIdentity

PLAIN_TEXT = "One question"
REPLACEMENT_CHARACTER = "\ufffd"  # what bytes that are no UTF-8 become in text


class TemplateMarkers(NamedTuple):
    """The think, end and control tokens that the chat template puts around messages."""

    all: list[int]
    behind: list[int]  # the last of them, behind the last message: nobody else can write there


class Tokens(NamedTuple):
    """The ids of a sequence in its two parts."""

    prompt_ids: list[int]
    token_ids: list[int]  # generated


class Rebuilder:
    """Makes ids of text with the verifier's own tokenizer and chat template."""

    def __init__(self, tokenizer: Any, verifier: VerifierIdentity, params: Params) -> None:
        self.tokenizer, self.verifier = tokenizer, verifier
        self._family = family_of(params.family)
        self._template_kwargs = params.generate.template_kwargs
        self._thinking = params.generate.thinking
        self._markers_by_roles: dict[tuple[str, ...], TemplateMarkers] = {}

    def rebuild(self, trace: Trace) -> Tokens:
        """The ids that `trace` would have by its text alone.

        Raises:
            Rejected: the text spells a think or control token, holds bytes that no text can, or
                comes out of the tokenizer as another text.
        """
        prompt_ids = self.prompt_ids(trace["messages"])
        return Tokens(prompt_ids, self._generated(trace, prompt_ids))

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """As vLLM does it: no special tokens beside those that the template itself writes.

        Raises:
            Rejected: the template refuses such messages.
        """
        return self._encode(self._rendered(messages))

    def template_markers(self, messages: list[Message]) -> TemplateMarkers:
        """Those around messages of these roles, whatever is said in them.

        Raises:
            Rejected: the template refuses such messages.
        """
        roles = tuple(message["role"] for message in messages)
        if roles not in self._markers_by_roles:
            plain: list[Message] = [{"role": role, "content": PLAIN_TEXT} for role in roles]
            text = self._rendered(plain)
            behind = text.rpartition(PLAIN_TEXT)[2]
            markers = self.verifier.markers
            self._markers_by_roles[roles] = TemplateMarkers(
                [token for token in self._encode(text) if token in markers],
                [token for token in self._encode(behind) if token in markers],
            )
        return self._markers_by_roles[roles]

    def _rendered(self, messages: list[Message]) -> str:
        try:
            return generation_prompt(self.tokenizer, messages, self._template_kwargs)
        except VerifierError as error:
            raise Rejected(SequenceRejection.OTHER_TEMPLATE) from error

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _generated(self, trace: Trace, prompt_ids: list[int]) -> list[int]:
        family, verifier = self._family, self.verifier
        reasoning, content = trace.get("reasoning") or "", trace.get("content") or ""
        ids: list[int] = []
        if self._thinking:
            is_closed = trace["status"] != Status.TRUNCATED_IN_REASONING
            if not is_closed:  # some parsers put a reasoning that was cut into `content`
                reasoning, content = reasoning or content, ""
            after_start = family.after_think_start
            if not is_prefilled(prompt_ids, verifier):
                ids = [*self._text(family.before_think_start), verifier.think_start_id]
            elif prompt_ids[-1] != verifier.think_start_id:
                after_start = ""  # the prompt goes on to the line's end
            before_end = family.before_think_end if is_closed else ""
            ids += self._text(with_edges(reasoning, after_start, before_end))
            if is_closed:
                ids.append(verifier.think_end_id)
                content = with_edges(content, family.after_think_end, "")
        ids += self._text(content)
        return [*ids, verifier.end_of_turn_id] if trace["finish_reason"] == "stop" else ids

    def _text(self, text: str) -> list[int]:
        ids = self._encode(text) if text else []
        if (
            REPLACEMENT_CHARACTER in text
            or not self.verifier.markers.isdisjoint(ids)
            or decoded(self.tokenizer, ids) != text  # some put it into Unicode's normal form first
        ):
            raise Rejected(SequenceRejection.TEXT_NOT_EXACT)
        return ids


def with_edges(text: str, before: str, after: str) -> str:
    """`text` with this white space at its ends, where it has none of its own: servers differ in
    whether they strip it."""
    if not text:  # cut right there
        return ""
    before = "" if text[:1].isspace() else before
    after = "" if text[-1:].isspace() else after
    return before + text + after


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of `ids`, markers and white space as they are."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
