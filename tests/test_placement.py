"""Placement never changes the numbers: the same losses and digest to the bit, whatever rests where and however it is moved."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import models as M
import offload
from helpers import PRECISIONS
from offload import _core
from offload.engine import activations
from offload.engine.registry import engine_of
from offload.planner import placement
from offload.transfer.device import CpuDevice, SimDevice

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def engines() -> list[str]:
    """Those that this build and this kernel have."""
    try:
        _core.Engine("io_uring", 1, 4096, 60.0)
    except _core.Unavailable:
        return ["threads"]
    return ["threads", "io_uring"]


ENGINES = engines()
IDS = torch.arange(24).view(2, 12) * 101 % 3001


class Small(M.Language):
    """Tied, with a frozen and an unused parameter, and one at the root."""

    def __init__(self) -> None:
        super().__init__(vocabulary=701, width=32, depth=3)
        self.gain, self.unused = nn.Parameter(torch.rand(32)), nn.Parameter(torch.ones(5))
        self.blocks[1].norm.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) * self.gain
        return self.head(x)


def loss(model: nn.Module) -> torch.Tensor:
    return M.mean_square(model, IDS % 701)


_references: dict[Any, tuple[list[float], str]] = {}


def reference(path: Path, precision: offload.Precision, clip: float | None, accumulate: int) -> tuple[list[float], str]:
    """Everything on the host, on the CPU: losses and digest."""
    key = (precision, clip, accumulate)
    if key not in _references:
        where = M.tiers(path, "64MiB", "64MiB")
        _references[key] = M.run_and_digest(
            Small, loss, where, precision=precision, device="cpu", place=M.placed("host"), clip=clip, accumulate=accumulate
        )
    return _references[key]


roles = st.sampled_from([None, "device", "host", "nvme"])
plans = st.fixed_dictionaries(
    {
        "precision": st.sampled_from([M.FP32, offload.Precision("bf16", "fp32"), *PRECISIONS, offload.Precision("bf16", "fp32", "split", "int8")]),
        "clip": st.sampled_from([None, 1e-3]),
        "accumulate": st.sampled_from([1, 4]),
        "device": st.one_of(st.just("cpu"), st.just("sim"), st.integers(0, 1000)),
        "budgets": st.tuples(st.sampled_from([1, 2, 8, 64]), st.sampled_from([1, 2, 8, 64])),
        "place": st.fixed_dictionaries({"parameter": roles, "gradient": roles, "optimizer": roles}),
        "chunks": st.sampled_from([(4096,), (8192, 4096), (65536, 16384), tuple((1 << 20) >> i for i in range(7))]),
        "frames": st.sampled_from([3, 4, 5, 8]),
        "slots": st.sampled_from([None, None, 3, 5]),
        "activations": st.sampled_from(["keep", "recompute", "host", "nvme"]),
        "threads": st.sampled_from(["1", "2", "3"]),
        "simd": st.sampled_from(_core.simd_levels()),
        "engine": st.sampled_from(ENGINES),
        "drives": st.integers(1, 2),
    }
)


@given(plans)
@SETTINGS
def test_any_plan_gives_the_same_bits(tmp_path: Path, plan: dict[str, Any]) -> None:
    want = reference(tmp_path, plan["precision"], plan["clip"], plan["accumulate"])
    device, host = plan["budgets"]
    where = offload.Tiers(f"{device}MiB", f"{host}MiB", [(str(tmp_path / f"swap{i}"), "64MiB") for i in range(plan["drives"])])
    place = {k: v for k, v in plan["place"].items() if v}
    if plan["device"] != "cpu" and "device" in place.values():
        place = M.placed("device")  # there a unit rests whole, or not at all
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "CHUNKS", plan["chunks"])
        patch.setattr(placement, "FRAMES_MOST", plan["frames"])
        patch.setattr(activations, "SMALLEST", 1)
        for name, value in (("OFFLOAD_THREADS", plan["threads"]), ("OFFLOAD_SIMD", plan["simd"]), ("OFFLOAD_IO", plan["engine"])):
            patch.setenv(name, value)
        chosen = SimDevice(seed=plan["device"]) if isinstance(plan["device"], int) else plan["device"]
        try:
            made = offload.plan(
                M.seeded(Small), where, device="cpu" if chosen == "cpu" else "sim", precision=plan["precision"], place=place,
                activations=plan["activations"], accumulate=plan["accumulate"], batch=(2, 12),
            )  # fmt: skip
        except offload.PlanError:
            if isinstance(chosen, SimDevice):
                chosen.close()
            return
        if plan["slots"] is not None:
            larger = M.with_slots(made, plan["slots"])
            made = larger if larger.peak_bytes["device"] <= device << 20 else made
        got = M.run_and_digest(
            Small, loss, where, plan=made, device=chosen, precision=plan["precision"], clip=plan["clip"], accumulate=plan["accumulate"]
        )
    assert got == want
    assert not [p for i in range(plan["drives"]) for p in (tmp_path / f"swap{i}").glob("*")]


@pytest.mark.parametrize("precision", [M.BF16, M.FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_each_tier(tmp_path: Path, tier: str, device: str, precision: offload.Precision) -> None:
    for clip, accumulate in ((None, 1), (1e-3, 4)):
        want = reference(tmp_path, precision, clip, accumulate)
        where = M.tiers(tmp_path)
        assert (
            M.run_and_digest(Small, loss, where, precision=precision, device=device, place=M.placed(tier), clip=clip, accumulate=accumulate) == want
        )


def test_fp32_is_torch_to_a_few_ulp(tmp_path: Path) -> None:
    """Placement is exact; against torch's AdamW the update may differ in the last bits only."""
    model = M.seeded(Small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    with M.prepared(M.seeded(Small), M.tiers(tmp_path), precision=M.FP32, place=M.placed("nvme")) as made:
        M.train(made, loss, clip=1e-3)
        for name, p in made.named_parameters():
            assert torch.allclose(p.detach().clone(), model.get_parameter(name), rtol=1e-4, atol=1e-6), name
        assert torch.equal(made.unused.detach().clone(), torch.ones(5))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_undeclared_accumulation(tmp_path: Path, accumulate: int) -> None:
    """Micro-batches beyond what was declared are summed in fp32 all the same, with the same bits on every tier."""

    def run(tier: str, device: str, declared: int) -> str:
        with M.prepared(M.seeded(Small), M.tiers(tmp_path), precision=M.BF16, place=M.placed(tier), device=device, accumulate=declared) as model:
            M.train(model, loss, accumulate=4, clip=1e-3)
            return offload.runtime(model).digest()

    want = run("host", "cpu", 4)
    assert run("nvme", "sim", accumulate) == want
    assert run("host", "cpu", accumulate) == want
    assert run("device", "sim", accumulate) == want


def test_torch_threads_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads(), os.environ.get("OMP_NUM_THREADS")
    M.run_and_digest(Small, loss, M.tiers(tmp_path), place=M.placed("nvme"))
    assert (torch.get_num_threads(), torch.get_num_interop_threads(), os.environ.get("OMP_NUM_THREADS")) == before


def test_random_state_is_left_alone(tmp_path: Path) -> None:
    """Preparing, streaming and updating draw nothing from the user's generator."""
    torch.manual_seed(11)
    want = torch.rand(4)
    model = M.seeded(Small)
    torch.manual_seed(11)
    with M.prepared(model, M.tiers(tmp_path), place=M.placed("nvme"), activations="recompute") as made:
        optimizer = offload.optim.AdamW(made.parameters())
        loss(made).backward()
        optimizer.step()
        offload.runtime(made).digest()
        assert torch.equal(torch.rand(4), want)


def test_meta_values_do_not_depend_on_placement(tmp_path: Path) -> None:
    """A model made on meta has the same values wherever it rests and in whatever order its units are first used."""
    digests = set()
    for tier, device, first in (("host", "cpu", None), ("nvme", "sim", 2), ("device", "cpu", 0), ("nvme", "cpu", 1)):
        with torch.device("meta"):
            model = M.Language(tied=False)
        with M.prepared(model, M.tiers(tmp_path), place=M.placed(tier), device=device, seed=7) as made:
            if first is not None:
                made.blocks[first % 2].up.weight.sum()
            loss(made)
            digests.add(offload.runtime(made).digest())
    assert len(digests) == 1


def test_writes_reach_copies_in_flight(tmp_path: Path) -> None:
    """A parameter written to while its unit is in a slot, or on its way there, computes with the new value."""
    for seed in range(6):
        plain = M.seeded(M.Order)
        x = torch.linspace(-1, 1, 64).view(4, 16)
        with M.prepared(
            M.seeded(M.Order),
            M.tiers(tmp_path),
            precision=M.FP32,
            place={"parameter": ("host", "nvme")[seed % 2]},
            device=SimDevice(seed=seed),
            slots=3,
        ) as model:
            for i in range(5):
                with torch.no_grad():
                    for m in (plain, model):
                        m(x)
                        m.blocks[i].up.weight.mul_(1.5)
                        m.blocks[(i + 1) % 5].down.bias[2:5] = 3.0
                    assert torch.equal(model(x), plain(x))


def test_numbers_of_chunks_and_frames_differ(tmp_path: Path) -> None:
    """The cases above do differ in how state is cut: else they would show nothing."""
    seen = set()
    for chunks in ((4096,), (65536, 16384)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "CHUNKS", chunks)
            made = offload.plan(M.seeded(Small), M.tiers(tmp_path), place=M.placed("nvme"), device="cpu")
        seen.add((made.frame_bytes, sum(len(u.trained.chunks) for u in made.layouts if u.trained)))
    assert len(seen) == 2


def test_devices_are_told_apart(tmp_path: Path) -> None:
    """`cpu` binds what rests in memory where it is; `sim` has it in slots alone."""
    with M.prepared(M.seeded(Small), M.tiers(tmp_path), place=M.placed("host"), device=CpuDevice()) as model:
        loss(model)
        assert offload.runtime(model).stats()["fetches"] == 1  # the unit with a frozen fp32 parameter
    with M.prepared(M.seeded(Small), M.tiers(tmp_path), place=M.placed("host"), device=SimDevice()) as model:
        loss(model)
        assert offload.runtime(model).stats()["fetches"] >= len(engine_of(model).units) - 1
        assert offload.runtime(model).stats()["moved_bytes"]["h2d"] > 0


def test_plan_given_is_the_plan_used(tmp_path: Path) -> None:
    made = offload.plan(M.seeded(Small), M.tiers(tmp_path), device="sim", place=M.placed("nvme"))
    made = dataclasses.replace(made, frames=7)
    with M.prepared(M.seeded(Small), M.tiers(tmp_path), device="sim", plan=made) as model:
        assert offload.runtime(model).plan is made
        assert len(engine_of(model).update_frames) == 6


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
def test_every_parameter_starts_on_a_cache_line_where_it_is_computed_on(tmp_path: Path, tier: str, device: str) -> None:
    """Libraries may choose another kernel, and so other bits, by alignment. In forwards, and in what is computed again."""
    starts: list[int] = []
    model = M.seeded(lambda: M.Order(width=13))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda m, _: starts.extend(p.data_ptr() % 64 for p in m.parameters()))
    with M.prepared(model, M.tiers(tmp_path), device=device, place={"parameter": tier}, activations="recompute", precision=M.BF16) as made:
        for _ in range(2):
            M.mean_square(made, torch.linspace(-1, 1, 52).view(4, 13)).backward()
    assert len(starts) == 2 * 2 * 5 * 6 and not any(starts)


@pytest.mark.parametrize("updates", ["forward", "backward"])
def test_frozen_parameters_cost_their_values_alone(tmp_path: Path, updates: str) -> None:
    """As under LoRA: no gradient, master or moments, and no byte of them is written."""
    written, trained = [], sum(p.numel() for p in M.Order(depth=1).parameters())
    for depth in (2, 5):
        model = M.seeded(lambda depth=depth: M.Order(depth=depth))
        for block in model.blocks[1:]:
            block.bfloat16().requires_grad_(False)
        with M.prepared(model, M.tiers(tmp_path), place=M.placed("nvme"), updates=updates) as made:
            runtime, optimizer = offload.runtime(made), offload.optim.AdamW([p for p in made.parameters() if p.requires_grad])
            assert runtime.stats()["state_bytes"] == trained * (2 + 2 + 12 + 2 * (depth - 1))
            runtime.reset_counters()
            for _ in range(3):
                M.mean_square(made, torch.linspace(-1, 1, 64).view(4, 16)).backward()
                optimizer.step()
                optimizer.zero_grad()
            runtime.synchronize()
            written.append(runtime.stats()["moved_bytes"]["nvme_write"])
    assert written[0] == written[1] > 3 * 14 * trained
