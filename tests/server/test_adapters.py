"""A server with LoRA adapters: to clients, each is a separate model, and all share one copy of the
weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from holdfast.worker.engine import mlx_lm_hooks
from tests.fakes.adapters import write_adapter
from tests.fakes.command_line import holdfast_here
from tests.fakes.server_process import ServerProcess, served_model_folder, until

NOTES = "Notes:\n" + "".join(
    f"- The code of shed {shed} is {shed * 37}.\n" for shed in range(1, 30)
)
QUESTIONS = ("What is the code of shed 7?", "Which shed has the code 74?", "Say hello.")
NAMES = ("demo", "demo:sql", "demo:tone")
ANSWER_TOKENS = 24
SCALE = 16.0  # the trained model's answers change but remain sentences


@dataclass(frozen=True)
class Answer:
    text: str
    cached_tokens: int
    model: str


class Asked:
    """A server and the tenant that asks it."""

    def __init__(self, process: ServerProcess, tenant: str) -> None:
        self.url = process.url
        self.headers = {"X-Holdfast-Tenant": tenant}

    def chat(self, model: str, question: str = QUESTIONS[0], **more: Any) -> Answer:
        body = {
            "model": model,
            "messages": messages(question),
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            **more,
        }
        answer = self.post("/v1/chat/completions", body).raise_for_status().json()
        usage = answer["usage"]["prompt_tokens_details"]
        text = answer["choices"][0]["message"]["content"]
        return Answer(text, usage["cached_tokens"], answer["model"])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=120)


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": NOTES}, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "sql": made_adapter(root / "sql", model_folder, seed=0),
        "tone": made_adapter(root / "tone", model_folder, seed=1, num_layers=2),
    }


def made_adapter(folder: Path, model_folder: Path, **how: Any) -> Path:
    model, _ = mlx_lm_hooks.mlx_lm_utils().load_model(model_folder)
    return write_adapter(folder, model, scale=SCALE, **how)


def start(model_folder: Path, adapters: dict[str, Path], store: Path) -> ServerProcess:
    options = [
        part for each in adapters.items() for part in ("--adapter", "=".join(map(str, each)))
    ]
    server = ServerProcess(str(model_folder), "--name", "demo", "--store", str(store), *options)
    server.wait_ready()
    return server


@pytest.fixture(scope="module")
def process(
    model_folder: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    server = start(model_folder, adapters, tmp_path_factory.mktemp("shared") / "store")
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture
def server(process: ServerProcess, request: pytest.FixtureRequest) -> Asked:
    return Asked(process, request.node.name)


def of_mlx_lm(model_folder: Path, adapter: Path | None, question: str) -> str:
    """Greedy float32 answers of a model loaded by mlx-lm's own loader."""
    import mlx_lm
    from mlx_lm.models.cache import make_prompt_cache

    path = None if adapter is None else str(adapter)
    model, tokenizer = mlx_lm.load(str(model_folder), adapter_path=path)
    model.set_dtype(mx.float32)
    ids: Sequence[int] = tokenizer.apply_chat_template(
        messages(question), add_generation_prompt=True, return_dict=False
    )
    caches = make_prompt_cache(model)
    drawn: list[int] = []
    for _ in range(ANSWER_TOKENS):
        logits = model(mx.array([ids]), cache=caches)[0, -1]
        drawn.append(int(logits.argmax().item()))
        ids = drawn[-1:]
    return str(tokenizer.decode(drawn, skip_special_tokens=True))


@pytest.mark.slow
def test_an_adapter_answers_like_mlx_lm(
    server: Asked, model_folder: Path, adapters: dict[str, Path]
) -> None:
    folders = {"demo": None} | {f"demo:{name}": folder for name, folder in adapters.items()}
    answers = {name: server.chat(name) for name in folders}
    assert {name: answer.model for name, answer in answers.items()} == {n: n for n in folders}
    for name, folder in folders.items():
        expected = of_mlx_lm(model_folder, folder, QUESTIONS[0])
        assert answers[name].text.strip() == expected.strip()
    assert len({answer.text for answer in answers.values()}) == len(folders)


def test_concurrent_adapters_answer_as_when_alone(server: Asked, process: ServerProcess) -> None:
    asked = [(name, question) for name in NAMES for question in QUESTIONS]
    alone = [Asked(process, "alone").chat(*each).text for each in asked]
    with ThreadPoolExecutor(len(asked)) as crowd:
        together = list(crowd.map(lambda each: server.chat(*each).text, asked))
    assert together == alone


def test_cached_prompts_are_not_shared_between_adapters(server: Asked) -> None:
    fresh = {}
    for name in NAMES:
        fresh[name] = server.chat(name)
        assert fresh[name].cached_tokens == 0
    for name in NAMES:
        again = server.chat(name)
        assert again.cached_tokens > 200
        assert again.text == fresh[name].text


@pytest.mark.slow
def test_adapter_caches_stay_separate_after_a_restart(
    model_folder: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    before = ask_all(model_folder, adapters, store)
    assert {answer.cached_tokens for answer in before.values()} == {0}
    retrained = made_adapter(tmp_path / "tone", model_folder, seed=7)
    after = ask_all(model_folder, {**adapters, "tone": retrained}, store)
    for name in ("demo", "demo:sql"):
        assert after[name].cached_tokens > 200
        assert after[name].text == before[name].text
    assert after["demo:tone"].cached_tokens == 0
    assert after["demo:tone"].text != before["demo:tone"].text


def ask_all(model_folder: Path, adapters: dict[str, Path], store: Path) -> dict[str, Answer]:
    process = start(model_folder, adapters, store)
    try:
        server = Asked(process, "")
        answers = {name: server.chat(name) for name in NAMES}
        assert process.stop() == 0, process.log()
    finally:
        process.process.kill()
        process.process.wait()
    return answers


def test_a_models_session_import_refuses_an_adapters_session(server: Asked, tmp_path: Path) -> None:
    server.chat("demo:sql", session_id="mine")
    headers = server.headers

    def export(model: str) -> httpx.Response:
        url = f"{server.url}/v1/sessions/mine/export"
        return httpx.get(url, params={"model": model}, headers=headers, timeout=60)

    assert export("demo").status_code == 404
    exported = export("demo:sql").raise_for_status().content
    for model, status in (("demo", 400), ("demo:tone", 400), ("demo:sql", 200)):
        answer = httpx.post(
            f"{server.url}/v1/sessions/import",
            params={"model": model, "id": "theirs"},
            content=exported,
            headers=headers,
            timeout=60,
        )
        assert answer.status_code == status, answer.text


def test_adapters_are_listed_and_found_by_name(server: Asked) -> None:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == list(NAMES)
    assert [card["parent"] for card in cards] == [None, "demo", "demo"]
    assert httpx.get(f"{server.url}/v1/models/demo:sql").json()["id"] == "demo:sql"
    anthropic = {"anthropic-version": "2023-06-01"}
    cards = httpx.get(f"{server.url}/v1/models", headers=anthropic).json()["data"]
    assert [card["id"] for card in cards] == list(NAMES)
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert [(tag["name"], tag["details"]["parent_model"]) for tag in tags] == [
        ("demo:latest", ""),
        ("demo:sql", "demo"),
        ("demo:tone", "demo"),
    ]
    (model,) = httpx.get(f"{server.url}/health").json()["models"]
    assert model["adapters"] == ["sql", "tone"]
    assert "demo:sql: ready" in httpx.get(server.url).text
    tokens = [
        server.post("/tokenize", {"model": name, "prompt": "Hello!"}).json() for name in NAMES
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_adapters_are_shown_by_ps_and_at_startup(process: ServerProcess, tmp_path: Path) -> None:
    until(lambda: "demo:sql, demo:tone" in process.output(), "the list of adapters")
    listed = holdfast_here("ps", cwd=tmp_path).stdout
    assert process.url in listed
    assert "demo:tone" in listed


def test_models_ls_lists_what_only_the_running_server_has(
    process: ServerProcess, adapters: dict[str, Path], tmp_path: Path
) -> None:
    asked = ("models", "ls", "--url", process.url)
    told = json.loads(holdfast_here(*asked, "--json", cwd=tmp_path).stdout)
    assert "demo" not in [row["name"] for row in told["models"]]
    assert [(each["name"], each["parent"]) for each in told["only_served"]] == [
        ("demo", None),
        ("demo:sql", "demo"),
        ("demo:tone", "demo"),
    ]
    lines = holdfast_here(*asked, cwd=tmp_path).stdout.splitlines()
    (line,) = [line for line in lines if "demo:tone" in line]
    assert "only in the server" in line
    # an adapter that is also in models.toml is listed once
    file = tmp_path / "models.toml"
    folder = adapters["sql"]
    file.write_text(
        f"[models.demo]\npath = '{served_model_folder()}'\nadapters = {{ sql = '{folder}' }}\n"
    )
    told = json.loads(holdfast_here(*asked, "--models", str(file), "--json", cwd=tmp_path).stdout)
    (row,) = [row for row in told["models"] if row["name"] == "demo"]
    assert (row["state"], row["adapters"]) == ("ready", {"sql": str(folder)})
    assert [each["name"] for each in told["only_served"]] == ["demo:tone"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}),
        ("/v1/completions", {"prompt": "Hello!"}),
        ("/v1/responses", {"input": "Hello!"}),
        (
            "/v1/messages",
            {"max_tokens": 5, "messages": [{"role": "user", "content": "Hello!"}]},
        ),
        ("/v1/embeddings", {"input": "Hello!"}),
        ("/tokenize", {"prompt": "Hello!"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hello!"}]}),
        ("/api/generate", {"prompt": "Hello!"}),
        ("/api/show", {}),
    ],
)
def test_an_unknown_adapter_is_refused_with_the_known_ones(
    server: Asked, path: str, body: dict[str, Any]
) -> None:
    refused = server.post(path, {"model": "demo:sqll", **body})
    assert refused.status_code == 404
    error = refused.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert "demo:sqll" in message
    assert "available: demo, demo:sql, demo:tone" in message
