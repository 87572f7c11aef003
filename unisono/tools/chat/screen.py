r"""Output of the chat: in colour on a terminal, one answer per line in a pipe.

On a terminal reasoning is dimmed and each accepted draft has the colour of its position in the draft; the model's own
token after a rejected draft is underlined. In a pipe standard output has only the answers, each on one line with line
breaks written as ``\n``; everything else goes to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from unisono.tools.chat.answers import ChatPiece, DraftedToken

PLACES = ("32", "36", "34", "35", "33")
"""Colours (SGR codes) of accepted drafts by position; from the fifth on they share one."""
OWN = "4"
DIM = "2"


class Screen:
    """Writer to standard output and error.

    colours: default: standard output is a terminal and NO_COLOR is unset.
    """

    def __init__(self, colours: bool | None = None) -> None:
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        coloured = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.colours = (self.terminal and coloured) if colours is None else colours
        self.drafts = True
        self._thought = False
        self._line: list[str] = []

    # ---- lines ----------------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Print a line about the chat."""
        print(self._painted(text, DIM), file=sys.stdout if self.terminal else sys.stderr, flush=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Print names with descriptions."""
        width = max((len(name) for name in rows), default=0)
        for name, text in rows.items():
            self.tell(f"  {name.ljust(width)}  {text}")

    def banner(self, lines: Sequence[str], drafting: bool) -> None:
        """Print the source's banner, on a terminal only."""
        if not self.terminal:
            return
        head, *rest = lines
        print(self._painted("Unisono", "1") + f" · {head}")
        for line in rest:
            self.tell(line)
        if drafting and self.colours:
            places = " ".join(self._painted(str(i + 1), code) for i, code in enumerate(PLACES))
            print(f"accepted drafts by place: {places}, {self._painted('own', OWN)} after a rejected one")
        self.tell("/help lists the commands. Ctrl-C stops an answer, Ctrl-D ends.")

    # ---- answers --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an answer."""
        self._thought, self._line = False, []

    def write(self, piece: ChatPiece) -> None:
        """Write a piece of the answer."""
        if not self.terminal:
            self._line.append(piece.content)
            return
        if piece.reasoning:
            self._thought = True
            self._put(piece.reasoning, piece.draft, DIM)
        if piece.content:
            if self._thought:
                self._thought = False
                sys.stdout.write("\n\n")
            self._put(piece.content, piece.draft)
        sys.stdout.flush()

    def end(self) -> None:
        """End the answer."""
        if self.terminal:
            print(flush=True)
        else:
            print("".join(self._line).replace("\r\n", "\n").replace("\n", "\\n"), flush=True)

    def _put(self, text: str, draft: DraftedToken | None, *codes: str) -> None:
        """Write text in its token's colour.

        Line breaks are written without colour, so that it never runs to the line's end.
        """
        if self.drafts and draft is not None:
            if draft.position is not None:
                codes = (*codes, PLACES[min(draft.position, len(PLACES) - 1)])
            elif draft.drafted > draft.accepted:
                codes = (*codes, OWN)
        sys.stdout.write("\n".join(self._painted(part, *codes) for part in text.split("\n")))

    def _painted(self, text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self.colours and codes and text else text
