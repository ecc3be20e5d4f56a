from __future__ import annotations

from holdfast.front.output import TextDelta, TokenText
from holdfast.front.server.answers import WholeChoice


def test_a_whole_choice_separates_text_kinds_and_orders_tokens() -> None:
    tokens = [TokenText(text=text, raw=text.encode(), logprob=-1.0) for text in "abc"]
    choice = WholeChoice(
        deltas=[
            TextDelta(index=0, text="a", kind="reasoning", logprobs=(tokens[0],)),
            TextDelta(index=0, text="b", logprobs=(tokens[1],)),
            TextDelta(index=0, text="c", logprobs=(tokens[2],)),
        ]
    )
    assert choice.text() == "bc"
    assert choice.text("reasoning") == "a"
    assert choice.logprobs == tokens
