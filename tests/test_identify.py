"""identify proves the verifier; load_verifier notices that it has changed."""

import hashlib
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from pipeline.errors import ParamsError, PipelineError, VerifierError
from pipeline.verifier import load_verifier
from tests.conftest import ROOT, WEIGHTS, Project
from tests.fake_tokenizer import FAMILY
from tests.real_tokenizers import folder as real_folder

# The scratch tokenizer: one token a byte, then six added ones.
END, USER, ASSISTANT, THINK, THINK_END, SYSTEM = 256, 257, 258, 259, 260, 261
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "eos_token_id": END,
}


def byte_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(byte_tokens())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|end|>", "<|user|>", "<|assistant|>")]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False) for text in ("<think>", "</think>", "<|system|>")]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def model(project: Project, tokenizer_folder: Path) -> Path:
    """models/verifier of the scratch project, complete and as params.yaml says."""
    folder = project.root / "models/verifier"
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    project.set(**{"think.start_id": THINK, "think.end_id": THINK_END})
    return folder


def identify() -> dict:
    from pipeline import identify

    identify.main()
    return json.loads(Path("data/verifier.json").read_bytes())


def refused(kind: type[PipelineError]) -> str:
    with pytest.raises(kind) as caught:
        identify()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, **changes: object) -> None:
    values = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_it_finds_ids_sizes_and_fingerprints(model):
    found = identify()
    assert (found["think_start_id"], found["think_end_id"]) == (259, 260)
    assert found["end_ids"] == [256]
    assert found["end_of_turn_id"] == 256
    assert found["family"] == "custom"
    assert found["num_hidden_layers"] == 4
    assert found["hidden_size"] == 32
    assert found["vocab_size"] == 300
    assert found["max_position_embeddings"] == 2048
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    weights = {"name": "model.safetensors", "size_bytes": len(WEIGHTS), "sha256": sha256}
    assert found["weights"] == [weights]
    config = (model / "config.json").read_bytes()
    assert found["config_sha256"] == hashlib.sha256(config).hexdigest()


def test_what_it_writes_is_what_later_stages_load(model):
    identify()
    assert load_verifier().think_end_id == 260
    report = json.loads(Path("reports/identify.json").read_bytes())
    assert report["think_start_id"] == 259
    assert report["weights_bytes"] == len(WEIGHTS)


def test_two_runs_write_the_same_bytes(model):
    identify()
    first = Path("data/verifier.json").read_bytes()
    identify()
    assert Path("data/verifier.json").read_bytes() == first


def test_white_space_tokens_are_blank_and_others_are_not(model):
    tokens = byte_tokens()
    blank = set(identify()["blank_ids"])
    # U+0109, U+010A, U+010D and U+0120 stand for tab, newline, return and space in byte-level BPE.
    assert {tokens.index(chr(0x100 + code)) for code in (9, 10, 13, 32)} <= blank
    assert blank.isdisjoint({tokens.index("a"), tokens.index("."), THINK, THINK_END})


def test_special_tokens_and_the_familys_markers_are_control_tokens_and_think_tokens_are_not(
    model, project
):
    """Also added ones that nobody marks as special, as those of tool calls are (261 here)."""
    assert identify()["control_ids"] == [256, 257, 258, 261]
    project.set(**{"family.custom": FAMILY | {"control_tokens": []}})
    assert identify()["control_ids"] == [256, 257, 258, 261]


def test_text_is_no_marker(model, project):
    project.set(**{"family.custom": FAMILY | {"control_tokens": ["a"]}})
    assert "'a' is text of the verifier, no marker" in refused(ParamsError)


def test_code_that_comes_with_a_tokenizer_is_part_of_the_verifier(model):
    """B14: it renders and tokenizes."""
    before = identify()["small_files"]
    (model / "tokenization_own.py").write_text("# code")
    names = {file["name"] for file in identify()["small_files"]} - {f["name"] for f in before}
    assert names == {"tokenization_own.py"}


def test_a_think_marker_of_several_tokens_is_refused(model, project):
    """As Kimi-Dev's: three ordinary ids."""
    project.set(**{"think.start": "◁think▷"})
    message = refused(ParamsError)
    assert "think.start" in message
    assert "'◁think▷'" in message
    assert "no single token" in message


def test_a_marker_with_a_newline_glued_to_it_is_refused(model, project):
    project.set(**{"think.end": "</think>\n"})
    assert "think.end" in refused(ParamsError)


def test_an_unexpected_id_is_refused_and_both_ids_are_named(model, project):
    """As for Kimi-K2.5, where an old table says 163609."""
    project.set(**{"think.end_id": 163609})
    message = refused(ParamsError)
    assert "think.end_id is 163609" in message
    assert "260" in message


def test_one_token_for_both_ends_is_refused(model, project):
    project.set(**{"think.end": "<think>", "think.end_id": 259})
    assert "same token 259" in refused(ParamsError)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (256, None, [256]),
        (256, 257, [256, 257]),
        ([257, 258], [258, 256], [256, 257, 258]),
        (None, [257], [256, 257]),  # 256 is the tokenizer's
    ],
)
def test_end_ids_come_from_both_configs_and_the_tokenizer(
    model, in_config, in_generation, expected
):
    edit(model / "config.json", eos_token_id=in_config)
    if in_generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    assert identify()["end_ids"] == expected


def test_a_multimodal_config_is_read_from_its_text_part(model):
    """As Kimi-K2.5's; eos may stand at the top."""
    text = {k: v for k, v in CONFIG.items() if k != "eos_token_id"}
    (model / "config.json").write_text(json.dumps({"text_config": text, "eos_token_id": 258}))
    found = identify()
    assert found["num_hidden_layers"] == 4
    assert found["end_ids"] == [256, 258]


def test_the_weights_fingerprint_changes_with_one_byte(model):
    before = identify()
    (model / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"!")
    after = identify()
    assert before["weights_fingerprint"] != after["weights_fingerprint"]
    assert before["tokenizer_sha256"] == after["tokenizer_sha256"]


def test_the_weights_fingerprint_changes_with_a_second_file(model):
    before = identify()
    (model / "model-2.safetensors").write_bytes(b"")
    assert before["weights_fingerprint"] != identify()["weights_fingerprint"]


def test_the_template_hash_changes_with_the_template_alone(model):
    before = identify()
    (model / "chat_template.jinja").write_text(TEMPLATE + " ")
    after = identify()
    assert before["chat_template_sha256"] != after["chat_template_sha256"]
    assert before["tokenizer_sha256"] == after["tokenizer_sha256"]
    assert before["weights_fingerprint"] == after["weights_fingerprint"]


def test_a_model_that_is_no_folder_needs_a_revision(project):
    """Without one, the hub's newest files would be taken."""
    project.set(**{"verifier.model": "moonshotai/Kimi-K2.5"})
    message = refused(ParamsError)
    assert "moonshotai/Kimi-K2.5" in message
    assert "verifier.revision" in message


def test_a_missing_chat_template_is_refused(model):
    (model / "chat_template.jinja").unlink()
    assert "no chat template" in refused(VerifierError)


def test_a_folder_without_weights_is_refused(model):
    (model / "model.safetensors").rename(model / "model.bin")
    assert "*.safetensors" in refused(VerifierError)


def test_a_folder_without_config_is_refused(model):
    (model / "config.json").unlink()
    assert "config.json" in refused(VerifierError)


def test_a_broken_config_is_refused(model):
    (model / "config.json").write_text("{")
    assert "config.json" in refused(VerifierError)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"]
)
def test_an_incomplete_config_is_refused_and_the_key_is_named(model, key):
    edit(model / "config.json", **{key: None})
    assert key in refused(VerifierError)


def test_a_context_longer_than_the_models_is_refused(model, project):
    project.set(**{"verifier.max_model_len": 4096})
    message = refused(ParamsError)
    assert "4096" in message
    assert "2048" in message


# the family


def become(project: Project, name: str, tokenizer: Path, start_id: int, end_id: int) -> None:
    """models/verifier with another tokenizer, and params.yaml of its family."""
    folder = project.root / "models/verifier"
    shutil.rmtree(folder)
    folder.mkdir()
    for file in tokenizer.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    project.set(
        **{
            "think.start_id": start_id,
            "think.end_id": end_id,
            "family.name": name,
            "family.custom": None,
        }
    )


def kimi(project: Project) -> Path:
    """models/verifier as a tiny Kimi; its answers end with another token than its texts."""
    become(project, "kimi_k2_5", real_folder("kimi_k2_5"), 163606, 163607)
    config = project.root / "models/verifier/config.json"
    config.write_text(json.dumps(CONFIG | {"eos_token_id": 163586, "vocab_size": 163840}))
    project.set(**{"generate.thinking_switch": "thinking", "verifier.reasoning_parser": "kimi_k2"})
    return config


def test_a_family_without_a_real_tokenizer_is_said_to_be_unverified(project, capsys):
    """Its ids are right all the same, and come from the tokenizer."""
    kimi(project)
    found = identify()
    assert "family kimi_k2_5 (unverified)" in capsys.readouterr().out
    assert found["family"] == "kimi_k2_5"
    assert found["family_verified"] is False
    assert found["end_of_turn_id"] == 163586
    assert found["end_ids"] == [163585, 163586]
    markers = {163584, 163585, 163586, 163587, 163588, 163594, 163601}
    assert markers <= set(found["control_ids"])
    assert project.report("identify")["family_verified"] is False
    assert load_verifier().family == "kimi_k2_5"


def test_the_demo_verifiers_family_is_verified(project, capsys):
    become(project, "qwen3", ROOT / "models/verifier", 1022, 1023)
    found = identify()
    line = capsys.readouterr().out
    assert "family qwen3" in line
    assert "unverified" not in line
    assert found["family_verified"] is True
    assert found["end_of_turn_id"] == 1021
    assert found["control_ids"] == [1019, 1020, 1021]
    assert project.report("identify")["family_verified"] is True


def test_custom_is_never_verified(model, project, capsys):
    assert identify()["family_verified"] is False
    assert "family custom (unverified)" in capsys.readouterr().out


def test_a_family_that_ends_a_turn_otherwise_is_refused(project):
    config = kimi(project)
    config.write_text(json.dumps(CONFIG | {"eos_token_id": 163593, "vocab_size": 163840}))
    message = refused(ParamsError)
    assert "family.name kimi_k2_5 ends a turn with '<|im_end|>' (163586)" in message
    assert "[163585, 163593]" in message


def test_a_switch_that_the_template_ignores_is_refused_before_a_server_starts(
    model, project, monkeypatch
):
    """Kimi's, sent to a model with Qwen's: it would think, or not, whatever is asked."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("subprocess.Popen", start)
    project.set(**{"generate.thinking_switch": "thinking"})
    message = refused(ParamsError)
    assert "generate.thinking_switch" in message
    assert "does not know 'thinking'" in message


def test_a_missing_marker_of_the_family_is_refused(model, project):
    project.set(**{"family.name": "qwen3", "family.custom": None})
    message = refused(ParamsError)
    assert "family.name qwen3: '<|im_end|>' is no single token" in message


@pytest.mark.parametrize("name", ["gpt_oss", "kimi"])
def test_a_family_that_is_not_in_the_table_is_refused_before_the_model_is_read(project, name):
    (project.root / "models/verifier/tokenizer.json").unlink()
    project.set(**{"family.name": name, "family.custom": None})
    assert f"family.name {name}" in refused(ParamsError).replace("'", "")


# load_verifier


def age(path: Path, seconds: int) -> None:
    now = time.time()
    os.utime(path, (now + seconds, now + seconds))


def test_an_untouched_verifier_loads(project):
    assert load_verifier().weights_fingerprint == hashlib.sha256(WEIGHTS).hexdigest()


def test_a_weights_file_of_another_size_is_refused(project):
    weights = Path("models/verifier/model.safetensors")
    weights.write_bytes(WEIGHTS + b"!")
    age(weights, -1000)
    with pytest.raises(VerifierError, match=r"verifier changed.*dvc repro -f identify"):
        load_verifier()


def test_a_missing_weights_file_is_refused(project):
    Path("models/verifier/model.safetensors").unlink()
    with pytest.raises(VerifierError, match="verifier changed"):
        load_verifier()


def test_a_touched_file_with_other_bytes_is_refused(project):
    weights = Path("models/verifier/model.safetensors")
    weights.write_bytes(WEIGHTS[:-1] + b"!")
    age(weights, 1000)
    with pytest.raises(VerifierError, match="verifier changed"):
        load_verifier()


def test_a_touched_file_with_the_same_bytes_is_accepted(project):
    age(Path("models/verifier/model.safetensors"), 1000)
    assert load_verifier().think_end_id == 201


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": 5}'])
def test_a_missing_or_foreign_verifier_json_is_one_clear_line(project, content):
    path = Path("data/verifier.json")
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(PipelineError) as caught:
        load_verifier()
    assert "data/verifier.json" in str(caught.value)
    assert "\n" not in str(caught.value)
