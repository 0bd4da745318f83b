"""The Countdown task: reach a target with three numbers and + - *. Shared by the examples."""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Any

from datasets import Dataset

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SYMBOLS = "+-*"
LARGEST_NUMBER = 15
LARGEST_TARGET = 200
PROBLEM = re.compile(r"use ([\d,]+) to make (\d+)")
ANSWER = re.compile(r"([\d+\-*() ]+)=\s*(\d+)")


def problems(count: int, seed: int, tokenizer: Any) -> Dataset:
    """``count`` solvable problems, as prompts for ``tokenizer``.

    A chat model gets a conversation; a base model gets the line it was trained on, with the
    begin-of-text token that its tokenizer does not add by itself.
    """
    rng = random.Random(seed)
    chat = getattr(tokenizer, "chat_template", None) is not None
    rows = []
    while len(rows) < count:
        numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(3)]
        a, b, c = rng.sample(numbers, 3)
        first, second = rng.choice(SYMBOLS), rng.choice(SYMBOLS)
        form = rng.choice([f"({a}{first}{b}){second}{c}", f"{a}{first}({b}{second}{c})"])
        target = evaluate(form)
        if target is None or not 0 <= target <= LARGEST_TARGET:
            continue
        line = f"use {','.join(map(str, numbers))} to make {target}:"
        if chat:
            text = f"{line} answer with one line, expression=target, such as (7+6)*3=39"
            rows.append({"prompt": [{"role": "user", "content": text}]})
        else:
            rows.append({"prompt": _with_begin_of_text(line, tokenizer)})
    return Dataset.from_list(rows)


def solved(prompts: list[Any], completions: list[Any], **kwargs: Any) -> list[float]:
    """Reward: 1.0 for a completion that uses each number once and reaches the target."""
    return [
        float(is_solution(_text(prompt), _text(completion)))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def is_solution(prompt: str, completion: str) -> bool:
    """Whether the completion's last ``expression=target`` solves the prompt's problem."""
    problem, answers = PROBLEM.search(prompt), ANSWER.findall(completion)
    if problem is None or not answers:
        return False
    expression, claimed = answers[-1]
    numbers = sorted(problem[1].split(","))
    return (
        sorted(re.findall(r"\d+", expression)) == numbers
        and claimed == problem[2]
        and evaluate(expression) == int(problem[2])
    )


def evaluate(expression: str) -> int | None:
    """Value of an expression of integers and + - *, None when it is not one."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return int(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(ast.dump(node))


def _text(message: Any) -> str:
    return message if isinstance(message, str) else str(message[-1]["content"])


def _with_begin_of_text(line: str, tokenizer: Any) -> str:
    bos = tokenizer.bos_token
    adds_it = bos is not None and tokenizer(line)["input_ids"][0] == tokenizer.bos_token_id
    return line if bos is None or adds_it else bos + line
