import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remit.core.errors import ProcessProtocolError
from remit.processes.frames import (
    MAX_FRAME_BYTES,
    VERSION,
    FrameReader,
    connect,
    encode,
    peer_uid,
    receive,
    refusal,
    send,
)


@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "id"]), st.text() | st.integers()), max_size=5),
    st.integers(1, 40),
)
def test_messages_come_whole_however_the_bytes_are_cut(bodies: list[dict[str, object]], size: int) -> None:
    data = b"".join(encode("op", **body) for body in bodies)
    reader = FrameReader()
    found = [message for at in range(0, len(data), size) for message in reader.feed(data[at : at + size])]
    assert found == [{"v": VERSION, "op": "op", **body} for body in bodies]
    assert not reader.is_midway


def test_a_blocking_reader_gets_messages_then_the_end() -> None:
    left, right = socket.socketpair()
    with left, right:
        send(left, "hello", text="é")
        send(left, "bye")
        left.shutdown(socket.SHUT_WR)
        assert receive(right) == {"v": VERSION, "op": "hello", "text": "é"}
        assert receive(right) == {"v": VERSION, "op": "bye"}
        assert receive(right) is None


@pytest.mark.parametrize("cut", [1, 3, 4, 6])
def test_a_message_that_is_cut_short_is_an_error(cut: int) -> None:
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(encode("hello")[:cut])
        with pytest.raises(ProcessProtocolError, match="within a message"):
            receive(right)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 3) + b"\xff\xff\xff",
        struct.pack(">I", 0),
        struct.pack(">I", 100_000) + b"[" * 100_000,
    ],
    ids=["too long", "http", "no object", "no text", "empty", "too deep"],
)
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(ProcessProtocolError):
        FrameReader().feed(data)


def test_a_message_above_the_limit_is_not_sent() -> None:
    with pytest.raises(ProcessProtocolError, match="use a file"):
        encode("write", data="x" * MAX_FRAME_BYTES)


@pytest.mark.requirement("C12")
def test_an_operation_or_version_that_is_not_known_is_unsupported() -> None:
    known = frozenset({"stop"})
    assert refusal({"v": VERSION, "op": "stop"}, known) is None
    for message in ({"v": VERSION, "op": "explode", "id": 3}, {"v": 99, "op": "stop", "id": 3}, {"id": 3}):
        answer = refusal(message, known)
        assert answer is not None
        assert (answer["id"], answer["kind"]) == (3, "unsupported")


@pytest.mark.parametrize("depth", [1, 60])
def test_a_socket_is_reached_at_a_path_of_any_length(depth: int, tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["deep"] * depth)
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(folder, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/s")
        os.close(directory)
        listener.listen()
        with connect(folder / "s", timeout_s=5) as client:
            assert peer_uid(client) == os.getuid()


def test_a_socket_that_is_not_there_is_an_error_and_leaves_no_descriptor(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        connect(tmp_path / "s")
