"""Damage to a file: to its bytes, or to the values of its JSON. Every function takes the generator it draws from."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Mutate = Callable[[Random, bytes], bytes]

#: Numbers at which something ends: signs, widths of integers, of floats, and what is no number.
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 7, 64, 255, 256, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**53 + 1, 2**63, 2**64, -(2**63)),
    *(10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -1.0, 1e-45, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
)
TEXTS = (
    "",
    " ",
    "x",
    "default",
    "weight",
    "../..",
    "/dev/zero",
    "[",
    "(" * 300,
    "a" * 100_000,
    "\ud800",
    "\0",
    "🦙",
    "re:(",
    "re:(a+)+$",
)
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: [],
    lambda: {},
    lambda: [[]],
    lambda: {"": None},
    lambda: list(range(5000)),
    lambda: _deep(300),
)


def of_bytes(random: Random, content: bytes) -> bytes:
    """One to four changes of bytes."""
    raw = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        random.choice(_EDITS)(random, raw)
    return bytes(raw)


def of_json(random: Random, content: bytes) -> bytes:
    """A change or more of the values of a JSON object; one in four of its text."""
    if random.random() < 0.25:
        return of_bytes(random, content)
    data = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        change(random, data)
    text = json.dumps(data)
    if random.random() < 0.05:  # a key that stands twice
        text = text[:1] + json.dumps(random.choice([*data, "x"])) + ": 1, " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def in_json(key: str) -> Mutate:
    """`of_json` of what stands under a key, and nothing else."""

    def mutate(random: Random, content: bytes) -> bytes:
        data = json.loads(content)
        for _ in range(random.choice((1, 1, 2))):
            if isinstance(data.get(key), dict) and data[key] and random.random() < 0.95:
                change(random, data[key])
            else:
                data[key] = _value(random)
        return json.dumps(data).encode("utf-8", "surrogatepass")

    return mutate


def of_safetensors(random: Random, content: bytes) -> bytes:
    """The header's bytes, its length, or its values with the length put right."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    if random.random() < 0.3:
        return of_bytes(random, content[: 8 + length]) + data
    changed = of_json(random, header)
    if random.random() < 0.1:
        data = data[: random.randrange(len(data))]
    return struct.pack("<Q", len(changed)) + changed + data


def of_gguf(random: Random, content: bytes) -> bytes:
    """What stands before the tensors' data: names end with `.weight`, and random numbers do not."""
    end = content.rfind(b".weight") + 40
    return of_bytes(random, content[:end]) + (content[end:] if random.random() < 0.95 else b"")


def of_protobuf(random: Random, content: bytes) -> bytes:
    """Anywhere but in long runs of numbers: bytes in whose neighbourhood there is text."""
    places = [at for at in range(len(content)) if sum(32 <= byte < 127 for byte in content[at : at + 12]) > 8]
    raw = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = min(max(0, random.choice(places) + random.randrange(-6, 6)), len(raw) - 1)
        raw[at] = random.randrange(256)
    return bytes(raw) if random.random() < 0.9 else of_bytes(random, content)


def change(random: Random, data: Any) -> None:
    """Change one value, key or entry somewhere in an object; an empty one gets a key."""
    places = list(_places(data))
    if not places:
        data["x"] = _value(random)
        return
    holder, key = random.choice(places)
    random.choice(_CHANGES)(random, holder, key, places)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key or index) of every value below; of a long list, the first ones."""
    entries = data.items() if isinstance(data, dict) else enumerate(data[:50]) if isinstance(data, list) else ()
    for key, value in entries:
        yield data, key
        yield from _places(value)


def _replace(random: Random, holder: Any, key: Any, places: Any) -> None:
    holder[key] = _value(random)


def _nearby(random: Random, holder: Any, key: Any, places: Any) -> None:
    """A number of about the same size, the other truth, a text with one letter changed."""
    value = holder[key]
    if isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = random.choice(
            (value + 1, value - 1, value * 2, -value, value // 2, float(value % 2**60), f"{value % 2**60}")
        )
    elif isinstance(value, float):
        holder[key] = random.choice((value + 1, value * 2, -value, value / 2, str(value)))
    elif isinstance(value, str) and value:
        at = random.randrange(len(value))
        holder[key] = value[:at] + random.choice(("", "x", value[at] * 2)) + value[at + 1 :]
    elif isinstance(value, list) and value:
        random.choice((value.pop, lambda: value.append(value[0]), value.reverse))()
    else:
        holder[key] = _value(random)


def _remove(random: Random, holder: Any, key: Any, places: Any) -> None:
    del holder[key]


def _rename(random: Random, holder: Any, key: Any, places: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice((f"{key}x", key[1:], "", random.choice(places)[1] if places else "x"))] = holder.pop(key)
    else:
        holder.insert(key, _value(random))


def _copy(random: Random, holder: Any, key: Any, places: Any) -> None:
    """The value of another place; a copy, so that nothing holds itself."""
    other, name = random.choice(places)
    holder[key] = json.loads(json.dumps(other[name]))


_CHANGES = (_replace, _replace, _nearby, _nearby, _remove, _rename, _copy)


def _value(random: Random) -> Any:
    kind = random.random()
    if kind < 0.5:
        return random.choice(NUMBERS)
    if kind < 0.7:
        return random.choice(TEXTS)
    return random.choice(OTHERS)()


def _deep(depth: int) -> Any:
    made: Any = 0
    for _ in range(depth):
        made = [made]
    return made


def _set(random: Random, raw: bytearray) -> None:
    if raw:
        raw[random.randrange(len(raw))] = random.randrange(256)


def _flip(random: Random, raw: bytearray) -> None:
    if raw:
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)


def _number(random: Random, raw: bytearray) -> None:
    """A whole number of 4 or 8 bytes somewhere."""
    size = random.choice((4, 8))
    at = random.randrange(max(1, len(raw) - size))
    value = random.choice([number for number in NUMBERS if isinstance(number, int)])
    raw[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _cut(random: Random, raw: bytearray) -> None:
    del raw[random.randrange(len(raw) + 1) :]


def _drop(random: Random, raw: bytearray) -> None:
    at = random.randrange(len(raw) + 1)
    del raw[at : at + random.randrange(1, 20)]


def _insert(random: Random, raw: bytearray) -> None:
    at = random.randrange(len(raw) + 1)
    raw[at:at] = random.choice((random.randbytes(random.randrange(1, 9)), raw[:at][-20:], b"[" * 2000))


_EDITS = (_set, _set, _flip, _flip, _number, _number, _drop, _insert, _cut)
