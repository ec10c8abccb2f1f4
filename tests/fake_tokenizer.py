"""The tokenizer and chat template of the model that tests/fake_server.py plays.

A token is an ASCII character and its id the code point; the special tokens have their ids from
there. The template renders what `fake_server.prompt_ids` says in ids.
"""

from functools import cache
from pathlib import Path

from tests.fake_server import ASSISTANT, END, SYSTEM, THINK, THINK_END, USER

SPECIAL = {
    "<think>": THINK,
    "</think>": THINK_END,
    "<|end|>": END,
    "<|user|>": USER,
    "<|assistant|>": ASSISTANT,
    "<|system|>": SYSTEM,
}
TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
# `family` in params.yaml for it.
FAMILY = {
    "prefilled": False,
    "before_think_start": "",
    "after_think_start": "\n",
    "before_think_end": "\n",
    "after_think_end": "\n\n",
    "end_of_turn": "<|end|>",
    "role_tokens": ["<|user|>", "<|assistant|>"],
    "control_tokens": ["<|system|>"],
}


@cache
def files() -> dict[str, bytes]:
    """tokenizer.json and its like, by name."""
    from tempfile import TemporaryDirectory

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)} | SPECIAL
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    with TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)
