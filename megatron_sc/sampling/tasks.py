"""Tasks with verifiable rewards: what the embedded sampler asks, and how an answer is judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product
from typing import ClassVar, Literal, Protocol, assert_never

import numpy as np
import numpy.typing as npt

TaskName = Literal["reverse", "countdown"]
RewardMode = Literal["binary", "signed", "fraction"]
Ids = npt.NDArray[np.int32]


class Task(Protocol):
    """A family of prompts whose answers can be checked by a program."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this; the model's true vocabulary must be at least as large."""

    @property
    def response_length(self) -> int:
        """Tokens generated for every prompt, so that all ranks run the same number of forward passes."""

    @property
    def end_id(self) -> int | None:
        """The token that ends a response early, or None where every response has ``response_length`` tokens."""

    def prompt(self, rng: np.random.Generator) -> Ids:
        """A random prompt, int32 [P]. P may differ from prompt to prompt."""

    def demonstration(self, prompt: Ids) -> Ids:
        """A correct answer, int32 [R], R <= response_length, for a supervised warm start."""

    def accuracy(self, prompt: Ids, response: Ids) -> float:
        """How much of the answer is right, in [0, 1]."""

    def correct(self, prompt: Ids, response: Ids) -> bool:
        """Whether the whole answer is right."""

    def decode(self, ids: Ids) -> str:
        """The tokens as text, for humans."""


def build_task(name: TaskName, size: int | None = None) -> Task:
    """The task called ``name``.

    Args:
        name: 'reverse' or 'countdown'.
        size: reverse: digits in the prompt (default 6); countdown: numbers in the prompt (default 3).

    Raises:
        ValueError: a size below 1 (reverse) or outside 2..4 (countdown).
    """
    if name == "reverse":
        return Reverse() if size is None else Reverse(digits=size)
    if name == "countdown":
        return Countdown() if size is None else Countdown(count=size)
    assert_never(name)


def reward(mode: RewardMode, accuracy: float, correct: bool) -> float:
    """The reward of an answer.

    Args:
        mode: 'binary': 1 if correct else 0. 'signed': 1 if correct else -1. 'fraction': the accuracy.
        accuracy: fraction of the answer that is right, in [0, 1].
        correct: whether all of it is right.
    """
    if mode == "binary":
        return 1.0 if correct else 0.0
    if mode == "signed":
        return 1.0 if correct else -1.0
    if mode == "fraction":
        return accuracy
    assert_never(mode)


@dataclass(frozen=True)
class Characters:
    """A character-level vocabulary: the id of a character is its place in ``alphabet``; other ids decode to '?'."""

    alphabet: str

    def __len__(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> Ids:
        """Ids of a text, int32 [len(text)]. Raises ValueError for a character outside the alphabet."""
        return np.array([self.alphabet.index(character) for character in text], dtype=np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some ids."""
        return "".join(self.alphabet[i] if 0 <= i < len(self.alphabet) else "?" for i in map(int, ids))


@dataclass(frozen=True)
class Reverse:
    """Reverse a string of digits: ``314159=`` is answered by ``951413``.

    Accuracy is the fraction of places with the right digit, so a policy that guesses digits scores 0.1.
    """

    digits: int = 6
    characters: ClassVar[Characters] = Characters("0123456789=")
    end_id: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.digits < 1:
            raise ValueError(f"reverse needs at least one digit, not {self.digits}")

    @property
    def vocab_size(self) -> int:
        """Ten digits and the separator."""
        return len(self.characters)

    @property
    def response_length(self) -> int:
        """One token a digit."""
        return self.digits

    def prompt(self, rng: np.random.Generator) -> Ids:
        """Digits drawn uniformly, then '='; int32 [digits + 1]."""
        return np.append(rng.integers(0, 10, self.digits), self.characters.encode("=")).astype(np.int32)

    def demonstration(self, prompt: Ids) -> Ids:
        """The digits in reverse; int32 [digits]."""
        return np.asarray(prompt[:-1][::-1], dtype=np.int32).copy()

    def accuracy(self, prompt: Ids, response: Ids) -> float:
        """The fraction of places with the right digit; 0 when the length is wrong."""
        answer = self.demonstration(prompt)
        return float(np.mean(answer == response)) if len(response) == len(answer) else 0.0

    def correct(self, prompt: Ids, response: Ids) -> bool:
        """Every digit is right."""
        return bool(np.array_equal(self.demonstration(prompt), response))

    def decode(self, ids: Ids) -> str:
        """For example '314159='."""
        return self.characters.decode(ids)


@dataclass(frozen=True)
class Countdown:
    """Reach a target with the given numbers: ``3,25,7:46=`` is answered by ``25+3*7;``.

    The answer is an arithmetic expression over + - * / and parentheses, in exact rational arithmetic, that uses each
    number exactly once and ends with ';'. It is right or wrong: no partial credit, so the accuracy is 0 or 1.
    """

    count: int = 3
    largest: int = 20  # the numbers are drawn from 1..largest
    largest_target: int = 99  # and the target from 1..largest_target
    characters: ClassVar[Characters] = Characters("0123456789+-*/(),:=;")
    end_id: ClassVar[int] = 19

    def __post_init__(self) -> None:
        if not 2 <= self.count <= 4:
            raise ValueError(f"countdown needs 2 to 4 numbers, not {self.count}")

    @property
    def vocab_size(self) -> int:
        """Digits, operators, parentheses and four marks: 20."""
        return len(self.characters)

    @property
    def response_length(self) -> int:
        """The longest fully parenthesised expression and the end mark."""
        return self.count * len(str(self.largest)) + (self.count - 1) + 2 * (self.count - 2) + 1

    def prompt(self, rng: np.random.Generator) -> Ids:
        """Numbers and a target that some expression over them reaches; int32 [P]."""
        while True:
            numbers = [int(number) for number in rng.integers(1, self.largest + 1, self.count)]
            operators = "".join(rng.choice(list("+-*/"), self.count - 1))
            shape = int(rng.integers(len(_SHAPES[self.count])))
            value = evaluate(_SHAPES[self.count][shape].format(*_interleave(numbers, operators)))
            if value is not None and value.denominator == 1 and 1 <= value <= self.largest_target:
                return self.characters.encode(f"{','.join(map(str, numbers))}:{value}=")

    def demonstration(self, prompt: Ids) -> Ids:
        """The first expression found by exhaustive search, with its end mark; int32 [R]."""
        numbers, target = self._parse(prompt)
        expression = next(text for text in _expressions(numbers) if evaluate(text) == target)
        return self.characters.encode(f"{expression};")

    def accuracy(self, prompt: Ids, response: Ids) -> float:
        """1 when correct, else 0."""
        return float(self.correct(prompt, response))

    def correct(self, prompt: Ids, response: Ids) -> bool:
        """The response is an expression, uses each number once, equals the target and ends with ';'."""
        numbers, target = self._parse(prompt)
        text, mark, rest = self.characters.decode(response).partition(";")
        used = sorted(int(token) for token in _tokens(text) if token.isdigit())
        return mark == ";" and not rest and used == sorted(numbers) and evaluate(text) == target

    def decode(self, ids: Ids) -> str:
        """For example '3,25,7:46='."""
        return self.characters.decode(ids)

    def _parse(self, prompt: Ids) -> tuple[list[int], int]:
        numbers, target = self.characters.decode(prompt).rstrip("=").split(":")
        return [int(number) for number in numbers.split(",")], int(target)


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an arithmetic expression over non-negative integers, + - * / and parentheses.

    Returns None for anything that is not such an expression: other characters, a unary sign, a division by zero.
    A recursive-descent parser, so nothing is ever executed.
    """
    try:
        tokens = [*_tokens(expression), ""]
        value, end = _sum(tokens, 0)
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if end == len(tokens) - 1 else None


def _sum(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at)
    while tokens[at] in ("+", "-"):
        term, after = _product(tokens, at + 1)
        value, at = (value + term if tokens[at] == "+" else value - term), after
    return value, at


def _product(tokens: list[str], at: int) -> tuple[Fraction, int]:
    value, at = _factor(tokens, at)
    while tokens[at] in ("*", "/"):
        factor, after = _factor(tokens, at + 1)
        value, at = (value * factor if tokens[at] == "*" else value / factor), after
    return value, at


def _factor(tokens: list[str], at: int) -> tuple[Fraction, int]:
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1)
        if tokens[at] != ")":
            raise ValueError("a parenthesis is not closed")
        return value, at + 1
    return Fraction(int(tokens[at])), at + 1  # int() refuses everything but a number


def _tokens(text: str) -> list[str]:
    """Runs of digits, and every other character by itself."""
    tokens: list[str] = []
    for character in text:
        if character.isdigit() and tokens and tokens[-1].isdigit():
            tokens[-1] += character
        else:
            tokens.append(character)
    return tokens


# Every way to parenthesise an expression over the numbers and operators a o b o c ..., by count of numbers.
_SHAPES: dict[int, tuple[str, ...]] = {
    2: ("{}{}{}",),
    3: ("{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})"),
    4: (
        "{}{}{}{}{}{}{}",
        "({}{}{}){}{}{}{}",
        "{}{}({}{}{}){}{}",
        "{}{}{}{}({}{}{})",
        "({}{}{}){}({}{}{})",
        "({}{}{}{}{}){}{}",
        "{}{}({}{}{}{}{})",
        "(({}{}{}){}{}){}{}",
        "({}{}({}{}{})){}{}",
        "{}{}(({}{}{}){}{})",
        "{}{}({}{}({}{}{}))",
    ),
}


def _expressions(numbers: list[int]) -> Iterator[str]:
    """Every expression that uses each number once, the simplest shapes first."""
    for shape in _SHAPES[len(numbers)]:
        for operators in product("+-*/", repeat=len(numbers) - 1):
            for order in permutations(numbers):
                yield shape.format(*_interleave(list(order), "".join(operators)))


def _interleave(numbers: list[int], operators: str) -> list[str]:
    """The arguments of a shape: number, operator, number, ..."""
    parts = [str(numbers[0])]
    for operator, number in zip(operators, numbers[1:], strict=True):
        parts += [operator, str(number)]
    return parts
