"""Minimal terminal emulator, for tests of the progress bar."""

import os
import re
import threading

CODES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+|\x1b")


class Screen:
    """``rows`` are all lines from the first, also those that have left through the top. ``frames``
    has them as they were each time before something was erased."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows: list[str] = [""]
        self.frames: list[list[str]] = []
        self._y = self._x = 0

    def feed(self, text: str) -> None:
        for found in CODES.finditer(text):
            match found[0], found[2]:
                case "\r", _:
                    self._x = 0
                case "\n", _:
                    self._y += 1
                    self.rows += [""] * (self._y - len(self.rows) + 1)
                case _, "A":  # up, but not above what is in sight
                    self._y = max(self._y - int(found[1] or 1), len(self.rows) - self.height, 0)
                case _, "K":
                    assert found[1] == "2", found[0]
                    self.frames.append(list(self.rows))
                    self.rows[self._y] = ""
                case _, "m" | "h" | "l":  # colours; the cursor hidden and shown
                    pass
                case words, None:
                    assert words[0] != "\x1b", (
                        f"a code unknown here: {text[found.start() : found.start() + 8]!r}"
                    )
                    row = self.rows[self._y].ljust(self._x)
                    self.rows[self._y] = row[: self._x] + words + row[self._x + len(words) :]
                    self._x += len(words)
                    assert self._x <= self.width, (
                        f"a line longer than the screen is wide: {self.rows[self._y]!r}"
                    )
                case code, _:
                    raise AssertionError(f"a code unknown here: {code!r}")


class Terminal:
    """A pseudo-terminal: ``file`` is for the program; :meth:`read` closes it and returns all that
    was written."""

    def __init__(self, encoding: str) -> None:
        self._master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", encoding=encoding)
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._drain)
        self._reader.start()

    def _drain(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 65536)
            except OSError:  # nobody has it open any more
                return
            self._pieces.append(piece)

    def read(self) -> str:
        encoding = self.file.encoding
        self.file.close()
        self._reader.join()
        os.close(self._master)
        return b"".join(self._pieces).decode(encoding)
