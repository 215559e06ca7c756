"""examples/two_gpus.py at a small size, on devices that a CPU stands in for."""

import json

import jax
import numpy as np
import pytest
import two_gpus

SMALL = [
    "--cpu", "--queries", "24", "--keys", "128", "--heads", "3", "--dim", "16", "--topk", "20",
    "--repeats", "2",
]  # fmt: skip


def run(tmp_path, *flags):
    out = tmp_path / "devices.jsonl"
    code = two_gpus.main([*SMALL, "--out", str(out), *flags])
    return code, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("devices", [2, 4])
def test_every_layout_gives_the_bits_of_one_device(devices, tmp_path, capsys):
    code, lines = run(tmp_path, "--devices", str(devices))
    assert code == 0
    assert [(x["layout"], x["devices"], x["equal"]) for x in lines] == [
        ("one device", 1, True),
        ("queries sharded (jit)", devices, True),
        ("keys sharded (shard_map)", devices, True),
    ]
    for x in lines:
        assert (x["q"], x["n"], x["h"], x["d"], x["topk"]) == (24, 128, 3, 16, 20)
        assert len(x["wall_ms_samples"]) == 2 and min(x["wall_ms_samples"]) > 0
        assert x["speed_up"] == lines[0]["wall_ms"] / x["wall_ms"]
    assert capsys.readouterr().out.count("bit for bit") == 3


def test_work_is_placed_as_the_layouts_say():
    devices = jax.devices("cpu")[:2]
    x = two_gpus.random_operands(8, 64, 2, 16)
    placed = {name: y for name, (_, y) in two_gpus.layouts(devices, x, 5, False).items()}
    shapes = {
        name: (y.q.addressable_shards[0].data.shape[0], y.k.addressable_shards[0].data.shape[0])
        for name, y in placed.items()
    }
    assert shapes == {
        "one device": (8, 64),
        "queries sharded (jit)": (4, 64),
        "keys sharded (shard_map)": (8, 32),
    }


def test_other_bits_are_reported(tmp_path, capsys, monkeypatch):
    wrong = lambda topk, return_scores, mesh: two_gpus.select(topk - 1, return_scores)  # noqa: E731
    monkeypatch.setattr(two_gpus, "select_sharded_keys", wrong)
    code, lines = run(tmp_path)
    assert code == 1
    assert [x["equal"] for x in lines] == [True, True, False]
    assert capsys.readouterr().out.count("NO") == 1


def test_same_bits():
    a = np.float32([0.0, 1.0]), np.int32([1, -1])
    assert two_gpus.same_bits(a, a)
    assert not two_gpus.same_bits(a, (np.float32([-0.0, 1.0]), a[1]))
    assert not two_gpus.same_bits(a, (a[0], np.int32([1, 0])))


def test_arguments(capsys):
    for flags, message in (
        (["--keys", "129"], "--keys must be a multiple of --devices, got 129"),
        (["--topk", "0"], "--topk must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            two_gpus.main(flags)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--devices must be at most 4 here, got 99"):
        two_gpus.find_devices(99, cpu=True)
    gpus = sum(device.platform != "cpu" for device in jax.devices())
    with pytest.raises(
        SystemExit,
        match=f"needs 99 GPUs, found {gpus}; try --cpu --queries 64 --keys 4096 --topk 256",
    ):
        two_gpus.find_devices(99, cpu=False)
