"""The filter behind `/`: a few words, understood the same way in every table.

    llama            rows with "llama" in any text column      model:llama    ... in that column
    used>80%         a number compared (also < >= <= = !=)      limit<4G       sizes as everywhere
    !dead            not                                        a b | c        (a and b) or c

Matching ignores case. On the screen a text that makes no sense as a comparison is looked for as plain text, so that typing never
turns into an error; `Filter.problem` says what is wrong with it. Words of a command line are finished: there it is an error. Pure.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kvtools.errors import UsageError
from kvtools.units import parse_size

Value = str | float | int | None
"""What a cell is worth for sorting and filtering."""

Names = Mapping[str, str] | Collection[str]
"""What columns may be called: their ids, or other names with the id that each stands for."""

_NAME = re.compile(r"[a-z_/]+", re.IGNORECASE)
_COMPARE = re.compile(r"([a-z_/]+)(>=|<=|!=|=|>|<)(.+)", re.IGNORECASE)
_COMPARED = re.compile(r"([^<>=!:]*)(>=|<=|!=|=|>|<)(.*)")
"""What looks like a comparison, finished or not."""
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
    problem: str = ""
    """What about it cannot be meant as it stands; empty when nothing."""

    def matches(self, values: Mapping[str, Value]) -> bool:
        """Whether a row with these cells is shown."""
        return not self.choices or any(all(term.holds(values) for term in terms) for terms in self.choices)


def parse_filter(text: str, columns: Names) -> Filter:
    """The filter meant by `text` in a table with these columns. Never raises."""
    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    choices, problems = [], []
    for choice in text.split("|"):
        words = choice.split()
        terms = tuple(_term(word, columns) for word in words if word.strip("!"))
        problems += [said for word in words if (said := _wrong(word, columns))]
        if terms:
            choices.append(terms)
        elif text.strip() and not words:
            problems.append("nothing stands beside the bar")
    return Filter(text, tuple(choices), problems[0] if problems else "")


def check_filter(text: str, columns: Names) -> Filter:
    """`parse_filter` for words that nobody goes on typing. Raises UsageError where they cannot be meant."""
    found = parse_filter(text, columns)
    if found.problem:
        raise UsageError(f"filter {text!r}: {found.problem}", hint="write word, column:word, used>80%, limit<4G, !not or a | b")
    return found


def _term(word: str, columns: Mapping[str, str]) -> Term:
    negated = word.startswith("!")
    body = word[1:] if negated else word
    if found := _COMPARE.fullmatch(body):
        column, test, value = found.group(1).lower(), found.group(2), found.group(3)
        number = number_of(value)
        if column in columns and number is not None:
            return Term(body.lower(), columns[column], test, number, negated)
    head, colon, rest = body.partition(":")
    if colon and rest and head.lower() in columns:
        return Term(rest.lower(), columns[head.lower()], negated=negated)
    return Term(body.lower(), negated=negated)


def _wrong(word: str, columns: Mapping[str, str]) -> str:
    """What is wrong with one word; empty when it can be meant."""
    body = word.removeprefix("!")
    if not body.strip("!"):
        return "nothing stands behind the exclamation mark"
    found = _COMPARED.fullmatch(body)
    if found is None:
        head, colon, rest = body.partition(":")
        # Only what can be the name of a column: times (12:03) and addresses (http://...) are text.
        if not (colon and rest and _NAME.fullmatch(head)) or rest.startswith("//") or head.lower() in columns:
            return ""
        return _no_column(head, columns)
    column, test, value = found.groups()
    if column.lower() not in columns:
        if "=" in test and column:
            return ""  # text: names of values hold tier=disk0
        return _no_column(column, columns) if column else f"no column stands before {test}"
    if not value:
        return f"no number stands behind {column}{test}"
    return "" if number_of(value) is not None else f"{value!r} is no number, percentage or size (for words: {column}:{value})"


def _no_column(name: str, columns: Mapping[str, str]) -> str:
    return f"no column {name!r} here; columns: {', '.join(dict.fromkeys(columns.values()))}"


def number_of(text: str) -> float | None:
    """A plain number, a percentage or a size ('0.5', '80%', '4G'); None for anything else."""
    body = text.strip().removesuffix("%").strip()
    if _PLAIN.fullmatch(body):
        return float(body)
    try:
        return float(parse_size(body))
    except UsageError:
        return None
