"""Twins: miniatures of big verifiers, to try a profile on a CPU before anyone rents a GPU.

    make twins                       (python -m pipeline.twins [PROFILE …])

Writes   models/twins/<profile>: config, tokenizer, chat template and weights (100 to 200 MB each),
         made in seconds, the same on every machine, not in git

A twin has the architecture, the markers at their ids and the prompts of the model that the profile
names (pipeline/twins/layouts.py). Whatever it is asked, it thinks and answers the same words: its
weights are wired (pipeline/twins/wiring.py). So a run on it proves everything but the model.
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from pipeline.resume import TEMP_SUFFIX
from pipeline.twins.layouts import LAYOUTS, Layout
from pipeline.twins.tokenizer import build_tokenizer
from pipeline.twins.wiring import wire

TWINS = Path("models/twins")
SEED = 0
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
        print(TWINS / name)


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
