"""The unit files for systemd are valid for the command line, have what a depot needs, and give it nothing else."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.cli.serve import command

UNITS = sorted((Path(__file__).resolve().parents[2] / "deploy" / "systemd").glob("*.service"))
HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "UMask": "0077",
    "ProtectSystem": "full",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "ProtectHostname": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectControlGroups": "yes",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "RestrictNamespaces": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
}
HIDES_DEVICES_OR_PROCESSES = (
    "PrivateDevices",
    "DeviceAllow",
    "DevicePolicy",
    "ProtectClock",
    "ProtectProc",
    "ProcSubset",
)
OFFLINE_SINCE = 250
"""The version of systemd that judges a file without a manager."""
EXPOSURE_MAX = 40
"""Tenths, by systemd's own judgement, where 100 is a service without any limit."""


def service(unit):
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(unit.read_text("utf-8").replace("\\\n", " "))
    return parser["Service"]


def serve_options(unit):
    words = service(unit)["ExecStart"].replace("/etc/kvdepot/token", __file__)  # the token's file must exist
    program, verb, *options = shlex.split(words)
    assert (Path(program).name, verb) == ("kvdepot", "serve")
    return command.make_context("serve", options).params


every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)


def test_there_is_a_unit_for_depots_and_one_for_pool_servers():
    assert [unit.name for unit in UNITS] == ["kvdepot-pool.service", "kvdepot.service"]


@every_unit
def test_a_unit_starts_with_options_that_exist_and_may_write_what_it_drains(unit):
    params = serve_options(unit)
    drain_timeout_s = params["drain_timeout"] or 30
    # The rest is for closing connections and tiers.
    assert drain_timeout_s + 10 <= int(service(unit)["TimeoutStopSec"])
    assert params["wait_for_lock"]


@every_unit
def test_the_manager_hears_the_depot(unit):
    assert service(unit)["Type"] == "notify"
    # A depot that handed its pool over ends with status 0, and must not be restarted.
    assert service(unit)["Restart"] == "on-failure"


def test_the_manager_stores_what_is_to_outlive_a_depot():
    (unit,) = (unit for unit in UNITS if unit.stem == "kvdepot")
    assert int(service(unit)["FileDescriptorStoreMax"]) > 2


@every_unit
def test_a_unit_has_no_privilege_and_keeps_what_tiers_and_leases_need(unit):
    keys = service(unit)
    assert keys["User"] != "root"
    assert {key: keys.get(key) for key in HARDENING} == HARDENING
    assert not set(HIDES_DEVICES_OR_PROCESSES) & set(keys), (
        "a DAX device, a raw disk or the end of an engine is not seen"
    )


def test_a_pool_server_has_a_token_and_a_socket_of_its_own():
    """Beside a depot of the same machine, with the socket in the directory that systemd makes for it."""
    (unit,) = (unit for unit in UNITS if unit.stem == "kvdepot-pool")
    params = serve_options(unit)
    assert params["token_file"] == __file__
    assert (params["service_port"], params["manage_port"]) == (22345, 18080)
    socket = Path(params["socket"])
    assert socket.parent == Path("/run", service(unit)["RuntimeDirectory"])
    directories = {service(unit)["RuntimeDirectory"] for unit in UNITS}
    assert len(directories) == len(UNITS)


@every_unit
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_accepts_a_unit_and_its_limits(unit, tmp_path):
    """``verify`` wants a program that exists, and says what it does not know without failing."""
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text("utf-8").replace("/usr/local/bin/kvdepot", sys.executable))
    checks = [["verify", "--man=no"]]
    version = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.split()[1]) >= OFFLINE_SINCE:
        checks.append(["security", "--offline=true", f"--threshold={EXPOSURE_MAX}", "--no-pager"])
    for words in checks:
        done = subprocess.run(["systemd-analyze", *words, copy], capture_output=True, text=True, check=False)
        said = [line for line in done.stderr.splitlines() if unit.name in line]
        assert (done.returncode, said) == (0, []), done.stdout + done.stderr


def test_the_documentation_names_the_socket_that_engines_can_reach():
    """The default one is in /tmp, and PrivateTmp gives the unit another /tmp than engines have."""
    (unit,) = (unit for unit in UNITS if unit.stem == "kvdepot")
    assert service(unit)["PrivateTmp"] == "yes"
    text = (UNITS[0].parents[2] / "docs" / "deploy.md").read_text("utf-8")
    (section,) = re.findall(r"### Under systemd\n(.*?)\n### ", text, re.DOTALL)
    assert f"socket: /run/{service(unit)['RuntimeDirectory']}/depot.sock\n" in section
