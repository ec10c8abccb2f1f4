"""Suggests params for a model, from the model's own files.

    python -m pipeline.identify --suggest DIR_OR_ID [--trust-remote-code]

Reads    config.json, generation_config.json, tokenizer and chat template (of a Hugging Face id
         those of its latest commit); params.yaml, for all that is not about the model
Writes   profiles/<slug>.yaml, a complete params file, never over one that is there

A value is proved by those files, likely, or a guess; a guess carries `# unsure: why` in the file.
What to do with it: docs/your_model.md.
"""

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import httpx2
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.diagnosis import SWITCHES
from pipeline.errors import ParamsError, VerifierError
from pipeline.families import FAMILIES, PROBE, family_of, generation_prompt, prove
from pipeline.identify import WEIGHTS, end_ids, read_config, think_ids, usual_layers
from pipeline.params import PARAMS_PATH, Dtype, Params, line_of, load_params
from pipeline.resume import write_bytes
from pipeline.use import PROFILES
from pipeline.verifier import load_tokenizer, small_files

# The cache of a longer context takes memory that few answers need.
LONGEST = 16384
# Below this part of the context max_tokens is that of a model with shorter reasoning.
SHORT_ANSWERS = 1 / 8
THINK_WORD = re.compile("think|reason", re.IGNORECASE)
# What looks like a marker in the source of a chat template.
MARKER = re.compile(r"""[<\[◁][^\s<>\[\]◁▷'"]*(?:think|reason)[^\s<>\[\]◁▷'"]*[>\]▷]""", re.I)
MEASURED = (  # by a run, of the verifier that it had
    *("prompt_tokens", "generated_tokens"),
    *("generate_tokens_per_s", "extract_tokens_per_s", "train_tokens_per_s"),
)


# Beginnings of `model_type` in the config.json of a family's models.
MODEL_TYPES = {
    "kimi_k2_5": ("kimi_k", "deepseek_v3"),
    "kimi_k2_thinking": ("kimi_k", "deepseek_v3"),
    "qwen3": ("qwen3",),
    "qwen3_thinking": ("qwen3",),
    "qwen3_5": ("qwen3_5", "qwen3_6"),
    "deepseek_r1": ("deepseek_v3", "qwen", "llama"),  # and what it taught
    "deepseek_v3_1": ("deepseek_v3",),
    "deepseek_v4": ("deepseek_v4",),
    "glm_4": ("glm4",),
    "glm_4_7": ("glm4", "glm_moe"),
    "minimax_m2": ("minimax",),
}


class Line(NamedTuple):
    """One value of the suggestion."""

    key: str  # as `generate.thinking_switch`
    value: Any
    sure: Literal["proved", "likely", "guess"]
    why: str


class Think(NamedTuple):
    start: str
    end: str


@dataclass(frozen=True)
class Model:
    """What the small files of a model say."""

    name: str
    revision: str | None
    config: dict[str, Any]  # the text part of a multimodal one
    model_types: frozenset[str]
    sampling: dict[str, Any]  # of generation_config.json
    tokenizer: Any
    end_ids: list[int]
    weights_bytes: int
    has_own_code: bool
    runs_own_code: bool

    @cached_property
    def added(self) -> dict[str, int]:
        """Special and added tokens; added runs of white space are text."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return {str(token): i for i, token in sorted(tokens) if str(token).strip()}

    @property
    def max_model_len(self) -> int:
        return min(self.config["max_position_embeddings"], LONGEST)

    @cached_property
    def switches(self) -> list[str]:
        """The known thinking switches that make a difference to a prompt."""
        return [
            name for name in SWITCHES if self.prompt({name: True}) != self.prompt({name: False})
        ]

    @cached_property
    def thinking_prompt(self) -> str:
        return self.prompt(dict.fromkeys(self.switches, True))

    def prompt(self, template_kwargs: dict[str, bool]) -> str:
        return generation_prompt(self.tokenizer, PROBE, template_kwargs)

    def prefills(self, think: Think) -> bool:
        """Whether the generation prompt opens the think block, as `prove` sees it."""
        start, end = (self.thinking_prompt.rfind(marker) for marker in think)
        return start > max(end, self.thinking_prompt.rfind(PROBE[-1]["content"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipeline.identify")
    parser.add_argument(
        "--suggest", metavar="DIR_OR_ID", required=True, help="write a profile for this model"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )
    arguments = parser.parse_args()
    slug = slug_of(arguments.suggest)
    path = PROFILES / f"{slug}.yaml"
    if path.exists():
        raise ParamsError(f"{path} exists and may hold your changes: rename or remove it first")
    present = load_params()
    model = read_model(arguments.suggest, trust_remote_code=arguments.trust_remote_code)
    lines = list(suggestion(model, present))
    text = profile_text(model, lines)
    write_bytes(path, text.encode())
    _show(model, lines, slug, path)


def slug_of(model: str) -> str:
    name = Path(model).resolve().name if Path(model).is_dir() else model.rsplit("/")[-1]
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "model"


def read_model(name: str, *, trust_remote_code: bool) -> Model:
    """
    Raises:
        VerifierError: there is no such model, its files are incomplete, or its tokenizer is code
            that nobody allowed to run.
    """
    if Path(name).is_dir():
        folder, revision = Path(name), None
        weights_bytes = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
    else:
        folder, revision, weights_bytes = _from_hub(name)
    if not (folder / "config.json").is_file():
        raise VerifierError(f"{name} holds no config.json, so it is no model that vLLM serves")
    top = read_config(folder / "config.json")
    text = top.get("text_config") or {}
    config = {**top, **text}
    for key in ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        if not isinstance(config.get(key), int):
            raise VerifierError(f"config.json of {name} holds no {key}")
    of_tokenizer = _json(folder / "tokenizer_config.json").get("auto_map") or {}
    if "AutoTokenizer" in of_tokenizer and not trust_remote_code:
        raise VerifierError(
            f"the tokenizer of {name} is Python code that comes with it: read the *.py files in "
            f"{folder}, then add --trust-remote-code"
        )
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise VerifierError(f"{name} has no chat template, so nothing can be asked")
    return Model(
        name=name.rstrip("/"),
        revision=revision,
        config=config,
        model_types=frozenset(part["model_type"] for part in (top, text) if "model_type" in part),
        sampling=_json(folder / "generation_config.json"),
        tokenizer=tokenizer,
        end_ids=end_ids(folder, config, tokenizer),
        weights_bytes=weights_bytes,
        has_own_code=bool(of_tokenizer or top.get("auto_map")),
        runs_own_code=trust_remote_code,
    )


def _from_hub(model: str) -> tuple[Path, str, int]:
    """The small files of the latest commit, the commit, and the bytes of its weights."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        info = HfApi().model_info(model, files_metadata=True)
    except (httpx2.HTTPError, HFValidationError, OSError) as error:
        raise VerifierError(
            f"{model} is no folder here, and the hub does not give it ({type(error).__name__}): "
            "check the name, the network and HF_TOKEN"
        ) from error
    assert info.sha
    weights = [file for file in info.siblings or [] if Path(file.rfilename).match(WEIGHTS)]
    return small_files(model, info.sha), info.sha, sum(file.size or 0 for file in weights)


def _json(path: Path) -> dict[str, Any]:
    return read_config(path) if path.is_file() else {}


def suggestion(model: Model, present: Params) -> Iterator[Line]:
    """Every value that is about the model, in the order of params.yaml.

    Raises:
        VerifierError: the model is none that this pipeline can train a draft for.
    """
    think, think_sure, think_why = think_tokens(model)
    family = list(_family(model, think))
    name = family[0].value
    dtype = _dtype(model)
    yield from _verifier(model, present, dtype, _parser(model, think, name))
    yield Line("think.start", think.start, think_sure, think_why)
    yield Line("think.end", think.end, think_sure, think_why)
    yield Line("think.start_id", model.added[think.start], "proved", "the tokenizer's")
    yield Line("think.end_id", model.added[think.end], "proved", "the tokenizer's")
    yield from family
    yield from _generate(model, present, name)
    yield from _states(model, present, dtype.value)
    yield from _plan(model)


def think_tokens(model: Model) -> tuple[Think, Literal["proved", "guess"], str]:
    """The tokens around the reasoning.

    Raises:
        VerifierError: there are none, or each is several tokens.
    """
    pairs = [
        Think(start, end)
        for start in model.added
        if THINK_WORD.search(start)
        for end in dict.fromkeys(_closing_forms(start))
        if end != start and end in model.added
    ]
    template = str(model.tokenizer.chat_template)
    if not pairs:
        raise VerifierError(f"{model.name} {_why_no_think_tokens(model, template)}")
    mentioned = [pair for pair in pairs if any(marker in template for marker in pair)]
    if not mentioned:
        return (
            pairs[0],
            "guess",
            "added tokens, but the chat template has neither: the model may not reason",
        )
    if len(mentioned) > 1:
        others = ", ".join(" ".join(pair) for pair in mentioned[1:])
        return mentioned[0], "guess", f"the chat template also has {others}"
    return mentioned[0], "proved", "added tokens that the chat template has too"


def _closing_forms(start: str) -> Iterator[str]:
    """`</think>` of `<think>`, `[/THINK]` of `[THINK]`, `<|end_think|>` of `<|start_think|>`."""
    yield f"{start[0]}/{start[1:]}"
    yield re.sub(r"^(\W+)", r"\1/", start)
    for opening, closing in (("start", "end"), ("begin", "end"), ("open", "close")):
        yield start.replace(opening, closing)
        yield start.replace(opening.upper(), closing.upper())


def _why_no_think_tokens(model: Model, template: str) -> str:
    needed = "this pipeline needs one think-start and one think-end token"
    if channels := [text for text in model.added if "channel" in text and text in template]:
        return f"reasons in channels ({channels[0]}), opened by several tokens each; {needed}"
    for marker in MARKER.findall(template):
        ids = model.tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) > 1:
            return f"writes {marker!r} as {len(ids)} tokens; {needed}"
    return (
        "has no think tokens: none of its added tokens opens or closes reasoning, so it does not "
        "reason and a draft for it needs no reasoning data"
    )


def _dtype(model: Model) -> Line:
    dtype = model.config.get("dtype") or model.config.get("torch_dtype")
    if dtype in get_args(Dtype):
        return Line("verifier.dtype", dtype, "proved", "config.json")
    why = f"config.json says {dtype or 'nothing'}; most models are trained in this one"
    return Line("verifier.dtype", "bfloat16", "guess", why)


def _verifier(model: Model, present: Params, dtype: Line, parser: Line) -> Iterator[Line]:
    yield Line("verifier.model", model.name, "proved", "as given")
    commit = "the latest commit on the hub" if model.revision else "a folder has none"
    yield Line("verifier.revision", model.revision, "proved", commit)
    yield dtype
    quantized = model.config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    why = f"vLLM reads {method} from config.json" if quantized else "config.json names none"
    yield Line("verifier.quantization", None, "likely", why)
    context = model.config["max_position_embeddings"]
    why = f"the context of the model is {context}; more than {LONGEST} is seldom needed"
    yield Line("verifier.max_model_len", model.max_model_len, "likely", why)
    yield parser
    yield _trust(model)
    for key in ("server_args", "server_env"):
        if value := getattr(present.verifier, key):
            why = f"as in {PARAMS_PATH}, where {present.verifier.model} is served with it"
            yield Line(f"verifier.{key}", value, "guess", why)


def _parser(model: Model, think: Think, family: str) -> Line:
    """The reasoning parser, one that this vLLM has."""
    from vllm.reasoning import ReasoningParserManager

    key, registered = "verifier.reasoning_parser", ReasoningParserManager.list_registered()
    if family in FAMILIES:
        parser = FAMILIES[family].parsers[0]
        if parser in registered:
            return Line(key, parser, "likely", f"vLLM has it, for the family {family}")
        return Line(key, None, "guess", f"this vLLM has no {parser}, which {family} needs")
    if named := sorted(model.model_types.intersection(registered)):
        return Line(key, named[0], "guess", "vLLM has one of the name of the architecture")
    if think == ("<think>", "</think>"):
        why = "vLLM has none for this architecture; this one splits at </think>"
        return Line(key, "deepseek_r1", "guess", why)
    return Line(key, None, "guess", "vLLM has none for this architecture: see its list")


def _trust(model: Model) -> Line:
    key = "verifier.trust_remote_code"
    if not model.has_own_code:
        return Line(key, False, "proved", "no code comes with the model")
    if model.runs_own_code:
        return Line(key, True, "proved", "code comes with the model, and you allowed it")
    why = "config.json names code that comes with the model; vLLM has its own for most of them"
    return Line(key, False, "guess", why)


def _family(model: Model, think: Think) -> Iterator[Line]:
    """`family.name`, and what `family.custom` needs where no family of the table fits."""
    fits = [name for name in FAMILIES if _fits(name, model, think)]
    hinted = [
        name
        for name in fits
        if any(kind.startswith(MODEL_TYPES[name]) for kind in model.model_types)
    ]
    name = next(iter(hinted or fits), "custom")
    kinds = ", ".join(sorted(model.model_types)) or "of no name"
    if not fits:
        yield Line("family.name", name, "likely", "no family of the table writes such prompts")
        yield from _custom(model, think)
    elif not hinted:
        why = f"writes such prompts, but the architecture is {kinds}: newlines may be others"
        yield Line("family.name", name, "guess", why)
    elif any(FAMILIES[other].writes != FAMILIES[name].writes for other in hinted):
        yield Line("family.name", name, "guess", f"{', '.join(hinted[1:])} would fit as well")
    elif len(hinted) > 1 or not FAMILIES[name].verified:
        why = f"markers, prompt and architecture ({kinds}) are its own; newlines are not proved"
        yield Line("family.name", name, "likely", why)
    else:
        why = f"markers, prompt and architecture ({kinds}) are its own"
        yield Line("family.name", name, "proved", why)


def _fits(name: str, model: Model, think: Think) -> bool:
    """Whether all that can be seen of a family is so: markers, end of the turn, prompt, switch."""
    family, switch = FAMILIES[name].writes, FAMILIES[name].thinking_switch
    markers = (family.end_of_turn, *family.role_tokens, *family.control_tokens)
    return (
        all(marker in model.added for marker in markers)
        and all(marker in model.thinking_prompt for marker in family.role_tokens)
        and model.added[family.end_of_turn] in model.end_ids
        and family.prefilled in (None, model.prefills(think))
        and (switch in model.switches if switch else not model.switches)
    )


def _custom(model: Model, think: Think) -> Iterator[Line]:
    """A family as the rendered conversation shows it.

    Raises:
        VerifierError: no token shows where a turn begins or ends.
    """
    marker = re.compile("|".join(map(re.escape, sorted(model.added, key=len, reverse=True))))
    _, _, after_answer = model.thinking_prompt.partition(PROBE[-2]["content"])
    before_user, _, before_assistant = after_answer.rpartition(PROBE[-1]["content"])
    between = marker.findall(before_user)
    ends = [text for text in model.added if model.added[text] in model.end_ids]
    end = next((text for text in between if text in ends), None)
    opening = dict.fromkeys([*between, *marker.findall(before_assistant)])
    roles = [text for text in opening if text not in (end, *think)]
    if not ends or not roles:
        what = "begins" if ends else "ends"
        raise VerifierError(
            f"{model.name}: in a conversation that its chat template renders no token {what} a "
            f"turn ({after_answer!r} follows an answer), so no sequence of it could be checked"
        )
    why = "as its chat template renders with thinking on"
    yield Line("family.custom.prefilled", model.prefills(think), "proved", why)
    for key in ("before_think_start", "after_think_start", "before_think_end", "after_think_end"):
        why = "the white space that it writes there shows in its answers only"
        yield Line(f"family.custom.{key}", "", "guess", why)
    key = "family.custom.end_of_turn"
    if end:
        yield Line(key, end, "likely", "follows an answer and ends generation")
    else:
        yield Line(key, ends[0], "guess", "ends generation, but follows no rendered answer")
    yield Line("family.custom.role_tokens", roles, "likely", "stand between rendered turns")
    why = "identify adds all special and added tokens of the tokenizer"
    yield Line("family.custom.control_tokens", [], "likely", why)


def _generate(model: Model, present: Params, family: str) -> Iterator[Line]:
    generate, room = present.generate, model.max_model_len
    known = FAMILIES[family].thinking_switch if family in FAMILIES else None
    switch = known or next(iter(model.switches), None)
    key = "generate.thinking_switch"
    if switch and (known or len(model.switches) == 1):
        yield Line(key, switch, "proved", "on and off make different prompts")
    elif switch:
        yield Line(key, switch, "guess", f"{' and '.join(model.switches)} change prompts")
    else:
        yield Line(key, None, "proved", f"neither {' nor '.join(SWITCHES)} changes a prompt")
    for key in ("generate.endpoints", "extract.endpoints"):
        section, _, field = key.partition(".")
        if getattr(getattr(present, section), field):
            yield Line(key, [], "likely", f"those of {PARAMS_PATH} serve another model")
    if max(generate.max_tokens, generate.retry_max_tokens) >= room:
        why = f"the present {generate.max_tokens} or its retry does not fit the context"
        yield Line("generate.max_tokens", room // 2, "guess", why)
        yield Line("generate.retry_max_tokens", room * 3 // 4, "guess", why)
    elif generate.max_tokens < room * SHORT_ANSWERS:
        why = (
            f"as in {PARAMS_PATH}; longer reasoning is cut, and reassemble.max_tokens and "
            "train.max_tokens_per_batch grow with it"
        )
        yield Line("generate.max_tokens", generate.max_tokens, "guess", why)
    if present.benchmark.max_tokens >= room:
        why = f"the present {present.benchmark.max_tokens} does not fit the context"
        yield Line("benchmark.max_tokens", room // 2, "guess", why)
    if switch is None and present.benchmark.both_thinking_modes:
        yield Line("benchmark.both_thinking_modes", False, "proved", "there is no switch")
    advised = {} if model.sampling.get("do_sample") is False else model.sampling
    for key, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
        if advised.get(key) is not None:
            value = max(kind(advised[key]), 0)  # -1 is another spelling of 0 for top_k
            yield Line(f"generate.{key}", value, "likely", "generation_config.json")
    if generate.temperature == 0 and advised.get("temperature") is None:
        why = f"as in {PARAMS_PATH}; greedy, many a reasoning model repeats itself"
        yield Line("generate.temperature", 0.0, "guess", why)


def _states(model: Model, present: Params, dtype: str) -> Iterator[Line]:
    """
    Raises:
        VerifierError: there are no three layers to choose from.
    """
    vocab_size, num_layers = model.config["vocab_size"], model.config["num_hidden_layers"]
    if present.reassemble.draft_vocab_size > vocab_size:
        yield Line("reassemble.draft_vocab_size", vocab_size, "proved", "all that the model has")
    layers = usual_layers(num_layers)
    if not layers:
        raise VerifierError(f"{model.name} has {num_layers} layers, and a draft sees three")
    why = f"of {num_layers} layers an early, a middle and a late one"
    yield Line("extract.layer_ids", layers, "likely", why)
    if present.extract.dtype == present.verifier.dtype:
        yield Line("extract.dtype", dtype, "likely", "as the model calculates; nothing is lost")
    if present.train.init_from:
        why = f"{present.train.init_from} drafts for {present.verifier.model}"
        yield Line("train.init_from", None, "likely", why)


def _plan(model: Model) -> Iterator[Line]:
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        value = model.config.get(key)
        if isinstance(value, int) and value > 0:
            yield Line(f"plan.{key}", value, "proved", "config.json")
        else:
            yield Line(f"plan.{key}", None, "guess", "config.json holds none")
    if model.weights_bytes:
        size_gb = float(f"{model.weights_bytes / 1e9:.3g}")
        yield Line("plan.weights_gb", size_gb, "proved", f"size of its {WEIGHTS}")
    else:
        yield Line("plan.weights_gb", None, "guess", f"no {WEIGHTS} here, which vLLM needs")


def profile_text(model: Model, lines: list[Line]) -> str:
    """params.yaml with the suggested values, as a profile, proved as `identify` does.

    Raises:
        ParamsError: they do not go together; a model with strange files.
    """
    values = yaml.safe_load(PARAMS_PATH.read_text(encoding="utf-8"))
    values["family"]["custom"] = None
    values["plan"] |= dict.fromkeys(MEASURED)
    for line in lines:
        _set(values, line)
    sources = values["plan"]["facts_from"]
    at = f" at {model.revision}" if model.revision else ""
    for line in lines:
        if line.key.startswith("plan."):
            sources[line.key.removeprefix("plan.")] = f"{model.name}{at}: {line.why}"
    values["plan"]["facts_from"] = {
        key: source for key, source in sources.items() if values["plan"][key] is not None
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000)
    with TemporaryDirectory() as folder:
        path = Path(folder) / PARAMS_PATH.name
        path.write_text(text, encoding="utf-8")
        rows = text.splitlines()
        for line in lines:
            if line.sure == "guess":
                rows[line_of(line.key, path) - 1] += f"  # unsure: {' '.join(line.why.split())}"
        text = "\n".join([f"# Suggested for {model.name} from its own files", "", *rows, ""])
        path.write_text(text, encoding="utf-8")
        params = load_params(path)
    think_ids(model.tokenizer, params.think)
    prove(family_of(params.family), model.tokenizer, params)
    return text


def _set(values: dict[str, Any], line: Line) -> None:
    *sections, name = line.key.split(".")
    for part in sections:
        if values[part] is None:  # family.custom
            values[part] = {}
        values = values[part]
    values[name] = line.value


def _show(model: Model, lines: list[Line], slug: str, path: Path) -> None:
    out = Console()
    table = Table("key", "value", "how sure", box=SIMPLE)
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True
    for line in lines:
        value = yaml.safe_dump(line.value, default_flow_style=True, allow_unicode=True, width=1000)
        shown = value.removesuffix("...\n").strip()
        table.add_row(*map(Text, (line.key, shown, f"{line.sure}: {line.why}")))
    out.print(table)
    ends = [f"{text} {i}" for text, i in model.added.items() if i in model.end_ids]
    num_unsure = sum(line.sure == "guess" for line in lines)
    next_steps = (
        f"A generated turn ends with {', '.join(ends)}.",
        f"All else is as in {PARAMS_PATH}. {path} is written; of its values {num_unsure} are "
        "marked `# unsure`: read those, then",
        f"  make use PROFILE={slug}",
        "  python -m pipeline.identify",
        "and on with docs/your_model.md",
    )
    print("\n".join(next_steps))
