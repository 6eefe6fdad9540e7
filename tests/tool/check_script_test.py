"""Tests of scripts/check.sh on small trees with one violation each."""
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "check.sh"


class CheckScript(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "scripts").mkdir()
            shutil.copy(SCRIPT, root / "scripts")
            for name, content in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(content)
            return subprocess.run([root / "scripts" / "check.sh"], capture_output=True, text=True)

    def test_accepts_a_clean_tree(self):
        run = self.check({"apps/fnx_a.cpp": '#include "libcore/a/b.h"\n', "libcore/a/b.h": '#include "kernels/c.h"\n',
                          "libcore/dist/d.cpp": "#include <cuda_runtime.h>\n", "kernels/c.h": "#include <vector>\n"})
        self.assertEqual(run.returncode, 0, run.stdout)

    def test_names_file_and_line_of_each_violation(self):
        cases = {
            "kernels/a.h": ('\n#include "libcore/a/b.h"\n', "kernels/a.h:2: kernels include upwards"),
            "kernels/cpu/a.cpp": ("#include <fmt/format.h>\n", "kernels/cpu/a.cpp:1: kernels include no JSON"),
            "libcore/a/b.cpp": ('#include "apps/x.h"\n', "libcore/a/b.cpp:1: libcore includes upwards"),
            "libcore/a/c.cpp": ('#include "kernels/cpu/x.h"\n', "libcore/a/c.cpp:1: libcore includes the inside"),
            "libcore/a/d.cpp": ("#include <cuda_runtime.h>\n", "libcore/a/d.cpp:1: CUDA headers stay"),
            "apps/fnx_a.cpp": ('#include "kernels/cuda/x.h"\n', "apps/fnx_a.cpp:1: an app includes the inside"),
            "libcore/a/long.cpp": ("\n" * 601, "libcore/a/long.cpp:601: file is longer than 600 lines"),
            "README.md": ("\n" * 601, "README.md:601: file is longer than 600 lines"),
            "libcore/a/raw.cpp": ("int* p = new int[4];\n", "libcore/a/raw.cpp:1: raw allocation"),
            "kernels/cuda/raw.cu": ("void f() {\n  cudaMallocAsync(&p, 4, s);\n}\n", "kernels/cuda/raw.cu:2: raw allocation"),
            "scripts/path.py": ("x = '/ho" "me/me/x'\n", "scripts/path.py:1: path of one machine"),
            "scripts/broken.sh": ("if true\n", "scripts/broken.sh:2:"),
        }
        for name, (content, expected) in cases.items():
            with self.subTest(name):
                run = self.check({name: content})
                self.assertEqual(run.returncode, 1, run.stdout)
                self.assertIn(expected, run.stdout)


if __name__ == "__main__":
    unittest.main()
