"""Generation beside other clients, against a real vLLM: requests a second, as ratios.

The demo verifier is served as the stage serves it, but without a prefix cache, so that no client
finds the prompts of the one before. The same questions, sampling and concurrency for this project's
`generate`, `speculators regenerate-responses` and `vllm bench serve`.

    generate_vs_…                  by the server's time from first request to last answer; the probe
                                   that `generate` sends first is in it
    generate_vs_…_whole_process    by the time of the process, imports and writing included

`vllm bench` streams, which costs the server more than what is compared here; so the server sends
streamed tokens all at once (`--stream-interval`), which the two others do not notice.

Run      python -m perf.throughput                              # or, for a short trial:
         python -m perf.throughput --prompts 64 --rounds 1
"""

from perf.compare import Clients, answers_per_s, ratios, take_turns
from perf.project import ENVIRONMENT, ROOT, scratch_project
from perf.report import publish, result, sizes
from pipeline.params import Verifier
from pipeline.server import serve

COMMAND = "python -m perf.throughput"
NUM_PROMPTS = 1000
NUM_HELD_OUT = 64
NUM_ROUNDS = 3
CONCURRENCY = 128
MAX_TOKENS = 512
SERVER_ARGS = [
    "--no-enable-prefix-caching",
    *("--stream-interval", str(MAX_TOKENS)),
    *("--middleware", "perf.stopwatch.Stopwatch"),
]


def main() -> None:
    size, is_full = sizes(COMMAND, prompts=NUM_PROMPTS, rounds=NUM_ROUNDS)
    num_held_out = min(NUM_HELD_OUT, size.prompts // 2)
    changes = {
        "prompts.num_held_out": num_held_out,
        "prompts.sample_cap": size.prompts - num_held_out,
        "generate.concurrency": CONCURRENCY,
        "generate.max_tokens": MAX_TOKENS,
        "generate.temperature": 0.0,
        "generate.thinking": True,
    }
    with scratch_project(changes) as project:
        project.take_questions(ROOT / "data/raw")
        with serve(knows_perf(project.params.verifier), "perf", SERVER_ARGS) as endpoint:
            clients = Clients(project, endpoint.base_url)
            # Not measured: the first to ask meets a cold server, which stands still for a moment at
            # the first log-probabilities that the probe of `generate` asks for.
            clients.ours()
            turns = {
                "ours": clients.ours,
                "speculators": clients.speculators,
                "vllm_bench": clients.vllm_bench,
            }
            rounds = take_turns(turns, size.rounds)
    results = {
        f"generate_requests_per_s_{name}": result(answers_per_s(rounds, name, "asking_s"), COMMAND)
        for name in turns
    }
    for other in ("speculators", "vllm_bench"):
        name = f"generate_vs_{other}"
        results[name] = result(ratios(rounds, other, "asking_s"), COMMAND)
        results[f"{name}_whole_process"] = result(ratios(rounds, other, "whole_s"), COMMAND)
    publish(results, is_full=is_full)


def knows_perf(verifier: Verifier) -> Verifier:
    """Its server finds the stopwatch."""
    env = {**verifier.server_env, "PYTHONPATH": ENVIRONMENT["PYTHONPATH"]}
    return verifier.model_copy(update={"server_env": env})


if __name__ == "__main__":
    main()
