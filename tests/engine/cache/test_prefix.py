from itertools import combinations

from engine.cache.prefix import block_hash, root_hash


def test_base_model_and_adapters_have_different_roots() -> None:
    roots = [root_hash(None), root_hash(""), root_hash("a"), root_hash("b")]
    assert len(set(roots)) == len(roots)


def test_equal_content_has_equal_hashes() -> None:
    assert block_hash(root_hash("a"), [1, 2]) == block_hash(root_hash("a"), [1, 2])


def test_any_difference_gives_another_hash() -> None:
    first = block_hash(root_hash(None), [1, 2])
    hashes = [
        first,
        block_hash(root_hash(None), [2, 1]),
        block_hash(root_hash(None), [1, 2, 0]),
        block_hash(root_hash(None), [12]),
        block_hash(root_hash("a"), [1, 2]),
        block_hash(first, [1, 2]),
    ]
    assert all(one != other for one, other in combinations(hashes, 2))


def test_tokens_that_spell_an_adapter_do_not_give_its_root() -> None:
    spelled = int.from_bytes(b"lorafle", "little")
    assert block_hash(root_hash(None), [spelled]) != root_hash("lorafle")
    assert block_hash(b"", [spelled]) != root_hash("lorafle")
