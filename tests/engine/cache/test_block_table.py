from adapters import LoRARequest
from engine.cache.block_table import KVCacheManager
from engine.request import Request
from engine.sampling_params import SamplingParams


def make_request(
    request_id: str,
    prompt: list[int],
    digest: str | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    lora = None
    if digest is not None:
        lora = LoRARequest(lora_name="adapter", lora_path="-", digest=digest)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(prompt_logprobs=prompt_logprobs),
        lora=lora,
    )


def make_manager(num_blocks: int = 8, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks=num_blocks, block_size=4, enable_prefix_caching=caching)


def compute(kv: KVCacheManager, request: Request) -> None:
    """Run a request's known tokens as one step would."""
    cached = kv.find_cached(request)
    request.num_computed_tokens = 0
    assert kv.allocate_slots(request, request.num_tokens - len(cached) * 4, cached)
    request.num_computed_tokens = request.num_tokens
    kv.cache_full_blocks(request)


def test_table_grows_block_by_block() -> None:
    kv = make_manager()
    request = make_request("r", [1, 2, 3])
    lengths = []
    for _ in range(6):
        assert kv.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        lengths.append(len(kv.block_ids(request)))
    assert lengths == [1, 1, 1, 1, 2, 2]


def test_failed_allocation_changes_nothing() -> None:
    kv = make_manager(num_blocks=2)
    request = make_request("r", list(range(9)))
    assert not kv.allocate_slots(request, 9)
    assert kv.block_ids(request) == ()
    assert kv.num_free_blocks == 2


def test_full_blocks_of_a_prefix_are_shared() -> None:
    kv = make_manager()
    first = make_request("1", list(range(10)))
    second = make_request("2", [*range(8), 99, 98])
    compute(kv, first)
    cached = kv.find_cached(second)
    assert cached == list(kv.block_ids(first)[:2])
    compute(kv, second)
    assert kv.block_ids(second)[:2] == kv.block_ids(first)[:2]
    assert kv.block_ids(second)[2] != kv.block_ids(first)[2]


def test_last_token_is_never_served_from_the_cache() -> None:
    kv = make_manager()
    compute(kv, make_request("1", list(range(8))))
    assert len(kv.find_cached(make_request("2", list(range(8))))) == 1


def test_prefix_survives_its_request() -> None:
    kv = make_manager()
    first = make_request("1", list(range(9)))
    compute(kv, first)
    kv.free(first)
    assert kv.num_free_blocks == 8
    assert len(kv.find_cached(make_request("2", list(range(9))))) == 2


def test_output_tokens_are_part_of_the_prefix() -> None:
    kv = make_manager()
    first = make_request("1", [1, 2, 3])
    first.output_token_ids.extend([4, 5])
    compute(kv, first)
    assert len(kv.find_cached(make_request("2", [1, 2, 3, 4, 5]))) == 1
    assert kv.find_cached(make_request("3", [1, 2, 3, 9, 5])) == []


def test_adapters_and_the_base_model_share_nothing() -> None:
    kv = make_manager()
    prompt = list(range(9))
    compute(kv, make_request("1", prompt, digest="a"))
    assert kv.find_cached(make_request("2", prompt)) == []
    assert kv.find_cached(make_request("3", prompt, digest="b")) == []
    assert len(kv.find_cached(make_request("4", prompt, digest="a"))) == 2


def test_removed_adapter_leaves_no_prefix() -> None:
    kv = make_manager()
    compute(kv, make_request("1", list(range(9)), digest="a"))
    assert kv.drop_adapter("a") == 2
    assert kv.find_cached(make_request("2", list(range(9)), digest="a")) == []


def test_blocks_not_computed_yet_are_not_found() -> None:
    kv = make_manager()
    first = make_request("1", list(range(9)))
    assert kv.allocate_slots(first, 9)
    first.num_computed_tokens = 7
    kv.cache_full_blocks(first)
    assert len(kv.find_cached(make_request("2", list(range(9))))) == 1


def test_prompt_logprobs_are_computed_from_the_first_token() -> None:
    kv = make_manager()
    compute(kv, make_request("1", list(range(9))))
    assert kv.find_cached(make_request("2", list(range(9)), prompt_logprobs=0)) == []


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make_manager(caching=False)
    compute(kv, make_request("1", list(range(9))))
    assert kv.find_cached(make_request("2", list(range(9)))) == []


def test_cached_blocks_do_not_count_as_room_for_new_ones() -> None:
    kv = make_manager(num_blocks=2)
    first = make_request("1", list(range(8)))
    compute(kv, first)
    kv.free(first)
    second = make_request("2", list(range(12)))
    cached = kv.find_cached(second)
    assert len(cached) == 2
    assert not kv.allocate_slots(second, 4, cached)
    assert kv.num_free_blocks == 2


def test_freeing_is_idempotent() -> None:
    kv = make_manager()
    request = make_request("r", [1, 2])
    compute(kv, request)
    kv.free(request)
    kv.free(request)
    assert kv.num_free_blocks == 8
