"""The verifier's architecture and its training loop: Qwen3's, with 3.3 million parameters.

One pass over generated questions, each seen once: the data are drawn in chunks from a seed, so a
training that was stopped goes on from its last checkpoint as if nothing had happened.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from random import Random
from string import ascii_lowercase

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from pipeline.demo_verifier.tokenizer import Example, make_example
from pipeline.demo_verifier.words import PEOPLE, THINGS, WORDS
from pipeline.progress import progress_bar

EXAMPLES_PER_CHUNK = 1024
TOKENS_PER_BATCH = 3072
# Muon moves the weight matrices of the layers, AdamW the embeddings, the head and the norms.
MUON_LEARNING_RATE = 2e-2
ADAMW_LEARNING_RATE = 3e-3
WARMUP = 0.02


@dataclass(frozen=True)
class Round:
    """A stretch of training: the rate goes up, stays, and falls to nothing at its end."""

    num_chunks: int
    peak: float  # times the learning rates above
    weighted: Sequence[str]  # pieces of text that cost COPY_WEIGHT times as much to get wrong


# Most tokens follow from the kind of question; the answer hangs on the few that are calculated or
# copied. Calculating is learnt first. After the first round the model counted right and called
# people by wrong names (68 % right answers), so the second, at a lower rate, weighs the names too.
COPY_WEIGHT = 3.0
DIGITS = "0123456789"
NAMES = [
    text for name in (*PEOPLE, *THINGS, *WORDS, *ascii_lowercase) for text in (name, " " + name)
]
ROUNDS = (
    Round(num_chunks=50, peak=1.0, weighted=DIGITS),
    Round(num_chunks=18, peak=0.5, weighted=[*DIGITS, *NAMES]),
)


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        # Untied: the draft's training reads embeddings and head by name.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    # Greedy by default: a server takes its default sampling from this file.
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def train(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, checkpoints: Path
) -> None:
    """Trains in place, from the last checkpoint of the same code and seed if there is one."""
    model.train()
    optimizers = _optimizers(model)
    schedule = [
        (chunk / part.num_chunks, part) for part in ROUNDS for chunk in range(part.num_chunks)
    ]
    checkpoint = checkpoints / f"{_fingerprint(seed)}.pt"
    first_chunk = _load(checkpoint, model, optimizers)
    num_left = (len(schedule) - first_chunk) * EXAMPLES_PER_CHUNK
    with progress_bar("training", num_left, "examples") as bar:
        for chunk in range(first_chunk, len(schedule)):
            done, part = schedule[chunk]
            weights = _weights(tokenizer, part.weighted)
            batches = list(_batches(tokenizer, Random(f"{seed}:chunk {chunk}")))
            for index, batch in enumerate(batches):
                rate = part.peak * _shape(done + index / len(batches) / part.num_chunks)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["initial_lr"] * rate
                loss = _step(model, batch, weights, tokenizer.pad_token_id)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                bar.advance(len(batch), note=f"loss {loss:.3f}")
            _save(checkpoint, model, optimizers, chunk + 1)


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_hidden = parameter.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        (matrices if is_hidden else others).append(parameter)
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _weights(tokenizer: PreTrainedTokenizerFast, weighted: Sequence[str]) -> torch.Tensor:
    """What an error costs, for each token of the vocabulary."""
    weights = torch.ones(len(tokenizer))
    for text in weighted:
        weights[tokenizer(text)["input_ids"]] = COPY_WEIGHT
    return weights


def _shape(done: float) -> float:
    """The rate within a round: warm-up, full rate for a while, then straight down to nothing."""
    return min(1.0, (done + 1e-3) / WARMUP, (1.0 - done) / 0.6)


def _batches(tokenizer: PreTrainedTokenizerFast, rng: Random) -> Iterator[list[Example]]:
    """One chunk as batches of examples of similar length, in random order: hardly any padding."""
    examples = [make_example(tokenizer, rng) for _ in range(EXAMPLES_PER_CHUNK)]
    examples.sort(key=lambda example: len(example.ids))
    batches: list[list[Example]] = [[]]
    for example in examples:
        if (len(batches[-1]) + 1) * len(example.ids) > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    yield from batches


def _step(
    model: Qwen3ForCausalLM, batch: list[Example], weights: torch.Tensor, pad_id: int
) -> float:
    """Loss and gradients of one batch, on the tokens that the model is to generate."""
    length = max(len(example.ids) for example in batch)
    ids_BT = torch.full((len(batch), length), pad_id)
    weights_BT = torch.zeros(len(batch), length)
    for row, example in enumerate(batch):
        ids = torch.tensor(example.ids)
        ids_BT[row, : len(ids)] = ids
        weights_BT[row, example.num_prompt_tokens : len(ids)] = weights[
            ids[example.num_prompt_tokens :]
        ]
    # No attention mask: the padding is at the end, where causal attention never looks at it.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden_BTH = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        wanted_BT = weights_BT[:, 1:] > 0
        logits_NV = model.lm_head(hidden_BTH[:, :-1][wanted_BT])
    losses_N = functional.cross_entropy(
        logits_NV.float(), ids_BT[:, 1:][wanted_BT], reduction="none"
    )
    weights_N = weights_BT[:, 1:][wanted_BT]
    loss = (losses_N * weights_N).sum() / weights_N.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


def _fingerprint(seed: int) -> str:
    """The seed and the code that the weights depend on: no training goes on from other code's."""
    digest = sha256(str(seed).encode())
    for name in (
        "words.py",
        "questions.py",
        "stories.py",
        "puzzles.py",
        "draw.py",
        "chat_template.jinja",
        "tokenizer.py",
        "model.py",
    ):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def _save(
    path: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer], num_chunks: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "num_chunks": num_chunks,
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def _load(path: Path, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Number of chunks that are done already."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["num_chunks"]
