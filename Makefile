# `make test` and `make demo` need Python 3.11, make and a package index.

PYTHON ?= python3.11
VENV := .venv

.PHONY: venv test long compat fuzz bench demo lint dist clean

venv: $(VENV)/.installed

$(VENV)/.installed: setup.py .ci/setup.sh .ci/vllm-metadata/setup.py
	.ci/setup.sh $(PYTHON) $(VENV)
	touch $@

# What starts processes of its own has the machine to itself; the rest is one thread each.
test: venv
	$(VENV)/bin/python -m pytest -q -m "slow and not long" --durations=15 tests
	$(VENV)/bin/python -m pytest -q -m "not slow and not long" --durations=15 -n 2 --dist worksteal tests

# What `make test` leaves out: minutes each.
long: venv
	$(VENV)/bin/python -m pytest -q -m long --durations=15 tests

# The plugin on other vLLM releases; downloads their wheels (300 MB each) once.
compat: venv
	$(VENV)/bin/python -m tests.versions --save

# Random configurations, ring against stock. A failure prints a one-line reproducer.
MINUTES ?= 5
fuzz: venv
	$(VENV)/bin/python -m tests.fuzz --minutes $(MINUTES)

# The quick set, into benchmarks/results/; wants an idle machine.
BENCHMARKS := capacity scheduler allocator memory window_update staging accuracy throughput serve batch
bench: venv
	for name in $(BENCHMARKS); do \
	    $(VENV)/bin/python -m benchmarks.$$name --quick --save || exit 1; \
	done

demo: venv
	$(VENV)/bin/python -m benchmarks.demo

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# sdist and wheel, checked as an index would.
dist: venv
	rm -rf build dist
	$(VENV)/bin/python -m build -q
	$(VENV)/bin/twine check --strict dist/*

# Keeps $(VENV), those of `make compat`, and the model in ~/.cache/vllm-ringwindow.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks tests vllm_ringwindow -name __pycache__ -prune -exec rm -r {} +
