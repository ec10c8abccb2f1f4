"""A tokenizer with Python code of its own, with the manners of Kimi's: copied into a model folder by
tests/real_tokenizers.py, and loaded from there by transformers as code that comes with a model.

- `apply_chat_template` gives text that ends with a generation prompt unless told otherwise.
- `encode` reads markers in text as tokens, and splits text at 400,000 characters and any run of
  25,000 with or without white space. With any further argument it leaves that to transformers,
  which splits the text at the markers first.
"""

from collections.abc import Iterator
from itertools import groupby

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
    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012

    def __init__(self, vocab_file, pattern, added_tokens_decoder, **kwargs):
        special = {str(token): int(index) for index, token in added_tokens_decoder.items()}
        self.model = tiktoken.Encoding(
            "kimi-shaped",
            pat_str=pattern,
            mergeable_ranks=load_tiktoken_bpe(vocab_file),
            special_tokens=special,
        )
        # Tokens as strings: a character a byte.
        ranks = [(token.decode("latin-1"), i) for i, token in self._ranks()]
        self.ids = dict(ranks) | special
        self.tokens = {index: token for token, index in self.ids.items()}
        super().__init__(added_tokens_decoder=added_tokens_decoder, pattern=pattern, **kwargs)

    def _ranks(self):
        return [(i, self.model.decode_single_token_bytes(i)) for i in range(self.num_base)]

    @property
    def num_base(self):
        return len(self.model._mergeable_ranks)

    @property
    def vocab_size(self):
        return len(self.ids)

    def get_vocab(self):
        return dict(self.ids)

    def encode(self, text, **kwargs):
        if kwargs:
            return super().encode(text, **kwargs)
        return [
            token
            for piece in pieces(text)
            for token in self.model.encode(piece, allowed_special="all")
        ]

    def _tokenize(self, text, **kwargs):
        return [self.tokens[token] for token in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return self.tokens[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).encode("latin-1").decode("utf-8", "replace")

    def apply_chat_template(
        self, conversation, tokenize=False, add_generation_prompt=True, thinking=True, **kwargs
    ):
        return super().apply_chat_template(
            conversation,
            tokenize=tokenize,
            add_generation_prompt=add_generation_prompt,
            thinking=thinking,
            **kwargs,
        )
