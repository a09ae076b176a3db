"""Which table a launch uses, what is accepted as one, and how the tuner finds its rows."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernels import tuning
from kernels.tune import candidates, main, tune
from kernels.tuning_table import (
    FAMILIES,
    BlockConfig,
    TuningTable,
    TuningTableError,
    known_classes,
    load_table,
    parse_table,
    table_for,
)
from tests.kernels.cases import ON_GPU


@pytest.mark.parametrize("device_class", known_classes())
def test_committed_tables_are_whole(device_class: str) -> None:
    table = load_table(device_class)
    assert {(family, *rows) for family, rows in table.configs.items()} == {
        (family, *names) for family, (_, names) in FAMILIES.items()
    }
    assert parse_table(table.as_json(), "again") == table


def test_every_supported_class_has_its_own_table() -> None:
    assert {"sm_80", "sm_90", "sm_100", "gfx942"} <= {*known_classes()}


@pytest.mark.parametrize(
    ("backend", "arch", "expected"),
    [
        ("cuda", 90, "sm_90"),
        ("cuda", 89, "sm_80"),
        ("cuda", 120, "sm_80"),
        ("hip", "gfx942:sramecc+:xnack-", "gfx942"),
        ("hip", "gfx1100", "gfx942"),
    ],
)
def test_a_class_without_a_table_uses_its_vendors_least(
    backend: str, arch: int | str, expected: str
) -> None:
    assert table_for(backend, arch).device_class == expected


def broken(edit: Callable[[dict[str, Any]], None]) -> str:
    document = json.loads(load_table("sm_90").as_json())
    edit(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("source"), "missing .'source'."),
        (lambda d: d["configs"].pop("decode"), "configs: missing .'decode'."),
        (lambda d: d["configs"].update(other={}), "unknown .'other'."),
        (lambda d: d["configs"]["decode"].pop("64"), r"decode: missing .'64'."),
        (lambda d: d["configs"]["decode"]["64"].pop("num_warps"), r"decode.64.: missing"),
        (lambda d: d["configs"]["decode"]["64"].update(num_warps=3), "power of two, got 3"),
        (lambda d: d["configs"]["decode"]["64"].update(num_warps="4"), "1..16, got '4'"),
        (lambda d: d["configs"]["decode"]["64"].update(num_warps=True), "1..16, got True"),
        (lambda d: d["configs"]["decode"]["64"].update(block_rows=8), "16..16384, got 8"),
        (lambda d: d["configs"]["store_kv"].update(all=[]), r"store_kv.all. is not an object"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_name(
    edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    with pytest.raises(TuningTableError, match=message):
        parse_table(broken(edit), "sm_90.json")


def test_what_is_no_table_is_refused() -> None:
    for text in ("", "[]", "{}"):
        with pytest.raises(TuningTableError, match="mine"):
            parse_table(text, "mine")


def test_a_table_is_used_only_inside_its_block() -> None:
    table = load_table("sm_80")
    other = table.replaced("store_kv", "all", BlockConfig(64, 2))
    with tuning.use_table(table), tuning.use_table(other):
        assert tuning.block("store_kv") == BlockConfig(64, 2)
    with tuning.use_table(table):
        assert tuning.block("store_kv") != BlockConfig(64, 2)


@pytest.mark.parametrize("kind", {kind for kind, _ in FAMILIES.values()})
def test_candidates_are_what_a_table_accepts(kind: type) -> None:
    family, (_, names) = next(row for row in FAMILIES.items() if row[1][0] is kind)
    found = candidates(kind)
    assert len({*found}) == len(found) > 1
    for candidate in found:
        parse_table(load_table("sm_80").replaced(family, names[0], candidate).as_json(), "it")


def run_silu() -> Sequence[torch.Tensor]:
    """Compute right for all blocks but one, and not at all for another."""
    config = tuning.block("silu_and_mul")
    if config.block == 8192:
        raise RuntimeError("out of shared memory")
    return [torch.full((3,), 2.0 if config.block == 4096 else 1.0)]


def time_by_block(call: Callable[[], object]) -> float:
    """Be the faster, the larger the block."""
    call()
    config = tuning.block("silu_and_mul")
    return 1000.0 / config.block + config.num_warps / 1000


def tuned(time: Callable[[Callable[[], object]], float]) -> TuningTable:
    return tune(load_table("sm_80"), {("silu_and_mul", "all"): run_silu}, time)


def test_tuner_takes_the_fastest_that_computes_the_same() -> None:
    table = tuned(time_by_block)
    assert table.row("silu_and_mul", "all") == BlockConfig(2048, 4)
    assert table.configs["decode"] == load_table("sm_80").configs["decode"]


def test_tuner_keeps_a_row_that_nothing_beats_clearly() -> None:
    assert tuned(lambda call: 1.0) == load_table("sm_80")


@pytest.mark.skipif(ON_GPU, reason="would tune this GPU")
def test_tuner_without_a_gpu_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tune"])
    assert main() == 2
