# Two commands do all the set-up: `make speedrun` and `make test`. Each builds .venv where there is none.

PYTHON ?= python3
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv
unexport CONDA_PREFIX
export PIP_QUIET := 1
# Python compiles what it imports, once, and pip need not compile all the rest.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
RUST := Cargo.toml Cargo.lock $(shell find rust -name fuzz -prune -o -name '*.rs' -print -o -name Cargo.toml -print)

speedrun: .venv/built
	$(BIN)/python scripts/speedrun.py $(ARGS)

# On any supported Python, JAX and Rust; opinions about the source are another command's, `make check`.
test: .venv/dev
	cargo test --quiet --release --workspace
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Format, lints and types, by these versions of the tools; mypy sees .venv's packages. Clippy comes with Rust: with
# another version than this its findings are warnings.
MYPY := 2.4.1
RUFF := 0.17.6
CLIPPY := 0.1.95
check: .venv/check/installed
	.venv/check/bin/ruff format --check .
	.venv/check/bin/ruff check .
	PYTHONPATH=.venv/check $(BIN)/python -m mypy
	PYTHONPATH=.venv/check $(BIN)/python -m mypy.stubtest jspeed._dataloader
	cargo fmt --all --check
	case "$$(cargo clippy --version)" in 'clippy $(CLIPPY) '*) deny='-D warnings';; *) deny=;; esac; \
	  cargo clippy --quiet --release --workspace --all-targets -- $$deny
	for tool in audit 'deny check advisories sources'; do if cargo $${tool%% *} --version >/dev/null 2>&1; \
	  then cargo $$tool || exit; else echo "cargo $${tool%% *} is not installed: it looked up no advisory"; fi; done

# Each crate that Cargo.toml names at the oldest version that it allows.
test-oldest-crates:
	rm -rf target/oldest && mkdir -p target/oldest
	git ls-files -z Cargo.toml Cargo.lock rust | tar --null --files-from - --create --file - | \
	  tar --extract --file - --directory target/oldest
	cd target/oldest && RUSTC_BOOTSTRAP=1 cargo update --quiet -Z direct-minimal-versions && cargo test --quiet --workspace

# The interpreter that finds undefined behaviour, on what it can finish: no files, few random cases.
test-miri:
	@if cargo +nightly miri --version >/dev/null 2>&1; then PROPTEST_CASES=4 MIRIFLAGS=-Zmiri-disable-isolation \
	  cargo +nightly miri test --lib -p jspeed-context-index -p jspeed-dataloader-core; \
	  else echo 'skipped: there is no Miri; rustup +nightly component add miri'; fi

# ARGS='-m slow' compiles records 62 and 89 too: many minutes.
test-aot: .venv/aot/installed
	PYTHONPATH=.venv/aot JSPEED_TEST_AOT=1 $(BIN)/python -m pytest tests/aot --numprocesses 2 --dist loadfile $(ARGS)

# The real cuDNN, asked without a GPU what it does with attention (1.7 GB to download, once): `jspeed plan` asks it too
# where it is. Its compiler of kernels is CUDA's own, NVRTC.
test-cudnn: .venv/cudnn/installed
	JSPEED_TEST_CUDNN=1 $(BIN)/python -m pytest tests/plan/test_cudnn.py

# Recipes against the records' own source, executed on the CPU by PyTorch (4 GB to download, once), which has a folder of
# its own; MODDED is a clone of modded-nanogpt with its history.
test-parity: .venv/parity/installed
	PYTHONPATH=.venv/parity MODDED='$(MODDED)' JSPEED_TEST_PARITY=1 $(BIN)/python -m pytest -rs tests/parity $(ARGS)

# The leaderboard's page in a headless Chromium, where there is one; axe-core from the package axe-playwright-python.
test-page: .venv/page/installed
	JSPEED_TEST_PAGE=1 JSPEED_AXE=.venv/page $(BIN)/python -m pytest -rs tests/board/test_page_in_chromium.py

# All recipes and meshes; the default tests run a selection. JSPEED_TEST_PART=0/3 has a third of the files.
test-slow: .venv/dev
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m slow

# Workers killed, stopped and starved; data and disks that fail. Real processes, minutes. They wait by the clock, so on a
# machine that stalls one can fail for nothing: those that failed run once more, and fail if they do again.
test-faults: .venv/dev
	JSPEED_TEST_FAULTS=1 $(BIN)/python -m pytest -o cache_dir=.pytest_cache/faults tests/faults || \
	  JSPEED_TEST_FAULTS=1 $(BIN)/python -m pytest -o cache_dir=.pytest_cache/faults --last-failed tests/faults

# The lines of docs/launch.md with every launcher that is installed here.
test-launchers: .venv/dev
	JSPEED_TEST_LAUNCHERS=1 $(BIN)/python -m pytest -rs tests/launchers

# The wheel, installed with its dependencies alone and used outside the repository; the workflow that builds it for other
# platforms, against GitHub's schema.
test-package: .venv/lint/installed
	JSPEED_TEST_PACKAGE=1 $(BIN)/python -m pytest -rs tests/test_package.py
	PYTHONPATH=.venv/lint $(BIN)/python -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

# The source distribution and the wheel, as a release has them: versions, metadata, licences, sizes; trained with on each of
# PYTHONS (python3.11 python3.14).
release-check: .venv/release/installed
	tests/release_check.sh

# The newest Python and JAX, and the oldest Rust: README's two commands and the compiler's tests, in a fresh clone of
# HEAD on a new Debian. Needs root on a Debian machine; SUITE=forky is the release after Debian 13. JSPEED_TEST_PART=0/3
# is a third of both suites' files.
test-newest:
	tests/fresh_machine.sh bash -c 'make speedrun && export JSPEED_TEST_PART=$(JSPEED_TEST_PART) && make test && make test-aot'

# Micro-benchmarks of pure functions by pytest-benchmark. ARGS=--benchmark-autosave keeps the timings; then
# ARGS=--benchmark-compare shows them beside the next ones.
bench: .venv/dev
	$(BIN)/python -m pytest tests/microbenchmarks --benchmark-enable $(ARGS)

page: .venv/built
	$(BIN)/python scripts/leaderboard.py page

# README, docs/, lab/, benchmarks/ and the API as a site; a dead link fails. Built from a copy of the tracked files, see mkdocs.yml.
docs: .venv/docs/installed
	rm -rf .venv/docs/source && mkdir .venv/docs/source
	git ls-files -z | tar --null --files-from - --create --file - | tar --extract --file - --directory .venv/docs/source
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=.venv/docs/packages $(BIN)/python -m mkdocs --quiet build --strict
	@echo 'the site: .venv/docs/site/index.html'

# The track webtext/cpu: a sampled training softmax against all of it, A B B A, three rounds; half an hour of two quiet
# cores, and the same command resumes after an interruption. WEBTEXT is the folder of the text that the track pins.
race-webtext: .venv/built
	test -e runs/webtext/manifest.json || $(BIN)/python scripts/prepare.py text '$(WEBTEXT)/webtext_train_00.jsonl.xz' \
	  --val-input '$(WEBTEXT)/webtext_val.jsonl.xz' --out runs/webtext
	$(BIN)/python scripts/leaderboard.py race records/ideas/fineweb_cpu_full.py fineweb-cpu --rounds 3 \
	  --run-dir runs/race-webtext --flags="--data runs/webtext --no-progress --no-sample"

clean:
	rm -rf .venv target .pytest_cache .mypy_cache .ruff_cache .hypothesis python/jspeed/*.so

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: jspeed needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1); run make PYTHON=python3.12"; exit 2; }
	@command -v cargo >/dev/null || \
	  { echo "error: jspeed needs a Rust toolchain (cargo 1.85 or newer), found none; install one with rustup"; exit 2; }
	$(PYTHON) -m venv .venv

# What pyproject.toml calls extras: EXTRAS=cuda12,log, or EXTRAS= for JAX on the CPU, or else what this machine's GPUs or
# TPUs need. The file changes when that does, as when a GPU comes later, and is followed by a new build.
.venv/extras: .venv/bin/python FORCE
	@found=$(if $(filter undefined,$(origin EXTRAS)),"$$(PYTHONPATH=python $(BIN)/python -m jspeed.base.accelerators)" || exit; \
	  ,'$(or $(EXTRAS),cpu) EXTRAS=$(EXTRAS)';) test "$$found" = "$$(cat $@ 2>/dev/null)" || echo "$$found" > $@
FORCE:

.venv/built: .venv/bin/python .venv/extras pyproject.toml $(RUST)
	@echo 'installing packages and building the Rust extension: a few minutes, once'
	@read extras why < .venv/extras; echo "JAX and extras: $$extras ($$why); EXTRAS=NAME,NAME or EXTRAS= override"
	$(BIN)/python -m pip install 'maturin>=1.9.4,<2'
	@extras=$$(sed 's/ .*//; s/^cpu$$//' .venv/extras)$(DEV); extras=$${extras#,}; \
	  $(BIN)/maturin develop --release --quiet $${extras:+--extras "$$extras"}
	@echo '$(DEV)' > $@

.venv/dev: DEV := ,dev
.venv/dev: .venv/built
	grep -q dev .venv/built || $(BIN)/maturin develop --release --quiet --extras dev
	@touch $@

# JAX's CUDA compiler, ptxas and libdevice: all it takes to compile for an absent GPU. CUDA's libraries are
# looked up when a program runs, so they stay away (--no-deps); and in a folder of its own nothing else sees a plugin.
.venv/aot/installed: pyproject.toml | .venv/dev
	rm -rf .venv/aot
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	$(BIN)/python -m pip install --no-deps --target .venv/aot \
	  jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version 'nvidia-cuda-nvcc-cu12>=12.9,<13'
	@touch $@

.venv/cudnn/installed: | .venv/dev
	rm -rf .venv/cudnn
	$(BIN)/python -m pip install --no-deps --target .venv/cudnn \
	  'nvidia-cudnn-cu13>=9.19,<10' 'nvidia-cudnn-frontend>=1.16' 'nvidia-cublas<14' 'nvidia-cuda-nvrtc<14'
	@touch $@

.venv/parity/installed: tests/parity/requirements.txt | .venv/dev
	rm -rf .venv/parity
	$(BIN)/python -m pip install --no-deps --target .venv/parity --requirement tests/parity/requirements.txt
	@touch $@

.venv/docs/installed: | .venv/built
	rm -rf .venv/docs
	$(BIN)/python -m pip install --target .venv/docs/packages 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27,<2'
	@touch $@

.venv/page/installed: | .venv/dev
	rm -rf .venv/page
	$(BIN)/python -m pip install --no-deps --target .venv/page \
	  'axe-playwright-python>=0.1.4' && touch $@ || echo 'axe-core cannot be had: its tests will be skipped'

.venv/check/installed: Makefile | .venv/dev
	rm -rf .venv/check
	$(BIN)/python -m pip install --target .venv/check mypy==$(MYPY) ruff==$(RUFF)
	@touch $@

.venv/lint/installed: | .venv/dev
	rm -rf .venv/lint
	$(BIN)/python -m pip install --target .venv/lint 'check-jsonschema>=0.33'
	@touch $@

.venv/release/installed: | .venv/dev
	rm -rf .venv/release
	$(BIN)/python -m pip install --target .venv/release 'twine>=6'
	@touch $@

.PHONY: speedrun test test-slow test-aot test-cudnn test-parity test-page test-faults test-launchers test-package test-newest test-oldest-crates test-miri release-check bench page docs \
  race-webtext check clean
