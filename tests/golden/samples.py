"""One event of each kind with every field set, and one with none, as journals hold them.

Run as a program it writes the golden file of the current version. It adds and
never changes: a line that would differ needs a step of the version, with a new file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import remit.core.events as module
from remit.core.cause import Cause, CauseKind
from remit.core.events import EVENTS_VERSION, Event, encode_event
from remit.core.outcome import Outcome

__all__ = ["FOLDER", "golden_file", "samples"]

FOLDER = Path(__file__).parent

_CAUSE = Cause(CauseKind.USER_INTERRUPT, "turn_1", "ann", "cli", "req_1", 1_700_000_000_000, "enough")
_VALUES: dict[Any, Any] = {
    str: "text",
    float: 1700000000.25,
    int: 7,
    bool: True,
    tuple[str, ...]: ("one", "two"),
    dict[str, Any]: {"event": "x", "seq": 1},
    tuple[Mapping[str, Any], ...]: ({"mode": "write", "path": "a.py"},),
    float | None: 1700000009.5,
    int | None: 3,
    Cause | None: _CAUSE,
    Outcome: Outcome.CANCELLED,
}
_CHANGED = {("before_cancel", bool): False}
"""Values that are not the default where the one above is."""


def golden_file(version: int) -> Path:
    """Return where the samples of a version are."""
    return FOLDER / f"events_{version}.jsonl"


def _kinds() -> Iterator[type[Event]]:
    for name in sorted(module.__all__):
        found = getattr(module, name)
        if isinstance(found, type) and issubclass(found, Event) and found is not Event:
            yield found


def samples() -> dict[str, dict[str, Any]]:
    """Return what is written for each sample; mapping of a label to kind, ids and data."""
    found: dict[str, dict[str, Any]] = {}
    for cls in _kinds():
        hints = get_type_hints(cls)
        common = {"node_id": "node_1", "turn_id": "turn_1", "at": 1700000000.125}
        own = {
            each.name: _CHANGED.get((each.name, hints[each.name]), _VALUES[hints[each.name]])
            for each in dataclasses.fields(cls)
            if each.name not in common
        }
        for label, values in (("bare", common), ("full", {**common, **own})):
            event = cls(**values)
            data = json.loads(json.dumps(encode_event(event)))
            found[f"{cls.kind} {label}"] = {
                "kind": cls.kind,
                "node_id": event.node_id,
                "turn_id": event.turn_id,
                "terminal": cls.terminal,
                "data": data,
            }
    return found


def main() -> int:
    """Add what is missing in the golden file of this version; return 1 if something in it has changed."""
    path = golden_file(EVENTS_VERSION)
    old = {} if not path.exists() else {line["label"]: line for line in map(json.loads, path.read_text().splitlines())}
    new = {label: {"label": label, **sample} for label, sample in samples().items()}
    for label, line in old.items():
        mine = new.get(label)
        added = mine is not None and label.endswith(" full") and line["data"].items() <= mine["data"].items()
        if mine != line and not added:
            sys.stderr.write(f"{label} is written otherwise now: raise EVENTS_VERSION and add a step to migrations\n")
            return 1
    path.write_text("".join(f"{json.dumps(new[label], sort_keys=True)}\n" for label in sorted(new)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
