"""`python -m benchmarks loops`: a made-up listing, and the installed kernels'."""

import sys

import pytest

import jax_fused_topk
from benchmarks import __main__, hopper_library, loops


def listing(name, *late, end="@!P0 BRA 0x0030"):
    """A function whose loop, from its fourth instruction on, has a head for each of `late`.

    So many FMAs, each with a load of a spilled register, stand behind the head's first product.
    """
    code = ["MOV R1, R2", "NOP", "S2R R0, SR_TID.X"]
    for fmas in late:
        code += ["WARPGROUP.ARRIVE", "QGMMA.64x112x32.F32.E4M3.E4M3 R24, gdesc[UR28], RZ, !UPT"]
        code += ["FFMA R9, R81, R9, R126", "@P1 LDL R3, [R1+0x4]"] * fmas
        code += ["QGMMA.64x112x32.F32.E4M3.E4M3 R24, gdesc[UR24], R24, gsb0"]
        code += ["WARPGROUP.DEPBAR.LE gsb0, 0x0", "FADD R9, R24, |R24|"]
    code += [end, "EXIT"]
    lines = [f"        /*{16 * i:04x}*/   {text} ;   /* 0x00 */" for i, text in enumerate(code)]
    return f"\t\tFunction : {name}\n" + "\n".join(lines) + "\n"


def mangled(mode, heads):
    return (
        f"_ZN14jax_fused_topk6hopper12score_kernelILNS0_4ModeE{mode}ELi{heads}EEEvNS0_10TensorMapsE"
    )


def test_loops_of_a_listing():
    sass = (
        listing("_Z5otherv", 1) + listing(mangled(2, 64), 0, 2, 1) + listing(mangled(0, 32), 0, 0)
    )
    store, append = loops.score_loops(sass)
    assert store == loops.Loop("kStore", 32, 2, 11, 0, (0,))
    # Three heads of 5 instructions, 3 FMAs and 3 loads among them, and the branch.
    assert append == loops.Loop("kAppend", 64, 3, 22, 3, (2, 1))


def test_products_outside_a_loop_are_refused():
    sass = listing(mangled(1, 64), 1, end="BRA 0x0100")
    with pytest.raises(ValueError, match="the products of kSample, 64 heads, are in no loop"):
        loops.score_loops(sass)


def test_the_command_prints_a_line_a_loop(tmp_path, monkeypatch, capsys):
    sass = tmp_path / "sass"
    sass.write_text(listing(mangled(0, 64), 0, 20) + listing(mangled(2, 32), 0, 16))
    tool = tmp_path / "cuobjdump"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\nassert sys.argv[1:-1] == ['-sass', '-arch', 'sm_90a']\n"
        f"print(open(sys.argv[-1]).read())\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert __main__.main(["loops", str(sass)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert " ".join(out[0].split()) == (
        "kStore 64 heads 25.5 instructions a head 20 spills FMAs after the next product: 20"
    )
    assert len(out) == 2 and out[1].startswith("kAppend          32 heads")
    with pytest.raises(SystemExit):
        __main__.main(["loops", str(tmp_path / "nothing")])
    assert "binary must be a file, got" in capsys.readouterr().err


def test_without_cuobjdump_the_command_says_so(monkeypatch, capsys):
    monkeypatch.setattr(hopper_library, "find_program", lambda name: None)
    with pytest.raises(SystemExit):
        __main__.main(["loops"])
    assert "loops needs cuobjdump, of the CUDA toolkit: none on PATH" in capsys.readouterr().err


def test_the_installed_loops(capsys):
    """Of a head's instructions 112 are its sum's and 4 its products."""
    if not jax_fused_topk.build_info()["cuda"] or hopper_library.find_program("cuobjdump") is None:
        pytest.skip("THE LOOPS WERE NOT LOOKED AT: no CUDA part, or no cuobjdump")
    assert __main__.main(["loops"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [mode, heads] for mode in ("kStore", "kSample", "kAppend") for heads in ("64", "32")
    ]
    for line in lines:
        assert "  0 spills" in line
        assert 120 < float(line.split()[3]) < 131
