"""What a twin has from the model it stands for: markers at their real ids, chat template, shape.

The ids are those of the published tokenizers; the templates are in our own words and render the
prompts that the published ones render, without tools and images (tests/test_families.py compares
those of Kimi-K2.5 and Qwen3 with another package's).
"""

from dataclasses import dataclass, replace
from typing import Any

KIMI_MARKERS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|start_header_id|>": 163590,
    "<|end_header_id|>": 163591,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<|media_begin|>": 163602,
    "<|media_content|>": 163603,
    "<|media_end|>": 163604,
    "<|media_pad|>": 163605,
    "<think>": 163606,
    "</think>": 163607,
}
QWEN3_MARKERS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}
DEEPSEEK_MARKERS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<think>": 128798,
    "</think>": 128799,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
}

KIMI_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
KIMI_TEMPLATE = (
    "{% if messages[0].role != 'system' %}"
    f"<|im_system|>system<|im_middle|>{KIMI_SYSTEM}<|im_end|>{{% endif %}}"
    "{% for message in messages %}"
    "<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>"
    "{% if message.role == 'assistant' %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|><think>"
    "{% if thinking is defined and not thinking %}</think>{% endif %}{% endif %}"
)
QWEN3_TEMPLATE = (
    r"{% for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    r"{% if enable_thinking is defined and not enable_thinking %}"
    r"{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK_R1_TEMPLATE = (
    r"{{ bos_token }}{% for message in messages %}"
    r"{% if message.role == 'system' %}{{ message.content }}"
    r"{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    r"{% else %}{{ '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}{% endif %}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

# Small enough for a CPU. Of the attention of DeepSeek-V3 two sizes are its own: vLLM's kernels know
# no others.
HIDDEN_SIZE = 256
NUM_LAYERS = 5
SMALL = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
DEEPSEEK_V3 = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
QWEN3 = {**SMALL, "num_key_value_heads": 2, "head_dim": 64}
QWEN3_MOE = {**QWEN3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Layout:
    """One twin. `config_class` is transformers'."""

    config_class: str
    config: dict[str, Any]
    vocab_size: int
    markers: dict[str, int]
    chat_template: str
    bos: str | None
    eos: str  # what the tokenizer calls so
    end_of_turn: str
    # Around the reasoning. The first of `opening` is the end of the prompt; newlines as the family
    # writes them, but for one behind <think>, where there is one in the prompt already.
    opening: tuple[str, ...]
    closing: tuple[str, ...]


QWEN3_LAYOUT = Layout(
    config_class="Qwen3Config",
    config=QWEN3,
    vocab_size=151_936,
    markers=QWEN3_MARKERS,
    chat_template=QWEN3_TEMPLATE,
    bos=None,
    eos="<|im_end|>",
    end_of_turn="<|im_end|>",
    opening=("\n", "<think>"),
    closing=(".\n", "</think>", "\n\n"),
)
LAYOUTS = {
    "kimi_k2_5": Layout(
        config_class="DeepseekV3Config",
        config=DEEPSEEK_V3,
        vocab_size=163_840,
        markers=KIMI_MARKERS,
        chat_template=KIMI_TEMPLATE,
        bos="[BOS]",
        eos="[EOS]",
        end_of_turn="<|im_end|>",
        opening=("<think>",),
        closing=(".", "</think>"),
    ),
    "qwen3_8b": QWEN3_LAYOUT,
    "qwen3_30b_a3b": replace(QWEN3_LAYOUT, config_class="Qwen3MoeConfig", config=QWEN3_MOE),
    "deepseek_r1": Layout(
        config_class="DeepseekV3Config",
        config=DEEPSEEK_V3,
        vocab_size=129_280,
        markers=DEEPSEEK_MARKERS,
        chat_template=DEEPSEEK_R1_TEMPLATE,
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        end_of_turn="<｜end▁of▁sentence｜>",
        opening=("\n",),
        closing=(".\n", "</think>", "\n\n"),
    ),
}
