"""Pictures."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from holdfast_bench.charts import Chart, Line, histogram
from holdfast_bench.pictures import write_pictures
from holdfast_bench.svg import svg

amounts = st.floats(min_value=1e-4, max_value=1e6)


def a_chart(points: list[tuple[float, float]], **changes: object) -> Chart:
    line = Line(label="this & <that>", points=tuple(points))
    fields: dict[str, object] = {
        "name": "n",
        "title": "t",
        "x_label": "x",
        "y_label": "y",
        "lines": (line,),
        **changes,
    }
    return Chart(**fields)  # type: ignore[arg-type]


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=6), st.booleans(), st.booleans())
def test_every_chart_is_valid_and_stays_within_its_frame(
    points: list[tuple[float, float]], log_x: bool, log_y: bool
) -> None:
    root = ElementTree.fromstring(svg(a_chart(points, log_x=log_x, log_y=log_y)))
    circles = [node for node in root.iter() if node.tag.endswith("circle")]
    assert len(circles) == len(points)
    assert all(
        0 <= float(node.get("cx", "-1")) <= 720 and 0 <= float(node.get("cy", "-1")) <= 420
        for node in circles
    )


def test_zero_has_a_place_even_on_an_axis_that_was_to_be_logarithmic() -> None:
    assert "NaN" not in svg(a_chart([(0.0, 0.0), (1.0, 2.0)], log_x=True, log_y=True))


def test_a_histogram_has_every_value_once() -> None:
    found = histogram([0.001, 0.0011, 0.1])
    assert abs(sum(share for _, share in found) - 1.0) < 1e-9
    assert found[0][0] <= 1.0
    assert found[-1][1] == 0.0
    assert histogram([]) == ()


def test_pictures_are_written_under_the_names_of_their_charts(tmp_path: Path) -> None:
    assert write_pictures([a_chart([(1.0, 2.0)], kind="steps")], tmp_path) == ["n.svg"]
    assert (tmp_path / "n.svg").read_text().startswith("<svg")
