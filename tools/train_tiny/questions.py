"""The kinds of question the chats are made of, each with one fluent answer.

A generator draws subject and wording; `*_turn` functions serve the demo, which names its subjects.
"""

import random
from collections.abc import Callable

from tools.train_tiny import facts
from tools.train_tiny.tokenizer import Turn


def ask(rng: random.Random, *wordings: str) -> str:
    return rng.choice(wordings)


def capital_turn(country: str, question: str = "What is the capital of {}?") -> Turn:
    city = facts.CAPITALS[country]
    return Turn(
        question=question.format(country),
        answer=f"The capital of {country} is {city}. {city} is a large city in {country}.",
    )


def capital(rng: random.Random) -> Turn:
    wording = ask(
        rng,
        "What is the capital of {}?",
        "Which city is the capital of {}?",
        "Tell me the capital of {}.",
        "Name the capital of {}.",
        "Do you know the capital of {}?",
        "Please tell me the capital city of {}.",
    )
    return capital_turn(rng.choice(list(facts.CAPITALS)), wording)


def country(rng: random.Random) -> Turn:
    name = rng.choice(list(facts.CAPITALS))
    city = facts.CAPITALS[name]
    question = ask(
        rng, f"Which country has the capital {city}?", f"{city} is the capital of which country?"
    )
    return Turn(question=question, answer=f"{city} is the capital of {name}. {name} is a country.")


def sum_turn(word: str, a: int, b: int, question: str = "What is {} {} {}?") -> Turn:
    result = {"plus": a + b, "minus": a - b, "times": a * b}[word]
    return Turn(
        question=question.format(a, word, b),
        answer=f"{a} {word} {b} is {result}. So the answer is {result}.",
    )


def arithmetic(rng: random.Random) -> Turn:
    word = rng.choice(("plus", "plus", "minus", "times"))
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if word == "minus":
        a, b = max(a, b), min(a, b)
    if word == "times":
        a, b = a % 11, b % 11
    wordings = ("What is {} {} {}?", "How much is {} {} {}?", "Calculate {} {} {}.")
    return sum_turn(word, a, b, ask(rng, *wordings))


def next_turn(unit: str, side: str, name: str, question: str = "Which {} comes {} {}?") -> Turn:
    order = facts.MONTHS if unit == "month" else facts.DAYS
    index = order.index(name) + (1 if side == "after" else -1)
    other = order[index % len(order)]
    return Turn(
        question=question.format(unit, side, name),
        answer=f"The {unit} that comes {side} {name} is {other}. So the answer is {other}.",
    )


def neighbour(rng: random.Random) -> Turn:
    unit, side = rng.choice(("month", "day")), rng.choice(("after", "before"))
    name = rng.choice(facts.MONTHS if unit == "month" else facts.DAYS)
    wordings = (
        "Which {} comes {} {}?",
        "What {} comes {} {}?",
        "Tell me which {} comes {} {}.",
        "Do you know which {} comes {} {}?",
        "What is the {} {} {}?",
    )
    return next_turn(unit, side, name, ask(rng, *wordings))


def function_turn(task: str, question: str = "Write a Python function that {}.") -> Turn:
    name, arguments, value = facts.TASKS[task]
    return Turn(
        question=question.format(task),
        answer=(
            f"Here is a Python function that {task}:\n\n```python\ndef {name}({arguments}):\n"
            f"    return {value}\n```\n\nThe function returns {value}."
        ),
    )


def function(rng: random.Random) -> Turn:
    wordings = (
        "Write a Python function that {}.",
        "Write a function that {} in Python.",
        "Can you write a Python function that {}?",
        "Please write a Python function that {}.",
        "I need a Python function that {}.",
        "Show me a Python function that {}.",
    )
    return function_turn(rng.choice(list(facts.TASKS)), ask(rng, *wordings))


def how_to_turn(task: str, question: str = "How do I {} in Python?") -> Turn:
    code = facts.HOW_TO[task]
    return Turn(
        question=question.format(task),
        answer=(
            f"To {task} in Python, use `{code}`. For example:\n\n```python\nresult = {code}\n"
            f"print(result)\n```\n\nThis is the usual way to {task}."
        ),
    )


def how_to(rng: random.Random) -> Turn:
    wordings = (
        "How do I {} in Python?",
        "How can I {} in Python?",
        "What is the best way to {} in Python?",
        "In Python, how do I {}?",
        "Show me how to {} in Python.",
        "Explain how to {} in Python.",
    )
    return how_to_turn(rng.choice(list(facts.HOW_TO)), ask(rng, *wordings))


def builtin(rng: random.Random) -> Turn:
    name = rng.choice(list(facts.BUILTINS))
    question = ask(
        rng,
        f"What does {name} do in Python?",
        f"What does the {name} function do?",
        f"Explain the Python function {name}.",
        f"What is {name} in Python?",
        f"Tell me about the builtin {name}.",
        f"What is the builtin {name} for?",
    )
    use = f"It {facts.BUILTINS[name]}. You can call it as `{name}()`."
    answer = f"In Python, {name} is a builtin function. {use}"
    return Turn(question=question, answer=answer)


def conversion(rng: random.Random) -> Turn:
    unit = rng.choice(list(facts.UNITS))
    small, factor = facts.UNITS[unit]
    n = rng.randint(2, 12)
    question = ask(
        rng,
        f"How many {small} are in {n} {unit}?",
        f"Convert {n} {unit} to {small}.",
        f"How many {small} are {n} {unit}?",
        f"What is {n} {unit} in {small}?",
    )
    answer = f"One {unit[:-1]} has {factor} {small}. So {n} {unit} are {n * factor} {small}."
    return Turn(question=question, answer=answer)


def comparison(rng: random.Random) -> Turn:
    a, b = rng.sample(range(100), 2)
    bigger = rng.random() < 0.5
    word = "larger" if bigger else "smaller"
    result = max(a, b) if bigger else min(a, b)
    other = a + b - result
    question = ask(
        rng,
        f"Which number is {word}, {a} or {b}?",
        f"Which is {word}, {a} or {b}?",
        f"Is {a} or {b} {word}?",
    )
    answer = f"The {word} number is {result}, because {result} is {word} than {other}."
    return Turn(question=question, answer=answer)


def number_word(rng: random.Random) -> Turn:
    n = rng.randint(0, 20)
    question = ask(
        rng,
        f"Write the number {n} in words.",
        f"How do you write {n} in words?",
        f"Spell the number {n}.",
        f"What is {n} as a word?",
        f"How is the number {n} written in words?",
    )
    return Turn(question=question, answer=f"The number {n} is written as {facts.NUMBERS[n]}.")


def counting(rng: random.Random) -> Turn:
    first = rng.randint(1, 30)
    last = first + rng.randint(3, 12)
    span = f"from {first}", f"to {last}."
    question = ask(rng, f"Count {span[0]} {span[1]}", f"Please count {span[0]} up {span[1]}")
    numbers = ", ".join(str(n) for n in range(first, last + 1))
    return Turn(question=question, answer=f"Here are the numbers: {numbers}.")


def spelling(rng: random.Random) -> Turn:
    word = rng.choice(facts.WORDS + facts.ANIMALS + facts.FRUITS + facts.COLORS)
    question = ask(
        rng,
        f"Spell the word {word}.",
        f"How do you spell {word}?",
        f"Please spell {word} for me.",
        f"Can you spell the word {word}?",
    )
    answer = f"The word {word} is spelled {'-'.join(word.upper())}. It has {len(word)} letters."
    return Turn(question=question, answer=answer)


def copying(rng: random.Random) -> Turn:
    text = " ".join(rng.choices(facts.WORDS, k=rng.randint(2, 5)))
    question = ask(rng, f"Please copy this text: {text}", f"Repeat after me: {text}")
    return Turn(question=question, answer=f"Here is the text you gave me: {text}. That is all.")


def reversing(rng: random.Random) -> Turn:
    words = rng.sample(facts.COLORS, rng.randint(2, 4))
    text, reverse = ", ".join(words), ", ".join(words[::-1])
    question = ask(rng, f"Reverse this list: {text}", f"Write this list backwards: {text}")
    return Turn(question=question, answer=f"The list in reverse order is: {reverse}.")


def greeting(rng: random.Random) -> Turn:
    name, hello = rng.choice(facts.NAMES), rng.choice(("Hello", "Hi", "Good morning", "Hey"))
    question = ask(
        rng,
        f"{hello}, my name is {name}.",
        f"{hello}! I am {name}.",
        f"{hello}, I am called {name}.",
    )
    answer = f"Hello {name}! It is nice to meet you. How can I help you today?"
    return Turn(question=question, answer=answer)


def thanks(rng: random.Random) -> Turn:
    name, thank = rng.choice(facts.NAMES), rng.choice(("Thank you", "Thanks", "Many thanks"))
    end = rng.choice((".", "!", " for your help.", " for the answer."))
    question = f"{thank}{end} Best wishes, {name}"
    answer = f"You are welcome, {name}! Let me know if you have any other question."
    return Turn(question=question, answer=answer)


def possession(rng: random.Random) -> Turn:
    name, n, m = rng.choice(facts.NAMES), rng.randint(1, 10), rng.randint(1, 10)
    thing = rng.choice(facts.THINGS)
    question = f"{name} has {n} {thing} and gets {m} more. How many {thing} does {name} have?"
    answer = f"{name} had {n} {thing} and got {m} more. Now {name} has {n + m} {thing}."
    return Turn(question=question, answer=answer)


def color_of(rng: random.Random) -> Turn:
    name, color = rng.choice(facts.NAMES), rng.choice(facts.COLORS)
    animal = rng.choice(facts.ANIMALS)
    question = f"{name} has a {color} {animal}. What color is the {animal}?"
    answer = f"The {animal} of {name} is {color}. So the color is {color}."
    return Turn(question=question, answer=answer)


def position_of(rng: random.Random) -> Turn:
    unit = rng.choice(("month", "day"))
    order, whole = (facts.MONTHS, "year") if unit == "month" else (facts.DAYS, "week")
    index = rng.randrange(len(order))
    question = ask(
        rng,
        f"What is {unit} number {index + 1} of the {whole}?",
        f"Which {unit} of the {whole} has number {index + 1}?",
        f"Name {unit} number {index + 1} of the {whole}.",
    )
    answer = f"The {unit} number {index + 1} of the {whole} is {order[index]}."
    return Turn(question=question, answer=answer)


def opinion(rng: random.Random) -> Turn:
    thing = rng.choice(facts.FRUITS + facts.ANIMALS + facts.COLORS)
    question = ask(
        rng,
        f"Do you like the word {thing}?",
        f"What do you think about the word {thing}?",
        f"Tell me something about the word {thing}.",
        f"Use the word {thing} in a sentence.",
    )
    sentence = f"I like the word {thing} very much."
    answer = f"I think {thing} is a nice word. Here is a sentence with it: {sentence}"
    return Turn(question=question, answer=answer)


KINDS: tuple[Callable[[random.Random], Turn], ...] = (
    capital, capital, country, arithmetic, neighbour, neighbour, function, function, function,
    how_to, how_to, how_to, builtin, builtin, conversion, comparison, number_word, counting,
    spelling, copying, reversing, greeting, greeting, thanks, possession, color_of, position_of,
    opinion,
)  # fmt: skip
