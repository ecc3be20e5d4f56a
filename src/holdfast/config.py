"""All settings, read once from flags, variables and a file into frozen dataclasses.

To add a setting, add a field here and a row in `docs/reference/configuration.md`; a test compares
them. `config_sources` derives everything else from the field: its type, its unit (the end of its
name) and the arguments of `_setting`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

from holdfast.config_sources import (
    FREE,
    Limits,
    RawValue,
    SettingSpec,
    convert,
    describe,
    spec_of,
    values_in_file,
    values_in_flags,
    values_in_variables,
)
from holdfast.errors import ConfigError

T = TypeVar("T")

DtypeChoice: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
DequantizeChoice: TypeAlias = Literal["auto", "never", "always"]
DeviceChoice: TypeAlias = Literal["auto", "cpu", "gpu"]
LayoutChoice: TypeAlias = Literal["auto", "rows", "split", "solo"]
KVBitsChoice: TypeAlias = Literal["auto", "native", "8", "8/4", "4"]
ConstrainChoice: TypeAlias = Literal["strict", "auto"]
WarmAheadChoice: TypeAlias = Literal["auto", "on", "off"]
LogLevel: TypeAlias = Literal["critical", "error", "warning", "info", "debug"]
LogFormat: TypeAlias = Literal["text", "json"]

_MIB = 1 << 20
NOT_NEGATIVE = Limits(at_least=0)
AT_LEAST_ONE = Limits(at_least=1)
POSITIVE = Limits(above=0)
# how many heartbeats, at least, a worker must miss before it counts as hung
LEAST_MISSED_HEARTBEATS = 3


def _setting(
    default: T,
    doc: str,
    *,
    flag: str = "",
    short: str = "",
    limits: Limits = FREE,
    off: bool = False,
    secret: bool = False,
    values: str = "",
) -> T:
    """Declare a setting as a dataclass field.

    default: None lets Holdfast decide; users write it as `auto` (for a duration, as `never`).
    doc: the text in the documentation. flag, short: the options on the command line; empty: none.
    off: whether users may write `off` for 0. secret: whether the value is never shown. values: the
    allowed texts, in words, if not any text is allowed.
    """
    metadata = {
        "doc": doc,
        "flag": flag,
        "short": short,
        "limits": limits,
        "off": off,
        "secret": secret,
        "values": values,
    }
    setting_field: T = field(default=default, metadata=metadata, repr=not secret)
    return setting_field


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and for whom the server listens."""

    host: str = _setting("127.0.0.1", "Address to listen on.", flag="--host")
    port: int = _setting(
        8321,
        "Port to listen on; 0 picks a free port.",
        flag="--port",
        short="-p",
        limits=Limits(at_least=0, at_most=65535),
    )
    api_key: str = _setting(
        "", "Key that clients must send; empty: no key is required.", flag="--api-key", secret=True
    )
    keys_file: str = _setting(
        "auto",
        "File of named API keys, written by `holdfast keys`. `auto`: the user's own file, if it"
        " exists; `off`: no file.",
        values="auto | off | FILE",
    )
    trusted_proxies: tuple[str, ...] = _setting(
        (),
        "Addresses or networks of proxies whose X-Forwarded-For and Forwarded headers are "
        "trusted; empty: no proxy is trusted.",
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Additional names allowed in the Host header; loopback names and `host` are always "
        "allowed, `*` allows all.",
        flag="--allowed-hosts",
    )
    model_aliases: tuple[str, ...] = _setting(
        ("claude-*",),
        "Additional model names, which may contain `*`. `NAME` is an alias of the first model, "
        "`NAME=ID` of the model with that id.",
    )
    codex_models: bool = _setting(
        False,
        "Whether to list the models to Codex in its own format, with context lengths and short "
        "instructions.",
    )
    cors_origins: tuple[str, ...] = _setting(
        (),
        "Additional origins whose web pages may call the server. Pages and apps on the caller's"
        " own machine are always allowed.",
        flag="--cors",
    )
    tls_cert: str = _setting(
        "",
        "PEM file with the HTTPS certificate and its chain; empty: serve HTTP.",
        flag="--tls-cert",
    )
    tls_key: str = _setting(
        "", "PEM file with the private key of the certificate.", flag="--tls-key"
    )
    page: bool = _setting(
        True,
        "Whether browsers get the page at `/`; without it, they get a description in text.",
        flag="--no-page",
    )
    shutdown_seconds: float = _setting(
        10.0,
        "How long running answers may continue when the server stops; 0: they end immediately.",
        limits=NOT_NEGATIVE,
    )
    stalled_seconds: float = _setting(
        60.0,
        "How long a client may stop reading its answer before the connection is closed.",
        limits=POSITIVE,
    )
    reconnect_seconds: float = _setting(
        60.0,
        "How long to keep an answer whose connection was lost for a retry of the same request; "
        "0: cancel it immediately.",
        limits=NOT_NEGATIVE,
    )
    unattended_seconds: float = _setting(
        5.0,
        "How long an answer is generated after its connection was lost, unless another request "
        "needs the model; 0: it pauses immediately.",
        limits=NOT_NEGATIVE,
    )
    head_seconds: float = _setting(
        10.0,
        "How long a client may take to send the head of a request (the path and headers).",
        limits=POSITIVE,
    )
    body_seconds: float = _setting(
        15.0, "How long a client may be silent while it sends a body.", limits=POSITIVE
    )
    keep_alive_seconds: float = _setting(
        75.0, "How long a connection may be idle between two requests.", limits=POSITIVE
    )
    loop_tick_seconds: float = _setting(
        0.05,
        "How often the lateness of the event loop (`event_loop_lag_seconds`) is measured while "
        "requests run.",
        limits=Limits(at_least=0.001),
    )
    max_connections_per_address: int = _setting(
        1024,
        "Maximum number of open connections per client address; further connections get a 429.",
        limits=AT_LEAST_ONE,
    )

    @property
    def scheme(self) -> str:
        """The scheme of the server's URLs."""
        return "https" if self.tls_cert else "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Which model is loaded, and how."""

    path: str = _setting(
        "",
        "Model folder, Hub id or name in `models.toml`; empty: all models, or the bundled demo "
        "model.",
        flag="MODEL",
    )
    name: str = _setting(
        "",
        "Id under which the model is served; empty: the folder name, the Hub id or "
        "`holdfast-demo`.",
        flag="--name",
    )
    revision: str = _setting(
        "", "Branch, tag or commit on the Hub; empty: the main branch.", flag="--revision"
    )
    adapters: tuple[str, ...] = _setting(
        (),
        "LoRA adapters of the model, as `NAME=FOLDER`. Requests name one as `MODEL:NAME`.",
        flag="--adapter",
    )
    dtype: DtypeChoice = _setting(
        "auto", "Number format of the computation; `auto`: float32 on a CPU.", flag="--dtype"
    )
    device: DeviceChoice = _setting(
        "auto", "Device to compute on; `auto`: the GPU if there is one."
    )
    dequantize: DequantizeChoice = _setting(
        "auto",
        "Whether to unpack quantized weights when the model is loaded; `auto`: only on a CPU, and "
        "only those that the C kernel does not support.",
    )
    layout: LayoutChoice = _setting(
        "auto",
        "How the sequences of a batch become forward passes; `auto`: the fastest correct way.",
        flag="--layout",
    )
    kv_bits: KVBitsChoice = _setting(
        "auto",
        "Bits of keys and values, in memory and on disk: `native` (not quantized), 8, `8/4` (8-bit "
        "keys, 4-bit values), or 4 (with 5-bit keys). `auto`: native, but 8 bits for new sequences "
        "when memory runs short.",
        flag="--kv-bits",
    )
    speculation: str = _setting(
        "auto",
        "Whether to draft tokens and verify several in one step, where this is faster. `auto`: "
        "drafts from earlier text, and on a CPU from a small model with "
        "the same vocabulary, if one is found; `off`: no drafts; MODEL (its name, folder or Hub "
        "id): "
        "drafts from that model, too.",
        flag="--speculation",
        values="auto | off | MODEL",
    )
    context_tokens: int | None = _setting(
        None,
        "Maximum length of prompt and answer together, in tokens; `auto`: the model's own limit.",
        flag="--context",
        # less leaves no room for an answer after a chat template and one sentence
        limits=Limits(at_least=64),
    )
    trust_remote_code: bool = _setting(False, "Whether to run Python files that come with a model.")
    threads: int | None = _setting(
        None,
        "Threads for computing on a CPU; `auto`: one per core.",
        flag="--threads",
        limits=AT_LEAST_ONE,
    )
    memory_bytes: int | None = _setting(
        None,
        "Memory budget for the KV of running requests; `auto`: derived from the free memory.",
        flag="--memory",
        limits=AT_LEAST_ONE,
    )
    wired_bytes: int | None = _setting(
        None,
        "On a Mac, how much memory to wire (never page out) while requests run; `auto`: the size "
        "of the weights of a large model; 0: none.",
        limits=NOT_NEGATIVE,
    )
    keep_thoughts: bool = _setting(
        False,
        "Whether to keep the reasoning of earlier turns in the prompt, if the chat template has"
        " an option for it.",
    )
    warm_ahead: WarmAheadChoice = _setting(
        "auto",
        "Whether an idle server prefills the next turn of a conversation in advance; `auto`: if "
        "the chat template rewrites earlier answers.",
    )
    known_text_bytes: int = _setting(
        32 * _MIB,
        "Size of the cache of texts and their tokens, so that a conversation is tokenized only "
        "once; 0: no cache.",
        limits=NOT_NEGATIVE,
    )
    startup_seconds: float = _setting(
        600.0, "How long a worker may take to load its model.", limits=POSITIVE
    )

    def of_base_model(self, **changes: Any) -> ModelSettings:
        """These settings for a model without adapters."""
        return replace(self, adapters=(), **changes)


DEFAULT_MODEL = ModelSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogSettings:
    """Which models are served if no single one is named."""

    file: str = _setting(
        "",
        "File with the models to serve; empty: `models.toml` next to the user's settings file, "
        "if it exists.",
        flag="--models",
    )
    folders: tuple[str, ...] = _setting(
        ("~/.lmstudio/models", "~/.cache/lm-studio/models"),
        "Folders to search for models, each as FOLDER/MODEL or FOLDER/OWNER/MODEL; empty: none.",
    )
    hub_cache: bool = _setting(True, "Whether to serve the models in the Hub's cache.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """How the front manages its workers."""

    load_seconds: float = _setting(
        60.0,
        "How long a request waits while its model loads; 0: it is refused immediately.",
        limits=NOT_NEGATIVE,
    )
    idle_seconds: float | None = _setting(
        20 * 60.0 if sys.platform == "darwin" else None,
        "How long a catalog model stays loaded without a request, unless `models.toml` sets "
        "`idle`; 0: it is unloaded immediately. On a Mac the default is 20 min.",
        limits=NOT_NEGATIVE,
    )
    max_loaded: int | None = _setting(
        None,
        "Maximum number of loaded models; `auto`: as many as fit in `memory_bytes`.",
        limits=AT_LEAST_ONE,
    )
    memory_bytes: int | None = _setting(
        None,
        "Memory for all loaded models together, as measured; `auto`: three quarters of the "
        "memory of the machine or the GPU.",
        limits=AT_LEAST_ONE,
    )
    place_seconds: float = _setting(
        300.0,
        "How long a request waits for other models to be unloaded to make room for its model; 0: "
        "it is refused immediately.",
        limits=NOT_NEGATIVE,
    )
    turn_seconds: float = _setting(
        30.0,
        "How long a model in use stays loaded while another model is waiting for its memory; 0: "
        "until its running answers end.",
        limits=NOT_NEGATIVE,
    )
    unread_bytes: int = _setting(
        256 << 10,
        "How many bytes of an answer a slow client may leave unread before generation pauses, "
        "until half of that is left.",
        limits=Limits(at_least=1024),
    )
    heartbeat_seconds: float = _setting(
        1.0, "How often a worker reports that it is alive.", limits=POSITIVE
    )
    hang_seconds: float = _setting(
        7.0,
        "A worker is replaced if it has been silent, without progress, for this long. One whose "
        "step takes this long is replaced if that is also 20 times as long as usual.",
        limits=POSITIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Limits of the scheduler and of a step."""

    max_running: int = _setting(32, "Maximum number of running sequences.", limits=AT_LEAST_ONE)
    max_queued: int = _setting(
        256,
        "Maximum number of waiting sequences; further requests get a 503. 0: no request may wait.",
        limits=NOT_NEGATIVE,
    )
    step_tokens: int | None = _setting(
        None,
        "Maximum number of tokens to prefill per step; `auto`: 512 on a CPU, 2048 on a GPU.",
        limits=AT_LEAST_ONE,
    )
    stall_seconds: float = _setting(
        0.25,
        "Longest time by which prefill chunks may lengthen a step in which other sequences decode.",
        limits=POSITIVE,
    )
    min_chunk_tokens: int = _setting(
        32, "Smallest prefill chunk, unless less of the prompt is left.", limits=AT_LEAST_ONE
    )
    expected_output_tokens: int = _setting(
        1024,
        "Number of answer tokens for which memory is reserved at admission.",
        limits=AT_LEAST_ONE,
    )
    aging_seconds: float = _setting(
        60.0,
        "How long a request of priority `batch` waits, while others run, before it counts as "
        "interactive; 0: immediately.",
        limits=NOT_NEGATIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSettings:
    """Limits of a single request, and of requests per key or address."""

    max_requests_per_key: int = _setting(
        0,
        "Maximum number of running and waiting answers per API key; further requests get a 429."
        " 0: no limit.",
        limits=NOT_NEGATIVE,
    )
    max_requests_per_address: int = _setting(
        0,
        "Maximum number of running and waiting answers per client address. 0: no limit.",
        limits=NOT_NEGATIVE,
    )
    request_seconds: float = _setting(
        0.0,
        "How long a request may take, including waiting; clients may set a shorter limit. 0: no"
        " limit.",
        limits=NOT_NEGATIVE,
    )
    max_choices: int = _setting(16, "Largest `n`.", limits=AT_LEAST_ONE)
    max_stop_strings: int = _setting(
        16, "Maximum number of stop strings; 0: none are allowed.", limits=NOT_NEGATIVE
    )
    max_top_logprobs: int = _setting(
        20, "Largest `top_logprobs`; 0: only the chosen token's.", limits=NOT_NEGATIVE
    )
    repeated_tokens: int = _setting(
        2048,
        "Reasoning or an answer is ended when this many tokens at its end "
        "repeat one sequence that is at most an eighth as long; 0: never.",
        limits=NOT_NEGATIVE,
    )
    max_body_bytes: int = _setting(
        64 * _MIB, "Largest body of a request.", limits=Limits(at_least=1024)
    )
    max_import_bytes: int = _setting(
        64 * 1024 * _MIB, "Largest session file to import.", limits=Limits(at_least=1024)
    )
    max_schema_parts: int = _setting(
        512,
        "Maximum number of subschemas and listed values in an enforced JSON schema.",
        limits=AT_LEAST_ONE,
    )
    max_schema_depth: int = _setting(
        32, "Maximum depth of an enforced JSON schema.", limits=Limits(at_least=1, at_most=50)
    )
    max_tools: int = _setting(
        512, "Maximum number of tools in a request; 0: none are allowed.", limits=NOT_NEGATIVE
    )
    max_tool_parts: int = _setting(
        50_000,
        "Maximum number of keys and values in all tool definitions of a request.",
        limits=AT_LEAST_ONE,
    )
    max_batch_prompts: int = _setting(
        256,
        "Maximum number of prompts in a completions request, each counted `n` times.",
        limits=AT_LEAST_ONE,
    )
    max_inputs: int = _setting(
        2048,
        "Maximum number of texts in an embeddings request, or of documents in a reranking request.",
        limits=AT_LEAST_ONE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolsSettings:
    """Settings for tool calls."""

    constrain: ConstrainChoice = _setting(
        "strict",
        "For which tools a grammar enforces valid calls when calling a tool is optional: `strict`: "
        "for tools with `strict: true`; `auto`: for all tools.",
    )


DEFAULT_TOOLS = ToolsSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagesSettings:
    """Images in prompts."""

    urls: bool = _setting(
        False,
        "Whether to fetch images from public http and https URLs. Images within the request are "
        "always allowed.",
    )
    max_count: int = _setting(
        100,
        "Maximum number of images in a prompt; the oldest of more are left out with a note. 0: "
        "none are allowed.",
        limits=NOT_NEGATIVE,
    )
    max_bytes: int = _setting(20 * _MIB, "Largest image file.", limits=Limits(at_least=1024))
    max_pixels: int = _setting(
        40_000_000, "Maximum number of pixels of an image.", limits=AT_LEAST_ONE
    )
    check_seconds: float = _setting(
        30.0,
        "How long fetching the images of a request and writing them to disk may take.",
        limits=POSITIVE,
    )
    disk_bytes: int = _setting(
        4096 * _MIB,
        "Disk space for the images of prompts; the least recently used are deleted first.",
        limits=Limits(at_least=1024),
    )


DEFAULT_IMAGES = ImagesSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The prefix cache on disk and in RAM."""

    folder: str = _setting(
        "auto",
        "Folder of the prefix cache on disk. `auto`: in the user's folder (for the Python "
        "library: RAM only); `off`: RAM only.",
        flag="--store",
        values="auto | off | FOLDER",
    )
    ram_bytes: int | None = _setting(
        None,
        "RAM budget for the KV of ended requests; `auto`: a quarter of the KV budget for cached "
        "blocks, and free KV memory for parked states; `off` or 0: ended requests are cached on "
        "disk only.",
        limits=NOT_NEGATIVE,
        off=True,
    )
    disk_bytes: int | None = _setting(
        None,
        "Disk budget of the prefix cache; `auto`: a fifth of the volume, but at least 2 GiB stay "
        "free; `off` or 0: no block is kept on disk.",
        limits=NOT_NEGATIVE,
        off=True,
    )
    daily_write_bytes: int | None = _setting(
        None,
        "Maximum bytes of the prefix cache written to disk per day; `auto`: 100 GiB; 0: none.",
        limits=NOT_NEGATIVE,
    )
    max_sessions: int = _setting(
        1000,
        "Maximum number of sessions per model; opening one more closes the least recently used "
        "session.",
        limits=AT_LEAST_ONE,
    )
    session_seconds: float = _setting(
        604800.0,
        "How long a session lives after its last use, unless it sets `ttl_seconds`.",
        limits=POSITIVE,
    )
    pinned_percent: int = _setting(
        50,
        "Percentage of the disk budget (without a disk cache, of the RAM budget) that pinned "
        "sessions and imports may use. 0: nothing can be pinned.",
        limits=Limits(at_least=0, at_most=100),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesSettings:
    """Stored responses and conversations, in the store's folder or in memory."""

    max_count: int = _setting(
        10_000,
        "Maximum number of stored responses and conversations; the least recently used are "
        "deleted first.",
        limits=AT_LEAST_ONE,
    )
    max_bytes: int = _setting(
        256 * _MIB,
        "Maximum total size of stored responses and conversations; a larger one is not stored.",
        limits=Limits(at_least=1 << 16),
    )
    keep_seconds: float = _setting(
        30 * 86400.0,
        "How long a response or conversation is stored after its last use, also by a response "
        "that continues it.",
        limits=POSITIVE,
    )
    max_background: int = _setting(
        64,
        "Maximum number of responses running in the background; further ones get a 429. 0: none "
        "may run.",
        limits=NOT_NEGATIVE,
    )


DEFAULT_RESPONSES = ResponsesSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """The log and traces."""

    level: LogLevel = _setting("info", "Lowest level of messages to log.", flag="--log-level")
    format: LogFormat = _setting(
        "text", "Format of the log: plain lines, or one JSON object per line.", flag="--log-format"
    )
    content: bool = _setting(False, "Whether to log prompts and answers.", flag="--log-content")
    file: str = _setting(
        "background",
        "File to which the log is also written. `auto`: a file in Holdfast's state folder, "
        "where `holdfast logs` looks; `off`: no file; `background` (default): like `auto`, but "
        "only if standard error is neither a terminal nor a pipe.",
        flag="--log-file",
        values="auto | off | background | FILE",
    )
    file_bytes: int = _setting(
        10 * _MIB, "Size at which the log file is rotated.", limits=Limits(at_least=1 << 16)
    )
    old_files: int = _setting(
        4, "How many rotated log files to keep.", limits=Limits(at_least=1, at_most=100)
    )
    traces: bool = _setting(
        False,
        "Whether to trace requests with OpenTelemetry, configured by the variables `OTEL_…`.",
        flag="--traces",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings, by section."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    catalog: CatalogSettings = CatalogSettings()
    residency: ResidencySettings = ResidencySettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    limits: LimitsSettings = LimitsSettings()
    tools: ToolsSettings = ToolsSettings()
    images: ImagesSettings = ImagesSettings()
    store: StoreSettings = StoreSettings()
    responses: ResponsesSettings = ResponsesSettings()
    log: LogSettings = LogSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveSettings:
    """The settings in force, and the source of each value.

    origins: key → "default", "file PATH", "variable HOLDFAST_X", "flag --x" or "argument MODEL".
    """

    settings: Settings
    origins: Mapping[str, str]
    file: Path | None
    environ: Mapping[str, str] = field(repr=False)
    flags: Mapping[str, object] = field(repr=False)

    def read_again(self) -> EffectiveSettings:
        """Read the same sources again. Raises ConfigError."""
        return load_settings(file=self.file, environ=self.environ, flags=self.flags)


def _sections() -> dict[str, type[Any]]:
    """The type of each section of the settings, by name."""
    return get_type_hints(Settings)


def all_specs() -> dict[str, SettingSpec]:
    """Return the specs of all settings by key (`section.name`), in the documentation's order."""
    specs = {}
    for section, section_type in _sections().items():
        type_hints = get_type_hints(section_type)
        for setting_field in fields(section_type):
            spec = spec_of(
                key=f"{section}.{setting_field.name}",
                type_hint=type_hints[setting_field.name],
                default=setting_field.default,
                metadata=setting_field.metadata,
            )
            specs[spec.key] = spec
    return specs


def default_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the settings file.

    This is the file that HOLDFAST_CONFIG names, else ./holdfast.toml, else the one in
    ~/.config/holdfast; None if none of them exists.
    """
    if environ.get("HOLDFAST_CONFIG"):
        return Path(environ["HOLDFAST_CONFIG"])
    folders = [Path.cwd(), *config_folders(environ)]
    return next((file for folder in folders if (file := folder / "holdfast.toml").is_file()), None)


def config_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The user's settings folder, ~/.config/holdfast, which may not exist.

    Empty if the user lacks a home folder.
    """
    if environ.get("XDG_CONFIG_HOME"):
        return (Path(environ["XDG_CONFIG_HOME"]) / "holdfast",)
    return (Path(environ["HOME"]) / ".config" / "holdfast",) if environ.get("HOME") else ()


def load_settings(
    *, file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]
) -> EffectiveSettings:
    """Read the settings: flags override environment variables, which override the file.

    file: the settings file (see `default_file`); None: read no file. flags: key → value, None if
    absent. Raises ConfigError, which names the key, value, allowed values and source.
    """
    specs = all_specs()
    raw_values: dict[str, RawValue] = {}
    if file is not None:
        raw_values.update(values_in_file(specs, file))
    raw_values.update(values_in_variables(specs, environ))
    raw_values.update(values_in_flags(specs, flags))
    values: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
    for key, raw_value in raw_values.items():
        section, _, name = key.partition(".")
        values[section][name] = convert(specs[key], raw_value)
    settings = Settings(
        **{
            section: section_type(**values[section])
            for section, section_type in _sections().items()
        }
    )
    origins = {key: raw_values[key].origin if key in raw_values else "default" for key in specs}
    _check_combinations(settings, origins)
    return EffectiveSettings(
        settings=settings, origins=origins, file=file, environ=environ, flags=flags
    )


def value_of(settings: Settings, key: str) -> Any:
    """The value of a setting."""
    section, _, name = key.partition(".")
    return getattr(getattr(settings, section), name)


def shown_value(settings: Settings, key: str) -> str:
    """The value of a setting as a person would write it; "(set)" for a secret."""
    return describe(all_specs()[key], value_of(settings, key))


def _check_combinations(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise ConfigError if the values of two settings contradict each other."""
    scheduler = settings.scheduler
    for name in ("min_chunk_tokens", "max_running"):
        value = getattr(scheduler, name)
        if scheduler.step_tokens is not None and scheduler.step_tokens < value:
            raise ConfigError(
                f"scheduler.{name} = {value} ({origins[f'scheduler.{name}']}) must not be larger "
                "than "
                f"scheduler.step_tokens = {scheduler.step_tokens} "
                f"({origins['scheduler.step_tokens']})"
            )
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(settings.server, name) and not getattr(settings.server, other):
            raise ConfigError(
                f"server.{name} ({origins[f'server.{name}']}) needs server.{other} "
                f"(--{other.replace('_', '-')}) as well"
            )
    residency = settings.residency
    if residency.hang_seconds < LEAST_MISSED_HEARTBEATS * residency.heartbeat_seconds:
        raise ConfigError(
            f"residency.hang_seconds = {residency.hang_seconds} "
            f"({origins['residency.hang_seconds']}) must be at least "
            f"{LEAST_MISSED_HEARTBEATS} times residency.heartbeat_seconds = "
            f"{residency.heartbeat_seconds} ({origins['residency.heartbeat_seconds']})"
        )
