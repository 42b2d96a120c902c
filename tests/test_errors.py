"""The sentences that errors are made of."""

import pytest

from ridgeline.errors import (
    MissingExtraError,
    OutOfMemoryError,
    RidgelineError,
    UnsupportedError,
    WorkerError,
    enough_memory,
    nearest,
    reason,
    require,
)


def test_a_mistyped_name_is_told_its_neighbours_or_all_that_are_known():
    known = ("gpt2-c256", "gpt2-124m", "fast-c256", "hal-20m", "hal-5m")
    assert nearest("hal-2m", known, "preset") == "unknown preset 'hal-2m'; did you mean hal-20m or hal-5m or fast-c256?"
    assert nearest("gtp2", known, "preset") == "unknown preset 'gtp2'; did you mean gpt2-c256 or gpt2-124m?"
    assert nearest("xyz", ("b", "a"), "verb") == "unknown verb 'xyz'; known: a, b"
    assert nearest(None, ("b", "a"), "verb") == "unknown verb None; known: a, b"
    assert nearest("aaaa", ["aaab", "aaac", "aaad", "aaae"], "x").count(" or ") == 2


def test_an_operating_systems_reason_comes_without_its_number_and_path():
    assert reason(OSError(28, "No space left on device", "/a/file")) == "No space left on device"
    assert reason(OSError("closed")) == "closed"
    assert reason(ValueError("not a number")) == "not a number"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
    ],
    ids=repr,
)
def test_every_way_to_say_that_memory_ran_out_becomes_one_sentence(error):
    with pytest.raises(OutOfMemoryError) as caught, enough_memory("take a smaller batch"):
        raise error
    assert str(caught.value) == "there is not enough memory; take a smaller batch"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), WorkerError("process 3 ran out of memory"), KeyError("memory")], ids=repr
)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, enough_memory("take a smaller batch"):
        raise error
    assert caught.value is error


def test_a_missing_package_names_the_extra_that_brings_it():
    assert require("json", "games").loads("1") == 1
    with pytest.raises(MissingExtraError, match=r"^no_such_module is not installed; .*: pip install '\.\[games\]'$"):
        require("no_such_module", "games")


def test_errors_are_also_what_python_calls_them():
    assert issubclass(UnsupportedError, RidgelineError)
    assert issubclass(UnsupportedError, ValueError)
    assert issubclass(MissingExtraError, ImportError)
    assert issubclass(WorkerError, RuntimeError)
