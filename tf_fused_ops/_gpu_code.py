"""Which GPU code a shared object holds: reads the fat binaries that CUDA compilers embed.

A fat binary is a header (magic, version, header size, size of the rest) and entries, each a header
and the code of one architecture; `cuobjdump --list-elf --list-ptx` prints the same list.
"""

import struct
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_FORMS = {1: "PTX", 2: "machine code"}


def gpu_code(path):
    """Returns the sorted list of distinct (architecture, form) pairs in a shared object.

    Args:
        path: The shared object.

    Returns:
        Pairs like (90, "machine code") or (90, "PTX").
    """
    data = Path(path).read_bytes()
    found = set()
    at = data.find(_MAGIC)
    while at >= 0:
        found |= set(_entries(data, at))
        at = data.find(_MAGIC, at + len(_MAGIC))
    return sorted(found)


def _entries(data, at):
    if at + _HEADER.size > len(data):
        return
    _, _, header, size = _HEADER.unpack_from(data, at)
    at += header
    end = at + size
    while at + _ENTRY.size <= min(end, len(data)):
        kind, _, header, size, *_, arch = _ENTRY.unpack_from(data, at)
        if kind not in _FORMS or header < _ENTRY.size:
            return
        yield arch, _FORMS[kind]
        at += header + size
