"""params.yaml as frozen, strict, typed values: `load_params().generate.concurrency`.

`python -m pipeline.params` checks the file and says nothing when it is right; `make repro` does so
first, because a key that no stage reads would otherwise pass unseen.

Every key must be there, none may be unknown, and every value must mean the same in YAML 1.1
(PyYAML, which the stages use) and YAML 1.2 (DVC). What a key does is said in params.yaml itself;
here stand its type and its limits.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML, YAMLError

from pipeline.errors import ParamsError
from pipeline.records import DRAFT

PARAMS_PATH = Path("params.yaml")

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
WhiteSpace = Annotated[str, Field(pattern=r"^\s*$")]
# Sent with every request: what is left out, a generation_config.json beside the model decides.
NEUTRAL_SAMPLING = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# Of vLLM's arguments those that have a key of their own, or that change what the verifier is behind
# the back of verifier.json.
NOT_SERVER_ARGS = frozenset(
    (
        *("--model", "--dtype", "--quantization", "-q", "--max-model-len", "--reasoning-parser"),
        *("--revision", "--trust-remote-code", "--speculative-config", "--host", "--port"),
        *("--tokenizer", "--tokenizer-revision", "--chat-template", "--served-model-name"),
        *("--hf-overrides", "--hf-config-path", "--api-key"),
    )
)
Dtype = Literal["float32", "bfloat16", "float16"]


class Section(BaseModel):
    """One section of params.yaml: no unknown key, no default, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Verifier(Section):
    """The reasoning model and how vLLM serves it."""

    model: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    dtype: Dtype
    quantization: str | None
    max_model_len: Count
    reasoning_parser: str | None
    trust_remote_code: bool
    server_args: list[str]
    server_env: dict[str, str]

    @model_validator(mode="after")
    def _server_args_change_no_model(self) -> "Verifier":
        for argument in self.server_args:
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in NOT_SERVER_ARGS:
                raise ValueError(
                    f"server_args must not hold {flag}: it has a key here, or may not change"
                )
        return self


class Think(Section):
    """The tokens around the reasoning, with the ids they are expected to have."""

    start: Annotated[str, Field(min_length=1)]
    end: Annotated[str, Field(min_length=1)]
    start_id: CountOrZero
    end_id: CountOrZero


class Family(Section):
    """How the models of a family write a turn: an entry of the table in pipeline.families, or
    `family.custom`."""

    prefilled: bool | None
    """whether the generation prompt opens the think block; None: some versions do, some do not"""
    before_think_start: WhiteSpace
    """the white space that the model writes there, put in where a text lacks it; the three below
    likewise, after the think-start only if the prompt does not go on there"""
    after_think_start: WhiteSpace
    before_think_end: WhiteSpace
    after_think_end: WhiteSpace
    end_of_turn: Annotated[str, Field(min_length=1)]
    role_tokens: Annotated[list[str], Field(min_length=1)]
    """what opens a user's and an assistant's turn; each must occur in a rendered conversation"""
    control_tokens: list[str]
    """further markers that no generated turn may hold"""


class FamilyChoice(Section):
    """The verifier's family."""

    name: Annotated[str, Field(min_length=1)]
    custom: Family | None

    @model_validator(mode="after")
    def _custom_says_how(self) -> "FamilyChoice":
        if (self.name == "custom") != (self.custom is not None):
            raise ValueError("custom must describe the family if name is custom, else be null")
        return self


class Prompts(Section):
    """Which questions are asked."""

    sources: Annotated[list[str], Field(min_length=1)]
    urls: list[str]
    seed: int
    num_held_out: Count
    sample_cap: Count
    turns: Literal["first", "all"]

    @model_validator(mode="after")
    def _a_url_each(self) -> "Prompts":
        if self.urls and len(self.urls) != len(self.sources):
            raise ValueError(
                f"urls must name one for each of the {len(self.sources)} sources or none, "
                f"not {len(self.urls)}"
            )
        if any("@" in url.partition("//")[2].partition("/")[0] for url in self.urls):
            raise ValueError("urls must hold no user name or password: they go into git")
        return self


class Gate(Section):
    """When a run is bad enough to stop."""

    num_samples: Count
    min_reasoning_fraction: Fraction
    min_reasoning_tokens: Count


class Generate(Section):
    """How the verifier is asked."""

    endpoints: list[str]
    concurrency: Count
    timeout_s: Count
    stall_s: Count
    max_tokens: Count
    on_truncated: Literal["keep", "retry"]
    retry_max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: CountOrZero
    thinking: bool
    thinking_switch: Annotated[str, Field(pattern=r"^[a-z_]+$")] | None
    gate: Gate
    max_failed_fraction: Fraction

    @model_validator(mode="after")
    def _a_retry_has_more_room(self) -> "Generate":
        if self.on_truncated == "retry" and self.retry_max_tokens <= self.max_tokens:
            raise ValueError(
                f"retry_max_tokens {self.retry_max_tokens} must be above max_tokens "
                f"{self.max_tokens}: a cut answer is asked again with it"
            )
        return self

    @property
    def largest_max_tokens(self) -> int:
        """The budget of an answer that was cut at `max_tokens`."""
        return self.retry_max_tokens if self.on_truncated == "retry" else self.max_tokens

    @property
    def sampling(self) -> dict[str, float | int]:
        """The sampling values as sent, less max_tokens, which only bounds them."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {**chosen, **NEUTRAL_SAMPLING}

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """vLLM's chat_template_kwargs. A boolean: the string "false" is true in a template."""
        return {self.thinking_switch: self.thinking} if self.thinking_switch else {}


class Reassemble(Section):
    """What becomes a training sequence."""

    source: Literal["ids", "text", "ids_else_text"]
    truncated: Literal["keep", "drop"]
    max_tokens: Count
    on_too_long: Literal["drop", "cut"]
    on_control_text: Literal["reject", "keep"]
    reasoning: Literal["keep", "drop", "empty"]
    train_on: Literal["all_generated", "reasoning", "answer"]
    draft_vocab_size: Count

    @model_validator(mode="after")
    def _what_is_learnt_is_there(self) -> "Reassemble":
        if self.train_on == "reasoning" and self.reasoning != "keep":
            raise ValueError(f"train_on is reasoning, but reasoning: {self.reasoning} takes it out")
        return self


class Extract(Section):
    """Which hidden states are stored, and how."""

    mode: Literal["stored", "streamed"]
    endpoints: list[str]
    layer_ids: Annotated[list[CountOrZero], Field(min_length=3, max_length=3)]
    dtype: Dtype | Literal["float8_e4m3"]
    samples_per_shard: Count
    concurrency: Count
    timeout_s: Count

    @model_validator(mode="after")
    def _layers_ascend(self) -> "Extract":
        if sorted(set(self.layer_ids)) != self.layer_ids:
            raise ValueError(f"layer_ids must ascend without repeats, not {self.layer_ids}")
        return self


class Train(Section):
    """How the draft is trained."""

    seed: int
    init_from: Annotated[str, Field(min_length=1)] | None
    num_processes: Count
    tensorboard: bool
    num_steps: Count
    checkpoint_steps: Count
    max_tokens_per_batch: Annotated[int, Field(ge=128, multiple_of=128)]
    dtype: Literal["float32", "bfloat16"]
    ttt_steps: Count
    ttt_step_loss_decay: Annotated[float, Field(gt=0, le=1)]
    num_layers: Count
    reasoning_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    learning_rate: Positive
    muon_learning_rate: Positive

    @model_validator(mode="after")
    def _begins_elsewhere(self) -> "Train":
        if self.init_from and Path(self.init_from).resolve() == DRAFT.resolve():
            raise ValueError(f"init_from is {DRAFT}, which train replaces; copy it elsewhere first")
        return self


class Evaluate(Section):
    """How the draft is judged offline."""

    max_draft_tokens: Annotated[int, Field(ge=1, le=64)]  # of 128 in the shortest batch
    context_bins: Annotated[list[Count], Field(min_length=1)]

    @model_validator(mode="after")
    def _bins_ascend(self) -> "Evaluate":
        if sorted(set(self.context_bins)) != self.context_bins:
            raise ValueError(f"context_bins must ascend without repeats, not {self.context_bins}")
        return self


class Benchmark(Section):
    """How the draft is judged in real serving."""

    num_draft_tokens: Count
    prompt_lookup_min: Count
    prompt_lookup_max: Count
    num_prompts: Count
    concurrency: Annotated[list[Count], Field(min_length=1)]
    num_rounds: Annotated[int, Field(ge=2)]
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=2)]], Field(min_length=1)]
    both_thinking_modes: bool
    max_tokens: Count
    side_by_side: bool

    @model_validator(mode="after")
    def _lookup_range(self) -> "Benchmark":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _what_is_compared_comes_first(self) -> "Benchmark":
        for key, first, why in (
            ("concurrency", 1, "acceptance is taken one request at a time"),
            ("temperatures", 0.0, "identical outputs are expected of greedy decoding alone"),
        ):
            values = getattr(self, key)
            if values[0] != first or sorted(set(values)) != values:
                raise ValueError(f"{key} must begin with {first} and ascend ({why}), not {values}")
        return self


class Plan(Section):
    """What `make plan` calculates with before anything has run; None: unknown."""

    hidden_size: Count | None
    intermediate_size: Count | None
    num_hidden_layers: Count | None
    vocab_size: Count | None
    weights_gb: Positive | None
    num_gpus: CountOrZero | None
    gpu_memory_gb: Positive | None
    num_questions: Count | None
    prompt_tokens: Positive | None
    generated_tokens: Positive | None
    generate_tokens_per_s: Positive | None
    extract_tokens_per_s: Positive | None
    train_tokens_per_s: Positive | None
    facts_from: dict[str, str]

    @model_validator(mode="after")
    def _facts_have_a_source(self) -> "Plan":
        known = {name for name, value in self if name != "facts_from" and value is not None}
        if unsourced := sorted(known ^ set(self.facts_from)):
            raise ValueError(
                f"facts_from must say where each fact is from and nothing else: {unsourced[0]}"
            )
        return self


class DemoVerifier(Section):
    """How the shipped verifier was trained."""

    seed: int


class Params(Section):
    """The whole of params.yaml."""

    verifier: Verifier
    think: Think
    family: FamilyChoice
    prompts: Prompts
    generate: Generate
    reassemble: Reassemble
    extract: Extract
    train: Train
    evaluate: Evaluate
    benchmark: Benchmark
    plan: Plan
    demo_verifier: DemoVerifier

    @model_validator(mode="after")
    def _answers_fit_the_context(self) -> "Params":
        budgets = {
            "generate.max_tokens": self.generate.max_tokens,
            "generate.retry_max_tokens": self.generate.largest_max_tokens,
            "benchmark.max_tokens": self.benchmark.max_tokens,
        }
        for key, max_tokens in budgets.items():
            if max_tokens >= self.verifier.max_model_len:
                raise ValueError(
                    f"{key} is {max_tokens}, which leaves no room for the question in "
                    f"verifier.max_model_len {self.verifier.max_model_len}"
                )
        return self

    @model_validator(mode="after")
    def _a_second_thinking_mode_has_a_switch(self) -> "Params":
        if self.benchmark.both_thinking_modes and self.generate.thinking_switch is None:
            raise ValueError(
                "benchmark.both_thinking_modes must be false where generate.thinking_switch is null"
            )
        return self

    @model_validator(mode="after")
    def _processes_read_what_is_stored(self) -> "Params":
        if self.train.num_processes > 1 and self.extract.mode != "stored":
            raise ValueError(
                f"train.num_processes is {self.train.num_processes}, which needs extract.mode: "
                "stored; a server of hidden states answers one process"
            )
        return self


def load_params(path: Path = PARAMS_PATH) -> Params:
    """Read and check params.yaml.

    Raises:
        ParamsError: one line that names the first wrong key, its value and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ParamsError(f"{path}: {error.strerror}; run from the project's root") from error
    except UnicodeDecodeError as error:
        raise ParamsError(f"{path} is no text: {error}") from error
    try:
        values = yaml.safe_load(text)
        as_dvc_reads_it = YAML(typ="safe", pure=True).load(text)
    except (yaml.YAMLError, YAMLError, ValueError) as error:
        raise ParamsError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    _check_both_yamls_agree(path, values, as_dvc_reads_it)
    if not isinstance(values, dict):
        raise ParamsError(f"{path} holds no sections")
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        raise ParamsError(f"{path}: {_first_problem(error)}") from None


def endpoints_from(environment_variable: str, params_value: list[str]) -> list[str]:
    """The servers to use: from the environment (comma-separated) before params.yaml."""
    named = [url.strip() for url in os.environ.get(environment_variable, "").split(",")]
    return [url.rstrip("/") for url in named if url] or [url.rstrip("/") for url in params_value]


def line_of(key: str, path: Path = PARAMS_PATH) -> int:
    """The line of params.yaml, from 1, where `generate.max_tokens` or its like stands."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line = 0
    for name in key.split("."):
        assert isinstance(node, yaml.MappingNode)
        line, node = next((k.start_mark.line, v) for k, v in node.value if k.value == name)
    return line + 1


def main() -> None:
    try:
        load_params()
    except ParamsError as error:
        sys.exit(f"params: {error}")


def _first_problem(error: ValidationError) -> str:
    """The first validation error as `key: what is wrong (value)`."""
    problems = error.errors(include_url=False)
    # A misspelt key is unknown and missing at once: the former shows what was written.
    problem = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in problem["loc"]) or "params"
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if problem["type"] == "missing":
        return f"missing key {key}"
    message = problem["msg"].removeprefix("Value error, ")
    if isinstance(problem["input"], dict | BaseModel):
        return f"{key}: {message}"
    return f"{key}: {message}, not {problem['input']!r}"


def _check_both_yamls_agree(path: Path, pyyaml: Any, ruamel: Any, key: str = "") -> None:
    if isinstance(pyyaml, dict) and isinstance(ruamel, dict) and pyyaml.keys() == ruamel.keys():
        for name in pyyaml:
            _check_both_yamls_agree(path, pyyaml[name], ruamel[name], f"{key}.{name}".lstrip("."))
    elif isinstance(pyyaml, list) and isinstance(ruamel, list) and len(pyyaml) == len(ruamel):
        for index, (ours, theirs) in enumerate(zip(pyyaml, ruamel, strict=True)):
            _check_both_yamls_agree(path, ours, theirs, f"{key}[{index}]")
    elif type(pyyaml) is not type(ruamel) or pyyaml != ruamel:
        raise ParamsError(
            f"{path}: {key or 'the file'} reads as {pyyaml!r} in YAML 1.1 and as {ruamel!r} in "
            "YAML 1.2, which DVC uses; write 0.001 for 1e-3, true/false for on/off, quotes for text"
        )


if __name__ == "__main__":
    main()
