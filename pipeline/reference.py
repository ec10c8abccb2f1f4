"""What the parity gate compares a server with: the verifier's own files, read without vLLM.

load_head(folder, …)       the final norm and lm_head, as training reads them
references(folder, …)      transformers' states of every layer, where the model fits in memory
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from loguru import logger
from speculators.models.utils import get_verifier_config
from speculators.utils.loading import load_model_layers

from pipeline.errors import VerifierError
from pipeline.findings import Head, Reference
from pipeline.params import Params
from pipeline.resume import read_json
from pipeline.verifier import VerifierIdentity

MAX_REFERENCE_TOKENS = 512  # transformers may be slow here, and needs no more
ROOM = 4 << 30  # bytes to leave free beside transformers' model


def load_head(folder: str, *, trust_remote_code: bool) -> Head:
    """The final norm's weight and lm_head, and nothing else of the verifier.

    Raises:
        VerifierError: one of them is not there, or the norm is none that training knows.
    """
    logger.disable("speculators")  # it tells each file that it looks at
    names = ("model.norm.weight", "lm_head.weight")
    weights = load_model_layers(list(names), folder)
    norm, lm_head = (weights.get(name) for name in names)
    if lm_head is None:  # tied
        tied = load_model_layers(["embed_tokens.weight"], folder)
        lm_head = tied.get("embed_tokens.weight")
    eps = getattr(
        get_verifier_config(folder, trust_remote_code=trust_remote_code), "rms_norm_eps", None
    )
    if norm is None or norm.dim() != 1 or lm_head is None or eps is None:
        raise VerifierError(
            f"{folder}: no final RMSNorm (model.norm.weight, rms_norm_eps) and lm_head (or "
            "embed_tokens) among the weights; training needs them too"
        )
    return Head(norm, float(eps), lm_head)


def why_no_reference(params: Params, verifier: VerifierIdentity, folder: str) -> str | None:
    """Why the states cannot be compared with transformers'; None: they can."""
    config = read_json(Path(folder) / "config.json")
    if params.verifier.quantization or "quantization_config" in {
        *config,
        *config.get("text_config", {}),
    }:
        return "the server's weights are quantized"
    need = 2 * sum(file.size_bytes for file in verifier.weights) + ROOM
    if need > available_bytes():
        return f"it needs {need / 1e9:,.0f} GB of memory, {available_bytes() / 1e9:,.0f} are free"
    return None


def available_bytes() -> int:
    """Memory that is free for this process, also within a container's limit."""
    meminfo = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo)
    assert found
    free = int(found[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(used.read_text()))
    return free


@torch.inference_mode()
def references(
    folder: str, dtype: str, sequences: Sequence[list[int]], *, trust_remote_code: bool
) -> list[Reference]:
    """transformers' states of every layer, of each sequence by itself."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        local_files_only=True,
    ).eval()
    before_norm: list[torch.Tensor] = []
    final_norm(model).register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    found = []
    for input_ids in sequences:
        ids = torch.tensor([input_ids[:MAX_REFERENCE_TOKENS]])  # [1, R]
        *layers, normed = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        layers = [*(layer[0] for layer in layers), before_norm.pop()[0]]
        found.append(Reference(torch.stack(layers, dim=1), normed[0]))
    return found


def final_norm(model: torch.nn.Module) -> torch.nn.Module:
    """The norm that stands beside the list of decoder layers, whatever the two are called."""
    for module in model.modules():
        children = list(module.children())
        if any(isinstance(c, torch.nn.ModuleList) and len(c) > 0 for c in children):
            norms = [c for c in children if "norm" in type(c).__name__.lower()]
            if norms:
                return norms[-1]
    raise ValueError(f"{type(model).__name__} has no final norm beside its layers")
