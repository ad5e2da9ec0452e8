"""The unit file for systemd is valid for the command line, and has what the depot needs."""

import configparser
import shlex
from pathlib import Path

import pytest

from kvdepot.cli.serve import command

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "kvdepot.service"


@pytest.fixture
def service():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(UNIT.read_text("utf-8"))
    return parser["Service"]


def test_the_depot_is_started_with_options_that_exist_and_may_write_what_it_drains(service):
    program, verb, *options = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb) == ("kvdepot", "serve")
    params = command.make_context("serve", options).params
    drain_timeout_s = params["drain_timeout"] or 30
    # The rest is for closing connections and tiers.
    assert drain_timeout_s + 10 <= int(service["TimeoutStopSec"])
    assert params["wait_for_lock"]


def test_the_manager_hears_the_depot_and_stores_what_is_to_outlive_it(service):
    assert service["Type"] == "notify"
    assert int(service["FileDescriptorStoreMax"]) > 2
    # A depot that handed its pool over ends with status 0, and must not be restarted.
    assert service["Restart"] == "on-failure"
