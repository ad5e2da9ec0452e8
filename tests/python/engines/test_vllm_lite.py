"""Lite mode and recording, without an engine: what is looked up, stored, counted, logged and written."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
from engine_parts import BLOCK

from kvdepot import block_hash
from kvdepot.config import load_config
from kvdepot.config.environment import log_bound, trace_limits
from kvdepot.engines.vllm import recording
from kvdepot.engines.vllm.groups import Geometry, Group
from kvdepot.engines.vllm.lite import COUNT_S, SAY_S, LiteScheduler, LiteWorker, unit_bytes
from kvdepot.engines.vllm.meta import StepMetadata
from kvdepot.engines.vllm.options import ConnectorOptions
from kvdepot.engines.vllm.stats import DepotStats
from kvdepot.errors import ConfigError
from kvdepot.traces.advice import GIB, Measured, Size, advise
from kvdepot.traces.files import read_traces

WAIT_MS = 60_000


class MLASpec:
    """Named like vLLM's cache of latent attention."""


ONE_GROUP = Geometry((Group(0, ("a",), None, BLOCK, 1, 0),), BLOCK, BLOCK)


def hashes(chain, count):
    return [f"{chain}/{index}".encode().ljust(32, b".") for index in range(count)]


def request(name, chain, prompt, answer=0, arrival_s=0.0):
    return SimpleNamespace(
        request_id=name,
        num_prompt_tokens=prompt,
        num_tokens=prompt + answer,
        block_hashes=hashes(chain, (prompt + answer) // BLOCK),
        arrival_time=arrival_s,
    )


def step(**tokens):
    """Returns a step that computes tokens of requests, from (name=(computed, new))."""
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=at) for name, (at, _) in tokens.items()],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={name: new for name, (_, new) in tokens.items()},
        total_num_scheduled_tokens=sum(new for _, new in tokens.values()),
    )


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def lite(geometry=ONE_GROUP, unit=1024.0, pool_gb=1.0, **keys):
    options = ConnectorOptions(
        load_config({"use_lite": True, "pool_gb": pool_gb, "eviction": "lru", "use_layerwise": True, **keys})
    )
    clock = Clock()
    side = LiteScheduler(options, geometry, unit, clock=clock)
    return side, clock


def serve(side, one, local=0, answer=0):
    """Runs a request from lookup to end; its prompt is computed in one step, and each token of its answer in one."""
    assert side.match(one, local) == (0, False)
    side.allocated(one, None, 0)
    prompt = one.num_prompt_tokens
    assert side.build_step(step(**{one.request_id: (local, prompt - local)})) == StepMetadata()
    for token in range(answer):
        side.build_step(step(**{one.request_id: (prompt + token, 1)}))
    assert side._meter.settle(WAIT_MS)
    side.finished(one.request_id)


def counted(side):
    assert side._meter.settle(WAIT_MS)
    side._count()
    return side.stats.data


def test_a_prompt_that_comes_again_would_hit_all_but_its_last_token():
    side, _ = lite()
    serve(side, request("a", "x", 10 * BLOCK))
    assert "lite_hit_tokens" not in counted(side)
    serve(side, request("b", "x", 10 * BLOCK))
    data = counted(side)
    assert data["lite_hit_tokens"] == dict.fromkeys(("quarter", "half", "pool", "double", "fourfold"), 9 * BLOCK)
    assert data["lite_ceiling_tokens"] == 9 * BLOCK
    assert data["lite_asked_tokens"] == 2 * 9 * BLOCK
    assert side.measured().prompt_tokens == 20 * BLOCK


def test_what_the_engine_has_itself_is_not_asked_for():
    side, _ = lite()
    serve(side, request("a", "x", 10 * BLOCK + 1))
    serve(side, request("b", "x", 10 * BLOCK + 1), local=6 * BLOCK)
    data = counted(side)
    assert data["lite_asked_tokens"] == (10 + 4) * BLOCK
    assert data["lite_hit_tokens"]["pool"] == 4 * BLOCK
    assert side.measured().own_tokens == 6 * BLOCK


def test_answers_are_stored_block_by_block():
    side, _ = lite()
    serve(side, request("a", "x", 2 * BLOCK, answer=2 * BLOCK), answer=BLOCK + 3)
    serve(side, request("b", "x", 4 * BLOCK + 1))
    assert counted(side)["lite_hit_tokens"]["pool"] == 3 * BLOCK


def test_a_small_pool_hits_less_than_a_large_one():
    # A quarter of the pool holds 10 blocks, all of it 40.
    side, _ = lite(unit=1.0 * (1 << 20), pool_gb=40 / 1024)
    for turn in range(3):
        for chain in range(3):
            serve(side, request(f"{turn}/{chain}", f"{chain}", 10 * BLOCK + 1))
    hits = counted(side)["lite_hit_tokens"]
    assert hits.get("quarter", 0) == 0
    assert hits["pool"] == hits["fourfold"] == 6 * 10 * BLOCK == side.stats.data["lite_ceiling_tokens"]
    small, *_, large = side.measured().sizes
    assert (small.bytes, small.full, large.full) == (10 << 20, True, False)


def test_short_requests_are_neither_asked_nor_stored():
    side, _ = lite(persist_token_threshold=5 * BLOCK)
    for name in ("a", "b"):
        serve(side, request(name, "x", 4 * BLOCK))
    assert "lite_asked_tokens" not in counted(side)


def test_a_request_that_is_preempted_asks_once():
    side, _ = lite()
    one = request("a", "x", 4 * BLOCK + 1)
    side.match(one, 0)
    side.allocated(one, None, 0)
    side.match(one, 2 * BLOCK)
    side.allocated(one, None, 0)
    assert counted(side)["lite_asked_tokens"] == 4 * BLOCK
    assert side.measured().prompt_tokens == 4 * BLOCK + 1


def test_hits_of_several_groups_end_where_all_can():
    two = Geometry((Group(0, ("a",), None, BLOCK, 1, 0), Group(1, ("b",), None, 2 * BLOCK, 2, 0)), BLOCK, 2 * BLOCK)
    side, _ = lite(two)
    for name in ("a", "b"):
        serve(side, request(name, "x", 7 * BLOCK))
    assert counted(side)["lite_hit_tokens"]["pool"] == 6 * BLOCK
    config = SimpleNamespace(num_blocks=10, kv_cache_tensors=[SimpleNamespace(size=1000)])
    assert unit_bytes(two, config, 2) == (2 + 1) * 100 * 2
    latent = Geometry((Group(0, ("a",), MLASpec(), BLOCK, 1, 0),), BLOCK, BLOCK)
    assert unit_bytes(latent, config, 8) == 100


def test_metrics_follow_while_a_request_runs_and_the_log_now_and_then(caplog):
    side, clock = lite()
    serve(side, request("a", "x", 5 * BLOCK))
    running = request("b", "x", 5 * BLOCK + 1)
    side.match(running, 0)
    side.allocated(running, None, 0)
    assert side._meter.settle(WAIT_MS)
    side.stats.reset()
    side.build_step(step(b=(0, 1)))
    assert side.stats.is_empty()
    clock.now_s += COUNT_S
    side.build_step(step(b=(1, 1)))
    assert side.stats.data["lite_hit_tokens"]["pool"] == 5 * BLOCK
    with caplog.at_level(logging.INFO):
        side.build_step(step(b=(2, 1)))
        assert not caplog.records
        clock.now_s += SAY_S
        side.build_step(step(b=(3, 1)))
        said = len(caplog.records)
        assert said == 1 + 5 + 1
        clock.now_s += SAY_S
        side.build_step(step(b=(4, 1)))
        assert len(caplog.records) == said, "nothing has come since"


def test_a_model_that_cannot_be_stored_is_served_and_said(caplog):
    with caplog.at_level(logging.INFO):
        side, _ = lite(Geometry((), 1, 1, "it is odd"))
    assert "use_lite counts nothing: it is odd" in caplog.text
    one = request("a", "x", 5 * BLOCK)
    assert side.match(one, 0) == (0, False)
    side.allocated(one, None, 0)
    assert side.build_step(step(a=(0, 80))) == StepMetadata()
    side.finished("a")
    side.close()


def test_a_worker_moves_nothing():
    worker = LiteWorker()
    worker.register(None, None, {})
    assert worker.finished_loads() == worker.failed_loads() == worker.failed_pages() == set()
    assert worker.report() is None


def sized(*tokens, full=True):
    return [Size(GIB << index, count, full) for index, count in enumerate(tokens)]


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (Measured(1000, 0, 900, sized(900)), "too little was seen"),
        (Measured(1_000_000, 0, 10_000, sized(9_000)), "does not pay"),
        (
            Measured(1_000_000, 0, 400_000, sized(100_000, 370_000, 399_000)),
            "a depot of 2 GiB, which saves computing 37.0%",
        ),
        (Measured(1_000_000, 0, 400_000, sized(100_000, 200_000)), "more than 2 GiB"),
        (Measured(1_000_000, 0, 400_000, []), "up to 40.0%"),
    ],
)
def test_the_recommendation_is_the_smallest_size_that_nearly_does(measured, said):
    assert said in advise(measured)[-1]


def test_the_advice_says_what_was_seen():
    lines = advise(Measured(1_000_000, 250_000, 400_000, sized(370_000, full=False)))
    assert "vLLM's own cache had 25.0%, an endless depot would give 40.0% more" in lines[0]
    assert lines[1] == "a depot of 1 GiB would give 37.0% more, and is not full yet"


# Recording.


def recorded(tmp_path, **keys):
    config = load_config({"enable_record_traces": True, "trace_directory": str(tmp_path / "traces"), **keys})
    return recording.record(config, ONE_GROUP)


def written(made):
    """Ends a recording. An engine would not wait as long for a slow disk."""
    assert made._recorder.close(WAIT_MS)
    made.close()


def test_requests_are_recorded_as_they_end(tmp_path):
    made = recorded(tmp_path)
    begin_s = made._begin_s
    made.ended(request("a", "x", 3 * BLOCK + 5, answer=7, arrival_s=begin_s + 1.5))
    made.ended(request("b", "x", 2 * BLOCK, answer=3 * BLOCK, arrival_s=begin_s - 1))
    written(made)
    files = sorted((tmp_path / "traces").iterdir())
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    names = [block_hash(one).hex() for one in hashes("x", 3)]
    assert lines == [
        {"timestamp": 1500, "input_length": 53, "output_length": 7, "block_tokens": 16, "hash_ids": names},
        {"timestamp": 0, "input_length": 32, "output_length": 48, "block_tokens": 16, "hash_ids": names[:2]},
    ]
    assert all(len(name) == 32 for name in names), "as long as the documents of UCM say"
    assert files[0].stat().st_mode & 0o777 == 0o600
    trace, _ = read_traces(map(str, files))
    assert trace.counts() == (2, 5, 3)


def test_what_became_of_requests_is_counted():
    class Recorder:
        now = (0, 0, 0)

        def counters(self):
            return self.now

    stats, recorder = DepotStats(), Recorder()
    made = recording.Recording(recorder, BLOCK, 0.0)
    recorder.now = (5, 1, 0)
    made.count(stats)
    recorder.now = (6, 1, 2)
    made.count(stats)
    assert stats.data["traced_requests"] == {"written": 6, "dropped": 1, "failed": 2}


def test_a_directory_that_cannot_be_used_costs_the_trace_and_not_the_engine(tmp_path, caplog):
    (tmp_path / "traces").write_text("a file")
    assert recorded(tmp_path) is None
    assert "requests are not recorded" in caplog.text
    config = load_config({"enable_record_traces": True, "trace_directory": str(tmp_path / "other")})
    assert recording.record(config, Geometry((), 1, 1, "it is odd")) is None
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("environ", "limits"),
    [
        ({}, (64 << 20, 10)),
        ({"UCM_LOG_MAX_SIZE": "5", "UCM_LOG_MAX_FILES": "3"}, (5 << 20, 3)),
        ({"UCM_LOG_MAX_SIZE": "5242880"}, (5 << 20, 10)),
        ({"UCM_LOG_MAX_SIZE": "0"}, (1 << 62, 10)),
        ({"UCM_LOG_MAX_FILES": "0"}, (64 << 20, 1)),
    ],
)
def test_limits_of_files_come_from_the_environment_first(environ, limits):
    assert trace_limits(64, 10, environ) == limits


@pytest.mark.parametrize("value", ["-1", "5MB", "1.5", "1001", "9" * 40, "9" * 5000])
def test_limits_that_are_none_are_said(value):
    with pytest.raises(ConfigError, match="UCM_LOG_MAX_FILES"):
        trace_limits(64, 10, {"UCM_LOG_MAX_FILES": value})


@pytest.mark.parametrize("size", ["", "0", "1", "1048575", "1048576", "104857600", "-1", "1e6", "9" * 20])
@pytest.mark.parametrize("files", ["", "0", "7", "1000", "1001", "x"])
def test_recordings_and_logs_understand_the_variables_alike(size, files):
    environ = {"UCM_LOG_MAX_SIZE": size, "UCM_LOG_MAX_FILES": files}

    def asked(what):
        try:
            return what()
        except ConfigError as error:
            return str(error)

    def of_logs():
        size_mb = log_bound("log_max_size_mb", 64, environ)[0]
        return size_mb << 20 or 1 << 62, log_bound("log_max_files", 10, environ)[0]

    assert asked(lambda: trace_limits(64, 10, environ)) == asked(of_logs)


PANIC = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
"""What a panic of the core is in Python."""


class Broken:
    """A native object whose calls fail, except those in ``good``."""

    def __init__(self, *good, error=RuntimeError):
        self.good, self.error = good, error
        self.calls = 0

    def __getattr__(self, name):
        if name in self.good:
            return lambda *_, **__: (0, 0, 0)

        def fail(*_, **__):
            self.calls += 1
            raise self.error(f"no {name}")

        return fail


@pytest.mark.parametrize("error", [RuntimeError, PANIC])
def test_a_recorder_that_fails_is_switched_off_and_ends_no_engine(error, caplog):
    recorder, stats = Broken("counters", error=error), DepotStats()
    made = recording.Recording(recorder, BLOCK, 0.0)
    for name in ("a", "b", "c"):
        made.ended(request(name, "x", 3 * BLOCK))
    made.count(stats)
    made.count(stats)
    assert stats.data["traced_requests"] == {"failed": 3}
    assert recorder.calls == 1
    made.close()
    assert caplog.text.count("requests are not recorded from now on: no record") == 1


def test_a_recorder_that_cannot_be_asked_is_switched_off(caplog):
    recorder, stats = Broken(), DepotStats()
    made = recording.Recording(recorder, BLOCK, 0.0)
    made.count(stats)
    made.count(stats)
    made.close()
    assert caplog.text.count("requests are not recorded from now on: no counters") == 1


def test_a_wish_to_end_the_process_is_no_failure():
    side, _ = lite()
    side._meter = Broken(error=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        serve(side, request("a", "x", 5 * BLOCK))
    with pytest.raises(KeyboardInterrupt):
        recording.Recording(side._meter, BLOCK, 0.0).ended(request("a", "x", BLOCK))


@pytest.mark.parametrize("error", [RuntimeError, PANIC])
@pytest.mark.parametrize("good", [(), ("look_up",), ("look_up", "store")])
def test_a_meter_that_fails_is_switched_off_and_ends_no_engine(good, error, caplog):
    side, _ = lite()
    side._meter = meter = Broken(*good, error=error)
    for name in ("a", "b"):
        one = request(name, "x", 5 * BLOCK)
        assert side.match(one, 0) == (0, False)
        side.allocated(one, None, 0)
        assert side.build_step(step(**{name: (0, 5 * BLOCK)})) == StepMetadata()
        side.finished(name)
    side.close()
    assert meter.calls == 1
    assert side.stats.data == {"lite_dropped_calls": 1}
    assert caplog.text.count("use_lite counts nothing from now on: no ") == 1


def test_files_go_by_the_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("UCM_LOG_MAX_FILES", "2")
    for _ in range(4):
        written(recorded(tmp_path))
    assert len(os.listdir(tmp_path / "traces")) == 2
