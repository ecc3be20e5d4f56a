from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.prompt_keys import STEP_TOKENS, steps_behind, tenant_key
from holdfast.wire.token_ids import TokenIds

steps = st.lists(st.integers(1, 3), max_size=4)


def prompt(steps: list[int], rest: int = 0) -> TokenIds:
    """Each step full of one token, and so many more."""
    return TokenIds.of([token for token in steps for _ in range(STEP_TOKENS)] + [9] * rest)


@given(ours=steps, theirs=steps, rest=st.integers(0, STEP_TOKENS - 1))
def test_two_prompts_have_the_keys_of_what_they_begin_with_and_no_other(
    ours: list[int], theirs: list[int], rest: int
) -> None:
    root = tenant_key("a")
    mine, other = steps_behind(root, prompt(ours, rest)), steps_behind(root, prompt(theirs))
    assert [packed for _, packed in mine] == [prompt([step]).packed for step in ours]
    shared = next(
        (at for at, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two),
        min(len(ours), len(theirs)),
    )
    assert {key for key, _ in mine} & {key for key, _ in other} == {key for key, _ in mine[:shared]}


@given(steps=steps, cut=st.integers(0, 4))
def test_keys_go_on_from_a_beginning_as_from_the_first_token(steps: list[int], cut: int) -> None:
    root = tenant_key("a")
    whole = steps_behind(root, prompt(steps))
    before = [(root, b""), *whole][min(cut, len(whole))][0]
    assert steps_behind(before, prompt(steps[cut:])) == whole[cut:]


def test_tenants_have_no_key_in_common() -> None:
    keys = [
        {key for key, _ in steps_behind(tenant_key(name), prompt([1, 2]))}
        for name in ("", "a", "b")
    ]
    assert len(set.union(*keys)) == 6
