"""Tests of scripts/plot_receipt.py. Usage: plot_receipt_test.py BIN_DIR draws|refuses

draws needs matplotlib and exits 77 without it.
"""
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

PLOT = Path(__file__).resolve().parent.parent.parent / "scripts" / "plot_receipt.py"
MODEL = ["--model", "synth:tiny,layers=1,experts=4"]


def run_tool(bin_dir, folder, tool, *arguments):
    receipt = Path(folder) / f"{tool}.json"
    subprocess.run([bin_dir / tool, *MODEL, "--receipt", receipt, "-q", *arguments], check=True, stdout=subprocess.DEVNULL)
    return receipt


def plot(*arguments, path=""):
    return subprocess.run([sys.executable, "-B", PLOT, *arguments], capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), "PYTHONPATH": str(path)})


def export_profile(bin_dir, folder):
    """The receipt of an export; only fnx-generate makes profiles."""
    run_tool(bin_dir, folder, "fnx-generate", "--token-ids", "1,2,3", "--max-tokens", "2", "--profile-dir",
             Path(folder) / "profiles")
    receipt = Path(folder) / "heat.json"
    subprocess.run([bin_dir / "fnx-expert-profile", "export", *(Path(folder) / "profiles").iterdir(), "-q", "--receipt",
                    receipt], check=True, stdout=subprocess.DEVNULL)
    return receipt


def draws(bin_dir, folder):
    if importlib.util.find_spec("matplotlib") is None:
        print("not run: matplotlib is missing")
        return 77
    sweep = run_tool(bin_dir, folder, "fnx-prefill-sweep", "--lengths", "8,16", "--chunk-rows", "4,8", "--repeat", "2")
    pairs = run_tool(bin_dir, folder, "fnx-graph-ab", "--sequences", "1,2", "--context", "4", "--rounds", "2",
                     "--prompt-tokens", "8")
    heat = export_profile(bin_dir, folder)
    for receipt, arguments, picture in ((sweep, [], sweep.with_suffix(".png")),
                                        (heat, [], heat.with_suffix(".png")),
                                        (pairs, ["--out", Path(folder) / "ab.png"], Path(folder) / "ab.png")):
        run = plot(receipt, *arguments)
        assert run.returncode == 0, run.stderr
        assert run.stdout.strip() == str(picture), run.stdout
        data = picture.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20], "big") == 800, data[:24]
    run = plot(sweep, "--out", Path(folder) / "absent" / "x.png")
    assert run.returncode == 2 and "absent" in run.stderr, run.stderr
    return 0


def refuses(bin_dir, folder):
    sweep = run_tool(bin_dir, folder, "fnx-prefill-sweep", "--lengths", "8", "--chunk-rows", "8", "--repeat", "1")
    dry = run_tool(bin_dir, folder, "fnx-synth", "--dry-run")
    shadow = Path(folder) / "shadow"
    shadow.mkdir()
    (shadow / "matplotlib.py").write_text("raise ImportError('hidden')\n")
    (Path(folder) / "text").write_text("{}")
    for arguments, path, code, words in (([sweep], shadow, 4, "install python3-matplotlib"),
                                         ([dry], shadow, 2, "a receipt of fnx-synth without anything to draw"),
                                         ([Path(folder) / "text"], shadow, 2, "no fnx receipt"),
                                         ([Path(folder) / "none"], shadow, 2, "none"),
                                         ([], "", 2, "usage")):
        run = plot(*arguments, path=path)
        assert run.returncode == code, (arguments, run)
        assert words in run.stderr, run.stderr
    return 0


def main():
    bin_dir, check = Path(sys.argv[1]), {"draws": draws, "refuses": refuses}[sys.argv[2]]
    with tempfile.TemporaryDirectory() as folder:
        return check(bin_dir, folder)


if __name__ == "__main__":
    sys.exit(main())
