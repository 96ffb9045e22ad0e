"""Tests on a real device: skipped without a GPU, or without any of a module's ``DEVICES``."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def device(request):
    devices = getattr(request.module, "DEVICES", ("gpu",))
    if jax.default_backend() not in devices:
        pytest.skip(f"needs a {' or '.join(devices)} and JSPEED_TEST_GPU=1")
