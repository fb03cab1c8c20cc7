"""The filter behind `/`: a few words, understood the same way in every table.

    llama            rows with "llama" in any text column      model:llama    ... in that column
    used>80%         a number compared (also < >= <= = !=)      limit<4G       sizes as everywhere
    !dead            not                                        a b | c        (a and b) or c

Matching ignores case. A text that makes no sense as a comparison is looked for as plain text, so that typing
never turns into an error. Pure.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvtools.errors import UsageError
from kvtools.units import parse_size

Value = str | float | int | None
"""What a cell is worth for sorting and filtering."""

_COMPARE = re.compile(r"([a-z_]+)(>=|<=|!=|=|>|<)(.+)", re.IGNORECASE)
_PLAIN = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)
TESTS: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


@dataclass(frozen=True, slots=True)
class Term:
    """One word of a filter."""

    text: str
    column: str = ""
    test: str = ""
    number: float = 0.0
    negated: bool = False

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Whether the term matches these cells."""
        return self._found(values) != self.negated

    def _found(self, values: Mapping[str, Value]) -> bool:
        if self.test:
            value = values.get(self.column)
            return isinstance(value, (int, float)) and TESTS[self.test](float(value), self.number)
        if self.column:
            return self.text in str(values.get(self.column, "")).lower()
        return any(self.text in value.lower() for value in values.values() if isinstance(value, str))


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter: any of several lists of terms, all of which must hold. Empty matches everything."""

    text: str = ""
    choices: tuple[tuple[Term, ...], ...] = ()

    def matches(self, values: Mapping[str, Value]) -> bool:
        """Whether a row with these cells is shown."""
        return not self.choices or any(all(term.holds(values) for term in terms) for terms in self.choices)


def parse_filter(text: str, columns: frozenset[str]) -> Filter:
    """The filter meant by `text` in a table with these columns. Never raises."""
    choices = []
    for choice in text.split("|"):
        terms = tuple(_term(word, columns) for word in choice.split() if word.strip("!"))
        if terms:
            choices.append(terms)
    return Filter(text, tuple(choices))


def _term(word: str, columns: frozenset[str]) -> Term:
    negated = word.startswith("!")
    body = word[1:] if negated else word
    if found := _COMPARE.fullmatch(body):
        column, test, value = found.group(1).lower(), found.group(2), found.group(3)
        number = number_of(value)
        if column in columns and number is not None:
            return Term(body.lower(), column, test, number, negated)
    head, colon, rest = body.partition(":")
    if colon and rest and head.lower() in columns:
        return Term(rest.lower(), head.lower(), negated=negated)
    return Term(body.lower(), negated=negated)


def number_of(text: str) -> float | None:
    """A plain number, a percentage or a size ('0.5', '80%', '4G'); None for anything else."""
    body = text.strip().removesuffix("%").strip()
    if _PLAIN.fullmatch(body):
        return float(body)
    try:
        return float(parse_size(body))
    except UsageError:
        return None
