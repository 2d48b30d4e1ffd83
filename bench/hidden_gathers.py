"""How much of the time that parameters are on the wire at stage 3 is hidden under compute, between two network namespaces with a set bandwidth.

    sudo python bench/hidden_gathers.py [--share 0.5] [--steps 2] [--rounds 3] [--json] [--out bench/results/hidden_gathers.json]

Two ranks (gloo), each in a namespace of its own, are joined by a veth pair whose ends `tc` holds to one bandwidth: that at which all that a step
sends takes `--share` of the time that a step takes without communication. The same steps are timed

    none        neither parameters nor gradients are sent (what the other rank has is what it had at first)
    reductions  gradients are sent at the set bandwidth, parameters are not
    all         both are
    free        both are, without a limit

What compute waits for other ranks in `all`, less what it waits in `reductions`, is what gathers show, the rank that waits longer counting; hidden is
the rest of their bytes over the bandwidth. Likewise all communication, by `all` less `none`. "by steps" is the same by how much longer steps take,
where noise counts too, and what it takes of the cores to move bytes through the kernel, as it would not with a network card: `free` less `none` says
how much. Modes take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import _children
import _result

LIMIT = 0.9
MODES = {"none": (False, False), "reductions": (False, True), "all": (True, True), "free": (True, True)}  # whether gathers and reductions are sent
SPACES, ENDS, ADDRESSES = ("offload-0", "offload-1"), ("offload-veth0", "offload-veth1"), ("10.97.0.1", "10.97.0.2")
PORT = "29577"


def ip(*args: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"ip {' '.join(args)}: {done.stderr.strip()} (network namespaces want root)")


@contextmanager
def joined() -> Iterator[None]:
    """Two namespaces with a link between them."""
    for space in SPACES:
        ip("netns", "del", space, check=False)
    try:
        for space in SPACES:
            ip("netns", "add", space)
        ip("link", "add", ENDS[0], "netns", SPACES[0], "type", "veth", "peer", "name", ENDS[1], "netns", SPACES[1])
        for space, end, address in zip(SPACES, ENDS, ADDRESSES, strict=True):
            ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", end, "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield
    finally:
        for space in SPACES:
            ip("netns", "del", space, check=False)


def limit(bytes_per_second: float | None) -> None:
    """Sets what each end sends at most; None: whatever it can."""
    for space, end in zip(SPACES, ENDS, strict=True):
        subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", end, "root"], capture_output=True, check=False)
        if bytes_per_second is not None:
            rate = f"{round(8 * bytes_per_second)}bit"
            bucket = ["tbf", "rate", rate, "burst", "256kb", "limit", "16mb"]
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", end, "root", *bucket], check=True)


def timed(mode: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank found."""
    gathers, reductions = MODES[mode]
    given = json.dumps(settings | {"gathers": gathers, "reductions": reductions})
    found = _children.ranks(
        2, lambda rank: ["ip", "netns", "exec", SPACES[rank], sys.executable, __file__, "--as-rank", given],
        GLOO_SOCKET_IFNAME=lambda rank: ENDS[rank], MASTER_ADDR=lambda _: ADDRESSES[0], MASTER_PORT=lambda _: PORT,
    )  # fmt: skip
    if isinstance(found, str):
        raise SystemExit(f"{mode}: {found}")
    return found


def keep_near(gathers: bool, reductions: bool) -> None:
    """Has the kinds that are not to be sent done by this rank alone: others' parameters stay as they were when they were first sent."""
    import torch

    from offload.dist.world import Work, World

    sent, first = World.gather_into, dict[str, torch.Tensor]()

    def gather(self: World, full: torch.Tensor, own: torch.Tensor, what: str, reducing: bool = False, ordered: bool = False) -> Work:
        if what not in first:
            sent(self, full, own, what, reducing, ordered).wait()
            first[what] = full.clone()
            return Work(None, what)
        self._count("all_gather", full)
        for rank, (part, was) in enumerate(zip(full.view(self.size, -1), first[what].view(self.size, -1), strict=True)):
            if rank != self.rank:
                part.copy_(was)
            elif part.data_ptr() != own.data_ptr():
                part.copy_(own)
        return Work(None, what)

    def reduce(self: World, own: torch.Tensor, full: torch.Tensor, what: str) -> Work:
        self._count("reduce_scatter", full)
        part = full.view(self.size, -1)[self.rank]
        if part.data_ptr() != own.data_ptr():
            own.copy_(part)
        return Work(None, what)

    if not gathers:
        World.gather_into = gather  # type: ignore[method-assign]
    if not reductions:
        World.reduce_scatter = reduce  # type: ignore[method-assign]


def as_rank(settings: dict[str, Any]) -> None:
    """One of the two: prints @ and seconds a step, bytes it received a step and seconds that it stalled."""
    import torch

    import _llama
    import offload
    from offload.dist.world import World

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    world = World.current(device="cpu")
    keep_near(settings["gathers"], settings["reductions"])
    tiers = offload.Tiers("3GiB", "2GiB")
    with _llama.Run(settings["sizes"], tiers, device="cpu", activations="keep", place=_llama.HOST, stage=3) as run:
        run.ids = _llama.batch(settings["sizes"], world.rank)
        run.seconds([None] * settings["warm"])
        run.runtime.reset_counters()
        world.barrier("the start")
        start = time.perf_counter()
        run.seconds([None] * settings["steps"])
        world.barrier("the end")
        seconds, stats = time.perf_counter() - start, run.runtime.stats()
    found = {"seconds": seconds, "moved": {k: stats["moved_bytes"][k] for k in ("all_gather", "reduce_scatter")}, "stalls": stats["stall_seconds"]}
    per_step = {k: v / settings["steps"] if k == "seconds" else {c: x / settings["steps"] for c, x in v.items()} for k, v in found.items()}
    _children.tell(per_step)
    world.close()


def measure(settings: dict[str, Any], rounds: int, share: float, say: Any) -> dict[str, Any]:
    with joined():
        alone = timed("none", settings)
        moved, without = alone[0]["moved"], max(r["seconds"] for r in alone)
        rate = sum(moved.values()) / (share * without)
        say(f"without communication {without:.3f} s a step; {sum(moved.values()) / 2**20:.1f} MiB each way at {rate / 2**20:.1f} MiB/s")
        taken: dict[str, list[float]] = {mode: [] for mode in MODES}
        stalls: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for number in range(rounds):
            for mode in list(MODES)[:: 1 if number % 2 == 0 else -1]:
                limit(rate if mode in ("reductions", "all") else None)
                found = timed(mode, settings)
                taken[mode].append(max(r["seconds"] for r in found))
                stalls[mode].append(max((r["stalls"] for r in found), key=lambda s: s["ranks"]))
                say(f"round {number + 1}, {mode}: {taken[mode][-1]:.3f} s a step")
    wire = {kind: nbytes / rate for kind, nbytes in moved.items()}
    waits = {mode: [s["ranks"] for s in of_mode] for mode, of_mode in stalls.items()}

    def hidden(of: dict[str, list[float]], longer: str, shorter: str, seconds: float) -> float:
        shown = statistics.median(a - b for a, b in zip(of[longer], of[shorter], strict=True))
        return round(1 - max(0.0, shown) / seconds, 3)

    return {
        "bytes_per_step": moved, "bytes_per_second": round(rate), "wire_seconds": {k: round(v, 4) for k, v in wire.items()},
        "seconds": {mode: round(statistics.median(times), 4) for mode, times in taken.items()},
        "all_seconds": {mode: [round(t, 4) for t in times] for mode, times in taken.items()},
        "stall_seconds": {mode: {k: round(statistics.median(s[k] for s in rounds), 4) for k in rounds[0]} for mode, rounds in stalls.items()},
        "hidden_gathers": hidden(waits, "all", "reductions", wire["all_gather"]),
        "hidden_communication": hidden(waits, "all", "none", sum(wire.values())),
        "hidden_gathers_by_steps": hidden(taken, "all", "reductions", wire["all_gather"]),
        "hidden_communication_by_steps": hidden(taken, "all", "none", sum(wire.values())),
        "cores_for_moving_seconds": round(statistics.median(a - b for a, b in zip(taken["free"], taken["none"], strict=True)), 4),
    }  # fmt: skip


def main() -> None:
    parser = _result.parser(__doc__)
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.5, help="of a step's time without communication, that all of its bytes are on the wire")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    if given.as_rank is not None:
        as_rank(json.loads(given.as_rank))
        return
    if os.geteuid() or shutil.which("tc") is None:
        print("SKIPPED: network namespaces and their bandwidth want root, and ip and tc (Debian: iproute2)", file=sys.stderr)
        return
    sizes = {"width": given.width, "blocks": given.blocks, "vocabulary": 1024, "tokens": given.tokens}
    settings = {"sizes": sizes, "steps": given.steps, "warm": given.warm}
    found = measure(settings, given.rounds, given.share, (lambda text: None) if given.json else lambda text: print(text, flush=True))
    whole: dict[str, Any] = settings | {"share": given.share, "rounds": given.rounds} | found
    whole |= {"limit": LIMIT, "holds": found["hidden_gathers"] >= LIMIT}
    _result.finish(whole, given)
    if given.json:
        return
    verdict = "holds" if whole["holds"] else "DOES NOT HOLD"
    print(f"hidden: {found['hidden_gathers']:.1%} of gathers' time on the wire (at least {LIMIT:.0%}: {verdict}), "
          f"{found['hidden_communication']:.1%} of all; "
          f"by steps {found['hidden_gathers_by_steps']:.1%} and {found['hidden_communication_by_steps']:.1%}; "
          f"moving bytes takes {found['cores_for_moving_seconds']:.3f} s of cores a step")  # fmt: skip


if __name__ == "__main__":
    main()
