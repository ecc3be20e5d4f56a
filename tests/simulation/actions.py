"""The inputs of a simulated world: turns of agents, API calls, and injected faults.

A scenario is data, generated from a seed before the world begins, so a failing one can be shrunk by
dropping actions, and kept as a regression test.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias

from tests.simulation.pictures import PICTURES

Protocol: TypeAlias = Literal[
    "chat", "messages", "responses", "completions", "ollama", "generate"
]  # fmt: skip
Reader: TypeAlias = Literal["reads", "slow", "cancels", "breaks", "retries"]
Letters: TypeAlias = Literal["plain", "wide", "markup"]
BLOCK = 256
FORKS = 3  # names of forked sessions


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One request of an agent's conversation, sent after the agent's earlier turns have ended.

    tokens: approximate length of the new message. edge: the prompt is padded to end this many tokens
    after a block boundary; None: no padding. forget: how many of the last messages are dropped
    first, as after an edit. letters: whether the new message has multi-byte characters, or the
    texts of control tokens. system: the name of a system prompt. parts: messages are sent in parts.
    prefills: the request begins the answer. stop: stop sequences. key: the name of the agent's API
    key, or "wrong"; "": the administrator's. idempotency: the `Idempotency-Key`: none, a unique
    one, or one that other requests use, too. twins: how many more clients send the same request at
    the same time, every second one with another API key. repeats: it is sent again after its
    answer. regenerates: instead of sending a new message, the agent asks again for an answer to its
    last one. stores: the response is stored. chains: the request continues the agent's stored response by
    its id. converses: it belongs to the agent's conversation in the Responses API, which is created
    if there is none. compacts: the server first replaces the earlier messages by a summary.
    background: it runs in the background. looks: how the agent uses its stored response
    afterwards; "foreign": other callers try to read, cancel and delete it. images: the names of
    pictures in the new message. format: the name of the answer's format (`formats.py`). tools: the
    request declares tools (`tools.py`). tool_choice: whether the answer must call one; "strict": it
    may, and a grammar holds it to their schemas.
    """

    at: float
    agent: str
    tokens: int = 20
    edge: int | None = None
    max_tokens: int = 20
    model: str = "m"
    adapter: str = ""
    protocol: Protocol = "chat"
    streams: bool = True
    reader: Reader = "reads"
    read_pieces: int = 3  # before it cancels or breaks the connection
    wait_seconds: float = 1.0  # before it retries
    choices: int = 1
    kv_bits: str = ""
    session: str = ""
    tenant: str = ""
    forget: int = 0
    seed: int | None = None
    is_batch: bool = False
    timeout_seconds: float | None = None
    letters: Letters = "plain"
    system: str = ""
    parts: bool = False
    prefills: bool = False
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    key: str = ""
    idempotency: Literal["", "own", "common"] = ""
    twins: int = 0
    repeats: bool = False
    regenerates: bool = False
    stores: bool = False
    chains: bool = False
    converses: bool = False
    compacts: bool = False
    background: bool = False
    looks: Literal["", "read", "events", "foreign", "delete"] = ""
    images: tuple[str, ...] = ()
    format: Literal["", "any", "pick", "point", "words"] = ""
    tools: bool = False
    tool_choice: Literal["auto", "strict", "required", "named", "single", "none"] = "auto"

    @property
    def model_id(self) -> str:
        """The model that the request names."""
        return f"{self.model}:{self.adapter}" if self.adapter else self.model


@dataclass(frozen=True, kw_only=True)
class Branch:
    """An agent that has no open request continues another one's conversation. keep: how many of its
    messages.
    """

    at: float
    agent: str
    source: str
    keep: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """A short request of an administrator or of an agent."""

    at: float
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    key: str = ""
    tenant: str = ""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """An injected fault. `faults.py` implements each kind. only: part of the path of the files that an
    error of the disk affects.
    """

    at: float
    kind: str
    model: str = "m"
    seconds: float = 0.0
    number: int = 0
    name: str = ""
    error: int = 0
    only: str = ""


@dataclass(frozen=True, kw_only=True)
class KeyChange:
    """The file of API keys changes, and the server reads it again. kind: one key is removed, added or
    gets another limit; or the file is, for a moment, half written, damaged, readable by others, or
    gone.
    """

    at: float
    kind: Literal["remove", "add", "limit", "half", "damaged", "readable", "gone"]
    key: str = "alice"
    limit: int | None = None


Action: TypeAlias = Turn | Branch | Call | Trouble | KeyChange


# the options of a server that a scenario does not set
DEFAULT_OPTIONS: Mapping[str, Any] = {
    "models": ["m"],
    "has_store": True,
    "kv_bits": "native",
    "kv_tokens": 40_000,
    "ram_tokens": None,
    "max_running": 8,
    "max_queued": 256,
    "step_tokens": 512,
    "max_loaded": None,
    "idle_seconds": None,
    "max_sessions": 64,
    "store_bytes": None,
    "has_key": False,
    "keys": False,  # named API keys
    # limits on concurrent answers: of each key, of alice's, and of each address; 0 and None: off
    "key_requests": 0,
    "alice_requests": None,
    "address_requests": 0,
    "reconnect_seconds": 60.0,
    "unread_bytes": 256 << 10,  # of an answer, at which it pauses
    "step_seconds": 0.004,  # of device time
    "cut_loses_all": False,  # a power cut loses all unsynced data
    "second_layer": "none",  # of the model: `device.SecondLayer`
    "adapters": [],  # names; every model has them
    "has_draft_model": False,
    "sees_images": "",  # `vision.Vision`
    "image_bytes": None,  # on disk
    "repeats": False,  # whether the model repeats itself, so that drafts can be right
    "is_terse": False,  # the model ends most answers after a few tokens, and many at once
    "runs_ahead": False,  # a step is dispatched before the previous one is collected, as on a GPU
    "begins_ready": True,  # the first action waits until the server takes requests
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The input of a whole world. order: the seed of the scheduler. options: of the server, including
    the defaults.
    """

    order: int
    actions: tuple[Action, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {**DEFAULT_OPTIONS, **self.options})

    @property
    def ends_at(self) -> float:
        """When the last action happens, in seconds."""
        return max((action.at for action in self.actions), default=0.0)


# the weight of each kind of fault
TROUBLES: Mapping[str, int] = {
    "worker dies": 3,
    "worker dies after writes": 3,
    "workers keep dying": 1,
    "worker is suspended": 2,
    "worker hangs": 1,
    "step fails": 5,
    "step computes NaN": 4,
    "step is slow": 3,
    "step kills": 2,
    "a conversation kills": 2,
    "load fails": 2,
    "no process starts": 3,
    "server dies": 2,
    "server restarts": 2,
    "power cut": 2,
    "power cut after syncs": 4,
    "weights change": 1,
    "disk error": 7,
    "disk is full": 2,
    "file is damaged": 3,
    "file vanishes": 2,
    "clock jumps": 2,
    "machine sleeps": 2,
    "memory is short": 2,
    "memory is enough": 1,
    "image process dies": 2,
    "image process hangs": 2,
    "image process is slow": 1,
    "image process does not start": 1,
    "vision tower fails": 1,
}
OF_IMAGES = {
    "image process dies", "image process hangs", "image process is slow",
    "image process does not start", "vision tower fails",
}  # fmt: skip
DISK_OPERATIONS = (
    "open", "read", "write", "sync", "rename", "unlink", "stat", "list", "mkdir", "touch", "sqlite",
)  # fmt: skip
FREQUENT = ("open", "read", "write", "sync", "rename", "unlink", "sqlite")  # those of most calls
# texts that occur in answers, some within others
STOPS = (("qu",), ("e ", "ing", "in"), (" th", "é"), ("zzzz",), ("日", "🎉"))
# of requests, with their frequencies; "generate" is Ollama's /api/generate
PROTOCOLS: Sequence[Protocol] = (
    "chat", "chat", "messages", "responses", "responses", "completions", "ollama", "generate",
)  # fmt: skip
KEYS = ("", "alice", "bob")  # the names of API keys; "": the administrator's
DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES, errno.ENOENT, errno.EINTR)
DISK_PLACES = (
    "",
    "",
    ".block",
    "/blocks/",
    "/incoming/",
    "/index/",
    "/sessions/",
    "/images/",
    "/features/",
)
# what the requests of an agent usually have in common, so that each continues the one before
HABITS = ("model", "adapter", "protocol", "kv_bits", "system", "parts", "tools", "converses")
# fields of turns that many worlds leave alone, so that the others come together more often
FEATURES = (
    "adapter", "background", "chains", "choices", "compacts", "converses", "edge", "forget", "format", "idempotency", "images",
    "is_batch",
    "kv_bits", "letters", "logprobs", "looks", "parts", "prefills", "reader", "regenerates",
    "repeats", "seed", "session", "stop", "stores", "system", "timeout_seconds", "tools",
    "twins",
)  # fmt: skip


def options_of(dice: random.Random) -> dict[str, Any]:
    """Random options of a server."""
    models = dice.choice((["m"], ["m"], ["m"], ["m", "other"]))
    return {
        "models": models,
        "has_store": dice.random() < 0.9,
        "kv_bits": dice.choice(("native", "native", "auto", "8", "4")),
        "kv_tokens": dice.choice((3000, 6000, 12_000, 40_000)),
        "ram_tokens": dice.choice((None, None, 0, 600, 2000, 20_000)),
        "max_running": dice.choice((1, 2, 4, 8)),
        "max_queued": dice.choice((1, 2, 4, 16, 256)),
        "step_tokens": dice.choice((64, 256, 512)),
        "max_loaded": dice.choice((None, 1)) if len(models) > 1 else None,
        "idle_seconds": dice.choice((None, None, 0.5, 30.0, 600.0)),
        "max_sessions": dice.choice((2, 64)),
        "store_bytes": dice.choice((None, None, None, 512 << 10, 2 << 20)),
        "has_key": dice.random() < 0.3,
        "keys": dice.random() < 0.3,
        "reconnect_seconds": dice.choice((0.0, 60.0)),
        "unread_bytes": dice.choice((256 << 10, 1024)),
        "step_seconds": dice.choice((0.004, 0.004, 0.03, 0.3)),
        "runs_ahead": dice.random() < 0.5,
        "begins_ready": dice.random() < 0.9,
        "cut_loses_all": dice.random() < 0.5,
        "second_layer": dice.choice(("none", "none", "none", "window", "chunk", "recurrent")),
        "adapters": dice.choice(([], [], [], ["x", "y"])),
        "has_draft_model": dice.random() < 0.15,
        "repeats": dice.random() < 0.3,
        "sees_images": dice.choice(("", "", "one way", "both ways")),
        "image_bytes": dice.choice((None, None, 1024)),
        "is_terse": dice.random() < 0.1,
        "key_requests": dice.choice((0, 0, 1, 2)),
        "alice_requests": dice.choice((None, None, 1, 3)),
        "address_requests": dice.choice((0, 0, 0, 0, 1, 3)),
    }


def scenario_of(seed: int) -> Scenario:
    """Generate the scenario of a seed.

    Most worlds leave out many features and kinds of faults, so that the others combine more often
    (Groce et al., "Swarm Testing", 2012). In most, an agent's requests continue one conversation.
    """
    dice = random.Random(f"scenario {seed}")
    actions = dice.choice((5, 10, 10, 20, 20, 40))
    options = options_of(dice)
    trouble_share = dice.choice((0.0, 0.15, 0.3, 0.4))
    branch_share = dice.choice((0.04, 0.04, 0.2))
    call_share = dice.choice((0.04, 0.04, 0.15))
    kinds = _some_troubles(dice, options)
    operations = dice.choice((DISK_OPERATIONS, (dice.choice(FREQUENT),), ("any",)))
    left_out = _left_out(dice)
    agents = [f"a{number}" for number in range(min(dice.choice((1, 2, 3, 6, 12)), actions // 4))]
    tenants = dice.choice(([""], ["", "t1"], ["t1", "t2", "t3"]))
    changes_keys = options["keys"] and dice.random() < 0.4
    callers = {
        agent: {"tenant": dice.choice(tenants), "key": dice.choice(KEYS)} for agent in agents
    }
    habits = _habits(dice, agents, options)
    pace = dice.choice((0.05, 0.5, 5.0, 30.0))
    found: list[Action] = []
    at = 0.0

    def a_turn(agent: str = "") -> Turn:
        agent = agent or dice.choice(agents)
        turn = _turn(dice, at, agent, options)
        if dice.random() < 0.95:
            turn = replace(turn, **habits[agent])
        return replace(turn, **callers[agent], **left_out)

    def a_branch(source: str, agent: str, *, keep: int) -> Branch:
        callers[agent], habits[agent] = callers[source], habits[source]
        agents.append(agent)
        return Branch(at=at, agent=agent, source=source, keep=keep)

    def a_turn_at_once() -> Turn:
        """A turn that often does not wait for the end of its agent's other turns."""
        if dice.random() < 0.5:
            return a_turn()
        source = dice.choice(agents)
        agent = f"{source}.{len(found)}"
        found.append(a_branch(source, agent, keep=dice.choice((0, 2, 100))))
        return a_turn(agent)

    while len(found) < actions:
        at += dice.expovariate(1 / pace)
        if dice.random() < 0.02:
            idle_times = (100.0, 600.0, 600.0, 2000.0) * 2
            at += dice.choice((*idle_times, 30_000.0))  # the last one is a night
        what = dice.random()
        if what < trouble_share:
            if dice.random() < 0.8:  # most faults happen while an answer is generated
                turn = a_turn_at_once()
                found.append(replace(turn, max_tokens=max(turn.max_tokens, 20)))
                at += dice.choice((0.002, 0.01, 0.03, 0.1, 0.3))
            trouble = _trouble(dice, at, options, kinds, operations)
            found.append(trouble)
            if "dies" in trouble.kind and "power cut" in kinds and dice.random() < 0.7:
                at += dice.choice((2.0, 4.0))  # the dead process's blocks have just been salvaged
                found.append(
                    replace(_trouble(dice, at, options, kinds, operations), kind="power cut")
                )
            elif dice.random() < 0.2:  # a second fault, before the server has recovered
                at += dice.choice((0.05, 1.0, 4.0))
                found.append(_trouble(dice, at, options, kinds, operations))
        elif what < trouble_share + branch_share:
            source = dice.choice(agents)
            found.append(a_branch(source, f"{source}.{len(found)}", keep=dice.randrange(1, 8)))
        elif what < trouble_share + branch_share + call_share:
            about = None
            if dice.random() < 0.6:  # about the session of running requests
                turn = a_turn_at_once()
                about = replace(
                    turn,
                    session=dice.choice(("s-common", f"s-{agents[0]}")),
                    tokens=dice.choice((turn.tokens, 300, 800)),
                    max_tokens=max(turn.max_tokens, 20),
                    twins=dice.choice((turn.twins, 1, 3)),
                )
                found.append(about)
                at += dice.choice((0.002, 0.03, 0.1, 0.3, 1.0))
            found.append(_call(dice, at, options, callers, about=about))
        elif what < trouble_share + branch_share + call_share + 0.02:
            turn = a_turn()
            is_mixed = dice.random() < 0.5
            for number in range(dice.randrange(2, 6)):  # several agents with a common prefix
                agent = f"{turn.agent}+{len(found)}"
                found.append(a_branch(turn.agent, agent, keep=100))
                member = replace(turn, agent=agent, seed=number)
                if is_mixed:  # which they continue in different ways
                    other = _turn(dice, at, agent, options)
                    member = replace(
                        member,
                        protocol=other.protocol,
                        tokens=other.tokens,
                        max_tokens=other.max_tokens,
                        regenerates=dice.random() < 0.3,
                    )
                found.append(member)
        else:
            turn = a_turn()
            found.append(replace(turn, key="wrong") if dice.random() < 0.02 else turn)
        if changes_keys and dice.random() < 0.3:
            at += dice.choice((0.002, 0.03, 0.3))
            found.append(key_change(dice, at))
            if dice.random() < 0.5:
                at += dice.choice((0.002, 0.03, 0.3))
                found.append(a_turn_at_once())
    return Scenario(order=seed, actions=tuple(found), options=options)


def _some_troubles(dice: random.Random, options: Mapping[str, Any]) -> Mapping[str, int]:
    """All kinds of troubles, or a few of them, with their weights."""
    weights = {
        kind: weight
        for kind, weight in TROUBLES.items()
        if options["sees_images"] or kind not in OF_IMAGES
    }
    few = dice.choice((None, None, 2, 5))
    if few is None:
        return weights
    chosen = set(dice.choices(list(weights), weights=list(weights.values()), k=few))
    return {each: weights[each] for each in weights if each in chosen}


def _left_out(dice: random.Random) -> dict[str, Any]:
    """The fields of turns that this world does not use, with their default values."""
    share = dice.choice((0.0, 0.5, 0.9))
    defaults = {each.name: each.default for each in fields(Turn)}
    return {name: defaults[name] for name in FEATURES if dice.random() < share}


def _habits(
    dice: random.Random, agents: Sequence[str], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What all requests of each agent have in common. In some worlds all agents have the same habits,
    so that they share prefixes; in others nobody has any.
    """
    whose = dice.choice(("own", "own", "common", "nobody's"))
    if whose == "nobody's":
        return {agent: {} for agent in agents}
    found = {}
    usual: Turn | None = None
    for agent in agents:
        if usual is None or whose == "own":
            usual = _turn(dice, 0.0, agent, options)
        found[agent] = {name: getattr(usual, name) for name in HABITS}
    return found


def _turn(dice: random.Random, at: float, agent: str, options: Mapping[str, Any]) -> Turn:
    return Turn(
        at=at,
        agent=agent,
        model=dice.choice(options["models"]),
        adapter=_adapter(dice, options),
        tokens=dice.choice((5, 20, 100, 300, 800)),
        edge=dice.choice((None, None, -1, 0, 1, 2)),
        max_tokens=dice.choice((1, 5, 20, 60, 300)),
        protocol=dice.choice(PROTOCOLS),
        streams=dice.random() < 0.7,
        reader=dice.choice(
            ("reads", "reads", "reads", "reads", "slow", "cancels", "breaks", "retries")
        ),
        read_pieces=dice.randrange(0, 12),
        wait_seconds=dice.choice((0.01, 1.0, 20.0, 100.0)),
        choices=dice.choice((1, 1, 1, 1, 2, 3)),
        kv_bits=dice.choice(("", "", "", "native", "auto", "8", "4")),
        session=dice.choice(("", "", f"s-{agent}", "s-common", f"f{dice.randrange(FORKS)}")),
        forget=dice.choice((0, 0, 0, 0, 0, 1, 2, 4)),
        seed=dice.choice((None, 7)),
        is_batch=dice.random() < 0.1,
        timeout_seconds=dice.choice((None, None, None, 0.05, 2.0, 60.0)),
        letters=dice.choice(("plain", "plain", "plain", "plain", "wide", "markup")),
        system=dice.choice(("", "", "", "short", "wide", "long")),
        parts=dice.random() < 0.15,
        prefills=dice.random() < 0.1,
        stop=dice.choice(STOPS) if dice.random() < 0.15 else (),
        logprobs=dice.random() < 0.1,
        idempotency=dice.choice(("", "", "", "", "own", "common")),
        twins=dice.choice((0,) * 12 + (1, 3)),
        repeats=dice.random() < 0.1,
        regenerates=dice.random() < 0.08,
        stores=dice.random() < 0.5,
        chains=dice.random() < 0.5,
        background=dice.random() < 0.2,
        looks=dice.choice(("", "read", "events", "foreign", "delete")),
        images=_images(dice, options),
        format=dice.choice(("",) * 8 + ("any", "pick", "point", "words")),
        tools=dice.random() < 0.25,
        tool_choice=dice.choice(
            ("auto", "strict", "strict", "required", "required", "named", "single", "none")
        ),
        converses=dice.random() < 0.4,
        compacts=dice.random() < 0.1,
    )


def _images(dice: random.Random, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The images of a message, rarely for a model that sees none."""
    if dice.random() > (0.6 if options["sees_images"] else 0.02):
        return ()
    weights = [1 if each.is_damaged else 4 for each in PICTURES.values()]
    return tuple(dice.choices(list(PICTURES), weights=weights, k=dice.choice((1, 1, 2, 3))))


def _adapter(dice: random.Random, options: Mapping[str, Any]) -> str:
    """One of the adapters, "" for the base model, or rarely an adapter that does not exist."""
    if not options["adapters"] or dice.random() < 0.3:
        return ""
    adapter: str = dice.choice(options["adapters"])
    return adapter if dice.random() < 0.95 else "missing"


def _trouble(
    dice: random.Random,
    at: float,
    options: Mapping[str, Any],
    kinds: Mapping[str, int],
    operations: Sequence[str],
) -> Trouble:
    """kinds: with their weights. operations: of the disk, which may fail."""
    (kind,) = dice.choices(list(kinds), weights=list(kinds.values()))
    return Trouble(
        at=at,
        kind=kind,
        model=dice.choice(options["models"]),
        seconds=dice.choice((0.5, 5.0, 30.0, 600.0)),
        number=dice.choice((1, 1, 1, 2, 2, 3, 4, 6, 9, 11)),
        name=dice.choice(operations),
        error=dice.choice(DISK_ERRORS),
        only=dice.choice(DISK_PLACES),
    )


def key_change(dice: random.Random, at: float) -> KeyChange:
    """A random change of the file of API keys."""
    return KeyChange(
        at=at,
        kind=dice.choice(
            ("remove", "add", "add", "limit", "limit", "half", "damaged", "readable", "gone")
        ),
        key=dice.choice(("alice", "bob")),
        limit=dice.choice((None, 1, 1, 2, 4)),
    )


def _call(
    dice: random.Random,
    at: float,
    options: Mapping[str, Any],
    callers: Mapping[str, Mapping[str, str]],
    *,
    about: Turn | None = None,
) -> Call:
    """about: the request whose session the call uses; None: any call."""
    caller: Mapping[str, str] = {"tenant": "", "key": ""}
    if about is None:
        model = dice.choice(options["models"])
        session = dice.choice(("s-common", "s-common", "s-a0", "s-a1", "f0"))
        adapter = _adapter(dice, options) if dice.random() < 0.5 else ""
        agent = dice.choice(list(callers))
        caller = caller if dice.random() < 0.3 else callers[agent]
    else:
        model, session, adapter = about.model, about.session, about.adapter
        caller = {"tenant": about.tenant, "key": about.key}
    if dice.random() < 0.05:
        caller = {**caller, "key": "wrong"}
    model_id = f"{model}:{adapter}" if adapter else model
    whose = f"?model={model_id}"
    if caller["tenant"]:
        whose += f"&cache_salt={caller['tenant']}"
    pins = {"pinned": dice.random() < 0.7}
    fork = {"id": f"f{dice.randrange(FORKS)}", **pins}
    of_session: Sequence[tuple[str, str, Mapping[str, Any] | None]] = (
        ("GET", f"/v1/sessions/{session}{whose}", None),
        ("POST", f"/v1/sessions{whose}", {"id": session, "model": model_id, **pins}),
        ("POST", f"/v1/sessions/{session}/fork{whose}", fork),
        ("PATCH", f"/v1/sessions/{session}{whose}", pins),
        ("DELETE", f"/v1/sessions/{session}{whose}", None),
        ("DELETE", f"/v1/sessions/{session}{whose}&forget=true", None),
    )
    others: Sequence[tuple[str, str, Mapping[str, Any] | None]] = (
        ("GET", "/health", None),
        ("GET", "/v1/models", None),
        ("GET", f"/v1/sessions{whose}", None),
        ("POST", f"/admin/models/{model}/unload", None),
        ("POST", f"/admin/models/{model}/load", None),
        ("GET", "/admin/cache", None),
        ("GET", "/admin/requests", None),
        ("GET", "/admin/misses", None),
    )
    forgets = of_session[-1:] * 2  # the most that can happen to a session
    method, path, body = dice.choice([*of_session, *(forgets if about else others)])
    if path.startswith("/admin") and caller["key"] != "wrong" and dice.random() < 0.8:
        caller = {"tenant": "", "key": ""}
    return Call(at=at, method=method, path=path, body=body, **caller)
