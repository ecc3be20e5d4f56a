from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.block import KEY_BYTES, BlockKey, BlockKind, child_key, root_key
from holdfast.worker.kv.bits import BITS
from holdfast.worker.prefix.chain import (
    pack_tokens,
)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=20)
steps = st.tuples(st.integers(0, 4), token_lists, st.sampled_from(["kv", "state"]))


def key_of(
    parent: BlockKey, parent_tokens: int, token_ids: list[int], kind: BlockKind = "kv"
) -> BlockKey:
    return child_key(parent, parent_tokens, pack_tokens(token_ids), kind)


@given(token_ids=token_lists)
def test_packed_tokens_are_little_endian_numbers_of_four_bytes(token_ids: list[int]) -> None:
    assert pack_tokens(token_ids) == b"".join(token.to_bytes(4, "little") for token in token_ids)


@pytest.mark.parametrize("token_ids", [[-1], [2**32], [1.5], ["a"]])
def test_invalid_token_ids_are_refused(token_ids: list[int]) -> None:
    with pytest.raises((OverflowError, TypeError)):
        pack_tokens(token_ids)


@given(first=st.tuples(st.text(), st.text()), second=st.tuples(st.text(), st.text()))
def test_models_and_tenants_have_different_roots(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    assert (root_key(*first) == root_key(*second)) == (first == second)


def test_forms_of_keys_and_values_have_different_roots() -> None:
    forms = ["native", *BITS]
    assert len({root_key("model", "tenant", form) for form in forms}) == len(forms)


def test_fingerprint_and_salt_are_separated_unambiguously() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")


@given(first=steps, second=steps)
def test_a_key_depends_on_all_its_inputs(
    first: tuple[int, list[int], BlockKind], second: tuple[int, list[int], BlockKind]
) -> None:
    root = root_key("m")
    assert (key_of(root, *first) == key_of(root, *second)) == (first == second)


@given(chain=st.lists(token_lists, min_size=1, max_size=4), changed=st.integers(0, 3))
def test_a_change_anywhere_changes_all_later_keys(chain: list[list[int]], changed: int) -> None:
    other = [list(run) for run in chain]
    other[changed % len(chain)].append(7)
    keys, others = root_key("m"), root_key("m")
    for number, (run, other_run) in enumerate(zip(chain, other, strict=True)):
        keys, others = key_of(keys, 1, run), key_of(others, 1, other_run)
        assert len(keys) == KEY_BYTES
        assert (keys == others) == (number < changed % len(chain))


def test_keys_do_not_change_between_versions() -> None:
    root = root_key("fingerprint", "salt")
    assert root.hex() == "4c57bd5a98d4654440db17d8cc36e8e908c1080c6f295f44421e7eec73969b42"
    assert (
        key_of(root, 3, [1, 2, 3]).hex()
        == "944c0dc407596e599434eb766e1272fa6daa40a86820cc8c0998d2ad9e0c5441"
    )


def test_a_parent_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        child_key(b"short", 0, pack_tokens([1]), "kv")
