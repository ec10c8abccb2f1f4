"""What counts in the benchmark, and the arithmetic of its report."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from aiohttp import web

from pipeline import benchmark
from pipeline.benchmark import (
    Mode,
    Output,
    Played,
    Rejected,
    Round,
    acceptance_by_position,
    acceptance_length,
    check_thinking,
    distinct_bigram_fraction,
    equipped,
    fault_of,
    measure,
    modes_of,
    play,
    report_of,
    request_of,
    screen,
    server_args,
    spec_decode_counters,
)
from pipeline.client import Request
from pipeline.errors import DataError, ParamsError, ServerError
from pipeline.params import Benchmark, load_params
from pipeline.progress import Bar
from pipeline.resume import write_json
from pipeline.server import Endpoint
from tests.fake_server import (
    END,
    MODEL,
    THINK,
    VERSION,
    Act,
    FakeServer,
    drop_token_ids,
    edited,
    fail,
    ids,
)

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
MAIN, OTHER = Mode(True, 0.0), Mode(False, 0.6)
LOOPING = [THINK, *ids("ab" * 40)]
NO_COUNTERS: Counter[str] = Counter()


@pytest.fixture
def settings(project) -> Benchmark:
    project.set(**{"benchmark.concurrency": [1, 8], "benchmark.num_rounds": 3})
    return load_params().benchmark


@pytest.fixture
def endpoint(server) -> Endpoint:
    return Endpoint(server.base_url, MODEL, VERSION, 1024)


def question(content: str) -> Request:
    messages = [{"role": "user", "content": content}]
    return Request(content, {"messages": messages, "max_tokens": 99, "return_token_ids": True})


def ask(endpoint: Endpoint, *contents: str, concurrency: int = 1) -> Played:
    requests = [question(content) for content in contents]
    return play(requests, endpoint, concurrency, Bar("x", len(requests), ""), "draft, here")


def slowly(seconds: float) -> Act:
    async def act(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.json_response(answer)

    return act


def speculating(server: FakeServer, drafts: int, accepted: int) -> Act:
    """Answer, and show so much on the metrics page from then on."""

    async def act(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        server.metrics = METRICS.replace('"} 30.0', f'"}} {drafts}.0')
        server.metrics = server.metrics.replace('"} 60.0', f'"}} {accepted}.0')
        return web.json_response(answer)

    return act


# what counts


@pytest.mark.parametrize(
    ("token_ids", "fault"),
    [
        ([1, 2] * 24, Rejected.LOOP),
        ([1, 2] * 24 + [END], Rejected.LOOP),
        ([7] * 48, Rejected.GARBAGE),
        ([7] * 48 + [END], Rejected.GARBAGE),
        ([1, 2] * 23 + [1], None),  # 47 tokens
        ([1, 2] * 24 + [3, END], None),
        (list(range(100)), None),
        ([END], None),
        ([], Rejected.EMPTY),
    ],
    ids=[
        *("loop", "ended loop", "garbage", "ended garbage", "short", "got out", "sound"),
        *("only ended", "empty"),
    ],
)
def test_an_answer_that_ends_in_a_loop_is_unsound_whether_it_was_cut_or_not(token_ids, fault):
    assert fault_of(token_ids) == fault


def test_an_answer_that_loops_counts_neither_with_its_tokens_nor_with_its_acceptance(
    server, endpoint
):
    """40 drafts and 80 accepted tokens before the round; the loop adds 50 and 150 of them."""
    server.metrics = METRICS
    server.writes["Loop"] = LOOPING
    server.when("Q", speculating(server, 34, 70))
    server.when("Loop", speculating(server, 84, 220))
    server.when("R", speculating(server, 86, 221))
    played = ask(endpoint, "Q", "Loop", "R")
    assert played.rejected == {"Loop": Rejected.LOOP}
    assert played.outputs["Q"].counters == {"drafts": 4, "accepted": 10}
    assert played.outputs["R"].counters == {"drafts": 2, "accepted": 1}
    assert list(played.outputs) == ["Q", "R"]


def test_a_question_too_long_for_the_server_is_left_out(server, endpoint):
    server.when("Long", fail(400, "too long"))
    played = ask(endpoint, "Long", "Q")
    assert played.rejected == {"Long": Rejected.REFUSED}
    assert list(played.outputs) == ["Q"]


def test_a_round_with_an_unanswered_question_measures_nothing(server, endpoint):
    server.always(fail(500, "broken"))
    with pytest.raises(ServerError, match=r"^draft, here: a question is left unanswered: .*broken"):
        ask(endpoint, "Q")


def test_a_server_without_token_ids_cannot_be_measured(server, endpoint):
    server.always(edited(drop_token_ids))
    with pytest.raises(ServerError, match="here: the server returns no token ids"):
        ask(endpoint, "Q")


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_answer_takes_the_time_from_its_own_request(server, endpoint, concurrency):
    server.when("Slow", slowly(1.0))
    played = ask(endpoint, "Slow", "Q", "R", concurrency=concurrency)
    seconds = {key: output.seconds for key, output in played.outputs.items()}
    assert 1.0 <= seconds["Slow"] <= played.seconds
    assert seconds["Q"] < 0.5
    assert seconds["R"] < 0.5


def test_counters_belong_to_no_answer_where_several_are_asked_at_once(server, endpoint):
    server.metrics = METRICS
    server.when("Q", speculating(server, 34, 70))
    assert ask(endpoint, "Q", "R", concurrency=2).outputs["Q"].counters == {}


def test_counters_are_read_from_vllms_metrics_page_over_all_engines(server, endpoint):
    server.metrics = METRICS
    counters = spec_decode_counters(httpx2.Client(), endpoint)
    assert counters == {"drafts": 40, "accepted": 80, "1": 36, "2": 28, "3": 16}


def test_a_server_without_speculation_has_no_counters(server, endpoint):
    server.metrics = "# TYPE vllm:x counter\nvllm:x_total 1.0\n"
    assert spec_decode_counters(httpx2.Client(), endpoint) == {}


def test_where_no_question_gets_a_sound_answer_nothing_is_measured(server, endpoint):
    server.writes["Loop"] = LOOPING
    server.when("Long", fail(400, "too long"))
    questions = [question("Long"), question("Loop")]
    with pytest.raises(ServerError, match=r"^no question gets a sound answer: 1 refused, 1 loop$"):
        screen(questions, endpoint, 1, Bar("x", 2, ""))


# what is asked


def rows(*contents: str) -> list[dict[str, Any]]:
    return [{"key": c, "messages": [{"role": "user", "content": c}]} for c in contents]


@pytest.fixture
def started(server, monkeypatch) -> list[list[str]]:
    """Each group of servers that was started; the fake is all of them."""
    groups: list[list[str]] = []

    @contextmanager
    def serve_all(verifier: Any, args: dict[str, list[str]]) -> Iterator[dict[str, Endpoint]]:
        groups.append(list(args))
        yield {name: Endpoint(server.base_url, MODEL, VERSION, 1024) for name in args}

    monkeypatch.setattr(benchmark, "serve_all", serve_all)
    return groups


@pytest.fixture
def bars(monkeypatch) -> list[Bar]:
    """Each progress bar that was shown."""
    shown: list[Bar] = []

    @contextmanager
    def progress_bar(label: str, total: int, unit: str) -> Iterator[Bar]:
        shown.append(Bar(label, total, unit))
        yield shown[-1]

    monkeypatch.setattr(benchmark, "progress_bar", progress_bar)
    return shown


@pytest.fixture
def small(project):
    project.set(
        **{
            "benchmark.concurrency": [1, 2],
            "benchmark.num_rounds": 2,
            "benchmark.temperatures": [0.0, 0.6],
            "benchmark.both_thinking_modes": True,
            "benchmark.side_by_side": False,
        }
    )
    return project


@pytest.mark.usefixtures("small")
def test_a_question_that_loops_without_speculation_is_in_no_round(server, started, bars):
    """A first pass, then of each server a first request, 4 rounds of the main mode and one of each
    of the 3 others; plain decoding comes first and last."""
    server.writes["Loop"] = LOOPING
    rejected, rounds = measure(rows("Loop", "Q"), load_params())
    assert started == [["plain"], ["ngram"], ["draft"], ["plain"]]
    assert rejected == {"Loop": Rejected.LOOP}
    assert Counter(server.questions) == {"Loop": 1, "Q": 1 + 4 * (1 + 4 + 3)}
    assert {(r.mode, r.concurrency): r.number for r in rounds} == {
        (MAIN, 1): 1,
        (MAIN, 2): 1,
        (Mode(True, 0.6), 1): 0,
        (Mode(False, 0.0), 1): 0,
        (OTHER, 1): 0,
    }
    counts = [{name: len(played) for name, played in r.played.items()} for r in rounds]
    assert counts == [{"plain": 2, "ngram": 1, "draft": 1}] * 7
    assert [(bar.done, bar.total) for bar in bars] == [(9, 9), (7, 7), (7, 7), (7, 7)]


@pytest.mark.usefixtures("bars")
def test_servers_that_are_up_together_take_turns(small, server, started):
    small.set(**{"benchmark.side_by_side": True, "benchmark.both_thinking_modes": False})
    _, rounds = measure(rows("Q"), load_params())
    assert started == [["plain", "ngram", "draft"]]
    there, back = ["plain", "ngram", "draft"], ["draft", "ngram", "plain"]
    assert [list(this.played) for this in rounds] == [there, there, back, back, there]
    assert len(server.questions) == 1 + 3 * (1 + 5)


@pytest.mark.usefixtures("started", "bars")
def test_the_first_pass_asks_as_many_at_once_as_any_round(small, server):
    small.set(**{"benchmark.concurrency": [1, 2, 5]})
    at_once: list[int] = []

    async def look(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        at_once.append(server.in_flight)
        return web.json_response(answer)

    server.next(*[look] * 5)
    measure(rows(*"ABCDE"), load_params())
    assert max(at_once) == 5


@pytest.mark.usefixtures("small", "started", "bars")
def test_the_modes_differ_in_temperature_seed_and_the_switch_alone(server):
    measure(rows("Q"), load_params())

    def is_of(body: dict[str, Any], temperature: float, thinking: bool) -> bool:
        switch = {"enable_thinking": thinking}
        return body["temperature"] == temperature and body["chat_template_kwargs"] == switch

    assert sum(is_of(body, 0.0, True) for body in server.bodies) == 1 + 4 * (1 + 4)
    assert [sum(is_of(b, *m) for b in server.bodies) for m in [(0.6, True), (0.0, False)]] == [4, 4]
    assert sum(is_of(body, 0.6, False) for body in server.bodies) == 4
    assert all(("seed" in body) == (body["temperature"] > 0) for body in server.bodies)
    varying = {"temperature", "seed", "chat_template_kwargs"}
    alike = {json.dumps({k: v for k, v in b.items() if k not in varying}) for b in server.bodies}
    assert len(alike) == 1


@pytest.mark.parametrize("thinking", [True, False])
def test_the_main_mode_is_greedy_and_the_one_the_draft_was_trained_in(small, thinking):
    small.set(**{"generate.thinking": thinking})
    assert modes_of(load_params()) == [
        Mode(thinking, 0.0),
        Mode(thinking, 0.6),
        Mode(not thinking, 0.0),
        Mode(not thinking, 0.6),
    ]
    small.set(**{"benchmark.both_thinking_modes": False, "benchmark.temperatures": [0.0]})
    assert modes_of(load_params()) == [Mode(thinking, 0.0)]


def test_no_name_of_a_mode_has_a_dot_for_dvc_to_split_it_at():
    modes = [MAIN, OTHER, Mode(True, 1.0), Mode(False, 0.0)]
    assert [mode.name for mode in modes] == [
        "thinking_greedy",
        "no_thinking_sampled_0_6",
        "thinking_sampled_1_0",
        "no_thinking_greedy",
    ]


@pytest.mark.parametrize("model_decides", ["min_p", "repetition_penalty", "top_p", "top_k"])
def test_no_generation_config_decides_how_is_sampled(project, model_decides):
    [row] = rows("Q")
    assert model_decides in request_of(row, MAIN, load_params()).body


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("concurrency", [8], "concurrency must begin with 1 and ascend"),
        ("concurrency", [1, 8, 4], "concurrency must begin with 1 and ascend"),
        ("concurrency", [1, 1], "concurrency must begin with 1 and ascend"),
        ("temperatures", [0.6], "temperatures must begin with 0.0 and ascend"),
        ("temperatures", [0.0, 1.0, 0.6], "temperatures must begin with 0.0 and ascend"),
        ("temperatures", [], "benchmark.temperatures"),
        ("temperatures", [0.0, 2.5], "benchmark.temperatures"),
    ],
)
def test_what_the_measurement_rests_on_comes_first_in_params(project, key, value, said):
    project.set(**{f"benchmark.{key}": value})
    with pytest.raises(ParamsError, match=said):
        load_params()


def test_a_model_without_a_switch_has_one_thinking_mode(small):
    small.set(**{"generate.thinking_switch": None})
    said = "both_thinking_modes must be false where generate.thinking_switch is null"
    with pytest.raises(ParamsError, match=said):
        load_params()
    small.set(**{"benchmark.both_thinking_modes": False})
    assert [mode.thinking for mode in modes_of(load_params())] == [True, True]


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


# what is said


def played(seconds: float, a: list[int] | None = None, b: list[int] | None = None) -> Played:
    """Two thirds of the time for `a`, one for `b`: as one request at a time, and as a whole."""
    answers = {"a": (a or [1, 2, 1, 2], seconds * 2 / 3), "b": (b or [5, 6], seconds / 3)}
    return Played({k: Output(*answer, NO_COUNTERS) for k, answer in answers.items()}, {}, seconds)


def together(seconds: float) -> Played:
    """Both asked at once, each for all of the time."""
    answers = {"a": [1, 2, 1, 2], "b": [5, 6]}
    outputs = {k: Output(made, seconds, NO_COUNTERS) for k, made in answers.items()}
    return Played(outputs, {}, seconds)


def counting(one: Played, key: str, **counters: int) -> None:
    one.outputs[key] = one.outputs[key]._replace(
        counters=Counter({name.removeprefix("at_"): n for name, n in counters.items()})
    )


@pytest.fixture
def rounds() -> list[Round]:
    """Six tokens a round; seconds by server, concurrency and round."""
    alone = {
        "plain": (6.0, 3.0, 2.0),  # 1, 2, 3 tokens/s
        "ngram": (6.0, 6.0, 2.0),  # 1, 1, 3
        "draft": (3.0, 1.0, 1.5),  # 2, 6, 4
    }
    at_once = {
        "plain": (1.0, 1.0, 1.0),  # 6, 6, 6
        "ngram": (2.0, 2.0, 2.0),  # 3, 3, 3
        "draft": (0.5, 1.0, 2.0),  # 12, 6, 3
    }
    made = [
        Round(MAIN, concurrency, number, {s: [play_of(t[number])] for s, t in times.items()})
        for number in range(3)
        for concurrency, times, play_of in ((1, alone, played), (8, at_once, together))
    ]
    first, last = made[0].played, made[4].played
    counting(first["draft"][0], "a", drafts=30, accepted=70, at_1=28, at_2=24, at_3=16)
    counting(first["draft"][0], "b", drafts=10, accepted=10, at_1=8, at_2=4)
    first["ngram"] = [played(6.0, b=[5, 9])]
    last["plain"] = [played(2.0, a=[1, 2, 1], b=[5, 6, 7])]
    return made


@pytest.fixture
def other() -> Round:
    """Sampled, and n-gram's `b` is a loop, so that the draft's does not count either."""
    this = Round(OTHER, 1, 0, {s: [played(t)] for s, t in (("plain", 3.0), ("draft", 1.5))})
    ngram = Played({"a": Output([1, 2, 3, 4, 5], 4.0, NO_COUNTERS)}, {"b": Rejected.LOOP}, 9.0)
    this.played["ngram"] = [ngram]
    counting(this.played["draft"][0], "a", drafts=2, accepted=3)
    counting(this.played["draft"][0], "b", drafts=100, accepted=300)
    return this


def test_the_report_is_what_a_hand_calculates(rounds, other, settings):
    main = {
        "num_answered": 2,
        "rejected": {"refused": 1, "loop": 0, "garbage": 0, "empty": 0},
        "generated_tokens": 6,
        "tokens_per_answer": {"plain": 3.0, "draft": 3.0, "ngram": 3.0},
        # of a 2 pairs of 3, of b 1 of 1
        "distinct_bigram_fraction": {"plain": 0.8333, "draft": 0.8333, "ngram": 0.8333},
        "acceptance_length": {"draft": 3.0, "ngram": 1.0},
        # draft over plain by round: 2/1, 6/2, 4/3; ngram: 1/1, 1/2, 3/3
        "speedup": {"draft": 2.0, "ngram": 1.0},
    }
    assert report_of([*rounds, other], {"c": Rejected.REFUSED}, 3, settings) == main | {
        "num_draft_tokens": 3,
        "num_prompts": 3,
        "acceptance_by_position": {
            "draft": {"1": 0.9, "2": 0.7, "3": 0.4},
            "ngram": {"1": 0.0, "2": 0.0, "3": 0.0},
        },
        "tokens_per_s": {
            "plain": {"1": 2.0, "8": 6.0},
            "draft": {"1": 4.0, "8": 6.0},
            "ngram": {"1": 1.0, "8": 3.0},
        },
        # of each server a takes 2/3 and b 1/3 of the seconds of its three rounds
        "latency_s": {
            "plain": {"1": {"p50": 1.6667, "p95": 3.5}, "8": {"p50": 1.0, "p95": 1.0}},
            "draft": {"1": {"p50": 0.8333, "p95": 1.75}, "8": {"p50": 1.0, "p95": 2.0}},
            "ngram": {"1": {"p50": 2.0, "p95": 4.0}, "8": {"p50": 2.0, "p95": 2.0}},
        },
        "ms_per_token": {
            "plain": {"1": 500.0, "8": 375.0},
            "draft": {"1": 250.0, "8": 375.0},
            "ngram": {"1": 1000.0, "8": 750.0},
        },
        "speedup_spread": {
            "draft": {"min": 1.333, "max": 3.0},
            "ngram": {"min": 0.5, "max": 1.0},
        },
        "speedup_by_concurrency": {
            "draft": {"1": 2.0, "8": 1.0},
            "ngram": {"1": 1.0, "8": 0.5},
        },
        "noise": {"min": 1.0, "max": 3.0},  # 3/1 at 1, 6/6 at 8
        "lossless_fraction": 1.0,
        "lossless_fraction_ngram": 0.5,
        "plain_vs_plain_fraction": 0.0,
        "by_mode": {
            "thinking_greedy": {"thinking": True, "temperature": 0.0} | main,
            "no_thinking_sampled_0_6": {
                "thinking": False,
                "temperature": 0.6,
                "num_answered": 1,
                "rejected": {"refused": 1, "loop": 1, "garbage": 0, "empty": 0},
                "generated_tokens": 4,
                "tokens_per_answer": {"plain": 4.0, "draft": 4.0, "ngram": 5.0},
                "distinct_bigram_fraction": {"plain": 0.6667, "draft": 0.6667, "ngram": 1.0},
                "acceptance_length": {"draft": 2.5, "ngram": 1.0},
                # of a: 4 tokens in 2 s; the draft's in 1 s, n-gram's 5 in 4 s
                "speedup": {"draft": 2.0, "ngram": 0.625},
            },
        },
    }


def test_plain_decoding_measured_first_and_last_is_the_noise_and_both_are_what_others_beat(
    settings,
):
    """6 tokens in 2 s and in 4 s: 2 a second; those of the draft in 2 s: 3 a second."""
    rounds = [
        Round(
            MAIN,
            concurrency,
            number,
            {
                "plain": [made(2.0), made(4.0, a=[9, 9]) if concurrency == 1 else made(4.0)],
                "ngram": [made(3.0)],
                "draft": [made(2.0)],
            },
        )
        for number in range(2)
        for concurrency, made in ((1, played), (8, together))
    ]
    report = report_of(rounds, {}, 2, settings)
    assert report["speedup_by_concurrency"]["draft"]["8"] == 1.5
    assert report["speedup_by_concurrency"]["ngram"]["8"] == 1.0
    assert report["tokens_per_s"]["plain"]["8"] == 2.0
    # 6 tokens in 4 s over 6 in 2 s; at 1 only 4, for another answer to `a`
    assert report["noise"] == {"min": 0.333, "max": 0.5}
    assert report["plain_vs_plain_fraction"] == 0.5
    assert report["num_answered"] == 2
    assert report["generated_tokens"] == 6


def test_an_answer_of_the_draft_that_loops_is_no_identical_one(rounds, settings):
    first = rounds[0].played["draft"][0]
    del first.outputs["b"]
    first.rejected["b"] = Rejected.LOOP
    report = report_of(rounds, {}, 2, settings)
    assert report["lossless_fraction"] == 0.5
    assert report["num_answered"] == 1
    assert report["rejected"] == {"refused": 0, "loop": 1, "garbage": 0, "empty": 0}
    # of a alone: 70 of 30 drafts; 4 tokens in 2 s over 4 in 4 s
    assert report["acceptance_length"]["draft"] == 3.3333
    assert report["speedup_spread"]["draft"] == {"min": 1.333, "max": 3.0}


def test_a_round_of_the_main_mode_in_which_nothing_counts_is_an_error(rounds, settings):
    rounds[1].played["draft"] = [Played({}, {"a": Rejected.LOOP, "b": Rejected.GARBAGE}, 1.0)]
    with pytest.raises(ServerError, match=r"^nothing counts at concurrency 8: 1 loop, 1 garbage$"):
        report_of(rounds, {}, 2, settings)


def test_of_another_mode_in_which_nothing_counts_only_that_is_said(rounds, other, settings):
    other.played["draft"] = [Played({}, {"a": Rejected.GARBAGE, "b": Rejected.GARBAGE}, 1.0)]
    other.played["ngram"][0].rejected.clear()
    assert report_of([*rounds, other], {}, 2, settings)["by_mode"]["no_thinking_sampled_0_6"] == {
        "thinking": False,
        "temperature": 0.6,
        "num_answered": 0,
        "rejected": {"refused": 0, "loop": 0, "garbage": 2, "empty": 0},
        "generated_tokens": 0,
    }


@pytest.mark.usefixtures("started", "bars")
def test_the_stage_accounts_for_every_held_out_question(small, server, capsys):
    """The scratch project holds out one question of six."""
    draft = small.root / "models/draft"
    write_json(draft / "config.json", {})
    write_json(draft / "provenance.json", {"thinking": True})
    server.metrics = METRICS
    benchmark.main()
    report = small.report("benchmark")
    assert set(server.questions) == {"Q1"}
    assert report["num_prompts"] == report["num_answered"] == 1
    assert report["lossless_fraction"] == report["plain_vs_plain_fraction"] == 1.0
    assert len(report["by_mode"]) == 4
    assert "100% of outputs identical" in capsys.readouterr().out


def test_acceptance_length_counts_the_verifiers_own_token():
    assert acceptance_length(Counter(drafts=40, accepted=80)) == 3.0
    assert acceptance_length(Counter(drafts=40, accepted=0)) == 1.0
    assert acceptance_length(Counter()) == 1.0


def test_acceptance_by_position_has_every_position_in_order():
    found = acceptance_by_position(Counter({"drafts": 8, "1": 4, "2": 1}), 3)
    assert list(found.items()) == [("1", 0.5), ("2", 0.125), ("3", 0.0)]


@pytest.mark.parametrize(
    ("token_ids", "fraction"),
    [([1, 2, 3, 4], 1.0), ([1, 2] * 50, 2 / 99), ([7] * 5, 1 / 4), ([7], 1.0)],
)
def test_repetition_shows_in_the_fraction_of_distinct_bigrams(token_ids, fraction):
    assert distinct_bigram_fraction(token_ids) == fraction


def test_ngram_gets_as_many_threads_as_all_else() -> None:
    params = load_params()
    found = equipped(params.verifier).server_env
    assert found == {**params.verifier.server_env, "NUMBA_NUM_THREADS": "1"}
    unlimited = params.verifier.model_copy(update={"server_env": {"A": "1"}})
    assert equipped(unlimited).server_env == {"A": "1"}
    own = {"OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "2"}
    assert equipped(params.verifier.model_copy(update={"server_env": own})).server_env == own
