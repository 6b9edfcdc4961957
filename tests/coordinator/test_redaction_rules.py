"""Rules of a workspace for what is hidden: before the journal, the state and every view."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from remit.agents import RunContext, agent
from remit.coordinator.redaction import Redaction, load_redaction
from remit.core.cause import Cause, CauseKind
from remit.core.errors import InvalidArgument, RunFailed
from remit.core.events import RunEnded
from remit.journal import SqliteJournal, SqliteJournalReader
from remit.testing.inprocess import open_inprocess
from tests.coordinator.decider_world import World


def write_rules(workspace: Path, rules: Any) -> None:
    (workspace / ".remit").mkdir(exist_ok=True)
    (workspace / ".remit" / "redact.json").write_text(rules if isinstance(rules, str) else json.dumps(rules))


RULES = {"keys": ["customer_number"], "patterns": [r"\bEMP-[0-9]{6}\b", "caf\u00e9"]}


def test_rules_hide_keys_and_patterns_in_every_text_of_an_event(tmp_path: Path) -> None:
    write_rules(tmp_path, RULES)
    rules = load_redaction(tmp_path)
    assert rules is not None
    cause = Cause(CauseKind.USER_INTERRUPT, "run_1", reason="EMP-123456 asked")
    event = RunEnded(
        node_id="run_1",
        turn_id="turn_1",
        at=1.0,
        cause=cause,
        error="no EMP-123456 here",
        traceback="x EMP-654321 y",
        preview=json.dumps({"customerNumber": 77, "who": "EMP-123456", "caf\u00e9": ["caf\u00e9"], "n": 3}),
    )
    clean = rules.clean(event)
    assert (clean.error, clean.traceback) == ("no [redacted] here", "x [redacted] y")
    assert clean.cause is not None
    assert clean.cause.reason == "[redacted] asked"
    assert json.loads(clean.preview) == {
        "customerNumber": "[redacted]",
        "who": "[redacted]",
        "[redacted]": ["[redacted]"],
        "n": 3,
    }
    plain = RunEnded(node_id="run_EMP-123456", turn_id="turn_1", at=1.0, error="all fine", preview="{cut")
    assert rules.clean(plain) is plain


def test_the_state_is_the_fold_of_what_was_hidden() -> None:
    rules = load_redaction_of(RULES)
    world = World(redaction=rules)
    turn = world.open_turn(name="for EMP-123456")
    run = world.run(turn, preview='{"customer_number": 5}')
    world.end(run, "raised", error="EMP-123456 is away")
    world.cancel(turn, reason="EMP-123456 said so")
    assert world.node(turn).name == "for [redacted]"
    assert json.loads(world.node(run).arguments) == {"customer_number": "[redacted]"}
    assert world.node(run).error == "[redacted] is away"
    assert world.cause(turn).reason == "[redacted] said so"
    assert not [event for event in world.events if "123456" in repr(event)]


def load_redaction_of(rules: dict[str, list[str]]) -> Redaction:
    import re

    return Redaction(frozenset(rules["keys"]), tuple(re.compile(each) for each in rules["patterns"]))


@agent
async def tell(ctx: RunContext, who: str) -> str:
    ctx.partial({"customer_number": who})
    raise ValueError(f"{who} is unknown")


@pytest.mark.requirement("B42")
def test_nothing_of_it_reaches_the_file(tmp_path: Path) -> None:
    write_rules(tmp_path, RULES)
    path = tmp_path / "journal.db"

    async def main(system: Any) -> None:
        async with system.coordinator() as coordinator, coordinator.turn("ask EMP-123456") as turn:
            run = await turn.delegate(tell, who="EMP-123456")
            with pytest.raises(RunFailed, match=r"\[redacted\] is unknown"):
                await run.result()

    with open_inprocess(tmp_path, journal=SqliteJournal.open(path)) as system:
        asyncio.run(main(system))
    with closing(SqliteJournalReader.open(path)) as reader:
        texts = [json.dumps(dict(record.data)) for record in reader.read()]
    assert not [text for text in texts if "EMP-123456" in text]
    assert [text for text in texts if "[redacted]" in text]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ("{", "cannot read the rules of redaction"),
        ([], "must be a mapping of keys and patterns, and has a list"),
        ({"key": []}, "and has key"),
        ({"keys": "x"}, "keys in .* must be a list of texts"),
        ({"patterns": [""]}, "must be a list of texts that are not empty"),
        ({"patterns": ["("]}, r"the pattern '\(' in .* is no regular expression"),
        ({"patterns": ["x*"]}, "fits an empty text"),
    ],
)
def test_rules_that_do_not_hold_stop_the_coordinator_before_it_writes(tmp_path: Path, rules: Any, text: str) -> None:
    write_rules(tmp_path, rules)
    with pytest.raises(InvalidArgument, match=text), open_inprocess(tmp_path):
        pass


def test_a_workspace_without_rules_has_none(tmp_path: Path) -> None:
    assert load_redaction(tmp_path) is None
