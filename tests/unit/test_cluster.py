"""What is said where Ray can't be started."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from rlhf.backends.calls import last_words
from rlhf.backends.cluster import remedy


def test_a_home_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own words are tested where they arise: it makes this folder while it starts."""
    from ray._private.authentication.authentication_token_setup import generate_and_save_token

    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(OSError) as caught:
        generate_and_save_token()
    assert remedy(caught.value) == "it keeps a token in the home folder: set HOME to a folder you can write to"
    monkeypatch.setenv("RAY_TMPDIR", "/big")
    full = OSError(errno.ENOSPC, "No space left on device", "/big/ray/session")
    for error in (full, RuntimeError("the node died")):
        assert remedy(RuntimeError("The current node timed out during startup.")).startswith("the machine may be busy")
        assert remedy(error) == "its files go to /big, choose a shorter or roomier path with RAY_TMPDIR"


def test_last_words_leave_out_what_ray_says_about_memory() -> None:
    died = "The actor died. It was killed by signal 9. If the process was killed by the kernel OOM killer (verifiable"
    assert last_words(RuntimeError(f"{died} by checking dmesg), consider more.")) == (
        "The actor died. It was killed by signal 9."
    )
    long = last_words(RuntimeError("word " * 100))
    assert long.startswith("... word ") and len(long) <= 304
