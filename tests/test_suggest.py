"""`python -m pipeline.identify --suggest`: what it writes for twins and real tokenizers, by hand
from public tables, and what it refuses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml

from pipeline.errors import ParamsError, PipelineError, VerifierError
from pipeline.families import FAMILIES
from pipeline.identify import identify
from pipeline.params import Params, load_params
from pipeline.suggest import MODEL_TYPES, Think, main, read_model, slug_of
from pipeline.twins.__main__ import make_twin
from pipeline.twins.layouts import LAYOUTS
from tests.conftest import ROOT, WEIGHTS
from tests.real_tokenizers import OWN_CODE
from tests.real_tokenizers import folder as real_folder

pytestmark = pytest.mark.timeout(180)  # the vocabularies take some seconds

CONFIG = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
MARKERS = ("<|end|>", "<|user|>", "<|assistant|>", "<think>", "</think>")  # from id 128 on


class Expected(NamedTuple):
    think_ids: tuple[int, int]
    family: str
    sure: bool  # of the family
    prefilled: bool
    switch: str | None
    parser: str
    end_of_turn_id: int


TWINS = {
    "kimi_k2_5": Expected((163606, 163607), "kimi_k2_5", True, True, "thinking", "kimi_k2", 163586),
    "qwen3_8b": Expected(
        (151667, 151668), "qwen3", True, False, "enable_thinking", "qwen3", 151645
    ),
    "qwen3_30b_a3b": Expected(
        (151667, 151668), "qwen3", True, False, "enable_thinking", "qwen3", 151645
    ),
    "deepseek_r1": Expected((128798, 128799), "deepseek_r1", True, True, None, "deepseek_r1", 1),
}
REAL = {
    ("qwen3", "qwen3"): TWINS["qwen3_8b"],
    ("qwen3", "smollm3"): TWINS["qwen3_8b"]._replace(sure=False),
    ("qwen3_thinking", "qwen3_moe"): TWINS["qwen3_8b"]._replace(
        family="qwen3_thinking", prefilled=True, switch=None
    ),
    ("qwen3_5", "qwen3_5_moe"): Expected(
        (248068, 248069), "qwen3_5", True, True, "enable_thinking", "qwen3", 248046
    ),
    ("deepseek_v4", "deepseek_v4"): Expected(
        (128821, 128822), "deepseek_v4", True, True, "thinking", "deepseek_v4", 1
    ),
    ("deepseek_v4", "deepseek_v3"): Expected(
        (128821, 128822), "deepseek_v3_1", True, True, "thinking", "deepseek_v3", 1
    ),
    ("kimi_k2_5", "kimi_k2"): TWINS["kimi_k2_5"],
    (OWN_CODE, "kimi_k25"): TWINS["kimi_k2_5"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the shipped params.yaml and no profiles."""
    from transformers import dynamic_module_utils

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins")
    for name, layout in LAYOUTS.items():
        make_twin(layout, folder / name)
    return folder


def suggest(model: Path | str, *more: str) -> tuple[Params, str]:
    """The params of the profile that is written, and its text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["identify", "--suggest", str(model), *more])
        main()
    path = Path("profiles") / f"{slug_of(str(model))}.yaml"
    return load_params(path), path.read_text(encoding="utf-8")


def refused(kind: type[PipelineError], model: Path | str, *more: str) -> str:
    with pytest.raises(kind) as caught:
        suggest(model, *more)
    assert "\n" not in str(caught.value)
    assert not list(Path().glob("profiles/*"))
    return str(caught.value)


def unsure(text: str) -> dict[str, str]:
    """Key and reason of each line that is marked."""
    marked = (row.split("  # unsure: ") for row in text.splitlines() if "# unsure: " in row)
    return {row.strip().partition(":")[0]: why for row, why in marked}


def model_of(tokenizer: Path, folder: Path, **config: Any) -> Path:
    """A model folder that is complete but for real weights."""
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def small_model(
    folder: Path, template: str = TEMPLATE, markers: tuple[str, ...] = MARKERS, **config: Any
) -> Path:
    """A model of no known family, with a character a token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="\x00"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in markers])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template
    ).save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"model_type": "own", "vocab_size": 300} | config)
    )
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def check(expected: Expected, params: Params, text: str) -> None:
    assert (params.think.start, params.think.end) == ("<think>", "</think>")
    assert (params.think.start_id, params.think.end_id) == expected.think_ids
    assert (params.family.name, params.family.custom) == (expected.family, None)
    assert params.generate.thinking_switch == expected.switch
    assert params.benchmark.both_thinking_modes is (expected.switch is not None)
    assert params.verifier.reasoning_parser == expected.parser
    assert ("name" not in unsure(text)) is expected.sure
    assert not {"start", "end", "start_id", "end_id", "thinking_switch"} & unsure(text).keys()
    model = read_model(params.verifier.model, trust_remote_code=params.verifier.trust_remote_code)
    assert model.prefills(Think("<think>", "</think>")) is expected.prefilled
    identity = identify(params)
    assert identity.end_of_turn_id == expected.end_of_turn_id
    assert (identity.think_start_id, identity.think_end_id) == expected.think_ids


@pytest.mark.parametrize("name", TWINS)
def test_a_twin(name: str, twins: Path) -> None:
    params, text = suggest(twins / name)
    check(TWINS[name], params, text)
    assert params.verifier.model == str(twins / name)
    assert (params.verifier.dtype, params.extract.dtype) == ("bfloat16", "bfloat16")
    assert params.verifier.max_model_len == 16384
    assert params.extract.layer_ids == [1, 2, 4]
    assert (params.plan.hidden_size, params.plan.num_hidden_layers) == (256, 5)
    assert params.plan.weights_gb == pytest.approx(
        (twins / name / "model.safetensors").stat().st_size / 1e9, rel=0.01
    )
    assert set(unsure(text)) == {"server_args", "server_env", "max_tokens", "temperature"}


@pytest.mark.parametrize(("tokenizer", "model_type"), REAL)
def test_a_real_tokenizer(tokenizer: str, model_type: str, here: Path) -> None:
    expected = REAL[tokenizer, model_type]
    model = model_of(
        real_folder(tokenizer),
        here / "m",
        model_type=model_type,
        vocab_size=300_000,
        eos_token_id=expected.end_of_turn_id,
    )
    settings = model / "tokenizer_config.json"
    # Null as in Qwen's own file: transformers' class for 3.5 has <|endoftext|> there.
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": None}))
    own_code = tokenizer == OWN_CODE
    if own_code:  # identify decodes all ids up to the largest, and the made vocabulary has holes
        code = model / "tokenization_kimi_shaped.py"
        text = code.read_text().replace("self.tokens[index]", 'self.tokens.get(index, "")')
        code.write_text(text)
    params, text = suggest(model, *["--trust-remote-code"] * own_code)
    check(expected, params, text)
    assert params.verifier.trust_remote_code is own_code
    assert params.verifier.max_model_len == 8192
    assert params.extract.layer_ids == [2, 18, 33]


def test_the_shipped_verifier(here: Path) -> None:
    model = shutil.copytree(ROOT / "models/verifier", here / "m")
    params, _ = suggest(model)
    assert (params.think.start_id, params.think.end_id) == (1022, 1023)
    assert (params.family.name, params.verifier.reasoning_parser) == ("qwen3", "qwen3")
    assert params.verifier.dtype == "bfloat16"  # as stored; the shipped run serves float32
    assert params.verifier.max_model_len == 2048
    assert params.extract.layer_ids == [1, 2, 3]
    identify(params)


def test_what_is_not_about_the_model_stays_and_what_was_measured_of_another_goes(
    here: Path,
) -> None:
    params, _ = suggest(small_model(here / "m"))
    present = load_params()
    for section in ("prompts", "evaluate", "demo_verifier", "train"):
        assert getattr(params, section) == getattr(present, section)
    assert params.generate.gate == present.generate.gate
    assert params.plan.num_questions == 3424
    assert params.plan.generated_tokens is None
    assert params.plan.train_tokens_per_s is None
    assert params.plan.facts_from["hidden_size"] == f"{here / 'm'}: config.json"


def test_a_model_of_no_known_family_is_described(here: Path) -> None:
    params, text = suggest(small_model(here / "My-Model.v2"))
    assert (here / "profiles/my_model_v2.yaml").is_file()
    assert params.family.name == "custom"
    custom = params.family.custom
    assert custom
    assert custom.prefilled is False
    assert custom.end_of_turn == "<|end|>"
    assert custom.role_tokens == ["<|user|>", "<|assistant|>"]
    assert custom.control_tokens == []
    newlines = ("before_think_start", "after_think_start", "before_think_end", "after_think_end")
    assert {getattr(custom, key) for key in newlines} == {""}
    assert {*newlines, "reasoning_parser"} <= unsure(text).keys()
    assert params.verifier.reasoning_parser == "deepseek_r1"
    assert params.generate.thinking_switch == "enable_thinking"
    assert identify(params).end_of_turn_id == 128


def test_a_custom_one_that_opens_the_block_and_the_next_turn_itself(here: Path) -> None:
    """As GLM: the next user's token ends an answer."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|><think>"
    )
    params, _ = suggest(small_model(here / "m", template, eos_token_id=129))
    custom = params.family.custom
    assert custom
    assert (custom.prefilled, custom.end_of_turn) == (True, "<|user|>")
    assert custom.role_tokens == ["<|assistant|>"]
    assert params.generate.thinking_switch is None
    assert identify(params).end_of_turn_id == 129


def test_a_custom_end_that_no_rendered_answer_shows_is_unsure(here: Path) -> None:
    template = TEMPLATE.replace("<|end|>", "")
    params, text = suggest(small_model(here / "m", template))
    assert params.family.custom
    assert params.family.custom.end_of_turn == "<|end|>"
    assert "end_of_turn" in unsure(text)


def test_two_switches_that_work_are_unsure(here: Path) -> None:
    template = TEMPLATE + "{% if thinking %} {% endif %}"
    params, text = suggest(small_model(here / "m", template))
    assert params.generate.thinking_switch == "thinking"
    assert "enable_thinking" in unsure(text)["thinking_switch"]


def test_of_several_pairs_the_one_in_the_chat_template_is_taken(here: Path) -> None:
    markers = ("<|end|>", "<|user|>", "<|assistant|>", "<reason>", "</reason>")
    markers = (*markers, "[THINK]", "[/THINK]", "<|start_think|>", "<|end_think|>")
    pairs = (("<reason>", "</reason>"), ("[THINK]", "[/THINK]"))
    for number, (start, end) in enumerate((*pairs, ("<|start_think|>", "<|end_think|>"))):
        template = TEMPLATE.replace("<think>", start).replace("</think>", end)
        params, text = suggest(small_model(here / f"m{number}", template, markers))
        assert (params.think.start, params.think.end) == (start, end)
        assert params.think.start_id == 131 + 2 * number
        assert "start" not in unsure(text)


def test_several_pairs_in_the_chat_template_or_none_are_unsure(here: Path) -> None:
    both = (*MARKERS, "<reason>", "</reason>")
    template = TEMPLATE + "{# <reason> #}"
    _, text = suggest(small_model(here / "m", template, both))
    assert "<reason> </reason>" in unsure(text)["start"]
    silent = TEMPLATE.replace("<think></think>", " ")
    _, text = suggest(small_model(here / "n", silent))
    assert "may not reason" in unsure(text)["start"]


@pytest.mark.parametrize(
    ("config", "dtype", "is_sure"),
    [
        ({"dtype": None, "torch_dtype": "float16"}, "float16", True),
        ({"dtype": "float8_e4m3fn"}, "bfloat16", False),
        ({"dtype": None}, "bfloat16", False),
    ],
)
def test_the_dtype_is_that_of_the_weights(
    config: dict[str, Any], dtype: str, is_sure: bool, here: Path
) -> None:
    params, text = suggest(small_model(here / "m", **config))
    assert params.verifier.dtype == dtype
    assert ("dtype" not in unsure(text)) is is_sure


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(61, [2, 30, 58]), (7, [2, 3, 4]), (6, [1, 3, 5]), (4, [1, 2, 3]), (3, [0, 1, 2])],
)
def test_three_layers(num_layers: int, expected: list[int], here: Path) -> None:
    params, _ = suggest(small_model(here / "m", num_hidden_layers=num_layers))
    assert params.extract.layer_ids == expected


def test_a_multimodal_config_is_read_from_its_text_part(here: Path) -> None:
    model = small_model(here / "m")
    (model / "config.json").write_text(json.dumps({"model_type": "vl", "text_config": CONFIG}))
    params, _ = suggest(model)
    assert params.plan.hidden_size == 4096
    identify(params)


def test_sampling_is_what_the_authors_recommend(here: Path) -> None:
    model = small_model(here / "m")
    advice = {"do_sample": True, "temperature": 1, "top_p": 0.95, "top_k": 20}
    (model / "generation_config.json").write_text(json.dumps(advice))
    params, text = suggest(model)
    generate = params.generate
    assert (generate.temperature, generate.top_p, generate.top_k) == (1.0, 0.95, 20)
    assert "temperature" not in unsure(text)


def test_budgets_and_vocabulary_shrink_to_a_small_model(here: Path) -> None:
    params, text = suggest(small_model(here / "m", max_position_embeddings=500))
    assert params.verifier.max_model_len == 500
    assert (params.generate.max_tokens, params.generate.retry_max_tokens) == (250, 375)
    assert params.benchmark.max_tokens == 250
    assert params.reassemble.draft_vocab_size == 300
    assert {"max_tokens", "retry_max_tokens"} <= unsure(text).keys()


def test_what_belongs_to_the_verifier_before_goes(here: Path) -> None:
    values = yaml.safe_load((here / "params.yaml").read_text())
    values["generate"]["endpoints"] = ["http://127.0.0.1:8000/v1"]
    values["train"]["init_from"] = "models/earlier"
    values["family"] = {"name": "deepseek_r1", "custom": None}
    values["verifier"] |= {"server_args": [], "server_env": {}, "quantization": "fp8"}
    (here / "params.yaml").write_text(yaml.safe_dump(values))
    params, text = suggest(small_model(here / "m"))
    assert params.generate.endpoints == []
    assert params.train.init_from is None
    assert params.verifier.quantization is None
    assert not {"server_args", "server_env"} & unsure(text).keys()


def test_a_folder_without_weights_leaves_their_size_open(here: Path) -> None:
    model = small_model(here / "m")
    (model / "model.safetensors").unlink()
    params, text = suggest(model)
    assert params.plan.weights_gb is None
    assert "weights_gb" in unsure(text)


def test_code_of_the_model_alone_is_not_run_unless_allowed(here: Path) -> None:
    model = small_model(here / "m", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    params, text = suggest(model)
    assert params.verifier.trust_remote_code is False
    assert "trust_remote_code" in unsure(text)


def test_the_table_says_how_sure_and_what_to_do_next(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    _, text = suggest(small_model(here / "m"))
    out = capsys.readouterr().out
    assert out.count("guess: ") == len(unsure(text))
    assert "proved: the tokenizer's" in out
    assert "A generated turn ends with <|end|> 128." in out
    assert "make use PROFILE=m\n" in out
    assert "python -m pipeline.identify\n" in out


# the hub


COMMIT = "a" * 40


def test_a_hub_id_is_pinned_to_its_latest_commit(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(here / "snapshot")
    lfs = SimpleNamespace(sha256="b" * 64)
    names = ("model-1.safetensors", "model-2.safetensors", "original.pth")
    files = [SimpleNamespace(rfilename=name, size=10**9, lfs=lfs) for name in names]

    def model_info(self: object, name: str, **options: object) -> SimpleNamespace:
        assert (name, options.get("revision", COMMIT)) == ("org/Own-Model", COMMIT)
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(name: str, revision: str, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("org/Own-Model", COMMIT)
        return str(model)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    params, _ = suggest("org/Own-Model")
    assert (here / "profiles/own_model.yaml").is_file()
    assert (params.verifier.model, params.verifier.revision) == ("org/Own-Model", COMMIT)
    assert params.plan.weights_gb == 2.0
    assert COMMIT in params.plan.facts_from["vocab_size"]
    assert len(identify(params).weights) == 2


def test_a_hub_that_gives_nothing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_: object, **__: object) -> None:
        raise httpx2.ConnectError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    message = refused(VerifierError, "org/Own-Model")
    assert "org/Own-Model is no folder here" in message
    assert "ConnectError" in message


# refusals


def test_an_existing_profile_stays(here: Path) -> None:
    path = here / "profiles/m.yaml"
    path.parent.mkdir()
    path.write_text("mine")
    command = [sys.executable, "-m", "pipeline.identify", "--suggest", "m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "suggest: profiles/m.yaml exists" in ended.stderr
    assert path.read_text() == "mine"


def test_a_model_without_config(here: Path) -> None:
    model = small_model(here / "m")
    (model / "config.json").unlink()
    assert "holds no config.json" in refused(VerifierError, model)


def test_an_incomplete_config(here: Path) -> None:
    assert "no hidden_size" in refused(VerifierError, small_model(here / "m", hidden_size=None))


def test_too_few_layers(here: Path) -> None:
    assert "2 layers" in refused(VerifierError, small_model(here / "m", num_hidden_layers=2))


def test_a_model_without_chat_template(here: Path) -> None:
    model = small_model(here / "m")
    (model / "chat_template.jinja").unlink()
    assert "no chat template" in refused(VerifierError, model)


def test_a_model_that_does_not_reason(here: Path) -> None:
    template = TEMPLATE.replace("<think></think>", " ")
    message = refused(VerifierError, small_model(here / "m", template, MARKERS[:3]))
    assert "no think tokens" in message
    assert "does not reason" in message


def test_think_markers_of_several_tokens(here: Path) -> None:
    """As Kimi-Dev's."""
    template = TEMPLATE.replace("<think></think>", "◁think▷◁/think▷")
    message = refused(VerifierError, small_model(here / "m", template, MARKERS[:3]))
    assert "'◁think▷' as 7 tokens" in message


def test_channels(here: Path) -> None:
    """As gpt-oss."""
    template = TEMPLATE.replace("<think></think>", "<|channel|>analysis<|message|>")
    markers = (*MARKERS[:3], "<|channel|>", "<|message|>")
    message = refused(VerifierError, small_model(here / "m", template, markers))
    assert "channels (<|channel|>)" in message
    assert "one think-start and one think-end token" in message


def test_code_of_the_tokenizer_that_nobody_allowed(here: Path) -> None:
    model = model_of(real_folder(OWN_CODE), here / "m")
    message = refused(VerifierError, model)
    assert "--trust-remote-code" in message
    assert "read the *.py files" in message
    assert not (here / "modules").exists()


def test_roles_in_plain_text(here: Path) -> None:
    template = TEMPLATE.replace("<|{{ m.role }}|>", "{{ m.role }}: ")
    template = template.replace("<|assistant|>", "assistant: ")
    assert "no token begins a turn" in refused(VerifierError, small_model(here / "m", template))


def test_params_that_are_wrong_already(here: Path) -> None:
    (here / "params.yaml").write_text("verifier: {}")
    assert "params.yaml" in refused(ParamsError, small_model(here / "m"))


def test_every_family_has_its_architectures() -> None:
    assert set(MODEL_TYPES) == set(FAMILIES)
