"""How fast generation, reassembly and hidden states are beside other programs, and what they take.

    make perf        # all of it, into reports/perf.json and docs/performance.md

    throughput       this project, speculators and vllm bench against a real vLLM
    client           this project and speculators against a server that costs nothing; memory
    verdict          how long a server that does not reason is believed
    reassembly       reassemble alone, and beside speculators' prepare-data; memory
    extraction       hidden states out of vLLM, beside speculators and bare prefill
    states           hidden states on disk: size, and the loader beside speculators'
    training         the trainer beside speculators'
    daily            what `dvc repro` costs when there is little to do
    steps            one way to train a draft, in a process of its own
    compare          the clients, taking turns
    stopwatch        the time, taken in the server
    stub_server      the server that costs nothing
    project          the scratch project they work in
    report           the figures on disk and in the docs

The first eight run alone (`python -m perf.verdict`) and take sizes for a short trial (`--help`),
which is printed and not kept.
"""
