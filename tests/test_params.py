"""params.yaml: what is wrong is said in one line that names the key and the value."""

import shutil
from pathlib import Path

import pytest

from pipeline import params
from pipeline.errors import ParamsError
from pipeline.params import endpoints_from, load_params
from tests.conftest import ROOT, Project


def problem(project: Project) -> str:
    with pytest.raises(ParamsError) as caught:
        load_params()
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def rewrite(project: Project, old: str, new: str) -> None:
    """Put raw YAML into the shipped params.yaml."""
    shutil.copy(ROOT / "params.yaml", project.root)
    text = Path("params.yaml").read_text("utf-8")
    assert old in text
    Path("params.yaml").write_text(text.replace(old, new, 1), "utf-8")


def test_the_shipped_params_load(project):
    shutil.copy(ROOT / "params.yaml", project.root)
    shipped = load_params()
    assert shipped.verifier.model == "models/verifier"
    assert (shipped.think.start, shipped.think.end) == ("<think>", "</think>")
    assert shipped.generate.thinking is True


def test_an_unknown_key_is_named(project):
    project.values["generate"]["max_token"] = 5
    project.set()
    assert "unknown key generate.max_token" in problem(project)


def test_an_unknown_section_is_named(project):
    project.values["generation"] = {}
    project.set()
    assert "unknown key generation" in problem(project)


def test_a_missing_key_is_named(project):
    del project.values["generate"]["gate"]["num_samples"]
    project.set()
    assert "missing key generate.gate.num_samples" in problem(project)


def test_a_missing_section_is_named(project):
    del project.values["think"]
    project.set()
    assert "missing key think" in problem(project)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("generate.concurrency", "64", "'64'"),
        ("generate.concurrency", 64.5, "64.5"),
        ("generate.concurrency", True, "True"),
        ("generate.thinking", "false", "'false'"),
        ("generate.thinking", 1, "1"),
        ("generate.temperature", "0.5", "'0.5'"),
        ("think.end_id", "1023", "'1023'"),
        ("think.start", 5, "5"),
        ("prompts.sources", "data/raw/questions.jsonl", "'data/raw/questions.jsonl'"),
        ("verifier.server_env", {"A": 1}, "1"),
        ("verifier.revision", "main", "'main'"),
        ("verifier.dtype", "fp16", "'fp16'"),
        ("verifier.quantization", 4, "4"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_and_never_converted(project, key, value, shown):
    project.set(**{key: value})
    message = problem(project)
    assert f"{key}" in message
    assert message.endswith(shown)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generate.concurrency", 0),
        ("generate.timeout_s", -1),
        ("generate.max_tokens", 0),
        ("generate.temperature", 2.1),
        ("generate.temperature", -0.1),
        ("generate.top_p", 0.0),
        ("generate.top_p", 1.5),
        ("generate.top_k", -1),
        ("generate.gate.min_reasoning_fraction", 1.01),
        ("generate.max_failed_fraction", -0.01),
        ("generate.thinking_switch", "enable thinking"),
        ("prompts.sources", []),
        ("prompts.sample_cap", 0),
        ("reassemble.truncated", "maybe"),
        ("extract.layer_ids", [1, 2]),
        ("extract.layer_ids", [2, 1, 3]),
        ("extract.layer_ids", [1, 1, 3]),
        ("evaluate.context_bins", [64, 64]),
        ("train.max_tokens_per_batch", 100),
        ("benchmark.num_rounds", 1),
        ("train.learning_rate", 0.0),
        ("train.learning_rate", float("inf")),
    ],
)
def test_a_value_out_of_range_is_named(project, key, value):
    project.set(**{key: value})
    message = problem(project)
    assert key.split(".")[0] in message
    assert key.split(".")[-1] in message
    assert str(value) in message


def test_nan_is_refused(project):
    project.set(**{"generate.temperature": float("nan")})
    assert "generate.temperature" in problem(project)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("learning_rate: 0.001", "learning_rate: 1e-3", "train.learning_rate"),
        ("thinking: true", "thinking: on", "generate.thinking"),
        ("max_tokens: 512", "max_tokens: 0512", "generate.max_tokens"),
        ("max_tokens: 512", "max_tokens: 8:32", "generate.max_tokens"),
    ],
    ids=["1e-3", "on", "octal", "sexagesimal"],
)
def test_a_value_that_dvc_would_read_otherwise_is_refused(project, old, new, key):
    rewrite(project, old, new)
    assert key in problem(project)


def test_a_key_given_twice_is_refused(project):
    rewrite(project, "  temperature: 0.0", "  temperature: 0.0\n  temperature: 1.0")
    assert "temperature" in problem(project)


def test_a_missing_file_says_where_to_run(project):
    Path("params.yaml").unlink()
    message = problem(project)
    assert message.startswith("params.yaml: ")
    assert "run from the project's root" in message


@pytest.mark.parametrize(
    "content",
    [b"generate: [1, 2", b"a:\n\tb: 1", b"\xff\xfe\x00", b"a: b: c", b"", b"- 1\n- 2\n", b"text"],
    ids=["open", "tab", "binary", "colons", "empty", "list", "scalar"],
)
def test_a_file_that_is_no_mapping_in_yaml_is_refused(project, content):
    Path("params.yaml").write_bytes(content)
    assert problem(project).startswith("params.yaml")


@pytest.mark.parametrize("revision", ["main", "0123abc", "A" * 40, "g" * 40])
def test_a_revision_is_a_full_commit(project, revision):
    project.set(**{"verifier.model": "moonshotai/Kimi-K2.5", "verifier.revision": revision})
    message = problem(project)
    assert "verifier.revision: " in message
    assert repr(revision) in message


def test_a_hub_model_with_a_full_commit_is_accepted(project):
    project.set(**{"verifier.model": "moonshotai/Kimi-K2.5", "verifier.revision": "0" * 40})
    assert load_params().verifier.revision == "0" * 40


@pytest.mark.parametrize("section", ["generate", "benchmark"])
def test_answers_must_leave_room_for_the_question(project, section):
    project.set(**{"verifier.max_model_len": 600, f"{section}.max_tokens": 600})
    message = problem(project)
    assert f"{section}.max_tokens is 600" in message
    assert "verifier.max_model_len 600" in message


def test_the_lookup_of_ngram_is_a_range(project):
    project.set(**{"benchmark.prompt_lookup_min": 5, "benchmark.prompt_lookup_max": 4})
    assert "prompt_lookup_min 5 is above prompt_lookup_max 4" in problem(project)


def test_checking_the_file_alone_says_nothing_or_one_line(project, capsys):
    params.main()
    assert capsys.readouterr() == ("", "")
    project.set(**{"generate.concurrency": 0})
    with pytest.raises(SystemExit, match=r"^params: params\.yaml: generate\.concurrency.*not 0$"):
        params.main()


def test_a_loaded_value_cannot_be_changed(project):
    loaded = load_params()
    with pytest.raises(ValueError, match="frozen"):
        loaded.generate.concurrency = 1


def test_an_integer_is_a_good_temperature(project):
    project.set(**{"generate.temperature": 1})
    assert load_params().generate.temperature == 1.0


def test_the_switch_is_sent_as_a_boolean_under_its_own_name(project):
    project.set(**{"generate.thinking": False, "generate.thinking_switch": "thinking"})
    assert load_params().generate.template_kwargs == {"thinking": False}
    project.set(**{"generate.thinking_switch": None})
    assert load_params().generate.template_kwargs == {}


def test_endpoints_come_from_the_environment_first(monkeypatch):
    monkeypatch.delenv("X_ENDPOINTS", raising=False)
    assert endpoints_from("X_ENDPOINTS", ["http://a/v1/"]) == ["http://a/v1"]
    monkeypatch.setenv("X_ENDPOINTS", " http://b/v1 ,http://c/v1/,")
    assert endpoints_from("X_ENDPOINTS", ["http://a/v1"]) == ["http://b/v1", "http://c/v1"]
    monkeypatch.setenv("X_ENDPOINTS", "")
    assert endpoints_from("X_ENDPOINTS", []) == []


@pytest.mark.parametrize("retry", [512, 100])
def test_a_second_try_must_have_more_tokens_than_the_first(project, retry):
    project.set(**{"generate.on_truncated": "retry", "generate.retry_max_tokens": retry})
    assert f"retry_max_tokens {retry} must be above max_tokens 512" in problem(project)


def test_a_second_try_must_fit_the_context(project):
    project.set(**{"generate.on_truncated": "retry", "generate.retry_max_tokens": 1024})
    assert "generate.retry_max_tokens is 1024, which leaves no room" in problem(project)


def test_the_budget_of_a_second_try_that_is_not_made_does_not_matter(project):
    project.set(**{"generate.on_truncated": "keep", "generate.retry_max_tokens": 9999})
    assert load_params().generate.largest_max_tokens == 512


def test_the_line_of_a_key_is_found(project):
    Path("params.yaml").write_text(
        "# a comment\nthink:\n  # end: no\n  end: x\ngenerate:\n  gate:\n    num_samples: 3\n",
        "utf-8",
    )
    assert params.line_of("think.end") == 4
    assert params.line_of("generate.gate.num_samples") == 7


def test_a_misspelt_key_is_shown_as_it_was_written(project):
    project.values["prompts"]["sample_capp"] = project.values["prompts"].pop("sample_cap")
    project.set()
    assert "unknown key prompts.sample_capp" in problem(project)


@pytest.mark.parametrize("reasoning", ["drop", "empty"])
def test_no_draft_learns_the_reasoning_that_was_taken_out(project, reasoning):
    project.set(**{"reassemble.train_on": "reasoning", "reassemble.reasoning": reasoning})
    assert f"train_on is reasoning, but reasoning: {reasoning} takes it out" in problem(project)
