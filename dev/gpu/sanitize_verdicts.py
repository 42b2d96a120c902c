"""What compute-sanitizer's reports say of each kernel: clean, a report whose reason is known, a report, no verdict."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")

ORDERS = "orders by one lane's arrival or bar.arrive, which the tool does not follow (controls: orders, twins)"
ONE_PHASE = "a barrier's phase that nobody needs to wait for (control: orders)"
UNREAD_SUMS = "sums of columns that no policy head has, read by nobody"
PADDING = "what fills a row up to 16 bytes, loaded with it and set to zero before it is used"
# (tool, kernel) → why the tool reports what is right; found by reading the reports, not by their being there
KNOWN = {
    ("racecheck", "attention_backward"): ORDERS,
    ("racecheck", "attention_plain_backward"): ORDERS,
    ("racecheck", "mlp_backward"): ORDERS,
    ("racecheck", "mlp_forward"): ORDERS,
    ("racecheck", "stationary"): ORDERS,
    ("synccheck", "attention_forward"): ONE_PHASE,
    ("initcheck", "column_sums_kernel"): UNREAD_SUMS,
    ("initcheck", "norm_backward_kernel"): PADDING,
    ("initcheck", "norm_forward_kernel"): PADDING,
}


def kernels():
    """The kernels of the package: those of Triton and the entry points of CUDA C++, as file:name."""
    found, ops = set(), ROOT / "src/ridgeline/ops"
    for file in ops.rglob("*.cu"):
        for text in file.read_text().split("__global__")[1:]:
            two = re.match(r"[^\n]*\n#if", text)  # a name for each branch
            head = text.split("#endif" if two else "{")[0]
            found |= {f"{file.relative_to(ops)}:{name}" for name in re.findall(r"(?<![\w:])([a-z]\w*)\(", head)}
    for file in ops.rglob("*.py"):
        names = re.findall(r"^@triton\.jit.*\ndef (\w+_kernel)\(", file.read_text(), re.M)
        found |= {f"{file.relative_to(ops)}:{name}" for name in names}
    return found


def names():
    """The kernels' names, as the tool knows them."""
    return {kernel.split(":")[1] for kernel in kernels()}


def read(text, code, ours):
    """What one process said.

    Args:
        text: its output.
        code: its exit status, or "timeout".
        ours: names of kernels; reports of others are counted as theirs.

    Returns:
        {"launched": {case: kernels}, "ended": cases after which the device was waited for, "reported": {kernel: how
        many reports name it}, "first": the first lines of the report, "died": why it ended early, or None}.
    """
    launched, ended, reported, case = {}, [], {}, None
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "CASE":
            case = rest
            launched[case] = []
        elif word == "LAUNCHED":
            launched[case].append(rest)
        elif word == "ENDED":
            ended.append(rest)
        elif word == "=========" and (at := re.search(r"\bat ([^+]+)\+0x", line)):
            name = at[1] if at[1] in ours else "another's kernel"
            reported[name] = reported.get(name, 0) + 1
        elif "Host API memory access error" in line:
            reported["a copy to the host"] = reported.get("a copy to the host", 0) + 1
    died = None
    if "SUMMARY" not in text:  # what the tool still had to say is not known
        ended = []
    if case not in ended:
        inner = re.search(r"Internal Sanitizer Error.*", text)
        died = inner[0] if inner else "timeout" if code == "timeout" else f"exit code {code}"
    report = [line.strip("= ").strip() for line in text.splitlines() if line.startswith("=====")]
    first = [line for line in report if line and not line.startswith("COMPUTE-SANITIZER")][:6]
    if died:
        first += text.strip().splitlines()[-3:]
    return {"launched": launched, "ended": ended, "reported": reported, "first": first, "died": died}


def verdict(tool, kernel, runs):
    """(word, why) of one kernel under one tool, over what the processes of that tool said (a list of `read`'s)."""
    if any(run["reported"].get(kernel) for run in runs):
        why = KNOWN.get((tool, kernel))
        return ("known", why) if why else ("REPORT", "to be read")
    cases = [(case, case in run["ended"]) for run in runs for case, found in run["launched"].items() if kernel in found]
    open_cases = [case for case, ended in cases if not ended]
    if not any(ended for _, ended in cases):
        return "none", f"not ended: {' '.join(open_cases)}" if cases else "launched by no run"
    return "clean", f"but not ended: {' '.join(open_cases)}" if open_cases else ""


def table(found, wanted):
    """Lines: a tool's counts, each verdict that is not clean with its reason, then a line a kernel.

    Args:
        found: {tool: [what `read` returned, …]}, without controls.
        wanted: the kernels' names.
    """
    verdicts = {
        tool: {kernel: verdict(tool, kernel, runs) for kernel in sorted(wanted)} for tool, runs in found.items()
    }
    lines = []
    for tool, each in verdicts.items():
        words = [word for word, _ in each.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in ("clean", "known", "REPORT", "none"))
        lines.append(f"{tool}: of {len(words)} kernels {counts}")
        reasons = {}
        for kernel, reason in each.items():
            reasons.setdefault(reason, []).append(kernel)
        lines += [f"    {word}, {why}: {' '.join(names)}" for (word, why), names in sorted(reasons.items()) if why]
    lines.append(f"{'kernel':32} " + " ".join(f"{tool:9}" for tool in verdicts))
    lines += [f"{k:32} " + " ".join(f"{verdicts[tool][k][0]:9}" for tool in verdicts) for k in sorted(wanted)]
    return lines
