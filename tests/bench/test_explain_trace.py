"""Reading a profiler trace: phases, overlap and gaps, on traces made by hand."""

from typing import Any

import pytest

from ridgeline.bench.trace import Kernel, Spans, merge, occupation, read_trace


def kernel(start: float, end: float, stream: int = 7) -> Kernel:
    return Kernel(name="k", kind="kernel", start=start, duration=end - start, stream=stream)


def test_kernels_one_after_another_do_not_overlap() -> None:
    used = occupation([kernel(0, 10), kernel(10, 25), kernel(30, 40)])
    assert (used.elapsed, used.busy, used.overlapped, used.kernel_sum) == (40, 35, 0, 35)
    assert used.gaps == (5,)
    assert used.idle == 5
    assert used.overlap == 0


def test_kernels_of_two_streams_overlap() -> None:
    used = occupation([kernel(0, 10), kernel(5, 20, stream=8), kernel(6, 8, stream=9), kernel(26, 30)])
    assert (used.elapsed, used.busy, used.overlapped) == (30, 24, 5)
    assert used.overlap == pytest.approx(5 / 24)
    assert used.kernel_sum == 31
    assert used.gaps == (6,)
    assert used.kernels == 4


def test_gaps_come_longest_first_and_order_does_not_matter() -> None:
    used = occupation([kernel(100, 110), kernel(0, 10), kernel(13, 20)])
    assert used.gaps == (80, 3)
    assert used.idle == used.elapsed - used.busy == 83


def test_nothing_ran() -> None:
    used = occupation([])
    assert (used.elapsed, used.busy, used.overlap, used.gaps) == (0, 0, 0, ())


def test_intervals_are_joined() -> None:
    assert merge([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    spans = Spans([(0, 2), (5, 7)])
    assert [instant in spans for instant in (-1, 0, 2, 3, 5, 7, 8)] == [False, True, True, False, True, True, False]


MAIN, AUTOGRAD = 1, 2


class Trace:
    """A Chrome trace under construction: each operator launches one kernel 100 µs later."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.next = 1

    def mark(self, name: str, ts: float, dur: float, tid: int = MAIN, cat: str = "cpu_op") -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {}})

    def launch(self, operator: str, dims: list[list[int]], ts: float, *, name: str = "gemm", tid: int = MAIN) -> None:
        identity, self.next = self.next, self.next + 1
        self.mark(operator, ts, 4, tid)
        self.events[-1]["args"] = {"Input Dims": dims}
        self.mark("cudaLaunchKernel", ts + 1, 1, tid, "cuda_runtime")
        self.events[-1]["args"] = {"correlation": identity}
        self.mark(name, ts + 100, 3, 0, "kernel")
        self.events[-1]["args"] = {"correlation": identity, "stream": 7}

    def read(self) -> list[Kernel]:
        return read_trace({"traceEvents": [*self.events, {"ph": "M", "name": "process_name"}]})


def test_phases_follow_pytorchs_own_marks() -> None:
    trace = Trace()
    for start in (0, 1000):
        trace.mark("ProfilerStep#1", start, 900, cat="user_annotation")
        trace.launch("aten::mm", [[8, 4], [4, 2]], start + 10)
        trace.mark("autograd::engine::evaluate_function: MmBackward0", start + 300, 50, AUTOGRAD)
        trace.launch("aten::mm", [[8, 2], [2, 4]], start + 310, tid=AUTOGRAD)
        trace.launch("aten::_foreach_norm", [[8]], start + 500)
        trace.mark("Optimizer.step#AdamW.step", start + 600, 100, cat="user_annotation")
        trace.launch("aten::_fused_adamw_", [], start + 610)
    found = trace.read()
    assert [k.phase for k in found] == ["forward", "backward", "optimizer", "optimizer"] * 2
    assert [k.update for k in found] == [False, False, False, True] * 2
    assert found[0].operator == "aten::mm"
    assert found[0].shapes == ((8, 4), (4, 2))
    assert (found[0].start, found[0].duration, found[0].stream) == (110, 3, 7)


def test_the_innermost_running_operator_on_the_launching_thread_is_the_launcher() -> None:
    trace = Trace()
    trace.mark("aten::linear", 0, 50)
    trace.mark("aten::t", 2, 3)  # ended before the launch
    trace.mark("aten::mm", 0, 50, AUTOGRAD)  # runs meanwhile on another thread
    trace.launch("aten::addmm", [[4], [8, 4], [4, 2]], 10)
    trace.mark("cudaLaunchKernel", 40, 1, cat="cuda_runtime")
    trace.events[-1]["args"] = {"correlation": 77}
    trace.mark("triton_poi_fused_add_0", 140, 3, cat="kernel")
    trace.events[-1]["args"] = {"correlation": 77}
    trace.mark("cudaLaunchKernel", 60, 1, cat="cuda_driver")
    trace.events[-1]["args"] = {"correlation": 78}
    trace.mark("norm_forward_kernel", 160, 3, cat="kernel")
    trace.events[-1]["args"] = {"correlation": 78}
    assert [k.operator for k in trace.read()] == ["aten::addmm", "aten::linear", ""]


def test_a_launch_on_the_main_thread_during_backward_is_not_a_nodes() -> None:
    trace = Trace()
    trace.mark("ProfilerStep#1", 0, 900, cat="user_annotation")
    trace.mark("autograd::engine::evaluate_function: X", 300, 50, AUTOGRAD)
    trace.launch("aten::copy_", [[8]], 320, tid=MAIN)
    assert [k.phase for k in trace.read()] == ["forward"]


def test_annotations_on_the_cards_timeline_do_not_decide_phases() -> None:
    trace = Trace()
    trace.mark("ProfilerStep#1", 0, 900, cat="user_annotation")
    trace.mark("Optimizer.step#AdamW.step", 300, 100, cat="gpu_user_annotation")
    trace.launch("aten::mm", [[8, 4], [4, 2]], 320)
    assert [(k.phase, k.update) for k in trace.read()] == [("forward", False)]


def test_kernels_of_a_graph_have_no_phase_and_no_operator() -> None:
    trace = Trace()
    trace.mark("cudaGraphLaunch", 5, 1, cat="cuda_runtime")
    trace.events[-1]["args"] = {"correlation": 9}
    for start in (50, 60):
        trace.mark("gemm", start, 5, cat="kernel")
        trace.events[-1]["args"] = {"correlation": 9, "stream": 13}
    found = trace.read()
    assert [(k.phase, k.operator) for k in found] == [(None, "")] * 2
    assert occupation(found).gaps == (5,)


def test_copies_and_fills_are_read_and_shapes_that_are_no_shapes_are_left_out() -> None:
    trace = Trace()
    trace.launch("aten::add", [[8, 4], [], [[1], [2]]], 0)  # type: ignore[list-item]
    trace.mark("Memset (Device)", 200, 2, cat="gpu_memset")
    found = trace.read()
    assert found[0].shapes == ((8, 4),)
    assert [k.kind for k in found] == ["kernel", "gpu_memset"]
    assert found[1].phase is None
