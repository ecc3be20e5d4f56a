from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.images import ImageLayout, image_keys
from holdfast.wire.requests import TokenIds
from holdfast.worker.drafting.suffix import MOST_DRAFTED, DraftRates, SuffixDrafter
from holdfast.worker.engine.plan import NO_DRAFT

FILE = tuple(range(100, 160))


def drafter(prompt: tuple[int, ...], *generated: int, **more: object) -> SuffixDrafter:
    made = SuffixDrafter(TokenIds.of(prompt), **more)  # type: ignore[arg-type]
    made.extend(())  # the prompt is indexed while it is prefilled
    made.extend(generated)
    return made


def test_the_continuation_of_the_last_two_tokens_is_drafted() -> None:
    draft = drafter((*FILE, 1, 2), 110, 111).draft().token_ids
    assert draft == FILE[12 : 12 + len(draft)] != ()


@pytest.mark.parametrize("generated", [(), (1,), (110,), (110, 7), (7, 110)])
def test_a_draft_needs_two_equal_tokens(generated: tuple[int, ...]) -> None:
    assert drafter((*FILE, 1, 2), *generated).draft() == NO_DRAFT


def test_the_longest_match_wins() -> None:
    prompt = (1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 8, 3, 4, 70)
    assert drafter(prompt, 1, 2, 3, 4).draft(1).token_ids == (50,)
    assert drafter(prompt, 9, 2, 3, 4).draft(1).token_ids == (60,)


def test_the_latest_of_equal_matches_wins() -> None:
    assert drafter((5, 3, 4, 50, 6, 3, 4, 60), 3, 4).draft(1).token_ids == (60,)


def test_copying_continues_after_a_replaced_token() -> None:
    copy = drafter((*FILE, 1, 2), *FILE[:20])
    copy.extend([7])
    assert copy.draft(3).token_ids == FILE[21:24]
    copy.extend(FILE[21:24])
    assert copy.draft(3).token_ids == FILE[24:27]


def test_a_repetitive_text_is_drafted_beyond_its_end() -> None:
    assert drafter((1,), 5, 6, 7, 5, 6, 7, 5, 6).draft(7).token_ids == (7, 5, 6, 7, 5, 6, 7)


def test_an_expected_answer_is_drafted_from_beginning_to_end() -> None:
    made = drafter((1, 2, 3), expected=TokenIds.of(FILE[:10]))
    assert made.draft().token_ids == FILE[:8]
    made.extend(FILE[:6])
    assert made.draft().token_ids == FILE[6:10]
    assert len(made) == 3 + 6


def test_an_expected_answer_is_found_again_after_an_insertion() -> None:
    made = drafter((1, 2, 3), expected=TokenIds.of(FILE))
    made.extend([*FILE[:5], 7, 8, 9, *FILE[5:7]])
    assert made.draft(2).token_ids == FILE[7:9]


def test_other_texts_are_drafted_from_where_they_match() -> None:
    others = [TokenIds.of(FILE[:10]), TokenIds.of((*FILE[:5], 7, 8))]
    made = drafter((1, 2, 3), others=others, expected=TokenIds.of((4, 5)))
    assert len(made) == 3
    made.extend(FILE[2:4])
    assert made.draft().token_ids == (FILE[4], 7, 8)
    made.extend(FILE[4:6])
    assert made.draft().token_ids == FILE[6:10]


def test_chances_fall_along_a_draft_and_rise_with_match_length() -> None:
    short, long = drafter(FILE, *FILE[:2]).draft(), drafter(FILE, *FILE[:30]).draft()
    for draft in (short, long):
        assert list(draft.chances) == sorted(draft.chances, reverse=True)
    assert long.chances[0] > short.chances[0]


def test_wrong_drafts_lower_the_chances_of_other_sequences_too() -> None:
    rates = DraftRates()
    before = drafter(FILE, *FILE[:2], rates=rates).draft().chances[0]
    prompt = tuple(token for number in range(200) for token in (3, 4, 300 + number))
    wrong = drafter(prompt, rates=rates)
    for number in range(200):
        wrong.extend([3, 4, 1000 + number])
    after = drafter(FILE, *FILE[:2], rates=rates).draft()
    assert after == NO_DRAFT or after.chances[0] < before / 2


tokens = st.lists(st.integers(0, 4), max_size=60)


@given(prompt=tokens.filter(bool), generated=tokens, pieces=st.integers(1, 5))
def test_a_draft_follows_an_earlier_occurrence_of_the_last_tokens(
    prompt: list[int], generated: list[int], pieces: int
) -> None:
    made = drafter(tuple(prompt))
    for start in range(0, len(generated), pieces):
        made.extend(generated[start : start + pieces])
    assert len(made) == len(prompt) + len(generated)
    text = [*prompt, *generated]
    draft = made.draft()
    assert len(draft.token_ids) == len(draft.chances) <= MOST_DRAFTED
    assert all(0.0 < chance < 1.0 for chance in draft.chances)
    if not generated:
        return
    if draft.token_ids:
        following = [(text[at:] * MOST_DRAFTED)[:MOST_DRAFTED] for at in range(len(text))]
        assert list(draft.token_ids) in [each[: len(draft.token_ids)] for each in following]


def test_an_image_ends_a_draft_and_is_never_drafted() -> None:
    layout = ImageLayout(image="ab" * 32, token_ids=TokenIds.of([9] * 20))
    prompt = TokenIds.of((1, 2, 3)) + image_keys(layout) + TokenIds.of((4, 5, 1, 2, 3))
    repeating = SuffixDrafter(prompt)
    repeating.extend(())
    repeating.extend((1, 2))
    assert repeating.draft().token_ids[:1] == (3,)
    assert min(repeating.draft().token_ids) >= 0
    repeating.extend((3,))
    assert repeating.draft() == NO_DRAFT or min(repeating.draft().token_ids) >= 0
