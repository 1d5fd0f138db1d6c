# Everything runs in .venv, made from PYTHON with the versions of constraints.txt.
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help demo test lint format bench tables clean

help:
	@echo "make demo           compile the small model's kernels, serve it (PORT=8000), print one completion;"
	@echo "                    ONCE=1: and stop. With PYTHON=python3.12, every target installs with that Python"
	@echo "make test           every test this machine can run (tests/gpu needs a Hopper GPU);"
	@echo "                    WORKERS=0: in one process"
	@echo "make lint           ruff and mypy"
	@echo "make bench          time every class on this GPU into benchmarks/results/; PEER=FOLDER: beside DeepGEMM"
	@echo "make clean          remove .venv and what was built"
	@echo "make tables         rewrite the tables and plots of README.md and docs/ from benchmarks/results/"

# A folder without a stamp is what a failed install has left.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "needs Python 3.10 to 3.13; name another with make PYTHON=python3.12"; exit 1; }
	test -e $@ || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV): about a minute the first time"
	$(RUN) -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[server,test,bench]'
	touch $@

demo: $(STAMP)
	$(RUN) -m server_example.demo $(if $(PORT),--port $(PORT)) $(if $(filter-out 0,$(ONCE)),--once)

# One torch thread for each worker: two workers fill two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(STAMP)
	$(RUN) -m benchmarks --set all $(if $(PEER),--peer $(PEER))

tables: $(STAMP)
	$(RUN) -m benchmarks.report

clean:
	rm -rf $(VENV) build dist
