#!/usr/bin/env python3
"""scripts/kernel_resources.py must fail on records that the compiled kernels do not keep. Usage: TOOL LIBRARY"""
import pathlib
import re
import subprocess
import sys
import tempfile

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts/kernel_resources.py"


def run(listing, library):
    """Exit code and output with these records in the place of the tool's."""
    with tempfile.TemporaryDirectory() as folder:
        tool = pathlib.Path(folder) / "tool"
        tool.write_text("#!/bin/sh\ncat <<'END'\n" + listing + "\nEND\n")
        tool.chmod(0o755)
        result = subprocess.run([sys.executable, "-B", SCRIPT, tool, library], capture_output=True, text=True)
        return result.returncode, result.stdout


def main():
    tool, library = sys.argv[1:]
    listing = subprocess.run([tool, "--list"], check=True, capture_output=True, text=True).stdout
    assert run(listing, library)[0] == 0, "the records as they are"
    cases = {
        "a register limit of 8": (r"(symbol   combine_kernel: \d+ threads,) \d+", r"\1 8", "registers, at most 8"),
        "no static shared memory": (r"(symbol   exl3_units_kernel: .* registers,) \d+", r"\1 0",
                                    "bytes of static shared memory, at most 0"),
        "more shared memory than a block has": (r"(symbol   exl3_units_kernel: .*) \+ \d+", r"\1 + 101376",
                                                "bytes of shared memory, at most 101376"),
        "a kernel without a record": (r"symbol   combine_kernel:", "symbol   other_kernel:", "no record"),
        "a record without a kernel": (r"symbol   combine_kernel:", "symbol   other_kernel:",
                                      "no kernel named other_kernel"),
    }
    for name, (pattern, changed, wanted) in cases.items():
        spoilt, count = re.subn(pattern, changed, listing)
        code, out = run(spoilt, library)
        assert count > 0 and code == 1 and wanted in out, (name, count, code, out[-400:])
    with tempfile.NamedTemporaryFile() as empty:
        assert run(listing, empty.name)[0] == 77, "a library without kernels"
    print(f"{len(cases) + 2} cases")


if __name__ == "__main__":
    main()
