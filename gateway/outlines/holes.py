"""Stands in for a text while a template is run, and notes what the template asks of it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn

Values = list[Any]
"""What the holes stand for, by their numbers."""

Step = Callable[[Values], Any]
"""Makes a value, or an answer, of those before it."""

_BEGIN, _END = "\ue0f1", "\ue0f2"
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")


class OpaqueError(Exception):
    """The template did something with a text that a hole cannot do."""


class Trace:
    """One run. `values`: of the holes, the given ones first, then those that the run derived by `steps`; `answers`: what was
    asked of them, and what they answered."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values: Values = list(values)
        self.steps: list[Step] = []
        self.answers: list[tuple[Step, Any]] = []
        self._derived: dict[Hashable, Hole] = {}
        self._asked: set[Hashable] = set()

    def hole(self, number: int, *, is_text: bool = True) -> Opaque:
        """The hole of a given value."""
        return (Hole if is_text else Opaque)(self, number)

    def derive(self, name: Hashable, step: Step) -> Hole:
        """The hole of what `step` makes. One for each name, so that two runs write the same for the same."""
        if name not in self._derived:
            self._derived[name] = Hole(self, len(self.values))
            self.values.append(step(self.values))
            self.steps.append(step)
        return self._derived[name]

    def ask(self, name: Hashable, question: Step) -> Any:
        """The answer that the values give. One for each name."""
        answer = question(self.values)
        if name not in self._asked:
            self._asked.add(name)
            self.answers.append((question, answer))
        return answer


class Sealed(ABC):
    """Whatever is done with it raises, but for what a subclass lets be done."""

    __slots__ = ()

    @abstractmethod
    def written(self) -> str:
        """As `{{ value }}` writes it."""

    def _refuse(self, *args: object) -> NoReturn:
        raise OpaqueError("a template looks into a text")

    __str__: Any = _refuse
    __repr__: Any = _refuse
    __format__: Any = _refuse
    __iter__: Any = _refuse
    __getitem__: Any = _refuse
    __contains__: Any = _refuse
    __len__: Any = _refuse
    __hash__: Any = _refuse
    __eq__: Any = _refuse
    __ne__: Any = _refuse
    __lt__: Any = _refuse
    __le__: Any = _refuse
    __gt__: Any = _refuse
    __ge__: Any = _refuse
    __mod__: Any = _refuse
    __rmod__: Any = _refuse
    __mul__: Any = _refuse
    __rmul__: Any = _refuse
    __add__: Any = _refuse
    __radd__: Any = _refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse()


class Opaque(Sealed):
    """In place of a value that may be written as JSON, or as Python prints it, and be asked whether it is empty."""

    __slots__ = ("number", "trace")

    def __init__(self, trace: Trace, number: int) -> None:
        self.trace = trace
        self.number = number

    def written(self) -> str:
        number = self.number
        return self.trace.derive(("str", number), lambda values: str(values[number])).written()

    def __bool__(self) -> bool:
        number = self.number
        return bool(self.trace.ask(("bool", number), lambda values: bool(values[number])))


class Hole(Opaque):
    """In place of a text."""

    __slots__ = ()

    def written(self) -> str:
        return f"{_BEGIN}{self.number}{_END}"

    def strip(self, characters: str | None = None) -> Hole:
        """As of str; and so on."""
        return self._stripped("strip", characters)

    def lstrip(self, characters: str | None = None) -> Hole:
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: str | None = None) -> Hole:
        return self._stripped("rstrip", characters)

    def startswith(self, prefix: str) -> bool:
        return self._ask("startswith", prefix)

    def endswith(self, suffix: str) -> bool:
        return self._ask("endswith", suffix)

    def __contains__(self, part: object) -> bool:
        return self._ask("__contains__", part)

    def __len__(self) -> int:
        number = self.number
        return int(self.trace.ask(("len", number), lambda values: len(values[number])))

    def __getitem__(self, at: object) -> Hole:
        if not isinstance(at, slice):
            self._refuse()
        number, place = self.number, (at.start, at.stop, at.step)
        return self.trace.derive(("slice", number, place), lambda values: values[number][at])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Hole):
            one, two = self.number, other.number
            return bool(self.trace.ask(("same", one, two), lambda values: values[one] == values[two]))
        if isinstance(other, Sealed):
            self._refuse()
        return isinstance(other, str) and self._ask("__eq__", other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        self._refuse()

    def __add__(self, other: object) -> Hole | Composite:
        return joined((self, other))

    def __radd__(self, other: object) -> Hole | Composite:
        return joined((other, self))

    def _stripped(self, how: str, characters: str | None) -> Hole:
        if characters is not None:
            self._plain(characters)
        number = self.number
        return self.trace.derive((how, number, characters), lambda values: getattr(values[number], how)(characters))

    def _ask(self, method: str, text: object) -> bool:
        self._plain(text)
        number = self.number
        return bool(self.trace.ask((method, number, text), lambda values: getattr(values[number], method)(text)))

    def _plain(self, value: object) -> None:
        if type(value) is not str:
            self._refuse()


class Composite(Sealed):
    """Text with holes in it. It can be written and joined, and no more."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[str | Hole, ...]) -> None:
        self.parts = parts

    def written(self) -> str:
        return "".join(part if isinstance(part, str) else part.written() for part in self.parts)

    def __bool__(self) -> bool:
        return any(self.parts)

    def __add__(self, other: object) -> Hole | Composite:
        return joined((self, other))

    def __radd__(self, other: object) -> Hole | Composite:
        return joined((other, self))


def joined(values: Iterable[object]) -> Hole | Composite:
    """Texts and holes, one behind the other. Raises OpaqueError for anything else."""
    parts: list[str | Hole] = []
    for value in values:
        if isinstance(value, Composite):
            parts.extend(value.parts)
        elif type(value) is str or isinstance(value, Hole):
            parts.append(value)
        else:
            raise OpaqueError("a template joins a text with something else")
    parts = [part for part in parts if isinstance(part, Hole) or part]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], Hole) else Composite(tuple(parts))


def is_written(text: str) -> bool:
    """Whether holes were written in it."""
    return _BEGIN in text


def segments(text: str) -> tuple[str | int, ...]:
    """Written text as fixed text and the numbers of holes."""
    pieces = _MARK.split(text)
    return tuple(int(piece) if at % 2 else piece for at, piece in enumerate(pieces) if piece)


def read(trace: Trace, text: str) -> Hole | Composite:
    """What was written, so that it can be joined again."""
    return joined([Hole(trace, part) if isinstance(part, int) else part for part in segments(text)])


def holds(value: object) -> bool:
    """Whether there is a hole in it."""
    if isinstance(value, Sealed):
        return True
    if isinstance(value, list | tuple):
        return any(map(holds, value))
    if isinstance(value, dict):
        return any(map(holds, value.values())) or any(map(holds, value))
    return False
