"""A file that is written beside its place and takes it in one step, wherever links are put meanwhile.

The path was resolved before, so none of its names is a link. Between that and the
last step another program may put one there; so the folders are opened one below
the other, following no link, and everything is done relative to the descriptor of
the last one (the way of `openat2` with `RESOLVE_NO_SYMLINKS`, which Python does
not offer). What is written can land in the folder that was checked and nowhere else.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from remit.core.errors import InvalidArgument
from remit.locks import PathNotClaimed

__all__ = ["AtomicFile"]

_MAX_NAME_BYTES = 255
"""What every common file system takes, in bytes (some count letters, and take more)."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class AtomicFile:
    """One file under way; enter it, write to `file`, then `put_in_place`.

    Left without that, by an error or a cancel, the old file is as it was and
    nothing is left beside it but folders that were missing.

    Args:
        root: the workspace's real folder.
        place: where the file belongs: a real path below the root.
        mode: `w`, `wb`, or `x`, `xb` for a file that must not exist.
        encoding: for the text modes.

    Raises:
        LookupError: no such encoding.
    """

    def __init__(self, root: Path, place: Path, mode: str, encoding: str) -> None:
        self._root = root
        self._place = place
        self._must_be_new = "x" in mode
        self._is_binary = "b" in mode
        self._encoding = codecs.lookup(encoding).name
        self._part = _part_name(place.name)
        self._folder = -1
        self._raw: IO[bytes]
        self._is_placed = False
        self.file: IO[Any]
        """What is written to."""

    def __enter__(self) -> AtomicFile:
        """Make missing folders and the file beside its place.

        Raises:
            FileExistsError: it must not exist and does.
            IsADirectoryError: it is a folder.
            InvalidArgument: it is something else that is no file.
            PathNotClaimed: a link has been put on the way since the path was checked.
        """
        if self._place == self._root:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._place))
        self._folder = _open_folder(self._root, self._place.parent)
        try:
            self._check_target()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._raw = os.fdopen(os.open(self._part, flags, 0o666, dir_fd=self._folder), "wb")
        except BaseException:
            os.close(self._folder)
            raise
        self.file = (
            self._raw if self._is_binary else io.TextIOWrapper(self._raw, encoding=self._encoding, write_through=True)
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close everything, and take the part away that did not come to its place."""
        try:
            with suppress(ValueError, OSError):  # closed by the caller, or a disk that is full: told already
                self.file.close()
            if not self._is_placed:
                os.unlink(self._part, dir_fd=self._folder)
        finally:
            os.close(self._folder)

    def seal(self) -> None:
        """Bring the content to the disk, with the permissions of the file that it replaces."""
        self.file.flush()
        old = self._status()
        if old is not None:
            os.fchmod(self._raw.fileno(), stat.S_IMODE(old.st_mode))
        os.fsync(self._raw.fileno())

    def put_in_place(self) -> None:
        """Let the file take its place in one step.

        Raises:
            FileExistsError: it must not exist and has come to.
            PathNotClaimed: the folder is not where it was any more.
        """
        try:
            moved = not os.path.samestat(os.fstat(self._folder), os.stat(self._place.parent, follow_symlinks=False))
        except FileNotFoundError:
            moved = True
        if moved:
            raise PathNotClaimed(f"the folder of {str(self._place)!r} was moved or replaced while the file was written")
        if self._must_be_new:
            # Fails if it has come to exist, unlike a rename; the part goes away at the exit.
            os.link(self._part, self._place.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        else:
            os.replace(self._part, self._place.name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._is_placed = True

    def _check_target(self) -> None:
        there = self._status()
        if there is None:
            return
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self._place))
        if self._must_be_new:
            raise FileExistsError(f"{str(self._place)!r} exists")
        if not stat.S_ISREG(there.st_mode) and not stat.S_ISLNK(there.st_mode):
            # To replace a pipe or a device by a file is never what was meant.
            raise InvalidArgument(f"{self._place.name!r} is no regular file; open it yourself to write to it")

    def _status(self) -> os.stat_result | None:
        try:
            return os.stat(self._place.name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return None


def _part_name(name: str) -> str:
    """Return a name beside the file's that nobody has, and that is no longer than names may be."""
    end = f".{secrets.token_hex(6)}.part"
    # Whole letters are left out: some file systems take no half ones.
    while len(os.fsencode(name)) > _MAX_NAME_BYTES - len(end) - 1:
        name = name[:-1]
    return f".{name}{end}"


def _open_folder(root: Path, folder: Path) -> int:
    """Return a descriptor of a folder below the root; what is missing on the way is made."""
    at = os.open(root, _FOLDER)
    for name in folder.relative_to(root).parts:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=at)
            below = os.open(name, _FOLDER, dir_fd=at)
        except OSError as error:
            if _is_link(name, at):
                told = f"{name!r} on the way to {str(folder)!r} has become a link since the path was checked"
                raise PathNotClaimed(f"{told}; nothing was written") from error
            raise
        finally:
            os.close(at)
        at = below
    return at


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False
