"""The arithmetic of the report: ratios within a round, medians over rounds, vLLM's counters."""

from pathlib import Path

import pytest

from pipeline.benchmark import (
    Round,
    acceptance_by_position,
    acceptance_length,
    benchmark_requests,
    check_thinking,
    play,
    report_of,
    server_args,
    spec_decode_counters,
)
from pipeline.client import Request
from pipeline.errors import DataError, ServerError
from pipeline.params import Benchmark, load_params
from pipeline.progress import Bar
from pipeline.resume import write_json
from pipeline.server import Endpoint
from tests.fake_server import MODEL, VERSION

# As vLLM 0.32 prints them, two engines' counters among others.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 90.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 60.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 20.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 36.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 28.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 16.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 12345.0
"""


@pytest.fixture
def settings(project) -> Benchmark:
    project.set(**{"benchmark.concurrency": [1, 8], "benchmark.num_rounds": 3})
    return load_params().benchmark


def played(server: str, concurrency: int, number: int, seconds: float, outputs=None) -> Round:
    this = Round(server, concurrency, number)
    this.outputs = {"a": [1, 2, 3, 4], "b": [5, 6]} if outputs is None else outputs
    this.seconds = seconds
    return this


@pytest.fixture
def rounds() -> list[Round]:
    """Six tokens a round; seconds by server, concurrency and round."""
    seconds = {
        ("plain", 1): (6.0, 3.0, 2.0),  # 1, 2, 3 tokens/s
        ("ngram", 1): (6.0, 6.0, 2.0),  # 1, 1, 3
        ("draft", 1): (3.0, 1.0, 1.5),  # 2, 6, 4
        ("plain", 8): (1.0, 1.0, 1.0),  # 6, 6, 6
        ("ngram", 8): (2.0, 2.0, 2.0),  # 3, 3, 3
        ("draft", 8): (0.5, 1.0, 2.0),  # 12, 6, 3
    }
    made = [
        played(server, concurrency, number, value)
        for (server, concurrency), values in seconds.items()
        for number, value in enumerate(values)
    ]
    by_place = {(r.server, r.concurrency, r.number): r for r in made}
    by_place["draft", 1, 0].counters = {"drafts": 40, "accepted": 80, "1": 36, "2": 28, "3": 16}
    by_place["ngram", 1, 0].counters = {"drafts": 0.0, "accepted": 0.0}
    by_place["ngram", 1, 0].outputs = {"a": [1, 2, 3, 4], "b": [5, 9]}
    by_place["plain", 1, 2].outputs = {"a": [1, 2, 3], "b": [5, 6, 7]}
    return made


def test_the_report_is_what_a_hand_calculates(rounds, settings):
    assert report_of(rounds, settings) == {
        "num_draft_tokens": 3,
        "num_prompts": 24,  # asked for
        "num_answered": 2,
        "generated_tokens": 6,
        "acceptance_length": {"draft": 3.0, "ngram": 1.0},
        "acceptance_by_position": {
            "draft": {"1": 0.9, "2": 0.7, "3": 0.4},
            "ngram": {"1": 0.0, "2": 0.0, "3": 0.0},
        },
        "tokens_per_s": {
            "plain": {"1": 2.0, "8": 6.0},
            "draft": {"1": 4.0, "8": 6.0},
            "ngram": {"1": 1.0, "8": 3.0},
        },
        # draft over plain by round: 2/1, 6/2, 4/3; ngram: 1/1, 1/2, 3/3
        "speedup": {"draft": 2.0, "ngram": 1.0},
        "speedup_spread": {
            "draft": {"min": 1.333, "max": 3.0},
            "ngram": {"min": 0.5, "max": 1.0},
        },
        "speedup_by_concurrency": {
            "draft": {"1": 2.0, "8": 1.0},
            "ngram": {"1": 1.0, "8": 0.5},
        },
        "lossless_fraction": 1.0,
        "lossless_fraction_ngram": 0.5,
        "plain_vs_plain_fraction": 0.0,
    }


def test_a_round_is_as_fast_as_its_tokens_over_its_seconds():
    assert played("plain", 1, 0, 4.0).tokens_per_s == 1.5


def test_acceptance_length_counts_the_verifiers_own_token():
    assert acceptance_length({"drafts": 40, "accepted": 80}) == 3.0
    assert acceptance_length({"drafts": 40, "accepted": 0}) == 1.0
    assert acceptance_length({}) == 1.0


def test_acceptance_by_position_has_every_position_in_order():
    found = acceptance_by_position({"drafts": 8, "1": 4, "2": 1}, 3)
    assert list(found.items()) == [("1", 0.5), ("2", 0.125), ("3", 0.0)]


def test_counters_are_read_from_vllms_metrics_page_over_all_engines(server):
    server.metrics = METRICS
    counters = spec_decode_counters(Endpoint(server.base_url, MODEL, VERSION, 1024))
    assert counters == {"drafts": 40, "accepted": 80, "1": 36, "2": 28, "3": 16}


def test_a_server_without_speculation_has_no_counters(server):
    server.metrics = "# TYPE vllm:x counter\nvllm:x_total 1.0\n"
    assert spec_decode_counters(Endpoint(server.base_url, MODEL, VERSION, 1024)) == {}


def test_a_round_counts_only_what_happened_in_it(server):
    """The page shows 40 drafts before the round and is raised by one answer's act."""
    server.metrics = METRICS

    async def speculate(request, answer):
        from aiohttp import web

        server.metrics = METRICS.replace('"} 30.0', '"} 35.0').replace('"} 60.0', '"} 70.0')
        return web.json_response(answer)

    server.next(speculate)
    body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 99,
            "return_token_ids": True}  # fmt: skip
    endpoint = Endpoint(server.base_url, MODEL, VERSION, 1024)
    this = play(Round("draft", 1, 0), [Request("k", body)], endpoint, Bar("x", 1, "answers"))
    assert this.counters == {"drafts": 5, "accepted": 10, "1": 0, "2": 0, "3": 0}
    assert list(this.outputs) == ["k"]
    assert this.seconds > 0


def test_a_round_with_an_unanswered_question_measures_nothing(server):
    from tests.fake_server import fail

    body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 99}
    endpoint = Endpoint(server.base_url, MODEL, VERSION, 1024)
    server.always(fail(500, "broken"))
    with pytest.raises(ServerError, match=r"draft left a question unanswered: .*broken"):
        play(Round("draft", 1, 0), [Request("k", body)], endpoint, Bar("x", 1, "answers"))


def test_a_question_too_long_for_the_server_is_left_out(server):
    from tests.fake_server import fail

    body = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 99}
    endpoint = Endpoint(server.base_url, MODEL, VERSION, 1024)
    server.next(fail(400, "too long"))
    this = play(
        Round("draft", 1, 0), [Request("a", body), Request("b", body)], endpoint, Bar("x", 2, "")
    )
    assert list(this.outputs) == ["b"]
    server.always(fail(400, "too long"))
    with pytest.raises(ServerError, match="refuses every question"):
        play(Round("draft", 1, 0), [Request("a", body)], endpoint, Bar("x", 1, ""))


def test_only_held_out_questions_are_asked_greedy(project):
    project.set(**{"benchmark.num_prompts": 5})
    [request] = benchmark_requests(load_params())  # the scratch project holds out one of six
    assert request.body["messages"] == [{"role": "user", "content": "Q1"}]
    assert request.body["temperature"] == 0.0
    assert request.body["chat_template_kwargs"] == {"enable_thinking": True}


def test_the_three_servers_differ_in_speculation_alone(settings):
    args = server_args(settings)
    assert list(args) == ["plain", "ngram", "draft"]
    assert args["ngram"][:-2] == args["draft"][:-2] == args["plain"]
    assert "--speculative-config" not in args["plain"]
    assert '"num_speculative_tokens":3' in args["ngram"][-1]
    assert '"num_speculative_tokens":3' in args["draft"][-1]


@pytest.mark.parametrize("trained", [True, False])
def test_a_draft_of_the_other_thinking_mode_is_not_judged(tmp_path: Path, trained: bool) -> None:
    write_json(tmp_path / "provenance.json", {"thinking": trained})
    check_thinking(tmp_path, trained)
    with pytest.raises(DataError, match=f"generate.thinking: {trained}, to be served is"):
        check_thinking(tmp_path, not trained)
