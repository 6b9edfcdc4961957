"""Connections that are kept between calls: used again, replaced when broken, never shared."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from remit.processes.lines import Lines


class Echo:
    """A daemon that answers each byte with the number of the connection; counts connections."""

    def __init__(self, path: Path) -> None:
        self.accepted: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            if not connection.recv(1, socket.MSG_PEEK):
                connection.close()
                return
            self.accepted.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection, len(self.accepted)))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with connection:
            try:
                while connection.recv(1):
                    connection.sendall(bytes([number]))
            except OSError:
                return

    def drop(self) -> None:
        """Break every connection, as the daemon's death does."""
        for connection in self.accepted:
            connection.shutdown(socket.SHUT_RDWR)

    def close(self, path: Path) -> None:
        """End all threads."""
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(path))
        for thread in self._threads:
            thread.join()
        self._listener.close()


def talk(connection: socket.socket) -> int:
    connection.sendall(b"?")
    answer = connection.recv(1)
    if not answer:
        raise ConnectionResetError("closed")
    return answer[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sock"


@pytest.fixture
def echo(path: Path) -> Iterator[Echo]:
    echo = Echo(path)
    yield echo
    echo.close(path)


@pytest.fixture
def lines(path: Path, echo: Echo) -> Iterator[Lines]:
    lines = Lines(path, connect_s=30.0, kept=1)
    yield lines
    lines.close()


def test_a_kept_connection_is_used_again(lines: Lines) -> None:
    assert [lines.call(talk) for _ in range(3)] == [1, 1, 1]


def test_a_broken_one_is_replaced_within_the_call(lines: Lines, echo: Echo) -> None:
    assert lines.call(talk) == 1
    echo.drop()
    assert lines.call(talk) == 2


def test_calls_at_the_same_time_have_one_each_and_the_surplus_is_closed(lines: Lines) -> None:
    def both(connection: socket.socket) -> tuple[int, int]:
        return talk(connection), lines.call(talk)

    assert lines.call(both) == (1, 2)
    assert lines.call(talk) == 2


def test_a_call_that_failed_takes_its_connection_with_it(lines: Lines) -> None:
    def fail(connection: socket.socket) -> int:
        connection.sendall(b"?")
        raise TimeoutError

    assert lines.call(talk) == 1
    with pytest.raises(TimeoutError):
        lines.call(fail)
    assert lines.call(talk) == 2


def test_nothing_is_kept_after_close(lines: Lines) -> None:
    lines.call(talk)
    lines.close()
    assert [lines.call(talk) for _ in range(2)] == [2, 3]


def test_a_forked_process_does_not_use_what_its_parent_keeps(lines: Lines) -> None:
    assert lines.call(talk) == 1
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(lines.call(talk))
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert lines.call(talk) == 1
