"""An answer's token ids from its text, with tokenizers of real families.

Ids are written by hand from public vocabularies, and whole turns are compared with what the package
`renderers` makes of them. Numbers like B10 are the cases of that name (reassembly) that this
project collected.
"""

import unicodedata
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.agreement import Agreement, agreement
from pipeline.assembly import Assembler
from pipeline.families import FAMILIES
from pipeline.reasoning import spans_of
from pipeline.rebuild import Rebuilder, Tokens
from pipeline.records import Rejected, SequenceRejection
from pipeline.twins.layouts import KIMI_SYSTEM
from tests.real_tokenizers import (
    DEMO,
    FAMILY_OF,
    MADE,
    OWN_CODE,
    TEMPLATES,
    THINK_IDS,
    loaded,
    params_of,
    renderer_of,
    saying,
    verifier_of,
)

pytestmark = pytest.mark.timeout(180)  # the vocabularies take some seconds
NAMES = [*TEMPLATES, DEMO]
CUT, CUT_LATE = "truncated_in_reasoning", "truncated_in_answer"
# White space that a model writes after the think-start (if the prompt does not), before the
# think-end, after it.
EDGES = {
    "deepseek_v4": ("", "", ""),
    "qwen3": ("\n", "\n", "\n\n"),
    "qwen3_thinking": ("", "\n", "\n\n"),
    "qwen3_5": ("", "\n", "\n\n"),
    "kimi_k2_5": ("", "", ""),
    OWN_CODE: ("", "", ""),
    DEMO: ("\n", "\n", "\n\n"),
}
END = {
    "deepseek_v4": 1,
    "qwen3": 151645,
    "qwen3_thinking": 151645,
    "qwen3_5": 248046,
    "kimi_k2_5": 163586,
    OWN_CODE: 163586,
    DEMO: 1021,
}


@cache
def rebuilder(name: str, **changes: Any) -> Rebuilder:
    return Rebuilder(loaded(name), verifier_of(name), params_of(name, **changes))


def question(text: str = "Q1") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def answer(reasoning: str | None, content: str | None, **changes: Any) -> dict[str, Any]:
    """A stored answer without ids."""
    trace = {
        "sample_id": "c7_gen0",
        "key": "k",
        "status": "ok",
        "source": "test",
        "messages": question(),
        "reasoning": reasoning,
        "content": content,
        "finish_reason": "stop",
        "prompt_token_ids": [],
        "token_ids": [],
        "usage": {},
    }
    return trace | changes


def rejection(name: str, trace: dict[str, Any]) -> str:
    with pytest.raises(Rejected) as caught:
        rebuilder(name).rebuild(trace)
    return str(caught.value)


def decoded(name: str, ids: list[int]) -> str:
    return str(loaded(name).decode(ids, skip_special_tokens=False))


def encoded(name: str, text: str) -> list[int]:
    return list(loaded(name).encode(text, add_special_tokens=False))


# text → ids → text


# Any text, and pieces that meet at tokens' and markers' edges.
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"))
PIECES = st.lists(
    st.sampled_from(
        [
            *("\n", "\n\n", " ", "  ", "\t", "\r\n", "\u3000", "\x00", "\x1c"),
            *("<", ">", "/", "|", "｜", "think", "<|im_", "end", "im_end|>", "[BOS", "]"),
            *("hello", "he", "llo", " the", "12345", "é", "e\u0301", "한", "你好", "🙂", "\u200d"),
        ]
    )
).map("".join)
TEXT = ANY_TEXT | PIECES
WORDS = st.sampled_from(["hello", "你好", "(", "7", "🙂", "."])


def check_text_comes_back(name: str, reasoning: str, content: str) -> None:
    if "qwen" in name:  # its tokenizer would change any other form
        reasoning, content = (unicodedata.normalize("NFC", text) for text in (reasoning, content))
    tokens_of_markers = [token.content for token in loaded(name).added_tokens_decoder.values()]
    assume(not any(marker in text for marker in tokens_of_markers for text in (reasoning, content)))
    start_id, end_id = THINK_IDS[name]
    tokens = rebuilder(name).rebuild(answer(reasoning, content))
    ids = [*tokens.prompt_ids, *tokens.token_ids]
    spans = spans_of(*tokens, verifier_of(name))
    after_start, before_end, after_end = EDGES[name]
    after_start = "" if not reasoning or reasoning[0].isspace() else after_start
    before_end = "" if not reasoning or reasoning[-1].isspace() else before_end
    after_end = "" if not content or content[0].isspace() else after_end
    assert decoded(name, ids[slice(*spans.reasoning)]) == after_start + reasoning + before_end
    assert decoded(name, ids[slice(*spans.answer)]) == after_end + content
    assert ids[spans.reasoning[1]] == end_id
    assert ids.count(end_id) == ids.count(start_id) == spans.num_starts == 1
    assert ids[spans.answer[1] :] == [END[name]]
    assert spans.ends_turn


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=300)
@given(reasoning=TEXT, content=TEXT)
def test_reasoning_and_answer_come_back_byte_for_byte(name, reasoning, content):
    check_text_comes_back(name, reasoning, content)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=300)
@given(inner=st.tuples(TEXT, TEXT), words=st.tuples(WORDS, WORDS, WORDS, WORDS))
def test_so_do_texts_that_a_server_stripped(name, inner, words):
    reasoning = words[0] + inner[0] + words[1]
    check_text_comes_back(name, reasoning, words[2] + inner[1] + words[3])


@pytest.mark.parametrize("name", NAMES)
def test_a_text_whose_form_the_tokenizer_changes_is_rejected(name):
    """Qwen's makes one character of e and its accent, which would be another text."""
    for trace in (answer("R", "cafe\u0301"), answer("cafe\u0301", "A")):
        if "qwen" in name:
            assert rejection(name, trace) == "text_not_exact"
        else:
            assert "cafe\u0301" in decoded(name, rebuilder(name).rebuild(trace).token_ids)


# a turn, by hand

KIMI_PROMPT = [
    *(163594, *b"system", 163601, *KIMI_SYSTEM.encode(), 163586),
    *(163587, *b"user", 163601, 81, 49, 163586),
    *(163588, *b"assistant", 163601),
]
QWEN3_PROMPT = [151644, 872, 198, 48, 16, 151645, 198, 151644, 77091, 198]
ASKED = {  # Q1, up to the think block
    "deepseek_v4": [0, 128803, 51, 19, 128804],
    "qwen3": QWEN3_PROMPT,
    "qwen3_thinking": QWEN3_PROMPT,
    "qwen3_5": [248045, 846, 198, 48, 16, 248046, 198, 248045, 74455, 198],
    "kimi_k2_5": KIMI_PROMPT,
    OWN_CODE: KIMI_PROMPT,
    DEMO: [1020, 305, 198, 48, 16, 1021, 198, 1020, 303, 198],
}
OPENED = {  # what the prompt has of the think block
    "deepseek_v4": [128821],
    "qwen3": [],
    "qwen3_thinking": [151667, 198],
    "qwen3_5": [248068, 198],
    "kimi_k2_5": [163606],
    OWN_CODE: [163606],
    DEMO: [],
}
OFF = {  # and with thinking off
    "deepseek_v4": [128822],
    "qwen3": [151667, 271, 151668, 271],
    "qwen3_5": [248068, 271, 248069, 271],
    "kimi_k2_5": [163606, 163607],
    OWN_CODE: [163606, 163607],
    DEMO: [1022, 302, 1023, 302],
}
PROMPT = {name: [*ASKED[name], *OPENED[name]] for name in NAMES}
TURN = {  # R1 and A1, which a server gave without white space around them
    "deepseek_v4": [52, 19, 128822, 35, 19, 1],
    "qwen3": [151667, 198, 49, 16, 198, 151668, 271, 32, 16, 151645],
    "qwen3_thinking": [49, 16, 198, 151668, 271, 32, 16, 151645],
    "qwen3_5": [49, 16, 198, 248069, 271, 32, 16, 248046],
    "kimi_k2_5": [82, 49, 163607, 65, 49, 163586],
    OWN_CODE: [82, 49, 163607, 65, 49, 163586],
    DEMO: [1022, 198, 49, 16, 198, 1023, 302, 32, 16, 1021],
}
AS_WRITTEN = {  # "\nR1\n\n" and "\n\nA1\n"
    "deepseek_v4": [201, 52, 19, 271, 128822, 271, 35, 19, 201, 1],
    "qwen3": [151667, 198, 49, 16, 271, 151668, 271, 32, 16, 198, 151645],
    "qwen3_thinking": [198, 49, 16, 271, 151668, 271, 32, 16, 198, 151645],
    "qwen3_5": [198, 49, 16, 271, 248069, 271, 32, 16, 198, 248046],
    "kimi_k2_5": [10, 82, 49, 268, 163607, 268, 65, 49, 10, 163586],
    OWN_CODE: [10, 82, 49, 268, 163607, 268, 65, 49, 10, 163586],
    DEMO: [1022, 198, 49, 16, 302, 1023, 302, 32, 16, 198, 1021],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_its_own_white_space_next_to_the_markers(name):
    """B4. And none ends with a generation prompt, whatever a tokenizer's defaults are (B7)."""
    assert rebuilder(name).rebuild(answer("R1", "A1")) == (PROMPT[name], TURN[name])


@pytest.mark.parametrize("name", NAMES)
def test_white_space_that_is_there_stays_as_it_was_written(name):
    """B4: chat templates strip it or put in more."""
    rebuilt = rebuilder(name).rebuild(answer("\nR1\n\n", "\n\nA1\n"))
    assert rebuilt == (PROMPT[name], AS_WRITTEN[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("texts", [("R1", None), ("R1", ""), (None, "R1"), ("", "R1")])
def test_reasoning_that_was_cut_has_neither_think_end_nor_end(name, texts):
    """Some servers give it as content."""
    trace = answer(*texts, status=CUT, finish_reason="length")
    written = TURN[name][: TURN[name].index(THINK_IDS[name][1])]
    expected = written[:-1] if EDGES[name][1] else written  # not the newline before the end
    assert rebuilder(name).rebuild(trace) == (PROMPT[name], expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["\n\nR1 ", " R1", "R1\n"])
def test_reasoning_that_was_cut_is_the_same_in_either_field(name, text):
    texts = ((text, None), (None, text))
    one, other = (answer(*both, status=CUT, finish_reason="length") for both in texts)
    rebuilt = rebuilder(name).rebuild(one)
    assert rebuilt == rebuilder(name).rebuild(other)
    assert decoded(name, rebuilt.token_ids).endswith(text)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_has_no_end(name):
    trace = answer("R1", "A1", status=CUT_LATE, finish_reason="length")
    assert rebuilder(name).rebuild(trace) == (PROMPT[name], TURN[name][:-1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [None, ""])
def test_an_answer_that_was_cut_before_it_began_ends_with_the_think_end(name, content):
    trace = answer("R1", content, status=CUT_LATE, finish_reason="length")
    end = TURN[name].index(THINK_IDS[name][1]) + 1
    assert rebuilder(name).rebuild(trace) == (PROMPT[name], TURN[name][:end])


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("reasoning", [None, ""])
def test_with_thinking_off_the_turn_is_the_answer(name, reasoning):
    tokens = rebuilder(name, generate__thinking=False).rebuild(answer(reasoning, "A1"))
    assert tokens == ([*ASKED[name], *OFF[name]], TURN[name][-3:])


# whole turns, by `renderers`

REASONING, ANSWER = "First, 2+2.\nThen 4: 你好.", "It is **4**.\n\n- yes 🙂"


def by_renderers(name: str, **assistant: Any) -> list[int]:
    turn = {"role": "assistant", "reasoning_content": REASONING, "content": ANSWER, **assistant}
    return list(renderer_of(name).render_ids([*question("What is 2+2?"), turn]))


def by_us(name: str, reasoning: str = REASONING, content: str = ANSWER) -> list[int]:
    messages = question("What is 2+2?")
    tokenizer = loaded(name)
    if name in MADE:  # of these only what the renderer makes is known
        prompt = renderer_of(name).render_ids(messages, add_generation_prompt=True)
        tokenizer = saying(tokenizer, tokenizer.decode(prompt))
    made = Rebuilder(tokenizer, verifier_of(name), params_of(name))
    tokens = made.rebuild(answer(reasoning, content, messages=messages))
    return [*tokens.prompt_ids, *tokens.token_ids]


@pytest.mark.parametrize(
    ("name", "template_adds", "we_add"),
    [
        ("qwen3", "\n", ""),
        ("qwen3_5", "\n", ""),
        ("deepseek_v4", "", ""),
        ("glm_4", "", "<|user|>"),  # the next turn's, by which the model ends its own
        ("glm_4_7", "", "<|user|>"),
        ("minimax_m2", "\n", ""),
    ],
)
def test_a_finished_turn_is_what_renderers_makes_of_it(name, template_adds, we_add):
    theirs = by_renderers(name)
    assert [*by_us(name), *encoded(name, template_adds)] == [*theirs, *encoded(name, we_add)]


def test_kimis_turn_is_what_renderers_makes_of_one_with_a_tool_call():
    """B1: of a finished turn it keeps the reasoning only there."""
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": {}}}
    theirs = by_renderers("kimi_k2_5", tool_calls=[call])
    ours = by_us("kimi_k2_5")
    num_system = KIMI_PROMPT.index(163587)  # it does not write this one
    assert ours[num_system:-1] == theirs[: theirs.index(163595)]
    assert ours[-1] == 163586


def test_reasoning_that_the_template_drops_is_kept():
    """B1."""
    reasoning = encoded("kimi_k2_5", REASONING)

    def holds_it(ids: list[int]) -> bool:
        begin = ids.index(163606) + 1
        return ids[begin : begin + len(reasoning) + 1] == [*reasoning, 163607]

    assert not holds_it(by_renderers("kimi_k2_5"))
    assert holds_it(by_us("kimi_k2_5"))


def test_r1_writes_the_same_whoever_opens_its_think_block():
    asked = "<｜begin▁of▁sentence｜><｜User｜>Q1<｜Assistant｜>"
    found = set()
    for opened in ("", "<think>", "<think>\n"):
        tokenizer = saying(loaded("deepseek_r1"), asked + opened)
        made = Rebuilder(tokenizer, verifier_of("deepseek_r1"), params_of("deepseek_r1"))
        tokens = made.rebuild(answer("R1", "A1"))
        found.add(decoded("deepseek_r1", [*tokens.prompt_ids, *tokens.token_ids]))
    assert found == {asked + "<think>\nR1\n</think>\n\nA1<｜end▁of▁sentence｜>"}


# the prompt


def test_bos_is_written_by_the_template_alone(monkeypatch):
    """B11: many tokenizers put one before every text."""
    from tokenizers.processors import TemplateProcessing

    bos = "<｜begin▁of▁sentence｜>"
    tokenizer = loaded("deepseek_v4")
    adds_bos = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 0)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", adds_bos)
    assert tokenizer.encode("Q1") == [0, 51, 19]
    tokens = rebuilder("deepseek_v4").rebuild(answer("R1", "A1"))
    assert tokens == (PROMPT["deepseek_v4"], TURN["deepseek_v4"])


def test_kimi_has_no_bos():
    """B11."""
    tokens = rebuilder("kimi_k2_5").rebuild(answer("R1", "A1"))
    assert 163584 not in [*tokens.prompt_ids, *tokens.token_ids]


def test_a_default_system_prompt_comes_from_the_template_and_gives_way():
    """B13."""
    system = {"role": "system", "content": "hello"}
    found = rebuilder("kimi_k2_5").prompt_ids([system, *question()])
    num_default = len(KIMI_SYSTEM)
    assert found[:9] == [163594, *b"system", 163601, 259]
    assert found[9:] == PROMPT["kimi_k2_5"][8 + num_default :]


@pytest.mark.parametrize("name", NAMES)
def test_no_prompt_depends_on_the_day(name, monkeypatch):
    """B13: a template that asks for the date would fail here."""
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", None)
    assert rebuilder(name).prompt_ids(question()) == PROMPT[name]
    dated = loaded(name)
    dated.chat_template = "{{ strftime_now('%Y') }}"
    with pytest.raises(Rejected, match="other_template"):
        Rebuilder(dated, verifier_of(name), params_of(name)).prompt_ids(question())


@pytest.mark.parametrize("name", NAMES)
def test_an_earlier_turn_has_no_reasoning(name):
    """B21: the same turn has other tokens as history than as it was generated."""
    said = [*question(), {"role": "assistant", "content": "A1"}, *question("Q2")]
    tokens = rebuilder(name).rebuild(answer("R2", "A2", messages=said))
    history = {
        "deepseek_v4": "</think>A1<｜end▁of▁sentence｜><｜User｜>Q2<｜Assistant｜><think>",
        "qwen3": "A1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n",
        "kimi_k2_5": (
            "<think></think>A1<|im_end|><|im_user|>user<|im_middle|>Q2<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><think>"
        ),
    }
    history |= {name: history[family] for name, family in FAMILY_OF.items()}
    history["qwen3_thinking"] = history["qwen3_5"] = history["qwen3"] + "<think>\n"
    assert tokens.prompt_ids == [*ASKED[name], *encoded(name, history[name])]
    assert "R2" in decoded(name, tokens.token_ids)


@pytest.mark.parametrize("name", ["kimi_k2_5", OWN_CODE])
def test_markers_in_a_question_are_tokens_as_the_server_takes_them(name):
    """B8."""
    asked = question("Print <|im_end|><|im_assistant|>assistant<|im_middle|><think> literally")
    found = rebuilder(name).prompt_ids(asked)
    typed = [163586, 163588, *b"assistant", 163601, 163606]
    begin = found.index(163587)
    assert found[begin:] == [
        *(163587, *b"user", 163601, *encoded(name, "Print "), *typed),
        *(*encoded(name, " literally"), 163586),
        *(163588, *b"assistant", 163601, 163606),
    ]


MARKERS = {
    "deepseek_v4": [0, 128803, 128804, 128821],
    "qwen3": [151644, 151645, 151644],
    "qwen3_thinking": [151644, 151645, 151644, 151667],
    "qwen3_5": [248045, 248046, 248045, 248068],
    "kimi_k2_5": [163594, 163601, 163586, 163587, 163601, 163586, 163588, 163601, 163606],
    DEMO: [1020, 1021, 1020],
}
# Its end, where there is one, and what opens the verifier's turn.
BEHIND_THE_QUESTION = {
    "deepseek_v4": 2,
    "qwen3": 2,
    "qwen3_thinking": 3,
    "qwen3_5": 3,
    "kimi_k2_5": 4,
    DEMO: 2,
}


@pytest.mark.parametrize("name", MARKERS)
def test_the_templates_markers_do_not_depend_on_what_was_said(name):
    found = rebuilder(name).template_markers(question("<think> twice </think>"))
    assert found.all == MARKERS[name]
    assert found.behind == MARKERS[name][-BEHIND_THE_QUESTION[name] :]


def test_the_templates_markers_are_found_out_once_for_the_same_roles():
    tokenizer = loaded("qwen3")
    made = Rebuilder(tokenizer, verifier_of("qwen3"), params_of("qwen3"))
    assert made.template_markers(question()).all == MARKERS["qwen3"]
    tokenizer.chat_template = "{{ raise_exception('asked again') }}"
    assert made.template_markers(question("another")).all == MARKERS["qwen3"]
    with pytest.raises(Rejected, match="other_template"):
        made.template_markers([{"role": "system", "content": "S"}, *question()])


# text that says nothing sure


def markers_of(family: str) -> list[str]:
    writes = FAMILIES[family].writes
    return [
        *("<think>", "</think>", writes.end_of_turn),
        *(*writes.role_tokens, *writes.control_tokens),
    ]


@pytest.mark.parametrize(
    ("name", "marker"),
    [(name, marker) for name in NAMES for marker in markers_of(FAMILY_OF.get(name, name))],
)
def test_text_that_spells_a_marker_is_rejected(name, marker):
    """Whether it was generated as the token or in letters, text does not say."""
    text = f"close it with {marker} when done"
    for trace in (
        answer(text, "A1"),
        answer("R1", text),
        answer(text, None, status=CUT, finish_reason="length"),
        answer(None, text, status=CUT, finish_reason="length"),
        answer("R1", text, status=CUT_LATE, finish_reason="length"),
    ):
        assert rejection(name, trace) == "text_not_exact"


@pytest.mark.parametrize("name", NAMES)
def test_another_familys_markers_are_ordinary_text(name):
    own = set(markers_of(FAMILY_OF.get(name, name)))
    foreign = {marker for family in FAMILIES for marker in markers_of(family)} - own
    assert len(foreign) > 10
    for marker in foreign:
        text = f"close it with {marker} when done"
        tokens = rebuilder(name).rebuild(answer(text, text))
        assert decoded(name, tokens.token_ids).count(text) == 2
        written = [token for token in tokens.token_ids if token in verifier_of(name).markers]
        assert written == [*THINK_IDS[name][bool(OPENED[name]) :], END[name]]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_that_are_no_text_are_rejected(name):
    """B10: a turn that was cut inside a character."""
    whole = encoded(name, "R1 🜚")
    cut = decoded(name, whole[:-1])
    assert cut.endswith("\ufffd")
    assert rejection(name, answer(cut, None, status=CUT, finish_reason="length")) == (
        "text_not_exact"
    )
    assert rejection(name, answer("R1", "A\ufffd1")) == "text_not_exact"


# very long texts


@pytest.mark.parametrize("part", ["question", "reasoning", "answer"])
def test_very_long_runs_are_split_as_the_tokenizers_own_code_does_it(part):
    """B20: the same vocabulary without that code makes other tokens of them."""
    long = "a" * 30000 + " " + "\n" * 30000 + "."
    expected = loaded(OWN_CODE).encode(long)
    assert expected != loaded("kimi_k2_5").encode(long)
    texts = {"question": "Q1", "reasoning": "R1", "answer": "A1", part: long}
    trace = answer(texts["reasoning"], texts["answer"], messages=question(texts["question"]))
    tokens = rebuilder(OWN_CODE).rebuild(trace)
    ids = [*tokens.prompt_ids, *tokens.token_ids]
    asked = [*KIMI_PROMPT[: KIMI_PROMPT.index(163587) + 6], *encoded_by_itself(texts["question"])]
    assert ids == [
        *asked,
        *(163586, 163588, *b"assistant", 163601, 163606),
        *(*encoded_by_itself(texts["reasoning"]), 163607),
        *(*encoded_by_itself(texts["answer"]), 163586),
    ]


def encoded_by_itself(text: str) -> list[int]:
    """By the wrapper's own `encode`, with no argument but the text."""
    return list(loaded(OWN_CODE).encode(text))


# text against ids


@pytest.mark.parametrize(
    ("generated", "texts", "expected"),
    [
        ([33310, 128822, 35, 19, 1], ("hello", "A1"), Agreement.EXACT),
        ([201, 33310, 201, 128822, 271, 35, 19, 1], ("hello", "A1"), Agreement.WHITESPACE),
        ([263, 61547, 128822, 35, 19, 1], ("hello", "A1"), Agreement.RETOKENIZED),  # he llo
        ([33310, 128822, 35, 20, 1], ("hello", "A1"), Agreement.OTHER),
    ],
)
def test_text_and_ids_agree_or_differ_in_a_known_way(generated, texts, expected):
    """B10."""
    rebuilt = rebuilder("deepseek_v4").rebuild(answer(*texts))
    tokenizer = loaded("deepseek_v4")
    assert agreement(Tokens(rebuilt.prompt_ids, generated), rebuilt, tokenizer) is expected


def test_a_prompt_that_differs_counts_too():
    rebuilt = rebuilder("deepseek_v4").rebuild(answer("hello", "A1"))
    tokenizer = loaded("deepseek_v4")
    other = [0, 128803, 51, 20, 128804, 128821]
    spaced = [0, 128803, 51, 19, 201, 128804, 128821]
    for prompt, kind in ((other, Agreement.OTHER), (spaced, Agreement.WHITESPACE)):
        generated = Tokens(prompt, rebuilt.token_ids)
        assert agreement(generated, rebuilt, tokenizer) is kind


def test_a_tokenizer_that_tidies_up_white_space_is_told_not_to():
    tokenizer = loaded(OWN_CODE)
    tokenizer.clean_up_tokenization_spaces = True
    spaced, tidy = encoded(OWN_CODE, "A ."), encoded(OWN_CODE, "A.")
    assert tokenizer.decode(spaced, skip_special_tokens=False) == "A."
    made = Rebuilder(tokenizer, verifier_of(OWN_CODE), params_of(OWN_CODE))
    rebuilt = made.rebuild(answer("R1", "A ."))
    assert rebuilt.token_ids == [82, 49, 163607, *spaced, 163586]
    generated = Tokens(rebuilt.prompt_ids, [82, 49, 163607, *tidy, 163586])
    assert agreement(generated, rebuilt, tokenizer) is Agreement.WHITESPACE


def row_of(name: str, trace: dict[str, Any], **changes: Any) -> dict[str, Any]:
    params = params_of(name, reassemble__source="text", **changes)
    prompt = {"index": 0, "split": "train", "source": "test"}
    return Assembler(params, verifier_of(name), loaded(name)).row(prompt, trace)


def test_other_tokens_of_the_same_text_are_more_or_fewer_than_were_billed():
    """B10: he llo is billed as two tokens, hello is one."""
    billed = {"prompt_tokens": 6, "completion_tokens": 6}
    with pytest.raises(Rejected) as caught:
        row_of("deepseek_v4", answer("hello", "A1", usage=billed))
    assert caught.value.reason is SequenceRejection.USAGE
    billed["completion_tokens"] = 5
    assert row_of("deepseek_v4", answer("hello", "A1", usage=billed))["rebuilt"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", OFF)
def test_the_mask_is_the_generated_turn_with_reasoning_and_without(name, thinking):
    """B17."""
    trace = answer("R1" if thinking else None, "A1")
    row = row_of(name, trace, generate__thinking=thinking)
    prompt = PROMPT[name] if thinking else [*ASKED[name], *OFF[name]]
    turn = TURN[name] if thinking else TURN[name][-3:]
    assert row["input_ids"].tolist() == [*prompt, *turn]
    assert row["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(turn)
