"""Stage 1, identify: prove what the verifier is before anything is asked of it.

Reads    the verifier's config, tokenizer, chat template and weights; params `verifier.*`,
         `think.*`, `family.*`, `generate.thinking`, `generate.thinking_switch`,
         `extract.layer_ids`, `reassemble.draft_vocab_size`, `train.init_from`
Writes   data/verifier.json (the source of ids and sizes for all later stages),
         reports/identify.json
Run      python -m pipeline.identify; with --suggest DIR_OR_ID it writes a profile for a model
         instead (pipeline.suggest)

A local folder is hashed; of a Hugging Face model the small files of the pinned revision are
fetched and the hub's own sha256 of each weights file is taken.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx2

from pipeline.errors import ParamsError, VerifierError
from pipeline.families import check_parser, family_of, is_verified, prove, single_id
from pipeline.params import Params, Think, Verifier, load_params
from pipeline.resume import content_key, file_sha256, write_json
from pipeline.stage import run_stage
from pipeline.verifier import (
    SMALL_FILES,
    VERIFIER_PATH,
    FileIdentity,
    VerifierIdentity,
    fingerprint,
    load_tokenizer,
    small_files,
    unreadable,
)

METRICS_PATH = Path("reports/identify.json")
WEIGHTS = "*.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
)


def main() -> None:
    params = load_params()
    identity = identify(params)
    write_json(VERIFIER_PATH, identity.model_dump())
    metrics = {
        "think_start_id": identity.think_start_id,
        "think_end_id": identity.think_end_id,
        "num_weights_files": len(identity.weights),
        "weights_bytes": sum(file.size_bytes for file in identity.weights),
        "weights_fingerprint": identity.weights_fingerprint,
        "num_hidden_layers": identity.num_hidden_layers,
        "hidden_size": identity.hidden_size,
        "vocab_size": identity.vocab_size,
        "family_verified": identity.family_verified,
    }
    write_json(METRICS_PATH, metrics)
    print(
        f"{identity.model}: {identity.num_hidden_layers} layers of {identity.hidden_size}, "
        f"{identity.think_start} {identity.think_start_id}, "
        f"{identity.think_end} {identity.think_end_id}, ends a turn with {identity.end_ids}, "
        f"family {identity.family}{'' if identity.family_verified else ' (unverified)'}"
    )


def identify(params: Params) -> VerifierIdentity:
    """Everything later stages rely on, read from the verifier's own files.

    Raises:
        VerifierError: the model's files are incomplete, or too small for params.yaml.
        ParamsError: a think token is not one token, or has another id; the model does not write as
            params.yaml's family does.
    """
    verifier = params.verifier
    family = family_of(params.family)
    folder, weights = _files(verifier)
    config = _config(folder, verifier)
    check_layers(params.extract.layer_ids, config["num_hidden_layers"])
    check_draft(params, config["vocab_size"])
    tokenizer = load_tokenizer(folder, trust_remote_code=verifier.trust_remote_code)
    if not tokenizer.chat_template:
        raise VerifierError(f"{verifier.model} has no chat template, so nothing can be asked")
    start_id, end_id = think_ids(tokenizer, params.think)
    markers = prove(family, tokenizer, params)
    check_parser(params)
    ends = end_ids(folder, config, tokenizer)
    if markers.end_of_turn_id not in ends:
        raise ParamsError(
            f"family.name {params.family.name} ends a turn with {family.end_of_turn!r} "
            f"({markers.end_of_turn_id}), the verifier with one of {ends}"
        )
    return VerifierIdentity(
        model=verifier.model,
        revision=verifier.revision,
        config_sha256=file_sha256(folder / "config.json"),
        tokenizer_sha256=content_key(
            [
                (name, file_sha256(folder / name))
                for name in TOKENIZER_FILES
                if (folder / name).is_file()
            ]
        ),
        chat_template_sha256=content_key(tokenizer.chat_template),
        small_files=[
            file_identity(path) for pattern in SMALL_FILES for path in sorted(folder.glob(pattern))
        ],
        weights=weights,
        weights_fingerprint=fingerprint(weights),
        think_start=params.think.start,
        think_end=params.think.end,
        think_start_id=start_id,
        think_end_id=end_id,
        end_ids=ends,
        end_of_turn_id=markers.end_of_turn_id,
        bos_id=tokenizer.bos_token_id,
        control_ids=sorted({*marker_ids(tokenizer), *markers.control_ids} - {start_id, end_id}),
        blank_ids=[
            token_id
            for token_id in range(len(tokenizer))
            if (text := tokenizer.decode([token_id])) and not text.strip()
        ],
        num_hidden_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        family=params.family.name,
        family_verified=is_verified(params.family),
    )


def check_layers(layer_ids: list[int], num_hidden_layers: int) -> None:
    """Raises ParamsError for a layer that is not there, or that comes anyway: the last one does."""
    if layer_ids[-1] >= num_hidden_layers:
        raise ParamsError(
            f"extract.layer_ids is {layer_ids}, but the verifier has {num_hidden_layers} layers, "
            f"of which the last comes by itself; e.g. {usual_layers(num_hidden_layers)}"
        )


def check_draft(params: Params, vocab_size: int) -> None:
    """What later stages would find out when the answers are paid for. Raises ParamsError."""
    if params.reassemble.draft_vocab_size > vocab_size:
        raise ParamsError(
            f"reassemble.draft_vocab_size is {params.reassemble.draft_vocab_size}, more than the "
            f"verifier's {vocab_size}"
        )
    init_from = params.train.init_from
    if init_from and not (Path(init_from) / "config.json").is_file():
        raise ParamsError(f"train.init_from is {init_from}, where there is no draft")


def usual_layers(num_hidden_layers: int) -> list[int]:
    """An early, a middle and a late one, as speculators chooses them; empty where there are no
    three."""
    n = num_hidden_layers
    for layers in ([2, n // 2, n - 3], [1, n // 2, n - 1], [0, 1, 2]):
        if layers == sorted(set(layers)) and layers[-1] < n:
            return layers
    return []


def think_ids(tokenizer: Any, think: Think) -> tuple[int, int]:
    """The ids of the two think tokens, each proved to be exactly one token with the expected id.

    Raises:
        ParamsError: it is several tokens, or one with another id than params.yaml expects.
    """
    found = []
    for key, text, expected in (
        ("start", think.start, think.start_id),
        ("end", think.end, think.end_id),
    ):
        token_id = single_id(tokenizer, text, f"think.{key}")
        if token_id != expected:
            raise ParamsError(
                f"think.{key}_id is {expected}, but the verifier's tokenizer gives {text!r} the "
                f"id {token_id}; set think.{key}_id: {token_id} if that is the right marker"
            )
        found.append(token_id)
    if found[0] == found[1]:
        raise ParamsError(f"think.start and think.end are the same token {found[0]}")
    return found[0], found[1]


def file_identity(path: Path) -> FileIdentity:
    return FileIdentity(name=path.name, size_bytes=path.stat().st_size, sha256=file_sha256(path))


def _files(verifier: Verifier) -> tuple[Path, list[FileIdentity]]:
    """The folder with the small files, and the identity of each weights file, by name."""
    local = Path(verifier.model)
    if local.is_dir():
        weights = [file_identity(path) for path in sorted(local.glob(WEIGHTS))]
        folder = local
    elif verifier.revision is None:
        raise ParamsError(
            f"verifier.model {verifier.model!r} is no folder here; a Hugging Face id needs the "
            "full 40-digit commit in verifier.revision, the first word of "
            f"`git ls-remote https://huggingface.co/{verifier.model} HEAD`"
        )
    else:
        folder, weights = _hub_files(verifier)
    if not (folder / "config.json").is_file():
        raise VerifierError(f"{verifier.model} holds no config.json")
    if not weights:
        raise VerifierError(f"{verifier.model} holds no {WEIGHTS} (no other format is loaded)")
    return folder, weights


def _hub_files(verifier: Verifier) -> tuple[Path, list[FileIdentity]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    folder = small_files(verifier.model, verifier.revision)
    try:
        info = HfApi().model_info(verifier.model, revision=verifier.revision, files_metadata=True)
    except (HfHubHTTPError, HFValidationError, httpx2.HTTPError, OSError) as error:
        raise unreadable(verifier.model, verifier.revision, error) from error
    return folder, [
        FileIdentity(name=file.rfilename, size_bytes=file.size or 0, sha256=file.lfs.sha256)
        for file in sorted(info.siblings or [], key=lambda file: file.rfilename)
        if file.rfilename.endswith(".safetensors") and file.lfs
    ]


def _config(folder: Path, verifier: Verifier) -> dict[str, Any]:
    """config.json's text part, checked to hold the context that params.yaml asks for."""
    config = read_config(folder / "config.json")
    config = {**config, **(config.get("text_config") or {})}
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        if not isinstance(config.get(key), int):
            raise VerifierError(f"{folder / 'config.json'} holds no {key}")
    context = config["max_position_embeddings"]
    if verifier.max_model_len > context:
        raise ParamsError(
            f"verifier.max_model_len is {verifier.max_model_len}, but the model's context "
            f"is {context}"
        )
    return config


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, no UTF-8
        raise VerifierError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise VerifierError(f"{path} is no JSON object")
    return config


def marker_ids(tokenizer: Any) -> set[int]:
    """Special tokens, and all that were added to the vocabulary: many tokenizers do not mark those
    of tool calls as special. Added runs of white space are text."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(i for i, token in added if str(token).strip())}


def end_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> list[int]:
    """All ids that end a generation, from where vLLM takes them: both configs and the tokenizer."""
    generation = folder / "generation_config.json"
    top = read_config(folder / "config.json")
    named: list[Any] = [part.get("eos_token_id") for part in (config, top)]
    named.append(tokenizer.eos_token_id)
    if generation.is_file():
        named.append(read_config(generation).get("eos_token_id"))
    ids: set[int] = set()
    for value in named:
        ids.update([value] if isinstance(value, int) else value or [])
    if not ids:
        raise VerifierError(f"{folder} names no eos_token_id, so no answer could end")
    return sorted(ids)


if __name__ == "__main__":
    if sys.argv[1:]:  # --suggest DIR_OR_ID
        from pipeline import suggest

        run_stage("suggest", suggest.main)
    else:
        run_stage("identify", main)
