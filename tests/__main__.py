"""Run the tests: `python3 -m tests [host] [plugin] [device]`; without a tier, host and plugin.

`host` needs nothing but Python. `plugin` needs a CPU plugin and fails without one. `device` needs an accelerator.
The last line reads `N passed, N failed, N skipped`; the exit code is 1 when anything failed or nothing ran.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import unittest

from tests.support import REPO

TIERS = ("host", "plugin", "device")


class _Result(unittest.TextTestResult):
    """Counts passes and remembers what each module took."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.passed = 0
        self.seconds: dict[str, float] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        self._begin = time.perf_counter()
        super().startTest(test)

    def stopTest(self, test: unittest.TestCase) -> None:
        module = type(test).__module__
        self.seconds[module] = self.seconds.get(module, 0.0) + time.perf_counter() - self._begin
        super().stopTest(test)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.passed += 1
        super().addSuccess(test)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests", description=__doc__)
    parser.add_argument("tiers", nargs="*", metavar="tier", default=["host", "plugin"])
    tiers = parser.parse_args().tiers
    for tier in tiers:
        if tier not in TIERS:
            parser.error(f"no tier {tier!r}: name some of {', '.join(TIERS)}")
    # A shell that starts the tests in the background leaves SIGINT ignored, and every child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = unittest.TestLoader()
    suite = unittest.TestSuite(
        loader.discover(str(REPO / "tests" / tier), top_level_dir=str(REPO)) for tier in dict.fromkeys(tiers)
    )
    runner = unittest.TextTestRunner(resultclass=_Result, verbosity=1, warnings="default")
    result = runner.run(suite)
    if not isinstance(result, _Result):
        raise TypeError("the runner did not make its result class")
    for module, seconds in sorted(result.seconds.items(), key=lambda item: -item[1])[:8]:
        print(f"{seconds:7.1f} s  {module}")
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    print(f"{result.passed} passed, {failed} failed, {len(result.skipped)} skipped")
    return 0 if result.passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
