"""Models made on the meta device: values by the architecture's own rules, the same wherever and in whatever order they are made."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offload
from helpers import BF16, FP32, Net, Prepared, bits, ids, plain, same, same_models
from offload.engine import initialise, recipes


@pytest.fixture(autouse=True, params=["whole", "in pieces"])
def _recipes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every parameter counted as large, too."""
    if request.param == "in pieces":
        monkeypatch.setattr(initialise, "LARGE", 0)
        monkeypatch.setattr(recipes, "PIECE", 64)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: plain(p) for n, p in model.named_parameters()}


def untied() -> nn.Module:
    return Net(tied=False, depth=3, width=40)


def llama(**over: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**(config | over)))  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config

    return AutoModelForCausalLM.from_config(GPT2Config(vocab_size=320, n_positions=64, n_embd=64, n_layer=8, n_head=4))  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=32)
    )  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 5)
        self.norm = nn.BatchNorm2d(16)
        self.group = nn.GroupNorm(4, 16)
        self.table = nn.Embedding(400, 16, padding_idx=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.group(self.norm(self.conv(x))).mean((2, 3)) @ self.table.weight.t()


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": untied, "llama": llama, "gpt2": gpt2, "bert": bert, "convolutions": Convolutions, "transformer": transformer,
    "lstm": lambda: nn.LSTM(16, 16, num_layers=2),
    "bilinear": lambda: nn.Sequential(nn.Bilinear(24, 16, 40), nn.Linear(40, 80)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["net", "llama", "convolutions", "gpt2", "transformer", "orthogonal"])
def test_values_depend_on_seed_and_name_alone(prepared: Prepared, name: str) -> None:
    make = MODELS.get(name, Net)
    if name == "orthogonal":
        make = lambda: nn.Sequential(nn.ModuleDict({"a": Orthogonal("orthogonal"), "b": Orthogonal("numpy")}), Reaching())  # noqa: E731
    first = values(prepared(on_meta(make), "host", keep=True, seed=3))
    settings: list[dict[str, Any]] = [
        {"place": "nvme"}, {"place": "nvme", "device": "sim"}, {"place": None}, {"units": lambda m: not any(True for _ in m.children())},
        {"units": [type(make())]},
        {"precision": BF16},
    ]  # fmt: skip
    for i, over in enumerate(settings):
        torch.manual_seed(i)
        twin = prepared(on_meta(make), keep=True, seed=3, **over)
        for n, p in list(twin.named_parameters())[:: -1 if i % 2 else 1]:  # in another order
            same(p, first[n], f"{n} with {over}")
    other = values(prepared(on_meta(make), "host", keep=True, seed=4))
    assert any(not torch.equal(other[n], v) for n, v in first.items())


def test_a_forward_initialises_as_reading_does(prepared: Prepared) -> None:
    read = prepared(on_meta(Net), "host", keep=True)
    values(read)
    for place, precision in (("nvme", FP32), ("host", FP32)):
        run = prepared(on_meta(Net), place, keep=True, precision=precision)
        same(run(ids()), read(ids()))
        same_models(run, read)
        run(ids()).backward()
        opt = offload.optim.AdamW(run.parameters())
        opt.step()
    stepped = prepared(on_meta(Net), "host", keep=True)
    for p in stepped.parameters():
        p.grad = torch.zeros(p.shape)
    offload.optim.AdamW(stepped.parameters(), weight_decay=0.0).step()  # before anything was read
    same_models(stepped, read)


def test_digest_of_what_was_never_read(prepared: Prepared) -> None:
    a, b = (prepared(on_meta(Net), place, keep=True) for place in ("host", "nvme"))
    values(a)
    assert offload.runtime(a).digest() == offload.runtime(b).digest()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_distributed_as_its_architecture_makes_it(prepared: Prepared, name: str) -> None:
    """Constants are the same; random values have the same mean, spread and bounds, within what the sample allows."""
    torch.manual_seed(0)
    want, twin = MODELS[name](), prepared(on_meta(MODELS[name]), "host", keep=True)
    assert list(dict(twin.named_parameters())) == list(dict(want.named_parameters()))
    for n, p in twin.named_parameters():
        ours, theirs = plain(p).double().flatten(), dict(want.named_parameters())[n].detach().double().flatten()
        count = theirs.numel()
        assert bool(ours.isfinite().all()), n
        spread = float(theirs.std()) if count > 1 else 0.0
        if spread == 0.0:
            assert torch.equal(ours, theirs), f"{n}: {ours[:3]} for {theirs[:3]}"
            continue
        assert abs(float(ours.mean() - theirs.mean())) < 8 * spread / math.sqrt(count), n
        assert 1 - 6 / math.sqrt(count) < float(ours.std()) / spread < 1 + 6 / math.sqrt(count), f"{n}: {float(ours.std())} for {spread}"
        if count > 500:
            assert 0.7 < float(ours.abs().max() / theirs.abs().max()) < 1.45, n
        assert float((theirs == 0).double().mean()) == float((ours == 0).double().mean()), n


@pytest.mark.parametrize("name", MODELS)
def test_no_two_parameters_are_alike(prepared: Prepared, name: str) -> None:
    twin = prepared(on_meta(MODELS[name]), "host", keep=True)
    seen: dict[bytes, str] = {}
    for n, p in twin.named_parameters():
        value = plain(p)
        if value.numel() > 8 and float(value.std()) > 0:
            key = bits(value)[:32].numpy().tobytes()
            assert key not in seen, f"{n} and {seen[key]} are filled alike"
            seen[key] = n


@pytest.mark.parametrize("name", MODELS)
def test_buffers_are_those_of_a_model_made_in_memory(prepared: Prepared, name: str) -> None:
    want, twin = MODELS[name](), prepared(on_meta(MODELS[name]), "host", keep=True)
    buffers = dict(twin.named_buffers())
    assert list(buffers) == list(dict(want.named_buffers()))
    for n, b in want.named_buffers():
        assert not buffers[n].is_meta
        same(buffers[n], b, n)
    assert set(twin.state_dict()) == set(want.state_dict())


class Orthogonal(nn.Module):
    """A rule that draws into tensors of its own before it fills the parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.empty(12, 12))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.how == "orthogonal":
                nn.init.orthogonal_(self.weight)
            elif self.how == "randn":
                self.weight.copy_(torch.randn(12, 12))
            elif self.how == "temporary":
                self.weight.copy_(torch.empty(12, 12).normal_())
            elif self.how == "numpy":
                self.weight.copy_(torch.from_numpy(np.random.randn(12, 12)))
            elif self.how == "sparse":
                nn.init.sparse_(self.weight, 0.5, std=1.0)
            elif self.how == "trunc":
                nn.init.trunc_normal_(self.weight)
            elif self.how == "data":
                self.weight.data = torch.randn(12, 12)
            else:
                self.weight.set_(torch.randn(12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Reaching(nn.Module):
    """A rule that draws into its children, through tensors of its own, after theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(9, 9), nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9, bias=False)])
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.one, *self.two):
            nn.init.orthogonal_(linear.weight)
        nn.init.normal_(self.one.bias, std=9.0)


@pytest.mark.parametrize("how", ["orthogonal", "randn", "numpy", "temporary", "sparse", "trunc", "data", "set"])
def test_rules_of_many_kinds_fill_and_differ(prepared: Prepared, how: str) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"a": Orthogonal(how), "b": Orthogonal(how)})

    twin = prepared(on_meta(make), "host", keep=True)
    a, b = plain(twin["a"].weight), plain(twin["b"].weight)
    assert bool(a.isfinite().all()) and float(a.std()) > 0.1
    assert not torch.equal(a, b)
    again = prepared(on_meta(make), "nvme", keep=True)
    same(again["b"].weight, b)
    same(again["a"].weight, a)
    if how == "orthogonal":
        assert torch.allclose(a @ a.t(), torch.eye(12), atol=1e-5)


def test_rules_that_reach_into_children_come_after_theirs(prepared: Prepared) -> None:
    twin = prepared(on_meta(Reaching), "host", keep=True, units=[nn.Linear])
    for linear in (twin.one, *twin.two):
        weight = plain(linear.weight)
        assert torch.allclose(weight @ weight.t(), torch.eye(9), atol=1e-5)
    assert float(plain(twin.one.bias).abs().max()) > 3
    assert 0 < float(plain(twin.two[0].bias).abs().max()) <= 1 / 3


def test_rules_leave_alone_what_has_a_value(prepared: Prepared) -> None:
    """Values and buffers given before a unit's first use stay, whatever rules run later."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = Norm(5), nn.Linear(5, 5)

        def reset_parameters(self) -> None:
            for p in self.parameters():
                nn.init.ones_(p)
            self.norm.reset_parameters()

    twin = prepared(on_meta(Model), "host", keep=True)
    with torch.no_grad():
        twin.norm.running_mean.fill_(2.0)
        twin.norm.bias.copy_(torch.full((5,), 7.0))
    assert bool((plain(twin.norm.weight) == 1).all()) and bool((plain(twin.last.bias) == 1).all())
    assert bool((twin.norm.running_mean == 2).all()) and bool((plain(twin.norm.bias) == 7).all())


def test_what_a_models_rule_leaves_its_modules_rules_fill(prepared: Prepared) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(30, 30), nn.LayerNorm(30)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.001)

    twin = prepared(on_meta(Model), "host", keep=True)
    assert 0.0008 < float(plain(twin.linear.weight).std()) < 0.0012
    assert 0.05 < float(plain(twin.linear.bias).std()) < 0.2
    assert bool((plain(twin.norm.weight) == 1).all()) and bool((plain(twin.norm.bias) == 0).all())


def test_a_rule_that_reads_other_modules_is_refused_whatever_the_units(prepared: Prepared) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def reset_parameters(self) -> None:
            nn.init.constant_(self.two.bias, float(self.one.weight.sum()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    for units in ([nn.Linear], [Model]):
        twin = prepared(on_meta(Model), "host", keep=True, units=units)
        for _ in range(2):
            with pytest.raises(offload.ConfigError, match=r"Model.*other modules"):
                values(twin)
        twin.load_state_dict(Model().state_dict())
        twin(torch.ones(2, 3))


def test_no_generator_outside_is_disturbed(prepared: Prepared) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].tolist()
    twin = prepared(on_meta(llama), "host", keep=True, seed=9)
    values(twin)
    assert torch.equal(torch.get_rng_state(), before) and np.random.get_state()[1].tolist() == before_numpy
    lazily = prepared(on_meta(Net), "host", keep=True)
    lazily(ids())
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_the_same_whether_values_are_made_now_or_were_before(prepared: Prepared) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    outs = []
    for early in (False, True):
        twin = prepared(on_meta(make), "host", keep=True)
        if early:
            values(twin)
        torch.manual_seed(1)
        outs.append(plain(twin(torch.ones(4, 8))))
    same(*outs)


def test_tied_parameters_are_one_and_filled_once(prepared: Prepared) -> None:
    twin = prepared(on_meta(Net), "host", keep=True)
    assert twin.head.weight is twin.embed.weight
    assert abs(float(plain(twin.embed.weight).std()) - 1.0) < 0.1  # as the embedding's rule, which comes first


def test_frozen_and_low_precision_parameters_on_meta(prepared: Prepared) -> None:
    def make() -> nn.Module:
        m = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Embedding(20, 8))
        m[0].weight.requires_grad_(False)
        return m.bfloat16()

    twin = prepared(on_meta(make), "host", keep=True, precision=BF16)
    for p in twin.parameters():
        assert p.dtype == torch.bfloat16 and float(plain(p).float().std()) > 0.01
    assert not twin[0].weight.requires_grad


# What has no rule


class Ruleless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Forgetful(nn.Linear):
    """Its rule leaves the bias out."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class Buffer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, rule: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.arange(3).to(dtype), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.table


class Flag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.order = nn.Parameter(torch.arange(3), requires_grad=False)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[..., self.order]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Ruleless, "Ruleless"),
        (lambda: Forgetful(3, 3), "bias"),
        (Buffer, "table"),
        (lambda: Buffer(torch.int64), "table"),
        (lambda: Buffer(torch.bool), "table"),
        (Flag, "order"),
    ],
    ids=["no rule", "rule forgets", "float buffer", "int buffer", "bool buffer", "int parameter"],
)
def test_what_no_rule_fills_is_refused_and_never_computed_with(prepared: Prepared, make: Callable[[], nn.Module], what: str) -> None:
    try:
        twin = prepared(on_meta(make), "host", keep=True)
    except offload.ConfigError as error:
        assert what in str(error)
        return
    for use in (lambda: twin(torch.ones(2, 3)), lambda: values(twin), lambda: twin(torch.ones(2, 3)), lambda: offload.runtime(twin).digest()):
        with pytest.raises(offload.ConfigError, match=what):
            use()


def test_what_no_rule_fills_may_be_given_after_prepare_or_loaded(prepared: Prepared) -> None:
    """Writing whole values, or a state dict, serves instead of a rule."""
    try:
        twin = prepared(on_meta(Ruleless), "host", keep=True)
    except offload.ConfigError:
        return  # refused at once is right too
    want = Ruleless()
    twin.load_state_dict(want.state_dict())
    same_models(twin, want)
    same(twin(torch.ones(2, 3)), want(torch.ones(2, 3)))


def test_load_state_dict_over_a_meta_model(prepared: Prepared) -> None:
    torch.manual_seed(2)
    want = untied()
    for assign in (False, True):
        twin = prepared(on_meta(untied), "nvme", keep=True)
        twin.load_state_dict(want.state_dict(), assign=assign)
        same_models(twin, want)
        same(twin(ids()), want(ids()))


def test_one_written_value_survives_the_units_initialisation(prepared: Prepared) -> None:
    twin, read = prepared(on_meta(untied), "host", keep=True), prepared(on_meta(untied), "host", keep=True)
    with torch.no_grad():
        twin.blocks[1].up.bias.fill_(3.0)
    twin(ids())
    assert bool((plain(twin.blocks[1].up.bias) == 3.0).all())
    same(twin.blocks[1].up.weight, read.blocks[1].up.weight)


def test_a_model_partly_real_keeps_its_real_units(prepared: Prepared) -> None:
    torch.manual_seed(3)
    model = untied()
    kept = plain(model.blocks[0].up.weight)
    meta = on_meta(untied)
    model.blocks[1] = meta.blocks[1]  # type: ignore[index, operator]
    twin, whole = prepared(model, "host", keep=True), prepared(on_meta(untied), "host", keep=True)
    same(twin.blocks[0].up.weight, kept)
    same(twin.blocks[1].up.weight, whole.blocks[1].up.weight)


def test_a_copy_of_a_meta_model_can_be_prepared(prepared: Prepared) -> None:
    meta = on_meta(Net)
    a, b = prepared(copy.deepcopy(meta), "host", keep=True), prepared(copy.deepcopy(meta), "nvme", keep=True)
    same_models(a, b)


def test_what_fills_elements_alike_is_made_in_pieces(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an architecture's large parameters lies in memory whole; the values are the same however many threads make them."""
    monkeypatch.setattr(initialise, "LARGE", 0)
    monkeypatch.setattr(recipes, "PIECE", 1000)
    made: list[str] = []
    parts = recipes.Recipe.parts
    monkeypatch.setattr(recipes.Recipe, "parts", lambda self, seed: made.append(self.name) or parts(self, seed))
    read = []
    for threads in (1, 4):
        monkeypatch.setattr(recipes, "THREADS_MOST", threads)
        twin = prepared(on_meta(llama), "host", keep=True)
        read.append(values(twin))
        assert set(made) == set(read[-1])
        made.clear()
    for n, value in read[0].items():
        same(read[1][n], value, n)
