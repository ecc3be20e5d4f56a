"""A stop string is found in visible text, with its position in the answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.stops import VisibleStops
from holdfast.front.output import TextDelta, TextKind, ToolCallFinished

pieces = st.lists(
    st.tuples(
        st.sampled_from(["text", "text", "reasoning"]),
        st.sampled_from(["s", "st", "stop", "top", "a", "p"]),
    )
)


@given(pieces)
def test_visible_text_is_cut_where_the_stop_string_begins(
    parts: list[tuple[TextKind, str]],
) -> None:
    answer, visible, shown, place = "", "", "", 0
    stops, cut = VisibleStops(["stop"]), None
    for kind, text in parts:
        given_now = [*stops.scan(TextDelta(kind=kind, text=text, start=place))]
        place += len(text)
        visible = visible + text if kind == "text" else ""
        answer += text
        if cut is None and "stop" in visible:
            cut = place - len(visible) + visible.index("stop")
        shown += "".join(part.text for part in given_now if isinstance(part, TextDelta))
        assert stops.cut == cut
        if cut is not None:
            assert shown == answer[:cut]
            return
        held = 0 if stops.held_from is None else place - stops.held_from
        assert shown == answer[: len(answer) - held] and "stop".startswith(
            answer[len(answer) - held :]
        )
    shown += "".join(part.text for part in stops.flush())
    assert shown == answer


def test_a_part_that_is_not_text_flushes_withheld_text() -> None:
    stops = VisibleStops(["stop"])
    assert [*stops.scan(TextDelta(text="a st"))] == [TextDelta(text="a ")]
    call = ToolCallFinished()
    assert [*stops.scan(call)] == [TextDelta(text="st", start=2), call]
    assert [*stops.scan(TextDelta(text="op", start=9))] == [TextDelta(text="op", start=9)]
