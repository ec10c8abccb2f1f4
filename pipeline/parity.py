"""The parity gate: are the states that the server gives the verifier's own?

    make parity          (python -m pipeline.parity)

reads   data/sequences, data/verifier.json, the verifier's files
writes  nothing; `extract`, which asks first thing on new settings, keeps the measured errors in
        data/hidden_states/parity.json

8 sequences are asked one by one, with the server's likeliest tokens, then all at once, just as
`extract` asks: a request for likeliest tokens passes a prefix cache by. What is compared, and what
a finding means, is in pipeline.findings. A finding stops the run before anything is extracted.
"""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import numpy as np
import openai
import torch
from datasets import Dataset
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from speculators.data_generation.vllm_client import InvalidResponseError, extract_output

from pipeline.client import api_client
from pipeline.draft import draft_layer_ids, verifier_folder
from pipeline.errors import BadRun, DataError, ServerError
from pipeline.extract import MADE_BY, PARITY, Proof, load_proof, load_sequences, wanted_shards
from pipeline.findings import (
    MIN_TOP1_AGREEMENT,
    TOLERANCES,
    Captured,
    Cause,
    Finding,
    Head,
    Reference,
    TokenErrors,
    check_payload,
    compare_reference,
    compare_together,
    compare_top1,
)
from pipeline.manifest import MANIFEST, PLAN, ShardEntry, load_manifest, load_plan
from pipeline.params import Params, load_params
from pipeline.progress import waiting
from pipeline.records import DRAFT, HIDDEN_STATES, SEQUENCES
from pipeline.reference import load_head, references, why_no_reference
from pipeline.resume import one_writer, write_json
from pipeline.server import Endpoint, authorization
from pipeline.stage import run_stage
from pipeline.staging import Rejected, take
from pipeline.states_server import request_body, states_endpoints
from pipeline.verifier import VerifierIdentity, load_verifier

NUM_SEQUENCES = 8
# A longer sequence is cut: states do not depend on what follows.
MAX_TOKENS = 2048


class Chosen(NamedTuple):
    """A sequence that the gate asks for."""

    sample_id: str
    input_ids: list[int]


@dataclass(frozen=True)
class Report:
    """What the gate measured; None: not measured."""

    slots: list[TokenErrors] | None
    no_reference: str | None
    """why transformers was not asked"""
    top1_agreement: float | None
    together_error: float | None
    findings: list[Finding]


def choose(sequences: Dataset, longest: int = MAX_TOKENS) -> list[Chosen]:
    """Up to 8 different sequences from the shortest to the longest, always the same ones."""
    lengths = np.asarray(sequences["seq_len"])
    order = [int(row) for row in np.argsort(lengths, kind="stable") if lengths[row] > 1]
    chosen: dict[tuple[int, ...], str] = {}
    for place in np.linspace(0, len(order) - 1, min(NUM_SEQUENCES, len(order))).round():
        # The place itself, else the nearest before it, else after it, that is not chosen yet.
        for row in [*order[: int(place) + 1][::-1], *order[int(place) + 1 :]]:
            ids = tuple(sequences[row]["input_ids"][:longest])
            if ids not in chosen:
                chosen[ids] = sequences[row]["sample_id"]
                break
    if not chosen:
        raise DataError(f"{SEQUENCES} holds no sequence of two tokens for the parity gate")
    return [Chosen(sample_id, list(ids)) for ids, sample_id in chosen.items()]


# Asking


async def ask(
    endpoint: Endpoint, chosen: Sequence[Chosen], timeout_s: float
) -> tuple[list[Captured], list[Captured]]:
    """The sequences one by one and all at once. Raises ServerError."""
    client = api_client(endpoint, len(chosen), timeout_s)
    try:
        get = partial(_get, client, endpoint.model, timeout_s=timeout_s)
        alone = [await get(one, with_top1=True) for one in chosen]
        together = await asyncio.gather(*[get(one, with_top1=False) for one in chosen])
    except InvalidResponseError as error:
        raise ServerError(
            f"parity gate: {str(error)[:100]}; a server in extract.endpoints needs vLLM's "
            "extract_hidden_states method and a hidden-states connector"
        ) from error
    except (openai.OpenAIError, TimeoutError, Rejected) as error:
        what = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ServerError(f"parity gate: {endpoint.base_url} gives no states: {what}") from error
    finally:
        await client.close()
    return alone, together


async def _get(
    client: openai.AsyncOpenAI, model: str, one: Chosen, timeout_s: float, *, with_top1: bool
) -> Captured:
    more = {"prompt_logprobs": 1} if with_top1 else {}
    answer = await client.completions.create(
        model=model,
        **request_body(one.input_ids),
        extra_body={"return_token_ids": True, **more},
    )
    file, _ = extract_output(answer, one.input_ids)
    payload = await take(file, timeout_s)
    top1 = None
    if with_top1:
        given = getattr(answer.choices[0], "prompt_logprobs", None)
        if not given or len(given) != len(one.input_ids):
            raise ServerError(f"{client.base_url} gives no prompt_logprobs, which the gate needs")
        top1 = torch.tensor([likeliest(entry) for entry in given[1:]])  # [T - 1]
    asked = torch.tensor(one.input_ids)
    return Captured(one.sample_id, asked, payload["token_ids"], payload["hidden_states"], top1)


def likeliest(entry: dict[str, Any]) -> int:
    """The top-1 of an entry of prompt_logprobs, which holds the prompt's own token too."""
    return int(min(entry, key=lambda token: (entry[token]["rank"], -entry[token]["logprob"])))


def prefix_cache(endpoint: Endpoint) -> list[Finding]:
    """Whether the server says that it has one. What it would do to states depends on the version:
    vLLM 0.22 left the cached tokens out, 0.32 gives them from the cache."""
    try:
        with httpx2.Client(timeout=10, trust_env=False, headers=authorization()) as client:
            metrics = client.get(endpoint.metrics_url).text
    except httpx2.HTTPError:
        return []  # what is behind a gateway is judged by its states alone
    if re.search(r'cache_config_info\{[^}]*enable_prefix_caching="True"', metrics):
        detail = f"{endpoint.base_url} says so; start it with --no-enable-prefix-caching"
        return [Finding(Cause.PREFIX_CACHE, detail)]
    return []


# The gate


def examine(
    endpoints: Sequence[Endpoint], sequences: Dataset, params: Params, verifier: VerifierIdentity
) -> Report:
    """Ask every server and compare. Raises ServerError when one gives no states at all."""
    served, folder = params.verifier, verifier_folder(verifier)
    layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
    chosen = choose(sequences, min(MAX_TOKENS, served.max_model_len))
    captured, findings = [], []
    for endpoint in endpoints:
        with waiting(f"parity gate: {len(chosen)} sequences, one by one and at once"):
            alone, together = asyncio.run(ask(endpoint, chosen, params.extract.timeout_s))
        captured.append((alone, together))
        findings += prefix_cache(endpoint)
        for each in (alone, together):
            findings += check_payload(each, layer_ids, verifier.hidden_size, served.dtype)
    if findings:  # nothing to compare, maybe not even of one shape
        return Report(None, "the answers are wrong already", None, None, findings)

    no_reference, true_states = why_no_reference(params, verifier, folder), None
    if no_reference is None:
        try:
            with waiting("parity gate: transformers' states"):
                true_states = references(
                    folder,
                    served.dtype,
                    [one.input_ids for one in chosen],
                    trust_remote_code=served.trust_remote_code,
                )
        except Exception as error:  # a model's own code can raise anything
            no_reference = f"it does not run: {type(error).__name__}: {error}".splitlines()[0][:200]
    head = load_head(folder, trust_remote_code=served.trust_remote_code)
    reports = [
        compare(alone, together, true_states, head, layer_ids, served.dtype)
        for alone, together in captured
    ]
    return _worst(reports, no_reference)


def compare(
    alone: Sequence[Captured],
    together: Sequence[Captured],
    true_states: Sequence[Reference] | None,
    head: Head,
    layer_ids: Sequence[int],
    dtype: str,
) -> Report:
    """One server's states, of which the shapes are right."""
    slots: list[TokenErrors] | None = None
    findings: list[Finding] = []
    if true_states is not None:
        slots, findings = compare_reference(alone, true_states, layer_ids, dtype)
    agreement, from_top1 = compare_top1(alone, head, layer_ids)
    # Where transformers found the last slot wrong, it knows better why.
    found = {finding.slot for finding in findings}
    findings += [finding for finding in from_top1 if finding.slot not in found]
    error, from_together = compare_together(alone, together, layer_ids, dtype)
    return Report(slots, None, agreement, error, findings + from_together)


def _worst(reports: Sequence[Report], no_reference: str | None) -> Report:
    """Several servers as one."""
    slots = None
    if no_reference is None:
        columns = zip(*(report.slots or [] for report in reports), strict=True)
        slots = [max(column, key=lambda slot: (not slot.ok, slot.largest)) for column in columns]
    return Report(
        slots,
        no_reference,
        min(report.top1_agreement or 0.0 for report in reports),
        max(report.together_error or 0.0 for report in reports),
        list(dict.fromkeys(finding for report in reports for finding in report.findings)),
    )


def show(report: Report, layer_ids: Sequence[int], dtype: str) -> Table:
    """The table that a person reads."""
    tolerance, wrong = TOLERANCES[dtype], {finding.slot for finding in report.findings}
    beyond = f"beyond {tolerance.error:g}"
    table = Table("slot", "layer", "largest error", beyond, "allowed", "", box=SIMPLE)
    table.title = f"Hidden states beside transformers' ({dtype})"
    for slot, layer in enumerate(layer_ids):
        measured = report.slots[slot] if report.slots else None
        table.add_row(
            str(slot),
            f"{layer}, before the norm" if slot == len(layer_ids) - 1 else str(layer),
            f"{measured.largest:.1e}" if measured else "not compared",
            f"{measured.outside:.1%}" if measured else "",
            f"{tolerance.outside:.0%}",
            "wrong" if slot in wrong else "ok" if measured else "",
        )
    captions = [f"transformers was not asked: {report.no_reference}"] if report.no_reference else []
    if report.top1_agreement is not None:
        captions.append(
            f"the server's own top-1 is reproduced at {report.top1_agreement:.2%} of positions "
            f"(at least {MIN_TOP1_AGREEMENT:.0%}); asked all at once, the states differ by "
            f"{report.together_error:.1e} at most"
        )
    table.caption = "\n".join(captions)
    return table


def stop_if_wrong(report: Report) -> None:
    """Raises BadRun with the first findings."""
    if report.findings:
        more = len(report.findings) - 4
        said = "; ".join(map(str, report.findings[:4])) + (f"; {more} more" if more > 0 else "")
        raise BadRun(
            f"hidden states are wrong, nothing is extracted: {said} (docs/hidden_states.md, "
            "The parity gate)"
        )


# What extract calls


def settings_of(entry: ShardEntry, params: Params, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """What the gate's verdict holds for."""
    return {
        **{name: getattr(entry, name) for name in MADE_BY},
        "dtype": params.verifier.dtype,
        "vllm": sorted({endpoint.version for endpoint in endpoints}),
    }


def prove(
    endpoints: Sequence[Endpoint],
    sequences: Dataset,
    params: Params,
    verifier: VerifierIdentity,
    entry: ShardEntry,
    folder: Path,
) -> None:
    """The gate; `entry` is any of the shards to make, or the plan. Once for the same settings of a
    server of our own; of others nobody knows if they are still what they were.

    Raises:
        BadRun: the states are wrong. What lies in `folder` stays as it is.
    """
    settings, proof = settings_of(entry, params, endpoints), load_proof(folder)
    ours = all(endpoint.process for endpoint in endpoints)
    if ours and proof and proof.settings == settings:
        return
    report = examine(endpoints, sequences, params, verifier)
    Console().print(show(report, entry.layer_ids, params.verifier.dtype))
    stop_if_wrong(report)
    found = Proof(settings=settings, no_reference=report.no_reference, **figures(report))
    write_json(folder / PARITY, found.model_dump())


def figures(report: Report) -> dict[str, Any]:
    """Rounded to one digit, so that noise in the last one is no news."""
    assert report.top1_agreement is not None
    assert report.together_error is not None
    return {
        "max_errors": [_digit(slot.largest) for slot in report.slots] if report.slots else None,
        "top1_agreement": round(report.top1_agreement, 4),
        "together_max_error": _digit(report.together_error),
    }


def _digit(value: float) -> float:
    return float(f"{value:.0e}")


def layer_lists(params: Params, verifier: VerifierIdentity) -> dict[str, list[int]]:
    """Who names the layers; shards or plan, and draft, only where there are some."""
    last = verifier.num_hidden_layers
    lists = {"params.yaml": [*params.extract.layer_ids, last]}
    if (HIDDEN_STATES / PLAN).exists():
        lists[str(HIDDEN_STATES)] = load_plan(HIDDEN_STATES).layer_ids
    elif (HIDDEN_STATES / MANIFEST).exists():
        for shard in load_manifest(HIDDEN_STATES).shards:
            lists[str(HIDDEN_STATES)] = shard.layer_ids
    if (DRAFT / "config.json").exists():
        lists["models/draft"] = [*draft_layer_ids(DRAFT), last]
    return lists


def main() -> None:
    params, verifier = load_params(), load_verifier()
    sequences = load_sequences(SEQUENCES)
    wanted_shards(sequences.select([0]), params, verifier)  # are there such layers?
    layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
    # As writer, though nothing is written: two servers would share one staging folder.
    with one_writer(HIDDEN_STATES), states_endpoints(params, verifier) as endpoints:
        report = examine(endpoints, sequences, params, verifier)
    Console().print(show(report, layer_ids, params.verifier.dtype))
    for who, layers in layer_lists(params, verifier).items():
        stale = "" if layers == layer_ids else ", of an earlier run: `make repro` makes it anew"
        print(f"layers in {who}: {layers}{stale}")
    stop_if_wrong(report)


if __name__ == "__main__":
    run_stage("parity", main)
