# One verb per job. `make help` lists them. Nothing needs to be installed by hand first: .venv is made from
# the hash-pinned locks and made again when they change.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONPATH := $(CURDIR)
# Each worker of pytest and each agent of a test would compile everything again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON_IN_VENV := .venv/bin/python
CORES := $(shell nproc)
# Tests wait for most of their time (docs/decisions.md), and each worker reads all of them first.
WORKERS ?= $(shell workers=$$((3 * $(CORES))); echo $$((workers < 32 ? workers : 32)))
# Each has clusters of its own, which take processor time and a GiB of memory even while a test waits.
CLUSTER_WORKERS ?= $(shell workers=$$(((3 * $(CORES) + 1) / 2)); echo $$((workers < 4 ? workers : 4)))
# Targets side by side, each with its output in one piece; all run even if one fails. A recipe that names $(MAKE)
# itself would run in a dry run, too.
TOGETHER := $(MAKE) --no-print-directory --keep-going --output-sync=target --jobs=4

.PHONY: help check demo test test-long fuzz storm test-cluster test-peers test-gpu bench lint ruff types contracts tests-of-changes \
	format proto docs pictures lock image chart clean venv venv-runtime

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: venv ## before each commit: lint, unit tests of what changed since main, style, documents (ALL=1: all unit tests)
	@$(TOGETHER) ruff types contracts tests-of-changes

venv: ## make or update .venv with the tool chain
	@.ci/venv dev

venv-runtime:
	@.ci/venv runtime

demo: venv-runtime ## run the real agent on a simulated 8-GPU machine and show what happens (PAGE=1: then its page, on localhost)
	@$(PYTHON_IN_VENV) -m agent simulate --profile dgx-h200 $(if $(PAGE),--page)

test: venv ## lint beside unit, component, chart, fuzz and storm tests, without the long ones (installs Debian's Chromium if missing)
	@mkdir -p build
	@$(PYTHON_IN_VENV) -m tests.pictures.chromium || [ -z "$$CI" ]
	@code=0; \
	nice $(TOGETHER) ruff types contracts > build/lint.log 2>&1 & lint=$$!; \
	trap 'kill $$lint 2>/dev/null || :' EXIT; \
	FUZZ_COUNT=1000 $(PYTHON_IN_VENV) -m pytest -n $(WORKERS) --dist worksteal -m 'not long' tests/unit tests/component tests/chart tests/fuzz \
		--junitxml=build/test.xml || code=$$?; \
	$(PYTHON_IN_VENV) -m pytest -m 'not long' tests/storm --junitxml=build/storm.xml || code=$$?; \
	wait $$lint || code=$$?; \
	cat build/lint.log; \
	exit $$code

test-long: venv ## what takes long by its nature: many switches and kills, 10^5 steps of storms, ten times the inputs of fuzz
	@mkdir -p build
	@code=0; \
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS) --dist worksteal -m long tests/unit tests/component tests/chart \
		--junitxml=build/test-long.xml || code=$$?; \
	$(PYTHON_IN_VENV) -m pytest -n $(WORKERS) --dist worksteal tests/fuzz --junitxml=build/fuzz.xml || code=$$?; \
	$(PYTHON_IN_VENV) -m pytest -m long tests/storm --junitxml=build/storm-long.xml || code=$$?; \
	exit $$code

fuzz: venv ## 100,000 inputs to everything that others can write to (COUNT=, SEED=)
	FUZZ_COUNT=$(or $(COUNT),100000) FUZZ_SEED=$(or $(SEED),1) \
		$(PYTHON_IN_VENV) -m pytest -n 2 --dist worksteal tests/fuzz

test-cluster: venv ## the scenarios on a real kubelet and containerd (says what it builds first, and for how long; CLUSTER_WORKERS=)
	@mkdir -p build
	$(PYTHON_IN_VENV) -m tests.cluster.build
	$(PYTHON_IN_VENV) -m pytest -n $(CLUSTER_WORKERS) tests/cluster --junitxml=build/cluster.xml

test-peers: venv ## Kueue, Karpenter and NVIDIA's DRA driver beside ours, claims on Kubernetes 1.36 (says what it builds first, and for how long)
	@mkdir -p build
	$(PYTHON_IN_VENV) -m tests.cluster.build peers
	$(PYTHON_IN_VENV) -m pytest tests/peers --junitxml=build/peers.xml

test-gpu: venv ## everything that needs a real GPU; VGPU_TABLE=page of shares (default in build), TABLE=page of MPS, MIG=yes parts the GPU
	@mkdir -p build
	@code=0; \
	MIG=$(MIG) $(PYTHON_IN_VENV) -m pytest tests/gpu --junitxml=build/gpu.xml || code=$$?; \
	$(PYTHON_IN_VENV) -m tests.gpu.sharing $(or $(VGPU_TABLE),build/vgpu-on-hardware.md) || code=$$?; \
	$(if $(TABLE),$(PYTHON_IN_VENV) -m tests.gpu.table $(TABLE) || code=$$?;) \
	exit $$code

storm: venv ## seeded faults over the real agent in virtual time, then all mutants (SEED=first SEEDS=10, or as many as begin within MINUTES= STEPS=of each)
	@mkdir -p build
	$(PYTHON_IN_VENV) -m tests.storm --seed $(or $(SEED),1) --seeds $(or $(SEEDS),$(if $(MINUTES),1000000,10)) --steps $(or $(STEPS),2000) \
		$(if $(MINUTES),--seconds $$(( $(MINUTES) * 60 ))) --jobs $$(nproc) --report build/storm.json
	$(PYTHON_IN_VENV) -m tests.storm.hunting --jobs $$(nproc) --report build/storm.json

bench: venv ## measure against the budgets; writes build/bench.json (ONLY=name for one figure, CLUSTER=yes for those on the test cluster)
	@mkdir -p build
	$(PYTHON_IN_VENV) -m tests.bench $(if $(ONLY),--only $(ONLY)) $(if $(CLUSTER),--cluster)

lint: venv ## ruff, format, types, import contracts
	@$(TOGETHER) ruff types contracts

ruff: venv
	ruff check .
	ruff format --check .

types: venv
	mypy

contracts: venv
	lint-imports

tests-of-changes: venv
	$(PYTHON_IN_VENV) -m pytest -n $(CORES) --dist worksteal -q -p no:cacheprovider \
		$$(ALL=$(ALL) $(PYTHON_IN_VENV) -m tests.changed)

format: venv ## format the code
	ruff check --fix .
	ruff format .

proto: venv ## generate agent/_proto from proto/*.proto
	$(PYTHON_IN_VENV) proto/generate.py agent/_proto

pictures: venv ## draw docs/pictures from real runs (minutes; ONLY=name for one; installs Debian's Chromium if missing)
	$(PYTHON_IN_VENV) -m tests.pictures $(ONLY)

docs: venv ## write the generated files: docs/metrics.md, the commands in docs/commands.md, the file kubectl-gpu, config/schema.json, config/platform, the chart's schema
	$(PYTHON_IN_VENV) -m tests.metrics_reference > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	$(PYTHON_IN_VENV) -c 'import json, agent.settings as s; print(json.dumps(s.schema(), indent=2))' \
		> config/schema.json.new && mv config/schema.json.new config/schema.json
	$(PYTHON_IN_VENV) -m tests.commands_reference
	$(PYTHON_IN_VENV) -m tests.plugin_file
	$(PYTHON_IN_VENV) -m tests.chart.schema
	$(PYTHON_IN_VENV) -m tests.chart.platform

lock: venv ## resolve pyproject.toml again into the two locks
	.ci/lock

image: venv ## build the container image from the Dockerfile, without an engine: build/image.tar (ARCH=arm64)
	$(PYTHON_IN_VENV) -m tests.cluster.build.agent_image build/image$(if $(ARCH),-$(ARCH)).tar $(ARCH)

chart: venv ## check the chart and pack it: build/gpu-node-agent-<version>.tgz
	@.ci/release chart

clean: ## remove what was built, .venv included
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find agent tests proto -name __pycache__ -type d -prune -exec rm -rf {} +
