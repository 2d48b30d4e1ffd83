"""torch.distributed.checkpoint with a prepared model and its optimizer, in one process: to the same digest, a tensor in memory at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import offload
from checkpoints import adam, digest, steps, trained
from helpers import BF16, FEW, FP32, SETTINGS, Prepared, bag, give, net, same
from offload.engine.sources import MomentSource, ValueSource

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


class App:
    """A Stateful, as torch's tutorial writes it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        self.model, self.optimizer, self.options = model, optimizer, StateDictOptions(**options)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=self.options
        )  # fmt: skip


@pytest.mark.parametrize("number", range(len(SETTINGS)))
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
def test_state_comes_back_to_the_bit(prepared: Prepared, tmp_path: Path, number: int, precision: offload.Precision) -> None:
    """Under another placement, into an optimizer that has not stepped yet and into one that has."""
    (device, place), (other, elsewhere) = SETTINGS[number], SETTINGS[(2 * number + 3) % 5]
    model, optimizer = trained(prepared, 3, place, device, precision=precision)
    before = digest(model)
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=tmp_path / "at")
    assert digest(model) == before
    for stepped in (0, 2):
        twin = prepared(net(seed=5), elsewhere, other, precision=precision)
        resumed = adam(twin, lr=9.0)
        steps(twin, resumed, 7, 7 + stepped)
        dcp.load({"app": App(twin, resumed)}, checkpoint_id=tmp_path / "at")
        assert digest(twin) == before and resumed.param_groups[0]["lr"] == 1e-2
        for p in twin.parameters():
            assert resumed.state[p]["exp_avg"].dtype == resumed.state[p]["exp_avg_sq"].dtype == torch.float32
    steps(model, optimizer, 3, 6)
    steps(twin, resumed, 3, 6)
    assert digest(twin) == digest(model)


def test_model_and_optimizer_are_stateful_themselves(prepared: Prepared, tmp_path: Path) -> None:
    """As with torch's own optimizers, a state that is to be loaded has to be there: by a step."""
    model, optimizer = trained(prepared, 3, "nvme", precision=BF16)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "at")
    twin, resumed = trained(prepared, 1, "host", precision=BF16)
    dcp.load({"model": twin, "optim": resumed}, checkpoint_id=tmp_path / "at")
    assert digest(twin) == digest(model)


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"cpu_offload": True}, {"full_state_dict": True, "cpu_offload": True},
                                     {"flatten_optimizer_state_dict": True}])  # fmt: skip
def test_options(prepared: Prepared, tmp_path: Path, options: dict[str, bool]) -> None:
    model, optimizer = trained(prepared, 2, "nvme", precision=BF16)
    dcp.save({"app": App(model, optimizer, **options)}, checkpoint_id=tmp_path / "at")
    twin = prepared(net(seed=5), precision=BF16)
    resumed = adam(twin)
    dcp.load({"app": App(twin, resumed, **options)}, checkpoint_id=tmp_path / "at")
    assert digest(twin) == digest(model)


def test_torch_reads_what_was_saved_here_and_the_other_way(prepared: Prepared, tmp_path: Path) -> None:
    twin, model = prepared(bag(shapes=FEW), "nvme"), bag(shapes=FEW)
    pairs = (twin, adam(twin)), (model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for number, (source, target) in enumerate((pairs, pairs[::-1])):
        give(source[0], number)
        source[1].step()
        at = tmp_path / str(number)
        dcp.save({"app": App(*source)}, checkpoint_id=at)
        wanted = {name: (p.detach().clone(), source[1].state[p]["exp_avg"].clone()) for name, p in source[0].named_parameters()}
        dcp.load({"app": App(*target)}, checkpoint_id=at, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        for name, p in target[0].named_parameters():
            same(p.detach(), wanted[name][0], name)
            same(target[1].state[p]["exp_avg"], wanted[name][1], name)


def test_torch_reads_checkpoints(prepared: Prepared, tmp_path: Path) -> None:
    """The files of `offload.save`, which are the same whatever the number of ranks: into plain tensors, by their names in it."""
    model, optimizer = trained(prepared, 3, "nvme", precision=BF16)
    offload.save(tmp_path / "at", model, optimizer)
    moments = ("exp_avg", "exp_avg_sq")
    wanted = {f"{role}/{n}": optimizer.state[p][role].clone() for n, p in model.named_parameters() for role in moments if p in optimizer.state}
    found = {name: torch.empty_like(value) for name, value in wanted.items()}
    found |= {f"master/{n}": torch.empty(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "at")))
    assert wanted
    for name, value in wanted.items():
        same(found[name], value, name)
    for name, p in model.named_parameters():
        if p.requires_grad:
            same(found[f"master/{name}"].to(p.dtype), p.detach().clone(), name)


def test_planning_reads_nothing_and_saving_reads_each_value_once(prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained(prepared, 1, "nvme")
    read: list[str] = []
    for kind in (ValueSource, MomentSource):
        real = kind.read
        monkeypatch.setattr(kind, "read", lambda self, real=real: (read.append(self.describe()), real(self))[1])
    state = App(model, optimizer).state_dict()
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    planner.create_local_plan()
    assert not read
    dcp.save(state, checkpoint_id=tmp_path / "at")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(read) == len(names) + 2 * len(list(model.parameters()))  # a tied parameter is there under each of its names


def test_what_shares_memory_is_refused_and_writes_nothing(prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = trained(prepared, 1)
    with pytest.raises(offload.OffloadError, match="rests outside memory"):
        dcp.async_save({"app": App(model, optimizer)}, checkpoint_id=tmp_path / "at").result()
    assert not (tmp_path / "at").exists()


CALLS: dict[str, Callable[[Any], Any]] = {
    "data_ptr": lambda s: s.data_ptr(),
    "fill_": lambda s: s.fill_(0),
    "tolist": lambda s: s.tolist(),
    "copy_": lambda s: torch.UntypedStorage(8).copy_(s),
    "set_": lambda s: torch.empty(0).set_(s),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_storage_tells_its_size_alone(prepared: Prepared, name: str) -> None:
    twin = prepared(bag(shapes={"matrix": (5, 9)}, dtype=torch.bfloat16), precision=BF16)
    for tensor in (twin.matrix, twin.matrix.detach(), twin.matrix.detach()[1:]):
        storage = tensor.untyped_storage()
        assert storage.size() == storage.nbytes() == 90
        with pytest.raises((offload.OffloadError, TypeError)):
            CALLS[name](storage)
        assert not tensor.is_pinned()


BOUNDED = """
import resource, sys, threading, torch, offload, warnings
from pathlib import Path
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
warnings.simplefilter("ignore")
base = Path({where!r})
torch.set_num_threads(1)

class App:
    def __init__(self, seed):
        with torch.device("meta"):
            self.model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)])
        tiers = offload.Tiers(device="24MiB", host="32MiB", nvme=[(str(base / "swap"), "1GiB")])
        place = dict.fromkeys(("parameter", "gradient", "optimizer"), "nvme")
        offload.prepare(self.model, tiers, device="cpu", place=place, precision=offload.Precision("fp32", "fp32"), seed=seed)
        self.opt = offload.optim.AdamW(self.model.parameters())
    def state_dict(self):
        return dict(zip(("model", "opt"), get_state_dict(self.model, self.opt)))
    def load_state_dict(self, state):
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
    def digest(self):
        return offload.runtime(self.model).digest()

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

small = torch.nn.Linear(2, 2)  # imports, once
dcp.save({{"x": dict(zip("mo", get_state_dict(small, torch.optim.AdamW(small.parameters()))))}}, checkpoint_id=base / "small")
app, twin = App(1), App(2)
most, done = [rss()], threading.Event()
def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], rss())
thread = threading.Thread(target=watch)
before = rss()
thread.start()
dcp.save({{"app": app}}, checkpoint_id=base / "at")
dcp.load({{"app": twin}}, checkpoint_id=base / "at")
done.set(); thread.join()
assert twin.digest() == app.digest()
for a in (app, twin):
    offload.runtime(a.model).close()
print(most[0] - before)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """192 MiB of values and moments, saved from and loaded into optimizers that have not stepped, to which torch gives 64 MiB of gradients."""
    done = subprocess.run([sys.executable, "-c", BOUNDED.format(where=str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 << 20, int(done.stdout) >> 20
