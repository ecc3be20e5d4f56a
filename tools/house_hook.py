"""Records the calls in one process of the server. tools/house_trace.py copies this file to
`sitecustomize.py` on the path of the server that it starts.

The process connects to the tool and sends its id and command line. At the line `start` it begins to record
each completed call of a function of the package, with the classes of the package among the objects
in its arguments, its variables and its result. At `stop` it sends the calls as one line of JSON. A
suspended coroutine or generator is counted when it ends.
"""

from __future__ import annotations

import _thread
import dis
import json
import os
import socket
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any

PORT, PACKAGE = os.environ["HOUSE_PORT"], os.environ["HOUSE_PACKAGE"]
_YIELDS = dis.opmap["YIELD_VALUE"]
_SUSPENDABLE = 0x20 | 0x80 | 0x200  # generators, coroutines, asynchronous generators

_is_recording = False
_calls: list[tuple[CodeType, frozenset[type]]] = []
_is_ours: dict[type, bool] = {}


def _profile(frame: FrameType, event: str, result: Any) -> None:
    if not _is_recording or event != "return":
        return
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
        return
    if code.co_flags & _SUSPENDABLE and code.co_code[frame.f_lasti] == _YIELDS:
        return
    kinds = {type(value) for value in (*frame.f_locals.values(), result)}
    _calls.append((code, frozenset(kind for kind in kinds if _of_package(kind))))


def _of_package(kind: type) -> bool:
    is_ours = _is_ours.get(kind)
    if is_ours is None:
        is_ours = _is_ours[kind] = kind.__module__.startswith("holdfast.")
    return is_ours


def _recorded() -> list[tuple[str, list[str], int]]:
    module_of = {
        code: code.co_filename[len(PACKAGE) : -len(".py")].replace(os.sep, ".")
        for code, _ in _calls
    }
    return [
        (
            f"{module_of[code]}.{code.co_qualname}",
            [f"{kind.__module__.partition('.')[2]}.{kind.__qualname__}" for kind in kinds],
            count,
        )
        for (code, kinds), count in Counter(_calls).items()
    ]


def _serve() -> None:
    global _is_recording
    with socket.create_connection(("127.0.0.1", int(PORT))) as link, link.makefile("rw") as lines:
        lines.write(json.dumps([os.getpid(), *sys.orig_argv]) + "\n")
        lines.flush()
        for line in lines:
            _is_recording = line == "start\n"
            if not _is_recording:
                lines.write(json.dumps(_recorded()) + "\n")
                _calls.clear()
            else:
                lines.write("[]\n")
            lines.flush()


sys.setprofile(_profile)
threading.setprofile(_profile)
_thread.start_new_thread(_serve, ())  # unlike threading.Thread, not profiled
