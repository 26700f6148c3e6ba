# Every target sets up .venv when it must, and costs nothing when it need not. `make help` lists them.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/ready
LOG := $(VENV)/setup.log
# Makes torchvision, and with it timm and transformers, importable beside a CPU build of torch.
MEND := tools/mend_torchvision.py
# What the sanitized build is run through; compiling torch graphs under a sanitizer takes forever and shows nothing.
SANITIZED := tests/kernels tests/backends/test_agreement.py tests/backends/test_gradients.py \
	-m "not slow" -k "not compile and not export and not graph and (kernels or native)"

# Pyright otherwise asks the network whether a newer version exists.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Tests start many processes; without bytecode each of them compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

# One shell per recipe, so that a failing setup can show its log.
.ONESHELL:
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check slow docs browser bench sanitize clean

help:           ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(READY)  ## train, convert, check, price, and leave runs/demo/report.html to look at (DEMO=--fresh: anew)
	@$(RUN) examples/demo.py $(DEMO)

test: check     ## check, then every test that is not slow
	@echo "pytest (not slow)"
	# A process for each core, of one thread each; the blocks of a document belong together. Files in the order of
	# conftest.py, which has the longest first, so that no core is left alone with a long one at the end.
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m "not slow" -n auto --maxprocesses=4 --dist loadfile --no-loadscope-reorder

check: $(READY) ## format, lint and types
	@echo "ruff format, ruff check, pyright"
	$(RUN) -m ruff format --quiet --check . || { echo "to repair: $(RUN) -m ruff format ."; exit 1; }
	$(RUN) -m ruff check --quiet .
	$(RUN) -m pyright

slow: $(READY)  ## the slow tests (SLOW: more words for pytest)
	@echo "pytest (slow)"
	# 5 is pytest's word for "no test is marked slow", which is no failure
	OMP_NUM_THREADS=1 $(RUN) -m pytest -q -m slow -n auto --maxprocesses=4 --dist worksteal $(SLOW) || [ $$? -eq 5 ]

docs: $(READY)  ## the documentation as a static site in build/site/html, with the book after its run; needs no server and no network
	@OMP_NUM_THREADS=1 $(RUN) tools/site/build.py

browser:        ## a browser for the tests of pages, by the system's package manager, if there is none
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then exit 0; fi
	[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "no browser: install Chromium, for example: \
	sudo apt-get install chromium"; exit 1; }
	export DEBIAN_FRONTEND=noninteractive
	apt-get -q -o Acquire::http::Timeout=20 update >/dev/null && apt-get -qy install --no-install-recommends chromium fonts-dejavu-core >/dev/null

bench: $(READY) ## ours and peers side by side
	@$(RUN) -m benchmarks.attention
	$(RUN) -m benchmarks.window
	$(RUN) -m benchmarks.models
	$(RUN) -m benchmarks.positional
	$(RUN) -m benchmarks.training
	$(RUN) -m benchmarks.distributed
	$(RUN) -m benchmarks.integrations
	$(RUN) -m benchmarks.lab

sanitize: $(READY) ## the tests of the kernels, on a build that watches every address and every overflow
	@mkdir -p build
	cmake -S . -B build/sanitize -DREGARD_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug >build/sanitize.log
	cmake --build build/sanitize -j2 >>build/sanitize.log
	echo "pytest (kernels, sanitized)"
	# Python itself leaks on purpose, so leaks are not looked for. Without libstdc++ beside it the sanitizer does not
	# know how exceptions are thrown.
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	REGARD_NATIVE_LIBRARY=build/sanitize/libregard_native.so \
	$(RUN) -m pytest -q -x -p no:cacheprovider --capture=sys $(SANITIZED)

clean:          ## remove .venv, builds and caches
	@rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is younger than everything that shapes the installation. Python files are not listed:
# the installation is editable, they are read where they are.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(MEND) $(wildcard csrc/*)
	@[ -x $(RUN) ] || $(PYTHON) -m venv $(VENV)
	echo "setting up $(VENV) (the first time downloads PyTorch; progress in $(LOG))"
	# The variables carry the pins into pip's separate build environment; old pips read the first, new ones the second.
	export PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1
	install() { $(RUN) -m pip install -v -c constraints.txt -e ".[test,dev,bench,browser,docs$${1:-}]" >$(LOG) 2>&1; }
	# The twins are other people's models to compare with; where they cannot be had, their tests skip and say so.
	install ,twins || { echo "without transformers and timm: $$(grep -m1 ERROR $(LOG) || true)"; install; } \
	|| { tail -n 30 $(LOG); exit 1; }
	# pip hides what the build says; this line tells whether the native backend was built, and if not why
	sed -n 's/.*-- regard: /regard: /p' $(LOG) | sort -u
	$(RUN) $(MEND) | tee -a $(LOG)
	# Real weights, for tests and examples; what cannot be had is said in one line and skipped.
	$(RUN) -m regard.downloads | tee -a $(LOG) || true
	touch $@
