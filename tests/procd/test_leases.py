"""Leases: who vouches for a scope, and until when."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from remit.processes.jobs import boot_id
from remit.processes.lease_file import LeaseFile
from remit.processes.leases import MAX_TTL_S, Leases


def test_a_renewal_moves_the_end_forward_and_never_back() -> None:
    leases = Leases()
    assert leases.renew("w", now=0, holder="c", ttl_s=30).until == 30
    assert leases.renew("w", now=10, ttl_s=5).until == 30
    lease = leases.renew("w", now=20, ttl_s=30)
    assert (lease.until, lease.holder) == (50, "c")


def test_an_end_is_reported_once() -> None:
    leases = Leases()
    leases.renew("w", now=0, ttl_s=30)
    leases.renew("v", now=0, ttl_s=10)
    assert leases.next_end() == 10
    assert leases.expire(9.9) == ()
    assert [lease.scope for lease in leases.expire(31)] == ["v", "w"]
    assert leases.expire(1_000) == ()
    assert leases.release("w") is None


def test_leases_outlive_the_daemon_and_not_the_boot(tmp_path: Path) -> None:
    path = tmp_path / "leases.json"
    leases = Leases()
    leases.renew("w", now=100, holder="c", ttl_s=30)
    LeaseFile(path, leases).save()
    assert path.stat().st_mode & 0o777 == 0o600
    later = Leases()
    LeaseFile(path, later).load(110)
    assert later.all() == leases.all()
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    other = Leases()
    LeaseFile(path, other).load(110)
    assert other.all() == ()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1}', '{"boot": "BOOT", "leases": 3}', '{"boot": "BOOT"}'])
def test_garbage_counts_as_no_lease(tmp_path: Path, text: str) -> None:
    path = tmp_path / "leases.json"
    path.write_text(text.replace("BOOT", boot_id()))
    leases = Leases()
    LeaseFile(path, leases).load(0)
    assert leases.all() == ()


def test_one_lease_that_does_not_hold_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "leases.json"
    leases = Leases()
    leases.renew("w", now=0, ttl_s=30)
    LeaseFile(path, leases).save()
    data = json.loads(path.read_text())
    bad = [
        {"scope": "x"},
        7,
        {"scope": "y", "holder": "", "until": "soon"},
        {"scope": "z", "holder": "", "until": 1e99},
    ]
    path.write_text(json.dumps({**data, "leases": [*bad, *data["leases"]]}))
    found = Leases()
    LeaseFile(path, found).load(0)
    assert {lease.scope: lease.until for lease in found.all()} == {"w": 30, "z": MAX_TTL_S}


def test_a_full_disk_keeps_what_was_written_before(tmp_path: Path) -> None:
    leases = Leases()
    leases.renew("w", now=0, ttl_s=30)
    file = LeaseFile(tmp_path / "missing" / "leases.json", leases)
    file.save()
    assert list(tmp_path.iterdir()) == []
