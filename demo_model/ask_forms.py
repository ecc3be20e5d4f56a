"""Ask a model requests whose answers are held to JSON schemas, through Holdfast itself: `python
ask_forms.py MODEL_FOLDER`.

Every answer fits its schema; the question is whether a free string in it ends or runs on to the
token limit. Greedily. The forms are held out: no object of the training is one of them
(`test_json.py`). Needs Holdfast's own environment; exits with 1 below the bar.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from holdfast import LLM

BAR, MOST_TOKENS = 0.95, 200

_TYPES: dict[str, dict[str, Any]] = {
    "": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "string"}},
    "ints": {"type": "array", "items": {"type": "integer"}},
    "null": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "low": {"type": "string", "enum": ["low", "high"]},
}
FORMS = (
    "town_name, temp_c int",
    "headline",
    "headline, paragraphs list",
    "surname, forename, vegetarian bool",
    "diagnosis, severity low",
    "sql",
    "tool_name, tool_input",
    "chain_of_thought, final_answer",
    "verdict bool, rationale",
    "sentiment low, confidence float",
    "invoice_no, net float, gross float, currency_code",
    "latitude float, longitude float",
    "companyName, headquarters, foundedIn int",
    "ingredients list, servings int",
    "isbn, publisher, blurb",
    "commit_message",
    "filePath, newText",
    "translated, detectedLanguage",
    "entities list, relations list",
    "lottery ints",
    "follow_up null, escalate bool",
    "flight_no, gate, boarding, delayed bool",
    "hex, rgb ints",
    "userId int, userName, roles list",
)
"""Keys with their types, a string where none is named."""
REQUESTS = (
    "Write JSON.",
    "hi",
    "Extract the data from this text: Bruno lives in Leeds and has 3 cats.",
    "Which one would you take?",
)


def schema_of(form: str) -> dict[str, Any]:
    """The schema of a form."""
    members = [
        (name, kind) for name, _, kind in (member.partition(" ") for member in form.split(", "))
    ]
    properties = {name: _TYPES[kind] for name, kind in members}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--show", action="store_true", help="show every answer, not only those that did not end"
    )
    arguments = parser.parse_args()
    ended = asked = 0
    with LLM(str(arguments.folder)) as llm:
        for request in REQUESTS:
            here = 0
            for number, form in enumerate([*FORMS, None]):
                answer = llm.chat(
                    [{"role": "user", "content": request}],
                    temperature=0,
                    max_tokens=MOST_TOKENS,
                    thinking=[None, False][number % 2],
                    response_format=schema_of(form) if form else {"type": "json_object"},
                )
                good = answer.finish_reason == "stop"
                here += good
                if good:
                    json.loads(answer.text)
                if arguments.show or not good:
                    print(
                        f"{'ok   ' if good else 'WRONG'} {request!r} {form}\n      "
                        f"{answer.text[-200:]!r}"
                    )
            print(f"{request!r}: {here} of {len(FORMS) + 1} ended")
            ended, asked = ended + here, asked + len(FORMS) + 1
    print(f"ended: {ended} of {asked}")
    raise SystemExit(0 if ended >= BAR * asked else 1)


if __name__ == "__main__":
    main()
