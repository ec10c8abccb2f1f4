"""Rows in the terminal: the one that was asked for, exactly its tokens, and nothing that a terminal
would obey."""

import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline import inspect
from pipeline.assembly import TRAINABLE
from pipeline.display import MEANINGS
from pipeline.records import SequenceRejection, Status
from pipeline.resume import jsonl, one_writer
from tests.conftest import ROOT
from tests.fake_server import END, THINK, THINK_END, ids
from tests.fake_tokenizer import SPECIAL, TEMPLATE

PART, JOURNAL = Path("data/traces/part-00000.jsonl"), Path("data/traces/journal.jsonl")
Q2 = """\
Q2_gen0 · train · source test · ok · finish_reason stop · asked for at most 512 tokens
31 tokens: 5 prompt, 13 reasoning, 10 answer · 26 learnt
[prompt]
<|user|>Q2<|end|><|assistant|>
[reasoning]
<think>
I recall Q2
</think>
[answer]


It is 2Q
[end]
<|end|>

"""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def _no_colours(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def colours(monkeypatch):
    """As in a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("rich.console.Console.status", lambda *_: nullcontext())


@pytest.fixture
def answer(trace_of):
    """`answer("Q2", …)`: a stored answer with the key that goes with the question."""

    def make(question="Q2", *args, **changes):
        return trace_of(question, *args, **({"key": f"key of {question}"} | changes))

    return make


@pytest.fixture
def stored(project, answer):
    """The answers to six questions, two of them rejected."""
    store(
        answer("Q1"),
        answer("Q2"),
        answer("Q3", status="looping", finish="length"),
        answer("Q4", usage={"prompt_tokens": 5, "completion_tokens": 7}),
        answer("Q5"),
        answer("Q6"),
    )
    return project


def store(*traces: dict, path: Path = PART) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(jsonl(traces))


@pytest.fixture
def shown(project, capsys):
    """`shown("Q2", "--ids")`: what the command prints."""

    def run(*argv: str) -> str:
        inspect.main(list(argv))
        return capsys.readouterr().out

    return run


def titles(output: str) -> list[str]:
    return re.findall(r"^(\S+_gen\d+) · ", output, re.M)


def refusal(*argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        inspect.main(list(argv))
    assert isinstance(caught.value.code, str)  # on stderr, with exit code 1
    assert "\n" not in caught.value.code
    return caught.value.code


# which rows


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("wanted", ["Q2_gen0", "Q2", "key of Q2"])
def test_a_row_is_found_by_its_id_its_beginning_or_its_key(shown, wanted):
    assert shown(wanted) == Q2


@pytest.mark.usefixtures("stored")
def test_several_ids_are_shown_in_the_order_given(shown):
    assert titles(shown("Q5", "Q1", "Q2")) == ["Q5_gen0", "Q1_gen0", "Q2_gen0"]


def test_a_whole_id_is_no_beginning_of_another(shown, answer):
    store(answer("Q2", sample_id="c_gen1"), answer("Q3", sample_id="c_gen10"))
    assert titles(shown("c_gen1")) == ["c_gen1"]


@pytest.mark.usefixtures("stored")
def test_an_id_of_none_or_of_several_is_refused():
    unknown = "inspect: none of 6 rows has an id or key that begins with 'Z'"
    assert refusal("Q1", "Z") == unknown
    several = "inspect: 6 rows begin with 'Q': 'Q1_gen0', 'Q2_gen0', 'Q3_gen0' …"
    assert refusal("Q") == several


@pytest.mark.usefixtures("stored")
def test_without_an_id_rows_come_at_random(shown):
    seen = {titles(shown())[0] for _ in range(12)}
    assert len(seen) > 1  # by chance they are the same once in 6 ** 11 times
    three = titles(shown("-n", "3"))
    assert len(three) == len(set(three)) == 3


@pytest.mark.usefixtures("stored")
def test_fewer_rows_than_asked_for_are_counted(shown):
    output = shown("-n", "9")
    assert sorted(titles(output)) == [f"Q{n}_gen0" for n in range(1, 7)]
    assert output.endswith("\n6 found among 6 rows\n")


@pytest.mark.usefixtures("stored")
def test_rejected_rows_alone(shown):
    output = shown("--rejected", "-n", "9")
    assert sorted(titles(output)) == ["Q3_gen0", "Q4_gen0"]
    assert "rejected, looping: cut while it repeated itself\n" in output
    assert "· billed as 5 prompt_tokens, 7 completion_tokens\nrejected, usage: " in output


@pytest.mark.usefixtures("stored")
def test_rows_rejected_for_one_reason(shown):
    assert titles(shown("--reason", "usage", "-n", "9")) == ["Q4_gen0"]
    assert titles(shown("--reason", "looping", "-n", "9")) == ["Q3_gen0"]
    assert shown("--reason", "bos") == "0 found among 6 rows\n"


@pytest.mark.usefixtures("stored")
def test_a_reason_that_is_none_is_refused_with_those_there_are():
    words = refusal("--reason", "ok")
    assert words.startswith("inspect: --reason 'ok' is none of truncated, think_start, ")
    assert words.endswith(", timed_out, failed")


def test_the_present_params_decide(stored, shown, answer):
    cut = [THINK, *ids("abc"), THINK_END, *ids("x")]
    store(answer("Q2", cut, "length", status="truncated_in_answer"))
    assert "rejected" not in shown("Q2")
    stored.set(**{"reassemble.truncated": "drop"})
    assert "rejected, truncated: cut by max_tokens" in shown("Q2")


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("argv", [("-n", "0"), ("Q2", "--rejected"), ("Q2", "--reason", "usage")])
def test_what_makes_no_sense_is_refused(argv):
    assert refusal(*argv).startswith("inspect: ")


def test_every_reason_has_a_meaning():
    assert set(MEANINGS) == {*SequenceRejection, *Status} - TRAINABLE


# where they lie


def test_the_journal_is_read_while_generate_writes(stored, shown, answer):
    newer = answer("Q2", [THINK, *ids("new"), THINK_END, *ids("yes"), END])
    JOURNAL.write_bytes(jsonl([answer("Q7"), newer]) + b'{"sample_id":"Q8_gen0","key":"ke')
    before = stored.bytes("**/*")
    with one_writer(Path("data/traces")):
        assert "\n<think>new</think>\n" in shown("Q2")
        assert titles(shown("Q7")) == ["Q7_gen0"]
        assert len(titles(shown("-n", "9"))) == 7
    assert stored.bytes("**/*") == before | stored.bytes("data/.traces.lock")


@pytest.mark.usefixtures("project")
def test_the_journal_alone_is_enough(shown, answer):
    store(answer("Q2"), path=JOURNAL)
    assert shown() == Q2


@pytest.mark.usefixtures("stored")
def test_a_failure_never_hides_an_answer(shown, answer):
    failed = {"status": "failed", "token_ids": [], "prompt_token_ids": [], "finish_reason": None}
    rows = [answer("Q2") | failed, answer("Q7") | failed, answer("Q7")]
    store(*rows, path=JOURNAL)
    assert shown("Q2") == Q2
    assert "· ok ·" in shown("Q7")


@pytest.mark.usefixtures("stored")
def test_an_answer_under_other_params_gives_way_to_the_new_one(shown, answer):
    store(answer("Q2", [THINK, *ids("new"), THINK_END, *ids("yes"), END], key="!"), path=JOURNAL)
    assert "\n<think>new</think>\n" in shown("Q2")
    assert len(titles(shown("-n", "9"))) == 6
    store(answer("Q2", key="!"), answer("Q2", [THINK, *ids("back"), *ids("!")]), path=JOURNAL)
    assert "\n<think>back!\n" in shown("Q2")  # to the params before


@pytest.mark.usefixtures("stored")
def test_without_its_prompt_a_row_is_of_no_known_split(shown):
    Path("data/prompts/prompts.jsonl").unlink()
    assert shown("Q2") == Q2.replace(" · train", "")


@pytest.mark.usefixtures("stored")
def test_a_later_turn_is_of_the_split_of_its_conversation(shown, answer):
    store(answer("Q1"), answer("Q2", sample_id="Q1_gen1"))
    assert "Q1_gen1 · held_out · source test" in shown("Q1_gen1")


@pytest.mark.usefixtures("project")
def test_without_answers_there_is_nothing_to_show():
    assert refusal() == "inspect: data/traces holds no answers; `dvc repro generate` makes them"


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"{", "it is no object"),
        (b"[]", "it is no object"),
        (b'{"sample_id": "x"}', "key is missing"),
    ],
)
def test_a_broken_line_is_named_with_its_file(line, what):
    PART.write_bytes(line + b"\n" + PART.read_bytes())
    assert refusal() == f"inspect: {PART} holds a line that is no trace: {what}"


@pytest.mark.usefixtures("stored")
def test_a_missing_verifier_is_said_in_one_line():
    Path("data/verifier.json").unlink()
    assert (
        refusal() == "inspect: data/verifier.json: No such file or directory; `dvc repro` makes it"
    )


# what is said of them


def test_a_row_is_shown_by_the_ids_that_it_is_judged_by(project, answer, shown):
    """Here those of its text, which are one fewer than the server billed."""
    project.set(**{"reassemble.source": "text"})
    store(answer("Q2", content="\n\nIt is 2"))
    said = shown("Q2")
    assert "rejected, usage" in said
    assert "[answer]\n\n\nIt is 2\n" in said


def test_without_the_answers_ids_its_text_is_shown(project, answer, shown):
    store(answer("Q2", [], reasoning="so", content="It is 2Q"))
    assert "[reasoning]\nso\n[answer]\nIt is 2Q\n" in shown("Q2")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"reassemble.max_tokens": 10}, "10 tokens: 5 prompt, 4 reasoning · 5 learnt · cut in rea"),
        ({"reassemble.max_tokens": 22}, "2 answer · 17 learnt · cut in answer\n"),
        ({"reassemble.reasoning": "empty"}, "10 answer · 13 learnt · ablation reasoning_empty\n"),
        ({"reassemble.reasoning": "drop"}, "10 answer · 11 learnt · ablation reasoning_dropped\n"),
        ({"reassemble.source": "text"}, "10 answer · 26 learnt · rebuilt from text\n"),
    ],
)
def test_what_was_done_to_a_sequence_is_said(stored, shown, params, said):
    stored.set(**params)
    assert said in shown("Q2")


def test_control_text_of_a_user_is_said(stored, shown, answer):
    prompt = [SPECIAL["<|user|>"], *ids("Q"), THINK, END, SPECIAL["<|assistant|>"]]
    store(answer("Q<think>", prompt=prompt))
    assert "rejected, control_text: a user wrote a control token" in shown()
    stored.set(**{"reassemble.on_control_text": "keep"})
    output = shown()
    assert "learnt · control text in the question\n" in output
    assert "[prompt]\n<|user|>Q<think><|end|><|assistant|>\n[reasoning]\n" in output


@pytest.mark.usefixtures("stored")
def test_a_refusal_shows_what_was_asked_and_what_the_server_said(shown, answer):
    error = {"status": "rejected_by_server", "error": "too\nlong\x1b[2J", "usage": {}}
    nothing = {"prompt_token_ids": [], "token_ids": [], "reasoning": None, "content": None}
    store(answer("Q2", None, None, **error) | nothing)
    assert shown() == (
        "Q2_gen0 · train · source test · rejected_by_server · finish_reason None · "
        "asked for at most 512 tokens\n"
        "error: too↵long<U+001B>[2J\n"
        "no token ids, text alone\n"
        "rejected, rejected_by_server: the server refused the question, mostly as too long\n"
        "[prompt]\nuser: Q2\n\n\n"
    )


def test_an_answer_without_ids_is_shown_as_text_or_rebuilt(stored, shown, answer):
    store(answer("Q2") | {"prompt_token_ids": [], "token_ids": []})
    output = shown()
    assert "rejected, no_token_ids: " in output
    assert (
        "\n[prompt]\nuser: Q2\n\n[reasoning]\n\nI recall Q2\n\n[answer]\n\n\nIt is 2Q\n" in output
    )
    stored.set(**{"reassemble.source": "ids_else_text"})
    assert shown() == Q2.replace("26 learnt", "26 learnt · rebuilt from text")


@pytest.mark.usefixtures("stored")
def test_where_text_and_ids_part_is_shown(shown):
    differs = {
        "sample_id": "Q2_gen0",
        "kind": "retokenized",
        "position": 7,
        "generated": [END, THINK, 10, 104, 105],
        "rebuilt": [END, THINK, 104, 105],
    }
    other = {"sample_id": "Q5_gen0", "kind": "other", "reason": "text_not_exact"}
    gone = {"sample_id": "Q9_gen0", "kind": "other", "reason": "text_not_exact"}
    assert refusal("--differs").startswith("inspect: data/sequences/disagreements.jsonl: No such")
    store(differs, other, gone, path=Path("data/sequences/disagreements.jsonl"))
    output = shown("--differs", "-n", "9")
    assert sorted(titles(output)) == ["Q2_gen0", "Q5_gen0"]
    assert "its text does not give its ids back, other: text_not_exact\n[prompt]" in output
    assert (
        "its text does not give its ids back, retokenized: from token 7 on\n"
        "generated ⟨202⟩<|end|>⟨200⟩<think>⟨10⟩↵⟨104⟩h⟨105⟩i\n"
        "rebuilt   ⟨202⟩<|end|>⟨200⟩<think>⟨104⟩h⟨105⟩i\n"
        "[prompt]\n"
    ) in output
    assert shown("--differs", "--rejected") == "0 found among 6 rows\n"
    assert "retokenized" in shown("Q2")


# how they look


def test_tokens_that_are_not_learnt_stand_in_brackets(stored, shown):
    stored.set(**{"reassemble.train_on": "answer"})
    output = shown("Q2")
    assert "[reasoning]\n⟦<think>\nI recall Q2\n⟧</think>\n[answer]\n\n\nIt is 2Q\n" in output
    assert "10 answer · 12 learnt\n" in output
    stored.set(**{"reassemble.train_on": "reasoning"})
    assert "\n</think>\n[answer]\n⟦\n\nIt is 2Q⟧\n[end]\n<|end|>\n" in shown("Q2")


@pytest.mark.usefixtures("stored")
def test_ids_stand_before_their_tokens(shown):
    output = shown("Q2", "--ids")
    assert "[prompt]\n⟨203⟩<|user|>⟨81⟩Q⟨50⟩2⟨202⟩<|end|>⟨204⟩<|assistant|>\n" in output
    assert "[end]\n⟨202⟩<|end|>\n" in output
    assert re.sub(r"⟨\d+⟩", "", output) == Q2


@pytest.mark.usefixtures("stored", "colours")
def test_in_a_terminal_colours_tell_the_phases_and_the_text_is_whole(shown):
    output = shown("Q2")
    text = "<|user|>Q2<|end|><|assistant|><think>\nI recall Q2\n</think>\n\nIt is 2Q<|end|>"
    assert COLOUR.sub("", output) == "".join([*Q2.splitlines(True)[:2], text, "\n\n"])
    dim, reasoning, answer = "\x1b[2mQ2\x1b[0m", "\x1b[36m\nI recall", "\x1b[32m\n\nIt is"
    assert dim in output
    assert reasoning in output
    assert answer in output
    for token in ("<think>", "</think>", "<|user|>", "<|end|>"):
        assert f"\x1b[1;93m{token}" in output


@pytest.mark.usefixtures("colours")
def test_in_a_terminal_what_is_not_learnt_is_struck_out(stored, shown):
    stored.set(**{"reassemble.train_on": "answer"})
    output = shown("Q2")
    assert "\x1b[9;36m\nI recall" in output
    assert "\x1b[1;93m</think>" in output
    assert "⟦" not in output


@pytest.mark.usefixtures("stored", "colours")
def test_a_terminal_without_colours_gets_labels(shown, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown("Q2") == Q2


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}])
def test_nothing_that_a_terminal_would_obey_gets_through(shown, answer, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    attack = "\x1b]0;owned\x07\x1b[2J\r\x08\x7f\x00[bold]red[/bold] :smile:\ttab"
    names = {"sample_id": "\x1b[31m\u202ex\x9b_gen0", "source": "a\nb\u2028"}
    store(answer("Q2", [THINK, *ids(attack), THINK_END, *ids(attack), END], **names))
    for argv in ((), ("--ids",)):
        output = COLOUR.sub("", shown(*argv)) if environment else shown(*argv)
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", output)
    seen = "<U+001B>]0;owned<U+0007><U+001B>[2J<U+000D><U+0008><U+007F><U+0000>[bold]red[/bold]"
    assert f"{seen} :smile:\ttab" in shown()
    assert "<U+001B>[31m<U+202E>x<U+009B>_gen0 · source a↵b<U+2028> · ok" in shown()


def test_text_without_ids_is_as_harmless(stored, shown, answer):
    nothing = {"prompt_token_ids": [], "token_ids": [], "content": "a\u202e\x9bb\u200dc\u3000😀"}
    store(answer("Q2") | nothing)
    assert "[answer]\na<U+202E><U+009B>b\u200dc\u3000😀\n" in shown()


# characters of several tokens

BYTE = 300  # the id of byte 0


@pytest.fixture
def bytewise(stored):
    """A verifier whose tokens are bytes."""
    alphabet = bytes_to_letters()
    vocabulary = {letter: BYTE + byte for byte, letter in alphabet.items()} | SPECIAL
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained("models/verifier")
    return fast


def bytes_to_letters() -> dict[int, str]:
    """The letter that byte-level BPE has for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def as_bytes(text: str) -> list[int]:
    return [BYTE + byte for byte in text.encode()]


def test_characters_of_several_tokens_stay_whole(bytewise, shown, answer):
    generated = [THINK, *as_bytes("né 你好\n"), THINK_END, *as_bytes("😀 ok\u200d"), END]
    prompt = [SPECIAL["<|user|>"], *as_bytes("¿?"), END, SPECIAL["<|assistant|>"]]
    store(answer("Q2", generated, prompt=prompt))
    output = shown()
    assert "[reasoning]\n<think>né 你好\n</think>\n[answer]\n😀 ok\u200d\n[end]\n" in output
    assert "\ufffd" not in output
    with_ids = shown("--ids")
    assert "⟨495 469⟩é⟨332⟩ ⟨528 489 460⟩你⟨529 465 489⟩好⟨310⟩\n" in with_ids
    assert "[answer]\n⟨540 459 452 428⟩😀⟨332⟩ ⟨411⟩o⟨407⟩k" in with_ids
    assert re.sub(r"⟨[\d ]+⟩", "", with_ids) == output


def test_half_a_character_of_the_models_own_is_seen(bytewise, shown, answer):
    half = as_bytes("😀")[:2]
    store(answer("Q2", [THINK, *half, THINK_END, *as_bytes("é"), END]))
    assert "[reasoning]\n<think>\ufffd</think>\n[answer]\né\n" in shown()
    assert "<think>⟨540 459⟩\ufffd⟨201⟩</think>" in shown("--ids")


# as a command


def command(*argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.inspect", *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("stored")
def test_in_a_pipe_it_is_plain_text(answer):
    long_line = "word " * 60
    store(answer("Q2"), answer("Q3", [THINK, *ids("a"), THINK_END, *ids(long_line), END]))
    with command("Q2", "Q3") as process:
        output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert output.startswith(Q2)
    assert f"[answer]\n{long_line}\n[end]\n" in output
    assert "\x1b" not in output


@pytest.mark.usefixtures("stored")
def test_a_reader_that_has_enough_ends_it_in_silence(answer):
    store(*(answer(f"Q{n}") for n in range(2000)))
    with command("-n", "2000") as process:
        assert process.stdout.readline().endswith("asked for at most 512 tokens\n")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == -signal.SIGPIPE  # as `yes | head -1`


@pytest.mark.usefixtures("stored")
def test_an_error_is_one_line_and_exit_code_1():
    with command("Z") as process:
        output, errors = process.communicate()
    assert (process.returncode, output) == (1, "")
    assert errors == "inspect: none of 6 rows has an id or key that begins with 'Z'\n"


@pytest.mark.usefixtures("stored")
def test_progress_is_no_part_of_what_is_shown(capsys, monkeypatch):
    monkeypatch.setattr("pipeline.progress.SECONDS_WORTH_A_LINE", 0)
    inspect.main(["--reason", "bos"])
    output, errors = capsys.readouterr()
    assert output == "0 found among 6 rows\n"
    assert errors.startswith("reading answers: ")
    assert "\nlooking for rows: " in errors
