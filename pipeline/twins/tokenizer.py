"""A small byte-level vocabulary with the markers of a real one at their real ids."""

import json
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Words with their leading space, digits one by one, punctuation with the newlines behind it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(
    texts: Iterable[str], markers: Mapping[str, int], **options: Any
) -> PreTrainedTokenizerFast:
    """Every word of `texts` is one token; other text is bytes, and what it shares with them.
    `options` are transformers' (bos_token, chat_template)."""
    trained = _with_split(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=10_000,  # more than there is to merge
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    learnt = json.loads(trained.to_str())["model"]
    free = (number for number in count() if number not in markers.values())
    vocabulary = {text: next(free) for text in sorted(learnt["vocab"], key=learnt["vocab"].get)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    tokenizer = _with_split(Tokenizer(models.BPE({**vocabulary, **markers}, merges)))
    tokenizer.add_tokens(
        [AddedToken(text, special=is_special(text), normalized=False) for text in markers]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **options
    )


def is_special(marker: str) -> bool:
    """Models of these families mark neither think nor tool tokens as special."""
    return "think" not in marker and "tool" not in marker


def _with_split(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
