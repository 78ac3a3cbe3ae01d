"""Only what this user has signed, on this machine, counts as ours."""

from __future__ import annotations

import os
import stat

import pytest

from poptorch.store import trust


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    trust.warn_once.cache_clear()
    return tmp_path


def test_only_the_signed_content_is_ours():
    checksum = trust.sign(b"code")
    assert trust.is_ours(b"code", checksum)
    assert not trust.is_ours(b"cod3", checksum)
    for wrong in (None, "", "0" * 64, 5, "ä"):
        assert not trust.is_ours(b"code", wrong)


def test_another_key_or_another_machine_is_not_ours(monkeypatch, tmp_path):
    checksum = trust.sign(b"code")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(trust, "_machine", lambda: b"another")
        assert not trust.is_ours(b"code", checksum)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "of somebody else"))
    assert not trust.is_ours(b"code", checksum)


@pytest.mark.parametrize("mask", [0o000, 0o077])
def test_the_key_is_private_whatever_the_mask_is(mask):
    before = os.umask(mask)
    try:
        trust.sign(b"code")
    finally:
        os.umask(before)
    assert stat.S_IMODE(trust.key_file().stat().st_mode) == 0o600
    assert stat.S_IMODE(trust.key_file().parent.stat().st_mode) == 0o700
    assert os.listdir(trust.key_file().parent) == [trust.key_file().name]


@pytest.mark.parametrize("spoil", [lambda key: key.chmod(0o644), lambda key: key.write_bytes(b"short")])
def test_a_key_that_others_could_have_read_or_made_is_replaced(spoil):
    checksum = trust.sign(b"code")
    spoil(trust.key_file())
    assert not trust.is_ours(b"code", checksum)
    assert trust.is_ours(b"code", trust.sign(b"code"))
    assert stat.S_IMODE(trust.key_file().stat().st_mode) == 0o600


def test_a_link_in_place_of_the_key_is_not_followed(tmp_path):
    trust.sign(b"code")
    real = tmp_path / "real"
    os.rename(trust.key_file(), real)
    trust.key_file().symlink_to(real)
    assert trust.sign(b"code") is None


def test_without_a_place_for_a_key_nothing_is_signed(home, monkeypatch, caplog):
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    assert trust.sign(b"code") is None
    assert trust.sign(b"code") is None
    assert not trust.is_ours(b"code", "0" * 64)
