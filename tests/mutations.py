"""Random damage to bytes and to JSON data, the same for the same seed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator


def damaged(content: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """The content with one thing wrong, `count` times."""
    chance = random.Random(seed)
    for _ in range(count):
        changed, place = bytearray(content), chance.randrange(len(content))
        kind = chance.randrange(5)
        if kind == 0:
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place:place] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 3:
            del changed[place : place + chance.randrange(1, 200)]
        else:
            size = chance.randrange(1, 200)
            changed[place : place + size] = chance.randbytes(len(changed[place : place + size]))
        if bytes(changed) != content:
            yield bytes(changed)


NONSENSE = (None, True, -1, 0, 7, 2**40, 1.5, "", "aten.from_file.default", "os.system", [], [[]], {}, {"is": "Run"})


def nonsense(data, count: int, seed: int = 0) -> Iterator[object]:
    """JSON data in which one value is another, `count` times."""
    chance = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(data)
        inner, parent, key = changed, None, None
        while isinstance(inner, (dict, list)) and inner and (parent is None or chance.random() < 0.9):
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            parent, key = inner, chance.choice(keys)
            inner = parent[key]
        parent[key] = chance.choice(NONSENSE)
        yield changed
