"""Code for training: the running Python's own standard library, normalised.

Knows files and text; never sees a token. Sources are under the PSF licence, which allows copying
and derived works with its notice; only the trained weights leave the machine, never the text.
"""

import ast
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "idlelib", "turtledemo", "lib2to3", "__pycache__", "encodings"}
MAX_FILE_CHARS = 400_000
MAX_TABLE_ITEMS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """One normalised source file."""

    name: str
    text: str
    is_test: bool
    is_held_out: bool


def read_code(max_test_chars: int = 6_000_000) -> list[CodeFile]:
    """Every usable standard-library file, library modules first; whole files are held out by name.

    Not every Python ships its test suite; where it is missing the corpus is library modules only.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files, num_test_chars = [], 0
    paths = [p for p in sorted(root.rglob("*.py")) if not SKIPPED_FOLDERS & set(p.parts)]
    for path in sorted(paths, key=lambda p: hashlib.sha256(p.name.encode()).digest()):
        name = str(path.relative_to(root))
        is_test = "test" in name
        if is_test and num_test_chars > max_test_chars:
            continue
        text = normalise(path)
        if text is None or not 400 <= len(text) <= MAX_FILE_CHARS:
            continue
        num_test_chars += len(text) if is_test else 0
        files.append(
            CodeFile(name=name, text=text, is_test=is_test, is_held_out=is_held_out(name, 15))
        )
    return sorted(files, key=lambda f: (f.is_test, f.name))


def is_held_out(key: str, one_in: int) -> bool:
    """A split by content that no seed can change."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % one_in == 0


def normalise(path: Path) -> str | None:
    """Source without comments, with one-line docstrings and short literals; None if it is not code.

    Comments and layout are the least predictable bytes of a file and the least useful ones here.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None
    tree = ast.fix_missing_locations(_Shortener().visit(tree))
    try:
        return ast.unparse(tree) + "\n"
    except (RecursionError, ValueError):
        return None


class _Shortener(ast.NodeTransformer):
    """Cuts docstrings to their first line and long literals to a few items."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and (len(node.value) > 160 or not node.value.isascii()):
            first = (node.value.strip().splitlines() or [""])[0].strip()
            return ast.Constant(first[:100].encode("ascii", "ignore").decode())
        if isinstance(node.value, bytes) and len(node.value) > 40:
            return ast.Constant(node.value[:16])
        if isinstance(node.value, int) and abs(node.value) > 10**12:
            return ast.Constant(10**12)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines = node.value.value.strip().splitlines() or [""]
            node.value = ast.Constant(lines[0].strip()[:100].encode("ascii", "ignore").decode())
            return node
        self.generic_visit(node)
        return node

    def _cut(self, node: ast.List | ast.Tuple | ast.Set) -> ast.AST:
        node.elts = node.elts[:MAX_TABLE_ITEMS]
        return self.generic_visit(node)

    visit_List = visit_Tuple = visit_Set = _cut

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        node.keys, node.values = node.keys[:MAX_TABLE_ITEMS], node.values[:MAX_TABLE_ITEMS]
        return self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node  # its parts may not be cut: quotes inside would no longer match
