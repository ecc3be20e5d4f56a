"""`holdfast launch` with programs that record how they were started, and a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from holdfast.agents import AGENTS
from holdfast.cli.launch import _no_proxy_variables
from holdfast.config import ServerSettings
from holdfast.front.server.http_server import ServerCertificate
from holdfast.models.download import DEMO_ID
from tests.fakes.certificates import CertificateFiles
from tests.fakes.command_line import invoked
from tests.fakes.echo_server import EchoServer
from tests.fakes.http_clients import served_on_a_thread
from tests.fakes.recording_agent import RecordingAgent, install
from tests.fakes.scripted_gateway import MODEL
from tools.terminal import ENTER, Terminal

KEY = "the-servers-key"
SETTINGS = ServerSettings(port=0, shutdown_seconds=0, api_key=KEY)
USERS_FILES = (
    ".claude/settings.json",
    ".codex/config.toml",
    ".config/opencode/opencode.json",
    ".aider.conf.yml",
    ".env",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of the real application with a key and one model, on a separate thread."""
    with served_on_a_thread(settings=SETTINGS) as url:
        yield url


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> CertificateFiles:
    return CertificateFiles(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def secure_url(files: CertificateFiles) -> Iterator[str]:
    """The same, behind TLS."""
    certificate = ServerCertificate(certificate=str(files.certificate), key=str(files.key))
    with served_on_a_thread(settings=SETTINGS, certificate=certificate) as url:
        yield url.replace("http:", "https:")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the user's own configuration; the PATH contains only the programs in `bin`."""
    for name in USERS_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("the user's own\n")
    (tmp_path / "bin").mkdir()
    for name, value in {
        "HOME": str(tmp_path),
        "PATH": str(tmp_path / "bin"),
        "COLUMNS": "200",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(url: str, *arguments: str, key: str = KEY) -> Result:
    return invoked(["launch", "--url", url, "--api-key", key, *arguments])


def agent_of(machine: Path, name: str) -> RecordingAgent:
    return install(machine / "bin", AGENTS[name].program)


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_is_started_without_touching_the_users_files(
    name: str, machine: Path, url: str
) -> None:
    agent = agent_of(machine, name)
    before = {path: path.read_bytes() for path in machine.rglob("*") if path.is_file()}
    result = launched(url, name, "do", "--something", "exit=0")
    assert result.exit_code == 0, result.output
    record = agent.record
    assert record["arguments"][-3:] == ["do", "--something", "exit=0"]
    assert record["folder"] == str(machine)
    told = str([record["arguments"], record["environment"], record["files"]])
    for fact in (url, MODEL, KEY):
        assert fact in told
    # Claude Code and pi get larger numbers, because they keep 13,000 and 16,384 free
    assert {"claude": "14792", "pi": "17920"}.get(name, "2048") in told
    assert KEY not in " ".join(record["arguments"])
    assert set(record["modes"]) <= {"0o700"}
    assert not [
        part for part in record["arguments"] if "holdfast-" in part and Path(part).exists()
    ], "the run's folder is gone"
    agent.record_file.unlink()
    assert {path: path.read_bytes() for path in machine.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("ending", "code"), [("exit=0", 0), ("exit=3", 3), (f"die={signal.SIGKILL:d}", 137)]
)
def test_the_agents_exit_code_is_passed_on(ending: str, code: int, machine: Path, url: str) -> None:
    agent_of(machine, "codex")
    assert launched(url, "codex", ending).exit_code == code


def test_two_dashes_before_the_agents_arguments_are_accepted(machine: Path, url: str) -> None:
    agent = agent_of(machine, "qwen")
    assert launched(url, "qwen", "--", "--help", "exit=0").exit_code == 0
    assert agent.record["arguments"][-2:] == ["--help", "exit=0"]
    assert "--" not in agent.record["arguments"]


def test_signals_to_the_launcher_are_forwarded_except_the_terminals(
    machine: Path, url: str
) -> None:
    agent_of(machine, "claude")
    command = [
        sys.executable,
        "-m",
        "holdfast.cli.main",
        "launch",
        "--url",
        url,
        "--api-key",
        KEY,
        "claude",
        "wait",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline().startswith("waiting")
        launcher.send_signal(signal.SIGINT)  # a terminal would have sent it to the agent too
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 7


@pytest.mark.timeout(60)
def test_a_signal_that_comes_while_the_agent_starts_is_forwarded(
    machine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_of(machine, "claude")
    start = subprocess.Popen

    def start_and_signal(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", start_and_signal)
    assert launched(url, "claude", "wait").exit_code in (7, 128 + signal.SIGTERM)


def test_print_shows_a_keyless_shell_command_and_runs_nothing(machine: Path, url: str) -> None:
    agent = agent_of(machine, "opencode")
    result = launched(url, "--print", "opencode", "run", "two words", "exit=0")
    assert result.exit_code == 0
    assert not agent.was_started
    assert KEY not in result.output
    assert subprocess.run(["/bin/sh", "-c", result.stdout], check=False).returncode == 0
    assert agent.record["arguments"] == ["run", "two words", "exit=0"]
    assert url in agent.record["environment"]["OPENCODE_CONFIG_CONTENT"]


def test_print_shows_files_too(machine: Path, url: str) -> None:
    result = launched(url, "--print", "claude")
    assert result.exit_code == 0
    assert "# settings.json" in result.output
    assert KEY not in result.output


def test_a_context_too_small_for_the_agent_gets_a_warning(machine: Path, url: str) -> None:
    agent = agent_of(machine, "opencode")
    result = launched(url, "opencode", "exit=0")
    assert result.exit_code == 0
    assert f"{MODEL} has a 2,048-token context, but opencode needs at least 20,000" in result.output
    assert agent.was_started


def test_one_line_names_the_server_and_model_of_the_agent(machine: Path, url: str) -> None:
    agent_of(machine, "codex")
    result = launched(url, "codex", "exit=0")
    assert (
        f"holdfast: using the server at {url} (model {MODEL}, context 2,048 tokens)\n"
        in result.stderr
    )


def test_without_a_terminal_a_demonstration_model_needs_an_option(
    echo: EchoServer,
    machine: Path,
) -> None:
    agent = agent_of(machine, "claude")
    echo.models = [DEMO_ID]
    refused = launched(echo.url, "claude", "exit=0")
    assert not agent.was_started
    allowed = launched(echo.url, "--allow-demo", "claude", "exit=0")
    assert refused.exit_code == 2
    assert "holdfast-demo is a demonstration model with three million parameters" in refused.output
    assert "holdfast serve mlx-community/" in refused.output
    assert "--allow-demo" in refused.output
    assert allowed.exit_code == 0
    assert agent.was_started


@pytest.mark.parametrize(("typed", "code"), [("n", 1), ("y", 0)])
def test_on_a_terminal_a_demonstration_model_needs_confirmation(
    echo: EchoServer, typed: str, code: int, machine: Path
) -> None:
    agent = agent_of(machine, "claude")
    echo.models = [DEMO_ID]
    own = ("--url", echo.url, "--api-key", KEY, "--model", DEMO_ID, "claude")
    command = [sys.executable, "-m", "holdfast.cli.main", "launch", *own, "exit=0"]
    with Terminal(command, cwd=machine, columns=300) as terminal:
        terminal.wait_for(r"Start it anyway\? \[y/N\]")
        terminal.type(typed + ENTER)
        assert terminal.wait() == code
    assert agent.was_started == (code == 0)
    again = f"holdfast launch --url {echo.url} --api-key KEY --model {DEMO_ID} claude"
    how = f"to continue this conversation: {again} --continue or {again} --resume ID"
    assert (how in terminal.text) == (code == 0)


@pytest.mark.parametrize("name", AGENTS)
def test_a_missing_agent_is_reported_with_its_install_command(name: str, machine: Path) -> None:
    result = invoked(["launch", name])
    assert result.exit_code == 127
    assert AGENTS[name].install in result.output


def test_the_list_shows_which_agents_are_installed(machine: Path) -> None:
    agent = agent_of(machine, "codex")
    result = invoked(["launch"])
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines()[: len(AGENTS)])
    assert set(lines) == set(AGENTS)
    assert str(agent.program) in lines["codex"]
    assert "not installed: npm" in lines["claude"]


def test_a_missing_server_is_reported_with_how_to_start_one(machine: Path) -> None:
    agent = agent_of(machine, "claude")
    result = launched("http://127.0.0.1:9", "claude")
    assert result.exit_code == 2
    assert (
        "no server is running at http://127.0.0.1:9. Start one in another terminal: holdfast serve"
        in result.output
    )
    assert not agent.was_started


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (
            ("claude",),
            "wrong",
            "does not accept this API key; pass the right one with --api-key KEY",
        ),
        (("claude",), "", "needs an API key: pass it with --api-key KEY"),
        (("--model", "gpt", "claude"), KEY, "does not serve gpt; it serves: " + MODEL),
        (("--small-model", "gpt", "claude"), KEY, "does not serve gpt"),
        (("clade",), KEY, "Did you mean claude?"),
        (("emacs",), KEY, "The agents are: claude, codex"),
        (
            ("claude", "--url", "x"),
            KEY,
            "put launch's options before the agent's name: holdfast launch --url",
        ),
        (
            ("claude", "-p", "x", "--allow-demo"),
            KEY,
            "before the agent's name: holdfast launch --allow-demo … claude",
        ),
    ],
)
def test_a_failed_launch_is_one_line_with_the_reason(
    arguments: tuple[str, ...], key: str, said: str, machine: Path, url: str
) -> None:
    agent = agent_of(machine, "claude")
    result = launched(url, *arguments, key=key)
    assert result.exit_code == 2
    assert said in result.output
    assert not agent.was_started


PROXY = "http://127.0.0.1:9"
PROXIES = dict.fromkeys(("HTTP_PROXY", "https_proxy"), PROXY)


@pytest.mark.parametrize("name", AGENTS)
def test_agents_do_not_ask_a_proxy_for_this_machine(
    name: str, machine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen Code ignores NO_PROXY and sends everything to the proxy, if one is set."""
    for variable, value in {**PROXIES, "NO_PROXY": "example.org"}.items():
        monkeypatch.setenv(variable, value)
    agent = agent_of(machine, name)
    assert launched(url, name, "exit=0").exit_code == 0
    told = agent.record["environment"]
    if name == "qwen":
        assert {variable: told[variable] for variable in PROXIES} == dict.fromkeys(PROXIES, "")
    else:
        assert {variable: told[variable] for variable in PROXIES} == PROXIES
        assert told["NO_PROXY"] == told["no_proxy"] == "example.org,127.0.0.1"


def test_without_a_proxy_qwen_code_gets_no_proxy_variables(
    machine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)
    agent = agent_of(machine, "qwen")
    assert launched(url, "qwen", "exit=0").exit_code == 0
    assert "HTTP_PROXY" not in agent.record["environment"]


def test_a_remote_server_is_reached_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    for ignores_it in (True, False):
        assert _no_proxy_variables("https://studio.example", ignores_no_proxy=ignores_it) == {}


def test_agents_on_node_trust_the_servers_own_certificate(
    machine: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_SERVER_TLS_CERT", "cert.pem")
    monkeypatch.setenv("HOLDFAST_SERVER_TLS_KEY", "key.pem")
    agent = agent_of(machine, "qwen")
    assert launched(url, "qwen", "exit=0").exit_code == 0
    assert agent.record["environment"]["NODE_EXTRA_CA_CERTS"] == str(machine / "cert.pem")


def test_the_agent_trusts_this_commands_certificates_and_its_own(
    machine: Path, secure_url: str, files: CertificateFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "company.pem").write_text("the company's own\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(files.trusted))
    monkeypatch.setenv("NODE_EXTRA_CA_CERTS", str(machine / "company.pem"))
    agent = agent_of(machine, "codex")
    assert launched(secure_url, "codex", "exit=0").exit_code == 0
    record = agent.record
    assert record["environment"]["CODEX_CA_CERTIFICATE"] == str(files.trusted)
    trusted = record["files"]["node_extra_ca_certs.pem"]
    assert "the company's own\n" in trusted
    assert files.trusted.read_text() in trusted


def test_an_untrusted_certificate_is_not_reported_as_a_missing_server(
    machine: Path, secure_url: str
) -> None:
    agent_of(machine, "claude")
    result = launched(secure_url, "claude")
    assert result.exit_code == 2
    assert f"{secure_url} presents a certificate that is not trusted" in result.output
    assert "SSL_CERT_FILE=cert.pem" in result.output
    assert "holdfast serve" not in result.output


def test_a_tls_server_asked_without_tls_gets_a_hint(machine: Path, secure_url: str) -> None:
    agent_of(machine, "claude")
    result = launched(secure_url.replace("https:", "http:"), "claude")
    assert result.exit_code == 2
    assert f"response. Does it speak TLS? Then its URL is {secure_url}." in result.output


def test_a_url_may_be_written_without_its_scheme(machine: Path, url: str) -> None:
    agent = agent_of(machine, "claude")
    assert launched(url.removeprefix("http://"), "claude", "exit=0").exit_code == 0
    assert agent.record["environment"]["ANTHROPIC_BASE_URL"] == url


def test_a_question_as_an_error_gets_no_full_stop(machine: Path, url: str) -> None:
    agent_of(machine, "claude")
    assert "/v1/models? Is that a Holdfast server?" in launched(f"{url}/other", "claude").output
