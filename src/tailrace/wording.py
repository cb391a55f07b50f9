"""Numbers of things in sentences: `1 step`, `2,000 trajectories`; text of others where it must not steer a terminal."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def plain(text: str) -> str:
    """Line ends and tabs stay; all else that is not printable is shown by its number."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escaped(letter) for letter in text)


def plain_line(text: str) -> str:
    """The same in one line, so that nothing in it passes for a line of ours."""
    return plain(" ".join(text.splitlines()))


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{ord(letter):04x}"
