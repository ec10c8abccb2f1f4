"""Makes the demo verifier: a reasoning model small enough to train, serve and draft for on a CPU.

Reads   params.yaml: demo_verifier.seed
Writes  data/raw/questions.jsonl      the raw questions of the demo, some rows bad on purpose
        models/verifier/              the model: Qwen3's architecture, 3.3 million parameters, bf16
        reports/demo_verifier.json    500 held-out questions, thinking on and off

Run as `python -m pipeline.demo_verifier` (`make verifier` does, and tells DVC). Trains for about 26
minutes on one quiet CPU core (45 examples a second), for 40 on a busy one; set OMP_NUM_THREADS=1,
as a second thread on a shared two-core machine makes it slower. A training that was stopped goes on
from its last checkpoint, kept in the system's temporary folder. The same seed gives the same
questions and the same order; the weights agree up to float noise.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from pipeline.demo_verifier.card import model_card
from pipeline.demo_verifier.evaluate import evaluate
from pipeline.demo_verifier.model import build_model, train
from pipeline.demo_verifier.raw import raw_lines
from pipeline.demo_verifier.tokenizer import build_tokenizer
from pipeline.params import load_params
from pipeline.resume import write_bytes, write_json

RAW_QUESTIONS = Path("data/raw/questions.jsonl")
VERIFIER = Path("models/verifier")
REPORT = Path("reports/demo_verifier.json")
CHECKPOINTS = Path(tempfile.gettempdir()) / "demo_verifier"


def main() -> None:
    logging.disable_progress_bar()  # the saving and loading of one small file
    seed = load_params().demo_verifier.seed
    write_bytes(RAW_QUESTIONS, "".join(line + "\n" for line in raw_lines(seed)).encode())

    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer, seed)
    train(model, tokenizer, seed, CHECKPOINTS)

    folder = VERIFIER.with_name(VERIFIER.name + ".tmp")
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    # What is evaluated is what is stored: the rounded weights, as a server would load them.
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    report = evaluate(stored, AutoTokenizer.from_pretrained(folder), seed)
    (folder / "README.md").write_text(model_card(report, stored.num_parameters(), len(tokenizer)))

    shutil.rmtree(VERIFIER, ignore_errors=True)
    os.replace(folder, VERIFIER)
    write_json(REPORT, report)
    shutil.rmtree(CHECKPOINTS, ignore_errors=True)  # the next run trains anew
    on, off = report["thinking_on"], report["thinking_off"]
    print(f"right with thinking {on['fraction_right']:.1%}, without {off['fraction_right']:.1%}")


if __name__ == "__main__":
    main()
