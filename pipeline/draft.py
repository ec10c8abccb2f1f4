"""The EAGLE-3 draft as speculators defines it: made from the verifier, saved, and loaded again."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.checkpointer import patch_config_dtype
from speculators.train.cli import create_transformer_layer_config

from pipeline.devices import attention
from pipeline.errors import DataError
from pipeline.params import Params
from pipeline.records import DRAFT, PROVENANCE, SEQUENCES
from pipeline.resume import TEMP_SUFFIX, read_json, write_json
from pipeline.verifier import SMALL_FILES, VerifierIdentity

WEIGHTS = "model.safetensors"  # of a draft
# Weights in other formats are neither fingerprinted nor loaded.
VERIFIER_FILES = [*SMALL_FILES, "*.safetensors"]


def verifier_folder(verifier: VerifierIdentity) -> str:
    """Where the verifier's files are: the folder itself, or the snapshot of the pinned revision."""
    if Path(verifier.model).is_dir():
        return verifier.model
    return snapshot_download(
        verifier.model, revision=verifier.revision, allow_patterns=VERIFIER_FILES
    )


def load_vocabulary(
    folder: Path, verifier: VerifierIdentity
) -> tuple[torch.Tensor, torch.Tensor]:  # d2t [draft vocabulary], t2d [vocabulary]
    """The mapping between draft and verifier ids: target = i + d2t[i]; t2d says which have one.

    Raises:
        DataError: the two files do not describe one mapping into the verifier's vocabulary.
    """
    try:
        d2t, t2d = np.load(folder / "d2t.npy"), np.load(folder / "t2d.npy")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no d2t.npy and t2d.npy; `dvc repro` makes them") from error
    _check_mapping(folder, d2t, t2d, verifier)
    return torch.from_numpy(d2t), torch.from_numpy(t2d).bool()


def _check_mapping(
    folder: Path, d2t: np.ndarray, t2d: np.ndarray, verifier: VerifierIdentity
) -> None:
    targets = np.arange(len(d2t)) + d2t
    if len(t2d) != verifier.vocab_size or not np.array_equal(targets, np.flatnonzero(t2d)):
        raise DataError(
            f"{folder}: d2t ({len(d2t)} ids) and t2d ({int(t2d.sum())} of {len(t2d)}) are no "
            f"mapping into the verifier's {verifier.vocab_size} ids; " + _remedy(folder)
        )
    ends = {verifier.think_end_id, verifier.end_of_turn_id}
    if lost := sorted(ends - set(targets.tolist())):
        raise DataError(
            f"{folder}: a draft of these ids can never propose {lost}, which end a phase"
        )


def new_draft(
    params: Params,
    verifier: VerifierIdentity,
    d2t: torch.Tensor,
    t2d: torch.Tensor,
    device: torch.device,
) -> Eagle3DraftModel:
    """An untrained draft: layers shaped like the verifier's, embeddings and head taken from it."""
    folder = verifier_folder(verifier)
    trust_remote_code = params.verifier.trust_remote_code
    num_layers = params.train.num_layers
    layer_config = create_transformer_layer_config(
        folder,
        num_layers=num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=verifier.max_position_embeddings,  # no layer has one
        full_attention_indices=list(range(num_layers)),
        trust_remote_code=trust_remote_code,
    )
    draft = Eagle3DraftModel.from_training_args(
        layer_config,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=len(d2t),
        norm_before_residual=True,
        target_layer_ids=params.extract.layer_ids,
        ttt_steps=params.train.ttt_steps,
        verifier_name_or_path=folder,
        draft_attn_impl=attention(device),
        trust_remote_code=trust_remote_code,
    )
    # As in params.yaml, so that no checkpoint names a folder of this machine.
    draft.config.speculators_config.verifier.name_or_path = verifier.model
    return draft


def trained_draft(
    folder: Path, params: Params, verifier: VerifierIdentity, device: torch.device
) -> Eagle3DraftModel:
    """A draft to train further, in float32. Its vocabulary mapping is kept, for the rows of its
    head are those ids, in that order.

    Raises:
        DataError: no draft, or one of another shape than params and verifier say.
    """
    if not folder.is_dir():  # a name would be looked for in the hub
        raise DataError(f"{folder} is no folder; {_remedy(folder)}")
    draft = load_draft(folder, torch.float32, device)
    check_layer_ids(folder, params.extract.layer_ids)
    layers = draft.config.transformer_layer_config
    shape = (layers.hidden_size, layers.num_hidden_layers)
    if shape != (verifier.hidden_size, params.train.num_layers):
        raise DataError(
            f"{folder}: hidden size {shape[0]} and {shape[1]} layers; the verifier has "
            f"{verifier.hidden_size}, train.num_layers is {params.train.num_layers}; "
            + _remedy(folder)
        )
    if draft.d2t is None:
        raise DataError(
            f"{folder} proposes all of the verifier's tokens: it has no mapping to keep"
        )
    _check_mapping(folder, draft.d2t.cpu().numpy(), draft.t2d.cpu().numpy(), verifier)
    draft.config.speculators_config.verifier.name_or_path = verifier_folder(verifier)
    draft.load_verifier_weights()
    draft.config.speculators_config.verifier.name_or_path = verifier.model
    [proposal] = draft.config.speculators_config.proposal_methods
    proposal.speculative_tokens = params.train.ttt_steps
    return draft


def _remedy(folder: Path) -> str:
    if folder == DRAFT:
        return "`dvc repro` makes it anew"
    if folder == SEQUENCES:
        return "`dvc repro -f reassemble` makes it anew"
    return "name another train.init_from"


def save_draft(
    draft: Eagle3DraftModel,
    weights: dict[str, torch.Tensor],
    folder: Path,
    dtype: torch.dtype,
    provenance: dict[str, Any],
) -> None:
    """A speculators checkpoint in `folder`, which is there whole or not at all; beside it, in
    provenance.json, what it was trained on."""
    unfinished = folder.with_name(f".{folder.name}{TEMP_SUFFIX}")
    shutil.rmtree(unfinished, ignore_errors=True)
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    draft.save_pretrained(unfinished, state_dict=state)
    patch_config_dtype(unfinished / "config.json", dtype)
    write_json(unfinished / PROVENANCE, provenance)
    assert draft_layer_ids(unfinished) == draft.target_layer_ids
    for file in unfinished.iterdir():
        file.chmod(0o644)  # safetensors makes files for the owner alone
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def draft_layer_ids(folder: Path) -> list[int]:
    """The layers whose states vLLM will feed to the draft."""
    layer_ids: list[int] = read_json(folder / "config.json")["eagle_aux_hidden_state_layer_ids"]
    return layer_ids


def check_layer_ids(folder: Path, layer_ids: list[int]) -> None:
    """Raises DataError when a draft asks for other layers than it is trained or judged on."""
    found = draft_layer_ids(folder)
    if found != layer_ids:
        raise DataError(
            f"{folder}/config.json names layers {found}, but extract.layer_ids is {layer_ids}; "
            + _remedy(folder)
        )


def verifier_ids(draft: Eagle3DraftModel, draft_ids: torch.Tensor) -> torch.Tensor:
    """The verifier's ids of ids of the draft."""
    return draft_ids if draft.d2t is None else draft_ids + draft.d2t[draft_ids]


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device) -> Eagle3DraftModel:
    """For evaluation, in the dtype it is served in.

    Not by `from_pretrained`, which looks for the verifier once more: a checkpoint has all it needs.

    Raises:
        DataError: no checkpoint of a draft.
    """
    try:
        config = Eagle3DraftModel.config_class.from_pretrained(folder)
        state = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError, NotImplementedError) as error:
        raise DataError(f"{folder} is no draft ({error}); {_remedy(folder)}") from error
    config.transformer_layer_config._attn_implementation = attention(device)
    draft = Eagle3DraftModel(config)
    missing, unexpected = draft.load_state_dict(state, strict=False)
    if unexpected or not set(missing) <= set(Eagle3DraftModel._keys_to_ignore_on_save):
        raise DataError(
            f"{folder} is another kind of draft: {missing or unexpected}; {_remedy(folder)}"
        )
    return draft.to(device=device, dtype=dtype).eval()
