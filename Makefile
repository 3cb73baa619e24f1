# make setup | kernels | train | check | test | other-torch | torture | mutants | lint | docs | site | site-check | assignment      [TORCH=2.15.0] [PYTHON=python3.12]
PYTHON ?= python3
# Another torch than megacpp/versions.py's has a .venv of its own.
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
PINS := $(VENV)/constraints.txt
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)
RUN := OMP_NUM_THREADS=1
SITE := mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocstrings-python==2.0.11 latex2mathml
# Ranks are forked from the tests' process, which CUDA forbids: `make gpu` has the GPU's tests.
HIDE := CUDA_VISIBLE_DEVICES=
# glibc keeps freed memory instead of giving it back to the system between operations.
KEEP := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
# A file or two of each package, whole: `make check`.
CHECK := test_house.py test_arguments.py test_mesh_rules.py test_cli.py model/test_documents.py \
  model/test_m2rnn.py model/test_loss.py data/test_batches.py optim/test_adamw.py \
  optim/test_groups.py checkpointing/test_meter.py state/test_checkpoint.py \
  memory/test_calibration.py run/test_health.py run/test_corpus.py launching report/test_page.py \
  parallel/test_boundary.py parallel/test_fsdp.py
# What another torch is likely to break: pipelines in fp64 and their sends, an audit under FSDP2,
# estimates for a GPU, hybrids on meshes.
OTHER := parallel/test_sends.py parallel/test_random_meshes.py \
  parallel/test_audit.py::test_an_audit_leaves_no_trace \
  memory/test_gpu_kernels.py::test_an_estimate_is_what_a_launch_would_hold
# CPU=default|avx2|avx512: another machine's rounding. MKL on AMD heeds MKL_CBWR=COMPATIBLE alone.
MKL_default := MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2
MKL_avx2 := MKL_ENABLE_INSTRUCTIONS=AVX2
MKL_avx512 := MKL_ENABLE_INSTRUCTIONS=AVX512
# Inductor's kernels for one CPU are kept apart from another's: its cache doesn't tell them apart.
AS_CPU := $(if $(CPU),ATEN_CPU_CAPABILITY=$(CPU) $(MKL_$(CPU)) TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-$(CPU))

.PHONY: help setup kernels train check test other-torch torture mutants lint docs site site-check assignment gpu

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.core  ## make .venv and install what training needs, pinned

$(VENV)/.core: pyproject.toml constraints.txt megacpp/versions.py
	@$(PYTHON) megacpp/versions.py $(TORCH) > /dev/null
	$(PYTHON) -m venv $(VENV)
	@{ cat constraints.txt; $(PYTHON) megacpp/versions.py $(TORCH); } > $(PINS)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.test $(VENV)/.lint: $(VENV)/.%: $(VENV)/.core
	$(INSTALL) -e '.[$*]'
	@touch $@

# The kernels are Triton and TileLang: no nvcc. Their package's build wants to see torch.
kernels: setup  ## add the library kernels: Mamba-3 by mamba-ssm (a GPU runs them, a CPU tests them)
	$(INSTALL) 'setuptools>=77' wheel packaging ninja
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(INSTALL) --no-build-isolation -e '.[kernels]'

train: setup  ## prepare the default corpus once, then train the tiny hybrid on two ranks
	@$(BIN)/megacpp data prepare
	$(RUN) $(KEEP) $(BIN)/torchrun --standalone --nproc-per-node=2 train.py tiny

test: $(VENV)/.test  ## the whole CPU test suite (TORCH=2.15.0: that torch; CPU=default: a CPU without vector units; PART=0/6: a sixth of the long tests)
	$(RUN) $(HIDE) $(AS_CPU) $(BIN)/python -m pytest -n 2 --dist loadfile $(if $(PART),--part $(PART))

check: $(VENV)/.test  ## the fast part of the suite, of each package: about 100 seconds on two idle cores
	$(RUN) $(HIDE) $(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix tests/,$(CHECK))

other-torch: $(VENV)/.test  ## what another torch is likely to break: TORCH=2.11.0 (half a minute on two idle cores, and minutes to install it)
	$(RUN) $(HIDE) $(BIN)/python -m pytest -n 2 --dist loadfile $(addprefix tests/,$(OTHER))

torture: $(VENV)/.test  ## attack runs for about two hours, and write the table R1-R25 (docs/torture.md)
	$(RUN) $(HIDE) $(BIN)/python -m tests.torture --write docs/torture.md

mutants: $(VENV)/.test  ## plant faults in a copy of the core, one at a time: which do the tests find? (hours; goes on where it was)
	$(RUN) $(HIDE) $(BIN)/python -m tests.mutants

lint: $(VENV)/.test $(VENV)/.lint  ## format check, lint, types, spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell

docs: $(VENV)/.test  ## rewrite the printed figures of the chapters
	$(RUN) $(BIN)/python -m pytest tests/docs --update-docs

.venv-site/.done: Makefile
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(SITE)
	@touch $@

site: .venv-site/.done  ## the book as pages for a browser, in build/site/html; broken links fail
	.venv-site/bin/python -m bench.site
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet --config-file build/site/mkdocs.yml

site-check: site $(VENV)/.test  ## open every page of the site in Chromium, wide and narrow: nothing overflows, no error; without Chromium the last line says so
	$(RUN) $(BIN)/python -m pytest -rs tests/docs/test_built_site.py
	@$(BIN)/python -m tests.docs.browser

assignment: setup  ## grade your answer to an exercise of docs/assignments: make assignment N=3
	@$(RUN) $(HIDE) $(BIN)/python -m tests.assignments $(N)

gpu:  ## what only a GPU can show, with the python that is there: tests, then docs/gpu.json
	$(PYTHON) -m pytest -m gpu tests
	$(PYTHON) -m bench.gpu
