"""The settings as a flat table: dotted key -> what the field accepts.

Derived from the tree once, and used by everything that speaks to people: reading options, refusing values, proposing
keys. `accept` is the only place where a value is judged against its field.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast, get_args

import msgspec
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    LiteralType,
    NoneType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from tailrace.config.other_frameworks import VALUES
from tailrace.config.spelling import near
from tailrace.config.tree import Config, Section
from tailrace.errors import TailraceError

LARGEST = 10**15  # of anything that is counted or measured; more is a slip, and overflows somewhere
UNSET = "unset"  # how a person writes None, which TOML has no word for
HUGE = 10**100
LONGEST = 80  # characters of a value that are shown
INSTEAD = {"task.reward": "; write one function that calls the others and adds up what they return"}  # of a list


class BadValueError(TailraceError):
    """A value that its field does not take; the text begins with the key."""


class Field(NamedTuple):
    """What a setting accepts: its annotation, what that is apart from None and from words, and whether None is
    allowed."""

    annotation: Any
    kind: Type
    optional: bool
    words: tuple[str, ...] = ()  # that may stand for a number

    @property
    def choices(self) -> tuple[str, ...]:
        """Of a field that takes one of a few words: those, in the order of the tree."""
        options = get_args(self.annotation) if self.optional else (self.annotation,)
        return tuple([word for option in options for word in get_args(option)])


@cache
def fields() -> dict[str, Field]:
    """Every setting that holds a value, in the order of the tree."""
    return dict(_leaves(Config, ""))


@cache
def sections() -> frozenset[str]:
    """Every dotted name that holds settings rather than a value."""
    return frozenset(key.rsplit(".", depth)[0] for key in fields() for depth in range(1, key.count(".") + 1))


def _leaves(section: type[Section], prefix: str) -> Iterator[tuple[str, Field]]:
    for field in msgspec.structs.fields(section):
        annotation: Any = field.type
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _leaves(annotation, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, _field(annotation)


def _field(annotation: Any) -> Field:
    kind = type_info(annotation)
    if not isinstance(kind, UnionType):
        return Field(annotation, kind, optional=False)
    optional = any(isinstance(each, NoneType) for each in kind.types)
    literals = [each for each in kind.types if isinstance(each, LiteralType)]
    values = [each for each in kind.types if not isinstance(each, NoneType | LiteralType)]
    if not values:  # one of a few words, or nothing
        return Field(annotation, literals[0], optional)
    return Field(annotation, values[0], optional, tuple([str(word) for each in literals for word in each.values]))


def open_table(key: str) -> str:
    """The setting that holds a table of free names to which this key belongs ("task.options"), or nothing."""
    owners = (key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1))
    return next((one for one in owners if one in fields() and isinstance(fields()[one].kind, DictType)), "")


def leaf(key: str) -> str:
    return key.rpartition(".")[2]


def read(config: Config, key: str) -> Any:
    """The value of one setting."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def accept(key: str, value: Any) -> Any:
    """The value as the field stores it (4.0 becomes 4 where a whole number is wanted), or BadValueError."""
    field = fields()[key]
    if field.optional and value == UNSET:
        return None
    if reason := _unusable(key, value):
        raise BadValueError(f"{key} is {shown(value)}; it wants {wanted(key)}, {reason}")
    try:
        return msgspec.convert(_whole(value, field.kind), field.annotation)
    except msgspec.ValidationError:
        raise BadValueError(f"{key} {_seen(key, value)}; it wants {wanted(key)}{_meant(key, value)}") from None


def _unusable(key: str, value: Any) -> str:
    """What is wrong with a value that is of the right type and still none that anybody can use."""
    if not is_number(key) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return "and a finite one"
    return f"and none above {LARGEST:.0e}" if abs(value) > LARGEST and key != "run.seed" else ""


def wanted(key: str) -> str:
    """What the field takes, in words: "a whole number of 0 or more"."""
    field = fields()[key]
    others = (*field.words, UNSET) if field.optional else field.words
    return _wanted(field) + "".join(f" (or '{word}')" for word in others)


def is_bool(key: str) -> bool:
    return isinstance(fields()[key].kind, BoolType)


def is_list(key: str) -> bool:
    return isinstance(fields()[key].kind, VarTupleType)


def is_list_of_numbers(key: str) -> bool:
    kind = fields()[key].kind
    return isinstance(kind, VarTupleType) and isinstance(kind.item_type, IntType | FloatType)


def is_list_of_words(key: str) -> bool:
    """Of a few that are known."""
    kind = fields()[key].kind
    return isinstance(kind, VarTupleType) and isinstance(kind.item_type, LiteralType)


def is_number(key: str) -> bool:
    return isinstance(fields()[key].kind, IntType | FloatType)


def shown(value: Any) -> str:
    """A value as a person would recognise it from a file: true, 'four', a list."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    if isinstance(value, list | dict):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and abs(value) >= HUGE:
        return "a number of more than 100 digits"  # Python refuses to write down the longest
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _whole(value: Any, kind: Type) -> Any:
    """1e3 is a whole number to a person, though TOML calls it a float."""
    is_integral = isinstance(value, float) and value.is_integer()
    return int(value) if is_integral and isinstance(kind, IntType) else value


def _wanted(field: Field) -> str:
    match field.kind:
        case IntType():
            return "a whole number" + _range(field.kind)
        case FloatType():
            return "a number" + _range(field.kind)
        case LiteralType():
            *first, last = (f"'{each}'" for each in field.choices)
            return f"{', '.join(first)} or {last}"
        case BoolType():
            return "true or false"
        case VarTupleType(IntType()):
            return "a list of whole numbers of 0 or more, such as [0, 1]"
        case VarTupleType(FloatType() as each):
            return f"a list of numbers{_range(each)}, such as [1, 0.5]"
        case VarTupleType(LiteralType(words)):
            return f"a list of {', '.join([repr(word) for word in words])}"
        case VarTupleType():
            return "a list of texts in quotes"
        case DictType():
            return "a table"
        case _:
            return "text in quotes"


def _range(kind: IntType | FloatType) -> str:
    if kind.gt is not None:
        return f" above {kind.gt}" + ("" if kind.le is None else f", at most {kind.le}")
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le:g}"
    return "" if kind.ge is None else f" of {kind.ge} or more"


def _seen(key: str, value: Any) -> str:
    """Of a list, what is wrong in it."""
    wrong = _wrong_in(key, value)
    return f"has {shown(wrong)}" if wrong is not None else f"is {shown(value)}"


def _wrong_in(key: str, value: Any) -> Any:
    """The first of a list that is none of what the field takes; None if it is no list of a field that takes one."""
    kind = fields()[key].kind
    if not isinstance(kind, VarTupleType) or not isinstance(value, list):
        return None
    for one in cast("list[Any]", value):
        try:
            msgspec.convert([one], fields()[key].annotation)
        except msgspec.ValidationError:
            return one
    return None


def _meant(key: str, value: Any) -> str:
    field = fields()[key]
    kind, word, choices = field.kind, value, field.choices
    if isinstance(kind, VarTupleType):
        kind, word = kind.item_type, _wrong_in(key, value)
        choices = [str(each) for each in kind.values] if isinstance(kind, LiteralType) else []
    if isinstance(kind, LiteralType) and isinstance(word, str):
        advice = meant(key, word, choices)
        return f"; {advice}" if advice else ""
    return INSTEAD.get(key, "") if isinstance(value, list) else ""


def meant(key: str, value: str, choices: Sequence[str]) -> str:
    """What a word that is none of the choices was meant to be: another system's word, or a slip; nothing if unsure."""
    word = value.lower().replace("-", "_").replace(" ", "_")
    if known := VALUES.get(key, {}).get(word):
        return known
    close = word if word in choices else near(word, choices)
    return f"did you mean '{close}'?" if close else ""
