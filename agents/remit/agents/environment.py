"""Code environments: where a caller's code comes from, so that a host runs exactly that.

A host is bound to one environment by its first run. The key covers import path,
working directory, environment variables and the state of every user module that
the caller has loaded, so that a host never serves another caller's code. What
the caller loads later is caught in the host: it looks at the files of the
modules that it has loaded before each batch (`stale_modules`).
"""

from __future__ import annotations

import hashlib
import importlib
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from remit.core.errors import RemitError
from remit.core.messages import dumps

__all__ = ["CodeEnvironment", "EnvironmentFailed", "capture", "stale_modules"]

# Different in every shell or terminal, and none of it meant for programs.
_VOLATILE = {
    "_", "SHLVL", "PWD", "OLDPWD", "COLUMNS", "LINES", "WINDOWID", "SSH_CLIENT", "SSH_CONNECTION",
    "SSH_TTY", "TERM_SESSION_ID", "TMUX", "TMUX_PANE", "STY", "XDG_SESSION_ID", "PS1",
    "PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START",
}  # fmt: skip


class EnvironmentFailed(RemitError):
    """A host cannot take on a caller's code environment."""

    code = "environment_failed"


@dataclass(frozen=True, slots=True)
class CodeEnvironment:
    """Where code comes from."""

    sys_path: tuple[str, ...]
    """Import path entries of the caller that are not part of the installation."""
    cwd: str
    """Working directory of the caller."""
    environ: tuple[tuple[str, str], ...]
    """Environment variables of the caller, sorted; not Ray's own, nothing of one terminal."""
    modules: tuple[tuple[str, str, int, int], ...]
    """(name, file, mtime in ns, size in bytes) of the user modules that are loaded."""

    @property
    def key(self) -> str:
        """Return a text that is equal for equal environments."""
        return hashlib.sha256(dumps(self.fields())).hexdigest()[:16]

    def fields(self) -> tuple[object, ...]:
        """Return the fields in order."""
        return (self.sys_path, self.cwd, self.environ, self.modules)

    def apply(self) -> None:
        """Turn this process into one where the caller's code is at home.

        Raises:
            EnvironmentFailed: the working directory is not there.
        """
        try:
            os.chdir(self.cwd)
        except OSError as error:
            raise EnvironmentFailed(
                f"the working directory {self.cwd!r} cannot be entered on this host: {error}"
            ) from error
        own = {name: value for name, value in os.environ.items() if _is_ours(name)}
        os.environ.clear()
        os.environ.update(dict(self.environ))
        os.environ.update(own)
        base = [entry for entry in sys.path if entry and _is_installed(entry)]
        sys.path[:] = [*self.sys_path, *(e for e in base if e not in self.sys_path)]
        importlib.invalidate_caches()


def _is_ours(name: str) -> bool:
    return name.startswith(("RAY_", "__RAY"))


@lru_cache(maxsize=4096)
def _is_installed(path: str) -> bool:
    """Tell whether a path belongs to Python or to installed packages."""
    real = os.path.realpath(path)
    return any(real == root or real.startswith(root + os.sep) for root in _installation())


@lru_cache(maxsize=1)
def _installation() -> tuple[str, ...]:
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    roots.add(site.getusersitepackages())
    # Our own package, wherever it is imported from, is the same in every process.
    roots.update(_own_roots())
    zipped = {entry for entry in sys.path if entry.endswith(".zip")}
    return tuple(os.path.realpath(root) for root in roots | zipped if root)


def _own_roots() -> set[str]:
    import remit

    return {str(Path(entry).parent) for entry in remit.__path__ if "site-packages" not in entry}


_seen: dict[str, tuple[str, str, int, int]] = {}
_counted = 0


def capture() -> CodeEnvironment:
    """Return the environment of this process.

    The state of a module's file is taken when the module is first seen here: that
    is the version which this process has loaded.
    """
    _note_modules()
    paths = [entry or os.getcwd() for entry in sys.path]
    return CodeEnvironment(
        sys_path=tuple(dict.fromkeys(p for p in paths if not _is_installed(p))),
        cwd=os.getcwd(),
        environ=tuple(
            sorted((name, value) for name, value in os.environ.items() if name not in _VOLATILE and not _is_ours(name))
        ),
        modules=tuple(sorted(_seen.values())),
    )


def _note_modules() -> None:
    global _counted  # the modules seen so far belong to the process, like sys.modules
    if len(sys.modules) == _counted:
        return
    _counted = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name not in _seen and name != "__main__":
            entry = _module_entry(name, getattr(module, "__file__", None))
            if entry is not None:
                _seen[name] = entry


def _module_entry(name: str, file: str | None) -> tuple[str, str, int, int] | None:
    if not file or _is_installed(file):
        return None
    try:
        status = os.stat(file)
    except OSError:
        return None
    return (name, file, status.st_mtime_ns, status.st_size)


def stale_modules() -> list[str]:
    """Return user modules of this process whose files have changed since they were loaded."""
    _note_modules()
    return [name for name, entry in _seen.items() if _module_entry(name, entry[1]) not in (entry, None)]
