"""P14: everything documented has an entry in `table.py`, and every entry there belongs to something documented."""

import re
import shlex

import pytest
from collect import ROOT, click_options, click_parts, documented_commands, make_targets, program_options
from table import (
    DOCUMENTED_DRY,
    DOCUMENTED_STAGES,
    DRY,
    NOT_RUN,
    PROGRAMS,
    RUNS,
    SMALL_FORMS,
    STAGES,
    VLLM_OFFLOADING,
    VLLM_SERVE,
    Run,
    Serve,
)

WIRE = {"bench-wire", "bench-wire-faults"}


def argv(run):
    return shlex.split(run.command)


def lines_of_kvdepot():
    """Every kvdepot command line that is run, including those behind `make bench`."""
    for run in RUNS:
        words = argv(run)
        if words[0] == "kvdepot":
            yield words
        if words[:2] == ["make", "bench"]:
            yield ["kvdepot", "bench", "store", *shlex.split(words[2].removeprefix("ARGS="))]
        if isinstance(run, Serve):
            yield shlex.split(run.stat)


def targets_of_runs():
    return {words[1] for words in map(argv, RUNS) if words[0] == "make"}


def test_names_are_distinct():
    names = [run.name for run in RUNS]
    assert len(names) == len(set(names))


def test_every_documented_command_has_an_entry():
    documented = {one for one in documented_commands() if not one.startswith((VLLM_SERVE, VLLM_OFFLOADING))}
    entries = set(SMALL_FORMS) | set(NOT_RUN) | DOCUMENTED_STAGES | DOCUMENTED_DRY
    assert documented - entries == set(), "documented, and CI runs no small form: add them to tests/docs/table.py"
    assert entries - documented == set(), "documented no more: remove them from tests/docs/table.py"


def test_small_forms_are_runs():
    missing = {name for names in SMALL_FORMS.values() for name in names} - {run.name for run in RUNS}
    assert missing == set()


def test_every_option_of_kvdepot_is_run():
    run = {part for words in lines_of_kvdepot() for part in click_parts(words)}
    assert click_options() - run == set(), "no run uses them: add them to a run of tests/docs/table.py"


def test_runs_use_options_that_exist():
    for words in lines_of_kvdepot():
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        known = {part.split(" ")[-1] for part in click_parts(words)} | {"--version"}
        assert set(options) <= known, words


def test_every_target_of_make_is_run_or_has_a_reason():
    targets = set(make_targets())
    entries = targets_of_runs() | STAGES | set(DRY)
    assert targets - entries == set(), "CI does not run them: add them to tests/docs/table.py"
    assert entries - targets == set(), "`make help` does not list them"


def test_stages_are_those_of_ci():
    script = (ROOT / ".ci" / "run").read_text().replace("\\\n", " ")
    lanes = re.findall(r"^lane ([^&\n]+)", script, re.MULTILINE)
    assert sorted(" ".join(lanes).split()) == sorted(STAGES)


@pytest.mark.parametrize("target", PROGRAMS)
def test_every_option_of_a_program_behind_make_is_run(target):
    venv = ".venv-infinistore" if target in WIRE else ".venv"
    options = program_options(ROOT / venv / "bin" / "python", list(PROGRAMS[target]))
    lines = [words for words in map(argv, RUNS) if words[:2] == ["make", target]]
    run = {word for words in lines for word in shlex.split(words[2].removeprefix("ARGS=")) if word.startswith("--")}
    assert options - run == set(), "no run uses them: add them to a run of tests/docs/table.py"
    assert run - options == set(), "the program does not know them"


def test_a_run_checks_something():
    assert all(run.says or run.json for run in RUNS if isinstance(run, Run))
