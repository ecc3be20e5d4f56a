"""Every setting of Holdfast, read once from flags, variables and a file into frozen dataclasses. A room receives its own slice.

A new setting is a field here and a row in `docs/reference/configuration.md` (a test compares the two). Its type, its unit
(the end of its name) and the arguments of `_setting` say all that the readers in `config_sources` need to know.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

from holdfast.config_sources import (
    FREE,
    Given,
    Limits,
    SettingSpec,
    convert,
    describe,
    given_by_file,
    given_by_flags,
    given_by_variables,
    spec_of,
)
from holdfast.errors import ConfigError

T = TypeVar("T")

DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
DequantizeChoice: TypeAlias = Literal["auto", "never", "always"]
DeviceChoice: TypeAlias = Literal["auto", "cpu", "gpu"]
LayoutChoice: TypeAlias = Literal["auto", "rows", "split", "solo"]
CodecChoice: TypeAlias = Literal["native", "q8", "q4"]
ConstrainChoice: TypeAlias = Literal["strict", "auto"]
WarmAheadChoice: TypeAlias = Literal["auto", "on", "off"]
LogLevel: TypeAlias = Literal["critical", "error", "warning", "info", "debug"]
LogFormat: TypeAlias = Literal["text", "json"]

_MIB = 1 << 20
LEAST_BEATS = 3  # that a worker may miss before it is taken to hang


def _setting(
    default: T, doc: str, *, flag: str = "", short: str = "", limits: Limits = FREE, off: bool = False, secret: bool = False
) -> T:
    """A field with what readers and documentation need. `off`: that word stands for 0, while 0 itself stands for `auto`, as in
    every setting that may be None, for which people write `auto`: Holdfast decides. A duration that may be is written `never`.
    """
    metadata = {"doc": doc, "flag": flag, "short": short, "limits": limits, "off": off, "secret": secret}
    made: T = field(default=default, metadata=metadata, repr=not secret)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and for whom the server listens."""

    host: str = _setting("127.0.0.1", "Address to listen on.", flag="--host")
    port: int = _setting(
        8321, "Port to listen on; 0 takes a free one.", flag="--port", short="-p", limits=Limits(at_least=0, at_most=65535)
    )
    api_key: str = _setting("", "Key that clients must send; empty: none is needed.", flag="--api-key", secret=True)
    keys_file: str = _setting(
        "auto", "File of named API keys, as `holdfast keys` writes it. `auto`: your own, if there is one; `off`: none."
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (), "Addresses or networks of proxies whose X-Forwarded-For and Forwarded headers are believed; empty: nobody's are."
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Further names that may stand in a request's Host header; loopback names and `host` always may, `*` allows all.",
        flag="--allowed-hosts",
    )
    model_aliases: tuple[str, ...] = _setting(
        ("claude-*",),
        "Further names of models, which may have `*` in them: `NAME` means the first model, `NAME=ID` the one with that id.",
    )
    codex_models: bool = _setting(
        False, "Tell Codex of the models in its own form, context length and all; it then has short instructions from here."
    )
    cors_origins: tuple[str, ...] = _setting(
        (),
        "Additional origins whose web pages may call the server; pages and apps of the caller's own machine always may.",
        flag="--cors",
    )
    tls_cert: str = _setting(
        "", "File (PEM) with the certificate to speak HTTPS with, then those that vouch for it; empty: HTTP.", flag="--tls-cert"
    )
    tls_key: str = _setting("", "File (PEM) with the certificate's key.", flag="--tls-key")
    shutdown_seconds: float = _setting(
        10.0, "How long running answers may go on when the server is asked to stop.", limits=Limits(at_least=0)
    )
    stalled_seconds: float = _setting(
        60.0, "How long a client may read nothing of what is sent to it before its connection is closed.", limits=Limits(above=0)
    )
    reconnect_seconds: float = _setting(
        60.0,
        "How long to keep an answer after its connection was lost, in case the same request is sent again; 0: cancel it at once.",
        limits=Limits(at_least=0),
    )
    unattended_seconds: float = _setting(
        5.0,
        "How long such an answer goes on being generated while nobody else wants one; then it pauses.",
        limits=Limits(at_least=0),
    )
    head_seconds: float = _setting(
        10.0, "How long a client may take to send the head of a request (its path and headers).", limits=Limits(above=0)
    )
    body_seconds: float = _setting(15.0, "How long a client may be silent while it sends a body.", limits=Limits(above=0))
    keep_alive_seconds: float = _setting(75.0, "How long a connection may be idle between two requests.", limits=Limits(above=0))
    loop_tick_seconds: float = _setting(
        0.05,
        "How often the event loop's lateness (`event_loop_lag_seconds`) is looked at while requests are served: 0.1 ms each.",
        limits=Limits(at_least=0.001),
    )
    max_connections_per_address: int = _setting(
        1024, "Most connections that one address may have open; one more is answered with a 429.", limits=Limits(at_least=1)
    )

    @property
    def scheme(self) -> str:
        """What the server's URLs begin with."""
        return "https" if self.tls_cert else "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model is loaded, and how."""

    path: str = _setting(
        "", "Model folder, Hub id or name in `models.toml`; empty: all models, or the bundled demo model.", flag="MODEL"
    )
    name: str = _setting("", "Id under which the model is served; empty: folder name, Hub id or `holdfast-demo`.", flag="--name")
    revision: str = _setting("", "Branch, tag or commit on the Hub; empty: the main branch.", flag="--revision")
    dtype: DtypeChoice = _setting("auto", "Number format to compute in; `auto`: float32 on a CPU.", flag="--dtype")
    device: DeviceChoice = _setting("auto", "What computes; `auto`: the GPU where there is one.")
    dequantize: DequantizeChoice = _setting("auto", "Whether quantized weights are unpacked at load; `auto`: on a CPU.")
    layout: LayoutChoice = _setting("auto", "How a step is laid out; `auto`: the fastest that is right.", flag="--layout")
    context_tokens: int | None = _setting(
        None,
        "Longest prompt and answer together, in tokens; `auto`: the model's own limit.",
        flag="--context",
        limits=Limits(at_least=64),  # with less, a chat template and one sentence leave no room for an answer
    )
    trust_remote_code: bool = _setting(False, "Whether Python files that come with a model may be run.")
    threads: int | None = _setting(
        None,
        "Threads that compute on a CPU; `auto`: one per core.",
        flag="--threads",
        limits=Limits(at_least=0),
    )
    memory_bytes: int | None = _setting(
        None,
        "Budget for the live KV of all requests; `auto`: what memory is left.",
        flag="--memory",
        limits=Limits(at_least=0),
    )
    wired_bytes: int | None = _setting(
        None,
        "On a Mac, how much memory the system may not page out while the model serves; `auto`: the weights, where they are a "
        "large part of what the GPU may use.",
        limits=Limits(at_least=0),
    )
    keep_thoughts: bool = _setting(
        False, "Whether the thoughts of earlier turns stay in the prompt, for chat templates that have a switch for it."
    )
    warm_ahead: WarmAheadChoice = _setting(
        "auto",
        "Whether a server without anything else to do reads a conversation as its next turn will show it; `auto`: where the chat "
        "template rewrites answers of the past, such as without their thoughts.",
    )
    known_text_bytes: int = _setting(
        32 * _MIB,
        "Most bytes of texts and their tokens that the front keeps, so that a conversation is tokenized once; 0: none.",
        limits=Limits(at_least=0),
    )
    startup_seconds: float = _setting(600.0, "How long a worker may take to load its model.", limits=Limits(above=0))


DEFAULT_MODEL = ModelSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSettings:
    """Which models are served where no single one is named."""

    file: str = _setting(
        "", "File with the models to serve; empty: `models.toml` in the folder of settings, if it is there.", flag="--models"
    )
    folders: tuple[str, ...] = _setting(
        ("~/.lmstudio/models", "~/.cache/lm-studio/models"),
        "Folders in which models are looked for, each as FOLDER/MODEL or FOLDER/OWNER/MODEL; empty: none.",
    )
    hub_cache: bool = _setting(True, "Whether the models in the Hub's cache are served as well.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """How the front looks after its workers."""

    load_seconds: float = _setting(
        60.0, "How long a request waits for a model that is being loaded; 0: it is refused at once.", limits=Limits(at_least=0)
    )
    idle_seconds: float | None = _setting(
        20 * 60.0 if sys.platform == "darwin" else None,
        "How long a model of a catalog stays loaded without a request, where `models.toml` does not say; 0: not at all. On a "
        "Mac, where models share the memory of everything else, 20 min by default.",
        limits=Limits(at_least=0),
    )
    max_loaded: int | None = _setting(
        None, "Most models that are loaded at once; `auto`: as many as `memory_bytes` holds.", limits=Limits(at_least=1)
    )
    memory_bytes: int | None = _setting(
        None,
        "Memory for all loaded models together, as it was measured; `auto`: three quarters of the machine's, or of the GPU's.",
        limits=Limits(at_least=0),
    )
    place_seconds: float = _setting(
        300.0, "How long a request waits until other models have made room for its own.", limits=Limits(at_least=0)
    )
    turn_seconds: float = _setting(
        30.0, "How long a model that is in use stays loaded when another one is wanted.", limits=Limits(at_least=0)
    )
    unread_bytes: int = _setting(
        256 << 10,
        "How much of one answer may wait to be read by its client; then no more of it is made until half of that is read.",
        limits=Limits(at_least=1024),
    )
    heartbeat_seconds: float = _setting(1.0, "How often a worker says that it is alive.", limits=Limits(above=0))
    hang_seconds: float = _setting(
        7.0,
        "A worker that is silent for so long, or whose step takes so long and 20 times what such steps take, is replaced.",
        limits=Limits(above=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Who runs when, and how much a step takes."""

    max_running: int = _setting(32, "Most sequences that run at once.", limits=Limits(at_least=1))
    max_queued: int = _setting(256, "Most sequences that wait; beyond it requests get a 503.", limits=Limits(at_least=0))
    step_tokens: int | None = _setting(
        None, "Most tokens that one step reads; `auto`: 512 on a CPU, 2048 on a GPU.", limits=Limits(at_least=0)
    )
    stall_seconds: float = _setting(
        0.25, "How much longer a step in which others decode may become by a prompt's chunk.", limits=Limits(above=0)
    )
    min_chunk_tokens: int = _setting(32, "Smallest chunk of a prompt, unless less is left of it.", limits=Limits(at_least=1))
    expected_output_tokens: int = _setting(
        1024, "Tokens of answer reserved at admission; it grows past that.", limits=Limits(at_least=1)
    )
    aging_seconds: float = _setting(
        60.0,
        "How long a request of a batch waits, while others run, before it counts as an interactive one.",
        limits=Limits(at_least=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSettings:
    """What one request may ask for."""

    max_requests_per_key: int = _setting(
        0,
        "Most answers that one API key may have running or waiting at once; more get a 429. 0: no bound.",
        limits=Limits(at_least=0),
    )
    max_requests_per_address: int = _setting(0, "The same for one client address, whatever its keys.", limits=Limits(at_least=0))
    request_seconds: float = _setting(
        0.0,
        "How long a request may take, waiting included, before it ends with an error; clients may ask for less. 0: no bound.",
        limits=Limits(at_least=0),
    )
    max_choices: int = _setting(16, "Largest `n`.", limits=Limits(at_least=1))
    max_stop_strings: int = _setting(16, "Most stop strings.", limits=Limits(at_least=0))
    max_top_logprobs: int = _setting(20, "Largest `top_logprobs`.", limits=Limits(at_least=0))
    repeated_thought_tokens: int = _setting(
        2048,
        "A thought ends when its last so many tokens are one piece of at most an eighth of them, again and again; 0: never.",
        limits=Limits(at_least=0),
    )
    max_body_bytes: int = _setting(64 * _MIB, "Largest body of a request.", limits=Limits(at_least=1024))
    max_import_bytes: int = _setting(
        64 * 1024 * _MIB, "Largest file of a session that is taken in.", limits=Limits(at_least=1024)
    )
    max_schema_parts: int = _setting(
        512, "Most subschemas and listed values in a JSON schema that an answer or a call is held to.", limits=Limits(at_least=1)
    )
    max_schema_depth: int = _setting(32, "How deep such a schema may be nested.", limits=Limits(at_least=1, at_most=50))
    max_tools: int = _setting(512, "Most tools in one request.", limits=Limits(at_least=0))
    max_tool_parts: int = _setting(
        50_000, "Most keys and values in the definitions of all tools of a request.", limits=Limits(at_least=1)
    )
    max_batch_prompts: int = _setting(
        256, "Most prompts in one request for completions, each counted `n` times.", limits=Limits(at_least=1)
    )
    max_inputs: int = _setting(
        2048, "Most texts in one request for embeddings, and documents in one for ranking.", limits=Limits(at_least=1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsSettings:
    """How calls of tools are written."""

    constrain: ConstrainChoice = _setting(
        "strict",
        "Whose calls are held to names and schemas where a model may call: `strict`: those that ask for it, `auto`: of all.",
    )


DEFAULT_TOOLS = ToolsSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where what was read stays, and in which form."""

    folder: str = _setting(
        "auto",
        "Folder for the prompt cache, kept across restarts. `auto`: in your user cache folder (the Python library: RAM only); "
        "`off`: RAM only.",
        flag="--store",
    )
    ram_bytes: int | None = _setting(
        None,
        "Budget in RAM for KV of requests that have ended, as blocks and as parked states; `auto`: a quarter of the KV budget "
        "for blocks, what running requests leave of it for parked states; `off`: on disk only.",
        limits=Limits(at_least=0),
        off=True,
    )
    disk_bytes: int | None = _setting(
        None, "Budget on disk; `auto`: a fifth of the volume, never its last 2 GiB.", limits=Limits(at_least=0)
    )
    daily_write_bytes: int | None = _setting(
        None, "Most bytes written to disk in a day, to spare it; `auto`: 100 GiB.", limits=Limits(at_least=0)
    )
    codec: CodecChoice = _setting("native", "Form of kept keys and values: exact, or quantized to 8 or 4 bits.")
    max_sessions: int = _setting(
        1000, "Most sessions of a model; one more ends the one that was used longest ago.", limits=Limits(at_least=1)
    )
    session_seconds: float = _setting(
        604800.0, "How long a session lives after its last use, if its opener says nothing else.", limits=Limits(above=0)
    )
    pinned_percent: int = _setting(
        50,
        "Part of the budget on disk, or in RAM without a disk, that pinned sessions and beginnings that clients mark may keep; "
        "an imported file may hold no more.",
        limits=Limits(at_least=0, at_most=100),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSettings:
    """What is kept of responses and conversations, in the store's folder or else in memory."""

    max_count: int = _setting(
        10_000, "Most responses and conversations that are kept; the one used longest ago makes room.", limits=Limits(at_least=1)
    )
    max_bytes: int = _setting(
        256 * _MIB, "Most bytes that they take together; what is larger alone is not kept.", limits=Limits(at_least=1 << 16)
    )
    keep_seconds: float = _setting(
        30 * 86400.0, "How long one is kept after it was used last, itself or in what continues it.", limits=Limits(above=0)
    )
    max_background: int = _setting(
        64, "Most responses that are made in the background at once; one more is answered with a 429.", limits=Limits(at_least=0)
    )


DEFAULT_RESPONSES = ResponsesSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """What is logged, and in which form."""

    level: LogLevel = _setting("info", "Least severe messages that are logged.", flag="--log-level")
    format: LogFormat = _setting("text", "Lines for people, or one JSON object per line.", flag="--log-format")
    content: bool = _setting(False, "Whether prompts and answers are logged as well.", flag="--log-content")
    file: str = _setting(
        "background",
        "Also write the log to this file. `auto`: in Holdfast's state folder, where `holdfast logs` looks; `off`: none; "
        "`background` (default): like `auto`, but only when standard error is neither a terminal nor a pipe.",
        flag="--log-file",
    )
    file_bytes: int = _setting(
        10 * _MIB, "Size at which that file is set aside and a new one is begun.", limits=Limits(at_least=1 << 16)
    )
    old_files: int = _setting(
        4, "How many that were set aside are kept; the oldest goes first.", limits=Limits(at_least=1, at_most=100)
    )
    traces: bool = _setting(
        False, "Whether requests are traced with OpenTelemetry: where to, the variables `OTEL_…` say.", flag="--traces"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, one slice per room that needs any."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    catalog: CatalogSettings = CatalogSettings()
    residency: ResidencySettings = ResidencySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    limits: LimitsSettings = LimitsSettings()
    tools: ToolsSettings = ToolsSettings()
    store: StoreSettings = StoreSettings()
    responses: ResponsesSettings = ResponsesSettings()
    log: LogSettings = LogSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSources:
    """Where settings are read from. `flags`: key → value; one of None was not given. No file: none is read."""

    file: Path | None
    environ: Mapping[str, str] = field(repr=False)
    flags: Mapping[str, object] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSettings:
    """The settings in force. `origins`: key → "default", "file PATH", "variable HOLDFAST_X", "flag --x" or "argument MODEL"."""

    settings: Settings
    origins: Mapping[str, str]
    sources: SettingsSources

    def read_again(self) -> EffectiveSettings:
        """The settings as the same sources say them now. Raises ConfigError."""
        return load_settings(file=self.sources.file, environ=self.sources.environ, flags=self.sources.flags)


def _sections() -> dict[str, type[Any]]:
    return get_type_hints(Settings)


def all_specs() -> dict[str, SettingSpec]:
    """Key (`section.name`) → what is known of the setting, in the order of the documentation."""
    specs = {}
    for section, slice_type in _sections().items():
        hints = get_type_hints(slice_type)
        for member in fields(slice_type):
            spec = spec_of(
                key=f"{section}.{member.name}", type_hint=hints[member.name], default=member.default, metadata=member.metadata
            )
            specs[spec.key] = spec
    return specs


def default_file(environ: Mapping[str, str], *, folder: Path | None = None) -> Path | None:
    """The settings file when none is named: HOLDFAST_CONFIG, ./holdfast.toml, or that in ~/.config/holdfast."""
    if environ.get("HOLDFAST_CONFIG"):
        return Path(environ["HOLDFAST_CONFIG"])
    places = [folder or Path.cwd(), *config_folders(environ)]
    return next((file for place in places if (file := place / "holdfast.toml").is_file()), None)


def config_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The user's folder of settings, ~/.config/holdfast; none for a user without a home. It need not be there."""
    if environ.get("XDG_CONFIG_HOME"):
        return (Path(environ["XDG_CONFIG_HOME"]) / "holdfast",)
    return (Path(environ["HOME"]) / ".config" / "holdfast",) if environ.get("HOME") else ()


def load_settings(*, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> EffectiveSettings:
    """Read all sources; flag > variable > file > default.

    file: None reads no file (see `default_file`). flags: key → value; a value of None was not given.
    Raises ConfigError, which names key, value, allowed values and where it came from.
    """
    specs = all_specs()
    given: dict[str, Given] = {}
    if file is not None:
        given.update(given_by_file(specs, file))
    given.update(given_by_variables(specs, environ))
    given.update(given_by_flags(specs, flags))
    values: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
    for key, source in given.items():
        section, _, name = key.partition(".")
        values[section][name] = convert(specs[key], source)
    settings = Settings(**{section: slice_type(**values[section]) for section, slice_type in _sections().items()})
    origins = {key: given[key].origin if key in given else "default" for key in specs}
    _check_together(settings, origins)
    sources = SettingsSources(file=file, environ=environ, flags=flags)
    return EffectiveSettings(settings=settings, origins=origins, sources=sources)


def value_of(settings: Settings, key: str) -> Any:
    """The value of one setting by its key."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def shown_value(settings: Settings, key: str) -> str:
    """The value of one setting as a person would write it; a secret shows only whether it is set."""
    return describe(all_specs()[key], value_of(settings, key))


def _check_together(settings: Settings, origins: Mapping[str, str]) -> None:
    """Refuse values that are good alone but not beside each other."""
    scheduler = settings.scheduler
    for name in ("min_chunk_tokens", "max_running"):
        smaller = getattr(scheduler, name)
        if scheduler.step_tokens is not None and scheduler.step_tokens < smaller:
            raise ConfigError(
                f"scheduler.{name} = {smaller} ({origins[f'scheduler.{name}']}) must not be larger than "
                f"scheduler.step_tokens = {scheduler.step_tokens} ({origins['scheduler.step_tokens']})"
            )
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(settings.server, name) and not getattr(settings.server, other):
            raise ConfigError(
                f"server.{name} ({origins[f'server.{name}']}) needs server.{other} (--{other.replace('_', '-')}) as well"
            )
    residency = settings.residency
    if residency.hang_seconds < LEAST_BEATS * residency.heartbeat_seconds:
        raise ConfigError(
            f"residency.hang_seconds = {residency.hang_seconds} ({origins['residency.hang_seconds']}) must be at least "
            f"{LEAST_BEATS} times residency.heartbeat_seconds = {residency.heartbeat_seconds} "
            f"({origins['residency.heartbeat_seconds']})"
        )
