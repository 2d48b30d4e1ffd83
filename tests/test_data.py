"""Order and contents of what a run learns from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from offload.errors import ConfigError, OffloadError
from offload.observe.metrics import MetricsWriter
from offload.train import tokenize
from offload.train.data import PackedSequences, RandomSequences, Span, find_files, micro_batch, split
from offload.train.rundir import RunDirectory
from offload.train.schedule import learning_rate
from offload.train.tokenize import Tokenizing


def codes(texts: list[str]) -> list[list[int]]:
    return [list(text.encode("latin-1", errors="replace")) for text in texts]


def spans(*paths: Path) -> list[Span]:
    return [Span(str(p), 0, p.stat().st_size) for p in paths]


def test_random_tokens_follow_from_seed_and_index() -> None:
    source = RandomSequences(100, 16, seed=3)
    assert np.array_equal(source[5], RandomSequences(100, 16, seed=3)[5])
    assert not np.array_equal(source[5], source[6]) and not np.array_equal(source[5], RandomSequences(100, 16, seed=4)[5])
    assert not np.array_equal(source[5], RandomSequences(100, 16, seed=3, held_out=True)[5])
    assert source[0].dtype == np.int64 and source[0].min() >= 0 and source[0].max() < 100


def test_two_ranks_see_what_one_sees_at_twice_the_batch() -> None:
    source = RandomSequences(100, 4, seed=0)
    one = micro_batch(source, 3, 0, batch_size=4, accumulate=1)
    two = [micro_batch(source, 3, 0, batch_size=2, accumulate=1, rank=r, ranks=2) for r in range(2)]
    assert np.array_equal(one, np.concatenate(two))
    assert np.array_equal(one, np.concatenate([micro_batch(source, 3, m, batch_size=2, accumulate=2) for m in range(2)]))


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    rows = np.arange(10, dtype=np.int32)[:, None].repeat(3, 1)
    source = PackedSequences(rows, seed=1)
    epochs = [[int(source[10 * e + i][0]) for i in range(10)] for e in range(3)]
    assert epochs[0] == list(range(10)) and epochs[1] != epochs[2] and all(sorted(e) == epochs[0] for e in epochs)
    assert int(PackedSequences(rows, seed=1)[25][0]) == epochs[2][5]


def test_a_digest_is_of_what_was_read() -> None:
    rows = np.arange(30, dtype=np.int32).reshape(10, 3)
    longer = np.concatenate([rows, rows])
    digests = [PackedSequences(rows, seed=1).digest(n) for n in (0, 1, 10, 11)]
    assert len(set(digests)) == 4
    assert [PackedSequences(longer, seed=1).digest(n) for n in (0, 1, 10)] == digests[:3]  # what was not read yet may come to it
    assert PackedSequences(longer, seed=1).digest(11) != digests[3]
    assert PackedSequences(rows + 1, seed=1).digest(1) != digests[1]


def test_a_digest_goes_on_from_the_last_one() -> None:
    rows = np.arange(30, dtype=np.int32).reshape(10, 3)
    wanted = {n: PackedSequences(rows, seed=1).digest(n) for n in (0, 4, 7, 10, 12, 20)}
    read = rows.copy()
    source = PackedSequences(read, seed=1)
    for count in (0, 4, 4, 7, 10, 12, 20):
        assert source.digest(count) == wanted[count]
        read[:count] = -1  # what it was of is not read again
    assert PackedSequences(rows, seed=1).digest(7) == wanted[7]
    again = PackedSequences(rows, seed=1)
    assert [again.digest(n) for n in (12, 4, 7)] == [wanted[n] for n in (12, 4, 7)]  # fewer: from the start


def test_files_are_found_sorted_and_missing_ones_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.py", "a.py", "sub/c.py", "d.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty.py").write_text("")
    assert find_files([str(tmp_path / "**/*.py"), str(tmp_path / "d.txt")]) == [str(tmp_path / n) for n in ("a.py", "b.py", "d.txt", "sub/c.py")]
    with pytest.raises(ConfigError, match="no file matches"):
        find_files([str(tmp_path / "*.py"), str(tmp_path / "*.md")])
    with pytest.raises(ConfigError, match="no text found"):
        find_files([str(tmp_path / "empty.py")])


def test_a_file_counts_once_whatever_links_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("x")
    (tmp_path / "texts/b.txt").symlink_to("a.txt")
    (tmp_path / "texts/again").symlink_to(".")
    (tmp_path / "texts/gone.txt").symlink_to("nowhere")
    assert find_files([str(tmp_path / "texts/**/*.txt")]) == [str(tmp_path / "texts/a.txt")]
    with pytest.raises(ConfigError, match=r"no file matches .*gone\.txt"):
        find_files([str(tmp_path / "texts/gone.txt")])
    with pytest.raises(ConfigError, match=r"is a directory; .*/texts/\*\*/\*\.txt"):
        find_files([str(tmp_path / "texts")])


def test_a_tail_starts_with_a_whole_character(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("\u20ac" * 10)  # of three bytes each
    for share in (0.5, 0.51, 0.52, 0.53, 0.99):
        (head,), (tail,) = split([str(tmp_path / "a")], share, seed=0)
        strange: set[str] = set()
        assert [text for text, _ in tokenize.pieces([head, tail], strange)] == [
            text for text in ("\u20ac" * (head.stop // 3), "\u20ac" * (10 - head.stop // 3)) if text
        ]
        assert not strange and head.stop == tail.start


def test_held_out_files_are_apart(tmp_path: Path) -> None:
    files = []
    for i in range(40):
        (tmp_path / f"{i:02}").write_text("x" * (i + 1))
        files.append(str(tmp_path / f"{i:02}"))
    trained, kept = split(files, 0.1, seed=0)
    assert (len(trained), len(kept)) == (36, 4) and {s.path for s in trained} | {s.path for s in kept} == set(files)
    assert split(files, 0.1, seed=0) == (trained, kept) != split(files, 0.1, seed=1)
    assert split(files, 0, seed=0)[1] == [] and len(split(files[:2], 0.01, seed=0)[1]) == 1
    (head,), (tail,) = split(files[39:], 0.1, seed=0)
    assert (head.start, head.stop, tail.start, tail.stop) == (0, 36, 36, 40)


def test_pieces_join_to_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 10)
    text = "one\ntwo three four\n" * 5 + "end"
    (tmp_path / "a").write_text(text)
    (tmp_path / "b").write_text("short")
    got = list(tokenize.pieces(spans(tmp_path / "a", tmp_path / "b")))
    assert "".join(piece for piece, _ in got) == text + "short" and [last for _, last in got].count(True) == 2
    assert all(piece.endswith("\n") for piece, last in got if not last)


def test_documents_end_with_the_end_token(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    (tmp_path / "b").write_text("c")
    assert list(tokenize.stream(spans(tmp_path / "a", tmp_path / "b"), codes, 7)) == [[97, 98, 7], [99, 7]]
    assert list(tokenize.stream(spans(tmp_path / "a"), codes, None)) == [[97, 98]]


def test_a_sequence_keeps_its_place_whatever_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "WINDOW_TOKENS", 1)  # windows of 64 sequences

    def tokens() -> Iterable[list[int]]:
        return ([i] * 3 for i in range(400))

    everything = tokenize.pack(tokens(), 4, 10**6, seed=0)
    assert everything.shape == (300, 4) and everything.dtype == np.int32
    assert sorted(everything.ravel()) == sorted(i for i in range(400) for _ in range(3))
    for count in (0, 1, 63, 64, 65, 200):
        assert np.array_equal(tokenize.pack(tokens(), 4, count, seed=0), everything[:count])
    assert tokenize.pack([[1, 2]], 4, 3, seed=0).shape == (0, 4)


def test_a_child_tokenizes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<end>": 0, "a": 1, "b": 2, "?": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    (tmp_path / "text").write_text("a b c\na b\n" * 2)
    out = tmp_path / "out"
    out.mkdir()
    child = tokenize.Tokenizing(tmp_path, {"train": (spans(tmp_path / "text"), 3), "held-out": ([], 3)}, 4, 0, out)
    where = child.wait()
    rows, none = tokenize.take(where, "train"), tokenize.take(where, "held-out")
    child.close()
    assert sorted(rows.ravel().tolist()) == sorted([1, 2, 3, 1, 2, 1, 2, 3]) and none.shape == (0, 4) and not list(out.iterdir())

    (tmp_path / "old").write_bytes("a b caf\u00e9\n".encode("latin-1") * 2)
    (tmp_path / "new").write_text("a \ufffd b c\n")
    child = tokenize.Tokenizing(tmp_path, {"train": (spans(tmp_path / "old", tmp_path / "new"), 3)}, 4, 0, out, vocabulary=4)
    said: list[str] = []
    child.wait(said.append)
    child.close()
    assert len(said) == 1 and said[0].startswith(f"texts that are no UTF-8: 1, the first {tmp_path / 'old'};")

    child = tokenize.Tokenizing(tmp_path, {"train": (spans(tmp_path / "text"), 3)}, 4, 0, out, vocabulary=3)
    with pytest.raises(ConfigError, match=r"^data\.source: the tokenizer in .* gives token 3, and the model knows 3 tokens"):
        child.wait()
    child.close()
    child = tokenize.Tokenizing(tmp_path, {"train": ([Span(str(tmp_path / "gone"), 0, 9)], 3)}, 4, 0, out)
    with pytest.raises(ConfigError, match=r"^data\.source: cannot read .*/gone: No such file"):
        child.wait()
    child.close()

    child = tokenize.Tokenizing(tmp_path / "nowhere", {"train": ([], 1)}, 4, 0, out)
    with pytest.raises(ConfigError, match=r"tokenizing with .*nowhere failed"):
        child.wait()
    child.close()
    assert not list(out.iterdir())


def test_a_child_that_is_killed(tmp_path: Path) -> None:
    child = Tokenizing(tmp_path, {}, 8, 0, tmp_path)
    child._child.kill()
    with pytest.raises(ConfigError, match=r"was killed \(by signal 9\).*out of memory; free some"):
        child.wait()
    child.close()


def test_tokens_that_the_disk_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "load_encoder", lambda directory: (lambda texts: [[1, 2, 3, 4] for _ in texts], 0))
    (tmp_path / "text").write_text("words")
    (tmp_path / "train.npy").symlink_to("/dev/full")
    jobs = {str(tmp_path / "train.npy"): {"spans": [asdict(s) for s in spans(tmp_path / "text")], "count": 1}}
    with pytest.raises(ConfigError, match=r"cannot write 16 B of tokens to .*train\.npy: .*make room there"):
        tokenize.run({"tokenizer": str(tmp_path), "vocabulary": 9, "seq_length": 4, "seed": 0, "jobs": jobs})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rates(schedule: str) -> None:
    rates = [learning_rate(s, peak=1.0, steps=10, warmup=4, schedule=schedule) for s in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and rates[4] == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and (rates[-1] == 1.0) is (schedule == "constant") and rates[-1] > 0
    assert learning_rate(0, peak=1.0, steps=1, warmup=0, schedule=schedule) == 1.0


def test_metrics_are_lines_in_order_and_errors_are_raised(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        for step in range(500):
            writer.write({"step": step})
    assert [json.loads(line)["step"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == list(range(500))
    writer = MetricsWriter(tmp_path / "none" / "m.jsonl")
    writer.write({"step": 0})
    with pytest.raises(OffloadError, match=r"cannot write .*none/m\.jsonl: No such file.*--resume"):
        writer.close()


def test_metrics_that_cannot_be_written_are_told_of_until_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError), MetricsWriter("/dev/full") as writer:
        writer.write({"step": 0})
        for _ in range(2):
            with pytest.raises(OffloadError, match="cannot write /dev/full: No space left on device"):
                writer.sync()
        with pytest.raises(OffloadError):
            writer.write({"step": 1})
        raise KeyError
    assert not caplog.records  # it was told
    with pytest.raises(KeyError), MetricsWriter("/dev/full") as writer:
        writer.write({"step": 0})
        raise KeyError
    assert "cannot write /dev/full" in caplog.text


def test_a_tokenizer_does_not_hear_ctrl_c(tmp_path: Path) -> None:
    """It is for the run, which ends its child when it is done with it."""
    child = Tokenizing(tmp_path, {}, 8, 0, tmp_path)
    try:
        assert os.getpgid(child._child.pid) != os.getpgid(0)
    finally:
        child.close()


def test_a_run_directory_is_taken_once_and_replaced(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as first:
        assert not first.begin("old")
        with pytest.raises(ConfigError, match="a run is live there"):
            RunDirectory(tmp_path / "run")
        first.write_json("summary.json", {"steps": 3})
    (tmp_path / "run/.tokens-x").mkdir()
    with RunDirectory(tmp_path / "run") as second:
        assert sorted(p.name for p in second.path.iterdir()) == [".lock", "config.toml", "summary.json"]
        assert (second.path / "config.toml").read_text() == "old"
        assert second.begin("new") and (second.path / "config.toml").read_text() == "new" and not (second.path / "summary.json").exists()
    (tmp_path / "run/thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot write"):
        RunDirectory(tmp_path / "run/thesis.tex")


def test_a_run_does_not_lie_among_the_checkpoints_of_another(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("")
    (tmp_path / "run/config.toml").write_text("")
    for inside in (checkpoint, checkpoint.parent, checkpoint.with_name("step-00000003")):
        with pytest.raises(ConfigError, match=f"is among the checkpoints of the run in {tmp_path}/run: --resume {tmp_path}/run goes on"):
            RunDirectory(inside)
    assert [p.name for p in checkpoint.parent.iterdir()] == [checkpoint.name] and [p.name for p in checkpoint.iterdir()] == ["manifest.json"]
