"""The tasks: prompts, demonstrations, judging, rewards, and the arithmetic parser."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sc.sampling.tasks import Countdown, Reverse, build_task, evaluate, reward

TASKS = [Reverse(), Reverse(digits=1), Countdown(), Countdown(count=2), Countdown(count=4)]


@pytest.mark.parametrize("task", TASKS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_demonstration_is_a_correct_answer(task, seed):
    prompt = task.prompt(np.random.default_rng(seed))
    answer = task.demonstration(prompt)
    assert prompt.dtype == answer.dtype == np.int32
    assert 0 <= prompt.min() <= prompt.max() < task.vocab_size <= 32
    assert 0 <= answer.min() <= answer.max() < task.vocab_size
    assert 1 <= len(answer) <= task.response_length
    assert task.correct(prompt, answer)
    assert task.accuracy(prompt, answer) == 1.0


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_prompts_are_a_function_of_the_generator(task):
    first, again, other = (task.prompt(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_reverse_counts_right_digits():
    task = Reverse()
    prompt = np.array([3, 1, 4, 1, 5, 9, 10], dtype=np.int32)
    assert task.decode(prompt) == "314159="
    assert task.decode(task.demonstration(prompt)) == "951413"
    one_wrong = np.array([9, 5, 1, 4, 1, 0])
    assert task.accuracy(prompt, one_wrong) == pytest.approx(5 / 6)
    assert not task.correct(prompt, one_wrong)
    assert task.accuracy(prompt, one_wrong[:5]) == 0.0
    assert not task.correct(prompt, task.demonstration(prompt)[:5])
    assert task.accuracy(prompt, np.array([10, 31, 20, 11, 12, 13])) == 0.0


@pytest.mark.parametrize(
    ("answer", "is_correct"),
    [
        ("25+3*7;", True),
        ("3*7+25;", True),
        ("(3*7)+25;", True),
        ("25+3*7", False),  # no end mark
        ("25+3*7;;", False),  # something after it
        ("25+7*3+0;", False),  # a number that was not given
        ("25+21;", False),  # right value, other numbers
        ("25+7*3-3+3;", False),  # a number used more often
        ("46;", False),
        ("3+25+7;", False),  # right numbers, wrong value
        ("25+(3*7;", False),
        (";", False),
        ("", False),
    ],
)
def test_countdown_judges_an_expression(answer, is_correct):
    task = Countdown()
    prompt = task.characters.encode("3,25,7:46=")
    response = task.characters.encode(answer)
    assert task.correct(prompt, response) is is_correct
    assert task.accuracy(prompt, response) == float(is_correct)
    assert task.decode(response) == answer


def test_countdown_refuses_tokens_outside_its_alphabet():
    task = Countdown()
    response = np.append(task.characters.encode("25+3*7"), [25, task.end_id])
    assert not task.correct(task.characters.encode("3,25,7:46="), response)


def test_countdown_needs_each_given_number_once_when_numbers_repeat():
    task = Countdown()
    prompt = task.characters.encode("4,4,2:10=")
    assert task.correct(prompt, task.characters.encode("4+4+2;"))
    assert not task.correct(prompt, task.characters.encode("2*2+4+2;"))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", Fraction(14)),
        ("(2+3)*4", Fraction(20)),
        ("2-3-4", Fraction(-5)),
        ("12/4/3", Fraction(1)),
        ("1/3", Fraction(1, 3)),
        ("((7))", Fraction(7)),
        ("1-(2-(3-4))", Fraction(-2)),
    ],
)
def test_evaluate_follows_arithmetic(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text", ["", "1+", "+1", "-1", "2**3", "1/0", "1/(2-2)", "(1", "1)", "()", "1 2", "a", "²", "(" * 5000]
)
def test_evaluate_refuses_what_is_not_an_expression(text):
    assert evaluate(text) is None


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.integers(0, 30).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: "({}{}{})".format(*parts)),
        max_leaves=8,
    )
)
def test_evaluate_agrees_with_python(text):
    assert evaluate(text) == eval(text)  # integers and parentheses that this test wrote itself


def test_reward_modes():
    assert [reward("binary", 0.5, False), reward("binary", 1.0, True)] == [0.0, 1.0]
    assert [reward("signed", 0.5, False), reward("signed", 1.0, True)] == [-1.0, 1.0]
    assert [reward("fraction", 0.5, False), reward("fraction", 1.0, True)] == [0.5, 1.0]


def test_build_task():
    assert build_task("reverse") == Reverse(digits=6)
    assert build_task("reverse", 4) == Reverse(digits=4)
    assert build_task("countdown") == Countdown(count=3)
    assert build_task("countdown", 4) == Countdown(count=4)
    with pytest.raises(ValueError, match="2 to 4 numbers"):
        build_task("countdown", 5)
    with pytest.raises(ValueError, match="at least one digit"):
        build_task("reverse", 0)
