"""The folder that work is about; apart from the rest, since whoever only looks at it needs nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from remit.core.errors import InvalidArgument

__all__ = ["resolve_workspace"]


def resolve_workspace(workspace: str | Path) -> str:
    """Return the absolute, real path of a workspace.

    Raises:
        InvalidArgument: it is not a folder that can be read and written.
    """
    path = Path(workspace).expanduser()
    if not path.exists():
        raise InvalidArgument(f"workspace {str(workspace)!r} does not exist; make the folder first")
    if not path.is_dir():
        raise InvalidArgument(f"workspace {str(workspace)!r} is not a folder")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"workspace {str(workspace)!r} cannot be read and written by this user; "
            "its journal lives in it: change its rights or choose another"
        )
    return str(path.resolve())
