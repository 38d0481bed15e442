# Two commands from a fresh clone: `make demo` and `make test`. Each sets up whatever is missing first.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Which TensorFlow: cpu, gpu or tpu, an extra of setup.cfg. Each has an environment of its own.
TF ?= cpu
VENV ?= .venv$(if $(filter cpu,$(TF)),,-$(TF))
# Another Keras for `make test-keras`; by default the oldest that is supported.
KERAS ?= 3.13.2
# More arguments: `make test ARGS="tests/unit -k cache"`, `make demo ARGS="--epochs 3"`.
ARGS ?=
# How many processes run tests side by side: on two cores three, for they wait at times. `JOBS=0`: none but pytest
# itself, for `-s` or `--pdb`.
JOBS ?= 3

BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS)
INSTALLED := $(VENV)/.installed
KERAS_VENV = $(VENV)-keras-$(KERAS)
HOROVOD := $(VENV)/.horovod

.PHONY: help
help: ## Show this help
	@echo "make TARGET [TF=cpu|gpu|tpu] [ARGS=...]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1:\2/p' Makefile | while IFS=: read -r target text; do \
	  printf '  %-13s %s\n' "$$target" "$$text"; done
	@echo
	@echo "The first run installs TensorFlow and compiles Horovod: about 3 minutes on two cores. Later ones start"
	@echo "in seconds. Needed from the system: Python 3.11 or later with venv, make, a C++ compiler."

.PHONY: setup
setup: $(HOROVOD) ## Make .venv, install the package into it, build Horovod

.PHONY: demo
demo: $(HOROVOD) ## Train examples/digits_distributed.py on 2 processes and show what comes out
	@$(BIN)/python examples/demo.py $(ARGS)

# Three tiers, each with all of the one before. A test of the second is marked `ci`, of the third `full`. What failed is
# run once more, alone.
SUITE = $(BIN)/python -m tests.suite --jobs $(JOBS)

.PHONY: test
test: lint $(HOROVOD) ## Check style and types, run what a commit needs (about 10 minutes on two cores)
	$(SUITE) test $(ARGS)

.PHONY: test-ci
test-ci: $(HOROVOD) ## Run all that CI runs: `make test`, and a job of each launcher, with a fault (about 15 minutes)
	$(SUITE) ci $(ARGS)

# SHARD=2/8 runs a part, on another machine maybe: copy the files of RESULTS together. A run resumes where it stopped.
SHARD ?=
RESULTS ?= runs/full
.PHONY: test-full
test-full: $(HOROVOD) ## Run all: each case on each backend and size, all faults; SHARD=2/8 a part (hours)
	$(SUITE) full --results $(RESULTS) $(if $(SHARD),--shard $(SHARD)) $(ARGS)

# Where `make test-verify` and `make test-random` run: a backend and its size, or several.
ON ?= horovod-2 or mirrored-2
.PHONY: test-verify
test-verify: $(HOROVOD) ## Run the promised cases under KERAS_DIST_VERIFY=1, ON="tpu-8" (about 30 minutes each)
	KERAS_DIST_VERIFY=1 $(PYTEST) -m "full or not full" tests/contract -k "row and ($(ON))" $(ARGS)

SEEDS ?= 0-19
.PHONY: test-random
test-random: $(HOROVOD) ## Compare random scripts with one process, ON="horovod-3 and pipelines" SEEDS=0-99 (about 20 s each)
	SEEDS=$(SEEDS) $(PYTEST) -m full tests/contract/test_random.py -k "$(ON)" -rs $(ARGS)

.PHONY: test-slow
test-slow: $(INSTALLED) ## Compile ResNet50 and a transformer for a TPU by its compiler (about 20 minutes)
	$(BIN)/python -m pytest -m full tests/multiprocess/test_dry_run.py $(ARGS)

.PHONY: test-mpi
test-mpi: $(VENV)-mpi/.installed ## Build Horovod with MPI beside the other one and run what sends by it (about 6 minutes)
	$(VENV)-mpi/bin/python -m pytest -n 0 -m full tests/multiprocess/test_mpi.py $(ARGS)

.PHONY: test-machine
test-machine: $(HOROVOD) ## Install the wheel on a bare Debian, build the CPU image; as root, with debootstrap, buildah
	$(BIN)/python -m pytest -n 0 -m full tests/multiprocess/test_fresh_machine.py $(ARGS)

.PHONY: test-slurm
test-slurm: $(HOROVOD) ## Run under a real Slurm of two hosts; as root, after apt-get install slurmctld slurmd munge
	$(BIN)/python -m pytest -n 0 -m "" tests/multiprocess/test_slurm.py $(ARGS)

.PHONY: test-kubernetes
test-kubernetes: $(HOROVOD) ## Run what `keras-dist kube` prints under Kubernetes' control plane, if its programs are on PATH; as root
	$(BIN)/python -m pytest -n 0 -m "" tests/multiprocess/test_kubernetes.py $(ARGS)

# Faults happen at random moments: once is no proof. SEED, which a failure prints, repeats a round.
N ?= 20
SEED ?=
.PHONY: repeat
repeat: $(HOROVOD) ## Kill workers, servers and coordinators, N=20 rounds of other moments; ARGS for other tests
	@first=$(or $(SEED),$$RANDOM); for seed in $$(seq $$first $$((first + $(N) - 1))); do \
	  FAULT_SEED=$$seed $(BIN)/python -m pytest -q -x --no-header $(or $(ARGS),$(FAULTS)) || \
	    { echo "failed: make repeat N=1 SEED=$$seed"; exit 1; }; done
FAULTS = tests/multiprocess/test_parameter_server_faults.py -m ""

.PHONY: chaos
chaos: $(HOROVOD) ## Kill runs at N=20 random moments and let them resume; SEED is the first of the seeds
	@rm -rf runs/chaos
	CHAOS_COUNT=$(N) CHAOS_SEED=$(or $(SEED),0) $(PYTEST) -m full tests/multiprocess/test_resume.py \
	  --results=runs/chaos $(ARGS)
	@echo "To write docs/survival.md: $(BIN)/python -m tests.make_table runs/chaos"

.PHONY: table
table: $(HOROVOD) ## Run all promised cases and write docs/promised_cases.md; after `make test-full` only the latter
	$(SUITE) full --results $(RESULTS) tests/contract $(ARGS)
	$(BIN)/python -m tests.make_table $(RESULTS)

.PHONY: faults
faults: $(HOROVOD) ## Let each fault happen in a job of each launcher and write docs/faults.md (half an hour)
	@rm -rf runs/faults
	KERAS_DIST_TEST_PROMISED_TIMES=1 $(BIN)/python -m pytest -n 0 -m "full or not full" \
	  tests/multiprocess/test_fault_table.py --results=runs/faults $(ARGS)
	$(BIN)/python -m tests.make_table runs/faults

.PHONY: test-pythons
test-pythons: $(HOROVOD) ## Build and prove Horovod on other Pythons and TensorFlows (some minutes each)
	$(PYTEST) -m full tests/multiprocess/test_horovod.py -k another_python $(ARGS)

.PHONY: test-keras
test-keras: $(KERAS_VENV)/.installed ## Run what depends on Keras with another one, KERAS=3.13.2 (about 4 minutes)
	@rm -rf runs/keras-$(KERAS)
	$(KERAS_VENV)/bin/python -m tests.suite test --jobs $(JOBS) --results runs/keras-$(KERAS) $(KERAS_TESTS) $(ARGS)
# The seams, and cases that go through each of them. `KERAS_TESTS=tests/contract` for all cases.
KERAS_TESTS ?= tests/unit/test_keras_compat.py tests/unit/test_downloads.py \
  tests/contract/test_training.py tests/contract/test_callbacks.py tests/contract/test_losses.py \
  tests/contract/test_files.py

.PHONY: test-integrations
test-integrations: $(VENV)-integrations/.installed ## Train with KerasHub, KerasRS, mlflow, Orbax, scikit-learn's wrapper, Ray (about 5 minutes)
	$(VENV)-integrations/bin/python -m pytest -n 0 -m full tests/multiprocess/test_integrations.py $(ARGS)

.PHONY: lint
lint: $(INSTALLED) ## Check style and types only
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/hadolint docker/*.Dockerfile

.PHONY: docs
docs: $(INSTALLED) ## Write docs/api.md from the docstrings
	$(BIN)/python docs/make_api.py

.PHONY: dist
dist: $(INSTALLED) ## Build the source distribution and the wheel, in dist/
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install build
	$(BIN)/python -m build

.PHONY: terminal
terminal: $(HOROVOD) ## Run the script of the README and draw the terminal that it shows
	$(BIN)/python docs/make_terminal.py

.PHONY: lock
lock: $(INSTALLED) ## Pin again the packages of the images in docker/ and the tools that build Horovod
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install uv
	$(LOCK) --python-version 3.11 --extra cpu -o docker/requirements-cpu.txt
	$(LOCK) --python-version 3.12 --extra gpu -o docker/requirements-gpu.txt
	$(LOCK) --python-version 3.11 --extra tpu -o docker/requirements-tpu.txt
	$(PIN) -o $(HOROVOD_BUILD)/build-tools.txt $(HOROVOD_BUILD)/build-tools.in
HOROVOD_BUILD = keras_dist/horovod_build
PIN = $(BIN)/uv pip compile --quiet --generate-hashes --custom-compile-command "make lock" --no-annotate \
  --universal --python-version 3.11
LOCK = $(BIN)/uv pip compile --quiet --generate-hashes --custom-compile-command "make lock" \
  --python-platform x86_64-manylinux_2_31 --extra examples setup.cfg

.PHONY: bench
bench: $(HOROVOD) ## Time steps against plain Keras, Horovod, PyTorch, other backends; write docs/benchmarks.md (two hours)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --editable '.[benchmarks]'
	$(BIN)/python benchmarks/bench.py $(or $(ARGS),--docs)

.PHONY: clean
clean: ## Remove what make made, but for the cache of Horovod wheels in your home directory
	rm -rf .venv .venv-* runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The steps of the set-up. A stamp file tells that one is done; an interrupted one leaves none and is run again.

$(BIN)/python:
	@python="$$(.ci/check-system)"; \
	echo "Making $(VENV) with $$python"; \
	"$$python" -m venv --clear $(VENV)
	@$(BIN)/python -m pip --disable-pip-version-check --quiet install --upgrade pip  # Python 3.11's takes twice as long

$(INSTALLED): setup.cfg pyproject.toml | $(BIN)/python
	@echo "Installing TensorFlow ($(TF)) and keras_dist into $(VENV): about a minute the first time"
	@$(BIN)/python -m pip --disable-pip-version-check --quiet --quiet install --no-compile --editable '.[$(TF),dev]'
	@touch $@

# Makes the environment of a rule find the packages of the main one, too.
define add_packages_below
@below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
echo "import site; site.addsitedir('$$below')" \
  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
endef

# The packages of the main environment, under another Keras.
$(VENV)-keras-%/.installed: | $(HOROVOD)
	@echo "Making $(@D): the packages of $(VENV), with Keras $*"
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps keras==$*
	$(add_packages_below)
	@touch $@

# The packages of the main environment, with libraries that build on Keras. One of them takes the `tensorflow` package.
$(VENV)-integrations/.installed: setup.cfg | $(HOROVOD)
	@echo "Making $(@D): the packages of $(VENV), with KerasHub, KerasRS, mlflow, Orbax and Ray: about 3 minutes"
	@$(BIN)/python -m venv --clear $(@D)
	$(add_packages_below)
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[integrations,ray]'
	@touch $@

# The packages of the main environment, with a Horovod that has MPI.
$(VENV)-mpi/.installed: keras_dist/horovod_build/build.py | $(HOROVOD)
	@$(BIN)/python -m venv --clear $(@D)
	$(add_packages_below)
	@$(@D)/bin/python -m keras_dist install-horovod --mpi
	@touch $@

$(HOROVOD): $(INSTALLED) keras_dist/horovod_build/build.py
	@$(BIN)/keras-dist install-horovod
	@touch $@
