# make setup | kernels | train | test | lint | docs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := OMP_NUM_THREADS=1
# glibc keeps freed memory instead of giving it back to the system between operations.
KEEP := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824
# CPU=default|avx2|avx512: another machine's rounding. MKL on AMD heeds MKL_CBWR=COMPATIBLE alone.
MKL_default := MKL_CBWR=COMPATIBLE MKL_ENABLE_INSTRUCTIONS=SSE4_2
MKL_avx2 := MKL_ENABLE_INSTRUCTIONS=AVX2
MKL_avx512 := MKL_ENABLE_INSTRUCTIONS=AVX512
AS_CPU := $(if $(CPU),ATEN_CPU_CAPABILITY=$(CPU) $(MKL_$(CPU)))

.PHONY: help setup kernels train test lint docs gpu

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## make .venv and install the project, pinned by constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The kernels are Triton and TileLang: no nvcc. Their package's build wants to see torch.
kernels: setup  ## add the library kernels: Mamba-3 by mamba-ssm (a GPU runs them, a CPU tests them)
	$(BIN)/python -m pip install --quiet -c constraints.txt 'setuptools>=77' wheel packaging ninja
	MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE $(BIN)/python -m pip install --quiet \
		--no-build-isolation -c constraints.txt -e '.[kernels]'

train: setup  ## prepare the default corpus once, then train the tiny hybrid on two ranks
	@$(BIN)/megacpp data prepare
	$(RUN) $(KEEP) $(BIN)/torchrun --standalone --nproc-per-node=2 train.py tiny

test: setup  ## the whole CPU test suite (CPU=default: rounding of a CPU without vector units)
	$(RUN) $(AS_CPU) $(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup  ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: setup  ## rewrite the printed figures of the chapters
	$(RUN) $(BIN)/python -m pytest tests/docs --update-docs

gpu:  ## what only a GPU can show, with the python that is there: tests, then docs/gpu.json
	$(PYTHON) -m pytest -m gpu tests
	$(PYTHON) -m bench.gpu
