"""How models of each family write a turn, and the proof that the verifier at hand does so.

    family = family_of(params.family)                 the entry of the table, or `family.custom`
    markers = prove(family, tokenizer, params)        its markers as ids of the served tokenizer

The table holds no ids: they come from the tokenizer, each marker must be exactly one of its tokens,
and what the table says of the chat template is compared with what the template renders.

Adding a family is one entry here and one row in tests/test_families.py.
"""

from typing import Any, NamedTuple

from pipeline.errors import ParamsError, VerifierError
from pipeline.params import Family, FamilyChoice, Params
from pipeline.records import Message

PROBE: list[Message] = [
    {"role": "user", "content": "One question"},
    {"role": "assistant", "content": "One answer"},
    {"role": "user", "content": "Another question"},
]
# Reasoning and answer are channels, each opened by several tokens: no single think token to train.
WITH_CHANNELS = frozenset({"gpt_oss"})


class KnownFamily(NamedTuple):
    writes: Family
    thinking_switch: str | None  # of its chat template
    parsers: tuple[str, ...]  # vLLM's, for its reasoning; the first is the one of its name
    verified: bool  # a real tokenizer of the family was at hand (tests/test_families.py)


QWEN3 = Family(
    prefilled=False,
    before_think_start="",
    after_think_start="\n",
    before_think_end="\n",
    after_think_end="\n\n",
    end_of_turn="<|im_end|>",
    role_tokens=["<|im_start|>"],
    control_tokens=["<|endoftext|>"],
)
DEEPSEEK = Family(
    prefilled=True,
    before_think_start="",
    after_think_start="",
    before_think_end="",
    after_think_end="",
    end_of_turn="<｜end▁of▁sentence｜>",
    role_tokens=["<｜User｜>", "<｜Assistant｜>"],
    control_tokens=["<｜begin▁of▁sentence｜>"],
)
KIMI_K2 = Family(
    prefilled=True,
    before_think_start="",
    after_think_start="",
    before_think_end="",
    after_think_end="",
    end_of_turn="<|im_end|>",
    role_tokens=["<|im_user|>", "<|im_assistant|>", "<|im_middle|>"],
    control_tokens=["<|im_system|>", "[BOS]", "[EOS]"],
)
GLM_4 = Family(
    prefilled=False,
    before_think_start="\n",
    after_think_start="",
    before_think_end="",
    after_think_end="\n",
    end_of_turn="<|user|>",  # it ends a turn by opening the next one
    role_tokens=["<|user|>", "<|assistant|>"],
    control_tokens=["<|system|>", "<|observation|>", "<|endoftext|>", "[gMASK]", "<sop>"],
)
MINIMAX_M2 = Family(
    prefilled=True,
    before_think_start="",
    after_think_start="\n",
    before_think_end="\n",
    after_think_end="\n\n",
    end_of_turn="[e~[",
    role_tokens=["]~b]"],
    control_tokens=["]~!b["],
)


def _but(family: Family, **changes: Any) -> Family:
    return family.model_copy(update=changes)


FAMILIES = {
    "kimi_k2_5": KnownFamily(KIMI_K2, "thinking", ("kimi_k2",), verified=False),
    # Public copies of its template differ in whether they open the think block.
    "kimi_k2_thinking": KnownFamily(
        _but(KIMI_K2, prefilled=None), None, ("kimi_k2",), verified=False
    ),
    "qwen3": KnownFamily(QWEN3, "enable_thinking", ("qwen3",), verified=True),
    "qwen3_thinking": KnownFamily(
        _but(QWEN3, prefilled=True), None, ("qwen3", "deepseek_r1"), verified=True
    ),  # …-2507
    # And 3.6; the smallest have thinking off unless asked.
    "qwen3_5": KnownFamily(
        _but(QWEN3, prefilled=True), "enable_thinking", ("qwen3",), verified=True
    ),
    # Some of its templates leave the think-start to the model.
    "deepseek_r1": KnownFamily(
        _but(
            DEEPSEEK,
            prefilled=None,
            after_think_start="\n",
            before_think_end="\n",
            after_think_end="\n\n",
        ),
        None,
        ("deepseek_r1",),
        verified=False,
    ),
    "deepseek_v3_1": KnownFamily(DEEPSEEK, "thinking", ("deepseek_v3",), verified=False),
    "deepseek_v4": KnownFamily(DEEPSEEK, "thinking", ("deepseek_v4",), verified=True),
    "glm_4": KnownFamily(GLM_4, "enable_thinking", ("glm45",), verified=False),  # 4.5 and 4.6
    "glm_4_7": KnownFamily(
        _but(GLM_4, prefilled=True, before_think_start="", after_think_end=""),
        "enable_thinking",
        ("glm47",),
        verified=False,
    ),
    "minimax_m2": KnownFamily(MINIMAX_M2, None, ("minimax_m2",), verified=False),
}


class Markers(NamedTuple):
    """What the served tokenizer makes of a family's markers."""

    end_of_turn_id: int
    control_ids: frozenset[int]  # of role_tokens and control_tokens


def family_of(choice: FamilyChoice) -> Family:
    """
    Raises:
        ParamsError: the name is in no table, or the family is one that cannot be rebuilt.
    """
    if choice.custom:
        return choice.custom
    if choice.name.lower().replace("-", "_") in WITH_CHANNELS:
        raise ParamsError(
            f"family.name {choice.name}: its reasoning and answer are channels opened by several "
            "tokens; this pipeline needs one think-start and one think-end token"
        )
    if choice.name not in FAMILIES:
        raise ParamsError(
            f"family.name {choice.name!r} is not in the table ({', '.join(FAMILIES)}); "
            "describe it in family.custom with name: custom"
        )
    return FAMILIES[choice.name].writes


def is_verified(choice: FamilyChoice) -> bool:
    """Whether a real tokenizer of the family was tried; of `custom` nobody here knows."""
    return choice.name in FAMILIES and FAMILIES[choice.name].verified


def check_parser(params: Params) -> None:
    """Raises ParamsError when vLLM would look for the reasoning of another family."""
    name, parser = params.family.name, params.verifier.reasoning_parser
    if parser is None or name not in FAMILIES or parser in FAMILIES[name].parsers:
        return  # without a parser the text is split here, and of `custom` nobody here knows
    raise ParamsError(
        f"verifier.reasoning_parser is {parser!r}; of family {name} it is "
        f"{' or '.join(FAMILIES[name].parsers)}"
    )


def prove(family: Family, tokenizer: Any, params: Params) -> Markers:
    """What `family` says, compared with the verifier's own tokenizer and chat template.

    Raises:
        ParamsError: a marker is not exactly one token; a role token does not occur in a rendered
            conversation; the template does not know the thinking switch, or opens the think block
            where the family says it does not.
    """
    name = params.family.name
    ids = {
        marker: single_id(tokenizer, marker, f"family.name {name}")
        for marker in (family.end_of_turn, *family.role_tokens, *family.control_tokens)
    }
    known = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for marker, token_id in ids.items():
        if token_id not in known:
            raise ParamsError(f"family.name {name}: {marker!r} is text of the verifier, no marker")
    template_kwargs = params.generate.template_kwargs
    rendered = generation_prompt(tokenizer, PROBE, template_kwargs)
    absent = [marker for marker in family.role_tokens if marker not in rendered]
    if absent:
        raise ParamsError(
            f"family.name {name}: {absent[0]!r} occurs nowhere in a conversation rendered by the "
            f"chat template, which ends with {rendered[-60:]!r}"
        )
    switch = params.generate.thinking_switch
    if switch and rendered == generation_prompt(
        tokenizer, PROBE, {switch: not params.generate.thinking}
    ):
        switch_there = FAMILIES[name].thinking_switch if name in FAMILIES else None
        raise ParamsError(
            f"generate.thinking_switch: the chat template does not know {switch!r}, the prompt "
            f"stays the same; of family {name} it is {switch_there or 'null'}"
        )
    start, end = rendered.rfind(params.think.start), rendered.rfind(params.think.end)
    prefilled = start > max(end, rendered.rfind(PROBE[-1]["content"]))
    if params.generate.thinking and family.prefilled not in (None, prefilled):
        who = "open the think block" if family.prefilled else "leave the think-start to the model"
        raise ParamsError(
            f"family.name {name}: the generation prompt should {who}, but ends with "
            f"{rendered[-60:]!r}; it is another family or another template version "
            "(describe it in family.custom)"
        )
    return Markers(
        end_of_turn_id=ids[family.end_of_turn],
        control_ids=frozenset(ids[m] for m in (*family.role_tokens, *family.control_tokens)),
    )


def single_id(tokenizer: Any, marker: str, key: str) -> int:
    """The id of `marker`, which must be one token of the tokenizer. `key` says who wants it.

    Raises:
        ParamsError: it is several tokens, or unknown.
    """
    ids = tokenizer.encode(marker, add_special_tokens=False)
    # Some tokenizers call one of their markers the unknown token.
    is_unknown = ids == [tokenizer.unk_token_id] and marker != tokenizer.unk_token
    if len(ids) != 1 or is_unknown:
        raise ParamsError(
            f"{key}: {marker!r} is no single token of the verifier but ids {list(ids)}; its chat "
            "template has the markers it knows"
        )
    return int(ids[0])


def generation_prompt(
    tokenizer: Any, messages: list[Message], template_kwargs: dict[str, bool]
) -> str:
    """The text that the chat template makes of `messages`, up to where the verifier goes on.

    All that a tokenizer could have another default for is said: Kimi's own `apply_chat_template`
    has others than transformers'.

    Raises:
        VerifierError: the template refuses them.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except Exception as error:  # jinja2's and whatever a template raises by itself
        raise VerifierError(f"the chat template does not render a conversation: {error}") from error
    assert isinstance(rendered, str)
    return rendered
