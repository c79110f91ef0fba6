# Every target works alone in a fresh clone: it makes the environment that it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = pip install --quiet --disable-pip-version-check
TESTS ?=
SOAK_MINUTES ?= 30
SECONDS ?= 540

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-slow test-newest lint docs bench bench-allocator bench-call bench-checkpointing bench-cluster bench-constants bench-controller bench-dispatch bench-first-call bench-gap bench-h200 bench-h200-workspaces bench-jobs bench-launches bench-loops bench-planning bench-predictor bench-renewal bench-scale bench-training bench-workspaces compare paper paper-compiled paper-simulated gpu-paper gpu-peaks gpu-results gpu-times soak clean results bench-memory bench-mesh bench-mesh-largest bench-workloads

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

run: $(VENV)/.installed ## the main job: train under a budget, beside plain jax.jit
	$(BIN)/tensile demo

test: $(VENV)/.installed ## the tests (TESTS=tests/models for some of them)
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

test-slow: $(VENV)/.installed ## the tests that take long
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(TESTS)

lint: $(VENV)/.installed ## ruff, pyright, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(VENV)/.installed ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

bench: $(VENV)/.installed bench-scale bench-gap bench-jobs bench-call bench-controller bench-dispatch bench-predictor bench-renewal ## the figures of the README, on this CPU
	$(BIN)/python -m benchmarks.run

gpu-results: $(VENV)/.installed ## on a GPU, within SECONDS: 200 steps in one program beside plain jit's, and copies beside kernels
	$(BIN)/python -m benchmarks.gpu results --seconds $(SECONDS)

gpu-times: $(VENV)/.installed ## on a GPU, within SECONDS: steps as segments and programs, with and without CUDA graphs over convolutions
	$(BIN)/python -m benchmarks.gpu times --seconds $(SECONDS)

gpu-peaks: $(VENV)/.installed ## on a GPU, within SECONDS: what XLA's allocator has in use, beside what plans say
	$(BIN)/python -m benchmarks.gpu peaks --seconds $(SECONDS)

gpu-paper: $(VENV)/.installed ## on a GPU, within SECONDS: the paper's experiments that are not measured yet
	$(BIN)/python -m benchmarks.paper measure --missing --at-once 12 --seconds $(SECONDS)

paper: $(VENV)/.installed ## every experiment of the paper on this machine's device, with tables and pictures
	$(BIN)/python -m benchmarks.paper measure
	$(BIN)/python -m benchmarks.paper draw

paper-simulated: $(VENV)/.installed ## the same, predicted for an H200 and for the paper's RTX A6000
	for device in h200 rtx_a6000; do $(BIN)/python -m benchmarks.paper simulate --device $$device || exit 1; done
	$(BIN)/python -m benchmarks.paper draw

paper-compiled: .venv-h200/.installed ## one workload under every policy, with memory of programs compiled for an H200; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.paper compile
	$(BIN)/python -m benchmarks.paper draw

results: $(VENV)/.installed ## docs/results.md and docs/predicted.md, from the JSON files in benchmarks/results
	$(BIN)/python -m benchmarks.results_pages

bench-jobs: $(VENV)/.installed ## several jobs under one budget, beside plain jit one after another
	$(BIN)/python -m benchmarks.jobs

soak: $(VENV)/.installed ## random jobs, pauses, cancels, failures and budgets, for SOAK_MINUTES
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES)

bench-allocator: $(VENV)/.installed ## the model of XLA's allocator beside what runs on an H200 saw, and plans by it; needs no GPU
	$(BIN)/python -m benchmarks.allocator

bench-call: $(VENV)/.installed ## what a call costs beside plain jit's, for a state of 300 arrays
	$(BIN)/python -m benchmarks.call

bench-checkpointing: $(VENV)/.installed ## jax.checkpoint placed by hand beside budgets of the same bytes
	$(BIN)/python -m benchmarks.checkpointing

bench-cluster: $(VENV)/.installed ## 18 jobs on a Ray cluster of six devices, beside Ray's own shares; and with a node killed
	$(BIN)/python -m benchmarks.cluster

bench-controller: $(VENV)/.installed ## what deciding for 1 to 64 jobs costs, in a simulation
	$(BIN)/python -m benchmarks.controller

bench-dispatch: $(VENV)/.installed ## what a runtime adds to the launches and steps of 1 to 8 jobs
	$(BIN)/python -m benchmarks.dispatch

bench-first-call: $(VENV)/.installed ## how long the first call takes beside plain jit's, without and with a warm cache
	$(BIN)/python -m benchmarks.first_call

bench-constants: $(VENV)/.installed ## what every tuned constant of the planner is worth
	$(BIN)/python -m benchmarks.constants

bench-gap: $(VENV)/.installed ## how far plans are from the best there are, on small random steps
	$(BIN)/python -m benchmarks.gap

compare: $(VENV)/.installed ## every policy on the paper's five models and a decoder, as tables, JSON and pictures
	mkdir -p benchmarks/results/compare
	for model in "vgg16 --batch-size 16" "resnet50 --batch-size 16" "inceptionv3 --batch-size 16" "inceptionv4 --batch-size 16" \
		"densenet121 --batch-size 16" "gpt --batch-size 64"; do \
		name=$${model%% *}; \
		$(BIN)/tensile compare $$model --device-profile h200 -o benchmarks/results/compare/$$name-h200.json \
			--picture benchmarks/results/compare/$$name-h200 || exit 1; done

bench-h200: .venv-h200/.installed ## compiled for an H200; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.h200

bench-launches: .venv-h200/.installed ## segments beside programs of them, compiled for an H200; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.launches

bench-loops: .venv-h200/.installed ## decoders written with nn.scan, compiled for an H200; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.loops

bench-memory: $(VENV)/.installed ## reports on memory beside XLA's own peaks, and how long reports and pages take
	$(BIN)/python -m benchmarks.memory

bench-mesh: .venv-h200/.installed ## steps sharded over eight H200, compiled for them; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.mesh

bench-mesh-largest: .venv-h200/.installed ## the largest batch of a decoder of 1.3 billion parameters on eight H200, compiled; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.mesh_largest

bench-planning: $(VENV)/.installed ## how fast plans for an H200 are, in simulation, beside a bound; and how long planning takes
	$(BIN)/python -m benchmarks.planning

bench-renewal: $(VENV)/.installed ## plans that follow a load that changes, the first iteration, and what following costs
	$(BIN)/python -m benchmarks.renewal

bench-predictor: $(VENV)/.installed ## predicted latencies of operators beside measured ones, on networks that were not fitted to
	$(BIN)/python -m benchmarks.predictor

bench-training: $(VENV)/.installed ## a decoder trains on English text under 40 %, beside plain jit; and in one call
	$(BIN)/python -m benchmarks.training

bench-workloads: $(VENV)/.installed ## forty training steps of many kinds under budgets, beside plain jit
	$(BIN)/python -m benchmarks.workloads

bench-workspaces: $(VENV)/.installed ## predicted workspaces beside XLA's, on this CPU
	$(BIN)/python -m benchmarks.workspaces

bench-h200-workspaces: .venv-h200/.installed ## the same compiled for an H200; needs no GPU
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 TF_CPP_MIN_LOG_LEVEL=2 \
		.venv-h200/bin/python -m benchmarks.workspaces --h200

bench-scale: $(VENV)/.installed ## how long planning takes as steps grow
	$(BIN)/python -m benchmarks.scale

# The short round on the newest jax; NEWEST_PYTHON must be 3.12 or later.
test-newest: .venv-newest/.installed
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal -m smoke $(TESTS)

clean: ## remove the environments and every cache
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A half-made environment has no stamp and is made again from the start.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
		"Python 3.11 or later is needed: $(PYTHON) is %d.%d. Try make PYTHON=python3.12 ..." % v[:2])'
	@echo "Installing into $(VENV) (a minute or two)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/$(PIP_INSTALL) -e '.[dev]'
	@touch $@

.venv-newest/.installed: pyproject.toml
	@test -n "$(NEWEST_PYTHON)" || { echo "Pass NEWEST_PYTHON=, a Python 3.12 or later." >&2; exit 1; }
	@echo "Installing the newest jax into .venv-newest (a minute or two)"
	@$(NEWEST_PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/$(PIP_INSTALL) -e '.[dev]'
	@touch $@

# XLA's compiler for GPUs without its driver. The versions must match one another.
.venv-h200/.installed: pyproject.toml
	@echo "Installing the GPU compiler into .venv-h200 (1.5 GB)"
	@$(PYTHON) -m venv --clear .venv-h200
	@.venv-h200/bin/$(PIP_INSTALL) jax==0.10.2 jaxlib==0.10.2 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 \
		nvidia-cuda-nvcc-cu12 nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc-cu12 nvidia-cuda-cupti-cu12 -e '.[data]'
	@touch $@
