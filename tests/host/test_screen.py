"""Texts on the screen: in the order of the prompts, each block ended by a line end, nothing a terminal would obey."""

from __future__ import annotations

import io
import unittest

from tlaloc_serve.app.screen import LiveText


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Live(unittest.TestCase):
    def test_one_text_goes_out_at_once(self) -> None:
        out = io.StringIO()
        with LiveText(1, out) as live:
            live.add(0, " Pa")
            self.assertEqual(out.getvalue(), "\n Pa")
            live.add(0, "")
            live.add(0, "ris")
            live.end(0)
        self.assertEqual(out.getvalue(), "\n Paris\n\n")

    def test_a_text_that_ends_its_line_gets_no_second_end(self) -> None:
        out = io.StringIO()
        with LiveText(1, out) as live:
            live.add(0, "a\n")
            live.end(0)
        self.assertEqual(out.getvalue(), "\na\n\n")

    def test_several_wait_for_their_turn(self) -> None:
        out = io.StringIO()
        with LiveText(3, out) as live:
            live.add(2, "c")
            live.add(0, "a")
            live.end(2)
            live.add(1, "b")
            self.assertEqual(out.getvalue(), "\n[0]\na")
            live.end(0)
            self.assertEqual(out.getvalue(), "\n[0]\na\n\n[1]\nb")
            live.add(1, "b")
            live.end(1)
        self.assertEqual(out.getvalue(), "\n[0]\na\n\n[1]\nbb\n\n[2]\nc\n\n")

    def test_an_interrupt_ends_the_line(self) -> None:
        out = io.StringIO()
        with self.assertRaises(KeyboardInterrupt), LiveText(1, out) as live:
            live.add(0, "half")
            raise KeyboardInterrupt
        self.assertEqual(out.getvalue(), "\nhalf\n")

    def test_a_terminal_gets_no_control_characters_and_a_file_gets_the_text(self) -> None:
        text = "a\x1b[2J\x07\r\x9b\x7f\tb\u00e9\n"
        for out, want in ((Terminal(), "a\\x1b[2J\\x07\\x0d\\x9b\\x7f\tb\u00e9\n"), (io.StringIO(), text)):
            with LiveText(1, out) as live:
                live.add(0, text)
            self.assertEqual(out.getvalue(), "\n" + want)


if __name__ == "__main__":
    unittest.main()
