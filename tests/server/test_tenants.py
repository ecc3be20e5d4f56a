"""Everything that determines a tenant or a session, on every route that uses the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.front.application import DIALECTS
from holdfast.front.server.access import named_key, write_keys
from tests.fakes.server_process import ServerProcess, running_server, until

STORY = (
    "The harbour master counted the boats twice before the storm, and wrote the number on the "
    "wall. " * 4
)
KEYS = {"alice": "the key of alice", "bob": "the key of bob"}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """An answer's figures about its prompt."""

    cached: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class Asking:
    """The sender of a request, and the parts that identify it."""

    key_header: str = "authorization"
    key: str = "alice"
    tenant: str = "one"
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)

    def all_headers(self) -> dict[str, str]:
        secret = KEYS[self.key]
        shown = f"Bearer {secret}" if self.key_header == "authorization" else secret
        return {self.key_header: shown, **self.headers}


def counts_of(answer: Any) -> Counts:
    """The figures of any protocol's answer."""
    if "usage" not in answer:
        return Counts(cached=answer["cached_tokens"], prompt=answer["prompt_eval_count"])
    usage = answer["usage"]
    for kind in ("prompt", "input"):
        if details := usage.get(f"{kind}_tokens_details"):
            return Counts(cached=details["cached_tokens"], prompt=usage[f"{kind}_tokens"])
    cached = usage["cache_read_input_tokens"]
    return Counts(
        cached=cached, prompt=cached + usage["input_tokens"] + usage["cache_creation_input_tokens"]
    )


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, kw_only=True)
class Route:
    """A route that uses the prefix cache, and a request with a text."""

    body: Callable[[str], dict[str, Any]]
    has_sessions: bool = True
    session_headers: tuple[str, ...] = ()
    writer: str = ""  # the route that prefills the text first, if this one caches nothing


ROUTES = {
    "/v1/chat/completions": Route(
        body=lambda text: {"messages": conversation(text), "max_tokens": 1},
    ),
    "/v1/completions": Route(
        body=lambda text: {"prompt": text, "max_tokens": 1},
    ),
    "/v1/responses": Route(
        body=lambda text: {"input": text, "max_output_tokens": 1},
        session_headers=("session-id", "session_id"),
    ),
    "/v1/responses/compact": Route(
        body=lambda text: {"model": "demo", "input": text, "max_output_tokens": 4},
        session_headers=("session-id", "session_id"),
    ),
    "/v1/messages": Route(
        body=lambda text: {"model": "demo", "messages": conversation(text), "max_tokens": 1},
        session_headers=("x-claude-code-session-id",),
    ),
    "/api/chat": Route(
        body=lambda text: {
            "messages": conversation(text),
            "stream": False,
            "options": {"num_predict": 1},
        },
    ),
    "/api/generate": Route(
        body=lambda text: {"prompt": text, "stream": False, "options": {"num_predict": 1}},
    ),
    "/v1/embeddings": Route(
        body=lambda text: {"input": text, "pooling": "last"},
        has_sessions=False,
        writer="/v1/completions",
    ),
    "/v1/rerank": Route(
        body=lambda text: {"query": "storm", "documents": [text]},
        has_sessions=False,
    ),
    "/v2/rerank": Route(
        body=lambda text: {"query": "storm", "documents": [text]},
        has_sessions=False,
    ),
}
# mean pooling, as here, prefills every token each time
MEANS = ("/api/embed", "/api/embeddings")
READ_NOTHING = {  # POST without using the prefix cache
    *(
        "/v1/messages/count_tokens",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}/cancel",
    ),
    *("/tokenize", "/detokenize", "/apply-template", "/v1/chat/completions/control"),
    *(
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
    ),
    *("/api/show", "/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/{digest}"),
    *(f"/admin/models/{{id:path}}/{what}" for what in ("load", "unload", "pin")),
    *(f"/v1/sessions{rest}" for rest in ("", "/import", "/{session_id}/fork")),
}
ALICE = Asking()
SAME_TENANT = {  # they describe the sender but do not select the cache
    "nothing else": ALICE,
    "the key in x-api-key": Asking(key_header="x-api-key"),
    "the key in api-key": Asking(key_header="api-key"),
    "user": Asking(body={"user": "a"}),
    "safety_identifier": Asking(body={"safety_identifier": "a"}),
    "metadata": Asking(body={"metadata": {"user_id": "a"}}),
    "X-Session-ID": Asking(headers={"X-Session-ID": "a"}),
}
OTHER_TENANTS = {
    "Authorization": Asking(key="bob"),
    "X-Holdfast-Tenant": Asking(tenant="another"),
    "cache_salt": Asking(body={"cache_salt": "a"}),
    "another cache_salt": Asking(body={"cache_salt": "b"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def server(model_folder: Path, folder: Path) -> Iterator[ServerProcess]:
    keys = [
        named_key(name, key, is_admin=False, priority="interactive", max_requests=None)
        for name, key in KEYS.items()
    ]
    write_keys(folder / "keys.json", keys)
    settings = (
        "--store",
        str(folder / "store"),
        "--set",
        f"server.keys_file={folder / 'keys.json'}",
    )
    with running_server(str(model_folder), "--name", "demo", *settings) as server:
        yield server


@dataclass(frozen=True)
class Asked:
    """A server, and a test whose texts are not cached yet."""

    server: ServerProcess
    test: str

    def request(self, method: str, path: str, asking: Asking, **more: Any) -> httpx.Response:
        headers = {"X-Holdfast-Tenant": f"{asking.tenant} of {self.test}", **asking.all_headers()}
        return httpx.request(
            method, f"{self.server.url}{path}", headers=headers, timeout=60, **more
        )

    def post(self, path: str, asking: Asking, body: dict[str, Any] | None = None) -> httpx.Response:
        whole = {**(ROUTES[path].body(STORY) if body is None else body), **asking.body}
        return self.request("POST", path, asking, json=whole)

    def counts(self, path: str, asking: Asking) -> Counts:
        response = self.post(path, asking)
        assert response.status_code == 200, response.text
        return counts_of(response.json())

    def session_status(self, session_id: str, asking: Asking) -> int:
        """The status of a request for a session."""
        salt = {"cache_salt": asking.body["cache_salt"]} if "cache_salt" in asking.body else {}
        return self.request("GET", f"/v1/sessions/{session_id}", asking, params=salt).status_code


@pytest.fixture
def asked(server: ServerProcess, request: pytest.FixtureRequest) -> Asked:
    return Asked(server, request.node.name)


def test_every_operation_with_a_body_is_in_one_table() -> None:
    posted = {
        each.path for dialect in DIALECTS for each in dialect.operations if each.method == "POST"
    }
    assert posted == {*ROUTES, *MEANS, *READ_NOTHING}


@pytest.mark.parametrize("path", ROUTES)
def test_another_tenant_finds_nothing_in_the_cache(asked: Asked, path: str) -> None:
    first = asked.counts(ROUTES[path].writer or path, ALICE)
    assert (first.cached, first.prompt > 80) == (0, True)
    found = {name: asked.counts(path, asking) for name, asking in SAME_TENANT.items()}
    assert found == dict.fromkeys(SAME_TENANT, found["nothing else"])
    assert found["nothing else"].cached > first.prompt - 20
    others = {name: asked.counts(path, asking).cached for name, asking in OTHER_TENANTS.items()}
    assert others == dict.fromkeys(OTHER_TENANTS, 0)


@pytest.mark.parametrize("path", [path for path, route in ROUTES.items() if route.has_sessions])
def test_a_session_belongs_to_its_tenant_under_every_spelling(asked: Asked, path: str) -> None:
    spellings: dict[str, Callable[[str], Asking]] = {
        "header": lambda name: Asking(headers={"X-Session-ID": name}),
        "field": lambda name: Asking(body={"session_id": name}),
        "cache key": lambda name: Asking(body={"prompt_cache_key": name}),
        **{
            header: (lambda name, header=header: Asking(headers={header: name}))
            for header in ROUTES[path].session_headers
        },
    }
    for name, spelled in spellings.items():
        asked.counts(path, spelled(name))
        assert asked.session_status(name, ALICE) == 200
        others = {
            other: asked.session_status(name, asking) for other, asking in OTHER_TENANTS.items()
        }
        assert others == dict.fromkeys(OTHER_TENANTS, 404)


@pytest.mark.parametrize("field_name", ["session_id", "prompt_cache_key"])
@pytest.mark.parametrize(
    "path", [*(path for path, route in ROUTES.items() if not route.has_sessions), *MEANS]
)
def test_routes_without_sessions_refuse_a_session_name(
    asked: Asked, path: str, field_name: str
) -> None:
    body = {"input": STORY, "prompt": STORY} if path in MEANS else None
    refused = asked.post(path, Asking(body={field_name: "a"}), body)
    assert refused.status_code == 400
    assert field_name in refused.text


@pytest.mark.parametrize("body", [{"metadata": {}}, {"items": [{"role": "user", "content": "a"}]}])
def test_a_conversation_takes_its_salt_only_from_the_query(
    asked: Asked, body: dict[str, Any]
) -> None:
    path = "/v1/conversations"
    refused = asked.post(path, ALICE, {**body, "cache_salt": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
    salted = asked.post(f"{path}?cache_salt=a", ALICE, body).json()["id"]
    statuses = [
        asked.request("GET", f"{path}/{salted}{query}", ALICE).status_code
        for query in ("?cache_salt=a", "?cache_salt=b", "")
    ]
    assert statuses == [200, 404, 404]


def written_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_no_key_is_on_disk(asked: Asked, folder: Path) -> None:
    asked.counts("/v1/completions", ALICE)
    until(lambda: len(written_in(folder / "store")) > 1000, "blocks on disk")
    assert [key for key in KEYS.values() if key.encode() in written_in(folder)] == []
