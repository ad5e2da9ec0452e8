"""How CI runs everything that is documented, in a small form. To document a command or an option, add a line here.

- ``RUNS``: commands that `test_runs.py` runs. ``{tmp}`` is a directory of the run, ``{port}`` and ``{port2}`` are
  free ports. A ``Serve`` starts a depot, waits until `kvdepot stat` and the ports answer, and ends it with SIGTERM.
- Examples of help pages have no entries: `tests/python/test_help.py` parses each, and all options are in ``RUNS``.
- ``SMALL_FORMS``: documented commands, verbatim, and the names of the runs that are their small forms.
- ``STAGES``: targets of make that `.ci/run` runs unchanged. ``DRY``: targets that are not run, and why; `make -n`
  checks them.
- ``NOT_RUN``: documented commands that cannot run in CI, and why; `test_static.py` checks what can be checked.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """A command that exits on its own."""

    name: str
    command: str
    status: int = 0
    says: str = ""
    environ: dict[str, str] = field(default_factory=dict)
    json: bool = False

    @property
    def vllm(self) -> bool:
        """Whether it starts or imports vLLM or SGLang."""
        return self.command.startswith(
            ("make demo", "make test-engine", "make bench-sglang", *(f"make bench-{name}" for name in VLLM_BENCHES))
        )


@dataclass(frozen=True)
class Serve:
    """A `kvdepot serve` that runs until SIGTERM."""

    name: str
    command: str
    files: dict[str, str] = field(default_factory=dict)
    before: str = ""
    wire: bool = False
    rdma: bool = False
    stat: str = "kvdepot stat --socket {tmp}/depot.sock --json"


VLLM_BENCHES = ("engine", "overhead", "handover", "thrash", "concurrency", "waiting", "lmcache")
TINY = "--repeats 1 --tokens 64"
CUDA = {"LD_LIBRARY_PATH": "{standin_cuda}", "XDG_CACHE_HOME": "{tmp}"}
ALONE = {"XDG_RUNTIME_DIR": "{tmp}", "PYTHONPATH": "{root}/tests/docs/alone"}
"""For commands that list the depots of this user, or stop them: others may run."""
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj /CN=kvdepot-pool "
    "-keyout {tmp}/key.pem -out {tmp}/certificate.pem "
    "-addext subjectAltName=IP:10.0.0.1,DNS:pool.example -addext basicConstraints=critical,CA:FALSE"
)
TOKEN = "head -c 32 /dev/urandom | base64 > {tmp}/token && chmod 600 {tmp}/token"
CONFIG = {"depot.yaml": 'pipeline: "Cache|Posix"\ndirectories: ["{tmp}/blocks"]\npool_gb: 0.1\n'}
STAGING = {"depot.yaml": 'pipeline: "Posix"\ndirectories: ["{tmp}/blocks"]\nsocket: {tmp}/depot.sock\n'}
TRACE = "{root}/tests/data/trace.jsonl"
CORE = '{{"pipeline":"Cache","pool_bytes":16777216}}'

RUNS: tuple[Run | Serve, ...] = (
    Run("make help", "make help", says="make setup"),
    Run("make wheel", "make wheel", says=".whl"),
    Run("make site", 'make site ARGS="--out {tmp}/site" && cat {tmp}/site/reference/commands.html', says="--take-over"),
    Run("version", "kvdepot --version", says="version"),
    Run("config check", "kvdepot config check {root}/tests/data/seeds/000_pipeline.yaml", says="valid"),
    Run("config check --json", "kvdepot config check --json {root}/tests/data/seeds/000_pipeline.yaml", json=True),
    Run("config explain", "kvdepot config explain {root}/tests/data/seeds/000_pipeline.yaml", says="directories"),
    Run("config explain --json", "kvdepot config explain --json {root}/tests/data/seeds/000_pipeline.yaml", json=True),
    Run("config keys", "kvdepot config keys", says="pool_gb"),
    Run("config keys --json", "kvdepot config keys --json", json=True),
    Run("config keys --markdown", "kvdepot config keys --markdown", says="| `pool_gb` |"),
    # What it prints of a depot is shown in tests/python/test_events.py.
    Run("events --json", "kvdepot events --socket {tmp}/none.sock --json 2>&1", status=1, says="no depot answers"),
    Run("events --follow", "kvdepot events --follow --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run(
        "events --config",
        "kvdepot events --config {root}/tests/data/seeds/000_pipeline.yaml --block-bytes 65536 2>&1",
        status=1,
        says="no depot answers",
        environ={"XDG_RUNTIME_DIR": "{tmp}"},
    ),
    # What routers learn is shown in tests/python/test_publish.py.
    Run(
        "events --publish",
        "kvdepot events --publish tcp://127.0.0.1:0 --bind --replay tcp://127.0.0.1:0 --topic kv@node1@llama "
        "--namespace 3f2a9c0e,91c0d4b7 --block-hashes bytes --data-parallel-rank 1 --buffer-batches 10 --hwm 10 "
        "--repeat-s 60 --no-clear --socket {tmp}/none.sock > {tmp}/said & "
        "until grep -q 'no depot answers' {tmp}/said; do kill -0 $! || exit 1; sleep 0.1; done; "
        "kill $! && wait $! && cat {tmp}/said",
        says="ended",
    ),
    Run("completion bash", 'eval "$(kvdepot completion bash)" && complete -p kvdepot', says="_kvdepot_completion"),
    Run("completion zsh", "kvdepot completion zsh", says="compdef"),
    Run("completion fish", "kvdepot completion fish > {tmp}/kvdepot.fish && cat {tmp}/kvdepot.fish", says="complete"),
    Run("compat list", "kvdepot compat list", says="ucm"),
    Run("compat list --json", "kvdepot compat list --json", json=True),
    Run("compat install", "kvdepot compat install ucm && kvdepot compat remove ucm", says="removed"),
    Run("compat install --json", "kvdepot compat install ucm --json && kvdepot compat remove ucm", says="written"),
    Run("compat remove --json", "kvdepot compat remove infinistore --json", json=True),
    Run("compat remove", "kvdepot compat remove infinistore", says="infinistore"),
    Run("doctor", "kvdepot doctor", says="GPU driver", environ=CUDA),
    Run("doctor --json", "kvdepot doctor --json", json=True, environ=CUDA),
    Run(
        "doctor --config",
        "kvdepot doctor --config {root}/tests/data/seeds/000_pipeline.yaml",
        status=1,
        says="fail directory /mnt/test",
        environ=CUDA,
    ),
    Run("depots", "kvdepot depots", says="no depot of this user runs", environ=ALONE),
    Run("depots --json", "kvdepot depots --json", json=True),
    # tests/python/test_depots.py shows that a depot ends.
    Run("stop", "kvdepot stop --socket {tmp}/none.sock --timeout 1 2>&1", status=1, says="no depot answers"),
    Run(
        "stop --config",
        "kvdepot stop --config {root}/tests/data/seeds/000_pipeline.yaml --block-bytes 65536 2>&1",
        status=1,
        says="no depot answers",
        environ={"XDG_RUNTIME_DIR": "{tmp}"},
    ),
    Run("stop --all", "kvdepot stop --all --json", json=True, environ=ALONE),
    Run("namespaces", "kvdepot namespaces --directory {tmp}", says="facts"),
    Run("namespaces --json", "kvdepot namespaces --directory {tmp} --json", json=True),
    # What it lists of a depot is shown in tests/python/test_depot_namespaces.py.
    Run("namespaces --socket", "kvdepot namespaces --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    # What a depot tells is shown in tests/python/test_why.py.
    Run("why", "kvdepot why --last 20 --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run("why --json", "kvdepot why cmpl --socket {tmp}/none.sock --json 2>&1", status=1, says="no depot answers"),
    Run(
        "why --config",
        "kvdepot why 3f2a 00 --config {root}/tests/data/seeds/000_pipeline.yaml --block-bytes 65536 2>&1",
        status=1,
        says="no depot answers",
        environ={"XDG_RUNTIME_DIR": "{tmp}"},
    ),
    Run("verify", "kvdepot verify --directory {tmp} --rate-mib 200 --set-aside", says="0 broken"),
    Run("verify --json", "kvdepot verify --directory {tmp} --json", json=True),
    Run(
        "namespaces --config",
        "kvdepot namespaces --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run(
        "verify --config",
        "kvdepot verify --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="cannot be read",
    ),
    # What they find on media is shown in tests/python/test_stored_media.py.
    Run("verify --medium", "kvdepot verify --medium {tmp}/none --rate-mib 200", status=1, says="was skipped"),
    Run("namespaces --medium", "kvdepot namespaces --medium {tmp}/none 2>&1", status=1, says="cannot open a medium"),
    Run("ls --medium", "kvdepot ls 3f2a --medium {tmp}/none 2>&1", status=1, says="cannot open a medium"),
    Run(
        "export",
        "kvdepot export 3f2a {tmp}/x.kvx --directory {tmp} --socket {tmp}/none.sock --force --json 2>&1",
        status=1,
        says="no depot answers",
    ),
    Run(
        "export --config",
        "kvdepot export 3f2a {tmp}/x.kvx --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run("import", "kvdepot import {tmp}/nothing.kvx --directory {tmp} 2>&1", status=1, says="cannot be read"),
    Run(
        "import --dry-run",
        "kvdepot import {tmp}/nothing.kvx --socket {tmp}/none.sock --config {tmp}/none.yaml --dry-run --any-epoch "
        "--timeout 60 --json 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run("gc", "kvdepot gc {tmp}", says="would be freed"),
    Run("gc --dry-run", "kvdepot gc {tmp} --dry-run --json", json=True),
    Run("gc --capacity-gb", "kvdepot gc {tmp} --capacity-gb 200 --dry-run", says="would be freed"),
    Run("gc --apply", "kvdepot gc {tmp} --apply --unknown-namespaces", says="freed"),
    Run(
        "gc --config",
        "kvdepot gc --config {root}/tests/data/seeds/000_pipeline.yaml --apply 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run(
        "ls",
        "kvdepot ls 3f2a --directory {tmp} --sort age --limit 100 --json 2>&1",
        status=2,
        says="no namespace begins with 3f2a",
    ),
    Run(
        "ls --config",
        "kvdepot ls 3f2a --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run("reset", "kvdepot reset 3f2a --directory {tmp} --json 2>&1", status=1, says="no depot runs"),
    Run("reset --socket", "kvdepot reset 3f2a --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run(
        "reset --config",
        "kvdepot reset 3f2a --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="no depot runs",
    ),
    Run("rm", "kvdepot rm 3f2a --directory {tmp} --yes --json 2>&1", status=2, says="no namespace begins with 3f2a"),
    Run("rm --socket", "kvdepot rm 3f2a --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run(
        "rm --config",
        "kvdepot rm 3f2a --config {root}/tests/data/seeds/000_pipeline.yaml --yes 2>&1",
        status=1,
        says="cannot be read",
    ),
    Run(
        "prefetch",
        "kvdepot prefetch 3f2a --directory {tmp} --limit 100 --json 2>&1",
        status=1,
        says="no depot runs",
    ),
    Run("prefetch --socket", "kvdepot prefetch 3f2a --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run(
        "prefetch --config",
        "kvdepot prefetch 3f2a --config {root}/tests/data/seeds/000_pipeline.yaml 2>&1",
        status=1,
        says="no depot runs",
    ),
    # tests/python/test_verbs.py shows its output for a depot.
    Run(
        "top",
        "kvdepot top --once --interval 0.1 2>&1",
        status=1,
        says="no depot answers",
        environ=ALONE,
    ),
    Run(
        "top --config",
        "kvdepot top --once --config {root}/tests/data/seeds/000_pipeline.yaml --block-bytes 65536 2>&1",
        status=1,
        says="no depot answers",
    ),
    Run("top --json", "kvdepot top --json --socket {tmp}/none.sock 2>&1", status=1, says="no depot answers"),
    Run("inspect --json", "kvdepot inspect {tmp}/nothing.kvb --json 2>&1", status=1, says="cannot be read"),
    Run("inspect", "kvdepot inspect {tmp}/nothing.kvb 2>&1", status=1, says="cannot be read"),
    Run("bench copy", "kvdepot bench copy --device 3 --smoke", says="memcpy", environ=CUDA),
    Run("bench copy --json", "kvdepot bench copy --smoke --json", json=True, environ=CUDA),
    Run(
        "bench copy --kernel-blocks",
        "kvdepot bench copy --device 3 --kernel-blocks 8 --smoke",
        says="memcpy",
        environ=CUDA,
    ),
    Run(
        "make first-gpu-hour",
        'make first-gpu-hour ARGS="--smoke --out {tmp}/hour --only doctor --only kernel"',
        says="no GPU",
    ),
    Run(
        "make first-gpu-hour --driver",
        'make first-gpu-hour ARGS="--smoke --out {tmp}/hour --only ping --driver {standin_cuda}/libcuda.so.1"',
        says="The driver is a stand-in",
    ),
    Run("bench store", "kvdepot bench store --smoke --rounds 1", says="disk"),
    Run(
        "bench store --only",
        "kvdepot bench store --smoke --rounds 1 --threads 2 --io-threads 2 --directory {tmp} --only disk --json",
        json=True,
    ),
    Run(
        "trace generate",
        "kvdepot trace generate chat --requests 50 --seed 3 --per-second 2 --output {tmp}/t.jsonl",
        says="50 requests",
    ),
    Run(
        "trace replay",
        f"kvdepot trace replay {TRACE} --capacity 100,1GB --policy lru --tier 500:cold --more 1GB --block-mib 8 --plot",
        says="endless",
    ),
    Run(
        "trace replay --keeps-nothing",
        f"kvdepot trace replay {TRACE} --keeps-nothing --tier 500:through+promote:lru:1000 --tier 5000",
        says="over budget of tier 1",
    ),
    Run("trace replay --json", f"kvdepot trace replay {TRACE} --json", json=True),
    Run(
        "trace fleet",
        f"kvdepot trace fleet {TRACE} --nodes 3 --capacity 1GB --policy lru --tier 500:cold --servers 2 --shared 2GB "
        "--route longest_prefix --copies 2 --lose-node 1@50 --add-node 1@75 --lose-server 0@25 --add-server 0@50 "
        "--engines 2 --engine-capacity 64 --reset 1@60 --upgrade 10-20 --take-over --windows 4 --seed 1 --block-mib 8 "
        "--plot",
        says="busiest node",
    ),
    Run("trace fleet --json", f"kvdepot trace fleet {TRACE} --capacity 100 --json", json=True),
    Run(
        "trace play",
        f"kvdepot trace play {TRACE} --config {{root}}/tests/data/trace_play.yaml --block-kib 4 --clients 2 "
        "--speed 1000 --requests 10",
        says="wrong_blocks",
    ),
    Run("trace play --json", f"kvdepot trace play {TRACE} --block-kib 4 --json", json=True),
    Run(
        "trace generate --json",
        "kvdepot trace generate chat --requests 5 --output {tmp}/t.jsonl --json",
        json=True,
    ),
    Run(
        "trace convert --json",
        f"kvdepot trace convert {TRACE} --output {{tmp}}/public.jsonl --json",
        json=True,
    ),
    Run("trace convert", f"kvdepot trace convert {TRACE} --output {{tmp}}/public.jsonl", says="public.jsonl"),
    Run("bench store --only traces", "kvdepot bench store --smoke --rounds 1 --only traces", says="all_percent"),
    Run("make bench", 'make bench ARGS="--smoke --rounds 1 --only memory"', says="memcpy_gb_s"),
    Run("make example", 'make example ARGS="--blocks 2 --layer-kib 1 --directory {tmp}"', says="every byte compared"),
    Serve(
        "serve",
        "kvdepot serve --config {tmp}/depot.yaml --socket {tmp}/depot.sock --drain-timeout 5",
        CONFIG,
    ),
    Serve(
        "serve --take-over",
        "kvdepot serve --config {tmp}/depot.yaml --socket {tmp}/depot.sock --take-over",
        CONFIG,
    ),
    Serve(
        "serve --metrics-port",
        "kvdepot serve --config {tmp}/depot.yaml --socket {tmp}/depot.sock --metrics-port {port} "
        "--metrics-host 127.0.0.1 --metrics-token-file {tmp}/token",
        CONFIG,
        before=TOKEN,
    ),
    Serve(
        "serve --wait-for-lock",
        "kvdepot serve --config {tmp}/depot.yaml --socket {tmp}/depot.sock --wait-for-lock",
        CONFIG,
    ),
    Serve(
        "serve --core-json",
        f"kvdepot serve --core-json '{CORE}' --socket {{tmp}}/depot.sock --idle-exit-s 600 --log-level warn "
        "--log-file {tmp}/depot.log --log-format json --log-max-size 1 --log-max-files 2 --log-burst-lines 5",
        stat="kvdepot stat --socket {tmp}/depot.sock",
    ),
    Run(
        "serve --detach",
        f"kvdepot serve --detach --core-json '{CORE}' --socket {{tmp}}/depot.sock --idle-exit-s 60 "
        "--log-file {tmp}/depot.log &> {tmp}/said && "
        "until kvdepot stat --socket {tmp}/depot.sock 2> {tmp}/errors; do sleep 0.1; done",
        says="pool_bytes",
    ),
    Serve(
        "serve --block-bytes",
        "kvdepot serve --config {tmp}/depot.yaml --block-bytes 65536",
        STAGING,
        stat="kvdepot stat --config {tmp}/depot.yaml --block-bytes 65536",
    ),
    Serve(
        "serve --service-port",
        "kvdepot serve --host 127.0.0.1 --service-port {port} --manage-port {port2} --prealloc-size 0.25 "
        "--token-file {tmp}/token --socket {tmp}/depot.sock --minimal-allocate-size 16 --auto-increase "
        "--enable-periodic-evict --evict-interval 1 --evict-min-threshold 0.5 --evict-max-threshold 0.9 "
        "--max-connections 16",
        before=TOKEN,
        wire=True,
    ),
    Serve(
        "serve --tls",
        "kvdepot serve --service-port {port} --manage-port {port2} --prealloc-size 0.1 --socket {tmp}/depot.sock "
        "--tls-certificate-file {tmp}/certificate.pem --tls-key-file {tmp}/key.pem",
        before=CERTIFICATE,
        wire=True,
    ),
    Serve(
        "serve --dev-name",
        "kvdepot serve --service-port {port} --manage-port {port2} --prealloc-size 0.1 --socket {tmp}/depot.sock "
        "--dev-name standin0 --ib-port 1 --link-type IB --hint-gid-index 0",
        wire=True,
        rdma=True,
    ),
    # test_static.py has the table that it prints without --json.
    Run(
        "make demo",
        'make demo ARGS="--prompts 1 --tokens 96 --answer-tokens 2 --dtype float32 --set hit_ratio=1.0 '
        '--set call_timeout_ms=30000 --port 0 --stay 0.1 --json"',
        says="after kill -9",
        json=True,
    ),
    Run(
        "make demo-sglang",
        'make demo-sglang ARGS="--prompts 1 --tokens 512 --answer-tokens 2 --door linker --json"',
        says="after kill -9",
        json=True,
    ),
    Run(
        "make bench-sglang", 'make bench-sglang ARGS="--repeats 1 --tokens 512 --kinds device linker --json"', json=True
    ),
    Run(
        "make bench-engine",
        f'make bench-engine ARGS="--rounds 1 {TINY} --device cpu --size small --dtype float32 --keep-page-cache '
        '--only kvdepot --only tier --set hit_ratio=1.0 --json"',
        json=True,
    ),
    Run(
        "make bench-overhead",
        f'make bench-overhead ARGS="--pairs 1 {TINY} --dtype float32 --set hit_ratio=1.0 --json"',
        json=True,
    ),
    Run("make bench-handover", f'make bench-handover ARGS="{TINY} --dtype float32 --json"', json=True),
    Run(
        "make bench-thrash",
        'make bench-thrash ARGS="--requests 2 --tokens 256 --pool-part 0.9 --system kvdepot --dtype float32 '
        '--set hit_ratio=1.0 --set call_timeout_ms=30000 --json"',
        json=True,
    ),
    Run(
        "make bench-concurrency",
        'make bench-concurrency ARGS="--requests 3 --tokens 256 --answer-tokens 2 --repeats 1 --rounds 1 '
        '--systems kvdepot --dtype float32 --shared 0.25 --set hit_ratio=1.0 --json"',
        json=True,
    ),
    Run(
        "make bench-waiting",
        'make bench-waiting ARGS="--requests 20 --running 2 --tokens 65 --answer-tokens 2 --steps 20 --rounds 1 '
        '--systems misses --set hit_ratio=1.0 --json"',
        json=True,
    ),
    # All three measurements with one level. All documents fit into the memory, so the figures mean nothing.
    Run(
        "make bench-lmcache",
        'make bench-lmcache ARGS="--only first-token --only long-doc-qa --only l2 --levels kvdepot-dax --rounds 1 '
        "--size small --dtype float32 --repeats 1 --tokens 256 --keep-page-cache --documents 4 --document-tokens 512 "
        '--questions 1 --answer-tokens 2 --inflight 1 --objects 4x64 --set call_timeout_ms=30000 --json"',
        json=True,
    ),
    Run(
        "make bench-wire-faults",
        'make bench-wire-faults ARGS="--server kvdepot --logs {tmp} --json garbage_in_delete"',
        json=True,
    ),
    Run(
        "make bench-wire",
        'make bench-wire ARGS="--server kvdepot --sizes 4096 --clients 1 --rounds 1 --seconds 0.05 --json"',
        json=True,
    ),
    # Values and blocks of a few KiB; a peer that is not installed is reported and left out.
    Run(
        "make bench-peers",
        'make bench-peers ARGS="--smoke --rounds 1 --only ucm --only dax --only slab --only files --only mooncake '
        '--directory {tmp} --json"',
        json=True,
    ),
    Run("make bench-bucket", 'make bench-bucket ARGS="--rounds 1 --mib 2 --kib 64 --pack-mb 1 --json"', json=True),
    Run("test-engine --full", 'make test-engine ARGS="--full --kills 1 --collect-only -q"', says="tests collected"),
    Run("test-engine --native", 'make test-engine ARGS="--native=fake --collect-only -q"', says="tests collected"),
)

# Programs behind targets of make: the python that runs them, and how.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "demo": ("-m", "tools.demo"),
    "demo-sglang": ("-m", "tools.sglang.demo"),
    "bench-sglang": ("-m", "benches.sglang"),
    "example": ("examples/library.py",),
    "bench-engine": ("-m", "benches.engine"),
    "bench-overhead": ("-m", "benches.engine.overhead"),
    "bench-handover": ("-m", "benches.engine.handover"),
    "bench-thrash": ("-m", "benches.engine.thrash"),
    "bench-concurrency": ("-m", "benches.engine.concurrency"),
    "bench-waiting": ("-m", "benches.engine.waiting"),
    "bench-lmcache": ("-m", "benches.lmcache"),
    "bench-wire-faults": ("-m", "benches.wire.faults"),
    "bench-wire": ("-m", "benches.wire.throughput"),
    "bench-peers": ("-m", "benches.peers"),
    "bench-bucket": ("-m", "benches.bucket"),
    "first-gpu-hour": ("-m", "tools.first_gpu_hour"),
}

STAGES = {
    "setup",
    "standins",
    "lint",
    "vllm-env",
    "infinistore-env",
    "sglang-env",
    "mooncake-env",
    "test-rust",
    "test-python",
    "test-device",
    "test-rdma",
    "test-dax",
    "test-slab",
    "test-nfs-short",
    "test-layouts",
    "test-engine",
    "test-wire",
    "test-lmcache",
    "test-sglang",
    "test-mooncake",
    "test-s3",
    "test-monitoring",
    "test-docs",
}

DRY = {
    "test": "its parts are stages",
    "test-nfs": "a part of make test-full; test-nfs-short is a stage",
    "test-nfs-engine": "a part of make test-full",
    "bench-nfs": "an emulated processor takes minutes; its program is that of make bench-peers",
    "test-full": "takes hours; its parts are stages in a small form",
    "ptx-check": "a part of make lint",
    "fix": "rewrites the tree",
    "screenshots": "rewrites pictures; tests/monitoring has the page and the queries that it draws",
    "vllm-previous-env": "another gigabyte, for tests with --full only; its recipe is that of vllm-env",
    "vllm-surface": "downloads every release of vLLM; test_vllm_releases and test_surface check what it has written",
    "sglang-surface": "downloads every release of SGLang; test_sglang_releases checks what it has written",
    "sglang-old-env": "another 3.5 GB; tests with --full use it if it is there",
    "ucm-env": "a part of make bench-peers",
    "portable-wheels": "builds everything anew, twice; test_portable_wheel shows what it adds to maturin",
    "lock": "asks the network for newer versions",
    "clean": "removes what other stages use",
}

SMALL_FORMS: dict[str, tuple[str, ...]] = {
    "kvdepot config keys": ("config keys",),
    "make wheel": ("make wheel",),
    "make site": ("make site",),
    "make demo": ("make demo",),
    "make demo-sglang": ("make demo-sglang",),
    'make bench-sglang ARGS="--repeats 3 --tokens 2048"': ("make bench-sglang",),
    "make bench-lmcache": ("make bench-lmcache",),
    'make bench-lmcache ARGS="--only long-doc-qa"': ("make bench-lmcache",),
    'make bench-lmcache ARGS="--only l2"': ("make bench-lmcache",),
    'make bench-lmcache ARGS="--only long-doc-qa --rounds 1 --levels kvdepot-dax lmcache-dax"': ("make bench-lmcache",),
    'make bench-lmcache ARGS="--only first-token --rounds 1"': ("make bench-lmcache",),
    "make bench-engine": ("make bench-engine",),
    'make bench-engine ARGS="--rounds 2 --repeats 4"': ("make bench-engine",),
    "make bench-overhead": ("make bench-overhead",),
    "make bench-handover": ("make bench-handover",),
    "make bench-thrash": ("make bench-thrash",),
    "make bench-concurrency": ("make bench-concurrency",),
    "make bench-waiting": ("make bench-waiting",),
    "make bench-wire": ("make bench-wire",),
    "make bench-peers": ("make bench-peers",),
    "make bench-bucket": ("make bench-bucket",),
    'make bench-peers ARGS="--only ucm --rounds 5"': ("make bench-peers",),
    'make bench-nfs ARGS="--rounds 1"': ("make bench-peers",),
    'make bench-peers ARGS="--only dax --rounds 5"': ("make bench-peers",),
    'make bench-peers ARGS="--only mooncake"': ("make bench-peers",),
    'make bench-peers ARGS="--only files --directory /mnt/nfs"': ("make bench-peers",),
    'make test-engine ARGS="--full --kills 20"': ("test-engine --full",),
    ".venv-vllm/bin/python -m pytest -o filterwarnings=default -o timeout=900 tests/engine --native=fake": (
        "test-engine --native",
    ),
    "make first-gpu-hour": ("make first-gpu-hour",),
    "kvdepot bench store": ("bench store",),
    "kvdepot bench store --rounds 5": ("bench store",),
    "kvdepot trace replay": ("trace replay", "trace replay --json", "trace replay --keeps-nothing"),
    "kvdepot trace fleet": ("trace fleet", "trace fleet --json"),
    "kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --servers 2 --shared 20000 --plot": ("trace fleet",),
    "kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --lose-node 3@50 --add-node 3@75 --plot": (
        "trace fleet",
    ),
    "kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --upgrade 25-75 --take-over": ("trace fleet",),
    "kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --engines 4 --engine-capacity 500": ("trace fleet",),
    "kvdepot trace fleet chat.jsonl --nodes 8 --capacity 2000 --copies 4 --reset 1@50 --plot": ("trace fleet",),
    "kvdepot trace generate chat --requests 20000 --output chat.jsonl": ("trace generate",),
    "kvdepot trace play": ("trace play", "trace play --json"),
    "kvdepot trace convert": ("trace convert", "trace convert --json"),
    "kvdepot trace generate": ("trace generate", "trace generate --json"),
    "kvdepot trace generate agents --requests 2000 --output agents.jsonl": ("trace generate",),
    "kvdepot trace generate FAMILY --seed S": ("trace generate",),
    "kvdepot trace replay agents.jsonl --capacity 64GB,256GB --tier 1024GB:second_use --more 64GB --block-mib 10 "
    "--plot": ("trace replay",),
    "kvdepot bench store --only traces": ("bench store --only traces",),
    "kvdepot trace replay conversation_trace.jsonl --capacity 1000,5000,10000,20000,50000": ("trace replay",),
    "kvdepot bench copy": ("bench copy", "bench copy --json"),
    "kvdepot completion --help": ("completion bash", "completion zsh", "completion fish"),
    "kvdepot compat install ucm": ("compat install",),
    "kvdepot compat install infinistore": ("compat install",),
    "kvdepot compat list": ("compat list", "compat list --json"),
    "kvdepot compat remove ucm": ("compat install",),
    "kvdepot config check FILE": ("config check",),
    "kvdepot config check kvdepot.yaml": ("config check",),
    "kvdepot config explain kvdepot.yaml": ("config explain",),
    "kvdepot doctor --config kvdepot.yaml": ("doctor --config",),
    "kvdepot stop --config kvdepot.yaml": ("stop --config",),
    "kvdepot config explain FILE": ("config explain",),
    "kvdepot config keys --markdown": ("config keys --markdown",),
    "kvdepot doctor": ("doctor",),
    "kvdepot doctor --config /etc/kvdepot.yaml": ("doctor --config",),
    "kvdepot stat": ("serve", "serve --core-json"),
    "kvdepot depots": ("depots", "depots --json"),
    "kvdepot stat --config /etc/kvdepot.yaml": ("serve --block-bytes",),
    "kvdepot namespaces --config /etc/kvdepot.yaml": ("namespaces --config",),
    "kvdepot verify --config /etc/kvdepot.yaml": ("verify --config",),
    "kvdepot stop --config /etc/kvdepot.yaml": ("stop --config",),
    "kvdepot stop": ("stop", "stop --config"),
    "kvdepot stop --all": ("stop --all",),
    "kvdepot namespaces": ("namespaces", "namespaces --json"),
    "kvdepot namespaces 3f2a": ("namespaces",),
    "kvdepot namespaces 3f2a 91c0": ("namespaces",),
    "kvdepot events": ("events --config",),
    "kvdepot events --json": ("events --json", "events --config"),
    "kvdepot events --follow": ("events --follow",),
    "kvdepot events --publish": ("events --publish",),
    "kvdepot events --publish 'tcp://*:5557' --replay 'tcp://*:5558' --topic kv@node1@llama": ("events --publish",),
    "kvdepot events --publish 'tcp://*:5557' --namespace 3f2a9c0e,91c0d4b7": ("events --publish",),
    "kvdepot why": ("why", "why --json", "why --config"),
    "kvdepot why --last 20": ("why",),
    "kvdepot why --json": ("why --json",),
    "kvdepot why cmpl-7f3a": ("why --json",),
    "kvdepot why 3f2a 98ac1516354109150bded5754fef7df0": ("why --config",),
    "kvdepot verify": ("verify", "verify --json"),
    "kvdepot verify --rate-mib 200 --set-aside": ("verify",),
    "kvdepot namespaces --medium /dev/nvme1n1": ("namespaces --medium",),
    "kvdepot namespaces --socket /run/user/1000/kvdepot/depot-0123456789ab.sock": ("namespaces --socket",),
    "kvdepot ls 3f2a --medium /dev/nvme1n1": ("ls --medium",),
    "kvdepot verify --medium /dev/nvme1n1 --rate-mib 200": ("verify --medium",),
    "kvdepot inspect FILE": ("inspect",),
    # tests/python/test_verbs.py and test_export.py show what the next ones do with blocks.
    "kvdepot gc DIR": ("gc", "gc --dry-run"),
    "kvdepot gc DIR --apply": ("gc --apply",),
    "kvdepot gc DIR --capacity-gb 200 --dry-run": ("gc --capacity-gb",),
    "kvdepot gc --config /etc/kvdepot.yaml": ("gc --config",),
    "kvdepot ls 3f2a": ("ls", "ls --config"),
    "kvdepot reset 3f2a --socket /run/user/1000/kvdepot/depot-0123456789ab.sock": ("reset --socket",),
    "kvdepot reset 3f2a": ("reset", "reset --socket", "reset --config"),
    "kvdepot rm 3f2a": ("rm", "rm --socket", "rm --config"),
    "kvdepot rm": ("rm",),
    "kvdepot reset": ("reset",),
    "kvdepot prefetch 3f2a": ("prefetch", "prefetch --socket", "prefetch --config"),
    "kvdepot top": ("top", "top --json"),
    "kvdepot top --once": ("top",),
    "kvdepot export": ("export",),
    "kvdepot export 3f2a llama.kvx": ("export",),
    "kvdepot import llama.kvx": ("import",),
    "kvdepot export 3f2a llama.kvx --config /etc/kvdepot.yaml": ("export --config",),
    "kvdepot import llama.kvx --config /etc/kvdepot.yaml --dry-run": ("import --dry-run",),
    "kvdepot import llama.kvx --config /etc/kvdepot.yaml": ("import",),
    "kvdepot stat --json": ("serve",),
    "kvdepot serve": ("serve",),
    "kvdepot serve --config FILE": ("serve",),
    "kvdepot serve --config FILE --take-over": ("serve --take-over",),
    "kvdepot serve --take-over": ("serve --take-over",),
    "kvdepot serve --wait-for-lock": ("serve --wait-for-lock",),
    "kvdepot serve --drain-timeout": ("serve",),
    "kvdepot serve --metrics-port 9400": ("serve --metrics-port",),
    "kvdepot serve --service-port …": ("serve --service-port",),
    "head -c 32 /dev/urandom | base64 > /etc/kvdepot/token && chmod 600 /etc/kvdepot/token": ("serve --service-port",),
    "kvdepot serve --host 10.0.0.1 --service-port 22345 --manage-port 18080 --prealloc-size 64 --token-file "
    "/etc/kvdepot/token": ("serve --service-port",),
    CERTIFICATE.replace("{tmp}", "/etc/kvdepot"): ("serve --tls",),
    "kvdepot serve … --tls-certificate-file /etc/kvdepot/certificate.pem --tls-key-file /etc/kvdepot/key.pem": (
        "serve --tls",
    ),
}

# Documented commands that are a stage of `.ci/run`, or a target of `DRY`.
DOCUMENTED_STAGES = {
    f"make {stage}"
    for stage in (
        "test-dax",
        "test-docs",
        "test-engine",
        "test-layouts",
        "test-lmcache",
        "test-monitoring",
        "test-mooncake",
        "test-nfs-short",
        "test-rdma",
        "test-rust",
        "test-s3",
        "test-sglang",
        "test-slab",
    )
}
DOCUMENTED_DRY = {
    f"make {target}"
    for target in (
        "bench-nfs",
        "portable-wheels",
        "ptx-check",
        'screenshots ARGS="--demo .venv-vllm/bin/python"',
        "screenshots",
        "test",
        "test-full",
        "test-nfs",
        "test-nfs-engine",
        "vllm-previous-env",
        "sglang-surface",
        "vllm-surface",
    )
}

NOT_RUN = {
    "make sglang-old-env": "another 3.5 GB of disk, for tests with --full only",
    "pip install dist/kvdepot-*.whl": "changes a user's environment; make setup installs the same wheel",
    "KVDEPOT_TEST_GPU=1 make test-device": "needs a GPU; make test-device runs on the stand-in",
    'curl http://localhost:8000/v1/completions -H \'Content-Type: application/json\' -d \'{"model": "MODEL", '
    '"prompt": "Confidential: …", "max_tokens": 64, '
    '"kv_transfer_params": {"max_load_tokens": 4096, "kvdepot.no_store": true}}\'': (
        "needs a server; tests/python/engines/test_vllm_asks.py reads what it asks for"
    ),
    "curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' "
    '-d "{\\"model\\": \\"MODEL\\", \\"max_tokens\\": 8, \\"prompt\\": \\"$(seq -s \' \' 800)\\"}"': (
        "needs a server; `make demo` sends long prompts to one, before and after it is restarted"
    ),
    "curl --unix-socket /run/user/1000/kvdepot/depot-0123456789ab.sock.http http://localhost/metrics": (
        "needs a depot at that socket; crates/kvdepot-server/tests/status_door.rs asks one"
    ),
    "ulimit -l unlimited": "needs the right to raise limits",
    "ulimit -l": "changes the shell that runs it",
    "ulimit -n": "changes the shell that runs it",
    "kubectl create secret generic kvdepot-token --from-file=token=/etc/kvdepot/token": "needs a cluster",
    'kubectl create secret generic kvdepot-metrics-token --from-literal=token="$(head -c 32 /dev/urandom | base64)"': (
        "needs a cluster"
    ),
    "kubectl apply -f deploy/kubernetes": "needs a cluster; the manifests are checked",
    "kubectl create secret tls": "needs a cluster",
    "docker build --target depot --tag kvdepot --file deploy/docker/Dockerfile .": "needs Docker; checked",
    "docker build --target vllm --tag vllm-kvdepot --file deploy/docker/Dockerfile .": "needs Docker; checked",
    "docker compose --file deploy/docker/compose.yaml up --build --detach": "needs Docker; checked",
    "docker compose --file deploy/docker/compose.yaml exec depot cat token": "needs Docker; checked",
    "install -m 644 deploy/systemd/kvdepot.service /etc/systemd/system/": "changes the machine; the unit is checked",
    "systemctl daemon-reload && systemctl enable --now kvdepot": "needs systemd; the unit is checked",
}
VLLM_SERVE = "vllm serve MODEL --kv-transfer-config "
VLLM_OFFLOADING = "vllm serve MODEL --kv-offloading-size "
