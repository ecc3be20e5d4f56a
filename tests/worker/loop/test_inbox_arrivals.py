from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.prompt_keys import STEP_TOKENS, steps_behind, tenant_key
from holdfast.wire.token_ids import TokenIds
from holdfast.worker.loop.inbox import PromptMemory


@given(prompts=st.lists(st.text("xy", max_size=4), max_size=12), most_steps=st.integers(0, 8))
def test_what_is_recalled_is_what_was_there_and_never_more_than_may_be(
    prompts: list[str], most_steps: int
) -> None:
    memory, root = PromptMemory(most_steps=most_steps), tenant_key("")
    for steps in prompts:
        ids = TokenIds.of([ord(step) for step in steps for _ in range(STEP_TOKENS)])
        memory.remember(root, ids)
        assert len(memory) <= most_steps
        for number, (key, _) in enumerate(steps_behind(root, ids)):
            found = memory.recall(key, tenant="")
            # what stands further in front is forgotten later
            assert (found is not None) == (number < most_steps)
            assert found in (None, ids[: (number + 1) * STEP_TOKENS])
            assert memory.recall(key, tenant="other") is None
