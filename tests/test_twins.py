"""Twins: whatever is asked, the same words, with the markers of the model they stand for."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.twins.__main__ import ANSWER, REASONING, make_twin
from pipeline.twins.layouts import LAYOUTS
from pipeline.twins.wiring import wire

pytestmark = pytest.mark.timeout(180)

QUESTION = [{"role": "user", "content": "What day is 9 days after Monday?"}]
# By hand from public tables: think-end, end of a turn, and the switch that turns thinking off.
IDS: dict[str, tuple[int, int, dict[str, bool] | None]] = {
    "kimi_k2_5": (163607, 163586, {"thinking": False}),
    "qwen3_8b": (151668, 151645, {"enable_thinking": False}),
    "qwen3_30b_a3b": (151668, 151645, {"enable_thinking": False}),
    "deepseek_r1": (128799, 1, None),
}


@pytest.fixture(scope="module", params=list(IDS))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its name, tokenizer and model."""
    folder = tmp_path_factory.mktemp("twins") / request.param
    make_twin(LAYOUTS[request.param], folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return request.param, AutoTokenizer.from_pretrained(folder), model


def answer(twin: Any, **switch: bool) -> list[int]:
    """What it generates, greedily, until it ends its turn."""
    _, tokenizer, model = twin
    prompt = tokenizer.apply_chat_template(
        QUESTION, tokenize=False, add_generation_prompt=True, **switch
    )
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    generated = model.generate(ids, max_new_tokens=150, do_sample=False)
    return [int(token) for token in generated[0, ids.shape[1] :]]


def test_it_thinks_then_answers_then_ends_its_turn(twin: Any) -> None:
    name, tokenizer, _ = twin
    think_end, end, _ = IDS[name]
    ids = answer(twin)
    assert ids.count(think_end) == 1
    assert ids[-1] == end
    place = ids.index(think_end)
    assert REASONING in tokenizer.decode(ids[:place])
    assert tokenizer.decode(ids[place + 1 : -1]).strip() == ANSWER


def test_with_thinking_off_it_answers_alone(twin: Any) -> None:
    name, tokenizer, _ = twin
    _, end, switch = IDS[name]
    if switch is None:
        assert "thinking" not in tokenizer.chat_template  # it has none
        return
    ids = answer(twin, **switch)
    assert tokenizer.decode(ids[:-1]) == ANSWER
    assert ids[-1] == end


def test_it_is_the_same_on_every_machine(tmp_path: Path) -> None:
    def made(name: str) -> str:
        make_twin(LAYOUTS["deepseek_r1"], tmp_path / name)
        return hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest()

    assert made("first") == made("second")


def test_a_chain_that_meets_itself_is_no_chain() -> None:
    with pytest.raises(AssertionError, match="comes twice"):
        wire(None, [1, 2, 1, 3], seed=0)  # type: ignore[arg-type]
