"""Reads settings from a TOML file, environment variables and flags, and converts their values."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from holdfast.errors import ConfigError, nearest_names
from holdfast.files import read_text

OTHER_VARIABLES = ("HOLDFAST_CONFIG", "HOLDFAST_KERNELS")  # variables that are not settings

_SIZE_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "min": 60.0, "m": 60.0, "h": 3600.0}
_NUMBER_WITH_UNIT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_WORDS_FOR_OFF = {"none", "no", "false", "0", "never", "disabled", "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The allowed range of a numeric setting."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf

    def contains(self, value: float) -> bool:
        """Whether the range contains the value."""
        return self.at_least <= value <= self.at_most and value > self.above

    def in_words(self) -> str:
        """Describe the range for the end of a message, such as `, at least 0`."""
        if self.at_most < math.inf:
            return f" from {self.at_least:g} to {self.at_most:g}"
        if self.at_least > -math.inf:
            return f", at least {self.at_least:g}"
        return f", more than {self.above:g}" if self.above > -math.inf else ""


FREE = Limits()  # any value


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """The type, flag and limits of one setting."""

    key: str
    kind: str  # text, choice, number, size, duration, switch, list
    default: Any
    doc: str
    flag: str  # empty: on the command line, only --set sets it
    short: str  # one-letter flag, or empty
    choices: tuple[str, ...]
    limits: Limits
    auto: bool  # whether the value may be None, written `auto`: Holdfast decides
    off: bool  # whether the value may be written `off`, which means 0
    never: bool  # whether the value may be None, written `never`
    secret: bool  # whether the value is never shown
    values: str  # the allowed texts, for messages and documentation; empty: any

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return "HOLDFAST_" + self.key.replace(".", "_").upper()

    @property
    def flag_origin(self) -> str:
        """The origin to show for a value from the command line."""
        if self.flag and not self.flag.startswith("--"):
            return f"argument {self.flag}"
        return f"flag {self.flag or '--set ' + self.key}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawValue:
    """A value of a setting, not converted yet, from one source: a file, a variable or a flag."""

    value: object
    origin: str
    location: str = ""  # the origin and, for a file, the line; for messages


def spec_of(*, key: str, type_hint: Any, default: Any, metadata: Mapping[str, Any]) -> SettingSpec:
    """Derive the spec of a setting from its dataclass field."""
    choices: tuple[str, ...] = get_args(type_hint) if get_origin(type_hint) is Literal else ()
    auto = type_hint == int | None
    never = type_hint == float | None
    if choices:
        kind = "choice"
    elif type_hint is bool:
        kind = "switch"
    elif auto or type_hint is int:
        kind = "size" if key.endswith("_bytes") else "number"
    elif never or type_hint is float:
        kind = "duration"
    elif type_hint is str:
        kind = "text"
    else:
        kind = "list"
    return SettingSpec(
        key=key, kind=kind, default=default, choices=choices, auto=auto, never=never, **metadata
    )


def parse_size(text: str) -> int:
    """Parse a size such as `8 GiB`, `512MB`, `4g` or `1048576` into bytes.

    KB is 1,000 bytes, KiB and K are 1,024. Raises ValueError.
    """
    number, unit = _number_and_unit(text, _SIZE_UNITS)
    return int(number * _SIZE_UNITS[unit])


def parse_seconds(text: str) -> float:
    """Parse a duration such as `0.25`, `250 ms`, `10s`, `5 min` or `1h` into seconds.

    Raises ValueError.
    """
    number, unit = _number_and_unit(text, _SECOND_UNITS)
    seconds = float(number) * _SECOND_UNITS[unit]
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def _number_and_unit(text: str, units: Mapping[str, float]) -> tuple[Decimal, str]:
    """Split a text such as `8 GiB`; the unit is in lower case. Raises ValueError for others."""
    match = _NUMBER_WITH_UNIT.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(text)
    return Decimal(match[1].replace("_", "")), match[2].lower()


def show_size(size: int) -> str:
    """Format a number of bytes in the largest binary unit that divides it: 67108864 → `64 MiB`."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power} {unit}"
    return str(size)


def describe(spec: SettingSpec, value: Any) -> str:
    """The value of a setting as a person would write it."""
    if spec.secret:
        return "(set)" if value else ""
    if value is None:
        return "never" if spec.never else "auto"
    if spec.off and value == 0:
        return "off"
    match spec.kind:
        case "size":
            return show_size(value)
        case "duration":
            return f"{value:.12g} s"
        case "switch":
            return "true" if value else "false"
        case "list":
            return ", ".join(value)
        case _:
            return str(value)


def allowed(spec: SettingSpec) -> str:
    """The allowed values of a setting, for messages and documentation."""
    match spec.kind:
        case "choice":
            return " | ".join(spec.choices)
        case "switch":
            return "true | false"
        case "list":
            return "a list of texts (separated by commas in a variable or flag)"
        case "text":
            return spec.values or "a text"
    nouns = {
        "number": "a whole number",
        "size": "a size such as 512MB or 8 GiB",
        "duration": "seconds or a duration such as 250 ms",
    }
    word_choices = ""
    if spec.off:
        word_choices = ", auto or off"
    elif spec.auto:
        word_choices = ", or auto"
    elif spec.never:
        word_choices = ", or never"
    return nouns[spec.kind] + spec.limits.in_words() + word_choices


def convert(spec: SettingSpec, raw: RawValue) -> Any:
    """Convert a value to the setting's type, and check its limits. Raises ConfigError."""
    if (spec.auto and raw.value == "auto") or (spec.never and raw.value == "never"):
        return None
    if spec.off and raw.value == "off":
        return 0
    try:
        value = _value_of_kind(spec, raw.value)
    except (ValueError, TypeError, OverflowError):
        value = None
    if value is None or not (spec.limits is FREE or spec.limits.contains(value)):
        shown_value = "the given value" if spec.secret else _as_written(raw.value)
        raise ConfigError(
            f"{spec.key} = {shown_value} is not allowed ({raw.location or raw.origin}); allowed: "
            f"{allowed(spec)}"
        )
    return value


def _as_written(value: object) -> str:
    """A value of a file, variable or flag, as the user may have written it."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # TOML values may also be dates and times
        return str(value)


def _value_of_kind(spec: SettingSpec, value: object) -> Any:
    """Convert a value to the setting's type.

    If the value has the wrong form, returns None or raises ValueError or TypeError.
    """
    match spec.kind:
        case "text":
            return value if isinstance(value, str) and not _means_off(spec, value) else None
        case "choice":
            # a TOML file may have 8 where the choice is "8"
            word = str(value) if type(value) is int else value
            return word if word in spec.choices else None
        case "switch":
            return _switch(value)
        case "list":
            return _list(value)
    if isinstance(value, str):
        return {"size": parse_size, "duration": parse_seconds, "number": _whole_number}[spec.kind](
            value
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if spec.kind == "duration":
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, int) else None


def _means_off(spec: SettingSpec, text: str) -> bool:
    """Whether a text probably means `off`, but would be taken for a file name."""
    return "off" in spec.values.split(" | ") and text.strip().lower() in _WORDS_FOR_OFF


def _whole_number(text: str) -> int:
    if not re.fullmatch(r"-?[0-9][0-9_]*", text.strip()):
        raise ValueError(text)
    return int(text)


def _switch(value: object) -> bool | None:
    """A value as true or false; None if it is neither."""
    if isinstance(value, bool):
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in _TRUE:
        return True
    return False if word in _FALSE else None


def _list(value: object) -> tuple[str, ...] | None:
    """A value as a list of texts; None if it is none."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    return None


def values_in_file(specs: Mapping[str, SettingSpec], file: Path) -> dict[str, RawValue]:
    """Return the values in a TOML file, by key of the setting.

    Raises ConfigError if the file is unreadable or has an unknown key.
    """
    try:
        text = read_text(file)
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"the settings file {file} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the settings file {file} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"the settings file {file} cannot be read: nested too deep") from None
    origin = f"file {file}"
    sections = tuple(dict.fromkeys(key.partition(".")[0] for key in specs))
    given_values = {}
    for section, table in tables.items():
        location = _origin_with_line(text, origin, section=section)
        if section not in sections:
            raise ConfigError(
                f"unknown section [{section}] ({location}){did_you_mean(section, sections)}; "
                f"sections: {', '.join(sections)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(
                f"{section} is a section: write [{section}] and its settings below ({location})"
            )
        for name, value in table.items():
            key = f"{section}.{name}"
            location = _origin_with_line(text, origin, section=section, name=name)
            if key not in specs:
                raise _unknown_name("setting", key, location, specs)
            given_values[key] = RawValue(value=value, origin=origin, location=location)
    return given_values


def values_in_variables(
    specs: Mapping[str, SettingSpec], environ: Mapping[str, str]
) -> dict[str, RawValue]:
    """Return the values of the variables HOLDFAST_…, by key of the setting.

    Raises ConfigError for an unknown variable.
    """
    key_of_variable = {spec.variable: key for key, spec in specs.items()}
    given_values = {}
    for variable, value in environ.items():
        if not variable.startswith("HOLDFAST_") or variable in OTHER_VARIABLES:
            continue
        if variable not in key_of_variable:
            raise _unknown_name("variable", variable, "environment", key_of_variable)
        given_values[key_of_variable[variable]] = RawValue(
            value=value, origin=f"variable {variable}"
        )
    return given_values


def values_in_flags(
    specs: Mapping[str, SettingSpec], flags: Mapping[str, object]
) -> dict[str, RawValue]:
    """Return the values of the given flags, by key of the setting.

    flags: key → value; None for a flag that is absent. Raises ConfigError for an unknown key.
    """
    given_values = {}
    for key, value in flags.items():
        if value is None:
            continue
        if key not in specs:
            raise _unknown_name("setting", key, "flag --set", specs)
        given_values[key] = RawValue(value=value, origin=specs[key].flag_origin)
    return given_values


def _unknown_name(noun: str, name: str, location: str, known_names: Iterable[str]) -> ConfigError:
    """The error for an unknown setting or variable."""
    return ConfigError(
        f"unknown {noun} {name} ({location}){did_you_mean(name, known_names)}; `holdfast config` "
        "lists all settings"
    )


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return `; did you mean NAME?` with the most similar known name; empty if none is similar."""
    similar_names = nearest_names(name, known_names)
    return f"; did you mean {similar_names[0]}?" if similar_names else ""


def _origin_with_line(text: str, origin: str, *, section: str, name: str = "") -> str:
    """The origin, plus the line of a section or setting if a simple search finds that line."""
    is_in_section = False
    escaped_name = re.escape(name)
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*\"?([\w-]+)\"?\s*\]+", line)
        if header:
            is_in_section = header[1] == section
            is_found = is_in_section and not name
        elif name:
            is_found = (
                is_in_section and re.match(rf"\s*\"?{escaped_name}\"?\s*=", line) is not None
            ) or (re.match(rf"\s*{re.escape(section)}\s*\.\s*{escaped_name}\s*=", line) is not None)
        else:
            is_found = re.match(rf"\s*\"?{re.escape(section)}\"?\s*[.=]", line) is not None
        if is_found:
            return f"{origin}, line {number}"
    return origin
