# make train   sets up .venv once, trains the default run and writes its report
# make language-model   trains a small Llama on Python's sources and prints what it writes, five minutes
# make test    runs the tests               make test ARGS="tests/test_losses.py -x"
# make test-all   and the tests that guard a release, an hour
# make torch   installs PyTorch and its CLIPs, 6 GB, for the tests that compare with them and skip without
# make peers   runs the test suites of optax and Flax with our parts in place of theirs, half an hour
# make others  installs projects of others and checks the conversion of their models, half an hour
# make report  rewrites the report page of a run
# make docs    builds the documentation in build/site: links checked, notebooks executed, some minutes
# make clean   removes what setting up and testing made, not runs/ and data/
# Everything these commands write stays in this folder.

CONFIG := configs/openmoji.py
WORKDIR := runs/openmoji
ARGS :=
# The first of these that is 3.11 or later is used. To name one: make train PYTHON=/path/to/python
PYTHON := python3.12 python3.11 python3.13 python3 python

BIN := .venv/bin
CREATED := .venv/.created
READY := .venv/.ready
KERNELS := .venv/.kernels
TORCH := .venv/.torch
PEERS := .cache/peers/.fetched
DOCS := .venv/.docs
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-compile
INSTALL = $(PIP) --constraint requirements/constraints.txt --editable

# XLA allocates its memory at every step: with pages of 2 MB, where Linux allows them, that takes half as long.
export GLIBC_TUNABLES := glibc.malloc.hugetlb=1

# Otherwise libraries write these to the home directory.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export TFDS_DATA_DIR := $(CURDIR)/data

.PHONY: train language-model test test-all torch peers others report docs clean

train: $(READY)
	@$(BIN)/python train.py --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

language-model: $(READY)
	@$(BIN)/python examples/language_model/train.py $(ARGS)

test: $(READY) $(KERNELS)
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: ARGS := -m "not peers"
test-all: test

torch: $(TORCH)

peers: $(READY) $(PEERS)
	@$(BIN)/python -m pytest tests/peers -m peers $(ARGS)

others: $(READY)
	@$(BIN)/python tests/others $(ARGS)

report: $(READY)
	@$(BIN)/python -m swjax report $(WORKDIR)

docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --config-file .ci/mkdocs.yml
	@echo "documentation: build/site/index.html"

# Runs again when the requirements change and after an interruption. Modules are not compiled here: most are
# never imported.
$(READY): $(CREATED) pyproject.toml requirements/constraints.txt
	@echo "installing into .venv: about a minute, once"
	@$(INSTALL) '.[test]' && touch $@

# Triton, 1 GB, compiles the kernels in their tests; training on a CPU needs none of it.
$(KERNELS): $(READY)
	@$(INSTALL) '.[gpu]' && touch $@

# PyTorch for NVIDIA GPUs requires an older Triton than our kernels; PyTorch for CPUs requires none.
$(TORCH): $(READY)
	@echo "installing PyTorch into .venv: some minutes, once"
	@grep -v '^triton==' requirements/constraints.txt > $@.txt
	@$(PIP) --constraint $@.txt --editable '.[torch]'
	@! $(BIN)/python -m pip show --quiet triton 2>/dev/null || \
	  $(PIP) --no-deps --constraint requirements/constraints.txt triton
	@touch $@

# Flax's tests are in its source distribution, of the installed version; optax's come with its wheel.
$(PEERS): $(READY)
	@$(PIP) scikit-learn && mkdir -p $(@D) && cd $(@D) && \
	  flax=$$($(CURDIR)/$(BIN)/python -c 'import flax; print(flax.__version__)') && \
	  $(CURDIR)/$(BIN)/python -m pip download --quiet --no-deps --no-binary flax flax==$$flax && \
	  tar xzf flax-$$flax.tar.gz flax-$$flax/tests && touch $(@F)

$(DOCS): $(READY)
	@$(INSTALL) '.[docs]' && touch $@

$(CREATED):
	@for python in $(PYTHON); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then $$python -m venv --clear .venv && touch $@; exit; fi; \
	done; \
	echo "no Python 3.11 or later with venv among: $(PYTHON). Install one, or name it: make PYTHON=/path/to/python" >&2; \
	exit 1

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .ruff_cache
