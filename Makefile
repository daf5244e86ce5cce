# Two commands are all a user needs: `make demo` and `make test`. Everything is done by nox (noxfile.py), which is put
# into .venv first; this needs Python 3.11 or newer with pip, and nothing else. `make test ARGS="-k grouped"` hands ARGS on.
PYTHON ?= python3
NOX := .venv/bin/nox
PASS = $(if $(ARGS),-- $(ARGS))

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint fix types imports docs site pages wheels conformance cpu nvidia amd xpu tpu aot bench check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(NOX) ## run the main job on this machine and show its report
	$(NOX) -s demo $(PASS)

test: $(NOX) ## run the tests of every package
	$(NOX) $(NOXFLAGS) -s tests $(PASS)

quick: $(NOX) ## run the tests of packages with files that aren't committed yet
	$(NOX) $(NOXFLAGS) -s quick $(PASS)

lint: $(NOX) ## check style and format
	$(NOX) -s lint

fix: $(NOX) ## mend style and format where ruff can
	$(NOX) -s lint -- --fix

types: $(NOX) ## check types
	$(NOX) -s types

imports: $(NOX) ## check who imports whom
	$(NOX) -s imports

docs: $(NOX) ## run README code and examples, check links and changelogs
	$(NOX) -s docs

site: $(NOX) ## build the documentation as a site with an API reference
	$(NOX) -s site $(PASS)

pages: $(NOX) ## look at README, site and report in Chromium, with screenshots
	$(NOX) -s pages

wheels: $(NOX) ## build the packages and try them where only they are installed
	$(NOX) -s wheels

conformance: $(NOX) ## hold the references and the kernels in plain PyTorch to the suite
	$(NOX) -s conformance $(PASS)

cpu: $(NOX) ## prove of the CPU's kernels what this machine can
	$(NOX) -s cpu $(PASS)

nvidia: $(NOX) ## prove of the NVIDIA kernels what this machine can
	$(NOX) -s nvidia $(PASS)

amd: $(NOX) ## compile the kernels for AMD GPUs and check what they must be
	$(NOX) -s amd $(PASS)

xpu: $(NOX) ## compile the kernels for Intel GPUs and check what they must be
	$(NOX) -s xpu $(PASS)

tpu: $(NOX) ## compile the kernels for TPUs, interpret them, and run them through torch-xla on a CPU
	$(NOX) -s tpu $(PASS)

aot: $(NOX) ## test the kit that compiles for chips that aren't here
	$(NOX) -s aot $(PASS)

bench: $(NOX) ## measure this machine
	$(NOX) -s bench $(PASS)

check: ## everything that must hold before a change lands
	.ci/run

clean: ## remove environments, caches and built files
	rm -rf .venv .nox .cache dist reports .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find packages tools examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Where Python has no ensurepip (Debian without python3-venv), the pip that is there installs from outside.
$(NOX): PINNED_NOX = install --quiet -c constraints/cpu.txt nox
$(NOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "KPT needs Python 3.11 or newer: make PYTHON=...")'
	@echo "Making .venv with nox"
	@if $(PYTHON) -m venv --clear .venv >/dev/null 2>&1; then .venv/bin/python -m pip $(PINNED_NOX); \
	else $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python .venv/bin/python $(PINNED_NOX); fi
