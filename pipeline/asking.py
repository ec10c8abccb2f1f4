"""One run of `generate`: what is wanted, what is there, what is asked, and what comes in.

    asking = Asking(params, verifier, prompts, stored)
    asking.todo(asking.wanted())     → keys, by what the present params want and the disk has
    asking.ask(endpoints)            → each answer journaled, judged, and followed up

An answer can call for another request at once: a larger budget for one that was cut
(`generate.on_truncated`), or the next turn of its conversation (`prompts.turns`).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import BinaryIO

from pipeline import diagnosis
from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import BadRun, GateFailed, Refused, ServerStopped
from pipeline.exchange import Question, request_body, trace_key, trace_of
from pipeline.gate import Evidence, Gate, Tripped
from pipeline.live import Live
from pipeline.params import Params
from pipeline.progress import progress_bar
from pipeline.reasoning import Verdict, verdict_of
from pipeline.records import CUT, NO_ANSWER, TRANSIENT, TRUNCATED, Message, Prompt, Status, Trace
from pipeline.server import Endpoint
from pipeline.traces import FAILED_GATE, JOURNAL, Stored, append, forget, keep, read
from pipeline.verifier import VerifierIdentity

# A question over which so many servers died is not asked again by this run.
MAX_DEATHS = 2
CAUTION = 8  # what the concurrency is divided by for those over which one died

Questions = dict[str, Question]  # by key, in the order of the prompts and their turns


def budget_of(answer: Stored | None, params: Params) -> int | None:
    """The max_tokens to ask with; None when the answer is there for good.

    Asked again is what has no answer yet, and what more tokens or a longer context may save.
    """
    generate, context = params.generate, params.verifier.max_model_len
    if answer is None or answer.verdict.status in TRANSIENT:
        return generate.max_tokens
    has_grown = answer.max_model_len < context
    if answer.verdict.status is Status.REJECTED_BY_SERVER:
        return generate.max_tokens if has_grown else None
    room = context - answer.verdict.prompt_tokens
    largest = min(generate.largest_max_tokens, room)
    may_go_on = has_grown or answer.max_tokens < largest
    if (
        answer.verdict.status not in CUT
        or answer.verdict.generated_tokens >= largest
        or not may_go_on
    ):
        return None
    return min(generate.max_tokens, room) if answer.max_tokens < generate.max_tokens else largest


class Asking:
    """One run: what is wanted, what is there, and what comes in."""

    def __init__(
        self,
        params: Params,
        verifier: VerifierIdentity,
        prompts: list[Prompt],
        stored: dict[str, Stored],
    ) -> None:
        self.params, self.verifier, self.prompts = params, verifier, prompts
        self.stored = stored
        self.new: dict[str, Verdict] = {}  # the answers of this run
        self.sent: dict[str, int] = {}  # by key, the max_tokens of its last request
        # Asked again with more tokens: the hard ones, which say little about the run.
        self._cut_before = {k for k, answer in stored.items() if answer.verdict.status in CUT}
        # Asked again because no answer came: that none comes now says nothing about the server.
        self._in_vain = {k for k, a in stored.items() if a.verdict.status in NO_ANSWER}
        self.num_settled = 0  # questions with an answer that is not asked for again
        self._open: set[str] = set()  # in flight
        self._count = count()
        self._nth: dict[str, int] = {}  # by key, the place of its last request among all
        self._refused: set[str] = set()  # and nothing sent later was answered
        self._deaths: Counter[str] = Counter()  # by key, how often a server died over it
        self._gate = Gate(params.generate)

    @property
    def has_suspects(self) -> bool:
        """Whether a server died over questions."""
        return bool(self._deaths)

    def key_of(self, question: Question) -> str:
        return self._key(question.messages)

    @property
    def settings_key(self) -> str:
        """What all answers of a run have in common."""
        return self._key([])

    def _key(self, messages: list[Message]) -> str:
        generate = self.params.generate
        return trace_key(messages, generate.sampling, generate.template_kwargs, self.verifier)

    def turns(self, prompt: Prompt) -> Iterator[tuple[str, Question]]:
        """The questions of a conversation as far as it has come: up to the first without a good
        answer, since the next one is asked with all answers before it."""
        question: Question | None = Question.first(prompt)
        while question:
            key = self.key_of(question)
            yield key, question
            question = self._next_turn(key, question)

    def _next_turn(self, key: str, question: Question) -> Question | None:
        answer = self.stored.get(key)
        if not question.num_later or not answer or answer.verdict.status is not Status.OK:
            return None
        content = read(answer.place).get("content") or ""
        return question.next_turn(content) if content.strip() else None

    def wanted(self) -> Questions:
        return {key: question for prompt in self.prompts for key, question in self.turns(prompt)}

    def todo(self, wanted: Questions) -> list[str]:
        """What is to be asked now, and was not asked in vain by this run already."""
        in_vain = {key for key, verdict in self.new.items() if verdict.status in TRANSIENT}
        return [
            key
            for key in wanted
            if key not in in_vain and budget_of(self.stored.get(key), self.params)
        ]

    def ask(self, endpoints: list[Endpoint]) -> None:
        """Ask what is to do and journal each answer; the first ones are judged before the rest.

        Raises:
            GateFailed: too few answers hold reasoning. Those without it lie in
                data/.stash/failed_gate.jsonl and are asked again by the next run; the good ones
                stay.
            BadRun: the server answers nothing at all, or refuses everything from some point on.
                Its refusals are forgotten.
            ServerStopped: no server is left. A question over which one died twice has failed.
        """
        generate = self.params.generate
        num_samples = generate.gate.num_samples
        questions = self.wanted()
        todo = self.todo(questions)
        live = Live(sum(1 + questions[key].num_later for key in todo))
        go_on = asyncio.Event()
        if self._first_are_judged:
            go_on.set()
        with (
            JOURNAL.open("ab") as journal,
            progress_bar("asking the verifier", live.total, "questions") as bar,
        ):

            def on_answer(answer: Answer) -> Request | None:
                follow_up = self._take(answer, questions, journal, live)
                bar.total = live.total
                bar.advance(1, str(live))
                live.write("asking")
                if self.num_settled == num_samples:
                    self._check_answers_come()
                if self._first_are_judged:
                    go_on.set()
                return follow_up

            state = "stopped"
            try:
                for keys, concurrency in self._passes(todo):
                    run(
                        ask_all(
                            (self._request(key, questions[key], live) for key in keys),
                            endpoints,
                            concurrency,
                            generate.timeout_s,
                            on_answer,
                            stall_s=generate.stall_s,
                            num_first=num_samples - self.num_settled,
                            go_on=go_on,
                        )
                    )
                if self.num_settled >= min(num_samples, len(questions)):
                    self._check_answers_come()
                self._gate.check(self.stored[key].verdict for key in questions)
                state = "done"
            except Tripped as tripped:
                self._fail(tripped.evidence, endpoints[0], questions)
            except Refused:
                forget(lambda trace: trace["key"] in self._refused and _has_no_answer(trace))
                raise
            except ServerStopped:
                self._blame(endpoints[0], questions, journal)
                raise
            finally:
                live.write(state)

    @property
    def _first_are_judged(self) -> bool:
        """Whether the verdict on the first answers is certain."""
        all_came = self.num_settled >= self.params.generate.gate.num_samples
        return all_came or self._gate.has_passed_first

    def _passes(self, todo: list[str]) -> list[tuple[list[str], int]]:
        """Keys and the concurrency to ask them at. What was in flight when a server died comes
        last and in small numbers, for one of these may have killed it."""
        concurrency = self.params.generate.concurrency
        suspects = [key for key in todo if self._deaths[key]]
        rest = [key for key in todo if not self._deaths[key]]
        few = max(1, concurrency // CAUTION)
        return [(keys, n) for keys, n in ((rest, concurrency), (suspects, few)) if keys]

    def _blame(self, endpoint: Endpoint, questions: Questions, journal: BinaryIO) -> None:
        """A server died: what was in flight is asked once more, and has then failed."""
        self._deaths.update(self._open)
        error = "in flight when the server died, twice"
        for key in [key for key in self._open if self._deaths[key] == MAX_DEATHS]:
            answer = Answer(key, None, error, "failed", MAX_DEATHS, endpoint, self.sent[key])
            self._store(answer, questions[key], journal)
            self.num_settled += 1
        self._open.clear()

    def check_all(self, wanted: Questions) -> None:
        """Judge all that is there, asked now or earlier. Raises GateFailed."""
        try:
            self._gate.check(self.stored[key].verdict for key in wanted)
        except Tripped as tripped:
            self._fail(tripped.evidence, None, wanted)

    def _request(self, key: str, question: Question, live: Live) -> Request:
        budget = budget_of(self.stored.get(key), self.params)
        assert budget is not None
        live.sent += 1
        self.sent[key] = budget
        self._open.add(key)
        self._nth[key] = next(self._count)
        return Request(key, request_body(question.messages, self.params.generate, budget))

    def _take(
        self, answer: Answer, questions: Questions, journal: BinaryIO, live: Live
    ) -> Request | None:
        """Store and judge an answer; returns what to ask at once because of it."""
        key, question = answer.key, questions[answer.key]
        trace, verdict = self._store(answer, question, journal)
        self._open.discard(key)
        live.add(verdict)
        if verdict.status is Status.REJECTED_BY_SERVER:
            self._refused.add(key)
        elif verdict.status not in NO_ANSWER:
            self._refused = {k for k in self._refused if self._nth[k] > self._nth[key]}
        more = budget_of(self.stored[key], self.params) if verdict.status in CUT else None
        if more and more > self.sent[key]:  # else a server that gives less than is asked for
            live.total += 1  # not judged: what counts is the answer to the second try
            return self._request(key, question, live)
        self.num_settled += 1
        if key not in self._cut_before:
            self._gate.add(trace, verdict)
        later = self._later_question(key, question)
        if later is None:
            live.total -= question.num_later
            return None
        questions[later[0]] = later[1]
        return self._request(*later, live)

    def _store(
        self, answer: Answer, question: Question, journal: BinaryIO
    ) -> tuple[Trace, Verdict]:
        trace = trace_of(answer, question, self.params, self.verifier)
        verdict = verdict_of(trace, self.verifier, self.params)
        keep(answer.key, Stored.of(trace, verdict, append(journal, trace)), self.stored)
        self.new[answer.key] = verdict
        return trace, verdict

    def _later_question(self, key: str, question: Question) -> tuple[str, Question] | None:
        """The next turn of the conversation that is not answered yet."""
        following = self._next_turn(key, question)
        while following:
            key = self.key_of(following)
            if budget_of(self.stored.get(key), self.params):
                return key, following
            following = self._next_turn(key, following)
        return None

    def _check_answers_come(self) -> None:
        """A server that answers nothing is the wrong server, or served wrongly.

        Raises:
            BadRun: with the server's own words; its refusals are forgotten.
        """
        fresh = [verdict for key, verdict in self.new.items() if key not in self._in_vain]
        if fresh and all(verdict.status in NO_ANSWER for verdict in fresh):
            forget(lambda trace: trace["key"] in self.new and _has_no_answer(trace))
            last = self.stored[next(reversed(self.new))]
            raise BadRun(
                f"the server answers none of the first {len(self.new)} questions: "
                f"{last.error or last.finish_reason}"
            )

    def _fail(self, evidence: Evidence, endpoint: Endpoint | None, questions: Questions) -> None:
        """Raises GateFailed with the diagnosis, after setting aside what asking again may mend."""
        bad = {
            key
            for key, verdict in self.new.items()
            if verdict.cause and verdict.status not in TRUNCATED
        }
        if bad:
            forget(
                lambda trace: trace["key"] in bad and trace["status"] not in TRUNCATED,
                keep_in=FAILED_GATE,
            )
        elif not evidence.examples:
            wanted = [self.stored[key] for key in questions if key in self.stored]
            answers = [a for a in wanted if a.verdict.cause is evidence.main_cause]
            evidence.examples.extend(read(answer.place) for answer in answers[:2])
        # What is tried on the server is a question that failed.
        failed = [trace["key"] for trace in evidence.examples if trace["key"] in questions]
        question = questions[failed[-1] if failed else next(iter(questions))]
        message = diagnosis.of_run(evidence, endpoint, question, self.params, self.verifier)
        raise GateFailed(message) from None


def _has_no_answer(trace: Trace) -> bool:
    return trace["status"] in NO_ANSWER
