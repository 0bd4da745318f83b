"""A TCP proxy that breaks connections at chosen places: a network, for tests."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from types import TracebackType

PIECE = 2**16


class Proxy:
    """Forwards to a local port, until it breaks.

    Args:
        port: of the server.
        cuts: the i-th connection ends after so many bytes from the caller; later ones do not.
        lose: bytes of a request line; the connection that first carries them ends when they have
            been passed on, so that the request is served and its answer lost.
        answers: the i-th connection ends after so many bytes of the answer.
    """

    def __init__(
        self,
        port: int,
        cuts: Iterable[int] = (),
        lose: bytes = b"",
        answers: Iterable[int] = (),
    ) -> None:
        self._port, self._cuts, self._lose = port, list(cuts), lose
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = 0
        """Connections that it broke."""

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                room = self._cuts.pop(0) if self._cuts else None
                threading.Thread(target=self._up, args=(caller, server, room), daemon=True).start()
                back = self._answers.pop(0) if self._answers else None
                threading.Thread(
                    target=self._down, args=(caller, server, back), daemon=True
                ).start()

    def _up(self, caller: socket.socket, server: socket.socket, room: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := caller.recv(PIECE if room is None else min(PIECE, room)):
                server.sendall(data)
                room = None if room is None else room - len(data)
                lost = bool(self._lose) and self._lose in data
                if room == 0 or lost:
                    self.broken += 1
                    self._lose = b"" if lost else self._lose
                    break
        _end(caller, server)

    def _down(self, caller: socket.socket, server: socket.socket, room: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(PIECE):
                caller.sendall(data if room is None else data[:room])
                if room is not None and len(data) >= room:
                    self.broken += 1
                    break
                room = None if room is None else room - len(data)
        _end(caller, server)


def _end(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
