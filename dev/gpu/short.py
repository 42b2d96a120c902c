"""A pytest plugin: one line a test, as soon as it is known, with the reason of a failure.  pytest -p short -q -q --tb=no"""


def pytest_runtest_logreport(report):
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = " ".join((crash.message if crash else str(report.longrepr)).split())[:170]
    print(f"{report.outcome[:4]} {report.duration:5.1f} s {report.nodeid.split('::')[-1][:70]} {reason}", flush=True)
