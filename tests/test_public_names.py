"""The package's public names: all there, and none imported before it is asked for."""

import subprocess
import sys

import ridgeline


def test_every_public_name_resolves_to_what_its_home_defines() -> None:
    assert sorted(ridgeline.__all__) == sorted(ridgeline._HOMES)
    for name in ridgeline.__all__:
        value = getattr(ridgeline, name)
        assert getattr(value, "__name__", name) == name


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, ridgeline; print(sorted(m for m in sys.modules if m.startswith('ridgeline.') or m == 'torch'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(ridgeline, "TrainSteps")
