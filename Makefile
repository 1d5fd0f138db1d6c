# Everything runs in .venv, made from PYTHON with the versions of constraints.txt.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PORT ?= 8000

.PHONY: help demo test lint format bench tables clean

help:
	@echo "make demo [ONCE=1]  make the demo model, compile its kernels, serve it, print one completion"
	@echo "make test           every test this machine can run (tests/gpu needs a Hopper GPU)"
	@echo "make lint           ruff and mypy"
	@echo "make bench          time every class on this GPU into benchmarks/results/"
	@echo "make tables         rewrite the README's tables from benchmarks/results/"

$(STAMP): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[server,test]'
	touch $@

demo: $(STAMP)
	$(RUN) -m server_example.demo --port $(PORT) $(if $(filter-out 0,$(ONCE)),--once)

test: $(STAMP)
	$(RUN) -m pytest -q

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(STAMP)
	$(RUN) -m benchmarks

tables: $(STAMP)
	$(RUN) -m benchmarks.report

clean:
	rm -rf $(VENV) .demo build dist
