"""Several machines: hosts in network namespaces of this one, with a cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from company import Company
from process_cases import resume

ROOT = Path(__file__).parents[2]
HOSTS = {"poptorch-a": "10.77.0.1", "poptorch-b": "10.77.0.2"}


def ip(*arguments, check=True):
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)


def remove_hosts():
    for name in HOSTS:
        ip("netns", "delete", name, check=False)


@pytest.fixture
def hosts():
    """Two hosts that only see each other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("making network namespaces needs iproute2 and root")
    remove_hosts()
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", "cable-a", "netns", "poptorch-a", "type", "veth", "peer", "cable-b", "netns", "poptorch-b")
        for (name, address), end in zip(HOSTS.items(), "ab", strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"cable-{end}")
            ip("-n", name, "link", "set", f"cable-{end}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        remove_hosts()
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield HOSTS
    remove_hosts()


def start(host, end, *program, timeout="20"):
    """Start one process for each host by `poprun` on one of them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "POPTORCH_TIMEOUT": timeout}
    environment |= {"GLOO_SOCKET_IFNAME": f"cable-{end}", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "popdist.poprun", "--num-instances=2", f"--host={','.join(HOSTS.values())}", *program]
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *call],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
def test_two_hosts_train_one_model(hosts, tmp_path):
    program = [str(ROOT / "examples" / "resume.py"), "--folder", str(tmp_path / "shared")]
    started = [start(host, end, *program) for host, end in zip(hosts, "ab", strict=True)]
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    for (_, text), (name, address) in zip(said, zip("ab", reversed(HOSTS.values()), strict=True), strict=True):
        assert f"to be started on {address}: " in text, name
    company = Company(2, POPTORCH_TIMEOUT="20")
    loss, _ = company.run(resume, tmp_path / "alone")
    company.close()
    assert said[0][0] == f"started 1 time(s), loss {loss:.9f}\n"


@pytest.mark.only_long
def test_a_cable_that_breaks_ends_the_program_on_both_hosts(hosts, tmp_path):
    """The agents of torchrun wait longer for each other, which is their own affair."""
    program = tmp_path / "train.py"
    program.write_text(
        f"import sys, time\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from process_cases import train_for_long\n"
        "train_for_long()\n"
    )
    started = [start(host, end, str(program), timeout="5") for host, end in zip(hosts, "ab", strict=True)]
    try:
        for process in started:
            assert process.stdout.readline() == "training\n"
        ip("-n", "poptorch-a", "link", "set", "cable-a", "down")
        begun = time.monotonic()
        for process in started:
            assert process.stdout.readline().startswith("ProcessError: process ")
        assert time.monotonic() - begun < 60
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
