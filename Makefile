# The two commands of the README. Each makes its own virtual environment on first use.
PYTHON ?= python3
DEMO_VENV := .venv-demo
TEST_VENV := .venv
TORCH := torch==2.13.0

# The rooms that depend on other packages' versions, with the lowest declared versions and with the newest there are;
# what runs beside other frameworks (Hugging Face, Lightning, darts) needs newer ones of its own and is left to `test`.
OLDEST_VENV := .venv-oldest
NEWEST_VENV := .venv-newest
VERSIONED := tests/runtime tests/passes tests/autodiff tests/trainer tests/onnxblock tests/fusion \
	tests/test_artifacts.py tests/test_bad_input.py tests/test_losses.py tests/test_optimizers.py tests/cli tests/tables \
	tests/test_packaging.py tests/test_runtime_workarounds.py tests/test_kills.py tests/test_hostile.py \
	tests/ortmodule/test_runtime_version.py
ORTMODULE := tests/ortmodule/test_aten_lowerings.py tests/ortmodule/test_engine.py
# The lowest and the newest PyTorch that is declared, of which the CPU builds are not to be had everywhere: several GB.
TORCHES := 2.12.1 2.15.0
TORCH_VENV := .venv-torch
TORCH_TESTS := $(ORTMODULE) $(addprefix tests/ortmodule/test_, private_names.py models.py dynamo.py watch.py autograd.py aliases.py \
	checkpoint.py hidden_writes.py data_dependent.py solving.py functorch.py wrapping.py)
# Of onnxruntime ORTModule needs a newer version than the rest: its own lies before the other.
ORTMODULE_SITE := $(OLDEST_VENV)/ortmodule
FLOWER_VENV := .venv-flower
GALLERY_VENV := .venv-gallery
# The site is built in an environment of its own. It imports onnxtrain, to make the reference of the command line.
DOCS_VENV := .venv-docs
SITE := build/site
# A worker that has nothing left takes tests of the other.
PARALLEL := -n 2 --dist worksteal
# PART=0/8: of the tests marked thorough, an eighth.
OF_PART = $(if $(PART),--part $(PART))
TESTING := onnxscript pytest pytest-xdist hypothesis psutil hatchling tensorboard polars "datasets>=3"

# Native kernels are built where there is a C++ compiler, into the environment $(1), for the level of this processor: that is a
# third of the work. `test-levels` compiles and tests all of them.
CXX ?= c++
define install_kernels
	@if command -v $(CXX) >/dev/null; then \
		echo "Compiling the native kernels for this processor (once): this takes some minutes."; \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check \
			--config-settings cmake.define.ONNXTRAIN_LEVELS=native ./kernels; \
	else \
		echo "No C++ compiler ($(CXX)): without native kernels, which are optional."; \
	fi
endef
# The native kernels of every level beside the environment $(1): built once for all environments, and tested on its
# onnxruntime. $(2) are further arguments of pytest.
KERNELS_SITE := build/kernels
define test_kernels
	@if command -v $(CXX) >/dev/null; then \
		$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(KERNELS_SITE) \
			--config-settings build-dir=build/kernels-objects ./kernels && \
		PYTHONPATH=$(KERNELS_SITE) $(1)/bin/python -m pytest $(PARALLEL) -q tests/kernels $(2) $(OF_PART); \
	else \
		echo "No C++ compiler ($(CXX)): the kernels are not tested on this onnxruntime."; \
	fi
endef
# A path where there is such a compiler.
LIBASAN := $(shell $(CXX) -print-file-name=libasan.so 2>/dev/null)
KERNEL_SOURCES := $(shell find kernels -name build -prune -o -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.map' -o -name '*.py' -o -name CMakeLists.txt -o -name '*.cmake' -o -name pyproject.toml \) -print)

# The page that learns a handwriting and the npm package, in web/: npm installs its tools below web/node_modules.
NODE ?= node
PORT ?= 8000
HOST ?= 127.0.0.1
CHROMIUM ?= $(firstword $(wildcard /usr/bin/chromium /usr/bin/chromium-browser /usr/bin/google-chrome))
WEB_TOOLS := web/node_modules/.installed
WEB_MODEL := web/demo/dist/model/manifest.json
WEB_ADAPT_MODEL := web/adapt/dist/model/manifest.json
WEB_PHOTOS_MODEL := web/photos/dist/model/manifest.json
# Of a test the environment that has PyTorch, which makes the reference nets.
WEB_TEST := PYTHON=$(abspath $(TEST_VENV))/bin/python $(NODE) --test --test-timeout=900000

.PHONY: kernels test-all test-cuda test-levels test-flower test-gallery test-gallery-quick web web-page web-adapt web-adapt-page web-photos web-photos-page test-web test-web-node test-bundlers check-node check-chromium demo test docs test-oldest test-newest test-torch test-sanitized test-aarch64 kernels-aarch64 clean check-python

demo: $(DEMO_VENV)/.installed
	$(DEMO_VENV)/bin/onnxtrain demo --output demo-output

# The kernels for this processor alone, a third of the work, into the environment of $(PYTHON).
kernels: | check-python
	@echo "Compiling the native kernels for this processor only."
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --config-settings build-dir=build/kernels-native \
		--config-settings cmake.define.ONNXTRAIN_LEVELS=native ./kernels

# Files in which codespell looks for misspelled words; pyproject.toml has the words that it shall let pass.
SPELLED := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs notes examples src tests benchmarks kernels

# Every stage runs, whichever of them fail; the last lines say which, and what was left out. npm's packages come before
# pytest, whose tests of hosts run the npm package, too.
LEFT_OUT := build/left-out
ifneq ($(findstring /,$(LIBASAN)),)
SANITIZERS := stage sanitizers $(MAKE) test-sanitized LEVELS=baseline
else
SANITIZERS := echo "No C++ compiler with AddressSanitizer: the kernels are not tested under it."
endif
# Stages of `test-all` behind pytest; `make test-all FURTHER="levels flower"` runs two of them.
FURTHER_STAGES := sanitizers levels flower gallery
further_sanitizers := $(SANITIZERS)
further_levels := stage levels $(MAKE) test-levels
further_flower := stage flower $(MAKE) test-flower
further_gallery := stage gallery $(MAKE) test-gallery-quick
test: SELECTION := -m "not thorough" --left-out $(LEFT_OUT)
test: FURTHER :=
test-all: SELECTION = $(if $(PART),$(OF_PART) --left-out $(LEFT_OUT))
test-all: FURTHER := $(FURTHER_STAGES)
test test-all: $(TEST_VENV)/.installed
	@passed=; failed=; skipped=; \
	stage() { \
		name=$$1; shift; printf '\n== %s: %s\n' "$$name" "$$*"; began=$$(date +%s); \
		if "$$@"; then result=passed; passed="$$passed $$name"; else result=FAILED; failed="$$failed $$name"; fi; \
		echo "== $$name $$result after $$(($$(date +%s) - began)) s"; \
	}; \
	stage lint $(TEST_VENV)/bin/ruff check; \
	stage format $(TEST_VENV)/bin/ruff format --check; \
	stage types $(TEST_VENV)/bin/mypy; \
	stage imports $(TEST_VENV)/bin/lint-imports; \
	stage spelling $(TEST_VENV)/bin/codespell $(SPELLED); \
	web=; \
	if ! command -v $(NODE) >/dev/null; then web="No Node.js ($(NODE)): the npm package is not tested."; \
	elif ! $(MAKE) $(WEB_TOOLS); then web="npm's packages are not to be had: the npm package is not tested."; fi; \
	mkdir -p $(dir $(LEFT_OUT)); rm -f $(LEFT_OUT); \
	stage pytest $(TEST_VENV)/bin/python -m pytest $(PARALLEL) $(SELECTION); \
	$(foreach name,$(filter $(FURTHER),$(FURTHER_STAGES)),$(further_$(name)); ) \
	skipped="$(foreach name,$(filter-out $(FURTHER),$(FURTHER_STAGES)),$(name),)"; skipped="$${skipped:+ $${skipped%,}}"; \
	if [ -n "$$web" ]; then echo "$$web"; else stage web $(MAKE) test-web-node; fi; \
	command -v cmake >/dev/null && command -v $(CXX) >/dev/null || echo "No CMake or C++ compiler: the host in C++ is not tested."; \
	if [ -n '$(SELECTION)' ]; then \
		skipped="$$skipped$${skipped:+, and} $$(cat $(LEFT_OUT) 2>/dev/null || echo the) tests marked thorough"; \
	fi; \
	[ -z "$$skipped" ] || printf '\nNot run:%s. "make test-all" runs everything.\n' "$$skipped"; \
	printf '\nPassed:%s\n' "$${passed:- none}"; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi

web: web-page
	$(NODE) web/demo/serve.mjs $(PORT) $(HOST)

# Only the static page, web/demo/dist.
web-page: $(WEB_MODEL) $(WEB_TOOLS)
	$(NODE) web/demo/build.mjs

# The page on which a language model learns a text.
web-adapt: web-adapt-page
	$(NODE) web/adapt/serve.mjs $(PORT) $(HOST)

web-adapt-page: $(WEB_ADAPT_MODEL) $(WEB_TOOLS)
	$(NODE) web/adapt/build.mjs

# The page on which photos and the camera teach a model. It has a port of its own: the page of `make web`, which browsers keep for
# visits without a network, would come in its place.
web-photos: PORT = 8001
web-photos: web-photos-page
	$(NODE) web/photos/serve.mjs $(PORT) $(HOST)

web-photos-page: $(WEB_PHOTOS_MODEL) $(WEB_TOOLS)
	$(NODE) web/photos/build.mjs

# The package against onnxruntime-node, and against onnxruntime-web in Node; its types and its size.
test-web-node: $(TEST_VENV)/.installed $(WEB_TOOLS)
	cd web && npm run format && npm run build && npm run types && npm run size
	rm -rf build/web-reference
	$(WEB_TEST) web/test/*.test.mjs

# The same in Chromium, and the pages: in Chromium, and in Firefox and WebKit where they are installed.
# BROWSER=Firefox tests that one alone where there are several.
test-web: test-web-node web-page web-adapt-page web-photos-page | check-chromium
	CHROMIUM=$(CHROMIUM) ONNXTRAIN_WEB_BROWSER=$(BROWSER) $(WEB_TEST) --test-concurrency=1 \
		web/demo/test/*.test.mjs web/adapt/test/*.test.mjs web/photos/test/*.test.mjs
	@$(NODE) web/demo/test/browsers.mjs

# The projects on the page about bundlers, built and served as their users do: npm installs Vite, webpack, esbuild and Next.js.
# BUNDLER=vite tests one of them.
test-bundlers: $(TEST_VENV)/.installed $(WEB_TOOLS) | check-chromium
	cd web && npm run build
	CHROMIUM=$(CHROMIUM) ONNXTRAIN_BUNDLER=$(BUNDLER) $(WEB_TEST) --test-concurrency=1 web/bundlers/test/*.test.mjs

$(WEB_TOOLS): web/package.json web/package-lock.json | check-node
	cd web && npm ci --ignore-scripts --no-audit --no-fund
	touch $@

# By the demo's environment, or the tests' where that is already there: both have onnx and scikit-learn.
WEB_VENV := $(if $(wildcard $(TEST_VENV)/.installed),$(TEST_VENV),$(DEMO_VENV))
$(WEB_MODEL): $(wildcard web/demo/model/*.py) | $(WEB_VENV)/.installed
	$(WEB_VENV)/bin/python web/demo/model/make.py $(@D)

$(WEB_ADAPT_MODEL): web/adapt/model/make.py | $(WEB_VENV)/.installed
	$(WEB_VENV)/bin/python web/adapt/model/make.py $(@D)

$(WEB_PHOTOS_MODEL): $(wildcard web/photos/model/*.py) | $(WEB_VENV)/.installed
	$(WEB_VENV)/bin/python web/photos/model/make.py $(@D)

check-node:
	@$(NODE) -e 'if (parseInt(process.versions.node) < 20) { console.error("onnxtrain-web needs Node.js 20 or newer; this is " + process.version); process.exit(1) }' && npm --version >/dev/null || \
		{ echo "The page and the npm package need Node.js 20 or newer, with npm. On Debian: apt-get install nodejs npm"; exit 1; }

check-chromium:
	@test -n "$(CHROMIUM)" || { echo "The tests of the page need Chromium. On Debian: apt-get install chromium. Elsewhere: make test-web CHROMIUM=path"; exit 1; }

test-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest $(PARALLEL) $(VERSIONED)
	PYTHONPATH=$(ORTMODULE_SITE) $(OLDEST_VENV)/bin/python -m pytest $(PARALLEL) $(ORTMODULE)
	$(call test_kernels,$(OLDEST_VENV))

test-newest: $(NEWEST_VENV)/.installed
	$(NEWEST_VENV)/bin/python -m pytest $(PARALLEL) $(VERSIONED) $(ORTMODULE)
	$(call test_kernels,$(NEWEST_VENV))

test-torch: | check-python
	for version in $(TORCHES); do \
		$(PYTHON) -m venv --clear $(TORCH_VENV)-$$version && \
		$(TORCH_VENV)-$$version/bin/python -m pip install --quiet --disable-pip-version-check torch==$$version && \
		$(TORCH_VENV)-$$version/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' $(TESTING) && \
		$(TORCH_VENV)-$$version/bin/python -m pytest $(PARALLEL) $(TORCH_TESTS) || exit 1; \
	done

# On a GPU: $(PYTHON) has onnxruntime-gpu, a PyTorch for the same CUDA, and onnxtrain. CUDA's tests have no other chance.
test-cuda:
	ONNXTRAIN_TEST_DEVICE=cuda $(PYTHON) -m pytest tests/cuda tests/autodiff/test_rules.py tests/ortmodule/test_aten_lowerings.py \
		tests/ortmodule/test_models.py

# Fails on any warning: a dead link, a page outside the navigation, a public name without an entry in the reference.
docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/mkdocs build --strict --clean --site-dir $(SITE)

# The native kernels of every level of this processor: what `make test` leaves out, as its kernels have the best level alone.
test-levels: $(TEST_VENV)/.installed
	$(call test_kernels,$(TEST_VENV),-k "level or baseline or avx")

# Flower pins versions of packages that the other tests have newer ones of. Its newest click warns of what typer 0.20 does.
test-flower: $(FLOWER_VENV)/.installed
	$(FLOWER_VENV)/bin/python -m pytest -q -W ignore::DeprecationWarning tests/integrations

# The programs of examples/gallery, in an environment with the packages whose models they train. `test-all` runs the two
# quickest of them, for one seed, in the environment of the tests.
QUICK_GALLERY := not text_lines and not sentence_embeddings and not text_classifier
test-gallery: $(GALLERY_VENV)/.installed
	ONNXTRAIN_GALLERY_SEEDS=3 $(GALLERY_VENV)/bin/python -m pytest -q tests/test_gallery.py

test-gallery-quick: $(TEST_VENV)/.installed
	ONNXTRAIN_GALLERY_SEEDS=1 $(TEST_VENV)/bin/python -m pytest -q tests/test_gallery.py -k "$(QUICK_GALLERY)"

# The kernels under AddressSanitizer and UBSan, which stop at the first finding. `test-all` does it for the level that every
# processor has: to compile all of them takes five minutes.
SANITIZED := build/sanitized
LEVELS ?= all
test-sanitized: $(TEST_VENV)/.installed
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(SANITIZED) \
		--config-settings build-dir=build/sanitized-$(LEVELS) --config-settings cmake.define.ONNXTRAIN_SANITIZE=ON \
		--config-settings cmake.define.ONNXTRAIN_LEVELS=$(LEVELS) ./kernels
	PYTHONPATH=$(SANITIZED) LD_PRELOAD="$(LIBASAN) $$($(CXX) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
		$(TEST_VENV)/bin/python -m pytest $(PARALLEL) -q tests/kernels $(OF_PART)

# The kernels for aarch64, cross-compiled on Debian, and their tests, emulated; below build/aarch64/.
kernels-aarch64:
	tests/aarch64/run.sh build

test-aarch64: | check-python
	PYTHON=$(PYTHON) tests/aarch64/run.sh test -q tests/kernels

$(FLOWER_VENV)/.installed: pyproject.toml hatch_build.py | check-python
	$(PYTHON) -m venv --clear $(FLOWER_VENV)
	$(FLOWER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[build,flower]' pytest scikit-learn
	touch $@

$(GALLERY_VENV)/.installed: pyproject.toml hatch_build.py examples/gallery/requirements.txt | check-python
	$(PYTHON) -m venv --clear $(GALLERY_VENV)
	$(GALLERY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r examples/gallery/requirements.txt
	$(GALLERY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' "pytest>=9"
	touch $@

$(OLDEST_VENV)/.installed: pyproject.toml hatch_build.py tests/oldest.txt tests/oldest-ortmodule.txt | check-python
	$(PYTHON) -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) -c tests/oldest.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch,demo,data,plots,tensorboard]' $(TESTING) -c tests/oldest.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(ORTMODULE_SITE) -r tests/oldest-ortmodule.txt
	touch $@

# No lower bound on any of them, and none of the pins of [dev].
$(NEWEST_VENV)/.installed: pyproject.toml hatch_build.py | check-python
	$(PYTHON) -m venv --clear $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[build,demo,data,plots,tensorboard]' $(TESTING)
	touch $@

# Without native kernels: to compile them takes minutes, and the demo trains for seconds.
$(DEMO_VENV)/.installed: pyproject.toml hatch_build.py | check-python
	@echo "Making the environment $(DEMO_VENV) (once): pip installs onnxruntime, onnx, scikit-learn, matplotlib."
	$(PYTHON) -m venv --clear $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	touch $@

$(DOCS_VENV)/.installed: pyproject.toml hatch_build.py | check-python
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

$(TEST_VENV)/.installed: pyproject.toml hatch_build.py $(KERNEL_SOURCES) | check-python
	$(PYTHON) -m venv --clear $(TEST_VENV)
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(TEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(call install_kernels,$(TEST_VENV))
	touch $@

check-python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "onnxtrain needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'

clean:
	rm -rf $(DEMO_VENV) $(TEST_VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(FLOWER_VENV) $(GALLERY_VENV) $(DOCS_VENV) $(TORCH_VENV)-* demo-output build dist web/node_modules web/dist web/demo/dist web/adapt/dist web/photos/dist web/bundlers/*/node_modules
