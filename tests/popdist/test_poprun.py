"""What `poprun` starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import popdist
import poptorch
from company import Company
from popdist.launch import LaunchPlan, default_threads
from popdist.poprun import main
from process_cases import resume

ROOT = Path(__file__).parents[2]


def test_replicas_are_shared_out_and_torchrun_starts_the_instances():
    plan = LaunchPlan(("train.py", "--lr", "1"), instances=2, replicas=6, ipus_per_replica=4, restarts=3)
    assert plan.environment == {
        "POPDIST_NUM_TOTAL_REPLICAS": "6",
        "POPDIST_NUM_LOCAL_REPLICAS": "3",
        "POPDIST_NUM_IPUS_PER_REPLICA": "4",
        "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    }
    start = [sys.executable, "-m", "torch.distributed.run"]
    rest = ["--nproc-per-node=2", "--max-restarts=3", "--role=instance", "--standalone", "train.py", "--lr", "1"]
    assert plan.command(0) == start + rest


def test_each_host_has_a_call_of_its_own():
    plan = LaunchPlan(("python", "train.py"), instances=4, replicas=4, hosts=("a", "b"), shown=0, prefixed=True)
    assert plan.command(1, "/logs")[3:] == [
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--role=instance",
        "--nnodes=2",
        "--node-rank=1",
        "--rdzv-backend=static",
        "--master-addr=a",
        "--master-port=29400",
        "--local-ranks-filter=0",
        "--tee=3",
        "--log-dir=/logs",
        "--no-python",
        "python",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instances": 2, "replicas": 3}, "3 replicas .* cannot be shared out evenly to 2 instances"),
        ({"instances": 3, "replicas": 3, "hosts": ("a", "b")}, "3 instances .* to 2 hosts"),
        ({"instances": 0}, "--num-instances is 0"),
        ({"program": ()}, "no program"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(poptorch.Error, match=message):
        LaunchPlan(**{"program": ("x.py",), **changes})


def test_instances_share_the_cores_unless_the_user_decides(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert default_threads({}, 2) == {"OMP_NUM_THREADS": "4"}
    assert default_threads({"OMP_NUM_THREADS": "3"}, 2) == {}


def test_flags_without_effect_are_accepted_with_a_note_and_the_call_is_printed_first():
    given = ["--num-instances", "2", "--mpi-local-args=-x A", "--vipu-partition", "p", "--dry-run", "train.py", "-v"]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == 0
    assert "note: --mpi-local-args has no effect" in result.output
    assert "note: --vipu-partition has no effect" in result.output
    assert "POPDIST_NUM_TOTAL_REPLICAS=2" in result.output
    assert result.output.rstrip().endswith("--standalone train.py -v")


def test_wrong_numbers_and_unknown_hosts_are_errors_of_the_command_line():
    result = CliRunner().invoke(main, ["--num-instances", "2", "--num-replicas", "3", "train.py"])
    assert (result.exit_code, "cannot be shared out" in result.output) == (2, True)
    result = CliRunner().invoke(main, ["--host", "nowhere.example", "train.py"])
    assert (result.exit_code, "is none of nowhere.example" in result.output) == (2, True)


def test_an_instance_of_torchrun_knows_its_replicas(monkeypatch):
    variables = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", **LaunchPlan(("x.py",), 4, 8).environment}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (popdist.getInstanceIndex(), popdist.getNumInstances(), popdist.getLocalInstanceIndex()) == (2, 4, 0)
    assert (popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas()) == (2, 8)


def documented():
    """The commands of docs/distributed.md."""
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    return [block.strip() for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]


def start(command, folder):
    """Run a command of the page in a folder that has the examples too."""
    (folder / "examples").symlink_to(ROOT / "examples")
    program, *arguments = shlex.split(command)
    module = {"poprun": "popdist.poprun", "torchrun": "torch.distributed.run"}[program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "POPTORCH_TIMEOUT": "20"}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


@pytest.mark.only_long
def test_torchrun_alone_starts_the_program_too(tmp_path):
    (command,) = [command for command in documented() if command.startswith("torchrun")]
    assert "started 1 time(s), loss " in start(command, tmp_path).stdout
    assert (tmp_path / "others" / "latest" / ".metadata").exists()


@pytest.mark.parametrize("command", [command for command in documented() if command.startswith("poprun")])
def test_the_documented_flags_exist(command):
    result = CliRunner().invoke(main, ["--dry-run", *shlex.split(command)[1:]])
    assert result.exit_code == 0, result.output
    assert f"--nproc-per-node={4 if '--host' in command else 2}" in result.output


@pytest.mark.long
def test_a_killed_program_is_started_again_and_ends_with_the_loss_of_an_undisturbed_one(tmp_path):
    (command,) = [command for command in documented() if "--dies-at" in command]
    run = start(command, tmp_path)
    company = Company(2, POPTORCH_TIMEOUT="20")
    loss, _ = company.run(resume, tmp_path / "whole")
    company.close()
    assert f"[instance0]:started 2 time(s), loss {loss:.9f}\n" in run.stdout
