"""The folder of a run: who may use it, and what it holds."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import traceback
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from omegaconf import OmegaConf

from rlhf.config.run import RunSection
from rlhf.errors import ConfigError
from rlhf.report.summary import shown_path
from rlhf.training_state import complete

CONFIG_FILE = "config.yaml"
MARK = ".rlhf-run"
"""Marks a folder that a run made, which another run may therefore be told to delete. Locked, with the number of the
process inside, while a run uses the folder."""
BEGUN = ".rlhf-begun"
"""Marks the folder of a run whose roles were ready: what it holds may be worth keeping."""


class Content(Enum):
    """What may happen to what an earlier run left."""

    delete_if_told = "delete_if_told"
    """It is deleted under run.overwrite=true; otherwise the folder is refused."""
    delete_if_nothing_saved = "delete_if_nothing_saved"
    """It is deleted, too, where no checkpoint can be continued from (resume=auto)."""
    keep = "keep"
    """The run goes on with it."""


@dataclass
class RunFolder:
    """A folder that belongs to one process until `release`."""

    path: Path
    lock: TextIO

    @staticmethod
    def claim(settings: RunSection, config: Any, content: Content = Content.delete_if_told) -> RunFolder:
        """Take the folder, empty it of an earlier run unless that goes on (`check` says when emptying is allowed),
        write the configuration.

        Raises:
            ConfigError: see `check`; or it can't be written.
        """
        path = check(settings, content)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = RunFolder(path, (path / MARK).open("a+", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"run.dir={path} can't be written: {error.strerror}; choose another run.dir") from error
        try:
            folder._lock(settings)
            check_content(path, settings, content)  # again: another run may have come and gone
            if content is not Content.keep:
                folder._empty()
            OmegaConf.save(OmegaConf.create(config), path / CONFIG_FILE)
        except BaseException:
            folder.release()
            raise
        return folder

    def begun(self) -> None:
        """From here on the folder is only deleted with `run.overwrite=true`."""
        (self.path / BEGUN).touch()

    def release(self) -> None:
        self.lock.close()

    def _lock(self, settings: RunSection) -> None:
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(self.path, self.lock) from None
        except OSError as error:
            print(f"warning: run.dir={settings.dir} can't be locked ({error.strerror}); use it once", file=sys.stderr)
        self.lock.truncate(0)
        self.lock.write(f"{os.getpid()}\n")
        self.lock.flush()

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            if entry.name == MARK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def check(settings: RunSection, content: Content = Content.delete_if_told) -> Path:
    """The run's folder, absolute, since processes that Ray started elsewhere write there, too.

    Raises:
        ConfigError: a run is using it, an earlier run is in it, or something no run made, or it is a file.
    """
    folder = Path(settings.dir).expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir={folder} is a file; choose another run.name or run.dir")
    if not folder.exists() or not any(folder.iterdir()):
        return folder
    if not (folder / MARK).exists():
        raise ConfigError(f"run.dir={folder} holds something that no run made; choose another run.name or run.dir")
    with (folder / MARK).open(encoding="utf-8") as lock:
        if _locked(lock):
            raise in_use(folder, lock)
    check_content(folder, settings, content)
    return folder


def check_content(folder: Path, settings: RunSection, content: Content) -> None:
    """Refuse to delete what an earlier run left, unless told to."""
    nothing_saved = content is Content.delete_if_nothing_saved and {path.name for path in complete(folder)} <= {"best"}
    if content is Content.keep or nothing_saved:
        return
    if (folder / BEGUN).exists() and not settings.overwrite:
        raise ConfigError(f"run.dir={folder} holds an earlier run; choose another run.name, or use run.overwrite=true")


def in_use(folder: Path, lock: TextIO) -> ConfigError:
    """The refusal of a folder that another process holds."""
    lock.seek(0)
    holder = lock.read().strip() or "another one"
    return ConfigError(f"run.dir={folder} is in use by process {holder}; choose another run.name or run.dir")


def keep_traceback(error: Exception, folder: Path) -> str:
    """Write down where an error came from; the person sees one line. Returns where it is, for that line."""
    path = folder / "traceback.txt"
    try:
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError as full:  # must not hide the error itself
        return f"the traceback could not be written: {full.strerror}"
    return f"traceback in {shown_path(path)}"


def _locked(lock: TextIO) -> bool:
    """Whether another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks; `claim` warns of it
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False
