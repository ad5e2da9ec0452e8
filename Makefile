# Every command of the workspace; `make` alone lists them. Unchanged inputs are not built again: see .work/stamps.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Byte-code is wanted: without it every import of vLLM costs ten seconds more.
unexport PYTHONDONTWRITEBYTECODE
unexport VIRTUAL_ENV

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_PREVIOUS_VENV := .venv-vllm-previous
INFINISTORE_VENV := .venv-infinistore
SGLANG_VENV := .venv-sglang
SGLANG_OLD_VENV := .venv-sglang-old
MOONCAKE_VENV := .venv-mooncake
UCM_VENV := .venv-ucm

# The real S3 server of the tests, built by a Go of its own.
S3_SERVER := .work/s3/versitygw
WITH_S3 := KVDEPOT_TEST_S3=$(CURDIR)/$(S3_SERVER)

STAMPS := .work/stamps
WHEELS := .work/wheels
# Cargo's profile of the wheel. CI builds it as it builds the tests, with the checks of debug builds: what both need is
# built once.
WHEEL_PROFILE ?= release
STEP := tools/step
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY := .work/tools/bin/cargo-deny
ARGS ?=

RUST_INPUTS := Cargo.toml Cargo.lock $(shell find crates -name '*.rs' -o -name Cargo.toml)
PYTHON_INPUTS := pyproject.toml README.md $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)

##@ Use

.PHONY: help
help: ## List the commands
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@/ { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMPS)/installed ## Make .venv, build the wheel and install it

.PHONY: wheel
wheel: $(STAMPS)/wheel-$(WHEEL_PROFILE) ## Build the wheel into dist/
	@mkdir -p dist && cp $(WHEELS)/*.whl dist/ && ls dist/*.whl

.PHONY: portable-wheels
portable-wheels: $(STAMPS)/zig ## Build wheels for x86_64 and aarch64 that need glibc 2.28 only, into dist/portable (ARGS: --processor NAME)
	@$(BIN)/python -m tools.portable_wheel --zig .work/zig $(ARGS)

.PHONY: demo
demo: vllm-env ## Serve a model by real vLLM: cold, warm, and after kill -9
	@$(VLLM_VENV)/bin/python -m tools.demo $(ARGS)

.PHONY: demo-sglang
demo-sglang: sglang-env ## Serve a model by real SGLang: cold, warm, and after kill -9
	@$(SGLANG_VENV)/bin/python -m tools.sglang.demo $(ARGS)

.PHONY: example
example: setup ## Use the depot as a library, through memory and disk
	@$(BIN)/python examples/library.py $(ARGS)

.PHONY: bench
bench: setup ## Measure the store against this machine's memory and disk
	@$(BIN)/kvdepot bench store $(ARGS)

.PHONY: bench-engine
bench-engine: vllm-env ## Measure real vLLM with kvdepot, without, and with its own offloading
	@$(VLLM_VENV)/bin/python -m benches.engine $(ARGS)

.PHONY: bench-overhead
bench-overhead: vllm-env ## Measure what kvdepot costs a prompt of which it finds nothing
	@$(VLLM_VENV)/bin/python -m benches.engine.overhead $(ARGS)

.PHONY: bench-handover
bench-handover: vllm-env ## Measure a vLLM that takes the KV of another one from a pool server
	@$(VLLM_VENV)/bin/python -m benches.engine.handover $(ARGS)

.PHONY: bench-thrash
bench-thrash: vllm-env ## Send concurrent hits that exceed the pool
	@$(VLLM_VENV)/bin/python -m benches.engine.thrash $(ARGS)

.PHONY: bench-concurrency
bench-concurrency: vllm-env ## Measure concurrent requests whose prompts are all known
	@$(VLLM_VENV)/bin/python -m benches.engine.concurrency $(ARGS)

.PHONY: bench-waiting
bench-waiting: vllm-env ## Measure the scheduler's steps while a thousand requests wait
	@$(VLLM_VENV)/bin/python -m benches.engine.waiting $(ARGS)

.PHONY: bench-sglang
bench-sglang: sglang-env ## Measure hits of real SGLang in kvdepot, on its device, in its host memory and in its files
	@$(SGLANG_VENV)/bin/python -m benches.sglang $(ARGS)

.PHONY: bench-lmcache
bench-lmcache: vllm-env infinistore-env ## Measure kvdepot and LMCache's own second levels, under its server with real vLLM and alone
	@$(INFINISTORE_VENV)/bin/python -m benches.lmcache $(ARGS)

.PHONY: bench-bucket
bench-bucket: setup $(S3_SERVER) ## Measure packs of small blocks in a bucket, beside one object per block
	@$(WITH_S3) $(BIN)/python -m benches.bucket $(ARGS)

.PHONY: bench-wire-faults
bench-wire-faults: infinistore-env standin-verbs ## Send malformed traffic to our network listener and to InfiniStore's
	@$(WITH_STANDIN) $(INFINISTORE_VENV)/bin/python -m benches.wire.faults $(ARGS)

.PHONY: bench-wire
bench-wire: infinistore-env standin-verbs ## Measure the network listener beside InfiniStore's server
	@$(WITH_STANDIN) $(INFINISTORE_VENV)/bin/python -m benches.wire.throughput $(ARGS)

.PHONY: bench-peers
bench-peers: vllm-env infinistore-env mooncake-env ucm-env ## Measure kvdepot beside UCM, LMCache's DAX backend, fio and Mooncake
	@$(BIN)/python -m benches.peers $(ARGS)

.PHONY: bench-nfs
bench-nfs: setup ## Measure block files beside fio and UCM on an NFS mount in a virtual machine (ARGS: of bench-peers)
	@tools/vm/nfs_rates.sh $(ARGS)

# InfiniStore's server does not start without an RDMA device, over TCP neither.
STANDIN_VERBS := .work/standin/libibverbs.so.1
WITH_STANDIN := KVDEPOT_STANDIN_VERBS=$(CURDIR)/$(STANDIN_VERBS)

# Mooncake's package is linked with libibverbs, over TCP too.
WITH_MOONCAKE := KVDEPOT_TEST_MOONCAKE=$(CURDIR)/$(MOONCAKE_VENV) \
	LD_LIBRARY_PATH=$(CURDIR)/$(MOONCAKE_VENV)/lib-verbs$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}

# What drives a browser, in a folder of its own; the browser and Prometheus are the system's.
WITH_PLAYWRIGHT := PYTHONPATH=$(CURDIR)/.work/playwright

# A process finds its driver under this name.
STANDIN_CUDA := .work/standin/cuda/libcuda.so.1

# Built when their sources change, and copied to names of their own: the build of the Rust tests links libraries of the
# same names anew. Replaced as a whole, because processes may have them mapped. Beside a wheel that is built as the tests
# are, with the same features: another choice of packages would build the dependencies once more.
AS_TESTED := -p kvdepot-python --features kvdepot-python/as-tested
define standin
$(2): $$(RUST_INPUTS)
	@$$(STEP) "build the stand-in for $(1)" cargo build --quiet --locked --lib -p kvdepot-standin-$(1) \
		$$(if $$(filter dev,$$(WHEEL_PROFILE)),$$(AS_TESTED))
	@mkdir -p $$(@D)
	@cp $$(or $$(CARGO_TARGET_DIR),target)/debug/libkvdepot_standin_$(1).so $$@.$$$$$$$$ && mv $$@.$$$$$$$$ $$@
endef
$(eval $(call standin,verbs,$(STANDIN_VERBS)))
$(eval $(call standin,cuda,$(STANDIN_CUDA)))

.PHONY: standins
standins: standin-cuda standin-verbs ## Build the stand-ins for the CUDA driver and libibverbs, for tests

.PHONY: standin-cuda
standin-cuda: $(STANDIN_CUDA)

.PHONY: standin-verbs
standin-verbs: $(STANDIN_VERBS)

.PHONY: screenshots
screenshots: setup watchers ## Make the pictures of status page and dashboard anew (ARGS: --out DIR, --seconds N)
	@$(WITH_PLAYWRIGHT) $(BIN)/python -m tools.monitoring.screenshots $(ARGS)

.PHONY: site
site: setup ## Build the documentation as a site (ARGS: --out DIR)
	@$(STEP) "documentation site" $(BIN)/python -m tools.site $(ARGS)

##@ Check

.PHONY: test
test: test-rust test-python test-device test-rdma test-dax test-slab test-nfs-short test-layouts test-engine test-wire test-lmcache test-sglang test-mooncake test-s3 test-monitoring test-docs ## Run the tests (all of test-nfs and the long matrices are in test-full)

.PHONY: test-rust
test-rust: ## Test the Rust crates, several test programs at a time (ARGS: for cargo test, which runs them in turn)
	@$(STEP) "build the tests" cargo test --workspace --quiet --no-run
	@# Tests sync small files, which would wait for all that the build has written.
	@sync
	@$(if $(ARGS),cargo test --workspace --quiet --no-fail-fast $(ARGS),$(PYTHON) -m tools.rust_tests)

.PHONY: test-rdma
test-rdma: ## Test RDMA on a software device in a virtual machine
	@tools/vm/rdma.sh $(ARGS)

.PHONY: test-dax
test-dax: setup ## Test the Dax tier on a DAX device in a virtual machine, restarted and killed
	@tools/vm/dax.sh

.PHONY: test-slab
test-slab: setup ## Test the Slab tier on NVMe disks in a virtual machine, restarted, killed and without power
	@tools/vm/slab.sh

.PHONY: test-nfs
test-nfs: setup ## Test block files on NFS mounts of two nodes in a virtual machine (ARGS: --short or --long)
	@tools/vm/nfs.sh $(ARGS)

.PHONY: test-nfs-short
test-nfs-short: setup ## Test what CI tests of that: two nodes with one mount and one cap, killed over and over
	@tools/vm/nfs.sh --short

.PHONY: test-nfs-engine
test-nfs-engine: vllm-env ## Test a real vLLM on an NFS mount in a virtual machine
	@tools/vm/nfs_engine.sh

.PHONY: test-python
test-python: setup ## Test the Python package (ARGS: for pytest)
	@sync
	@$(BIN)/python -m pytest tests/python $(ARGS)

.PHONY: test-device
test-device: setup standin-cuda ## Test stores on a device, with a stand-in for the CUDA driver or, KVDEPOT_TEST_GPU=1, a real one
	@sync
	@$(BIN)/python -m pytest tests/device $(ARGS)

.PHONY: first-gpu-hour
first-gpu-hour: setup ## Run the GPU-only measurements, and write one report (ARGS: --smoke, --only NAME, --out FOLDER)
	@$(BIN)/python -m tools.first_gpu_hour $(ARGS)

.PHONY: test-layouts
test-layouts: vllm-env standin-cuda ## Test the connector with vLLM's own caches of every layout, without a GPU (ARGS: for pytest)
	@LD_LIBRARY_PATH=$(CURDIR)/$(dir $(STANDIN_CUDA)) $(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default tests/layouts $(ARGS)

.PHONY: test-engine
test-engine: vllm-env ## Test with a real vLLM on CPU (ARGS: for pytest)
	@# Depots write files here, which would wait for all that builds have written.
	@sync
	@$(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default -o timeout=900 tests/engine $(ARGS)

.PHONY: test-wire
test-wire: infinistore-env standin-verbs ## Test the network listener with InfiniStore's own client, RDMA by a stand-in (ARGS: for pytest)
	@sync
	@$(WITH_STANDIN) $(INFINISTORE_VENV)/bin/python -m pytest -o pythonpath=. tests/wire $(ARGS)

.PHONY: test-lmcache
test-lmcache: vllm-env infinistore-env ## Test kvdepot in LMCache: its server with a real vLLM on CPU, and its engine (ARGS: for pytest)
	@sync
	@$(INFINISTORE_VENV)/bin/python -m pytest -o pythonpath=. -o filterwarnings=default tests/with_lmcache $(ARGS)

.PHONY: test-sglang
test-sglang: sglang-env ## Test kvdepot in a real SGLang on CPU (ARGS: for pytest; --full for every layout, failure and model)
	@# As above: depots write files here.
	@sync
	@$(SGLANG_VENV)/bin/python -m pytest -o pythonpath=. -o filterwarnings=default tests/with_sglang $(ARGS)

.PHONY: test-mooncake
test-mooncake: mooncake-env vllm-env ## Test the Mooncake tier with Mooncake's own master and holders, and real vLLMs on it (ARGS: for pytest)
	@# Built with the features that `make test-rust` builds with, those of the whole workspace.
	@$(STEP) "build the tests" cargo test --workspace --quiet --test mooncake_real --no-run
	@if [ -e $(MOONCAKE_VENV)/cannot-run ]; then \
		echo "SKIPPED: $$(cat $(MOONCAKE_VENV)/cannot-run)" >&2; \
	else \
		$(WITH_MOONCAKE) cargo test --workspace --quiet --test mooncake_real -- --include-ignored; \
		$(WITH_MOONCAKE) $(BIN)/python -m pytest -o pythonpath=. -o timeout=600 tests/with_mooncake $(ARGS); \
		$(WITH_MOONCAKE) $(VLLM_VENV)/bin/python -m pytest -o filterwarnings=default -o timeout=600 tests/engine/test_mooncake.py; \
	fi

.PHONY: test-s3
test-s3: setup $(S3_SERVER) ## Test the Object tier with a real S3 server, signed, throttled and killed (ARGS: for pytest)
	@# Built with the features that `make test-rust` builds with, those of the whole workspace.
	@$(STEP) "build the tests" cargo test --workspace --quiet --test object --no-run
	@cargo test --workspace --quiet --test object real:: -- --include-ignored --list | grep ': test$$' > /dev/null
	@$(WITH_S3) cargo test --workspace --quiet --test object real:: -- --include-ignored
	@$(WITH_S3) $(BIN)/python -m pytest -o pythonpath=. tests/with_s3 $(ARGS)

.PHONY: test-monitoring
test-monitoring: setup watchers ## Test status page, dashboard and alerts with a real browser and a real Prometheus (ARGS: for pytest)
	@sync
	@$(WITH_PLAYWRIGHT) $(BIN)/python -m pytest -o pythonpath=. tests/monitoring $(ARGS)

.PHONY: test-docs
test-docs: vllm-env infinistore-env sglang-env standin-verbs standin-cuda $(S3_SERVER) ## Run every documented command and option in a small form (ARGS: for pytest)
	@sync
	@$(BIN)/python -m pytest tests/docs $(ARGS)

FULL_SIM_SEEDS := 1000000
FULL_KILLS := 200
FULL_CASES := 20000

.PHONY: test-full
test-full: vllm-env vllm-previous-env infinistore-env sglang-env sglang-old-env standin-verbs ## Run the long matrices, for hours: every engine's --full, more seeds, kills and cases
	@$(STEP) "$(FULL_SIM_SEEDS) seeds of the simulation" env KVDEPOT_SIM_SEEDS=$(FULL_SIM_SEEDS) cargo test --release --quiet -p kvdepot-sim --test seeds
	@# In the workspace, one crate's tests may use what another one switches on.
	@$(STEP) "each crate's tests alone" bash -ec 'for crate in crates/*; do cargo check --quiet --tests -p $${crate#*/}; done'
	@$(STEP) "$(FULL_CASES) cases of each property" env PROPTEST_CASES=$(FULL_CASES) cargo test --quiet -p kvdepot-core
	@$(STEP) "$(FULL_KILLS) kills of depots and engines" env KVDEPOT_KILLS=$(FULL_KILLS) KVDEPOT_TEST_KILLS=$(FULL_KILLS) \
		cargo test --quiet -p kvdepot-server --test death --test kept_pool
	@$(WITH_STANDIN) $(INFINISTORE_VENV)/bin/python -m benches.wire.kills --kills $(FULL_KILLS)
	@KVDEPOT_KILLS=$(FULL_KILLS) $(MAKE) test-nfs ARGS=--long
	@$(MAKE) test-nfs-engine
	@$(MAKE) test-engine ARGS="--full --kills 20"
	@# Named, so that nothing is skipped for want of an environment.
	@KVDEPOT_SGLANG_OLD_PYTHON=$(CURDIR)/$(SGLANG_OLD_VENV)/bin/python KVDEPOT_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python \
		$(MAKE) test-sglang ARGS="--full"
	@rm -rf .work/portable
	@$(MAKE) portable-wheels ARGS="--processor x86_64 --out .work/portable"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target .work/portable/site .work/portable/*.whl
	@$(STEP) "the portable wheel" env PYTHONPATH=$(CURDIR)/.work/portable/site \
		$(BIN)/python -m pytest tests/python/test_processes.py tests/python/test_lifetimes.py tests/python/test_store.py
	@# All configurations; test-docs runs two of them.
	@$(MAKE) bench-engine ARGS="--rounds 1 --repeats 1 --tokens 64"

.PHONY: lint
lint: setup $(CARGO_DENY) ## Check format, lints, types, stubs, spelling and licences
	@$(STEP) "cargo fmt" cargo fmt --all --check
	@$(STEP) "cargo clippy" cargo clippy --workspace --all-targets --quiet -- -D warnings
	@$(STEP) "PTX belongs to its source" $(MAKE) ptx-check
	@$(STEP) "cargo deny" $(CARGO_DENY) --all-features check licenses bans sources
	@$(STEP) "ruff check" $(BIN)/ruff check
	@$(STEP) "ruff format" $(BIN)/ruff format --check
	@$(STEP) "mypy" $(BIN)/mypy
	@$(STEP) "stubs match the module" $(BIN)/python -m mypy.stubtest kvdepot._native --mypy-config-file pyproject.toml
	@$(STEP) "pictures belong to their figures" $(BIN)/python -m tools.plots.first_token --check
	@$(STEP) "documentation site" $(BIN)/python -m tools.site
	@$(STEP) "typos" $(BIN)/typos

.PHONY: ptx-check
ptx-check: $(STAMPS)/ptxas ## Check that the kernel's PTX belongs to its source and assembles, and that the source copies rightly
	@$(PYTHON) crates/kvdepot-copy/kernels/make_ptx.py --check
	@$(PYTHON) crates/kvdepot-copy/kernels/assemble_ptx.py
	@mkdir -p .work
	@if command -v $(CXX) >/dev/null; then \
		$(CXX) -std=c++17 -O1 -Wno-unknown-pragmas crates/kvdepot-copy/kernels/emulate.cpp -o .work/emulate; \
		.work/emulate; \
	else echo "skipped: no C++ compiler to run the kernel's source with"; fi

.PHONY: fix
fix: setup ## Format, apply safe fixes, rewrite generated pages
	@$(STEP) "cargo fmt" cargo fmt --all
	@$(STEP) "ruff check --fix" $(BIN)/ruff check --fix
	@$(STEP) "ruff format" $(BIN)/ruff format
	@$(STEP) "typos" $(BIN)/typos --write-changes
	@$(BIN)/python -m kvdepot config keys --markdown > docs/configuration.md
	@$(BIN)/python -m tools.plots.first_token

##@ Maintain

# Two runs of make never write the same environment at the same time.
ALONE := mkdir -p .work && flock .work/environments.lock

.PHONY: vllm-env
vllm-env: setup ## Make .venv-vllm: a real vLLM on CPU, with this wheel
	@$(ALONE) $(BIN)/python tools/vllm_env.py --wheel $(WHEELS)/*.whl $(VLLM_VENV)

.PHONY: vllm-previous-env
vllm-previous-env: setup ## Make .venv-vllm-previous: the release of vLLM before that
	@$(ALONE) $(BIN)/python tools/vllm_env.py --lock requirements/vllm-previous.txt --wheel $(WHEELS)/*.whl $(VLLM_PREVIOUS_VENV)

.PHONY: vllm-surface
vllm-surface: setup ## Write tables of what the connector uses of each release of vLLM (downloads about 850 MB once)
	@$(BIN)/python -m tools.vllm_surface --download .work/vllm-wheels

.PHONY: sglang-surface
sglang-surface: setup ## Write tables of what the integrations use of each release of SGLang (downloads about 110 MB once)
	@$(BIN)/python -m tools.sglang_surface --download .work/sglang-wheels

.PHONY: infinistore-env
infinistore-env: setup standin-verbs ## Make .venv-infinistore: InfiniStore's own client and server, and LMCache
	@$(ALONE) $(BIN)/python -m tools.infinistore_env --verbs $(dir $(STANDIN_VERBS)) --torch-from $(VLLM_VENV) $(INFINISTORE_VENV)

.PHONY: sglang-env
sglang-env: setup ## Make .venv-sglang: a real SGLang on CPU, with this wheel
	@$(ALONE) $(BIN)/python -m tools.sglang_env --wheel $(WHEELS)/*.whl $(SGLANG_VENV)

.PHONY: sglang-old-env
sglang-old-env: setup ## Make .venv-sglang-old: SGLang 0.5.17 on CPU, for make test-sglang ARGS=--full
	@$(ALONE) $(BIN)/python -m tools.sglang_env --lock requirements/sglang-old.txt --wheel $(WHEELS)/*.whl $(SGLANG_OLD_VENV)

.PHONY: mooncake-env
mooncake-env: setup ## Make .venv-mooncake: Mooncake's master and client
	@$(ALONE) $(BIN)/python -m tools.mooncake_env $(MOONCAKE_VENV)

.PHONY: ucm-env
ucm-env: setup ## Make .venv-ucm: UCM's store, for make bench-peers
	@$(ALONE) $(BIN)/python -m tools.ucm_env $(UCM_VENV)

.PHONY: lock
lock: $(STAMPS)/tools ## Pin the newest versions in requirements/*.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.10 --universal requirements/dev.in -o requirements/dev.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--overrides requirements/vllm-overrides.txt --excludes requirements/vllm-excludes.txt \
		requirements/vllm.in -o requirements/vllm.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--overrides requirements/vllm-overrides.txt --excludes requirements/vllm-previous-excludes.txt \
		requirements/vllm-previous.in -o requirements/vllm-previous.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		--excludes requirements/infinistore-excludes.txt \
		requirements/infinistore.in -o requirements/infinistore.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
		--excludes requirements/sglang-excludes.txt \
		requirements/sglang.in -o requirements/sglang.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
		--excludes requirements/sglang-excludes.txt \
		requirements/sglang-old.in -o requirements/sglang-old.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
		requirements/mooncake.in -o requirements/mooncake.txt
	@$(BIN)/uv pip compile -q --upgrade --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
		requirements/ucm.in -o requirements/ucm.txt

.PHONY: clean
clean: ## Remove all that was built, environments included
	@rm -rf $(VENV) $(VLLM_VENV) $(VLLM_PREVIOUS_VENV) $(INFINISTORE_VENV) $(SGLANG_VENV) $(SGLANG_OLD_VENV) $(MOONCAKE_VENV) $(UCM_VENV) .work target .mypy_cache .ruff_cache .pytest_cache
	@find python tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/tools: requirements/dev.txt
	@mkdir -p $(@D)
	@$(STEP) "make .venv" $(PYTHON) -m venv --clear $(VENV)
	@$(STEP) "install uv" $(BIN)/python -m pip install -q "$$(grep '^uv==' requirements/dev.txt)"
	@$(STEP) "install tools" $(BIN)/uv pip install -q --python $(BIN)/python --compile-bytecode -r requirements/dev.txt
	@touch $@

$(STAMPS)/wheel-$(WHEEL_PROFILE): $(STAMPS)/tools $(RUST_INPUTS) $(PYTHON_INPUTS)
	@rm -rf $(WHEELS) $(STAMPS)/wheel-*
	@$(STEP) "build the wheel" $(BIN)/maturin build --profile $(WHEEL_PROFILE) --locked --out $(WHEELS) \
		$(if $(filter dev,$(WHEEL_PROFILE)),--features as-tested)
	@touch $@

$(STAMPS)/installed: $(STAMPS)/wheel-$(WHEEL_PROFILE)
	@$(STEP) "install the wheel" $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --reinstall \
		--compile-bytecode $(WHEELS)/*.whl
	@touch $@

# Installs them where that is possible, and says what to install elsewhere.
.PHONY: watchers
watchers: $(STAMPS)/playwright
	@$(STEP) "find Chromium and Prometheus" $(BIN)/python -m tools.monitoring.programs

# Copies of their own. No other environment needs a browser's driver, a part of the CUDA toolkit or Go. Where Python finds zig, maturin takes it,
# and not the one that it is told to.
$(STAMPS)/go $(STAMPS)/playwright $(STAMPS)/ptxas $(STAMPS)/zig: $(STAMPS)/%: requirements/%.txt $(STAMPS)/tools
	@rm -rf .work/$*
	@$(STEP) "install $*" $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target .work/$* -r requirements/$*.txt
	@touch $@

# Unoptimised: it takes half the time to build, and is fast enough.
$(S3_SERVER): tools/s3_server/go.mod tools/s3_server/go.sum $(STAMPS)/go
	@mkdir -p $(@D)
	@$(STEP) "build versitygw" env GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS= .work/go/go/bin/go build -C tools/s3_server -mod=readonly -buildvcs=false \
		-gcflags='all=-N -l' -ldflags='-s -w' -o $(CURDIR)/$@ github.com/versity/versitygw/cmd/versitygw

# The registry of Python tools has cargo-deny only as 0.14, which cannot read today's lock files and metadata.
$(CARGO_DENY):
	@CARGO_PROFILE_DEV_DEBUG=0 $(STEP) "build cargo-deny" cargo install --quiet --locked --debug --version $(CARGO_DENY_VERSION) \
		--root .work/tools cargo-deny
