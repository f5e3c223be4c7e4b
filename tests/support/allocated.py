"""How many bytes the process has allocated and not freed.

Not its resident memory: what the C library keeps of freed memory, and how it is fragmented, differs from run to run.
"""

from __future__ import annotations

import ctypes

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def allocated() -> int:
    """Bytes in use, in all of the C library's arenas and in blocks of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
