"""A tokenizer with Python code of its own and the manners of Kimi's. tests/real_tokenizers.py
copies it into a model folder, from where transformers loads it as code that comes with a model.

- `apply_chat_template` gives text that ends with a generation prompt, unless told otherwise.
- `encode` takes markers in text for tokens, and splits text every 400,000 characters and runs with
  or without white space every 25,000. With any further argument it leaves the first part to
  transformers, which splits the text at the markers and comes back with what is between them.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

MAX_CHARS, MAX_RUN = 400_000, 25_000


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), MAX_CHARS):
        piece = ""
        for _, same in groupby(text[start : start + MAX_CHARS], key=str.isspace):
            run = "".join(same)
            while len(run) > MAX_RUN:
                yield piece + run[:MAX_RUN]
                piece, run = "", run[MAX_RUN:]
            piece += run
        yield piece


class KimiShapedTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012  # transformers' own name

    def __init__(
        self, vocab_file: str, pattern: str, added_tokens_decoder: dict[int, Any], **options: Any
    ) -> None:
        ranks = load_tiktoken_bpe(vocab_file)
        special = {str(token): index for index, token in added_tokens_decoder.items()}
        self.model = tiktoken.Encoding(
            "kimi-shaped", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        # A token as transformers wants it, a string: one character a byte.
        self.ids = {token.decode("latin-1"): rank for token, rank in ranks.items()} | special
        self.tokens = {index: token for token, index in self.ids.items()}
        super().__init__(pattern=pattern, added_tokens_decoder=added_tokens_decoder, **options)

    @property
    def vocab_size(self) -> int:
        return len(self.ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.ids)

    def encode(self, text: str, **options: Any) -> list[int]:
        if options:
            return super().encode(text, **options)
        encoded = (self.model.encode(piece, allowed_special="all") for piece in pieces(text))
        return [token for piece in encoded for token in piece]

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return [self.tokens[token] for token in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.tokens[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        tokenize: bool = False,
        add_generation_prompt: bool = True,
        thinking: bool = True,
        **options: Any,
    ) -> Any:
        return super().apply_chat_template(
            conversation,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            **options,
        )
