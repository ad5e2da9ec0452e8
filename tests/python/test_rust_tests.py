"""`make test-rust` runs several test programs at a time, and fails if one of them does."""

import json
import os
import stat

import pytest

from tools.rust_tests import Program, programs, run_all

PASSES = 'echo "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s"'


@pytest.fixture
def make(tmp_path):
    """Writes a program of a package."""

    def written(name, script):
        path = tmp_path / f"{name}-0123456789abcdef"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return Program(path, tmp_path)

    return written


def run(chosen, jobs=2, timeout_s=60):
    said = []
    return run_all(chosen, os.environ, jobs, said.append, timeout_s), "\n".join(said)


def test_a_program_that_passes_is_one_line(make):
    failed, said = run([make("good", f'test "$PWD" = "$CARGO_MANIFEST_DIR" && {PASSES}')])
    assert failed == []
    assert len(said.splitlines()) == 1
    assert "good" in said
    assert "3 passed; 0 failed" in said


def test_a_program_that_fails_shows_its_output_and_stops_no_other(make):
    bad, good = make("bad", "echo panicked at here >&2; exit 101"), make("good", PASSES)
    killed = make("killed", "kill -SEGV $$")
    failed, said = run([bad, killed, good], jobs=1)
    assert failed == [bad, killed]
    assert "panicked at here" in said
    assert "ended with status 101" in said
    assert "ended with status -11" in said
    assert "3 passed" in said


def test_a_program_that_hangs_is_killed(make):
    hangs = make("hangs", "echo begins; sleep 60 & sleep 60")
    # A busy machine may take longer to begin it.
    for timeout_s in (0.5, 5, 50):
        failed, said = run([hangs], timeout_s=timeout_s)
        assert failed == [hangs]
        assert "killed after" in said
        if "begins" in said:
            return
    pytest.fail(said)


def test_programs_run_at_the_same_time(make, tmp_path):
    meet = "touch {mine}; until [ -e {other} ]; do sleep 0.01; done"
    files = [tmp_path / "a", tmp_path / "b"]
    chosen = [make("one", meet.format(mine=files[0], other=files[1]))]
    chosen.append(make("two", meet.format(mine=files[1], other=files[0])))
    assert run(chosen)[0] == []


def test_cargo_s_messages_name_the_programs(tmp_path):
    small, large = tmp_path / "small-1", tmp_path / "large-2"
    small.write_text("1")
    large.write_text("12")
    manifest = str(tmp_path / "Cargo.toml")
    messages = [
        {"reason": "compiler-artifact", "executable": str(small), "manifest_path": manifest, "profile": {"test": True}},
        {"reason": "compiler-artifact", "executable": str(large), "manifest_path": manifest, "profile": {"test": True}},
        {"reason": "compiler-artifact", "executable": None, "manifest_path": manifest, "profile": {"test": True}},
        {"reason": "compiler-artifact", "executable": "/bin/x", "manifest_path": manifest, "profile": {"test": False}},
        {"reason": "build-finished", "success": True},
    ]
    found = programs("\n".join(json.dumps(message) for message in messages))
    assert [program.path for program in found] == [large, small]
    assert found[0].package == tmp_path
