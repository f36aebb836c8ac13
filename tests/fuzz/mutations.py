"""A healthy file becomes a hostile one: each kind of file is changed where its reader makes assumptions.

JSON and TOML get values of other types, numbers beyond every type, names that command a terminal or lead out of a
directory, and nesting deeper than any stack. Headers of safetensors and GGUF lie about sizes. Archives hold bombs and
pickles that run code. All kinds are cut, flipped and repeated byte by byte as well.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 100_000
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 16, 2**31, 2**40, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e308, -1e308),
    *("", "x", "0", "keep", "nvfp4", "../../etc/passwd", "/etc/hostname", "\x1b[31mred\x07\x9b2J", "a\0b", "\u202eabc"),
    *("a" * 100_000, "[0-9", "re:(a+)+$", "(" * 300, "*" * 300, "{{ 1/0 }}", "%s%n", "__import__('os')"),
    *([], [[]], {}, {"a": 1}, {"": None}, [1, 2, 3], ["x"], [None], [{}], [2**40, 2**40], [-1, 64], [0, 0], [1] * 5000),
)  # fmt: skip
_RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000, '"\\ud800"', "[" * DEEP + "]" * DEEP,
    '{"a":' * DEEP + "1" + "}" * DEEP, "1e-400", "-", "tru", '"', "\\", "/* */ 1", "1,", '{"a": 1, "a": 2}',
)  # fmt: skip
_TOML = (
    "nan", "inf", "1" * 5000, "1979-05-27", "07:32:00", "true", "[]", "[[1]]", "{ a = 1 }", '""', "'x'", '"\\u001b[3m"',
    "[" * DEEP + "]" * DEEP, "{a=" * DEEP, "1e999", '"' + "a" * 100_000 + '"', "0x" + "f" * 40,
)  # fmt: skip


def mutate(kind: str, data: bytes, rng: random.Random, canary: Path) -> bytes:
    """A hostile version of a file.

    Args:
        kind: one of `KINDS`.
        data: the healthy file.
        rng: draws everything.
        canary: a file that code from the hostile one would make.
    """
    if kind != "torch" and rng.random() < 0.25:
        return _bytes(data, rng)
    return KINDS[kind](data, rng, canary)


def _bytes(data: bytes, rng: random.Random, *_: Any) -> bytes:
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        end = min(len(found), rng.choice((16, 64, 1000, 1 << 40)))  # headers are in front
        place, length = rng.randrange(end + 1), rng.choice((1, 2, 4, 8, 100, 1000))
        match rng.randrange(9):
            case 0:
                for i in range(place, min(place + 1, len(found))):
                    found[i] ^= 1 << rng.randrange(8)
            case 1:
                found[place : place + length] = rng.randbytes(length)
            case 2:
                found[place : place + length] = b""
            case 3:
                found[place:place] = rng.randbytes(length)
            case 4:
                found[place : place + length] = rng.choice((b"\x00", b"\xff", b"\x7f", b"\x80")) * length
            case 5:
                found[place:place] = found[place : place + length] * rng.choice((1, 2, 50))
            case 6:
                del found[place:]
            case 7:
                found[place : place + 8] = struct.pack("<Q", rng.choice((2**63, 2**40, 2**31, 2**32 - 1, 0, 1)))
            case 8:
                found = bytearray(
                    rng.choice((b"", b"\n", b"\0" * 64, b"\xff\xfe" + data[:999], b"\xef\xbb\xbf" + data))
                )
    return bytes(found)


def _json(data: bytes, rng: random.Random, *_: Any) -> bytes:
    text = json.dumps(_changed(json.loads(data), rng))
    for index, raw in enumerate(_RAW):
        text = text.replace(f'"@raw{index}@"', raw)
    return text.encode("utf-8", "surrogatepass")


def _step(data: bytes, rng: random.Random, *_: Any) -> bytes:
    """A finished step with another record or name; `forged_name` has the name that makes it look whole."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    if rng.random() < 0.2:
        metadata["step"] = rng.choice(("shard model.safetensors", "evaluation", "states", "", "block model.layers.0"))
    else:
        metadata["record"] = _json(metadata["record"].encode(), rng).decode("utf-8", "replace")
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def forged_name(file: Path) -> str:
    """The name of a step's file, `NUMBER-SHA256.safetensors`, as somebody may forge it who knows how it is made."""
    return f"{file.name[:5]}-{hashlib.sha256(file.read_bytes()).hexdigest()}.safetensors"


def _lines(data: bytes, rng: random.Random, *_: Any) -> bytes:
    """One JSON document a line."""
    lines = data.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, rng.choice(lines))
        case _:
            lines[place] = _json(lines[place], rng) + b"\n"
    return b"".join(lines)


def _changed(document: Any, rng: random.Random) -> Any:
    root = [copy.deepcopy(document)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder: Any = root
        key: Any = 0
        while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.85:
            holder = holder[key]
            key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        match rng.randrange(10):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("x", "", "\x1b[2J", "shape", "name", "__class__", "a" * 1000))] = holder.pop(key)
            case 2:
                holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
            case 3 if isinstance(holder[key], list):
                holder[key] = holder[key] * 2
            case 4 | 5:
                holder[key] = f"@raw{rng.randrange(len(_RAW))}@"
            case _:
                holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return root[0]


def _toml(data: bytes, rng: random.Random, *_: Any) -> bytes:
    lines = data.decode().splitlines()
    place = rng.randrange(len(lines))
    key = lines[place].partition("=")[0].strip() or "weight"
    line = rng.choice((
        f"{key} = {rng.choice(_TOML)}", f"{key} = {rng.choice(_TOML)}", f"{key} = {rng.choice(_TOML)}", "", "x = 1",
        ".".join("a" * DEEP) + " = 1", "[[rules]]", "rules = 3", "[rules]", '[[rules]]\nmatch = "\\u001b[31m"',
    ))  # fmt: skip
    lines[place : place + rng.randrange(2)] = [line]
    return "\n".join(lines).encode()


def _safetensors(data: bytes, rng: random.Random, *_: Any) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, values = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    match rng.randrange(12):
        case 0:
            text = _json(json.dumps(header).encode(), rng)
            return struct.pack("<Q", len(text)) + text + values
        case 1:
            wrong = rng.choice((2**63, 2**40, 100_000_001, 0, 1, length - 1, length + 1, len(data)))
            return struct.pack("<Q", wrong) + data[8:]
        case 2:
            entry["dtype"] = rng.choice(("BOOL", "F64", "F32", "F16", "BF16", "I8", "U8", "I64", "F8_E4M3", "F8_E5M2",
                                         "F8_E8M0", "F4", "C64", "X"))  # fmt: skip
        case 3:
            entry["shape"] = rng.choice(
                ([2**40, 2**40], [-1], [0], [], [2**63], entry["shape"][::-1], [1, *entry["shape"]])
            )
        case 4:
            entry["data_offsets"] = rng.choice(([0, 0], [5, 1], [0, 2**63], [-1, 4], [0, len(values)]))
        case 5:
            header[rng.choice(("x", "\x1b[2Jx.weight", "model.layers.9.mlp.up_proj.weight", "a" * 5000))] = header.pop(
                name
            )
        case 6:
            del header[name]
        case 7:
            wild = {
                "blockscale.float64": rng.choice(('{"x": 1}', "[1]", "[" * DEEP, f'{{"{name}": "0x1p+99999"}}', "7"))
            }
            header["__metadata__"] = rng.choice((wild, {"format": "np"}, {"format": 3}, "x"))
        case _:
            start, stop = entry["data_offsets"]
            size = rng.choice((2, 4, stop - start))
            place = start + rng.randrange(max(1, (stop - start) // size)) * size
            pattern = rng.choice(
                (b"\xff", b"\x00", b"\x7f", b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\x00\x00\x80\xbf")
            )
            values[place : place + size] = (pattern * size)[:size]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


class _Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        import os

        return os.system, (f"touch {self.canary}",)


def _torch(data: bytes, rng: random.Random, canary: Path) -> bytes:
    payload = pickle.dumps({"w.weight": _Payload(canary)}, protocol=2)
    if not data.startswith(b"PK") or rng.random() < 0.3:
        return payload if rng.random() < 0.3 else _bytes(data, rng)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(made, "w") as after:
        names = before.namelist()
        chosen, what = rng.choice(names), rng.randrange(6)
        for name in names:
            content = before.read(name)
            if what == 0 and name.endswith((".pkl", ".pt")):
                content = payload
            elif what == 1 and name.endswith("models/model.json"):
                evil = f"[__import__('os').system('touch {canary}'), Symbol('s77', positive=True, integer=True)][1]"
                content = json.dumps(_renamed(json.loads(content), "expr_str", evil)).encode()
            elif what == 2 and name == chosen:
                after.writestr(name, bytes(400 << 20), zipfile.ZIP_DEFLATED, 9)
                continue
            elif what == 3 and name == chosen:
                continue
            elif what == 4 and name == chosen:
                name = rng.choice(("../../out/evil", "/tmp/evil", "\x1b[31mx", name * 2))
            elif what == 5 and name == chosen:
                content = _bytes(content, rng)
            after.writestr(name, content)
    return made.getvalue()


def _renamed(value: Any, key: str, text: str) -> Any:
    if isinstance(value, dict):
        return {k: text if k == key else _renamed(v, key, text) for k, v in value.items()}
    return [_renamed(v, key, text) for v in value] if isinstance(value, list) else value


def _words(data: bytes, rng: random.Random, *_: Any) -> bytes:
    """A text whose numbers are changed."""
    words = data.split(b" ")
    for _ in range(rng.choice((1, 2, 5))):
        words[rng.randrange(len(words))] = rng.choice(
            (b"-1", b"9" * 30, b"{", b"}", b'"', b"\x1b[2J", b"", b"a" * 9999)
        )
    return b" ".join(words)


KINDS: dict[str, Callable[..., bytes]] = {
    "bytes": _bytes,
    "json": _json,
    "lines": _lines,
    "toml": _toml,
    "safetensors": _safetensors,
    "step": _step,
    "torch": _torch,
    "text": _words,
}
