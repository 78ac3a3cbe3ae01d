"""Where processes agree on who has which IPU."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile

import pytest

import poptorch
from poptorch.ipu import acquire


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder for temporary files; nobody chose another for the locks."""
    monkeypatch.delenv("POPTORCH_IPU_LOCKS")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def own(temporary):
    """The folder that this user's processes share."""
    return temporary / f"poptorch-ipus-{os.geteuid()}"


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_the_folder_is_private_whatever_the_mask_is(own, umask):
    before = os.umask(umask)
    try:
        acquire(1).release()
    finally:
        os.umask(before)
    assert mode_of(own) == 0o700


def test_a_folder_that_others_could_use_is_closed_to_them(own):
    own.mkdir()
    own.chmod(0o777)
    acquire(1).release()
    assert mode_of(own) == 0o700


def test_a_link_in_place_of_the_folder_is_refused(own, temporary):
    (temporary / "elsewhere").mkdir()
    own.symlink_to(temporary / "elsewhere")
    with pytest.raises(poptorch.Error, match=r"poptorch-ipus-.*it is a link(.|\n)*POPTORCH_IPU_LOCKS"):
        acquire(1)
    assert list((temporary / "elsewhere").iterdir()) == []


def test_a_link_to_nowhere_is_refused(own, temporary):
    own.symlink_to(temporary / "nowhere")
    with pytest.raises(poptorch.Error, match="it is a link"):
        acquire(1)
    assert not (temporary / "nowhere").exists()


def test_a_file_in_place_of_the_folder_is_refused(own):
    own.touch()
    with pytest.raises(poptorch.Error, match="it is no folder"):
        acquire(1)


def test_the_folder_of_somebody_else_is_refused(temporary, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    (temporary / f"poptorch-ipus-{me + 1}").mkdir(mode=0o777)
    with pytest.raises(poptorch.Error, match=f"it belongs to the user with the number {me}"):
        acquire(1)


def test_a_link_in_place_of_a_lock_is_refused_and_its_target_left_alone(own, temporary):
    treasure = temporary / "treasure"
    treasure.write_text("gold")
    own.mkdir(mode=0o700)
    (own / "ipu1.lock").symlink_to(treasure)
    with pytest.raises(poptorch.Error, match=r"cannot be used(.|\n)*POPTORCH_IPU_LOCKS"):
        acquire(2)
    assert treasure.read_text() == "gold"
    acquire(1).release()  # the failed attempt has given back the one that it had


def test_a_user_without_a_name_has_ipus(own, monkeypatch):
    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    acquire(1).release()
    assert own.is_dir()


def test_a_machine_without_a_folder_for_temporary_files_names_the_variable(temporary, monkeypatch):
    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(poptorch.Error, match=r"No usable temporary(.|\n)*POPTORCH_IPU_LOCKS"):
        acquire(1)


def test_a_chosen_folder_may_be_a_link_and_shared(temporary, monkeypatch):
    (temporary / "shared").mkdir()
    (temporary / "shared").chmod(0o777)
    (temporary / "link").symlink_to(temporary / "shared")
    monkeypatch.setenv("POPTORCH_IPU_LOCKS", str(temporary / "link"))
    acquire(1).release()
    assert mode_of(temporary / "shared") == 0o777


def test_a_forked_process_does_not_give_back_what_its_parent_has(temporary, monkeypatch):
    monkeypatch.setenv("POPTORCH_NUM_IPUS", "1")
    device = acquire(1)
    child = os.fork()
    if child == 0:
        try:
            device.release()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(poptorch.Error, match="other models use too many"):
        acquire(1)
    device.release()
    acquire(1).release()
