"""Profiles: complete params files that fit their models, and what a wrong setting in one gets."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline import identify, prompts, raw, use
from pipeline.errors import DataError, ParamsError, PipelineError
from pipeline.families import FAMILIES
from pipeline.params import load_params
from pipeline.twins.__main__ import make_twin
from pipeline.twins.layouts import LAYOUTS
from tests.conftest import ROOT

PROFILES = {
    path.stem: path
    for path in sorted((ROOT / "profiles").glob("*.yaml"))
    if not path.stem.startswith("twin_")  # made by `make twins`
}
IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")
# By hand, from public tables: hub id, GPUs, think ids, parser, family, switch, own code.
MODELS = {
    "kimi_k2_5": (
        *("moonshotai/Kimi-K2.5", 8, (163606, 163607)),
        *("kimi_k2", "kimi_k2_5", "thinking", True),
    ),
    "qwen3_8b": (
        *("Qwen/Qwen3-8B", 1, (151667, 151668), "qwen3", "qwen3", "enable_thinking", False),
    ),
    "qwen3_30b_a3b": (
        *("Qwen/Qwen3-30B-A3B", 2, (151667, 151668), "qwen3", "qwen3", "enable_thinking", False),
    ),
    "deepseek_r1": (
        *("deepseek-ai/DeepSeek-R1-0528", 8, (128798, 128799)),
        *("deepseek_r1", "deepseek_r1", None, False),
    ),
}


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(PROFILES[name].read_text())
    return values


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_a_whole_params_file_and_says_what_it_is_for(name: str) -> None:
    load_params(PROFILES[name])
    head = PROFILES[name].read_text().partition("\nverifier:")[0]
    for told in ("Hardware", "Time", "Disk", "Numbers from"):
        assert f"# {told}" in head


def test_every_model_has_a_profile_and_a_twin() -> None:
    assert set(PROFILES) == {"laptop", *MODELS}
    assert set(LAYOUTS) == set(MODELS)


def test_laptop_is_what_ships() -> None:
    assert values_of("laptop") == yaml.safe_load((ROOT / "params.yaml").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_names_its_model_as_the_public_tables_do(name: str) -> None:
    params = load_params(PROFILES[name])
    ids = (params.think.start_id, params.think.end_id)
    verifier = params.verifier
    found = (verifier.model, params.plan.num_gpus, ids, verifier.reasoning_parser)
    switch = params.generate.thinking_switch
    assert (*found, params.family.name, switch, verifier.trust_remote_code) == MODELS[name]
    assert FAMILIES[params.family.name].thinking_switch == switch
    gpus = params.plan.num_gpus
    assert gpus == 1 or f"--tensor-parallel-size {gpus}" in " ".join(verifier.server_args)


def test_the_reference_run_is_the_one_that_was_asked_for() -> None:
    params = load_params(PROFILES["kimi_k2_5"])
    assert "mlabonne/open-perfectblend" in params.prompts.urls[0]
    assert params.prompts.sample_cap == 10_000
    assert params.generate.concurrency == 128
    assert params.generate.timeout_s == 1800
    assert params.generate.max_tokens == 8192


# make use


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shipped params and profiles, committed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_bytes((ROOT / "params.yaml").read_bytes())
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    for command in (["init", "-q"], ["add", "-A"], [*IDENTITY, "commit", "-qm", "shipped"]):
        subprocess.run(["git", *command], check=True)
    return tmp_path


def use_profile(*names: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["use", *names])
        use.main()


@pytest.mark.parametrize("name", PROFILES)
def test_use_changes_values_and_keeps_the_manual(repository: Path, name: str) -> None:
    use_profile(name)
    assert load_params() == load_params(PROFILES[name])
    comments = [line for line in Path("params.yaml").read_text().splitlines() if "#" in line]
    assert comments == [
        line for line in (ROOT / "params.yaml").read_text().splitlines() if "#" in line
    ]


def test_there_and_back_changes_no_byte(repository: Path) -> None:
    use_profile("laptop")
    assert Path("params.yaml").read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_use_loses_no_change(repository: Path) -> None:
    path = Path("params.yaml")
    path.write_text(path.read_text().replace("sample_cap: 400", "sample_cap: 401") + "# mine\n")
    with pytest.raises(SystemExit, match="changes that would be lost"):
        use_profile("kimi_k2_5")
    assert "sample_cap: 401" in path.read_text()
    path.write_text(path.read_text().replace("sample_cap: 401", "sample_cap: 400"))
    use_profile("kimi_k2_5")  # the values of a profile can be had again
    use_profile("qwen3_8b")
    assert path.read_text().endswith("# mine\n")


@pytest.mark.parametrize("known", [False, None], ids=["not in git", "no git"])
def test_use_loses_nothing_that_git_does_not_have(repository: Path, known: bool | None) -> None:
    path = Path("params.yaml")
    path.write_text(path.read_text().replace("sample_cap: 400", "sample_cap: 401"))
    if known is None:
        (repository / ".git").rename(repository / "elsewhere")
    else:
        subprocess.run(["git", "rm", "-q", "--cached", "params.yaml"], check=True)
    with pytest.raises(SystemExit, match=r"git does not have params\.yaml"):
        use_profile("kimi_k2_5")
    assert "sample_cap: 401" in path.read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  max_tokens: 512\n", "  max_tokens: &m 512\n"),
        ("model: models/verifier", "model: |-\n    models/verifier"),
        ("start_id: 1022", "start_id   : 1022"),
        ("plan:\n", "plam:\n"),
    ],
    ids=["anchor", "block", "spaces", "unknown key"],
)
def test_use_edits_or_refuses_and_never_breaks_the_file(
    repository: Path, old: str, new: str
) -> None:
    path = Path("params.yaml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", *IDENTITY, "commit", "-qm", "by hand"], check=True)
    before = path.read_text()
    with suppress(SystemExit):
        use_profile("kimi_k2_5")
        assert load_params() == load_params(PROFILES["kimi_k2_5"])
        return
    assert path.read_text() == before


@pytest.mark.parametrize("names", [(), ("kimi",), ("../params",), ("laptop", "laptop")])
def test_use_names_the_profiles_there_are(repository: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match=r"name a profile: PROFILE=deepseek_r1\|kimi_k2_5"):
        use_profile(*names)


# make raw


@pytest.fixture
def files_by_http(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which a server on this machine gives its files."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_raw_brings_questions_that_the_next_stage_reads(
    repository: Path,
    files_by_http: tuple[Path, str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, url = files_by_http
    rows = [[{"from": "human", "value": f"Question {n}?"}] for n in range(5)]
    pq.write_table(pa.table({"conversations": rows}), folder / "0000.parquet")
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    source = "data/raw/open_perfectblend.parquet"
    values = yaml.safe_load(Path("params.yaml").read_text())
    values["prompts"] |= {"sources": [source], "urls": [f"{url}/0000.parquet"]}
    values["prompts"] |= {"num_held_out": 1, "sample_cap": 4}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    raw.main()
    imported = yaml.safe_load(Path(f"{source}.dvc").read_text())
    assert imported["deps"][0]["path"] == f"{url}/0000.parquet"
    prompts.main()
    assert len(Path("data/prompts/prompts.jsonl").read_text().splitlines()) == 5
    raw.main()
    assert "is here" in capfd.readouterr().out


def test_what_was_imported_before_keeps_its_hash(
    repository: Path, files_by_http: tuple[Path, str]
) -> None:
    """A clone of a project whose .dvc file is in git must not take what the URL gives today."""
    _, url = files_by_http
    known = Path("data/raw/q.jsonl.dvc")
    known.parent.mkdir(parents=True)
    known.write_text("outs: []\n")
    values = yaml.safe_load(Path("params.yaml").read_text())
    values["prompts"] |= {"sources": ["data/raw/q.jsonl"], "urls": [f"{url}/q.jsonl"]}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit, match=r"dvc pull data/raw/q.jsonl.dvc"):
        raw.main()
    assert known.read_text() == "outs: []\n"


def test_urls_hold_no_secret(repository: Path) -> None:
    values = yaml.safe_load(Path("params.yaml").read_text())
    values["prompts"]["urls"] = ["https://me:secret@there.example/q.jsonl"]
    Path("params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ParamsError, match="no user name or password") as refused:
        load_params()
    assert "secret" not in str(refused.value)


def test_a_source_that_does_not_come_is_named(
    repository: Path, files_by_http: tuple[Path, str], capfd: pytest.CaptureFixture[str]
) -> None:
    _, url = files_by_http
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], check=True)
    values = yaml.safe_load(Path("params.yaml").read_text())
    values["prompts"] |= {"sources": ["data/raw/q.parquet"], "urls": [f"{url}/none.parquet"]}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit):
        raw.main()
    assert f"data/raw/q.parquet did not come from {url}/none.parquet" in capfd.readouterr().err


# Wrong settings


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twins") / "kimi_k2_5"
    make_twin(LAYOUTS["kimi_k2_5"], folder)
    return folder


WRONG = {
    "think id": ({"think.end_id": 163605}, "think.end_id is 163605, but .* the id 163607"),
    "think token": ({"think.end": "<|im_middle|>"}, "think.end_id is 163607, but .* 163601"),
    "switch of another family": (
        {"generate.thinking_switch": "enable_thinking"},
        "does not know 'enable_thinking', .* of family kimi_k2_5 it is thinking",
    ),
    "parser of another family": (
        {"verifier.reasoning_parser": "deepseek_r1"},
        "reasoning_parser is 'deepseek_r1'; of family kimi_k2_5 it is kimi_k2",
    ),
    "another family": (
        {"family.name": "qwen3", "verifier.reasoning_parser": None},
        "family.name qwen3: .* is no single token",
    ),
    "layers out of range": (
        {"extract.layer_ids": [2, 30, 58]},
        r"extract.layer_ids is \[2, 30, 58\], but .* has 5 layers",
    ),
    "the last layer": (
        {"extract.layer_ids": [1, 2, 5]},
        r"extract.layer_ids is \[1, 2, 5\], .* e.g. \[1, 2, 4\]",
    ),
    "draft vocabulary": (
        {"reassemble.draft_vocab_size": 200_000},
        "draft_vocab_size is 200000, more than the verifier's 163840",
    ),
    "draft to begin with": ({"train.init_from": "no/such"}, "init_from is no/such, where there is"),
    "context of the model": ({"verifier.max_model_len": 50_000}, "the model's context is 40960"),
    "context below max_tokens": (
        {"verifier.max_model_len": 4096},
        "generate.max_tokens is 8192, which leaves no room",
    ),
    "no revision": (
        {"verifier.model": "moonshotai/Kimi-K2.5"},
        "git ls-remote https://huggingface.co/moonshotai/Kimi-K2.5 HEAD",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_refused_before_a_server_starts(
    repository: Path, twin: Path, what: str
) -> None:
    wrong, said = WRONG[what]
    values = values_of("kimi_k2_5")
    changes = {"verifier.model": str(twin), "extract.layer_ids": [1, 2, 4]}
    identified_with(values, changes)  # all is right without the wrong one
    with pytest.raises(PipelineError, match=said) as refused:
        identified_with(values, changes | wrong)
    assert isinstance(refused.value, ParamsError)


def identified_with(values: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values = {**values, section: {**values[section], name: value}}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    identify.identify(load_params())


def test_a_cap_above_the_dataset_is_refused_before_a_question_is_sent(repository: Path) -> None:
    (repository / "data").mkdir()
    (repository / "data/raw").symlink_to(ROOT / "data/raw")
    values = values_of("kimi_k2_5")
    values["prompts"] |= {"sources": ["data/raw/questions.jsonl"], "urls": []}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"sample_cap 10000 are more: set sample_cap to at most"):
        prompts.main()
