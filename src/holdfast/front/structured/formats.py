"""JSON Schema formats as regular expressions, for the formats where llguidance's own accept invalid
values.
"""

from __future__ import annotations

from typing import Final

_YEAR: Final = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY: Final = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP: Final = "(0[48]|[2468][048]|[13579][26])"  # two digits that four divides, 00 excepted
DATE: Final = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
# A leap second is right at the end of few days only, and most clients refuse it everywhere: there
# is none.
TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
)

_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4: Final = rf"({_BYTE}\.){{3}}{_BYTE}"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
_LAST: Final = f"({_GROUP}:{_GROUP}|{IPV4})"
# By RFC 3986: eight groups, of which the last two may be dotted; `::` stands for one group or more.
_SHORTENED: Final = (
    f"::({_GROUP}:){{5}}{_LAST}",
    *(
        f"({_GROUP}(:{_GROUP}){{0,{before}}})?::({_GROUP}:){{{4 - before}}}{_LAST}"
        for before in range(5)
    ),
    f"({_GROUP}(:{_GROUP}){{0,5}})?::{_GROUP}",
    f"({_GROUP}(:{_GROUP}){{0,6}})?::",
)
IPV6: Final = f"(({_GROUP}:){{6}}{_LAST}|{'|'.join(_SHORTENED)})"

_END: Final = "[A-Za-z0-9]"
_INNER: Final = r"[A-Za-z0-9\-]"
# At most 63 characters, with two hyphens in the third and fourth place only behind `xn` (RFC 5890).
_LABEL: Final = (
    rf"({_END}({_END}|{_INNER}{_END}|{_INNER}{{2}}{_END}|{_INNER}({_END}{_INNER}|\-{_END}){_INNER}{{0,58}}{_END})?"
    rf"|[Xx][Nn]\-\-{_END}({_INNER}{{0,57}}{_END})?)"
)
HOSTNAME: Final = rf"{_LABEL}(\.{_LABEL})*"

EXACT: Final = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "hostname": HOSTNAME,
    "ipv6": IPV6,
}
"""Patterns of the formats that a grammar enforces, by name."""
