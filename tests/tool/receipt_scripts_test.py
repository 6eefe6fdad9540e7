"""Tests of scripts/receipt_validate.py and receipt_diff.py. Usage: receipt_scripts_test.py PATH-OF-FNX-FRAME-PROBE"""
import copy
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
PROBE = sys.argv.pop(1)


def script(name, *arguments):
    return subprocess.run([sys.executable, SCRIPTS / name, *map(str, arguments)], capture_output=True, text=True)


class ReceiptScripts(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.count = 0

    def probe(self, *arguments):
        out = subprocess.run([PROBE, "--receipt", "-", *arguments], capture_output=True, text=True).stdout
        return json.loads(out)

    def file(self, receipt):
        self.count += 1
        path = Path(self.folder.name) / f"{self.count}.receipt.json"
        path.write_text(receipt if isinstance(receipt, str) else json.dumps(receipt, ensure_ascii=False))
        return path

    def refused(self, receipt, part):
        run = script("receipt_validate.py", self.file(receipt))
        self.assertEqual(run.returncode, 1, run.stdout + run.stderr)
        self.assertIn(part, run.stdout)

    def test_validate_accepts_what_the_tools_write(self):
        files = [self.file(self.probe(*words)) for words in
                 (["--text", 'a "q" \\ \u00e9 \U0001f600 \x01\n'], ["--mode", "gate"], ["--mode", "odd-values"], ["--mode", "bug"])]
        run = script("receipt_validate.py", *files)
        self.assertEqual(run.returncode, 0, run.stdout)

    def test_validate_refuses_what_contradicts_itself(self):
        good = self.probe("--mode", "odd-values")
        cases = []

        def case(part, change):
            receipt = copy.deepcopy(good)
            change(receipt)
            cases.append((receipt, part))

        case("result_digest", lambda r: r["result"].update(text="other"))
        case("outcome", lambda r: r["run"].update(exit_code=0))
        case("contradicts", lambda r: r["gates"][0].update(outcome="pass"))
        case("median", lambda r: r["measurements"][1].update(median=4.0))
        case("beyond 2^53", lambda r: r["evidence"].update(count=2**60))
        case("absolute path", lambda r: r["invocation"]["argv"].append("/srv/me/x"))
        case("newer", lambda r: r["schema"].update(version="2.0"))
        case("Additional properties", lambda r: r.update(extra=1))
        case("order", lambda r: r.update(schema=r.pop("schema")))
        case("'tool' is a required property", lambda r: r.pop("tool"))
        for receipt, part in cases:
            with self.subTest(part):
                self.refused(receipt, part)
        self.refused(json.dumps(good).replace('"nan": null', '"nan": NaN', 1), "no JSON number")
        self.refused('{"schema": {}, "schema": {}}', "duplicate key")

    def test_validate_exits_2_without_arguments(self):
        self.assertEqual(script("receipt_validate.py").returncode, 2)
        self.assertEqual(script("receipt_validate.py", "--folder", self.folder.name).returncode, 1)

    def test_diff_is_equal_for_two_runs(self):
        a, b = self.file(self.probe("--text", "x")), self.file(self.probe("--text", "x"))
        run = script("receipt_diff.py", a, b)
        self.assertEqual((run.returncode, run.stdout), (0, "equal\n"))
        self.assertEqual(script("receipt_diff.py", "--all", a, a).returncode, 0)

    def test_diff_names_the_path_of_a_difference(self):
        a, b = self.probe("--text", "x"), self.probe("--text", "y")
        run = script("receipt_diff.py", self.file(a), self.file(b))
        self.assertEqual(run.returncode, 1)
        self.assertIn("different: result.text: 'x' | 'y'", run.stdout)
        self.assertIn("different: requested.text: 'x' | 'y'", run.stdout)
        self.assertNotIn("run.", run.stdout)

    def test_diff_calls_a_missing_hash_unverified(self):
        a, b = self.probe(), self.probe()
        b["result_digest"] = None
        run = script("receipt_diff.py", self.file(a), self.file(b))
        self.assertEqual(run.returncode, 1)
        self.assertIn("unverified: result_digest", run.stdout)
        odd = self.file(self.probe("--mode", "odd-values"))
        run = script("receipt_diff.py", odd, odd)
        self.assertEqual(run.returncode, 1)
        self.assertIn("unverified: subjects[0].fingerprint", run.stdout)

    def test_diff_ignores_where_a_fingerprint_came_from(self):
        a = self.probe()
        mark = {"kind": "full", "algorithm": "xxh3-128", "digest": "0" * 32, "origin": "computed"}
        a["subjects"] = [{"role": "checkpoint", "name": "pack", "bytes": 1, "fingerprint": mark}]
        b = copy.deepcopy(a)
        b["subjects"][0]["fingerprint"]["origin"] = "cached"
        self.assertEqual(script("receipt_diff.py", self.file(a), self.file(b)).returncode, 0)
        self.assertEqual(script("receipt_diff.py", "--all", self.file(a), self.file(b)).returncode, 1)

    def test_diff_compares_gates_by_outcome(self):
        a = self.probe("--mode", "gate")
        b = copy.deepcopy(a)
        b["gates"][0].update(observed=5)
        self.assertEqual(script("receipt_diff.py", self.file(a), self.file(b)).returncode, 0)
        b["gates"][0].update(outcome="not_run")
        self.assertIn("gates.error", script("receipt_diff.py", self.file(a), self.file(b)).stdout)

    def test_diff_exits_2_when_a_file_is_unreadable(self):
        self.assertEqual(script("receipt_diff.py", "x").returncode, 2)
        self.assertEqual(script("receipt_diff.py", self.file("{"), self.file("{")).returncode, 2)


if __name__ == "__main__":
    unittest.main()
