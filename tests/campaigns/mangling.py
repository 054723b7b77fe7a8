"""Random damage to valid files: bytes, JSON, YAML, headers and pickles. A seed always does the same."""

import contextlib
import io
import json
import math
import random
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import h5py

Dice = random.Random

ODD_NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
ODD_TEXTS = (
    "", "x", ".", "..", "../../outside", "/etc/passwd", "a/../../b", "\0", "\ud800", "~", "*", "é" * 300,
    "x" * 5000, "NaN", "9" * 5000, "!!python/object/apply:os.system [id]", "{}", "[", "*a", "&a",
    "0x" + "f" * 5000, "1:" * 400 + "1.5", "2001-13-45", ".inf",
)  # fmt: skip
PICKLED_CALLS = (
    b"cos\nsystem\n(S'touch ran'\ntR.",
    b'cbuiltins\neval\n(S\'open("ran","w")\'\ntR.',
    b"\x80\x04cbuiltins\nexec\nX\x10\x00\x00\x00open('ran', 'w')\x85R.",
    b"ctorch\nload\n(S'ran'\ntR.",
)


def mangle(dice: Dice, name: str, content: bytes) -> bytes:
    """Return a file's content, damaged in a way that fits its kind, or as plain bytes."""
    implementations: list[Callable[[Dice, bytes], bytes]] = [mangle_bytes]
    if name.endswith((".yaml", ".txt", ".jsonl")):
        implementations += [mangle_text] * 3
    for exit_status, way in _BY_ENDING.items():
        implementations += [way] * 3 if name.endswith(exit_status) else []
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        content = dice.choice(implementations)(dice, content)
    return content


def mangle_bytes(dice: Dice, content: bytes) -> bytes:
    """Change one place, more often near the beginning, where headers are."""
    limit = dice.choice((16, 128, 1024, len(content))) or 1
    place = dice.randrange(max(1, min(limit, len(content))))
    head, tail = content[:place], content[place:]
    kind = dice.randrange(7)
    if kind == 0:
        return head
    if kind == 1:
        return head + tail[dice.choice((1, 2, 8, 100)) :]
    if kind == 2:
        return head + dice.randbytes(dice.choice((1, 2, 8, 100))) + tail
    if kind == 3:
        return head + tail[: dice.choice((1, 8, 64))] * dice.choice((2, 3, 50)) + tail
    if kind == 4:
        code, size = dice.choice((("B", 1), ("<H", 2), (">H", 2), ("<I", 4), (">I", 4), ("<Q", 8), (">Q", 8)))
        return head + struct.pack(code, dice.choice(ODD_NUMBERS) % 256**size) + tail[size:]
    changed = bytearray(content or b"\0")
    for _ in range(dice.choice((1, 1, 4, 16))):
        at = min(len(changed) - 1, max(0, place + dice.randrange(-4, 5)))
        changed[at] = changed[at] ^ (1 << dice.randrange(8)) if kind == 5 else dice.randrange(256)
    return bytes(changed)


def odd_value(dice: Dice, depth: int = 0) -> Any:
    """Return a JSON value, preferably one that programs do not expect."""
    kind = dice.randrange(8)
    if kind < 2:
        return dice.choice(ODD_NUMBERS)
    if kind < 4:
        return dice.choice(ODD_TEXTS)
    if kind == 4:
        return dice.choice((None, True, False, float("nan"), float("inf"), -1e308, 5e-324, 10**400))
    if depth > 2:
        return []
    values = [odd_value(dice, depth + 1) for _ in range(dice.choice((0, 1, 3)))]
    return values if kind == 5 else {str(dice.choice(ODD_TEXTS)): value for value in values}


def mangle_json(dice: Dice, content: bytes) -> bytes:
    """Replace, remove or duplicate a value, or rename a key."""
    try:
        root = [json.loads(content)]
    except (ValueError, RecursionError):
        return mangle_bytes(dice, content)
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and dice.random() < 0.8:
        holder = holder[key]
        key = dice.choice(list(holder)) if isinstance(holder, dict) else dice.randrange(len(holder))
    kind = dice.randrange(5)
    if kind == 0 and holder is not root:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[dice.choice(ODD_TEXTS)] = holder[key]
    elif kind == 1:
        holder.append(holder[key])
    else:
        holder[key] = odd_value(dice)
    return _dumped(root[0])


def _dumped(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except ValueError:  # an integer with more digits than Python prints
        return b"[" * 5000


def mangle_text(dice: Dice, content: bytes) -> bytes:
    """Replace, remove or duplicate a line or its value."""
    lines = content.decode("utf-8", "surrogateescape").splitlines() or [""]
    place = dice.randrange(len(lines))
    key, sign, _ = re.match(r"([^:=]*)([:=]?\s?)(.*)", lines[place], re.DOTALL).groups()  # type: ignore[union-attr]
    kind = dice.randrange(6)
    if kind == 0:
        del lines[place]
    elif kind == 1:
        lines.insert(dice.randrange(len(lines)), lines[place])
    elif kind == 2:
        lines[place] = yaml_bomb(dice, key or "model_args")
    else:
        value = dice.choice(ODD_TEXTS) if kind == 3 else _dumped(odd_value(dice)).decode()
        lines[place] = f"{key}{sign or ': '}{value}"
    return "\n".join(lines).encode("utf-8", "surrogatepass" if kind == 3 else "surrogateescape")


def yaml_bomb(dice: Dice, key: str) -> str:
    """Return a line of YAML that is huge once aliases are resolved, contains itself, or is nested deeply."""
    kind = dice.randrange(4)
    if kind == 0:
        return f"{key}: &a [*a]"
    if kind == 1:
        return f"{key}: " + "[" * dice.choice((10, 3000))
    lists = [f"&a{level} [" + ", ".join([f"*a{level - 1}"] * 9) + "]" for level in range(1, 30)]
    return f"{key}: [&a0 x, {', '.join(lists)}]"


def mangle_npy(dice: Dice, content: bytes) -> bytes:
    """Change the header of a .npy file."""
    end = content.find(b"\n", 10)
    if not content.startswith(b"\x93NUMPY") or end < 0:
        return mangle_bytes(dice, content)
    shape = tuple(dice.choice((*ODD_NUMBERS, 3, 7)) for _ in range(dice.randrange(4)))
    code = dice.choice(
        ("<f4", ">f8", "|O", "<i8", "|u1", "<U7", "|S99", "<M8[s]", "|V8", "<c8", "", "<f2", "|b1")
    )
    if dice.random() < 0.3:
        header = dice.choice(
            ("__import__('os').system('touch ran')", "{" * 3000, "{}", "()", "1/0", "[1]*2**40")
        )
    else:
        header = repr({"descr": code, "fortran_order": dice.choice((True, False, 5)), "shape": shape})
    packed = header.encode() + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(packed)) + packed + content[end + 1 :]


def mangle_hkl(dice: Dice, content: bytes) -> bytes:
    """Return valid HDF5 with another array: of any size and type, or stored in another file."""
    shape = tuple(dice.choice((0, 1, 3, 5, 8, 2**20, 2**31, 2**40)) for _ in range(dice.randrange(6)))
    code = dice.choice(
        ("u1", "u1", "u1", "<f4", ">i8", "S3", "?", "<c8", h5py.string_dtype(), h5py.ref_dtype)
    )
    chunks = dice.choice((None, True, tuple(min(side, 64) or 1 for side in shape)))
    more = {"chunks": chunks} if shape and chunks else {}
    if dice.random() < 0.2:
        more = {"external": [("/etc/passwd", 0, 100)]}
    file = io.BytesIO()
    with h5py.File(file, "w", libver="earliest") as made:
        name = dice.choice(("data", "data", "data_0"))
        kind = dice.randrange(4)
        if kind == 0:
            made[name] = h5py.ExternalLink(
                dice.choice(("/etc/passwd", "0001.hkl", "../val_hkl/0000.hkl")), "data"
            )
        elif kind == 1:
            made[name] = h5py.SoftLink(dice.choice(("/data", "/nowhere", "/")))
        elif math.prod(shape) < 2**62:
            # h5py cannot create all combinations.
            with contextlib.suppress(ValueError, TypeError, OSError, RuntimeError):
                made.create_dataset(name, shape, code, **more)
    return file.getvalue()


def mangle_safetensors(dice: Dice, content: bytes) -> bytes:
    """Change the JSON header, with its right length or a wrong one."""
    size = int.from_bytes(content[:8], "little")
    header = mangle_json(dice, content[8 : 8 + size])
    said = len(header) if dice.random() < 0.8 else dice.choice(ODD_NUMBERS) % 2**64
    return struct.pack("<Q", said) + header + content[8 + size :]


def mangle_pth(dice: Dice, content: bytes) -> bytes:
    """Return torch.save's zip with another pickle, or a bare pickle that calls a function."""
    if dice.random() < 0.2:
        return dice.choice(PICKLED_CALLS)
    try:
        old = zipfile.ZipFile(io.BytesIO(content))
        members = {name: old.read(name) for name in old.namelist()}
    except Exception:  # it was already damaged
        return mangle_bytes(dice, content)
    victim = dice.choice([name for name in members if name.endswith("data.pkl")] or list(members) or ["x"])
    inside = members.get(victim, b"")
    members[victim] = dice.choice(PICKLED_CALLS) if dice.random() < 0.2 else mangle_bytes(dice, inside)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as new:
        for name, data in members.items():
            new.writestr(zipfile.ZipInfo(name), data)
    return packed.getvalue()


def mangle_tar(dice: Dice, content: bytes) -> bytes:
    """Change a field of a header and correct the header's checksum."""
    starts = [at for at in range(0, len(content) - 511, 512) if content[at + 257 : at + 262] == b"ustar"]
    if not starts:
        return mangle_bytes(dice, content)
    at = dice.choice(starts)
    header = bytearray(content[at : at + 512])
    first, size = dice.choice(((0, 100), (124, 12), (124, 12), (156, 1), (157, 100), (345, 155)))
    numbers = [
        b"\xff" * 12,
        b"\x80" + b"\0" * 3 + b"\x7f" * 8,
        b"\xff" * 10 + b"\xfc\0",
        b"77777777777\0",
        b"-1",
    ]
    names = [text.encode("utf-8", "surrogatepass") for text in ODD_TEXTS]
    kinds = [bytes([dice.choice(b"0123567xgLKSV\0")])]
    header[first : first + size] = dice.choice({12: numbers, 1: kinds}.get(size, names))[:size].ljust(
        size, b"\0"
    )
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return content[:at] + bytes(header) + content[at + 512 :]


def mangle_requests(dice: Dice, content: bytes) -> bytes:
    """Change a length, a count or the kind of a request to torch's store."""
    numbers = ((at, int.from_bytes(content[at : at + 8], "little")) for at in range(len(content) - 8))
    lengths = [at for at, number in numbers if 0 < number < 600]
    kind = dice.randrange(3)
    if kind == 0 or not lengths:
        key = struct.pack("<Q", dice.choice((1, 9, *ODD_NUMBERS)) % 2**64) + b"/host 0/x"
        count = struct.pack("<Q", dice.choice((1, 2, 200_000)))[: dice.choice((0, 8))]
        request = bytes([dice.randrange(20)]) + count
        at = dice.choice((10, len(content), dice.randrange(len(content) + 1)))  # 10: after its hello
        return content[:at] + request + key * dice.choice((1, 2, 300)) + content[at:]
    at = dice.choice(lengths)
    if kind == 1 and at:
        return content[: at - 1] + bytes([dice.randrange(20)]) + content[at:]
    number = dice.choice((*ODD_NUMBERS, 8192, 8193, 8 << 20, (8 << 20) + 1, 131_072)) % 2**64
    return content[:at] + struct.pack("<Q", number) + content[at + 8 :]


_BY_ENDING = {
    ".requests": mangle_requests,
    ".hkl": mangle_hkl,
    ".json": mangle_json,
    ".jsonl": mangle_json,
    ".npy": mangle_npy,
    ".safetensors": mangle_safetensors,
    ".pth": mangle_pth,
    ".tar": mangle_tar,
}
