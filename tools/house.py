"""Prints the size and the structure of the code base and the values recorded last: `make house`.

`make house ARGS=--record` replaces the recorded values (tools/house.json), and `ARGS=--calls` also
lists the functions that a chat request calls. Nothing fails because a number is large; the tool
fails only if one of the names listed below no longer exists in the package.

Tokens are those of Python's `tokenize`, without comments, line ends, indentation and docstrings. An
f-string is one token, as in Python 3.11.

The journeys are traced in a real server (tools/house_trace.py), on the bundled model and on a tiny
random model with vision. A form is a class that holds the request (the block, the image, the draft)
on its way; it counts if a called function has an instance among its arguments, its variables or its
result. The forms are listed below, so a new class has to be entered there. For a chat request, all
completed calls of functions of the package count, for the other journeys those that handle a form.
The smallest of several runs is shown, because heartbeats and batches of events vary: calls still
differ by 1 to 2 % from run to run, those of a draft by 6 %.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.config import all_specs
from tools.house_trace import Run, Server, journeys

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "holdfast"
RECORDED = Path(__file__).with_suffix(".json")
AIMS = {
    "tokens of src": 420_000,
    "lines of tests": 70_000,
    "lines of bench, tools, demo_model": 12_000,
    "words of docs, written": 35_000,
    "chat: forms": 9,
    "block: forms": 8,
    "places where a request can wait": 7,
    "passes over the conversation": 4,
    "fields of LiveSequence": 20,
    "files with kv_bits": 15,
    "files with adapter": 12,
    "files with image": 30,
    **dict.fromkeys(
        [f"markers in {text}" for text in ("src", "tests", "test names", "tools", "bench", "docs")],
        15,
    ),
}

FORMS: Mapping[str, Sequence[str]] = {
    "chat": """front.openai.endpoints.ChatCompletionRequest front.request.ChatPrompt
        front.request.GenerationRequest front.server.generation.GenerationResponse
        front.server.services.ActiveRequest
        front.server.resumable_answers.ResumableAnswer front.telemetry.request_log.RequestRecord
        front.prompt.known_answers.PastAnswers front.prompt.template_worker.RenderTask
        front.request.PromptText front.prompt.token_memory.RememberedText front.request.PromptTokens
        front.prompt.prepare.Prepared front.answers.choice.ChoiceRules
        wire.commands.SequenceRequest front.link.model_client._OpenRequest
        worker.scheduler.sequence.ScheduledSequence worker.loop.sequences.LiveSequence
        worker.prefix.lookup.Lookup worker.prefix.lookup.ReusePlan worker.prefix.lookup.LiveClaim
        worker.prefix.lookup.LiveChain
        worker.engine.sequence.EngineSequence worker.scheduler.scheduler.Decision
        worker.engine.plan.StepPlan worker.engine.plan.Span worker.loop.device_steps.DispatchedStep
        worker.engine.sequence.SequenceSpan""".split(),
    "block": """worker.kv.full.FrozenPart worker.kv.live.Snapshot
        worker.prefix.chain.Node
        worker.prefix.chain.Cursor worker.prefix.chain.ChainBlock worker.prefix.chain.ChainState
        store.block.Block store.block.StoredBlock store.block.Entry""".split(),
    "image": """front.images.sources.ImageSource front.images.intake._HeldImages
        front.images.intake.PromptWithImages front.request.PlacedImage wire.images.ImageLayout
        wire.images.ImageSpan wire.images.ImageCommand wire.images.ImageAnswer
        worker.vision.image_process.ImageFile worker.vision.image_process._QueuedImage
        worker.vision.image_worker.ImageTask worker.vision.image_worker.ImageDone
        worker.vision.image_worker.PackedArray worker.vision.processor.ProcessedImage
        worker.vision.model.ImageFeatures worker.vision.model.SequenceImages""".split(),
    "draft": """worker.engine.plan.Draft worker.drafting.draft_model.DraftState
        worker.scheduler.scheduler.Decision worker.engine.plan.StepPlan worker.engine.plan.Span
        worker.engine.sequence.SequenceSpan worker.engine.plan.SpanResult
        worker.scheduler.scheduler.StepOutcome""".split(),
}
WAITS = {
    "front.fleet.leases.Leases._queue": "for a place among the requests of its model",
    "front.fleet.slot.ModelSlot.wait_client": "for its model to load",
    "front.prompt.template_process.RenderProcesses._slot": "for a template process",
    "front.link.model_client._OpenRequest.is_sent": "for a worker, or the trial of another request",
    "worker.loop.inbox.ZmqInbox": "for the loop to read it",
    "worker.vision.images.WorkerImages.request_layouts": "for the layout of its images",
    "worker.scheduler.sequence.ScheduledSequence.waits_for": "for its cached prefix, another prefill, "
    "its images, a running slot and memory, or its client",
    "worker.loop.idle_work.IdleWork.begin": "for an idle worker",
}
# Functions that walk the whole conversation. The trace's chat is a later turn: of its text, only what
# an earlier turn did not have is cut, searched and tokenized, and a body is hashed, and the texts of
# prompts are compared, only if the client is lost or the prompt has missed the cache.
PASSES = {
    "front.server.resumable_answers.RequestIdentity.free_body": "hashes the body",
    "front.server.request.parse": "reads the JSON and checks it",
    "front.openai.messages.history": "checks and copies the messages",
    "front.prompt.canonical.CanonicalForm.of": "makes new messages ready, recalls past answers, and adapts "
    "the messages to the template",
    "front.prompt.template.ChatTemplate._adapted_messages": "adapts the messages to the template, "
    "to render them again",
    "front.prompt.template_worker._carry_out": "renders the template in another process",
    "front.prompt.token_memory._cut_whole_text": "cuts the text and finds past answers in it",
    "front.server.misses._parts": "makes texts that show what missed the cache",
}
STEP = "worker.engine.engine.Engine.dispatch"
TRAVELLERS = (
    "LiveSequence ScheduledSequence EngineSequence LiveChain Lookup SequenceRequest "
    "GenerationRequest Services ModelInfo WorkerStatistics"
).split()
CONCEPTS = "kv_bits adapter image tenant draft session speculation truncation".split()
# pages of docs that tools write, and the log of measurements
NOT_WRITTEN = ("lab-log", "bench/", "architectures.md", "tested-agents", "demo-chat")
MEANINGS = 8  # a public name is shown if this number of classes or modules define it

_START = r"(?:^|[.:;,] )"
MARKERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{_START}what (?:is|are|was|were|has|have|it|they|comes|goes|stands)\b(?![^.:;]*\?)",
        r"\b(?:is|are|was|were|of|on|by|from|to|with|than|but|and|or) what\b",
        rf"(?:{_START}|\b(?:and|of|for|by|to|with|than) )who [a-z]+s\b",
        r"(?<!one )(?<!each )(?<!both )(?<!any )(?<!some )\bof (?:it|them)\b",
        r"\banew\b",
        r"\bof (?:its|their|his) own\b",
        r"\bin vain\b",
        r"\bat once\b",
        r"\b(?:is|are|was|were|has|have|had|knows|makes) no (?!longer|more|other|such)[a-z]+",
        r"\b(?:is|are|was|were) to (?:be )?[a-z]+\b",
        r"\bas (?:it|they) (?:is|are|was|were|has|had)\b",
        r"\bwhatever (?:the|its|their|it|comes|is)\b",
        r"\bnothing (?:is|of|but|that|else)\b",
        r"\b(?:goes|go|going|went) on\b",
        r"\bmeanwhile\b",
        r"\bbut for\b|\ball but\b",
        r"\bstands? (?:in|at|for|where|before|behind|beside|for)\b",
        r"\bbeside\b|\bbehind (?:it|them|the other|one another)\b",
        r"\b(?:so|as) (?:many|much) (?!as)[a-z]+",
        r"\b(?:there|here|where)(?:by|of|in|upon|to|with)\b|\blest\b|\bupon\b",
        r"\bhowever (?:many|much|long|often|it|they)\b",
        r"\bthat (?:is|are) (?:asked|wanted|said|meant|told|gone)\b",
    )
)


# -- texts


@dataclass
class Text:
    """One Python file. prose: its docstrings, and its comments, adjoining lines as one text."""

    path: Path
    source: str
    tokens: int = 0
    prose: list[str] = field(default_factory=list)

    @property
    def module(self) -> str:
        """A module of the package, without the package's name."""
        return ".".join(self.path.relative_to(PACKAGE).with_suffix("").parts)


_BREAKS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_F_START = getattr(tokenize, "FSTRING_START", -1)  # from Python 3.12 on
_F_END = getattr(tokenize, "FSTRING_END", -1)


def read(path: Path) -> Text:
    """Read and tokenize a file."""
    with tokenize.open(path) as file:
        text = Text(path, file.read())
    comment_line, f_strings, is_first, docstring = -1, 0, True, ""
    lines = iter(text.source.splitlines(keepends=True))
    for kind, string, (line, _), _, whole_line in tokenize.generate_tokens(lambda: next(lines, "")):
        if kind == tokenize.COMMENT:
            comment = string.lstrip("#! ")
            if line == comment_line + 1 and whole_line.lstrip().startswith("#"):
                text.prose[-1] += f" {comment}"
            else:
                text.prose.append(comment)
            comment_line = line
        elif kind in _BREAKS:
            if docstring:  # the statement is only a string
                text.tokens -= 1
                text.prose += paragraphs(docstring.strip("\"'rR"))
            is_first, docstring = True, ""
        elif kind != tokenize.NL:
            f_strings -= kind == _F_END
            text.tokens += f_strings == 0 and kind != _F_END
            f_strings += kind == _F_START
            docstring = string if is_first and kind == tokenize.STRING else ""
            is_first = False
    return text


def python_files(folder: str) -> list[Text]:
    """The Python files beneath a folder of the project."""
    return [read(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each in one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def names_of_tests(texts: Iterable[Text]) -> list[str]:
    """The names of tests, as sentences."""
    names = [re.findall(r"^ *(?:async )?def test_(\w+)", text.source, re.M) for text in texts]
    return [name.replace("_", " ") for found in names for name in found]


def markers(texts: Sequence[str]) -> int:
    """Phrases of `MARKERS` per 10,000 words."""
    found = sum(len(marker.findall(text)) for text in texts for marker in MARKERS)
    words = sum(len(re.findall(r"[A-Za-z][\w'’-]*", text)) for text in texts)
    return round(10_000 * found / max(1, words))


# -- the structure of the package


class Structure:
    """What the modules of the package define.

    names: functions, classes, methods and attributes, by dotted name.
    homes: the modules and classes that define each public name of a function.
    """

    def __init__(self, texts: Iterable[Text]) -> None:
        self.names: set[str] = set()
        self.homes: defaultdict[str, set[str]] = defaultdict(set)
        self._classes: dict[str, tuple[set[str], list[str]]] = {}  # own fields, names of bases
        for text in texts:
            self._add(ast.parse(text.source).body, text.module)

    def _add(self, body: Iterable[ast.stmt], home: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.names.add(f"{home}.{node.name}")
                if not node.name.startswith("_"):
                    self.homes[node.name].add(home)
            elif isinstance(node, ast.ClassDef):
                name = f"{home}.{node.name}"
                own = set(_attributes(node))
                self.names |= {name, *(f"{name}.{each}" for each in own)}
                self._classes[node.name] = own, [ast.unparse(base) for base in node.bases]
                self._add(node.body, name)

    def fields(self, name: str) -> set[str]:
        """The fields of a class, and of its bases in the package."""
        own, bases = self._classes.get(name, (set(), []))
        return own.union(*(self.fields(base) for base in bases))

    def largest(self) -> list[tuple[int, str]]:
        """The five classes with the most fields."""
        sizes = ((len(self.fields(name)), name) for name in self._classes)
        return sorted(sizes, reverse=True)[:5]

    def common_names(self) -> list[tuple[int, str]]:
        """Public names that `MEANINGS` or more classes or modules define."""
        counts = ((len(homes), name) for name, homes in self.homes.items())
        return sorted((each for each in counts if each[0] >= MEANINGS), reverse=True)

    def missing(self) -> list[str]:
        """Names that this file lists, but the package does not define."""
        listed = [*(form for forms in FORMS.values() for form in forms), *WAITS, *PASSES, STEP]
        gone = [name for name in listed if name not in self.names]
        return gone + [name for name in TRAVELLERS if name not in self._classes]


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Annotated names in a class, and attributes that its `__init__` sets."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            if "ClassVar" not in ast.unparse(each.annotation):
                yield each.target.id
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            yield from re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? = ", ast.unparse(each))


# -- the table


def met(journey: str, runs: Iterable[Run]) -> set[str]:
    """The journey's forms that a called function handled."""
    handled = {kind for run in runs for call in run for kind in call.handled}
    return handled.intersection(FORMS[journey])


def calls(journey: str, run: Run, side: str) -> int:
    """The calls of one run of a journey in the front or in the worker."""
    forms = set(FORMS[journey])
    return sum(
        call.times
        for call in run
        if call.side == side and (journey == "chat" or call.handled & forms)
    )


def trace_rows(found: Mapping[str, list[Run]]) -> dict[str, int]:
    """Forms and calls of the journeys, and passes over the conversation."""
    rows: dict[str, int] = {}
    for journey, runs in found.items():
        rows[f"{journey}: forms"] = len(met(journey, runs))
        for side in ("front", "worker"):
            fewest = min(calls(journey, run, side) for run in runs)
            if fewest and journey != "draft":
                rows[f"{journey}: calls in the {side}"] = fewest
    # per step, because how many tokens are drafted depends on measured times
    rows["draft: calls in the worker per step"] = min(
        calls("draft", run, "worker") // sum(each.times for each in run if each.function == STEP)
        for run in found["draft"]
    )
    called = {call.function for call in found["chat"][-1]}
    rows["passes over the conversation"] = len(called.intersection(PASSES))
    return rows


def size_rows(texts: Mapping[str, list[Text]]) -> dict[str, int]:
    """Tokens, files, lines and markers of the code. texts: by folder of the project."""
    tokens: Counter[str] = Counter()
    for text in texts["src"]:
        folder, _, rest = text.module.partition(".")
        tokens[f"{folder}/" if rest else "files outside folders"] += text.tokens
    lines = {
        folder: sum(text.source.count("\n") for text in found) for folder, found in texts.items()
    }
    rows = {f"tokens of {folder}": count for folder, count in sorted(tokens.items())}
    rows["tokens of src"] = tokens.total()
    rows["files of src"] = len(texts["src"])
    rows["lines of src"] = lines["src"]
    rows["lines of tests"] = lines["tests"]
    others = sum(lines[folder] for folder in texts if folder not in ("src", "tests"))
    rows["lines of bench, tools, demo_model"] = others
    for folder, found in texts.items():
        rows[f"markers in {folder}"] = markers([part for text in found for part in text.prose])
    rows["markers in test names"] = markers(names_of_tests(texts["tests"]))
    return rows


def docs_rows() -> dict[str, int]:
    """Words of the documentation, and its markers."""
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)): path.read_text("utf-8") for path in docs.rglob("*.md")}
    written = [
        re.sub(r"(?s)<!-- table:.*?<!-- end of table -->", "", text)
        for name, text in pages.items()
        if not any(part in name for part in NOT_WRITTEN)
    ]
    prose = [re.sub(r"(?sm)^```.*?^```", "", text) for text in pages.values()]
    return {
        "words of docs, written": sum(len(text.split()) for text in written),
        "words of docs, all": sum(len(text.split()) for text in pages.values()),
        "markers in docs": markers([part for text in prose for part in paragraphs(text)]),
    }


def structure_rows(src: Sequence[Text], structure: Structure) -> dict[str, int]:
    """Fields, concepts and names."""
    rows = {f"fields of {name}": len(structure.fields(name)) for name in TRAVELLERS}
    rows["settings"] = len(all_specs())
    for concept in CONCEPTS:
        rows[f"files with {concept}"] = sum(concept in text.source.lower() for text in src)
    rows[f"public names in {MEANINGS} or more places"] = len(structure.common_names())
    rows["places where a request can wait"] = len(WAITS)
    return rows


def table(rows: Mapping[str, int], recorded: Mapping[str, int], aims: Mapping[str, int]) -> str:
    """The rows with the recorded values and the aims, and recorded rows that no longer exist."""
    names = [*rows, *(name for name in recorded if name not in rows)]
    width = max(map(len, names))
    columns = [
        [f"{values[name]:,}" if name in values else "-" for name in names]
        for values in (rows, recorded, aims)
    ]
    lines = [f"{'':{width}} {'now':>9} | {'recorded':>9} | {'aim':>9}"]
    for name, *cells in zip(names, *columns, strict=True):
        lines.append(f"{name:{width}} {' | '.join(f'{cell:>9}' for cell in cells)}")
    return "\n".join(lines)


def notes(structure: Structure, found: Mapping[str, list[Run]]) -> Iterator[str]:
    """The names behind some of the numbers."""
    largest = ", ".join(f"{name} {count}" for count, name in structure.largest())
    yield f"Classes with the most fields: {largest}."
    names = ", ".join(f"{name} {count}" for count, name in structure.common_names())
    yield f"Public names in {MEANINGS} or more classes or modules: {names}."
    for journey, runs in found.items():
        if unmet := sorted(set(FORMS[journey]) - met(journey, runs)):
            yield f"Listed forms of {journey} that no called function handled: {', '.join(unmet)}."
    yield "Tokens are those of Python's `tokenize`, without comments, layout and docstrings."


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 1 if a listed name does not exist."""
    src = python_files("src")
    structure = Structure(src)
    if missing := structure.missing():
        print(f"tools/house.py lists names that do not exist: {', '.join(missing)}")
        return 1
    texts = {name: python_files(name) for name in ("tests", "tools", "bench", "demo_model")}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            found = journeys(server)
        finally:
            server.close()
    rows = {
        **size_rows({"src": src, **texts}),
        **docs_rows(),
        **structure_rows(src, structure),
        **trace_rows(found),
    }
    print(table(rows, json.loads(RECORDED.read_text()) if RECORDED.exists() else {}, AIMS))
    print(*notes(structure, found), sep="\n")
    if "--calls" in arguments:
        called: Counter[str] = Counter()
        for call in found["chat"][-1]:
            called[f"{call.side}: {call.function}"] += call.times
        print(*(f"{count:6} {name}" for name, count in sorted(called.items())), sep="\n")
    if "--record" in arguments:
        RECORDED.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
