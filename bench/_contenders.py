"""One contender of bench/step.py, in a process and, where it is a peer, an interpreter of its own: `python _contenders.py NAME SETTINGS`.

Prints @ and, as JSON, the seconds of a step and the most memory that was resident. Everyone trains the same Llama on the same tokens with bf16
compute, AdamW and a norm clipped at 1. Peers need torch and transformers; DeepSpeed, itself too. FSDP2 and ours also run as one of several ranks, by
torchrun's variables; each rank then has tokens and an equal part of the cores of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import _children
import _llama

CLIP, RATE = 1.0, 1e-5
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
Step = Callable[[], object]


def _torch_step(model: Any, ids: torch.Tensor, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = _llama.loss(model, ids)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain(settings: dict[str, Any], ids: torch.Tensor) -> tuple[Step, Step]:
    return _torch_step(_llama.build(settings["sizes"], "cpu"), ids, True), lambda: None


def fsdp2(settings: dict[str, Any], ids: torch.Tensor) -> tuple[Step, Step]:
    """Parameters and gradients in bf16 while they are computed with, and while ranks exchange them."""
    import torch.distributed
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    alone = {"rank": 0, "world_size": 1, "store": torch.distributed.HashStore()}
    torch.distributed.init_process_group("gloo", **(alone if RANKS == 1 else {}))  # type: ignore[arg-type]
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    model = _llama.build(settings["sizes"], "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=settings.get("stage", 3) == 3)
    atexit.register(torch.distributed.destroy_process_group)
    return _torch_step(model, ids, False), lambda: None


def _deepspeed(settings: dict[str, Any], ids: torch.Tensor, nvme: bool) -> tuple[Step, Step]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    import deepspeed

    sizes = settings["sizes"]
    parameter: dict[str, Any] = {"device": "cpu"}
    optimizer: dict[str, Any] = {"device": "cpu"}
    if nvme:  # its buffers hold a parameter each, or a group's part of one array
        there = {"device": "nvme", "nvme_path": settings["directory"], "pin_memory": True}
        parameter = there | {"buffer_count": 24, "buffer_size": (sizes["vocabulary"] * sizes["width"] // 1024 + 1) * 1024}
        optimizer = there | {"buffer_count": 16, "pipeline_read": True, "pipeline_write": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        "zero_force_ds_cpu_optimizer": True,
        "zero_optimization": {"stage": 3, "sub_group_size": 50_000_000, "offload_param": parameter, "offload_optimizer": optimizer},
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = _llama.build(sizes, "cpu")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(_llama.loss(engine, ids))
        engine.step()

    return step, lambda: None


def _ours(settings: dict[str, Any], ids: torch.Tensor, nvme: bool) -> tuple[Step, Step]:
    import offload

    disks = [(settings["directory"], settings["nvme"])]
    tiers = offload.Tiers(settings["nvme_device"], settings["nvme_host"], disks) if nvme else offload.Tiers(settings["device"], settings["host"])
    place, stage = None if nvme else _llama.HOST, settings.get("stage", 3)
    run = _llama.Run(settings["sizes"], tiers, device="cpu", activations="keep", place=place, stage=stage)
    run.ids = ids
    return lambda: run.step(CLIP), run.runtime.synchronize


CONTENDERS: dict[str, Callable[[dict[str, Any], torch.Tensor], tuple[Step, Step]]] = {
    "ours, all in host": lambda settings, ids: _ours(settings, ids, False),
    "ours, 3 GiB and NVMe": lambda settings, ids: _ours(settings, ids, True),
    "plain torch, autocast": plain,
    "FSDP2": fsdp2,
    "DeepSpeed ZeRO-3, CPU": lambda settings, ids: _deepspeed(settings, ids, False),
    "DeepSpeed ZeRO-3, NVMe": lambda settings, ids: _deepspeed(settings, ids, True),
}


def main() -> None:
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // RANKS))
    step, settle = CONTENDERS[name](settings, _llama.batch(settings["sizes"], RANK))
    for _ in range(settings["warm"]):
        step()
    start = time.perf_counter()
    for _ in range(settings["steps"]):
        step()
    settle()  # what still runs belongs to the steps
    seconds = (time.perf_counter() - start) / settings["steps"]
    _children.tell({"seconds": seconds, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})


if __name__ == "__main__":
    main()
