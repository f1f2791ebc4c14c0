"""One run on several processes: the same step as one process makes, and checkpoints that any number of them reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from divided import CASES, STEPS, batch_of, begin, results, resumed, state_of
from safetensors import safe_open
from safetensors.torch import load_file

from processes import together
from xsalab.train.distributed import PORTION, Portion, backward_order, owners, portions, update_cost
from xsalab.train.ranks import ALONE, Ranks

WORLDS = (4, 2)  # four first: two of them take up what they left
PROGRAM = Path(__file__).with_name("divided.py")
Found = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What four and two processes made of the common states."""
    folder, threads = tmp_path_factory.mktemp("divided"), torch.get_num_threads()
    torch.set_num_threads(1)
    for kind in ("hybrid", "muon", "adamw"):
        begin(folder, kind)
    for world in WORLDS:
        for code, output in together([PROGRAM, folder], world):
            assert code == 0, output
    yield folder
    torch.set_num_threads(threads)


def before(folder: Path, case: str) -> Found:
    return load_file(next((folder / CASES[case][0]).glob("step-*")) / "model.safetensors")


def assert_same_update(found: Found, expected: Found, start: Found) -> None:
    """Every parameter moved by the same, to 1e-5 of how far and four roundings of its largest weight."""
    for name, weight in start.items():
        moved = (expected[name] - weight).norm()
        apart = (found[name] - expected[name]).norm()
        rounding = 4 * torch.finfo(torch.float32).eps * weight.abs().max() * math.sqrt(weight.numel())
        assert apart <= 1e-5 * moved + rounding, f"{name}: moved by {moved:.3g}, {apart:.3g} apart"


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_processes_makes_the_same_step(case: str, world: int, folder: Path) -> None:
    """F037, F039, F045, F131: matrices, table rows and targets that do not divide evenly, clipping, micro-batches."""
    expected = results(folder, case, ALONE)
    found = load_file(folder / f"{case}-{world}.safetensors")
    assert_same_update(found, expected, before(folder, case))
    assert len(expected["losses"]) == STEPS
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0)
    torch.testing.assert_close(found["norms"][:1], expected["norms"][:1], rtol=1e-5, atol=0)
    assert found["tokens"].tolist() == expected["tokens"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_frozen_matrix_does_not_move(case: str, world: int, folder: Path) -> None:
    """F035: no rank replaces its missing gradient by zeros, which would let momentum and decay move it."""
    name = "blocks.1.attention.w_q.weight"
    found = load_file(folder / f"{case}-{world}.safetensors")
    assert torch.equal(found[name], before(folder, case)[name])
    assert not torch.equal(found[name.replace("1", "0")], before(folder, case)[name.replace("1", "0")])


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_many_goes_on_with_the_same_step(case: str, world: int, folder: Path) -> None:
    """F044: from what ``world`` processes saved, as many make the next step to the bit, and one makes the same."""
    found = load_file(folder / f"{case}-{world}.safetensors")
    start = load_file_set(folder / f"{case}-{world}")
    for name in start:
        assert torch.equal(found[f"again.{name}"], found[f"next.{name}"]), name
    alone = resumed(folder, case, world, ALONE)
    assert_same_update({name: found[f"again.{name}"] for name in start}, alone, start)
    with_one = resumed(folder, case, 1, ALONE) if (folder / f"{case}-1").is_dir() else None
    assert with_one is None or assert_same_update(alone, with_one, start) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", ["parallel", "sharded"])
def test_two_take_up_what_four_left(case: str, folder: Path) -> None:
    start = load_file_set(folder / f"{case}-4")
    assert_same_update(load_file(folder / f"{case}-4-2.safetensors"), resumed(folder, case, 4, ALONE), start)


def load_file_set(folder: Path) -> Found:
    (newest,) = folder.glob("step-*")
    return {name: tensor for path in newest.glob("model*") for name, tensor in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["parallel", "sharded", "adamw", "sharded-adamw"])
def test_every_process_writes_its_own_tensors(case: str, folder: Path) -> None:
    """Each tensor whole and once; momentum and moments as of one process."""
    (newest,) = (folder / f"{case}-4").glob("step-*")
    alone = state_of(CASES[case][0], False)
    results(folder, case, ALONE)  # leaves <case>-1 beside it
    (single,) = (folder / f"{case}-1").glob("step-*")
    for kind in ("model", "optimizer"):
        shapes: dict[str, tuple[int, ...]] = {}
        paths = sorted(newest.glob(f"{kind}-*.safetensors"))
        assert [path.name for path in paths] == [f"{kind}-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
        for path in paths:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                assert names
                assert names.isdisjoint(shapes)
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in names}
        with safe_open(single / f"{kind}.safetensors", "pt") as file:
            assert shapes == {name: tuple(file.get_slice(name).get_shape()) for name in set(file.keys())}
    assert set(alone.model.state_dict()) == set(load_file_set(folder / f"{case}-4"))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_work_is_divided(world: int, folder: Path) -> None:
    """No process owns much more than its share of the weights."""
    owned = load_file(folder / f"parallel-{world}.safetensors")["owned"]
    assert owned.sum() == sum(p.numel() for p in state_of("hybrid", False).model.state_dict().values())
    assert owned.max() < 1.1 * owned.sum() / world


def test_shares_of_a_batch_are_the_batch() -> None:
    whole = batch_of(3)
    for world in (1, 2, 4):
        shares = [batch_of(3, Ranks(rank, world)) for rank in range(world)]
        assert torch.equal(torch.cat([share.inputs for share in shares]), whole.inputs)


# How the work is divided


def test_owners_share_the_cost() -> None:
    costs = {f"m{n}": float(cost) for n, cost in enumerate((8, 7, 6, 5, 4, 3, 2, 1))}
    for world in (1, 2, 3, 5, 20):
        found = owners(costs, world)
        loads = [sum(costs[name] for name in costs if found[name] == rank) for rank in range(world)]
        assert sum(loads) == 36
        assert max(loads) <= max(8, 36 / world + 4)
    assert owners(costs, 3) == owners(dict(reversed(costs.items())), 3)  # in every process the same


def test_a_matrix_costs_muon_more_than_adamw() -> None:
    """Five steps of XXᵀ, A² and PX: 4 s² l + 2 s³ operations each, for sides s ≤ l."""
    assert update_cost("w", (768, 3072), True) - update_cost("w", (768, 3072), False) == 5 * (
        4 * 768 * 768 * 3072 + 2 * 768**3
    )
    assert update_cost("w", (4, 9), True) == update_cost("w", (9, 4), True)


def test_the_order_of_backward() -> None:
    names = ["embedding.weight", "blocks.0.mlp.w1.weight", "blocks.10.mlp.w1.weight", "value_embeddings.2.weight",
             "head.weight", "residual", "blocks.2.mlp.w1.weight"]  # fmt: skip
    assert backward_order(names) == [
        "head.weight", "blocks.10.mlp.w1.weight", "value_embeddings.2.weight", "blocks.2.mlp.w1.weight",
        "blocks.0.mlp.w1.weight", "embedding.weight", "residual",
    ]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_portions_hold_every_parameter_once(world: int) -> None:
    sizes = {f"blocks.{layer}.w{n}": 2**20 * (n + 1) for layer in range(12) for n in range(3)} | {"head.weight": 2**25}
    kinds = {name: name == "head.weight" for name in sizes}
    owner = owners({name: float(size) for name, size in sizes.items()}, world)
    found = portions(sizes, owner, kinds, world)
    assert sorted(name for portion in found for name in portion.names) == sorted(sizes)
    for portion in found:
        assert isinstance(portion, Portion)
        assert {owner[name] for name in portion.names} == {portion.owner}
        assert len({kinds[name] for name in portion.names}) == 1
        assert portion.size == sum(sizes[name] for name in portion.names)
        assert portion.size <= PORTION or len(portion.names) == 1
