"""What a run will take, from params alone: questions, tokens, bytes, memory and seconds, and
whether it fits.

Pure arithmetic for pipeline.plan. A Figure says where its number is from. What is unknown has no
number, nor has what is calculated from it; of a sum that is known in part, the part is a bound.
"""

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipeline.errors import ParamsError
from pipeline.params import Params
from pipeline.room import size, staging_bytes
from pipeline.shards import STORED_AS

# Of a trace beside its token ids: question, reasoning and answer as text, some 4.5 bytes a token.
TEXT_BYTES_A_TOKEN = 4.5
ID_AND_MASK_BYTES = 8 + 1  # of a token of a sequence
SEQUENCE_BYTES = 200  # of a sequence beside them: key, names, spans
TRAINED_BYTES = 16  # a trained parameter: float32 weight, gradient, two moments (Muon has one)
FROZEN_BYTES = 4
SHARING_BLOCKS = frozenset({"xfs", "btrfs"})  # with reflinks, which DVC tries first
GPU_MEMORY_UTILIZATION = 0.92  # vLLM 0.32's, where server_args name none


class Figure(NamedTuple):
    """A number, or None where it is unknown, and where it is from."""

    value: float | None
    source: str
    bound: Literal["", "≥ ", "≤ "] = ""
    """what the true number may be beside it"""


class Quantities(NamedTuple):
    """Of one run in which all is asked."""

    questions: Figure
    requests: Figure
    prompt_tokens: Figure
    answer_tokens: Figure
    tokens: Figure
    """of all sequences; where the length of a prompt is unknown, of the answers alone"""
    training_tokens: Figure
    tokens_per_step: int
    epochs: Figure
    """at most, for no batch is quite full"""


class Measured(NamedTuple):
    """What an earlier run with the same prompts and settings of generate found."""

    questions: int
    rows: int
    """answers: with prompts.turns: all there is more than one to a question"""
    prompt_tokens: int
    generated_tokens: int


class DraftParameters(NamedTuple):
    trained: int
    frozen: int
    """embeddings and head, which are the verifier's, and in training its head and norm once more"""
    saved: int


class Servers(NamedTuple):
    """How server_args spread the verifier."""

    gpus_a_copy: int
    copies: int
    utilization: float


def fact(params: Params, name: str) -> Figure:
    value = getattr(params.plan, name)
    if value is None:
        return Figure(None, f"plan.{name} is null")
    return Figure(value, f"plan.{name}: {params.plan.facts_from[name]}")


def product(*values: float | None) -> float | None:
    """None where one is unknown."""
    known = [value for value in values if value is not None]
    return math.prod(known) if len(known) == len(values) else None


def quantities(params: Params, measured: Measured | None) -> Quantities:
    prompts, train = params.prompts, params.train
    asked, there = prompts.sample_cap + prompts.num_held_out, params.plan.num_questions
    questions = Figure(asked, "prompts.sample_cap + prompts.num_held_out")
    if there is not None and there < asked:
        questions = fact(params, "num_questions")
    number = min(asked, asked if there is None else there)
    if measured:
        source = f"reports/generate.json: {measured.rows:,} answers of a run with these params"
        requests = Figure(number * measured.rows / measured.questions, source)
        prompt = Figure(measured.prompt_tokens / measured.rows, source)
        answer = Figure(measured.generated_tokens / measured.rows, source)
    else:
        if prompts.turns == "first":
            requests = Figure(number, "one a question (prompts.turns: first)")
        else:
            requests = Figure(number, "prompts.turns: all, at least one a question", "≥ ")
        prompt, answer = fact(params, "prompt_tokens"), fact(params, "generated_tokens")
        if answer.value is not None and answer.value > params.generate.max_tokens:
            answer = Figure(params.generate.max_tokens, "generate.max_tokens cuts them", "≤ ")
    bound = requests.bound
    prompt_tokens = Figure(product(requests.value, prompt.value), _each(prompt), bound)
    answer_tokens = Figure(
        product(requests.value, answer.value), _each(answer), answer.bound or bound
    )
    tokens = _sum(prompt_tokens, answer_tokens)
    share = max(number - prompts.num_held_out, 0) / number
    training = Figure(
        product(tokens.value, share), "tokens of sequences, less those held out", tokens.bound
    )
    # Each process takes a batch of its own in a step.
    tokens_per_step = train.max_tokens_per_batch * train.num_processes
    seen = train.num_steps * tokens_per_step
    epochs = Figure(
        seen / training.value if training.value else None,
        f"train.num_steps {train.num_steps:,} x {tokens_per_step:,} tokens a step "
        "(train.max_tokens_per_batch x train.num_processes) / tokens to train on",
        "≤ ",
    )
    return Quantities(
        questions, requests, prompt_tokens, answer_tokens, tokens, training, tokens_per_step, epochs
    )


def _each(mean: Figure) -> str:
    return f"{mean.value:,.1f} each, {mean.source}" if mean.value is not None else mean.source


def _sum(prompts: Figure, answers: Figure) -> Figure:
    if answers.value is None or prompts.value is None:
        alone = f"the answers alone ({prompts.source})" if answers.value else answers.source
        return Figure(answers.value, alone, "≥ " if answers.value else "")
    return Figure(prompts.value + answers.value, "prompts + answers", answers.bound)


def state_bytes(params: Params, hidden_size: int, tokens: float, answer_tokens: float) -> float:
    """Of shards: three layers of every token, the last one of generated tokens, an int64 id a
    token, and of float8 a byte of scale a row."""
    value = STORED_AS[params.extract.dtype].itemsize
    rows = len(params.extract.layer_ids) * tokens + answer_tokens
    scales = rows if value == 1 else 0
    return rows * hidden_size * value + scales + 8 * tokens


def trace_bytes_a_token(vocab_size: int) -> float:
    """At most: the digits of the largest id, a comma, and the text."""
    return len(str(vocab_size - 1)) + 1 + TEXT_BYTES_A_TOKEN


def bytes_on_disk(params: Params, found: Quantities) -> dict[str, Figure]:
    """Once, in the workspace, by the stage that writes them."""
    return {
        "generate": _trace_bytes(params, found),
        "reassemble": _sequence_bytes(found),
        "extract": _extract_bytes(params, found),
        "train": _draft_bytes(params),
    }


def _trace_bytes(params: Params, found: Quantities) -> Figure:
    if params.plan.vocab_size is None:
        return fact(params, "vocab_size")
    a_token = trace_bytes_a_token(params.plan.vocab_size)
    source = f"tokens x {a_token} (digits of an id, a comma, {TEXT_BYTES_A_TOKEN} of text), about"
    return _of_tokens(found, product(found.tokens.value, a_token), source)


def _sequence_bytes(found: Quantities) -> Figure:
    of_tokens = product(found.tokens.value, ID_AND_MASK_BYTES)
    of_rows = product(found.requests.value, SEQUENCE_BYTES)
    total = None if of_tokens is None or of_rows is None else of_tokens + of_rows
    source = (
        f"tokens x {ID_AND_MASK_BYTES} (id and mask) + sequences x {SEQUENCE_BYTES} (key, spans)"
    )
    return _of_tokens(found, total, source)


def _extract_bytes(params: Params, found: Quantities) -> Figure:
    hidden_size, dtype = params.plan.hidden_size, params.extract.dtype
    if params.extract.mode == "streamed":
        return Figure(0, "extract.mode: streamed")
    if hidden_size is None:
        return fact(params, "hidden_size")
    tokens, answers = found.tokens.value, found.answer_tokens.value
    total = None
    if tokens is not None and answers is not None:
        total = state_bytes(params, hidden_size, tokens, answers)
    value = STORED_AS[dtype].itemsize
    source = (
        f"tokens x hidden_size {hidden_size:,} x {value} ({dtype}) x 3 layers and, of answers, the "
        f"last one: {4 * hidden_size * value:,} a token where all 4 count; an id is 8 more"
        + (", a row 1 of scale" if value == 1 else "")
    )
    return _of_tokens(found, total, source)


def _of_tokens(found: Quantities, total: float | None, source: str) -> Figure:
    return Figure(total, found.tokens.source if total is None else source, found.tokens.bound)


def _draft_bytes(params: Params) -> Figure:
    draft = draft_parameters(params)
    if draft is None:
        return _no_shape(params)
    value = STORED_AS[params.verifier.dtype].itemsize
    return Figure(draft.saved * value, f"its parameters x {value} (verifier.dtype)", "≤ ")


def _no_shape(params: Params) -> Figure:
    facts = [fact(params, name) for name in ("hidden_size", "intermediate_size", "vocab_size")]
    return next(figure for figure in facts if figure.value is None)


def checkpoint_bytes(params: Params) -> Figure:
    """On disk while it trains."""
    draft = draft_parameters(params)
    if draft is None:
        return _no_shape(params)
    return Figure(
        2 * TRAINED_BYTES * draft.trained,
        f"trained parameters x {TRAINED_BYTES} (weights, the best ones, two moments), twice while "
        "one takes the place of the last",
        "≤ ",
    )


def staging(params: Params) -> Figure:
    """What the server of hidden states stages, as that server calculates it."""
    if params.plan.hidden_size is None:
        return fact(params, "hidden_size")
    return Figure(
        staging_bytes(params, params.plan.hidden_size),
        f"2 x extract.concurrency {params.extract.concurrency} x verifier.max_model_len "
        f"{params.verifier.max_model_len:,} x 4 layers in {params.verifier.dtype}",
    )


def draft_parameters(params: Params) -> DraftParameters | None:
    plan = params.plan
    if plan.hidden_size is None or plan.intermediate_size is None or plan.vocab_size is None:
        return None
    return parameters_of_shape(
        plan.hidden_size,
        plan.intermediate_size,
        plan.vocab_size,
        params.reassemble.draft_vocab_size,
        params.train.num_layers,
        plan.hidden_size,
        plan.hidden_size,
    )


def parameters_of_shape(
    hidden: int,
    intermediate: int,
    vocab: int,
    draft_vocab: int,
    num_layers: int,
    query: int,
    key_value: int,
) -> DraftParameters:
    """speculators' EAGLE-3. `query` and `key_value` are heads x head size; where that is unknown,
    the hidden size is more than most models have."""
    fc = 3 * hidden * hidden
    mlp = 3 * hidden * intermediate
    # The first layer's attention reads embedding and state side by side, each with a norm.
    first = 2 * hidden * (query + 2 * key_value) + query * hidden + mlp + 3 * hidden
    further = hidden * (query + 2 * key_value) + query * hidden + mlp + 2 * hidden
    head = draft_vocab * hidden
    trained = fc + first + (num_layers - 1) * further + hidden
    embeddings = vocab * hidden
    # In training there is a second head beside the verifier's norm: it makes the targets.
    return DraftParameters(trained, embeddings + 2 * head + hidden, trained + embeddings + head)


def training_bytes(draft: DraftParameters) -> int:
    """Of weights, gradients and optimizer, over all processes; activations are not in it."""
    return draft.trained * TRAINED_BYTES + draft.frozen * FROZEN_BYTES


def servers(server_args: Sequence[str]) -> Servers:
    """Raises ParamsError for numbers that vLLM would not take."""
    try:
        tensor = int(_argument(server_args, "--tensor-parallel-size", "-tp") or 1)
        pipeline = int(_argument(server_args, "--pipeline-parallel-size", "-pp") or 1)
        copies = int(_argument(server_args, "--data-parallel-size", "-dp") or 1)
        share = float(_argument(server_args, "--gpu-memory-utilization") or GPU_MEMORY_UTILIZATION)
        if min(tensor, pipeline, copies) < 1 or not 0 < share <= 1:
            raise ValueError("out of range")
    except ValueError as error:
        raise ParamsError(f"verifier.server_args: {' '.join(server_args)}: {error}") from error
    return Servers(tensor * pipeline, copies, share)


def _argument(server_args: Sequence[str], *names: str) -> str | None:
    """The value of `--name value` or `--name=value`; the last one counts, as for vLLM."""
    found = None
    for place, argument in enumerate(server_args):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else (*server_args[place + 1 :], None)[0]
    return found


def weights_a_gpu(params: Params) -> Figure:
    """In GB."""
    weights = fact(params, "weights_gb")
    number = servers(params.verifier.server_args).gpus_a_copy
    if weights.value is None or not params.plan.num_gpus:
        return weights
    return Figure(weights.value / number, f"{weights.source}; over {number} GPUs (server_args)")


def seconds(work: Figure, tokens_per_s: Figure) -> Figure:
    if work.value is None or tokens_per_s.value is None:
        missing = work if work.value is None else tokens_per_s
        return Figure(None, missing.source)
    return Figure(
        work.value / tokens_per_s.value,
        f"{work.value:,.0f} tokens / {tokens_per_s.value:,.0f} a second, {tokens_per_s.source}",
        work.bound,
    )


# Does it fit?


class Disk(NamedTuple):
    """Where the outputs go."""

    free: int
    cache_free: int | None
    """of DVC's cache; None: it is on the same file system"""
    kind: str
    """the name of the file system"""

    @property
    def shares_blocks(self) -> bool:
        """Whether a copy in the cache takes nothing."""
        return self.kind in SHARING_BLOCKS and self.cache_free is None


class Place(NamedTuple):
    """Where a run would happen, and what is there already."""

    runs: frozenset[str]
    """stages"""
    there: Mapping[str, int]
    """bytes of the outputs that stay, by stage"""
    measured: Measured | None
    disk: Disk
    shared_memory: int
    """free there"""


class Need(NamedTuple):
    """Of the stages that run, less what is there."""

    outputs: Figure
    unfinished: float
    """only while a stage runs"""


def need(params: Params, place: Place) -> Need:
    takes = bytes_on_disk(params, quantities(params, place.measured))
    wanted = {name: figure for name, figure in takes.items() if name in place.runs}
    known = {name: figure.value for name, figure in wanted.items() if figure.value is not None}
    outputs = Figure(
        sum(max(value - place.there.get(name, 0), 0) for name, value in known.items()),
        "outputs of the stages that run, less what is there",
        "≥ "
        if len(known) < len(wanted) or any(figure.bound == "≥ " for figure in wanted.values())
        else "",
    )
    checkpoint = (checkpoint_bytes(params).value or 0) if "train" in place.runs else 0
    staged = (staging(params).value or 0) if staged_on_disk(params, place) else 0
    # Streamed, the server of hidden states runs while train does, else before it.
    together = params.extract.mode == "streamed"
    return Need(outputs, checkpoint + staged if together else max(checkpoint, staged))


def staged_on_disk(params: Params, place: Place) -> bool:
    asks = "extract" in place.runs or (params.extract.mode == "streamed" and "train" in place.runs)
    return asks and (staging(params).value or 0) > place.shared_memory


def fits(params: Params, place: Place) -> bool:
    wanted, disk = need(params, place), place.disk
    copies = wanted.outputs.value or 0
    fit_in_cache = disk.cache_free is None or copies <= disk.cache_free
    return fit_in_cache and (in_all(wanted, disk).value or 0) <= disk.free


def largest_cap(params: Params, place: Place) -> int:
    """The most questions to train on that fit; 0: not even one does."""
    caps = range(1, params.prompts.sample_cap + 1)
    return bisect.bisect_left(caps, True, key=lambda cap: not fits(with_cap(params, cap), place))


def with_cap(params: Params, cap: int) -> Params:
    prompts = params.prompts.model_copy(update={"sample_cap": cap})
    return params.model_copy(update={"prompts": prompts})


def with_extract(params: Params, **values: str) -> Params:
    return params.model_copy(update={"extract": params.extract.model_copy(update=values)})


def refusals(params: Params, place: Place) -> list[str]:
    """Why this cannot be run, and what could."""
    prompts, questions = params.prompts, params.plan.num_questions
    refused = []
    if questions is not None and prompts.sample_cap + prompts.num_held_out > questions:
        most = questions - prompts.num_held_out
        refused.append(
            f"prompts.sample_cap {prompts.sample_cap:,} and prompts.num_held_out "
            f"{prompts.num_held_out:,} are more than the {questions:,} questions; what would fit: "
            + (f"prompts.sample_cap: {most}" if most > 0 else "a smaller prompts.num_held_out")
        )
    layers = params.plan.num_hidden_layers
    if layers is not None and params.extract.layer_ids[-1] >= layers:
        refused.append(
            f"extract.layer_ids {params.extract.layer_ids} of {layers} layers, of which the last "
            "comes by itself"
        )
    missing = [source for source in prompts.sources if not Path(source).exists()]
    if missing and not prompts.urls:
        refused.append(f"{missing[0]} of prompts.sources is not here, and prompts.urls names none")
    if not fits(params, place):
        refused.append(no_room(params, place))
    return refused + beyond_gpus(params)


def no_room(params: Params, place: Place) -> str:
    disk, wanted = place.disk, need(params, place)

    def takes(other: Params, where: Place) -> str:
        taken = in_all(need(other, where), where.disk)
        verdict = ("may fit" if taken.bound else "fits") if fits(other, where) else "does not fit"
        return f"{written(taken, as_size)}: {verdict}"

    anew = place._replace(there={**place.there, "extract": 0})
    options = []
    if "extract" in place.runs and params.extract.mode == "stored":
        if params.extract.dtype != "float8_e4m3":
            other = with_extract(params, dtype="float8_e4m3")
            options.append(f"extract.dtype: float8_e4m3 ({takes(other, anew)})")
        also = " with train.num_processes: 1" if params.train.num_processes > 1 else ""
        if params.plan.num_gpus:
            also += ", a GPU kept back from the server for the training"
        other = with_extract(params, mode="streamed")
        options.append(f"extract.mode: streamed{also} ({takes(other, anew)})")
    cap = largest_cap(params, place)
    if cap:
        at_most = "at most " if wanted.outputs.bound else ""
        options.append(f"a smaller prompts.sample_cap ({at_most}{cap:,} would fit)")
    if staged_on_disk(params, place):
        options.append("a smaller extract.concurrency")
    if disk.cache_free is None and not disk.shares_blocks:
        sharing = place._replace(disk=disk._replace(kind="xfs"))
        options.append(
            f"xfs or btrfs, which have reflinks, with as much room ({takes(params, sharing)})"
        )
    free = f"{size(disk.free)} are free here"
    if disk.cache_free is not None:
        free += f" and {size(disk.cache_free)} where DVC's cache is"
    needed = written(in_all(wanted, disk), as_size)
    return f"the outputs need {needed}, but {free}; what helps:" + "".join(
        f"\n    {option}" for option in options
    )


def in_all(wanted: Need, disk: Disk) -> Figure:
    """What must be free in the workspace."""
    once = disk.shares_blocks or disk.cache_free is not None
    total = (1 if once else 2) * (wanted.outputs.value or 0) + wanted.unfinished
    source = (
        f"{wanted.outputs.source}{'' if once else ', twice'}, and {as_size(wanted.unfinished)} "
        "of checkpoint or staged files while they last"
    )
    return Figure(total, source, wanted.outputs.bound)


def beyond_gpus(params: Params) -> list[str]:
    plan, parallel = params.plan, servers(params.verifier.server_args)
    if not plan.num_gpus:
        return []
    refused = []
    if parallel.gpus_a_copy * parallel.copies > plan.num_gpus:
        refused.append(
            f"verifier.server_args want {parallel.gpus_a_copy * parallel.copies} GPUs, "
            f"plan.num_gpus is {plan.num_gpus}"
        )
    if params.train.num_processes > plan.num_gpus:
        refused.append(
            f"train.num_processes is {params.train.num_processes}, plan.num_gpus is {plan.num_gpus}"
        )
    each, memory = weights_a_gpu(params).value, plan.gpu_memory_gb
    if each is None or memory is None or plan.weights_gb is None:
        return refused
    usable = memory * parallel.utilization
    if each >= usable:
        enough = 2 ** math.ceil(math.log2(plan.weights_gb / usable))  # it divides the heads
        helps = f"--tensor-parallel-size of {enough} or more in verifier.server_args"
        if enough > plan.num_gpus:
            helps = f"{enough} such GPUs or more, or weights of fewer bytes"
        refused.append(
            f"the weights take {each:,.1f} GB of each GPU, of whose {memory:,.0f} GB vLLM uses "
            f"{usable:,.1f} (--gpu-memory-utilization {parallel.utilization}); what would fit: "
            f"{helps}"
        )
    draft = draft_parameters(params)
    if draft and training_bytes(draft) / params.train.num_processes > memory * 1e9:
        refused.append(
            f"training the draft takes {size(training_bytes(draft))}, more than "
            f"{params.train.num_processes} GPUs have; what would fit: a larger train.num_processes"
        )
    return refused


def written(figure: Figure, form: Callable[[float], str] = "{:,.0f}".format) -> str:
    if figure.value is None:
        return "unknown"
    return figure.bound + form(figure.value)


def as_size(number: float) -> str:
    return size(int(number))


def duration(number: float) -> str:
    if number < 120:
        return f"{number:,.0f} s"
    if number < 7200:
        return f"{number / 60:,.0f} min"
    return f"{number / 3600:,.1f} h"
