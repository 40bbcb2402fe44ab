"""Generated Python: small functions and classes from templates, the predictable part of the code.

Knows text; never sees a token. What is held out is the combination of subject and field.
"""

import random

from tools.train_tiny.corpus import is_held_out

SUBJECTS = (
    "Account Address Article Book Buffer Cache Car Channel Client Color Config Counter Customer "
    "Device Document Employee Event File Folder Frame Game Graph Group Image Invoice Item Job Key "
    "Label Layer Letter Limit Link Machine Message Model Node Note Number Order Page Parser Path "
    "Person Player Point Product Project Queue Record Report Request Response Room Route Row Rule "
    "Schedule Section Server Session Shape Signal Station Step Student Task Team Ticket Token User"
).split()
FIELDS = (
    "name size value count price title width height index label total weight length color level "
    "status start end limit offset speed score age owner parent text path rate depth time"
).split()


def module(rng: random.Random, *, held_out: bool) -> str:
    """A module of a few classes and functions, all trained or all held out."""
    parts = [f'"""Tools for the {rng.choice(SUBJECTS).lower()} module."""\nimport os\nimport sys\n']
    for _ in range(rng.randint(2, 5)):
        subject, fields = _draw(rng, held_out)
        makers = rng.choice(((_class,), (_functions,), (_class, _functions), (_test,)))
        parts.extend(maker(subject, fields, rng) for maker in makers)
    return "\n\n".join(parts) + "\n"


def _draw(rng: random.Random, held_out: bool) -> tuple[str, list[str]]:
    while True:
        subject, fields = rng.choice(SUBJECTS), rng.sample(FIELDS, rng.randint(1, 3))
        if is_held_out(f"{subject} {fields[0]}", 10) == held_out:
            return subject, fields


def _class(subject: str, fields: list[str], rng: random.Random) -> str:
    noun, arguments = subject.lower(), ", ".join(fields)
    lines = [f"class {subject}:", f'    """A {noun} with {" and ".join(fields)}."""', ""]
    lines += [f"    def __init__(self, {arguments}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    lines += ["", "    def __repr__(self):"]
    shown = ", ".join(f"{field}={{self.{field}!r}}" for field in fields)
    lines += [f"        return f'{subject}({shown})'"]
    for field in fields:
        lines += ["", f"    def get_{field}(self):", f'        """Return the {field}."""']
        lines += [f"        return self.{field}"]
        if rng.random() < 0.5:
            lines += ["", f"    def set_{field}(self, {field}):"]
            lines += [f'        """Set the {field}."""', f"        if {field} is None:"]
            lines += [f"            raise ValueError('{field} must not be None')"]
            lines += [f"        self.{field} = {field}"]
    lines += ["", "    def __eq__(self, other):", f"        if not isinstance(other, {subject}):"]
    equal = " and ".join(f"self.{field} == other.{field}" for field in fields)
    lines += ["            return NotImplemented", f"        return {equal}"]
    return "\n".join(lines)


def _functions(subject: str, fields: list[str], rng: random.Random) -> str:
    noun, parts = subject.lower(), []
    for field in fields:
        parts += [
            f"def {noun}_{field}s({noun}s):\n"
            f'    """Return the {field} of every {noun}."""\n'
            f"    return [{noun}.{field} for {noun} in {noun}s]",
            f"def find_{noun}_by_{field}({noun}s, {field}):\n"
            f'    """Return the first {noun} with this {field} or None."""\n'
            f"    for {noun} in {noun}s:\n"
            f"        if {noun}.{field} == {field}:\n"
            f"            return {noun}\n"
            f"    return None",
            f"def sort_{noun}s_by_{field}({noun}s):\n"
            f'    """Return the {noun}s sorted by {field}."""\n'
            f"    return sorted({noun}s, key=lambda {noun}: {noun}.{field})",
        ]
    return "\n\n".join(rng.sample(parts, min(len(parts), 3)))


def _test(subject: str, fields: list[str], rng: random.Random) -> str:
    noun, values = subject.lower(), [rng.randint(0, 9) for _ in fields]
    lines = [f"class Test{subject}(unittest.TestCase):", "", "    def setUp(self):"]
    given = ", ".join(f"{field}={value}" for field, value in zip(fields, values, strict=True))
    lines += [f"        self.{noun} = {subject}({given})"]
    for field, value in zip(fields, values, strict=True):
        lines += ["", f"    def test_{field}(self):"]
        lines += [f"        self.assertEqual(self.{noun}.{field}, {value})"]
        lines += [f"        self.assertIsInstance(self.{noun}.{field}, int)"]
        lines += [
            "",
            f"    def test_set_{field}(self):",
            f"        self.{noun}.{field} = {value + 1}",
        ]
        lines += [f"        self.assertEqual(self.{noun}.{field}, {value + 1})"]
    return "\n".join(lines)
