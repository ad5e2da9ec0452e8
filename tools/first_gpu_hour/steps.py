"""The steps of the first hour on a GPU, in order: what each does, what it needs, and what it shows."""

import sys
from dataclasses import dataclass, field

from tools.first_gpu_hour.machine import DOCTOR

PYTHON = sys.executable
MODULE = "tools.first_gpu_hour"
BENCH = (PYTHON, "-m", "kvdepot", "bench", "copy", "--device", "0", "--json")
ENGINE = (PYTHON, "-m", "benches.engine", "--device", "cuda", "--size", "1b", "--json")
PING = (PYTHON, "-m", f"{MODULE}.ping", "--device", "0")
POOL_GIB = 64
SMALL_POOL_GIB = 0.0625
MINUTE_S = 60


@dataclass(frozen=True)
class Step:
    """A command, and what its outcome shows.

    Attributes:
        needs: needs for ``Machine.lacks``. ``device`` may be the stand-in's, ``gpu`` may not.
        manual: instructions for a person, instead of a command.
        fresh_cache: whether earlier measurements are dropped first.
    """

    name: str
    tells: str
    command: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    timeout_s: int = 10 * MINUTE_S
    manual: str = ""
    fresh_cache: bool = False


def steps(*, smoke: bool) -> list[Step]:
    """Returns all steps; with ``smoke`` in sizes whose figures mean nothing."""
    bench = (*BENCH, "--smoke") if smoke else BENCH
    pings = ("--count", "50") if smoke else ("--count", "5000")
    pool = ("--pool-gib", str(SMALL_POOL_GIB if smoke else POOL_GIB))
    return [
        *_machine(),
        *_conformance(),
        *[
            Step(f"bench {run}", "rates, and with the others their spread", bench, ("device",), fresh_cache=True)
            for run in (1, 2, 3)
        ],
        *[
            Step(
                f"bench with {blocks} blocks",
                "how many blocks of threads the kernel needs",
                (*bench, "--kernel-blocks", str(blocks)),
                ("device",),
                fresh_cache=True,
            )
            for blocks in (8, 16, 32, 64)
        ],
        Step("measurements", "what auto measured, and what it takes", DOCTOR, ("device",)),
        Step("ping", "what a copy of 4 KiB and an allocation take alone", (*PING, *pings), ("device",)),
        Step(
            "ping beside copies",
            "how long an engine's own copies wait behind loads and dumps (p99 against the step before)",
            (*PING, *pings, "--beside", *bench),
            ("device",),
        ),
        Step(
            "ping beside registration",
            "how long other processes' calls wait while two ranks register a pool (p99, max)",
            (*PING, *pings, "--beside", PYTHON, "-m", f"{MODULE}.attach", "--device", "0", *pool),
            ("device",),
        ),
        *_adapter(),
        *_engine(),
    ]


def _machine() -> list[Step]:
    smi = ("nvidia-smi",)
    return [
        Step("nvidia-smi", "driver, devices, who uses them", smi, (*smi, "gpu")),
        Step("topology", "which adapters and processors are near", (*smi, "topo", "-m"), (*smi, "gpu")),
        Step("memory", "the window on the bus (BAR1), and what is free", (*smi, "-q", "-d", "MEMORY"), (*smi, "gpu")),
        Step("kernel", "the kernel's version", ("uname", "-r")),
        Step(
            "huge pages",
            "whether the kernel joins the pool's pages",
            ("cat", "/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        ),
        Step("doctor", "what is found, allowed and trusted", DOCTOR),
    ]


def _conformance() -> list[Step]:
    tests = ("-p", "kvdepot-copy", "--lib", "cuda::tests::schedules::")
    one_by_one = ("--", "on_a_device", "--nocapture", "--test-threads=1")
    real = {"KVDEPOT_TEST_GPU": "1"}
    sanitizer = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER"
    return [
        Step(
            "schedules",
            "every engine under the suite that the stand-in runs; batch on a driver of 12.8/12.9 and on one of 13",
            ("cargo", "test", "--locked", *tests, *one_by_one),
            ("gpu", "cargo"),
            real,
            30 * MINUTE_S,
        ),
        Step(
            "schedules under compute-sanitizer",
            "wild accesses of the kernel",
            ("cargo", "test", "--locked", *tests, *one_by_one),
            ("gpu", "cargo", "compute-sanitizer"),
            {**real, sanitizer: "compute-sanitizer --error-exitcode 9"},
            30 * MINUTE_S,
        ),
        Step(
            "stores on a device",
            "the whole client with an engine's streams and events",
            ("make", "test-device"),
            ("gpu", "make"),
            real,
            20 * MINUTE_S,
        ),
    ]


def _adapter() -> list[Step]:
    return [
        Step("adapters", "ports, limits, firmware", ("ibv_devinfo", "-v"), ("adapter", "ibv_devinfo")),
        Step("modules", "whether a peer memory module is loaded", ("lsmod",), ("adapter",)),
    ]


def _engine() -> list[Step]:
    return [
        Step(
            "vLLM",
            "time to the first token: cold, hits in the pool and on disk, and vLLM's own offloading; same output",
            (*ENGINE, "--rounds", "2", "--repeats", "4", "--tokens", "8192", "32768"),
            ("gpu", "vllm"),
            timeout_s=30 * MINUTE_S,
        ),
        Step(
            "vLLM under nsys",
            "time to the first token of a hit, time of a token beside loads (p99)",
            needs=("gpu", "nsys"),
            manual="vllm serve with the connector under `nsys profile -t cuda,nvtx,osrt`; kill the depot meanwhile",
        ),
        Step(
            "vLLM's sleep",
            "that no copy meets the sleep, and that nothing of the memory from before stays registered",
            needs=("gpu",),
            manual="vllm serve --enable-sleep-mode: sleep with a dump under way, wake up, compare the answers of hits",
        ),
        Step(
            "vLLM by an adapter",
            "whether the KV cache fits the window on the bus, with the default allocator and expandable segments",
            needs=("gpu", "adapter"),
            manual="vllm serve with use_gdr: true, once with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; then "
            "sleep, wake up, and look at the self-test in the log",
        ),
    ]
