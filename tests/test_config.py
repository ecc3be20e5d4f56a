"""Settings: sources, precedence, kinds of values, and messages that say what is wrong and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.config import (
    EffectiveSettings,
    Settings,
    all_specs,
    default_file,
    load_settings,
    shown_value,
    value_of,
)
from holdfast.config_sources import allowed, parse_seconds, parse_size, show_size
from holdfast.errors import ConfigError

SPECS = all_specs()


def load(
    file: Path | None = None,
    *,
    variables: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> EffectiveSettings:
    return load_settings(file=file, environ=variables or {}, flags=flags or {})


def written(folder: Path, text: str) -> Path:
    file = folder / "holdfast.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(
    file: Path | None = None,
    *,
    variables: dict[str, str] | None = None,
    flags: dict[str, object] | None = None,
) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, variables=variables, flags=flags)
    return str(caught.value)


def test_without_any_source_all_settings_are_the_defaults() -> None:
    effective = load()
    assert effective.settings == Settings()
    assert set(effective.origins) == set(SPECS)
    assert set(effective.origins.values()) == {"default"}


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nport = 1\nhost = 'file'\napi_key = 'k'\n")
    effective = load(
        file,
        variables={"HOLDFAST_SERVER_PORT": "2", "HOLDFAST_SERVER_HOST": "variable"},
        flags={"server.port": 3},
    )
    assert (
        effective.settings.server.port,
        effective.settings.server.host,
        effective.settings.server.api_key,
    ) == (
        3,
        "variable",
        "k",
    )
    assert effective.origins["server.port"] == "flag --port"
    assert effective.origins["server.host"] == "variable HOLDFAST_SERVER_HOST"
    assert effective.origins["server.api_key"] == f"file {file}"
    assert effective.origins["server.cors_origins"] == "default"


def test_a_flag_that_was_not_given_changes_nothing() -> None:
    effective = load(variables={"HOLDFAST_LOG_LEVEL": "debug"}, flags={"log.level": None})
    assert effective.settings.log.level == "debug"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("HOLDFAST_MODEL_MEMORY_BYTES", "8 GiB", 8 << 30),
        ("HOLDFAST_MODEL_MEMORY_BYTES", "512MB", 512_000_000),
        ("HOLDFAST_MODEL_MEMORY_BYTES", "auto", None),
        ("HOLDFAST_STORE_RAM_BYTES", "off", 0),
        ("HOLDFAST_STORE_RAM_BYTES", "0", 0),
        ("HOLDFAST_STORE_DISK_BYTES", "0", 0),
        ("HOLDFAST_STORE_DISK_BYTES", "off", 0),
        ("HOLDFAST_STORE_DAILY_WRITE_BYTES", "0", 0),
        ("HOLDFAST_SERVER_ALLOWED_HOSTS", "a.example, b.example ,", ("a.example", "b.example")),
        ("HOLDFAST_SERVER_ALLOWED_HOSTS", "", ()),
        ("HOLDFAST_SCHEDULER_STALL_SECONDS", "100 ms", 0.1),
        ("HOLDFAST_MODEL_TRUST_REMOTE_CODE", "Yes", True),
        ("HOLDFAST_MODEL_TRUST_REMOTE_CODE", "0", False),
        ("HOLDFAST_SCHEDULER_STEP_TOKENS", "4_096", 4096),
        ("HOLDFAST_MODEL_PATH", "~/models/some model", "~/models/some model"),
    ],
)
def test_texts_of_variables_become_values(variable: str, text: str, expected: object) -> None:
    key = next(key for key, spec in SPECS.items() if spec.variable == variable)
    assert value_of(load(variables={variable: text}).settings, key) == expected


def test_files_take_native_values_and_texts(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [server]
        cors_origins = ["https://a.example"]
        shutdown_seconds = 3
        [model]
        trust_remote_code = true
        memory_bytes = "2GiB"
        context_tokens = "auto"
        [scheduler]
        stall_seconds = 0.5
        """,
    )
    settings = load(file).settings
    assert settings.server.cors_origins == ("https://a.example",)
    assert settings.server.shutdown_seconds == 3.0
    assert settings.model.trust_remote_code is True
    assert settings.model.memory_bytes == 2 << 30
    assert settings.model.context_tokens is None
    assert settings.scheduler.stall_seconds == 0.5


def test_a_bad_value_is_reported_with_allowed_values_and_line(tmp_path: Path) -> None:
    file = written(tmp_path, '# comment\n[model]\nname = "x"\nlayout = "columns"\n')
    message = refusal(file)
    for part in ("model.layout", '"columns"', "auto | rows | split | solo", str(file), "line 4"):
        assert part in message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"server.port": "70000"}, ("server.port", '"70000"', "from 0 to 65535", "flag --port")),
        ({"server.port": 1.5}, ("server.port", "1.5", "whole number")),
        ({"server.port": True}, ("server.port", "true", "whole number")),
        (
            {"scheduler.stall_seconds": "0"},
            ("scheduler.stall_seconds", "more than 0", "--set scheduler.stall_seconds"),
        ),
        (
            {"scheduler.stall_seconds": float("inf")},
            ("scheduler.stall_seconds", "seconds or a duration"),
        ),
        (
            {"scheduler.stall_seconds": float("nan")},
            ("scheduler.stall_seconds", "seconds or a duration"),
        ),
        (
            {"model.memory_bytes": "8 GiBs"},
            ("model.memory_bytes", "8 GiBs", "a size such as", "or auto"),
        ),
        ({"model.memory_bytes": "-1"}, ("model.memory_bytes", "-1")),
        ({"server.allowed_hosts": [1]}, ("server.allowed_hosts", "[1]", "a list of texts")),
        (
            {"model.trust_remote_code": "perhaps"},
            ("model.trust_remote_code", "perhaps", "true | false"),
        ),
        ({"model.path": 7}, ("model.path", "7", "a text")),
        ({"log.level": ["info"]}, ("log.level", "debug")),
    ],
)
def test_bad_values_are_refused_with_the_allowed_ones(
    flags: dict[str, object], parts: tuple[str, ...]
) -> None:
    message = refusal(flags=flags)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("value", ["2024-01-01", "07:32:00", "[1, 2024-01-01]", "{ a = 1 }"])
def test_values_of_any_toml_kind_are_refused_and_shown(tmp_path: Path, value: str) -> None:
    assert "server.port" in refusal(written(tmp_path, f"[server]\nport = {value}\n"))


def test_an_unknown_key_suggests_the_nearest_one_with_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, "[server]\nhost = 'x'\nprot = 8\n")
    message = refusal(file)
    assert "server.prot" in message
    assert "did you mean server.port?" in message
    assert f"{file}, line 3" in message


@pytest.mark.parametrize(
    "text", ["[sever]\nport = 1\n", "sever.port = 1\n", "sever = {port = 1}\n"]
)
def test_an_unknown_section_suggests_the_nearest_with_its_line(tmp_path: Path, text: str) -> None:
    message = refusal(written(tmp_path, text))
    assert "[sever]" in message
    assert "did you mean server?" in message
    assert "line 1" in message


def test_a_section_given_as_a_value_is_refused(tmp_path: Path) -> None:
    assert "server is a section" in refusal(written(tmp_path, "server = 8\n"))


def test_a_name_in_the_wrong_section_is_redirected(tmp_path: Path) -> None:
    assert "did you mean scheduler.max_running?" in refusal(
        written(tmp_path, "[model]\nmax_running = 8\n")
    )


def test_an_unknown_variable_suggests_the_nearest_one() -> None:
    message = refusal(variables={"HOLDFAST_SERVER_PROT": "8"})
    assert "HOLDFAST_SERVER_PROT" in message
    assert "did you mean HOLDFAST_SERVER_PORT?" in message


def test_other_variables_are_ignored() -> None:
    assert load(variables={"PATH": "/bin", "HOLDFAST_CONFIG": "x.toml"}).settings == Settings()


def test_an_unknown_flag_key_suggests_the_nearest_one() -> None:
    assert "did you mean scheduler.step_tokens?" in refusal(flags={"scheduler.step_token": "8"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"[server\n", b"[server]\nport = \n", b"\xff\xfe\x00"])
def test_a_file_that_is_not_toml_is_reported(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_bytes(content)
    message = refusal(file)
    assert str(file) in message
    assert "cannot be read" in message


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["min_chunk_tokens", "max_running"])
def test_contradictory_values_are_refused_with_both_origins(name: str) -> None:
    message = refusal(
        variables={"HOLDFAST_SCHEDULER_STEP_TOKENS": "16"},
        flags={f"scheduler.{name}": 17, "scheduler.max_running": 16},
    )
    assert "scheduler.step_tokens = 16 (variable HOLDFAST_SCHEDULER_STEP_TOKENS)" in message


def test_an_api_key_is_never_shown() -> None:
    effective = load(flags={"server.api_key": "hush"})
    assert shown_value(effective.settings, "server.api_key") == "(set)"
    assert "1234" not in refusal(flags={"server.api_key": 1234})
    assert "hush" not in repr(effective)


def test_every_default_is_valid_and_round_trips() -> None:
    for key, spec in SPECS.items():
        if not spec.secret:
            shown = shown_value(Settings(), key)
            assert value_of(load(flags={key: shown}).settings, key) == spec.default, key


def test_the_folders_file_precedes_the_users_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    in_home = home / ".config" / "holdfast" / "holdfast.toml"
    in_home.parent.mkdir(parents=True)
    assert default_file({"HOME": str(home)}) is None
    in_home.write_text("")
    assert default_file({"HOME": str(home)}) == in_home
    assert default_file({"HOME": str(home), "XDG_CONFIG_HOME": str(folder)}) is None
    in_folder = written(folder, "")
    assert default_file({"HOME": str(home)}) == in_folder
    named = default_file({"HOME": str(home), "HOLDFAST_CONFIG": "named.toml"})
    assert named == Path("named.toml")


@given(st.integers(min_value=0, max_value=1 << 60))
@example((1 << 60) - 1)
def test_shown_sizes_round_trip(size: int) -> None:
    assert parse_size(show_size(size)) == size


@given(
    st.integers(min_value=0, max_value=10**6),
    st.sampled_from(
        [
            ("KiB", 1024),
            ("k", 1024),
            ("KB", 1000),
            ("mib", 1 << 20),
            ("MB", 10**6),
            ("G", 1 << 30),
            ("TiB", 1 << 40),
            ("", 1),
        ]
    ),
    st.sampled_from(["", " ", "  "]),
)
def test_sizes_are_numbers_times_their_unit(number: int, unit: tuple[str, int], gap: str) -> None:
    assert parse_size(f"{number}{gap}{unit[0]}") == number * unit[1]


@given(
    st.decimals(min_value=0, max_value=10**5, places=3),
    st.sampled_from([("s", 1.0), ("", 1.0), ("ms", 0.001), ("min", 60.0), ("h", 3600.0)]),
)
def test_durations_are_numbers_times_their_unit(number: object, unit: tuple[str, float]) -> None:
    assert parse_seconds(f"{number} {unit[0]}") == pytest.approx(float(str(number)) * unit[1])


@given(st.sampled_from([parse_size, parse_seconds]), st.text(max_size=12))
def test_any_other_text_is_refused_or_not_negative(parse: object, text: str) -> None:
    assert callable(parse)
    try:
        value = parse(text)
    except ValueError:
        return
    assert value >= 0


@given(
    st.sampled_from(sorted(SPECS)),
    st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans(), st.lists(st.text())),
)
def test_any_value_is_accepted_or_refused_by_name(key: str, value: object) -> None:
    try:
        load(flags={key: value})
    except ConfigError as error:
        assert key.partition(".")[0] in str(error)


@pytest.mark.parametrize("key", sorted(SPECS))
def test_zero_means_what_the_documentation_says_or_is_refused(key: str) -> None:
    """A user who writes 0 wants none, and must never get an automatic value instead."""
    spec = SPECS[key]
    if spec.kind not in ("number", "size", "duration"):
        return
    texts: tuple[object, ...] = (0, "0") if spec.kind == "number" else (0, "0", "0.0")
    for written_value in texts:
        for source in ("flag", "variable"):
            given: dict[str, object] = {key: written_value}
            try:
                if source == "flag":
                    settings = load(flags=given).settings
                else:
                    settings = load(variables={spec.variable: str(written_value)}).settings
            except ConfigError as error:
                assert key in str(error)
                assert spec.limits.in_words() in str(error)
                continue
            assert value_of(settings, key) == 0
            assert re.search(r"\b0\b", spec.doc), "the description must say what 0 means"


@pytest.mark.parametrize("key", sorted(SPECS))
def test_off_words_and_negative_numbers_are_allowed_only_where_documented(
    key: str,
) -> None:
    spec = SPECS[key]
    words = ["none", "off", "never", "no", "unlimited", "-1", "-0.5"]
    if spec.kind in ("switch", "list", "choice") or (spec.kind == "text" and not spec.values):
        return
    for word in words:
        try:
            settings = load(variables={spec.variable: word}).settings
        except ConfigError as error:
            assert key in str(error)
        else:
            is_name = spec.kind == "text" and word in ("unlimited", "-1", "-0.5")
            assert is_name or word in f"{allowed(spec)} {spec.doc}"
            is_nothing = value_of(settings, key) in (0, None, "off", "never")
            assert is_name or is_nothing
