# The two commands of the README. Each makes its own virtual environment on first use.
PYTHON ?= python3
DEMO_VENV := .venv-demo
TEST_VENV := .venv
TORCH := torch==2.13.0

.PHONY: demo test clean check-python

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/onnxtrain demo --output demo-output

test: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/ruff check
	$(TEST_VENV)/bin/ruff format --check
	$(TEST_VENV)/bin/mypy
	$(TEST_VENV)/bin/lint-imports
	$(TEST_VENV)/bin/python -m pytest -n 2

$(DEMO_VENV)/.installed: pyproject.toml | check-python
	$(PYTHON) -m venv --clear $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

$(TEST_VENV)/.installed: pyproject.toml | check-python
	$(PYTHON) -m venv --clear $(TEST_VENV)
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "onnxtrain needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'

clean:
	rm -rf $(DEMO_VENV) $(TEST_VENV) demo-output build dist
