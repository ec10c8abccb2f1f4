"""Twins: miniatures of big verifiers, to try a profile on a CPU before anyone rents a GPU.

    make twins                       (python -m pipeline.twins [PROFILE …])

Reads    profiles/<profile>.yaml, profiles/laptop.yaml
Writes   models/twins/<profile>: config, tokenizer, chat template and weights (100 to 200 MB each),
         made in seconds, the same on every machine
         profiles/twin_<profile>.yaml: that profile with the twin as its verifier, the laptop's
         server arguments, and smaller sizes. Neither is in git

A twin has the architecture, the markers at their ids and the prompts of the model that the profile
names (pipeline/twins/layouts.py). Whatever it is asked, it thinks and answers the same words: its
weights are wired (pipeline/twins/wiring.py). So a run on it proves everything but the model.

    make use PROFILE=twin_kimi_k2_5 && dvc repro evaluate

`benchmark` has no CPU kernel for a draft beside Kimi-K2.5's and DeepSeek-R1's attention.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from pipeline.resume import TEMP_SUFFIX, write_bytes
from pipeline.twins.layouts import LAYOUTS, Layout
from pipeline.twins.tokenizer import build_tokenizer
from pipeline.twins.wiring import wire
from pipeline.use import PROFILES

TWINS = Path("models/twins")
SEED = 0
# What the model is, how it is asked and how it is read stay the profile's.
SMALLER: dict[str, dict[str, Any]] = {
    "verifier": {"max_model_len": 1024},
    "prompts": {
        "sources": ["data/raw/questions.jsonl"],
        "urls": [],
        "num_held_out": 16,
        "sample_cap": 64,
    },
    "generate": {"concurrency": 16, "max_tokens": 512, "retry_max_tokens": 768},
    "reassemble": {"max_tokens": 1024, "draft_vocab_size": 256},
    "extract": {"layer_ids": [1, 2, 4]},
    "train": {
        "num_processes": 1,
        "num_steps": 60,
        "checkpoint_steps": 60,
        "max_tokens_per_batch": 640,
        "learning_rate": 0.001,
        "muon_learning_rate": 0.005,
    },
    "benchmark": {
        "num_prompts": 4,
        "concurrency": [1],
        "temperatures": [0.0],
        "both_thinking_modes": False,
        "max_tokens": 512,
        "side_by_side": True,
    },
}
# No word or sign twice, or two tokens would follow it.
REASONING = (
    "Okay let me look at what this person wants to know before I say anything about it: First "
    "comes the part which can be counted, how many things there are and where they stand; Then we "
    "should check whether our sum agrees with every number given above - if two of those differ "
    "something was read wrongly so go back one step write down both values again compare each side "
    "slowly keep only results that hold under any order or reading (nothing here looks strange now"
)
ANSWER = "Yes! Having thought carefully through all steps your result seems quite right"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.twins")
    parser.add_argument("profiles", nargs="*", metavar="PROFILE", help="all of them if none")
    names = parser.parse_args().profiles or list(LAYOUTS)
    transformers.utils.logging.disable_progress_bar()  # of one small file each
    for name in names:
        if name not in LAYOUTS:
            parser.error(f"no twin of {name}; there are {', '.join(LAYOUTS)}")
        make_twin(LAYOUTS[name], TWINS / name)
        path = PROFILES / f"twin_{name}.yaml"
        text = yaml.safe_dump(twin_profile(name), sort_keys=False, allow_unicode=True)
        write_bytes(path, f"# Made by `make twins`\n\n{text}".encode())
        print(f"{TWINS / name}: make use PROFILE={path.stem}")


def twin_profile(name: str) -> dict[str, Any]:
    """The values of a profile, less its sizes."""
    values, laptop = (read_yaml(PROFILES / f"{profile}.yaml") for profile in (name, "laptop"))
    values["verifier"] |= {
        "model": (TWINS / name).as_posix(),
        "revision": None,
        **{key: laptop["verifier"][key] for key in ("server_args", "server_env")},
    }
    for section, sizes in SMALLER.items():
        values[section] |= sizes
    values["plan"] = dict.fromkeys(values["plan"]) | {"facts_from": {}}
    return values


def read_yaml(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def make_twin(layout: Layout, folder: Path) -> None:
    """Write the twin to `folder`, which is there whole or not at all."""
    tokenizer = build_tokenizer(
        [REASONING, ANSWER, *layout.closing],
        layout.markers,
        bos_token=layout.bos,
        eos_token=layout.eos,
        chat_template=layout.chat_template,
    )
    chain = chain_of(layout, tokenizer)
    config = getattr(transformers, layout.config_class)(
        **layout.config,
        vocab_size=layout.vocab_size,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=chain[-1],
    )
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    wire(model, chain, SEED)
    model.generation_config = GenerationConfig(eos_token_id=chain[-1], do_sample=False)
    unfinished = folder.with_name(folder.name + TEMP_SUFFIX)
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def chain_of(layout: Layout, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the twin walks, from the last one of the prompt."""
    return [
        token_id
        for text in (*layout.opening, REASONING, *layout.closing, ANSWER, layout.end_of_turn)
        for token_id in tokenizer.encode(text, add_special_tokens=False)
    ]


if __name__ == "__main__":
    main()
