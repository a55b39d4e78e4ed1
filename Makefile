# `make test` and `make demo` need Python 3.11, make and a package index.

PYTHON ?= python3.11
VENV := .venv

.PHONY: venv test demo lint clean

venv: $(VENV)/.installed

$(VENV)/.installed: setup.py .ci/setup.sh .ci/vllm-metadata/setup.py
	.ci/setup.sh $(PYTHON) $(VENV)
	touch $@

test: venv
	$(VENV)/bin/python -m pytest -q --durations=15 tests

demo: venv
	$(VENV)/bin/python -m benchmarks.demo

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Keeps $(VENV), and the model in ~/.cache/vllm-ringwindow.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks tests vllm_ringwindow -name __pycache__ -prune -exec rm -r {} +
